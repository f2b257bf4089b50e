"""The hyper-parameters of a run as plain values."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from ikkuna.errors import ConfigTypeError
from ikkuna.logger import log
from ikkuna.signal_handlers import raise_users_exception

__all__ = ["ConfigValue", "config_table", "json_config", "plain_config"]

ConfigValue = None | bool | int | float | str
_LIMIT = 1000  # characters of a value


def plain_config(config: Any) -> dict[str, ConfigValue]:
    """Return hyper-parameters as a flat dict of numbers, strings and ``None``.

    Keys of nested mappings are joined by dots.
    A list of plain values becomes its text; any other value becomes its ``repr``, and one line of the log names these.

    Parameters
    ----------
    config : dict or object
        For example a dict, an `argparse.Namespace`, or a configuration object with ``to_dict()``.

    Raises
    ------
    ConfigTypeError
        If `config` is none of these.

    Examples
    --------
    >>> plain_config({"lr": 0.1, "optimizer": {"name": "adam", "betas": (0.9, 0.99)}})
    {'lr': 0.1, 'optimizer.name': 'adam', 'optimizer.betas': '(0.9, 0.99)'}
    """
    mapping = _mapping(config)
    if mapping is None:
        raise ConfigTypeError(f"config needs a dict or an object with attributes, got {type(config).__name__}")
    flat: dict[str, ConfigValue] = {}
    unknown: list[str] = []
    _flatten(mapping, "", flat, unknown, ())
    if unknown:
        log.info("config: stored as text: %s", ", ".join(unknown))
    return flat


def _mapping(config: Any) -> Mapping[Any, Any] | None:
    if isinstance(config, Mapping):
        return config
    if isinstance(config, type | str | bytes | int | float | list | tuple | set) or config is None:
        return None
    if dataclasses.is_dataclass(config):
        return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    if callable(to_dict := getattr(config, "to_dict", None)):
        found = to_dict()
        return found if isinstance(found, Mapping) else None
    return getattr(config, "__dict__", None)


def _flatten(
    mapping: Mapping[Any, Any], prefix: str, flat: dict[str, ConfigValue], unknown: list[str], around: tuple[int, ...]
) -> None:
    for key, value in list(mapping.items()):
        name = f"{prefix}{key}"
        inner = value if isinstance(value, Mapping) else None
        if inner is None and dataclasses.is_dataclass(value) and not isinstance(value, type):
            inner = _mapping(value)
        if inner and id(value) not in around:
            _flatten(inner, f"{name}.", flat, unknown, (*around, id(value)))
        else:
            flat[name] = _plain(name, value, unknown)


def _plain(name: str, value: Any, unknown: list[str]) -> ConfigValue:
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a number of numpy or torch
        value = _attempt(value.item, value)
    if value is None or type(value) in (bool, int, float):
        return value  # type: ignore[no-any-return]
    if isinstance(value, str):
        return str(value)[:_LIMIT]
    if isinstance(value, list | tuple) and all(
        item is None or isinstance(item, bool | int | float | str) for item in value
    ):
        return repr(value)[:_LIMIT]
    unknown.append(name)
    return str(_attempt(lambda: repr(value), f"<{type(value).__name__}>"))[:_LIMIT]


def _attempt(function: Any, otherwise: Any) -> Any:
    """Return the result of a function of the user's value, or `otherwise` if it raises."""
    try:
        return function()
    except Exception as error:
        raise_users_exception(error)
        return otherwise


def config_table(config: Mapping[str, ConfigValue]) -> str:
    """Return a Markdown table of hyper-parameters.

    Examples
    --------
    >>> print(config_table({"lr": 0.1}))
    | name | value |
    |:--|:--|
    | lr | 0.1 |
    """
    rows = [(str(name), str(value)) for name, value in config.items()]
    lines = ["| name | value |", "|:--|:--|"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def json_config(config: Mapping[str, ConfigValue]) -> dict[str, ConfigValue]:
    """Return hyper-parameters for JSON, in which NaN and infinities are strings."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in config.items()
    }
