"""The speed of training, its memory, and the share of time that ikkuna takes."""

import math
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ikkuna.export.messages import NetworkMessage
from ikkuna.export.subscriber import PlotSubscriber, name_results
from ikkuna_subscribers._helpers.sample_count import SampleCount

__all__ = ["SpeedSubscriber", "resident_peak"]


class SpeedSubscriber(PlotSubscriber):
    """The time of a step, samples per second, the peak memory, and the share of the time that ikkuna took.

    A step lasts from the end of the previous step to its own end, waiting for data included, in wall-clock time.
    The first step has no previous one and publishes only its memory.  Steps between samples are not measured.
    A device works asynchronously: there single steps may be wrong, while their mean is right.

    Takes ``batch_finished``, and the number of samples from ``input_data``; publishes ``step_seconds``, ``samples_per_second``,
    ``monitor_share``, between 0 and 1, and ``peak_memory``, in bytes.
    Samples are counted along the first axis of the first tensor among the network's arguments, over all micro-batches;
    if no such call is seen, ``samples_per_second`` is not published.
    Peak memory is the largest resident size of this process since its start (NaN if the system does not report it),
    and, as a series for each CUDA device, the largest memory allocated to tensors since the start (or since the last reset of this peak).

    Look for: a step much longer than the median, which waits for data; memory that grows without end;
    a `monitor_share` above a few percent: increase `subsample` of the most expensive metric (``exporter.health().seconds``).

    Parameters
    ----------
    **options : Any
        See `Subscriber`.

    Examples
    --------
    >>> SpeedSubscriber().publishes
    ('step_seconds', 'samples_per_second', 'monitor_share', 'peak_memory')
    """

    def __init__(self, **options: Any) -> None:
        name_results(options, "step_seconds", "samples_per_second", "monitor_share", "peak_memory")
        super().__init__(["input_data", "batch_finished"], **options)
        self._samples = SampleCount()

    def measure(self, message: NetworkMessage) -> Tensor | None:
        """Return the number of samples."""
        return self._samples.measure(message)

    def compute(self, message: NetworkMessage) -> None:
        """Store the number of samples; emit the values when the step is over."""
        if message.kind == "input_data":
            self._samples.add(message)
            return
        samples, calls = self._samples.take()
        step_seconds, samples_per_second, monitor_share, peak_memory = self.publishes
        report = message.data or {}
        if (seconds := report.get("seconds", 0.0)) > 0:
            self.emit(message, seconds, step_seconds)
            if calls:
                self.emit(message, samples / seconds, samples_per_second)
            self.emit(message, report["own_seconds"] / seconds, monitor_share)
        self.emit(message, resident_peak(), peak_memory)
        for name, peak in _device_peaks():
            self.emit(replace(message, path=name), peak, peak_memory)


def resident_peak() -> float:
    """Return the largest resident size of this process, in bytes; NaN if the system does not report it.

    On Linux ``getrusage()`` would include the size of the parent process before the fork.

    Examples
    --------
    >>> resident_peak() > 1e6
    True
    """
    with suppress(FileNotFoundError, PermissionError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return float(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
    try:
        import resource
    except ImportError:  # on Windows
        return math.nan
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)  # macOS reports bytes, others KiB


def _device_peaks() -> list[tuple[str, float]]:
    if not torch.cuda.is_initialized():
        return []
    return [(f"cuda:{i}", float(torch.cuda.max_memory_allocated(i))) for i in range(torch.cuda.device_count())]
