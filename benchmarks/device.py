"""Measures the Python time of measurements on a device: CPU time of one thread, without the time of kernel launches.

No device is needed.  Tensors of the host take the way of tensors of a device with Triton: hooks, statistics, tables and memory for rows
are those of a device, and a launch is a function that does nothing.  So the figures contain the allocation of rows on the host instead
of the device, and lack the call that returns the current stream, about 1 µs.
A hook is called many times in a row; a chain of layers with and without an exporter shows the time that a layer takes longer,
which includes torch's own way to call hooks, and the work of each step.  The least time of all rounds counts.

    python -m benchmarks.device [--layers 50] [--rounds 40]
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import HistogramSubscriber, NormSubscriber, Subscriber, VarianceSubscriber
from ikkuna.numerics.statistics.device import statistics as device_statistics
from ikkuna.numerics.statistics.device import triton_launcher
from ikkuna.observation.rows import recorder
from ikkuna.observation.rows.rows import Part

METRICS: dict[str, tuple[Callable[..., Subscriber], ...]] = {
    "norms": (NormSubscriber,),
    "norms, variances, histograms": (NormSubscriber, VarianceSubscriber, HistogramSubscriber),
}
NAMES = ("measure_one", "measure_list", "merge_rows", "merge_codes", "sample_one", "sample_list")


class SilentKernels(triton_launcher.TritonKernels):
    """Kernels that do nothing."""

    @staticmethod
    def import_kernels() -> tuple[Any, Any]:
        names = SimpleNamespace(**{name: name for name in triton_launcher.DTYPES.values()})
        return SimpleNamespace(**{name: name for name in NAMES}), names


def silent(kernel: str, programs: int, *arguments: Any, **constants: Any) -> None:
    """Launch nothing; a merge, which is not measured, clears its result."""
    if kernel.startswith("merge"):
        arguments[-1].zero_()


@contextmanager
def host_as_device() -> Iterator[None]:
    """Let tensors of the host take the way of those of a device."""
    kernels = SilentKernels(torch.device("cpu"))
    on_device = patch.object(Part, "statistics", lambda part, x: part.on_device(x.device))
    launch = patch.object(triton_launcher, "launch", silent)
    not_native = patch.object(recorder, "library", lambda: None)
    always = patch.object(
        recorder.Recorder,
        "_receive_plain",
        lambda self, rows, part, *args: self._receive_on_device(rows.part(part), *args),
    )
    with (
        on_device,
        launch,
        not_native,
        always,
        patch.object(device_statistics, "triton_kernels", lambda device: kernels),
    ):
        yield


class Chain:
    """A forward of small layers, observed or not."""

    def __init__(self, layers: int, metrics: tuple[Callable[..., Subscriber], ...]) -> None:
        self.model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.x = torch.ones(4, 8)
        if metrics:
            self.exporter = Exporter(message_bus=MessageBus("benchmark"), on_error="raise")
            self.exporter.add_modules(self.model)
            for metric in metrics:
                self.exporter.message_bus.register_subscriber(metric("activations", subsample=1, backend="null"))

    def seconds(self) -> float:
        """Return the CPU time of the forward of a step."""
        start = time.process_time()
        y = self.model(self.x)
        forward = time.process_time() - start
        self.optimizer.zero_grad()
        y.sum().backward()
        self.optimizer.step()
        return forward

    def seconds_of_hook(self, calls: int) -> float:
        """Return the CPU time of one call of the hook of a layer, called several times within a forward."""
        layer, found = self.model[1], []
        (hook,) = layer._forward_hooks.values()

        def repeat(*args: Any) -> None:
            start = time.process_time()
            for _ in range(calls):
                hook(*args)
            found.append((time.process_time() - start) / calls)

        handle = layer.register_forward_hook(repeat)
        self.seconds()
        handle.remove()
        return found[0]


def measure(metrics: tuple[Callable[..., Subscriber], ...], layers: int, rounds: int) -> str:
    """Return a line with the microseconds for each output; the least of all rounds."""
    alone, watched = Chain(layers, ()), Chain(layers, metrics)
    times = zip(
        *((alone.seconds(), watched.seconds(), watched.seconds_of_hook(200)) for _ in range(rounds)), strict=True
    )
    without, within, hook = (min(found) * 1e6 for found in times)
    watched.exporter.close()
    added, layer = (within - without) / layers, without / layers
    return f"{hook:.1f} µs for a call of the hook; {added:.1f} µs are added to a layer that takes {layer:.1f} µs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with host_as_device():
        for name, metrics in METRICS.items():
            print(f"{name}: {measure(metrics, options.layers, options.rounds)}")


if __name__ == "__main__":
    main()
