"""Losses that can be called once more while a model trains, because they change nothing but themselves."""

from __future__ import annotations

import builtins
import dis
from collections.abc import Callable, Iterator
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodDescriptorType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

_PACKAGES = ("torch", "math")
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_BUILTINS = (
    *(
        "abs",
        "all",
        "any",
        "bool",
        "dict",
        "divmod",
        "enumerate",
        "filter",
        "float",
        "getattr",
        "hasattr",
        "int",
        "isinstance",
    ),
    *(
        "len",
        "list",
        "map",
        "max",
        "min",
        "pow",
        "range",
        "reversed",
        "round",
        "set",
        "slice",
        "sorted",
        "str",
        "sum",
        "super",
    ),
    *("tuple", "type", "zip", "Exception", "ValueError", "TypeError", "RuntimeError", "AssertionError"),
)
_CHANGES = ("STORE_GLOBAL", "DELETE_GLOBAL", "IMPORT_NAME")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def why_impure(loss: Callable[..., Any]) -> str:
    """Return what a loss refers to that a further call could change, in a sentence; empty if there is nothing.

    The functions of the loss, and those that they call, may refer to functions and modules of torch and to constants only.
    A loss with parameters is refused, because it contains a model.

    Examples
    --------
    >>> why_impure(nn.CrossEntropyLoss()), why_impure(lambda output, y: (output - y).abs().mean())
    ('', '')
    >>> why_impure(lambda output, y: print(output))
    'the loss refers to print'
    """
    try:
        reference = next(_outside(loss, "itself", set()), "")
    except RecursionError:
        return "the loss refers to too much"
    return f"the loss refers to {reference}" if reference else ""


def _outside(value: Any, name: str, seen: set[int]) -> Iterator[str]:
    """Yield the names of what a value refers to that is neither of torch nor a constant."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        yield from _outside_module(value, name, seen)
    elif isinstance(value, partial):
        yield from _outside(value.func, name, seen)
        for part in (*value.args, *value.keywords.values()):
            if not (isinstance(part, Tensor) and _is_of_packages(value.func)):
                yield from _outside(part, name, seen)
    elif isinstance(value, tuple | frozenset):
        for part in value:
            yield from _outside(part, name, seen)
    elif isinstance(value, _CONSTANTS) or _is_of_packages(value):
        return
    elif isinstance(value, FunctionType):
        yield from _outside_function(value, seen)
    else:
        yield name


def _outside_module(module: nn.Module, name: str, seen: set[int]) -> Iterator[str]:
    if any(True for _ in module.parameters()):
        yield "parameters of its own"
    for each in module.modules():
        # a hook of ikkuna is left out in copies
        hooks = (hook for table in _HOOKS for hook in vars(each)[table].values())
        if any(not type(hook).__module__.startswith("ikkuna.") for hook in hooks):
            yield "hooks"
        if _is_of_packages(type(each)):
            continue
        containers = vars(nn.Module()).keys()
        for key, value in vars(each).items():
            if key not in containers and not isinstance(value, Tensor):
                yield from _outside(value, f"its attribute {key}", seen)
        for function in _methods(type(each)):
            yield from _outside_function(function, seen)


def _methods(cls: type) -> Iterator[FunctionType]:
    """Yield the user's methods and properties of a class, without those that only its construction calls."""
    for each in cls.__mro__:
        if _is_of_packages(each):
            break
        for name, value in vars(each).items():
            function = getattr(value, "fget", None) or getattr(value, "__func__", value)
            if name != "__init__" and isinstance(function, FunctionType):
                yield function


def _outside_function(function: FunctionType, seen: set[int]) -> Iterator[str]:
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    for name, cell in cells.items():
        if name != "__class__":
            yield from _outside(cell.cell_contents, name, seen)
    for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield from _outside(default, "a default", seen)
    for code in _codes(function.__code__):
        for instruction in dis.get_instructions(code):
            what, name = instruction.opname, instruction.argval
            if what in _CHANGES or (what == "STORE_DEREF" and name in cells):
                yield str(name)
            elif what in ("LOAD_GLOBAL", "LOAD_NAME"):
                if name in function.__globals__:
                    yield from _outside(function.__globals__[name], name, seen)
                elif name not in _BUILTINS and hasattr(builtins, name):
                    yield name


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _is_of_packages(value: Any) -> bool:
    """Return whether a function, class or module belongs to torch or to mathematics."""
    if isinstance(value, ModuleType):
        name: Any = value.__name__
    elif isinstance(value, type | FunctionType):
        name = value.__module__
    elif isinstance(value, BuiltinFunctionType | MethodDescriptorType):
        owner = getattr(value, "__self__", None) or getattr(value, "__objclass__", None)
        name = (
            getattr(value, "__module__", None) or getattr(owner, "__module__", None) or getattr(owner, "__name__", "")
        )
    else:
        return False
    return name.partition(".")[0] in _PACKAGES
