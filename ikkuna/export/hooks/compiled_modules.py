"""Recognises modules that were compiled before the exporter was attached."""

import gc
from collections.abc import Iterable
from types import CodeType
from weakref import WeakKeyDictionary

from torch import nn

from ikkuna.torch_internals import compiled_programs, drop_programs

__all__ = ["CompiledModules"]


class CompiledModules:
    """Recognises modules that were compiled, by ``module.compile()`` or by a wrapper around them.

    The compiler keeps its programs with the code of ``forward``, so all instances of a class share them.
    A program alone therefore shows that an instance of the class was compiled; the instance has a compiled call of its own,
    or a wrapper refers to it, which only the garbage collector finds.
    A search is repeated only if the compiler has made further programs.
    """

    def __init__(self) -> None:
        self._searched: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()

    def includes(self, modules: Iterable[nn.Module]) -> bool:
        """Return whether one of the modules was compiled and called."""
        suspects = []
        counts: dict[type[nn.Module], int] = {}
        for module in modules:
            cls = type(module)
            if cls not in counts:
                code = _code(module)
                counts[cls] = 0 if code is None else len(compiled_programs(code))
            if not (count := counts[cls]):
                continue
            if module._compiled_call_impl is not None:
                return True
            if self._searched.get(module) != count:
                self._searched[module] = count
                suspects.append(module)
        if not suspects or not _have_wrapper(suspects):
            return False
        for module in suspects:
            self._searched.pop(module, None)
        return True

    def drop_programs_of_others(self, modules: Iterable[nn.Module]) -> None:
        """Drop the programs that other instances of the modules' classes have left.

        Otherwise a module that is compiled later could use one of them, which contains no measurement.
        """
        of_class = {type(module): module for module in modules}
        for code in {code for module in of_class.values() if (code := _code(module)) is not None}:
            if compiled_programs(code):
                drop_programs(code)


def _code(module: nn.Module) -> CodeType | None:
    return getattr(type(module).forward, "__code__", None)


def _have_wrapper(modules: list[nn.Module]) -> bool:
    """Return whether a wrapper of the compiler, which keeps its module as ``_orig_mod``, refers to one of the modules."""
    wrapped = (each.get("_orig_mod") for each in gc.get_referrers(*modules) if isinstance(each, dict))
    return any(found is module for found in wrapped if found is not None for module in modules)
