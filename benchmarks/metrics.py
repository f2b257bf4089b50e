"""The cost of each metric: process CPU time of a training step with it over a step without, and its memory.

One small model trains with one thread.  Every metric is computed in every step, also if its default is less often.
All metrics are interleaved in one run, and the result is the median of the ratios.
Memory is the peak of a process with one metric minus the peak of a process without.

    python benchmarks/metrics.py [--rounds 9] [--only Norm Rank …] [--write]

With ``--write`` the table replaces the one in ``benchmarks/metrics.md``, which the documentation shows.
"""

import argparse
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from ikkuna_subscribers.training import resident_peak
from torch import nn

from ikkuna import observe
from ikkuna.backends.backend import NullBackend
from ikkuna.export import Exporter
from ikkuna.export import subscriber as installed
from ikkuna.export.messages import MessageBus
from ikkuna.support.plugins import plugin_names

TABLE = Path(__file__).with_name("metrics.md")
MiB = 1024 * 1024

# The arguments of metrics that need some.
ARGUMENTS: dict[str, tuple[tuple, dict]] = {
    **{
        f"{name}Subscriber": (("weights",), {})
        for name in ("Norm", "Mean", "Sum", "Variance", "Moments", "MinMax", "Sparsity", "Percentile", "Precision")
    },
    "HistogramSubscriber": (("weights",), {}),
    "MessageMeanSubscriber": (("weights",), {}),
    "RankSpreadSubscriber": (("weights",), {}),
    "RatioSubscriber": ((["weight_updates", "weights"],), {}),
    "RouterSubscriber": ((2,), {"modules": "4"}),  # the last layer has ten outputs: the logits of ten experts
    "SaturationSubscriber": (("activations", "tanh"), {}),
    "OptimizerStateSubscriber": (("exp_avg",), {}),
    "GradientNoiseScaleSubscriber": ((), {"steps": 2}),
    "TimestepGradientSubscriber": ((), {"modules": "*"}),
}
LEFT_OUT = {
    "CallbackSubscriber": "its cost is that of your function",
    "TestAccuracySubscriber": "it costs an evaluation of its data",
    **{
        f"{name}Subscriber": "it evaluates a probe set once an epoch; see ``benchmarks/probes.py``"
        for name in ("Attention", "CKA", "Freeze", "Hessian", "LayerSaturation", "SVCCA")
    },
}


class ObservedReLU(nn.ReLU):
    """Passes its output to ``observe`` as the scores of eight attention heads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        observe("scores", y.view(1, 8, 128, 128))
        return y


class Workload:
    """A network with two hidden layers of 1024, from a fixed seed."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(256, 1024), ObservedReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
        )
        self.inputs, self.labels = torch.randn(128, 256), torch.randint(0, 10, (128,))
        self.loss, self.optimizer = nn.CrossEntropyLoss(), torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.close: Callable[[], None] = lambda: None

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss(self.model(self.inputs), self.labels).backward()
        self.optimizer.step()

    def add_metric(self, name: str) -> None:
        """Register one metric, at every step."""
        arguments, options = ARGUMENTS.get(name, ((), {}))
        exporter = Exporter(message_bus=MessageBus(), on_error="raise")
        exporter.add_modules(self.model)
        exporter.set_loss(self.loss)
        metric = getattr(installed, name)(*arguments, subsample=1, backend=NullBackend(), **options)
        exporter.message_bus.register_subscriber(metric)
        self.close = exporter.close


def names() -> list[str]:
    """Return the metrics to measure, in alphabetical order."""
    return sorted(filter(is_a_metric, plugin_names(installed.GROUP)))


def is_a_metric(name: str) -> bool:
    ours = getattr(installed, name).__module__.startswith("ikkuna_subscribers.")
    return ours and name not in LEFT_OUT


def times(chosen: list[str], rounds: int) -> dict[str, float]:
    """Return the median ratio of the CPU times of a step with each metric and a step without."""
    bare, works = Workload(), {name: Workload() for name in chosen}
    for name, work in works.items():
        work.add_metric(name)
    ratios: dict[str, list[float]] = {name: [] for name in chosen}
    for round_ in range(rounds + 1):
        for name, work in works.items():
            without, with_metric = two_steps(bare), two_steps(work)
            if round_:  # the first round warms up
                ratios[name].append(with_metric / without)
    for work in works.values():
        work.close()
    return {name: statistics.median(found) for name, found in ratios.items()}


def two_steps(work: Workload) -> float:
    start = time.process_time()
    work.step()
    work.step()
    return time.process_time() - start


def peak(name: str) -> float:
    """Return the peak of the resident size of a process that trains with one metric, in MiB."""
    command = [sys.executable, __file__, "--peak-of", name]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def print_peak(name: str) -> None:
    work = Workload()
    if name != "bare":
        work.add_metric(name)
    for _ in range(4):
        work.step()
    work.close()
    print(resident_peak() / MiB)


def table(chosen: list[str], rounds: int) -> str:
    found, bare = times(chosen, rounds), peak("bare")
    lines = ["| metric, every step | time of a step, relative to none | additional peak memory, MiB |", "|---|---|---|"]
    for name in chosen:
        lines.append(f"| `{name}` | {found[name]:.2f} | {max(peak(name) - bare, 0.0):.0f} |")
    lines += [f"| `{name}` | {why} | |" for name, why in LEFT_OUT.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="+", help="beginnings of names")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if arguments.peak_of:
        print_peak(arguments.peak_of)
        return
    chosen = [name for name in names() if not arguments.only or name.startswith(tuple(arguments.only))]
    text = table(chosen, arguments.rounds)
    print(text)
    if arguments.write:
        TABLE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
