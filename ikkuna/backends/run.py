"""One run of a training: its directory and its backends, which are opened at their first values and never raise."""

import contextlib
import logging
import math
import operator
import os
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ikkuna.backends.backend import Backend, NullBackend, get_backend, key_of, last_defined
from ikkuna.backends.file_backend import FileBackend
from ikkuna.backends.loggers import adapted
from ikkuna.errors import ClosedError, LogDirError
from ikkuna.printable import finite
from ikkuna.store.append_file import make_directories, reason
from ikkuna.store.names import Series, SeriesGroup
from ikkuna.store.quantity import NEUTRAL, Quantity
from ikkuna.store.run_directory import (
    ConfigValue,
    Continued,
    ControlFile,
    RunFile,
    RunSettings,
    add_quantities,
    check_log_dir,
    lock_run,
    log_path,
    make_run_directory,
    write_run_file,
)
from ikkuna.store.values import ModuleEntry, shown
from ikkuna.support.console import announce
from ikkuna.support.failures import FailureCounter, error_text, log, raise_users_exception

T = TypeVar("T")


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


_REWIND_SECONDS = 2.0
DRAWING_SECONDS = 10.0
"""Time in which the last pictures are drawn when a run is closed."""


class Run:
    """Owns one directory below `log_dir` and the backends that write there.

    Creating a run touches no file: the threads of the backends create the directory and their files after the first value.
    From then on no error of a disk or a backend is raised, and no method waits for one.
    A backend given by name is created once and shared; a backend object is opened in the same directory.
    In a forked child all methods do nothing.
    :meth:`show` and :meth:`commit` may be called by one thread at a time, the other methods by any thread.

    Parameters
    ----------
    log_dir : str or path-like
        Checked only for its type; see :meth:`prepare`.
    modules : sequence of ModuleEntry
        The observed modules in their order in the network, for the backends.
    settings : RunSettings, optional
        The name of the run and its hyper-parameters.
    continued : Continued, optional
        The stored run that is continued; by default a new directory is created.
    model : dict, optional
        The signature of the model, stored with the run.

    Attributes
    ----------
    identity : str
        Identifies the run, also if its directory is moved.
    control : ControlFile
        What another process requests; read by the threads of backends that write a file.

    Examples
    --------
    >>> from ikkuna.testing import RecordingBackend
    >>> run, backend = Run(), RecordingBackend()
    >>> run.show(Series("loss"), 0.5, 0, [backend])
    >>> run.commit(0)
    >>> run.close(), [(series.kind, value, step) for series, value, step in backend.values]
    (True, [('loss', 0.5, 0)])
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "run",
        modules: Sequence[ModuleEntry] = (),
        settings: RunSettings | None = None,
        continued: Continued | None = None,
        model: dict[str, Any] | None = None,
    ) -> None:
        self._log_dir = log_path(log_dir)
        self._modules = modules
        self._settings = settings or RunSettings()
        self._continued = continued
        self._model = model
        self.identity = (continued and continued.identity) or os.urandom(8).hex()
        self.control = ControlFile()
        self._directory: Path | None = None
        self._locked: int | None = None  # a descriptor
        self._lock = threading.RLock()  # the threads of several backends create the directory
        self._backends: dict[Hashable, GuardedBackend] = {}
        self._closed: bool | None = None
        self._open_step = math.inf  # the first step of which further values can come
        self._refused = 0
        self._process = os.getpid()
        self._quantities: dict[str, Quantity] = {}
        self._stored_quantities = 0

    @property
    def directory(self) -> Path | None:
        """The directory of this run; ``None`` before the first value that is stored, and if it cannot be created."""
        is_needed = any(guarded.stores and guarded.is_opened for guarded in list(self._backends.values()))
        if self._directory is None and is_needed and self._process == os.getpid():
            with contextlib.suppress(LogDirError):
                return self.make_directory()
        return self._directory

    def prepare(self, backends: Sequence[str | Backend]) -> None:
        """Check that values can be shown with `backends`, and create them; this creates no file.

        Raises
        ------
        ConfigError
            If no installed distribution provides a backend of a name.
        PluginError
            If a backend cannot be imported.
        LogDirError
            If the log directory cannot be written.
        ClosedError
            After :meth:`close`.
        """
        if self._closed is not None:
            raise ClosedError("this run is closed; create a new one")
        missing = {key_of(backend): backend for backend in backends if key_of(backend) not in self._backends}
        made = {key: self._guarded(backend, get_backend(adapted(backend))) for key, backend in missing.items()}
        if self._directory is None and any(guarded.stores for guarded in made.values()):
            check_log_dir(self._log_dir)
        self._backends = made | self._backends

    def show(
        self,
        series: Series,
        value: Any,
        step: int,
        backends: Sequence[str | Backend] = ("tb",),
        sender: Sender | None = None,
    ) -> None:
        """Pass a value to `backends`: a number, a histogram, a matrix, a picture, a finding, or a text (a page of Markdown).

        A value that a backend cannot store is refused here.  Failures of a backend are counted for each `sender`.

        Raises
        ------
        ConfigTypeError
            If the value has another type, or contains something else than numbers.
        ConfigError
            If the parts of a histogram or of a matrix do not fit together.
        """
        self.add_all([(*shown(series, value, step), sender)], step, backends)

    def add_all(self, added: Sequence[AddedValues], step: int, backends: Sequence[str | Backend]) -> None:
        """Call methods of `backends` that add values: the ``add_group`` of several curves, or what :meth:`show` calls.

        A backend with a method ``add_groups`` receives all groups of curves at once.
        """
        if self._closed is not None or self._process != os.getpid():
            count = sum(len(arguments[1]) if method == "add_group" else 1 for method, arguments, _ in added)
            self._refused += len(backends) * count
            return
        for _, arguments, _ in added:
            if isinstance(shown_as := arguments[0], Series | SeriesGroup) and shown_as.quantity is not NEUTRAL:
                self._quantities.setdefault(shown_as.kind, shown_as.quantity)
        for backend in backends:
            key = backend if isinstance(backend, str) else key_of(backend)  # a call less for names
            guarded = self._backends.get(key) or self._create(backend)
            guarded.add_all(added, step, self.make_directory)

    def _guarded(self, name: str | Backend, backend: Backend) -> GuardedBackend:
        resumed_at = None if self._continued is None else self._continued.step
        if isinstance(backend, FileBackend):
            backend.check = self._check
        backend.level = logging.WARNING if self._settings.verbosity else logging.INFO
        return GuardedBackend(_label(name, backend), backend, self._modules, self._settings.config, resumed_at)

    def _check(self, directory: Path) -> None:
        """Read what another process requests, and store what new kinds are; called by the thread of a file."""
        self.control.check(directory)
        with self._lock:
            if len(self._quantities) != self._stored_quantities and directory == self._directory:
                known = dict(self._quantities)
                self._stored_quantities = len(known)
                add_quantities(directory, known)

    def _create(self, backend: str | Backend) -> GuardedBackend:
        try:
            guarded = self._guarded(backend, get_backend(adapted(backend)))
        except Exception as error:
            raise_users_exception(error)
            guarded = self._guarded(backend, NullBackend())
            guarded.disable(f"cannot be created, its values are lost: {error_text(error)}")
        return self._backends.setdefault(key_of(backend), guarded)

    def make_directory(self) -> Path:
        """Return the directory of this run, which is created if there is none; may be called by any thread.

        Raises
        ------
        LogDirError
            If it cannot be created.
        """
        with self._lock:
            if self._directory is None:
                self._directory = self._new_directory()
                write_run_file(self._directory, RunFile(self.identity, finite(self._settings.config), self._model))
                self._announce(self._directory)
            return self._directory

    def _new_directory(self) -> Path:
        """Return a directory that no other process writes to: that of the continued run, or a new one."""
        if self._continued is None:
            while True:
                directory = make_run_directory(self._log_dir, self._settings.name)
                with contextlib.suppress(BlockingIOError):  # a process that continues the latest run was faster
                    self._locked = lock_run(directory)
                    return directory
        former = self._continued.directory
        try:
            make_directories(former)  # it may have been deleted since
            self._locked = lock_run(former)
        except BlockingIOError as error:
            self.identity, self._continued = os.urandom(8).hex(), None
            directory = self._new_directory()
            log.warning("process %s writes the run in '%s'; this one writes to '%s'", error.strerror, former, directory)
            return directory
        except OSError as error:
            raise_users_exception(error)
            raise LogDirError(f"cannot continue the run in '{former}': {reason(error)}") from error
        return former

    def _announce(self, directory: Path) -> None:
        if not self._settings.verbosity:
            return
        viewers = dict.fromkeys(guarded.backend.viewer(directory) for guarded in list(self._backends.values()))
        how = "".join(f"; {viewer}" for viewer in viewers if viewer)
        verb = "is written to" if self._continued is None else f"continues at step {self._continued.step} in"
        announce(f"ikkuna: {self._settings.subject} {verb} '{shortest_path(directory)}'{how}")

    def commit(self, step: int) -> None:
        """Pass on the values of a step, if there are any; called at every step, in increasing order.

        Further values of the same step may follow, but none of earlier steps: those are complete.
        """
        if self._closed is None and self._process == os.getpid():
            self._open_step = step
            for guarded in self._backends.values():
                guarded.commit(step)

    def rewind(self, step: int) -> None:
        """Flush, and prepare for values of steps from `step` on; :attr:`acked_step` is at most the step before."""
        if self._closed is None and self._process == os.getpid():
            self.flush(_REWIND_SECONDS)
            for guarded in list(self._backends.values()):
                guarded.rewind(step)

    def flush(self, timeout: float | None = None) -> bool:
        """Write everything committed to the disk; return whether that was done within `timeout` seconds.

        The last step is complete now, unless further values of it are committed later.
        """
        if self._process != os.getpid():
            return False
        self._open_step = math.inf
        return self._share("flush", timeout)

    def settle(self, timeout: float) -> bool:
        """Wait until the operating system has the committed values of all storing backends; return whether it has."""
        deadline = time.monotonic() + timeout
        for guarded in list(self._backends.values()):
            while self._process == os.getpid() and guarded.is_behind:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(0.0005)
        return True

    def close(self, timeout: float | None = 2.0, drawing: float = DRAWING_SECONDS) -> bool:
        """Store everything, release the files, and return whether no value was lost; a second call does nothing.

        Pictures are drawn with their last values before, for at most `drawing` seconds.
        """
        if self._process != os.getpid():
            return False
        if self._closed is None:
            self._drawing_seconds = self.drawing_seconds
            self._closed, self._open_step = False, math.inf
            self._share("draw", drawing)
            self._closed = self._share("close", timeout)
            if self._closed and self._directory is not None:  # the disk does not block
                self._check(self._directory)
            if self._locked is not None:
                os.close(self._locked)
        return self._closed

    def _share(self, method: str, timeout: float | None) -> bool:
        """Call a method of all backends; each gets an equal share of the remaining time."""
        backends = list(self._backends.values())
        deadline = None if timeout is None else time.monotonic() + timeout
        answers = []
        for left, guarded in zip(range(len(backends), 0, -1), backends, strict=True):
            share = None if deadline is None else max(deadline - time.monotonic(), 0.0) / left
            answers.append(getattr(guarded, method)(share))
        return all(answers)

    @property
    def drawing_seconds(self) -> float:
        """CPU time of the threads that draw pictures, until the run is closed."""
        if self._closed is not None:
            return self._drawing_seconds
        return sum([guarded.drawing_seconds for guarded in list(self._backends.values())])

    @property
    def acked_step(self) -> int:
        """Last complete step whose values the operating system has received from every storing backend; -1 before.

        A step is complete when no further value of it can come: when a later one has been committed, by :meth:`flush`, and by
        :meth:`close`.  A backend whose committed values have all been received has no value of the later steps, and does not
        hold back the others.
        """
        acked = [(g.acked_step, g.safe_step, g.has_all) for g in list(self._backends.values())]
        if all(step is None or step < 0 for step, _, _ in acked):
            return -1
        latest = max(safe for _, safe, _ in acked if safe is not None)
        waiting = (safe for _, safe, has_all in acked if safe is not None and not has_all)
        return int(min(self._open_step - 1, latest, *waiting))

    @property
    def unwritable(self) -> tuple[str, ...]:
        """The backends that cannot store values now: names, or the classes of backend objects."""
        backends = list(self._backends.items())
        names = (
            (key if isinstance(key, str) else type(guarded.backend).__name__, guarded) for key, guarded in backends
        )
        return tuple(name for name, guarded in names if guarded.is_unwritable)

    @property
    def dropped(self) -> int:
        """Number of values lost, over all backends."""
        return self._refused + sum(guarded.dropped for guarded in list(self._backends.values()))


def shortest_path(directory: Path) -> str:
    """Return a path relative to the current directory, if it lies inside."""
    with contextlib.suppress(OSError, ValueError):
        return str(directory.relative_to(Path.cwd()))
    return str(directory)


def _label(name: Any, backend: Backend) -> str:
    return repr(name) if isinstance(name, str) else getattr(backend, "label", type(backend).__name__)
