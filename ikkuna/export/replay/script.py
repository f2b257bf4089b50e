"""Finds the function of a script that builds what a replay needs."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ikkuna.errors import ConfigError

__all__ = ["arguments_of_script"]

_NAMES = ("model", "loss", "optimizer", "step", "rules")


def arguments_of_script(reference: str) -> dict[str, Any]:
    """Return the arguments of `replay` that a function of a script returns.

    Parameters
    ----------
    reference : str
        ``module:function`` or ``path/to/script.py:function``.  The function takes no argument, and returns
        the model, a tuple ``(model, loss, optimizer)``, or a dict with the names of the arguments.

    Raises
    ------
    ConfigError
        If there is no such function, or if it returns something else.
    """
    made = _function(reference)()
    if isinstance(made, Mapping):
        if unknown := made.keys() - set(_NAMES):
            raise ConfigError(f"{reference} returns {sorted(map(str, unknown))[0]!r}; known are {', '.join(_NAMES)}")
        found = dict(made)
    else:
        found = dict(zip(_NAMES, made if isinstance(made, tuple) else (made,), strict=False))
    if "model" not in found:
        raise ConfigError(f"{reference} returns no model")
    return found


def _function(reference: str) -> Callable[[], Any]:
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise ConfigError(f"--script needs module:function or script.py:function, got {reference!r}")
    if place.endswith(".py"):
        path = Path(place)
        if not path.is_file():
            raise ConfigError(f"there is no script '{path}'")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        sys.path.insert(0, str(path.parent.resolve()))
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, str(Path.cwd()))
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise ConfigError(f"the module of {reference!r} cannot be imported: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{place} has no function {name!r}")
    found: Callable[[], Any] = function
    return found
