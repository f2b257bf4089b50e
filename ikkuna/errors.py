"""The exceptions that ikkuna raises at set-up; none of the tree below reaches a running training loop.

::

    IkkunaError
    ├── ConfigError(ValueError)         an argument has a value that cannot be used
    │   ├── ConfigTypeError(TypeError)  an argument has the wrong type
    │   └── UnknownKindError            no exporter or subscriber publishes this kind
    ├── ClosedError(RuntimeError)       an exporter or run was used after close()
    ├── PluginError(ImportError)        a plugin could not be loaded, or is no subclass of the expected class
    ├── LogDirError(OSError)            the log directory cannot be created or written
    ├── DumpError(ValueError)           a dump of the flight recorder is damaged, or does not fit the model
    └── SnapshotError(ValueError)       a snapshot file is damaged or unsafe

`StopTraining` is raised in a training loop, but only if ``stop=`` asks for it.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import TypeGuard

from ikkuna.printable import printable

__all__ = [
    "ClosedError",
    "ConfigError",
    "ConfigTypeError",
    "DumpError",
    "IkkunaError",
    "LogDirError",
    "PluginError",
    "SnapshotError",
    "StopTraining",
    "UnknownKindError",
    "is_integer",
    "nearest_name",
    "unknown_name",
]


class IkkunaError(Exception):
    """The base class of the exceptions of ikkuna."""

    def __str__(self) -> str:
        return printable(super().__str__(), multiline=True)  # it may contain names from a file


class ConfigError(IkkunaError, ValueError):
    """An argument has a value that cannot be used."""


class ConfigTypeError(ConfigError, TypeError):
    """An argument has the wrong type."""


class UnknownKindError(ConfigError):
    """No exporter or subscriber publishes this kind."""


class ClosedError(IkkunaError, RuntimeError):
    """An exporter or a run was used after ``close()``."""


class PluginError(IkkunaError, ImportError):
    """A plugin could not be loaded, or is no subclass of the class that its entry point stands for."""


class LogDirError(IkkunaError, OSError):
    """The log directory cannot be created or written."""


class DumpError(IkkunaError, ValueError):
    """A dump of the flight recorder is damaged, lacks what is needed, or does not fit the model."""


class SnapshotError(IkkunaError, ValueError):
    """A snapshot file is damaged, or reading it would execute code."""


class StopTraining(BaseException):
    """Raised at the end of an optimizer's step when a rule has found a mistake, only if ``stop=`` asks for it.

    It is not an `Exception`, so that ``except Exception`` in a training loop does not swallow it.

    Parameters
    ----------
    finding : object
        The `ikkuna.diagnosis.Finding`.

    Examples
    --------
    >>> try:
    ...     raise StopTraining("error: diverges at step 30: The loss grows.")
    ... except StopTraining as stop:
    ...     print(stop.finding)
    error: diverges at step 30: The loss grows.
    """

    def __init__(self, finding: object) -> None:
        super().__init__(str(finding))
        self.finding = finding


def is_integer(value: object, least: int) -> TypeGuard[int]:
    """Return whether an argument is an int, but no bool, of at least a value.

    Examples
    --------
    >>> is_integer(1, 1), is_integer(0, 1), is_integer(True, 1), is_integer(1.0, 1)
    (True, False, False, False)
    """
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the name that was probably meant: the most similar one, or else one that begins similarly or contains it.

    Upper and lower case are the same.

    Examples
    --------
    >>> nearest_name("defualt", ["default", "full"]), nearest_name("NORM", ["NormSubscriber"]), nearest_name("x", ["y"])
    ('default', 'NormSubscriber', None)
    """
    lower = {each.lower(): each for each in known}
    wanted = name.lower()
    if near := get_close_matches(wanted, lower, 1):
        return lower[near[0]]
    if len(wanted) <= 2:
        return None
    begins = {each[: len(wanted)]: each for each in sorted(lower, key=len, reverse=True)}
    if near := get_close_matches(wanted, begins, 1, 0.75):
        return lower[begins[near[0]]]
    parts = [each for each in lower if wanted in each]
    return lower[min(parts, key=len)] if parts else None


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """Return the text of an error about an unknown name.

    Parameters
    ----------
    what : str
        What has the name, such as ``"preset"``.
    name : str
        The unknown name.
    known : iterable of str
        The names that exist.

    Examples
    --------
    >>> unknown_name("preset", "full", ["default"])
    "unknown preset 'full'; available: 'default'"
    >>> unknown_name("kind", "weigths", ["biases", "weights"])
    "unknown kind 'weigths'; did you mean 'weights'? available: 'biases', 'weights'"
    >>> unknown_name("subscriber", "norm", ["GlobalNormSubscriber", "NormSubscriber"])
    "unknown subscriber 'norm'; did you mean 'NormSubscriber'? available: 'GlobalNormSubscriber', 'NormSubscriber'"
    """
    known = tuple(known)
    near = nearest_name(name, known)
    hint = f" did you mean {near!r}?" if near else ""
    return f"unknown {what} {name!r};{hint} available: {', '.join(map(repr, known)) or 'none'}"
