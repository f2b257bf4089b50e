"""One run of a training: its directory, and the backends its values go to."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ikkuna.errors import ClosedError, ConfigTypeError, LogDirError
from ikkuna.visualization.backend import Backend, Series, get_backend
from ikkuna.visualization.files.run_directory import check_log_dir, log_path, make_run_directory
from ikkuna.visualization.guarded_backend import GuardedBackend
from ikkuna.visualization.histogram import is_histogram
from ikkuna.visualization.matrix import Matrix
from ikkuna.visualization.module_table import ModuleEntry
from ikkuna.visualization.null import NullBackend

__all__ = ["Run"]


class Run:
    """Owns one directory below `log_dir` and the backends that write there.

    Making a run touches no file: the directory and a backend's file are made at the first value.
    From then on nothing raises because of a disk or a backend, and nothing waits for one.
    A backend asked for by name is made once and shared; a backend object is opened in the same directory.
    In a forked child a run does nothing.

    Parameters
    ----------
    log_dir : checked only for being a path; see :meth:`prepare`
    modules : what is looked at, in its order in the network, for backends to tell

    :meth:`show` and :meth:`commit` are called from one thread at a time, the others from any.

    Examples
    --------
    >>> from ikkuna.testing import RecordingBackend
    >>> run, backend = Run(), RecordingBackend()
    >>> run.show(Series("loss"), 0.5, 0, [backend])
    >>> run.commit(0)
    >>> run.close(), [(series.kind, value, step) for series, value, step in backend.values]
    (True, [('loss', 0.5, 0)])
    """

    def __init__(self, log_dir: str | os.PathLike[str] = "run", modules: Sequence[ModuleEntry] = ()) -> None:
        self._log_dir = log_path(log_dir)
        self._modules = modules
        self._directory: Path | None = None
        self._error: LogDirError | None = None
        self._outlets: dict[str | int, GuardedBackend] = {}
        self._closed: bool | None = None
        self._refused = 0
        self._process = os.getpid()

    @property
    def directory(self) -> Path | None:
        """The directory of this run; ``None`` before the first value that is stored in one."""
        return self._directory

    def prepare(self, backends: Sequence[str | Backend]) -> None:
        """Check, for a caller that is being set up, that values can be shown with `backends`; make no file.

        Raises
        ------
        ConfigError
            For a name that no installed distribution offers.
        PluginError
            For a backend that cannot be imported.
        LogDirError
            If the log directory cannot be written.
        ClosedError
            After :meth:`close`.
        """
        if self._closed is not None:
            raise ClosedError("this run is closed; make a new one")
        made = {_key(backend): self._outlet(backend, get_backend(backend)) for backend in backends}
        if self._directory is None and any(type(outlet.backend).open is not Backend.open for outlet in made.values()):
            check_log_dir(self._log_dir)
        self._outlets = made | self._outlets

    def show(self, series: Series, value: Any, step: int, backends: Sequence[str | Backend] = ("tb",)) -> None:
        """Hand a value of a series to `backends`: a number, a histogram, a matrix, or a text (a page of Markdown).

        Raises
        ------
        ConfigTypeError
            If the value is nothing of that: a mistake of the caller, who is the one to be told.
        """
        verb, arguments = _call(series, value, step)
        if self._closed is not None or self._process != os.getpid():
            self._refused += len(backends)
            return
        for backend in backends:
            outlet = self._outlets.get(_key(backend)) or self._new_outlet(backend)
            outlet.add(verb, arguments, step, self._make_directory)

    def _outlet(self, asked: str | Backend, backend: Backend) -> GuardedBackend:
        return GuardedBackend(_label(asked), backend, self._modules)

    def _new_outlet(self, backend: str | Backend) -> GuardedBackend:
        try:
            outlet = self._outlet(backend, get_backend(backend))
        except Exception as error:
            outlet = self._outlet(backend, NullBackend())
            outlet.disable(f"cannot be made, its values are lost: {error}")
        return self._outlets.setdefault(_key(backend), outlet)

    def _make_directory(self) -> Path:
        if self._error is not None:
            raise self._error
        if self._directory is None:
            try:
                self._directory = make_run_directory(self._log_dir)
            except LogDirError as error:
                self._error = error
                raise
        return self._directory

    def commit(self, step: int) -> None:
        """Hand on the values of a step; call it at every step, with or without values, and never go back."""
        if self._closed is None and self._process == os.getpid():
            for outlet in self._outlets.values():
                outlet.commit(step)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything committed is on the disk; say whether it is."""
        return self._process == os.getpid() and self._share("flush", timeout)

    def close(self, timeout: float | None = 2.0) -> bool:
        """Store everything, release the files, and say whether nothing was lost; a second call does nothing."""
        if self._process != os.getpid():
            return False
        if self._closed is None:
            self._closed = False
            self._closed = self._share("close", timeout)
        return self._closed

    def _share(self, verb: str, timeout: float | None) -> bool:
        """Ask all backends; one that hangs cannot use up the time of those behind it."""
        outlets = list(self._outlets.values())
        deadline = None if timeout is None else time.monotonic() + timeout
        answers = []
        for left, outlet in zip(range(len(outlets), 0, -1), outlets, strict=True):
            share = None if deadline is None else max(deadline - time.monotonic(), 0.0) / left
            answers.append(getattr(outlet, verb)(share))
        return all(answers)

    @property
    def acked_step(self) -> int:
        """Last step of which every storing backend has given its values to the operating system; -1 before."""
        acked = [(outlet.acked_step, outlet.safe_step) for outlet in list(self._outlets.values())]
        if all(step is None or step < 0 for step, _ in acked):
            return -1
        return min(safe for _, safe in acked if safe is not None)

    @property
    def dropped(self) -> int:
        """Number of values lost, over all backends."""
        return self._refused + sum(outlet.dropped for outlet in list(self._outlets.values()))


def _key(backend: str | Backend) -> str | int:
    return backend if isinstance(backend, str) else id(backend)  # an outlet keeps it alive, so the number stays its own


def _label(backend: str | Backend) -> str:
    return repr(backend) if isinstance(backend, str) else type(backend).__name__


def _call(series: Series, value: Any, step: int) -> tuple[str, tuple[Any, ...]]:
    """Return the verb of a backend that takes `value`, with its arguments."""
    if isinstance(value, float):
        return "add_scalar", (series, value, step)
    if isinstance(value, str):
        return "add_text", (series.title or _title(series), value, step)
    if isinstance(value, Matrix):
        return "add_matrix", (series, value, step)
    if is_histogram(value):
        return "add_histogram", (series, value, step)
    try:
        return "add_scalar", (series, float(value), step)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        what = f"{series.kind!r} shows a number, a histogram, a matrix or a text, got {type(value).__name__}"
        raise ConfigTypeError(what) from error


def _title(series: Series) -> str:
    return series.kind if series.name is None else f"{series.kind}/{series.name}"
