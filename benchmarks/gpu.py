"""Measures the overhead on an accelerator: the time of a training step, relative to the step without ikkuna.

Variants train in turns.

A step is timed from its first launch until the device has finished; events of the device give the time of the device alone, and the
time of the process that of the host.  The medians of all rounds are printed, and the peak memory.

    python -m benchmarks.gpu [--models gpt2 resnet50 mlp] [--rounds 30] [--variants norms …] [--device cuda]

Without a device it says so and ends with status 1.  ``--device cpu --tiny`` runs small models on the host, to try the script itself.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from ikkuna_subscribers.preset import DefaultPreset
from torch import Tensor, nn

from benchmarks.gpu_models import MODELS, Workload
from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import (
    HistogramSubscriber,
    MeanSubscriber,
    MinMaxSubscriber,
    NormSubscriber,
    PercentileSubscriber,
    SparsitySubscriber,
    VarianceSubscriber,
)

KINDS = ("weights", "weight_gradients", "weight_updates", "activations", "layer_gradients")
STATISTICS = (NormSubscriber, MeanSubscriber, VarianceSubscriber, MinMaxSubscriber, SparsitySubscriber)
HISTOGRAMS = (PercentileSubscriber, HistogramSubscriber)
Undo = Callable[[], object]


class Measured(NamedTuple):
    """The times of a step in milliseconds: as a clock shows it, on the device, and of the process; and the peak memory in MiB."""

    wall: float
    device: float
    host: float
    memory: float


def watched(*classes: Any, every: int = 1) -> Callable[[Workload], Undo]:
    """Observe five kinds of every layer with some metrics."""

    def attach(work: Workload) -> Undo:
        exporter = Exporter(message_bus=MessageBus("benchmark"), on_error="raise")
        exporter.add_modules(work.model)
        for kind in KINDS:
            for make in classes:
                exporter.message_bus.register_subscriber(make(kind, subsample=every, backend="null"))
        return exporter.close

    return attach


def default_preset(work: Workload) -> Undo:
    """Observe what ``ikkuna.watch`` does by default, which samples every tenth step."""
    exporter = Exporter(message_bus=MessageBus("benchmark"), on_error="raise")
    exporter.add_modules(work.model)
    exporter.set_loss(work.loss)
    for subscriber in DefaultPreset().subscribers(sees_loss=True):
        subscriber.backends = ("null",)
        exporter.message_bus.register_subscriber(subscriber)
    return exporter.close


def hand_loop(work: Workload) -> Undo:  # noqa: C901  # four hooks that share a list
    """Compute the same norms as people do by hand: a hook with a norm for each output, and a loop over the parameters."""
    found: list[Tensor] = []

    def note(x: Tensor) -> None:
        found.append(torch.linalg.vector_norm(x.detach(), dtype=torch.float32))

    def forward(module: nn.Module, args: Any, output: Any) -> None:
        first = output if isinstance(output, Tensor) else next((x for x in output if isinstance(x, Tensor)), None)
        if first is not None and first.is_floating_point():
            note(first)
            if first.requires_grad:
                first.register_hook(note)

    def step_begins(*_: Any) -> None:
        weights = [p for p in work.model.parameters() if p.ndim > 1]
        work.before = [p.detach().clone() for p in weights]
        for p in weights:
            note(p)
            note(p.grad)

    def step_ends(*_: Any) -> None:
        for p, before in zip((p for p in work.model.parameters() if p.ndim > 1), work.before, strict=True):
            note(p - before)
        torch.stack(found).tolist()
        found.clear()

    handles = [module.register_forward_hook(forward) for module in work.model.modules()]
    handles += [work.optimizer.register_step_pre_hook(step_begins), work.optimizer.register_step_post_hook(step_ends)]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def wandb_watch(work: Workload) -> Undo:
    """Observe weights and gradients as histograms with ``wandb.watch``, every tenth step, offline."""
    import wandb

    folder = tempfile.TemporaryDirectory()
    run = wandb.init(mode="offline", dir=folder.name, settings=wandb.Settings(silent=True))
    run.watch(work.model, log="all", log_freq=10)

    def undo() -> None:
        run.unwatch(work.model)
        run.finish()
        folder.cleanup()

    return undo


VARIANTS: dict[str, Callable[[Workload], Undo]] = {
    "alone": lambda work: lambda: None,
    "norms": watched(NormSubscriber),
    "norms, every 10th": watched(NormSubscriber, every=10),
    "statistics": watched(*STATISTICS),
    "statistics, every 10th": watched(*STATISTICS, every=10),
    "histograms": watched(*HISTOGRAMS),
    "histograms, every 10th": watched(*HISTOGRAMS, every=10),
    "default preset": default_preset,
    "norms by hand": hand_loop,
    "wandb.watch, every 10th": wandb_watch,
}


class Timer:
    """Times steps on a device.

    Parameters
    ----------
    device : torch.device
        The device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)

    def time(self, step: Callable[[], object]) -> Measured:
        """Return the times of a step and the peak memory."""
        if self._module is None:
            host = time.process_time()
            step()
            host = time.process_time() - host
            return Measured(host * 1e3, 0.0, host * 1e3, 0.0)  # a clock counts other processes as well
        self._module.synchronize()
        self._module.reset_peak_memory_stats()
        first, last = (self._module.Event(enable_timing=True) for _ in range(2))
        began, host = time.perf_counter(), time.process_time()
        first.record()
        step()
        last.record()
        host = time.process_time() - host
        self._module.synchronize()
        wall = time.perf_counter() - began
        peak = self._module.max_memory_allocated() / 2**20
        return Measured(wall * 1e3, first.elapsed_time(last), host * 1e3, peak)


def measure(name: str, variants: list[str], rounds: int, device: torch.device, tiny: bool) -> dict[str, Measured]:
    """Return the median times of a model with each variant; every tenth step counts as often as it occurs.

    All variants train the same model in turns of ten steps, so that a device that becomes slower does so for all.
    """
    work, timer = MODELS[name](device, tiny), Timer(device)
    found: dict[str, list[Measured]] = {variant: [] for variant in variants}
    for turn in range(-1, max(1, rounds // 10)):
        for variant in variants:
            undo = VARIANTS[variant](work)
            for i in range(13):
                measured = timer.time(work.step)
                if turn >= 0 and i >= 3:  # the first steps compile kernels and allocate memory
                    found[variant].append(measured)
            undo()
    return {variant: _mean_of_turns(steps) for variant, steps in found.items()}


def _mean_of_turns(steps: list[Measured]) -> Measured:
    """Return the median over turns of the mean of ten steps, one of which is sampled if every tenth is; and the largest peak."""
    turns = [steps[i : i + 10] for i in range(0, len(steps), 10)]
    columns = [
        [statistics.fmean(getattr(step, field) for step in turn) for turn in turns] for field in Measured._fields
    ]
    return Measured(*(statistics.median(column) for column in columns[:3]), max(step.memory for step in steps))


def table(name: str, found: dict[str, Measured]) -> str:
    """Return the lines of a table."""
    alone = found["alone"]
    lines = [f"\n{name}", f"{'':26}{'wall ms':>10}{'overhead':>10}{'device ms':>11}{'host ms':>10}{'peak MiB':>10}"]
    for variant, x in found.items():
        share = x.wall / alone.wall - 1
        lines.append(f"{variant:26}{x.wall:10.2f}{share:10.1%}{x.device:11.2f}{x.host:10.2f}{x.memory:10.0f}")
    return "\n".join(lines)


def main() -> int:
    """Print a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=30, help="timed steps of each variant")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models, to try the script")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type != "cpu" and not torch.get_device_module(device).is_available():
        print(f"There is no {device.type} device here, so nothing was measured.")
        return 1
    variants = ["alone", *(name for name in options.variants if name != "alone")]
    if find_spec("wandb") is None and "wandb.watch, every 10th" in variants:
        variants.remove("wandb.watch, every 10th")
        print("wandb is not installed, so wandb.watch is left out.")
    print(f"{_name(device)}, torch {torch.__version__}, Triton {'found' if find_spec('triton') else 'missing'}")
    for name in options.models:
        print(table(name, measure(name, variants, options.rounds, device, options.tiny)), flush=True)
    return 0


def _name(device: torch.device) -> str:
    if device.type == "cpu":
        return "the host (to try the script: these figures are not those of an accelerator)"
    return str(torch.get_device_module(device).get_device_name())


if __name__ == "__main__":
    sys.exit(main())
