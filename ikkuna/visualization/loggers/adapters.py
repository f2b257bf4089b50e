"""Backends for objects of the user: a function, a SummaryWriter, or a logger of Lightning."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ikkuna.visualization.backend import Backend
from ikkuna.visualization.loggers.logger_backend import LoggerBackend
from ikkuna.visualization.loggers.matrix_image import matrix_array
from ikkuna.visualization.loggers.step_values import StepValues
from ikkuna.visualization.run_config import config_table

__all__ = ["FunctionBackend", "LightningLoggerBackend", "SummaryWriterBackend", "Target", "adapted", "is_target"]


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
                limits, counts = (np.asarray(part, float).tolist() for part in (each.bucket_limits, each.bucket_counts))
                sums = (float(getattr(each, name)) for name in ("min", "max", "num", "sum", "sum_squares"))
                writer.add_histogram_raw(tag, *sums, limits, counts, step)
        if hasattr(writer, "add_image"):
            for tag, matrix in values.matrices.items():
                writer.add_image(tag, matrix_array(matrix), step, dataformats="HWC")
        if hasattr(writer, "add_text"):
            texts = {"Config": config_table(values.config)} if values.config else {}
            for title, text in (texts | values.texts).items():
                writer.add_text(f"Text/{title}", text, step)

    def finish(self) -> None:
        """Flush the writer."""
        if hasattr(self._writer, "flush"):
            self._writer.flush()


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
            self._logger.log_hyperparams(values.config)
        if values.scalars:
            self._logger.log_metrics(dict(values.scalars), step=values.step)

    def finish(self) -> None:
        """Save what the logger holds in memory."""
        if hasattr(self._logger, "save"):
            self._logger.save()


Target = str | Backend | Callable[[str, float, int], object] | Any
"""Values that ``backend=`` accepts: a name, a backend, or an object of the user for which `adapted` creates one."""

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
