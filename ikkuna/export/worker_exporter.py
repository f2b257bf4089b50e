"""Replaces an exporter in a worker process."""

from typing import Any

from torch import Tensor

from ikkuna.logger import log

__all__ = ["WorkerExporter", "warn_of_worker"]


def warn_of_worker(name: str) -> None:
    """Log that a value which is logged in a worker process is not shown."""
    log.warning(
        "exporter.log(%r) in a worker process shows nothing, and so do further calls there; "
        "return the value to the process that trains, and log it there",
        name,
    )


class WorkerExporter:
    """The exporter that a process gets which is started with ``spawn`` or ``forkserver``, such as a worker of a data loader.

    It records nothing, because the model is trained in another process.

    Examples
    --------
    >>> import torch
    >>> WorkerExporter().observe("router", torch.ones(2))
    """

    def __init__(self) -> None:
        self._has_warned = False

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        """Show nothing; the first call logs a warning."""
        if not self._has_warned:
            self._has_warned = True
            warn_of_worker(name)

    def observe(self, name: str, tensor: Tensor) -> None:
        """Record nothing."""
