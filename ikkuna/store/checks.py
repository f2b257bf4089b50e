"""Checks of what a file contains, because a file may be damaged, or be made to harm its reader.

A check is a function of a value and of the name of its field.  It returns the value, or raises `ValueError` with that name.
"""

import reprlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

MAX_INT = 1 << 62
Check = Callable[[Any, str], Any]


def refused(place: str, expected: str, value: object) -> ValueError:
    """Return the error of a value that is not what is expected."""
    return ValueError(f"{place} must be {expected}, got {reprlib.repr(value)}")


def integer(low: int = 0, high: int = MAX_INT) -> Check:
    """Return a check of an int from `low` to `high`."""

    def check(value: Any, place: str) -> Any:
        if type(value) is not int or not low <= value <= high:
            raise refused(place, f"an int from {low} to {high}", value)
        return value

    return check


def number(value: Any, place: str) -> float:
    """Return a float; files of JSON have NaN and infinities as texts."""
    if (type(value) in (int, float) and abs(value) <= MAX_INT) or type(value) is float:
        return float(value)
    if value in ("nan", "inf", "-inf", "NaN", "Infinity", "-Infinity"):
        return float(value)
    raise refused(place, "a number", value)


def text(value: Any, place: str) -> str:
    """Check a text."""
    if not isinstance(value, str):
        raise refused(place, "a text", value)
    return value


def none(value: Any, place: str) -> None:
    """Check a value that is ``None``."""
    if value is not None:
        raise refused(place, "null", value)


def plain(value: Any, place: str) -> Any:
    """Check nothing more."""
    return value


def one_of(*checks: Check) -> Check:
    """Return a check of a value that one of several checks accepts; the error is that of the last one."""

    def check(value: Any, place: str) -> Any:
        for each in checks[:-1]:
            try:
                return each(value, place)
            except ValueError:
                continue
        return checks[-1](value, place)

    return check


def list_of(item: Check) -> Check:
    """Return a check of a list, and of each of its items."""

    def check(value: Any, place: str) -> Any:
        if not isinstance(value, list | tuple):
            raise refused(place, "a list", value)
        return [item(each, f"{place}[{i}]") for i, each in enumerate(value)]

    return check


def pair_of(first: Check, second: Check) -> Check:
    """Return a check of a list of two items."""

    def check(value: Any, place: str) -> Any:
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise refused(place, "a list of two", value)
        return [first(value[0], f"{place}[0]"), second(value[1], f"{place}[1]")]

    return check


def map_of(item: Check, key: Check = text) -> Check:
    """Return a check of a dict, of its keys, and of its values."""

    def check(value: Any, place: str) -> Any:
        if not isinstance(value, dict):
            raise refused(place, "a dict", value)
        return {key(name, f"a key of {place}"): item(each, f"{place}[{name!r:.60}]") for name, each in value.items()}

    return check


def record(needed: Mapping[str, Check], others: Mapping[str, Check] | Check | None = None) -> Check:
    """Return a check of a dict of named fields.

    Parameters
    ----------
    needed : mapping of str to callable
        The fields that must be there.
    others : mapping of str to callable, or callable, optional
        Fields that may be there, or the check of all further fields.  By default they are not checked.
    """

    def check(value: Any, place: str) -> Any:
        if not isinstance(value, dict):
            raise refused(place, "a dict", value)
        if missing := [name for name in needed if name not in value]:
            raise ValueError(f"{place} has no field {missing[0]!r}")
        found = {}
        for name, each in value.items():
            known = needed.get(name) or (others.get(name, plain) if isinstance(others, Mapping) else others or plain)
            found[text(name, f"a field of {place}")] = known(each, f"{name!r:.60} of {place}")
        return found

    return check


def known_fields(entry: Any, place: str, fields: Mapping[str, Check], needed: Collection[str] = ()) -> dict[str, Any]:
    """Return the fields of a dict that are known, with tuples in place of lists.

    Raises
    ------
    ValueError
        If a field in `needed` is missing, or if a known one has a wrong type.
    """
    found = record({name: fields[name] for name in needed}, fields)(entry, place)
    return {name: _frozen(value) for name, value in found.items() if name in fields}


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
