"""Find the modules of a model by position, name, part of a name, class or identity."""

import difflib
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from ikkuna.modules import class_name, name_of, named_children, named_modules, unwrap

__all__ = ["LayerId", "find_layer", "find_layers", "leaves"]

LayerId = int | str | nn.Module
_log = logging.getLogger(__name__)


def leaves(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules without children, by name; parametrisations do not count as children."""
    return {name: module for name, module in named_modules(model) if next(named_children(module), None) is None}


def find_layers(model: nn.Module, layers: LayerId | Sequence[LayerId]) -> list[tuple[str, nn.Module]]:
    """Return ``(name, module)`` for each of `layers`, in the given order; ``'*'`` means every leaf.

    Raises
    ------
    KeyError
        If a layer is not found (see :func:`find_layer`).
    """
    if isinstance(layers, str) and layers == "*":
        return list(leaves(model).items())
    if isinstance(layers, int | str | nn.Module) or not isinstance(layers, Iterable):
        return [find_layer(model, layers)]
    return [find_layer(model, layer) for layer in layers]


def find_layer(model: nn.Module, layer: LayerId) -> tuple[str, nn.Module]:
    """Return the name and the module that `layer` refers to.

    Parameters
    ----------
    model : nn.Module
        The model; wrappers are skipped.
    layer : int, str or nn.Module
        A number is the position among the leaves, from 0, or from the end if negative.  A string is the full name of a
        module, or else the end of a name, a part of a name, or a part of a class name (case-insensitive).  If several
        modules match, the first one is used and a warning is logged.

    Raises
    ------
    KeyError
        If nothing matches; the message lists candidates.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.LSTM(3, 4))
    >>> find_layer(model, "lstm")[0], find_layer(model, 1)[0]
    ('2', '1')
    """
    if isinstance(layer, nn.Module):
        return name_of(model, layer), unwrap(layer)
    if isinstance(layer, bool) or not isinstance(layer, int | str):
        raise KeyError(f"a layer must be an int, a str or a module, got {type(layer).__name__}")
    if isinstance(layer, int):
        return _at(model, layer)
    modules = dict(named_modules(model))
    if layer in modules and layer:
        return layer, modules[layer]
    matching = _matching(modules, layer)
    if not matching:
        raise KeyError(_unknown(model, layer, modules))
    if len(matching) > 1:
        _log.warning("several layers match %r (%s); the first one is used", layer, ", ".join(matching[:5]))
    return matching[0], modules[matching[0]]


def _matching(modules: dict[str, nn.Module], text: str) -> list[str]:
    names = [name for name in modules if name]
    tests: tuple[Any, ...] = (
        lambda name: name.endswith(f".{text}"),
        lambda name: text in name,
        lambda name: text.lower() in class_name(modules[name]).lower(),
    )
    for test in tests:
        if matching := [name for name in names if test(name)]:
            return matching
    root = class_name(modules[""]).lower()
    return [""] if text and text.lower() in root else []


def _at(model: nn.Module, position: int) -> tuple[str, nn.Module]:
    found = list(leaves(model).items())
    if not -len(found) <= position < len(found):
        known = ", ".join(f"{i}: {name or class_name(module)}" for i, (name, module) in enumerate(found[:20]))
        raise KeyError(f"no layer {position}; the model has {len(found)}: {known}")
    return found[position]


def _unknown(model: nn.Module, text: str, modules: dict[str, nn.Module]) -> str:
    known = [f"{name} ({class_name(module)})" for name, module in leaves(model).items()]
    close = difflib.get_close_matches(text, [name for name in modules if name], n=3, cutoff=0.5)
    hint = f"close: {', '.join(close)}; " if close else ""
    more = f" and {len(known) - 20} more" if len(known) > 20 else ""
    return f"no layer {text!r} in {class_name(model)}; {hint}available: {', '.join(known[:20])}{more}"
