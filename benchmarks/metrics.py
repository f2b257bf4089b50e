"""What each metric costs: process CPU time of a training step with it over one without, and the memory it takes.

One small model, one thread, every metric in every step (whatever its own default), all interleaved round by round in one run;
the median of the ratios.  Memory is what the process holds more at its peak, in a process of its own for each metric, over the bare one.

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
from ikkuna_subscribers.speed import resident_peak
from torch import nn

from ikkuna.export import Exporter
from ikkuna.export import subscriber as installed
from ikkuna.export.messages import MessageBus
from ikkuna.plugins import plugin_names
from ikkuna.visualization.null import NullBackend

TABLE = Path(__file__).with_name("metrics.md")
MiB = 1024 * 1024

# How each is asked for, where its name alone does not do.
ARGUMENTS: dict[str, tuple[tuple, dict]] = {
    **{
        f"{name}Subscriber": (("weights",), {})
        for name in ("Norm", "Mean", "Sum", "Variance", "Moments", "MinMax", "Sparsity", "Percentile", "Precision")
    },
    "HistogramSubscriber": (("weights",), {}),
    "MessageMeanSubscriber": (("weights",), {}),
    "RankSpreadSubscriber": (("weights",), {}),
    "RatioSubscriber": ((["weight_updates", "weights"],), {}),
    "SaturationSubscriber": (("activations", "tanh"), {}),
    "OptimizerStateSubscriber": (("exp_avg",), {}),
    "GradientNoiseScaleSubscriber": ((), {"steps": 2}),
    "TimestepGradientSubscriber": ((), {"modules": "*"}),
}
LEFT_OUT = {
    "CallbackSubscriber": "it does what you tell it to",
    "TestAccuracySubscriber": "it costs a pass over the data it is given",
    **{
        f"{name}Subscriber": "it looks at a probe set now and then; see ``benchmarks/probes.py``"
        for name in ("Attention", "CKA", "Freeze", "Hessian", "LayerSaturation", "SVCCA")
    },
}


class Workload:
    """Two hidden layers of 1024, so that there is a matrix of 1024 x 1024; all from one seed."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
        )
        self.inputs, self.labels = torch.randn(128, 256), torch.randint(0, 10, (128,))
        self.loss, self.optimizer = nn.CrossEntropyLoss(), torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.close: Callable[[], None] = lambda: None

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss(self.model(self.inputs), self.labels).backward()
        self.optimizer.step()

    def watch(self, name: str) -> None:
        """Watch with one metric, at every step."""
        arguments, options = ARGUMENTS.get(name, ((), {}))
        exporter = Exporter(message_bus=MessageBus(), on_error="raise")
        exporter.add_modules(self.model)
        exporter.set_loss(self.loss)
        metric = getattr(installed, name)(*arguments, subsample=1, backend=NullBackend(), **options)
        exporter.message_bus.register_subscriber(metric)
        self.close = exporter.close


def names() -> list[str]:
    """Return the installed metrics that can be measured here, in alphabetical order."""
    return sorted(filter(is_a_metric, plugin_names(installed.GROUP)))


def is_a_metric(name: str) -> bool:
    ours = getattr(installed, name).__module__.startswith("ikkuna_subscribers.")
    return ours and name not in LEFT_OUT


def times(chosen: list[str], rounds: int) -> dict[str, float]:
    """Return the median ratio of a step's CPU time with each metric to one without."""
    bare, works = Workload(), {name: Workload() for name in chosen}
    for name, work in works.items():
        work.watch(name)
    ratios: dict[str, list[float]] = {name: [] for name in chosen}
    for round_ in range(rounds + 1):
        for name, work in works.items():
            before, watched = two_steps(bare), two_steps(work)
            if round_:  # the first warms up
                ratios[name].append(watched / before)
    for work in works.values():
        work.close()
    return {name: statistics.median(found) for name, found in ratios.items()}


def two_steps(work: Workload) -> float:
    start = time.process_time()
    work.step()
    work.step()
    return time.process_time() - start


def peak(name: str) -> float:
    """Return the peak of the resident size of a process that trains under one metric, in MiB."""
    command = [sys.executable, __file__, "--peak-of", name]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def print_peak(name: str) -> None:
    work = Workload()
    if name != "bare":
        work.watch(name)
    for _ in range(4):
        work.step()
    work.close()
    print(resident_peak() / MiB)


def table(chosen: list[str], rounds: int) -> str:
    found, bare = times(chosen, rounds), peak("bare")
    lines = ["| metric, every step | step, times the bare one | memory at the peak, MiB more |", "|---|---|---|"]
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
