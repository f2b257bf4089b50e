"""Imports timm without torchvision."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any, ClassVar

__all__ = ["import_timm"]

_NAME = "torchvision"


class _Name(type):
    """A class of which every public attribute exists."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Module(ModuleType):
    """A module in which every public name is a class."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        is_below = fullname.partition(".")[0] == _NAME
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if is_below else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def import_timm() -> Any:
    """Import timm where there is no torchvision, and return it; ``None`` if timm is not installed.

    timm imports torchvision, but its models do not need it: while it is imported, all classes of torchvision are empty.
    torchvision itself is built for one version of torch, and would replace the one that is tested.
    """
    if importlib.util.find_spec("timm") is None:
        return None
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        return importlib.import_module("timm")
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == _NAME]:
            del sys.modules[name]
