"""The base class of backends, and how a backend is found by its name."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ikkuna.errors import ConfigError, ConfigTypeError, unknown_name
from ikkuna.store.finding import Finding
from ikkuna.store.names import Series, SeriesGroup
from ikkuna.store.run_directory import ConfigValue, config_table
from ikkuna.store.values import Image, Matrix, ModuleEntry
from ikkuna.support.plugins import load_plugin, plugin_names

GROUP = "ikkuna.backends"

SPELLINGS = {"tensorboard": "tb", "matplotlib": "mpl", "json": "jsonl"}
"""Other words for names of backends."""


class Backend(ABC):
    """Stores or displays values.

    A run opens a backend once, adds the values of one step after another, and commits each step.
    No method may block on disk or network except :meth:`flush` and :meth:`close`, which take a time limit.

    Attributes
    ----------
    level : int
        The level at which pictures that are not drawn in time are logged; a run with ``verbosity=0`` sets ``logging.INFO``.

    Examples
    --------
    >>> class Printer(Backend):
    ...     def add_scalar(self, series, value, step):
    ...         print(step, series.kind, series.name, value)
    >>> Printer().add_scalar(Series("weights_norm2", "fc"), 1.5, 10)
    10 weights_norm2 fc 1.5
    """

    level: int = logging.WARNING

    def open(self, directory: Path) -> None:  # noqa: B027 - most backends have nothing to open
        """Prepare to write below `directory`, which exists; raise `LogDirError` if that is impossible."""

    def open_later(self, make_directory: Callable[[], Path]) -> None:
        """Prepare to write below the directory that `make_directory` creates and returns.

        A run calls this method.  By default it creates the directory at once and calls :meth:`open`.
        Backends with a thread override it, because the disk may be slow.
        """
        self.open(make_directory())

    def describe(self, modules: Sequence[ModuleEntry]) -> None:  # noqa: B027 - optional
        """Receive the observed modules, in their order in the network; called once, before the first value."""

    @abstractmethod
    def add_scalar(self, series: Series, value: float, step: int) -> None:
        """Add one value of a series; it may be NaN or infinite."""

    def add_group(self, group: SeriesGroup, values: NDArray[np.float64], step: int) -> None:
        """Add one value of each series of a group; by default :meth:`add_scalar` is called for each of them.

        A subclass that overrides `add_scalar` alone receives every value there.
        """
        for series, value in zip(group.series, values.tolist(), strict=True):
            self.add_scalar(series, value, step)

    def add_groups(self, groups: Sequence[SeriesGroup], values: Sequence[NDArray[np.float64]], step: int) -> None:
        """Add the values of all groups of a step; by default :meth:`add_group` is called for each of them.

        A subclass that overrides one of the other two methods receives every value there.
        """
        for group, array in zip(groups, values, strict=True):
            self.add_group(group, array, step)

    def add_histogram(self, series: Series, histogram: Any, step: int) -> None:  # noqa: B027 - optional
        """Add one :class:`~ikkuna.store.values.HistogramLike` of a series."""

    def add_matrix(self, series: Series, matrix: Matrix, step: int) -> None:  # noqa: B027 - optional
        """Add one :class:`~ikkuna.store.values.Matrix` of a series."""

    def add_image(self, series: Series, image: Image, step: int) -> None:  # noqa: B027 - optional
        """Add one :class:`~ikkuna.store.values.Image` of a series."""

    def add_text(self, title: str, text: str, step: int) -> None:  # noqa: B027 - optional
        """Add a page of Markdown."""

    def add_finding(self, finding: Finding, step: int) -> None:
        """Add a mistake that a rule has found at `step`.

        By default it is a page of text, ``findings/{rule}``.  Override it to send a message, for example.
        """
        self.add_text(f"findings/{finding.rule}", finding.as_page(), step)

    def add_config(self, config: Mapping[str, ConfigValue], step: int) -> None:
        """Add the hyper-parameters of the run, before the first value; by default as a page of text."""
        self.add_text("Config", config_table(config), step)

    def resume(self, step: int) -> None:  # noqa: B027 - optional
        """Continue a run at `step`: the values of this step and later ones that were stored before are to be replaced.

        Called before the first value of a resumed run, and when the training goes back to a checkpoint.
        """

    def commit(self, step: int) -> None:  # noqa: B027 - optional
        """Pass on everything added since the last commit; called at the end of each step with values.

        `step` never decreases, except after :meth:`resume`.
        """

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything committed is stored; return whether it is."""
        return True

    def draw(self, timeout: float | None = None) -> bool:
        """Draw all pictures with their last values, before :meth:`close`; return whether that was done in `timeout` seconds."""
        return True

    @property
    def drawing_seconds(self) -> float:
        """CPU time that a thread of the backend has spent drawing pictures."""
        return 0.0

    def close(self, timeout: float | None = 2.0) -> bool:
        """Flush, release everything, and return whether all values were stored; a second call does nothing."""
        return True

    @property
    def acked_step(self) -> int | None:
        """The last committed step whose values survive the death of this process; ``None`` if nothing is stored."""
        return None

    def viewer(self, directory: Path) -> str:
        """Return the command that shows the run in `directory`; empty if there is none."""
        return ""

    @property
    def is_unwritable(self) -> bool:
        """Whether the last attempt to store values failed, for example because the disk is full."""
        return False

    @property
    def dropped(self) -> int:
        """Number of lost values."""
        return 0


def get_backend(backend: "str | Backend", **options: Any) -> Backend:
    """Return a new backend by its entry-point name, or `backend` itself if it is a :class:`Backend`.

    Raises
    ------
    ConfigError
        If no installed distribution provides a backend of this name.

    Examples
    --------
    >>> type(get_backend("null")).__name__
    'NullBackend'
    """
    if isinstance(backend, Backend):
        return backend
    if not isinstance(backend, str):
        raise ConfigTypeError(f"a backend is a name or a Backend, got {type(backend).__name__}")
    if backend not in (known := plugin_names(GROUP)):
        raise ConfigError(unknown_name("backend", backend, sorted(known)))
    made = load_plugin(GROUP, backend, Backend)(**options)
    assert isinstance(made, Backend)
    return made


def key_of(backend: Any) -> Hashable:
    """Return what identifies the backend that a subscriber names: a name, or an object."""
    if isinstance(backend, str):
        return backend
    if isinstance(backend, MethodType):  # each access of a method creates another object
        return id(backend.__self__), backend.__func__
    return id(backend)  # the run and the subscriber refer to it, so its id stays unique


class NullBackend(Backend):
    """Discard every value; for subscribers that only publish."""

    def add_scalar(self, series: Series, value: float, step: int) -> None:
        """Do nothing."""

    def add_groups(self, groups: Sequence[SeriesGroup], values: Sequence[NDArray[np.float64]], step: int) -> None:
        """Do nothing."""


def last_defined(cls: type, *methods: str) -> str:
    """Return which of several methods that do the same was defined by the most derived class; in one class the first counts.

    A subclass that overrides one of them, for example to change a result, so makes the others obsolete that it inherits.

    Examples
    --------
    >>> class Base:
    ...     def one(self): ...
    >>> class Quick(Base):
    ...     def all(self): ...
    >>> class Changed(Quick):
    ...     def one(self): ...
    >>> [last_defined(cls, "all", "one") for cls in (Base, Quick, Changed)]
    ['one', 'all', 'one']
    """
    return next((name for owner in cls.__mro__ for name in methods if name in vars(owner)), "")
