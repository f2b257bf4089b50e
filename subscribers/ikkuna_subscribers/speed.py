"""How fast training goes, what memory it takes, and how much of that is ours."""

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
    r"""Time of a step, samples a second, the largest memory so far, and the share of the time that ikkuna took.

    A step lasts from the end of the step before to its own, waiting for data included, by the clock on the wall;
    the first, which has none before it, has only its memory told.
    Steps between samples are not looked at.  On a device, which works on after it was asked to, single steps may be
    off while their mean is right.

    Takes ``batch_finished``, and the number of samples from ``input_data``; publishes ``step_seconds``, ``samples_per_second``,
    ``monitor_share``, between 0 and 1, and ``peak_memory``, in bytes.
    Samples are counted along the first axis of the first tensor the network is called with, over all micro-batches;
    where no such call is seen there are none a second.
    Peak memory is the largest resident size of this process since it began (NaN where the system does not tell),
    and, as a series for each CUDA device, what tensors took there since the start (or since its peak was last reset).

    Look for: a step that is much longer than the median, which is waiting for data; memory that grows without end;
    a `monitor_share` above a few percent, which a larger `subsample` of the costliest metric brings down (``exporter.health().seconds``).

    Parameters
    ----------
    **options
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
        """Keep the number of samples; emit everything when the step is over."""
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
    """Return the largest resident size of this process, in bytes; NaN where the system does not tell.

    Linux's getrusage() would begin with that of the process it was forked from.

    Examples
    --------
    >>> resident_peak() > 1e6
    True
    """
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return float(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows does not have it
        return math.nan
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)  # where it is not bytes it is KiB


def _device_peaks() -> list[tuple[str, float]]:
    if not torch.cuda.is_initialized():
        return []
    return [(f"cuda:{i}", float(torch.cuda.max_memory_allocated(i))) for i in range(torch.cuda.device_count())]
