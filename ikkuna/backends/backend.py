"""The base classes of backends, how a backend is found by its name, and what catches the exceptions of one."""

import logging
import operator
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from types import MethodType
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ikkuna.errors import ConfigError, ConfigTypeError, unknown_name
from ikkuna.store.append_file import FileFormat
from ikkuna.store.finding import Finding
from ikkuna.store.names import Series, SeriesGroup
from ikkuna.store.run_directory import ConfigValue, config_table
from ikkuna.store.values import Image, Matrix, ModuleEntry
from ikkuna.store.writer import FileWriter
from ikkuna.support.failures import FailureCounter, error_text, log, raise_users_exception
from ikkuna.support.plugins import load_plugin, plugin_names

T = TypeVar("T")

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


class WallClock:
    """The time of day in seconds, which never decreases: an adjustment of the system's clock has no effect."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def now(self) -> float:
        """Return the time."""
        return self._offset + time.monotonic()


class FileBackend(Backend):
    """Passes the values of each step as one block to the thread that writes a file.

    Parameters
    ----------
    capacity : int
        Largest number of bytes that wait to be written.
    retry_seconds : float
        Pause after a failed write.
    sync_seconds : float
        Time between two calls of fsync: the most that a power failure can lose.
    fallback : bool
        Whether to continue in the directory for temporary files when the disk reports an error.

    Attributes
    ----------
    check : callable or None
        Called by the writer's thread about once a second with the directory; it must be set before the backend is opened.
    """

    def __init__(
        self,
        *,
        capacity: int = 8 * 2**20,
        retry_seconds: float = 10.0,
        sync_seconds: float = 30.0,
        fallback: bool = False,
    ) -> None:
        self._pauses = {"retry_seconds": retry_seconds, "sync_seconds": sync_seconds}
        self._capacity = capacity
        self._fallback = fallback
        self._writer: FileWriter | None = None
        self.check: Callable[[Path], None] | None = None
        self._clock = WallClock()
        self._values = 0

    @abstractmethod
    def _format(self) -> FileFormat:
        """Return the format of the file."""

    @abstractmethod
    def _take_block(self, step: int) -> bytes:
        """Return the bytes of everything added since the last call."""

    def open(self, directory: Path) -> None:
        """Create the file."""
        self._writer = self._new_writer(directory)

    def _new_writer(self, directory: Path | Callable[[], Path]) -> FileWriter:
        options: Any = {"capacity": self._capacity, "fallback": self._fallback, "check": self.check, **self._pauses}
        return FileWriter(directory, self._format(), **options)

    def open_later(self, make_directory: Callable[[], Path]) -> None:
        """Create directory and file in the writer's thread, when there is something to write."""
        if type(self).open is not FileBackend.open:
            super().open_later(make_directory)
            return
        self._writer = self._new_writer(make_directory)

    def commit(self, step: int) -> None:
        """Queue the step's block for the writer's thread."""
        block = self._take_block(step)
        values, self._values = self._values, 0
        if self._writer is not None:
            self._writer.submit(block, step, values)

    def flush(self, timeout: float | None = None) -> bool:
        """Write everything committed to the disk, and return whether that was done within `timeout` seconds."""
        return self._writer is None or self._writer.flush(timeout)

    def close(self, timeout: float | None = 2.0) -> bool:
        """Write everything committed to the disk, release the file, and return whether no value was lost."""
        return self._writer is None or self._writer.close(timeout)

    @property
    def path(self) -> Path | None:
        """The file; ``None`` before it is created."""
        return self._writer.path if self._writer else None

    @property
    def acked_step(self) -> int:
        """Last step of which the operating system has all committed values; -1 before."""
        return self._writer.acked_step if self._writer else -1

    @property
    def is_unwritable(self) -> bool:
        """Whether the last attempt to write to the file failed."""
        return self._writer is not None and self._writer.is_failing

    @property
    def dropped(self) -> int:
        """Number of values that did not reach the file."""
        return self._writer.dropped if self._writer else 0


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


class Sender(Protocol):
    """A sender of values, such as a registered subscriber; it equals only itself."""

    @property
    def label(self) -> str:
        """Its name in the log, such as ``NormSubscriber(weights)``."""


AddedValues = tuple[str, tuple[Any, ...], Sender | None]
"""The name of a method of a backend that adds values, such as ``add_group``, its arguments, and the sender of the values."""


class GuardedBackend:
    """Calls the methods of a backend and catches their exceptions.

    The first of consecutive failures is logged with its traceback.
    Failures of adding are counted for each sender: after 10 of them the backend gets no such values of this sender any more.
    After 10 failures of another method, or without a sender, the backend is disabled.
    Values that the backend did not accept are counted.

    Parameters
    ----------
    name : str
        The backend's name in the log.
    backend : Backend
        Opened once, before its first value.
    modules : sequence of ModuleEntry
        Passed to the backend's ``describe()``.
    config : mapping, optional
        The hyper-parameters, passed to the backend's ``add_config()`` if there are any.
    resumed_at : int, optional
        The step at which the run continues, passed to the backend's ``resume()``.
    """

    def __init__(
        self,
        name: str,
        backend: Backend,
        modules: Sequence[ModuleEntry] = (),
        config: Mapping[str, ConfigValue] | None = None,
        resumed_at: int | None = None,
    ) -> None:
        self._name = name
        self._modules = modules
        self._config = config
        self._resumed_at = resumed_at
        self.backend = backend
        self._takes = last_defined(type(backend), "add_groups", "add_group", "add_scalar")
        self.disabled = False
        self._opened_at: int | None = None  # a step
        self._failures = FailureCounter()  # by method and sender, because one may work where another does not
        self._step = 0  # the last one among the pending values
        self._rewound: tuple[int, int] | None = None  # the acknowledged step then, and the last one that counts since
        self._pending = 0  # values not committed
        self._dropped = 0
        self._committed: int | None = None

    def add_all(self, added: Sequence[AddedValues], step: int, directory: Callable[[], Path]) -> None:
        """Call methods of the backend that add values of one step; open the backend first if these are its first values.

        The groups of values are added all at once, or one by one, or their values are, as the backend takes them.
        """
        if self._opened_at is None:
            self._open(directory, step)
        if not self._pending:
            self._step = step
        elif step > self._step:  # an exception has kept the step before from being committed
            self.commit(self._step)
            self._step = step
        groups: list[SeriesGroup] = []
        arrays: list[Any] = []
        count = 0
        for method, arguments, sender in added:
            if method != "add_group":
                self._add(method, arguments, 1, sender)
                continue
            group, values, at = arguments
            if self._takes == "add_groups":
                groups.append(group)
                arrays.append(values)
                count += len(values)
            elif self._takes == "add_group":
                self._add(method, arguments, len(values), sender)
            else:
                for series, value in zip(group.series, values.tolist(), strict=True):
                    self._add("add_scalar", (series, value, at), 1, sender)
        if groups:
            self._add("add_groups", (groups, arrays, step), count)

    def _add(self, method: str, arguments: tuple[Any, ...], count: int, sender: Sender | None = None) -> None:
        is_refused = self.disabled or (self._failures.counts and self._failures.is_exhausted((method, sender)))
        if not is_refused and self._call(method, *arguments, sender=sender):
            self._pending += count
        else:
            self._dropped += count

    def _open(self, directory: Callable[[], Path], step: int) -> None:
        try:
            if self.stores:  # otherwise there is no need to create the directory
                self.backend.open_later(directory)
        except BaseException as error:
            raise_users_exception(error)
            self.disable(f"cannot be opened, its values are lost: {error_text(error)}")
        else:
            self._call("describe", self._modules)
            if self._resumed_at is not None:
                self._call("resume", self._resumed_at)
            if self._config:
                self._call("add_config", self._config, step)
        self._opened_at = step

    @property
    def stores(self) -> bool:
        """Whether the backend has something to open, and so needs a directory."""
        return type(self.backend).open is not Backend.open

    @property
    def is_opened(self) -> bool:
        """Whether the first value has arrived."""
        return self._opened_at is not None

    def disable(self, why: str) -> None:
        """Stop calling the backend, and count every further value as lost."""
        log.error("backend %s %s", self._name, why)
        self.disabled = True
        self._dropped += self._pending
        self._pending = 0

    def commit(self, step: int) -> None:
        """Commit the step if the backend has got values since the last commit."""
        if not self._pending or self.disabled:
            return
        if not self._call("commit", step):
            self._dropped += self._pending
        self._pending = 0
        self._committed = step

    def flush(self, timeout: float | None) -> bool:
        """Flush the backend; return ``False`` if it fails or is disabled."""
        return self._opened_at is None or (not self.disabled and self._succeeds("flush", timeout))

    def draw(self, timeout: float | None) -> bool:
        """Commit pending values, and have the backend draw its pictures; return whether they have the last values."""
        if self._opened_at is None or self.disabled:
            return True
        if self._pending:
            self.commit(self._step)
        return self._succeeds("draw", timeout)

    @property
    def drawing_seconds(self) -> float:
        """The backend's ``drawing_seconds``; 0 if it cannot be read."""
        return self._read("drawing_seconds", float) or 0.0

    def close(self, timeout: float | None) -> bool:
        """Commit pending values and close the backend, even a disabled one; return whether all values were stored."""
        if self._opened_at is None:
            return self._dropped == 0
        if self._pending:
            self.commit(self._step)
        return self._succeeds("close", timeout) and self.dropped == 0

    @property
    def dropped(self) -> int:
        """Number of values lost here or in the backend."""
        return self._dropped + max(self._read("dropped", operator.index) or 0, 0)

    @property
    def acked_step(self) -> int | None:
        """The backend's ``acked_step``; ``None`` if it stores nothing or is disabled."""
        if self._opened_at is None or self.disabled:
            return None
        acked = self._read("acked_step", operator.index)
        if self._rewound is not None and acked is not None:
            before, last = self._rewound
            if acked == before:  # nothing was written since
                return min(acked, last)
            self._rewound = None
        return acked

    @property
    def has_all(self) -> bool:
        """Whether the operating system has all values that were committed since the last :meth:`rewind`, and there are some."""
        acked = self.acked_step
        return self._committed is not None and acked is not None and acked >= self._committed

    @property
    def is_behind(self) -> bool:
        """Whether the operating system lacks values that were committed, and the backend can store them now."""
        if self._committed is None or self.is_unwritable:
            return False
        acked = self.acked_step
        return acked is not None and acked < self._committed

    def rewind(self, step: int) -> None:
        """Prepare for values of steps from `step` on, which is earlier than steps that were flushed."""
        if self._opened_at is not None and (acked := self._read("acked_step", operator.index)) is not None:
            self._opened_at = min(self._opened_at, step)
            self._rewound = acked, step - 1
            self._committed = None
        if self._opened_at is not None and not self.disabled:
            self._call("resume", step)

    @property
    def safe_step(self) -> int | None:
        """As :attr:`acked_step`, but at least the step before the first value, since earlier steps have nothing to lose.

        It is before the steps of the values that are not committed.
        """
        acked, opened_at = self.acked_step, self._opened_at or 0
        if acked is None:
            return None
        return max(min(acked, self._step - 1) if self._pending else acked, opened_at - 1)

    def _read(self, name: str, as_type: Callable[[Any], T]) -> T | None:
        """Return an attribute of the backend; ``None`` if it is of another type or cannot be read."""
        try:
            value = getattr(self.backend, name)
            return None if value is None else as_type(value)
        except BaseException as error:
            raise_users_exception(error)
            return None

    def _succeeds(self, method: str, timeout: float | None) -> bool:
        try:
            return bool(getattr(self.backend, method)(timeout))
        except BaseException as error:
            raise_users_exception(error)
            log.exception("backend %s failed in %s()", self._name, method)
            return False

    @property
    def is_unwritable(self) -> bool:
        """Whether the backend is disabled, or has failed to store its last values."""
        is_failing = self.disabled or ("commit", None) in self._failures.counts
        return is_failing or bool(self._read("is_unwritable", bool))

    def _call(self, method: str, *arguments: Any, sender: Sender | None = None) -> bool:
        try:
            getattr(self.backend, method)(*arguments)
        except BaseException as error:
            raise_users_exception(error)
            self._count_failure(method, sender)
            return False
        if self._failures.counts:
            self._failures.reset((method, sender))
        return True

    def _count_failure(self, method: str, sender: Sender | None) -> None:
        key = method, sender
        count = self._failures.add(key)
        source = "" if sender is None else f" with a value of {sender.label}"
        if count == 1:
            log.exception("backend %s failed in %s()%s", self._name, method, source)
        if not self._failures.is_exhausted(key):
            return
        if sender is None:
            self.disable(f"failed in {method}() {count} times in a row and is disabled")
        else:
            what = "backend %s failed in %s() %d times in a row%s, and gets no more of them"
            log.error(what, self._name, method, count, source.replace("a value", "values"))
