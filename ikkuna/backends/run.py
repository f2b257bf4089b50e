"""One run of a training: its directory and its backends, which are opened at their first values and never raise."""

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

from ikkuna.backends.backend import (
    AddedValues,
    Backend,
    FileBackend,
    GuardedBackend,
    NullBackend,
    Sender,
    get_backend,
    key_of,
)
from ikkuna.backends.loggers import adapted
from ikkuna.errors import ClosedError, LogDirError
from ikkuna.printable import finite
from ikkuna.store.append_file import make_directories, reason
from ikkuna.store.names import Series, SeriesGroup
from ikkuna.store.quantity import NEUTRAL, Quantity
from ikkuna.store.run_directory import (
    RUN_FILE,
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
from ikkuna.support.failures import error_text, log, raise_users_exception

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
        self._is_released = False
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
        """Read what another process requests, and store the run and what new kinds are; called by the thread of a file."""
        self.control.check(directory)
        with self._lock:
            if directory != self._directory:
                return
            if not os.path.exists(directory / RUN_FILE):  # the directory was deleted, and made again for values
                self._write_run_file(directory)
            if len(self._quantities) != self._stored_quantities:
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
                self._write_run_file(self._directory)
                self._announce(self._directory)
            return self._directory

    def _write_run_file(self, directory: Path) -> None:
        config, known = finite(self._settings.config), dict(self._quantities)
        content = RunFile(self.identity, config, self._model, quantities=known, modules=tuple(self._modules))
        write_run_file(directory, content)

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
        """Store everything, release the files, and return whether no value was lost; a second call ends an interrupted one.

        Pictures are drawn with their last values before, for at most `drawing` seconds.
        """
        if self._process != os.getpid():
            return False
        if not self._is_released:
            self._drawing_seconds = self.drawing_seconds
            self._closed, self._open_step = False, math.inf
            self._share("draw", drawing)
            self._closed = self._share("close", timeout)
            if self._closed and self._directory is not None:  # the disk does not block
                self._check(self._directory)
            locked, self._locked = self._locked, None
            if locked is not None:
                os.close(locked)
            self._is_released = True
        return bool(self._closed)

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
