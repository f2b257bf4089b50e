"""Backends that pass values to the loggers of other libraries."""

import math
import os
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ikkuna.backends.backend import Backend
from ikkuna.store.finding import Finding
from ikkuna.store.names import Series, matrix_tag, series_tag
from ikkuna.store.run_directory import ConfigValue, config_table, read_run_file
from ikkuna.store.values import LISTS, NUMBERS, Matrix
from ikkuna.support.failures import FailureCounter, log, raise_users_exception
from ikkuna.support.threads import Worker


def matrix_picture(matrix: Matrix, title: str = "") -> Any:
    """Return the picture of a matrix as an image of Pillow, which matplotlib requires."""
    from ikkuna.backends.pictures.cells import draw_matrix

    return draw_matrix(matrix.values, matrix.rows, matrix.columns, limits=matrix.limits, title=title)


@dataclass(slots=True)
class StepValues:
    """The values of one step.

    Parameters
    ----------
    step : int
        The step.
    scalars : dict of str to float
        Numbers by their tags; they may be NaN or infinite.
    histograms : dict of str to HistogramLike
        Histograms by their tags.
    matrices : dict of str to Matrix
        Matrices by their tags.
    texts : dict of str to str
        Pages of Markdown by their titles.
    config : dict
        The hyper-parameters, if they were added at this step.
    findings : list of Finding
        New findings, for loggers that raise alerts.
    """

    step: int = 0
    scalars: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, Any] = field(default_factory=dict)
    matrices: dict[str, Matrix] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    config: dict[str, ConfigValue] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Number of values, without hyper-parameters."""
        return len(self.scalars) + len(self.histograms) + len(self.matrices) + len(self.texts)


class LoggerBackend(Backend):
    """Passes the values of each step to a logger in a thread, so that a slow network delays no step.

    At most `capacity` values wait; those of further steps are dropped, counted and logged once.
    If the logger raises an exception, the values of this step are lost and counted.
    After ten exceptions in a row the logger is not called any more.
    If it cannot be started, that is tried again every `retry_seconds`, while values wait.
    In a forked child all methods do nothing.

    Parameters
    ----------
    capacity : int
        Largest number of values that wait.
    retry_seconds : float
        Pause after a failed start.
    """

    def __init__(self, *, capacity: int = 100_000, retry_seconds: float = 10.0) -> None:
        self._capacity = capacity
        self._retry_seconds = retry_seconds
        self._make_directory: Callable[[], Path] | None = None
        self._resumed_at: int | None = None
        self._open_step = StepValues()
        self._tags: dict[Series, str] = {}
        self._queue: deque[StepValues] = deque()
        self._waiting = self._dropped = 0
        self._failures = FailureCounter()
        self._retry_at = 0.0
        self._is_started = self._is_full = self._is_failing = False
        self._worker = Worker(
            "ikkuna-logger",
            self._job,
            due=lambda: self._retry_at if self._queue else math.inf,
            failed=self._end_failed,
            finish=self._finish,
            retry_seconds=retry_seconds,
        )

    # -- what a logger has to provide; called in the thread ----------------------------------------------------------

    def start(self) -> None:
        """Connect with the logger; called once before the first step, and again later if it raises an exception."""

    @abstractmethod
    def log_step(self, values: StepValues) -> None:
        """Pass the values of a step to the logger."""

    def finish(self) -> None:
        """Pass everything on, and release the logger unless it belongs to the user."""

    @property
    def label(self) -> str:
        """The name of the logger in the log."""
        return type(self).__name__

    def directory(self) -> Path:
        """Return the directory of the run, which is created if it is missing."""
        assert self._make_directory is not None
        return self._make_directory()

    # -- values; called by the training thread -----------------------------------------------------------------------

    def tag(self, series: Series) -> str:
        """Return the name of a series in the logger."""
        tag = self._tags.get(series)
        if tag is None:
            tag = self._tags[series] = series_tag(series)
        return tag

    def add_scalar(self, series: Series, value: float, step: int) -> None:
        """Add a value to the step."""
        self._open_step.scalars[self.tag(series)] = value

    def add_histogram(self, series: Series, histogram: Any, step: int) -> None:
        """Add a histogram to the step."""
        self._open_step.histograms[self.tag(series)] = histogram

    def add_matrix(self, series: Series, matrix: Matrix, step: int) -> None:
        """Add a matrix to the step."""
        self._open_step.matrices[matrix_tag(series)] = matrix

    def add_text(self, title: str, text: str, step: int) -> None:
        """Add a page of Markdown to the step."""
        self._open_step.texts[title] = text

    def add_finding(self, finding: Finding, step: int) -> None:
        """Add a finding to the step, also as a text and as a mark."""
        super().add_finding(finding, step)
        self._open_step.findings.append(finding)

    def add_config(self, config: Mapping[str, ConfigValue], step: int) -> None:
        """Add the hyper-parameters to the step."""
        self._open_step.config.update(config)

    def resume(self, step: int) -> None:
        """Remember that the run continues; loggers keep what they have of later steps, and get these steps again."""
        self._resumed_at = step

    def commit(self, step: int) -> None:
        """Queue the values of the step for the thread."""
        values, self._open_step = self._open_step, StepValues()
        values.step = step
        if not (values.count or values.config):
            return
        if self._worker.process != os.getpid():
            self._dropped += values.count
            return
        with self._worker.lock:
            if self._worker.is_closing or self._refuses(values):
                self._dropped += values.count
                return
            self._queue.append(values)
            self._waiting += values.count
        self._worker.wake()

    def _refuses(self, values: StepValues) -> bool:
        """Return whether values must be dropped, because the logger has failed or too many wait."""
        if self._failures.is_exhausted():
            return True
        limit = self._capacity // 2 if self._is_full else self._capacity  # so that a slow logger causes few log lines
        is_full = bool(self._queue) and self._waiting + values.count > limit
        if is_full and not self._is_full:
            log.warning(
                "%s is too slow, %d values wait; from step %d on values are dropped",
                self.label,
                self._waiting,
                values.step,
            )
        self._is_full = is_full
        return is_full

    # -- the thread --------------------------------------------------------------------------------------------------

    def _job(self) -> Callable[[], None] | None:
        if not self._queue or time.monotonic() < self._retry_at:
            return None
        return self._pass_on if self._is_started else self._start

    def _start(self) -> None:
        try:
            self.start()
        except BaseException as error:
            raise_users_exception(error)
            if not self._is_failing:
                self._log("start()", error)
            self._is_failing = True
            self._retry_at = time.monotonic() + self._retry_seconds
        else:
            self._is_started = True

    def _pass_on(self) -> None:
        with self._worker.lock:
            if not self._queue:  # given up by close()
                return
            values = self._queue.popleft()
            self._waiting -= values.count
        if self._failures.is_exhausted():
            self._dropped += values.count
            return
        try:
            self.log_step(values)
        except BaseException as error:
            self._dropped += values.count
            raise_users_exception(error)
            self._is_failing = True
            count = self._failures.add()
            if FailureCounter.is_logged(count):
                self._log("log()", error)
            if self._failures.is_exhausted():
                log.error("%s failed %d times in a row and gets no more values", self.label, count)
        else:
            self._failures.reset()
            self._is_failing = False

    def _finish(self) -> None:
        if self._is_started:
            self.finish()

    def _end_failed(self, error: BaseException) -> None:
        self._is_failing = True
        self._log("finish()", error)

    def _log(self, what: str, error: BaseException) -> None:
        log.error("%s failed in %s (training is not affected)", self.label, what, exc_info=error)

    # -- the end -----------------------------------------------------------------------------------------------------

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until the logger has everything committed; return whether it has."""
        dropped = self._dropped
        self._worker.wait_for(lambda: not (self._queue or self._worker.is_busy) or self._is_failing, timeout)
        return (
            self._worker.process == os.getpid()
            and not (self._queue or self._worker.is_busy)
            and self._dropped == dropped
        )

    def close(self, timeout: float | None = 2.0) -> bool:
        """Pass everything on and release the logger; values that are not passed on within `timeout` seconds are dropped."""
        if self._worker.process != os.getpid():
            return False
        self._retry_at = 0.0
        is_finished = self._worker.close(timeout)
        with self._worker.lock:
            lost = sum(values.count for values in self._queue)
            self._queue.clear()
            self._waiting = 0
            self._dropped += lost
        if lost:
            log.error("%s: closed before %d values could be passed on; they are lost", self.label, lost)
        return is_finished and not self._dropped

    @property
    def is_unwritable(self) -> bool:
        """Whether the last call of the logger failed."""
        return self._is_failing

    @property
    def dropped(self) -> int:
        """Number of values that did not reach the logger."""
        return self._dropped


class FunctionBackend(LoggerBackend):
    """Calls ``function(tag, value, step)`` with each number, in a thread.

    Parameters
    ----------
    function : callable
        The function.
    **options : Any
        See `LoggerBackend`.

    Examples
    --------
    >>> from ikkuna.visualization import Series
    >>> backend = FunctionBackend(print)
    >>> backend.add_scalar(Series("weights_norm2", "fc"), 0.5, 3); backend.commit(3); backend.close()
    weights_norm2/fc 0.5 3
    True
    """

    def __init__(self, function: Callable[[str, float, int], object], **options: Any) -> None:
        super().__init__(**options)
        self._function = function

    @property
    def label(self) -> str:
        """The name of the function."""
        return f"the function {getattr(self._function, '__name__', type(self._function).__name__)}()"

    def log_step(self, values: StepValues) -> None:
        """Call the function with each number."""
        for tag, value in values.scalars.items():
            self._function(tag, value, values.step)


class SummaryWriterBackend(LoggerBackend):
    """Adds values to an existing ``SummaryWriter`` of torch or tensorboardX, or another object with ``add_scalar``.

    Histograms, images and texts are added if the object has ``add_histogram_raw``, ``add_image`` and ``add_text``.
    The writer stays open, because it belongs to the user.

    Parameters
    ----------
    writer : object
        The writer.
    **options : Any
        See `LoggerBackend`.
    """

    def __init__(self, writer: Any, **options: Any) -> None:
        super().__init__(**options)
        self._writer = writer

    @property
    def label(self) -> str:
        """The class of the writer."""
        return type(self._writer).__name__

    def log_step(self, values: StepValues) -> None:
        """Add the values of a step."""
        writer, step = self._writer, values.step
        for tag, value in values.scalars.items():
            writer.add_scalar(tag, value, step)
        if hasattr(writer, "add_histogram_raw"):
            for tag, each in values.histograms.items():
                limits, counts = (np.asarray(getattr(each, name), float).tolist() for name in LISTS)
                sums = (float(getattr(each, name)) for name in NUMBERS)
                writer.add_histogram_raw(tag, *sums, limits, counts, step)
        if hasattr(writer, "add_image"):
            for tag, matrix in values.matrices.items():
                writer.add_image(tag, np.asarray(matrix_picture(matrix)), step, dataformats="HWC")
        if hasattr(writer, "add_text"):
            texts = {"Config": config_table(values.config)} if values.config else {}
            for title, text in (texts | values.texts).items():
                writer.add_text(f"Text/{title}", text, step)

    def finish(self) -> None:
        """Flush the writer."""
        if hasattr(self._writer, "flush"):
            self._writer.flush()


def metric_name(tag: str) -> str:
    """Return a name for a store of MLflow in files, in which a metric ``loss`` of the script excludes one in ``loss/``.

    Examples
    --------
    >>> metric_name("learning_rate/group 0"), metric_name("weights_norm2/fc")
    ('Network/learning_rate group 0', 'weights_norm2/fc')
    """
    return f"Network/{tag.replace('/', ' ', 1)}" if tag.startswith(("loss/", "learning_rate/")) else tag


class LightningLoggerBackend(LoggerBackend):
    """Passes the numbers of each step to ``log_metrics`` of a logger of Lightning, in one call.

    The logger stays open, because it belongs to the trainer.

    Parameters
    ----------
    logger : object
        The logger.
    **options : Any
        See `LoggerBackend`.
    """

    def __init__(self, logger: Any, **options: Any) -> None:
        super().__init__(**options)
        self._logger = logger

    @property
    def label(self) -> str:
        """The class of the logger."""
        return type(self._logger).__name__

    def log_step(self, values: StepValues) -> None:
        """Log the numbers of a step."""
        if values.config and hasattr(self._logger, "log_hyperparams"):
            try:
                self._logger.log_hyperparams(values.config)
            except Exception as error:  # MLflow refuses another text of an object that the trainer has logged
                raise_users_exception(error)
                log.warning("%s keeps its hyper-parameters: %s", self.label, error)
        if values.scalars:
            name = metric_name if self.label == "MLFlowLogger" else str
            self._logger.log_metrics({name(tag): value for tag, value in values.scalars.items()}, step=values.step)

    def finish(self) -> None:
        """Save what the logger holds in memory."""
        if hasattr(self._logger, "save"):
            self._logger.save()


class RemoteBackend(LoggerBackend):
    """A logger that creates a run of its own, named after the directory of the run.

    Parameters
    ----------
    **options : Any
        See `LoggerBackend`.
    """

    def open(self, directory: Path) -> None:
        """Use `directory` for the files of the logger."""
        self._make_directory = lambda: directory

    def open_later(self, make_directory: Callable[[], Path]) -> None:
        """Create the directory in the thread of the logger."""
        self._make_directory = make_directory

    def identity(self) -> str | None:
        """Return the identity of the run, which stays the same if it is resumed."""
        content = read_run_file(self.directory())
        return None if content is None else content.id


_ADAPTERS: dict[str, Callable[[Any], LoggerBackend]] = {
    "log_metrics": LightningLoggerBackend,
    "add_scalar": SummaryWriterBackend,
}


def is_target(target: Any) -> bool:
    """Return whether values can be shown in `target`.

    Examples
    --------
    >>> is_target("tb"), is_target(print), is_target(3), is_target(FunctionBackend)
    (True, True, False, False)
    """
    if isinstance(target, str | Backend):
        return True
    return not isinstance(target, type) and (callable(target) or any(hasattr(target, name) for name in _ADAPTERS))


def adapted(target: Any) -> Any:
    """Return a backend for an object of the user: a logger, a writer or a function; a name or a backend is returned itself."""
    if isinstance(target, str | Backend):
        return target
    for method, backend in _ADAPTERS.items():
        if callable(getattr(target, method, None)):
            return backend(target)
    return FunctionBackend(target)
