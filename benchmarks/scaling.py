"""How cost grows with modules, with the size of a tensor and with values; and whether health() tells the truth about it.

Process CPU time, one thread; what is compared is interleaved, and medians of ratios are taken.

    python benchmarks/scaling.py [--only modules sizes sink health] [--rounds 9] [--write]

With ``--write`` the two curves are kept in ``benchmarks/scaling.json``, from which the documentation draws them.
"""

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from overhead import FULL, MODELS, Workload, fields, norms
from torch import nn

from ikkuna.backends.run import Run
from ikkuna.backends.tensorboard import TensorBoardBackend
from ikkuna.numerics.statistics import needed_fields
from ikkuna.numerics.statistics.host import measure
from ikkuna.store.names import Series

CURVES = Path(__file__).with_name("scaling.json")
MODULES = (10, 100, 1_000, 10_000)
SIZES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000, 50_000_000)
KERNELS = ("native", "eager")
FIELDS = {
    "norm": ("sumsq",),
    "full": FULL,
    "full+m3,m4": (*FULL, "m3", "m4"),
    "exact histogram": ("codes", "min", "max"),
    "sampled histogram": ("sampled_codes", "min", "max"),
}


def cpu_time(function: Callable[[], object], times: int = 1) -> float:
    start = time.process_time()
    for _ in range(times):
        function()
    return (time.process_time() - start) / times


def wall_time(function: Callable[[], object], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        function()
    return time.perf_counter() - start


def chain(length: int) -> Workload:
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(length)))
    return Workload(layers, torch.randn(4, 8), torch.randint(0, 8, (4,)))


def over_modules(rounds: int) -> dict[str, float]:
    """Print and return what norms of five kinds cost for each module of a chain of small layers, five values each."""
    print("\n| modules | bare step (ms) | µs more a module |\n|---|---|---|")
    curve = {}
    for count in MODULES:
        plain, watched = chain(count), chain(count)
        norms()(watched)
        steps = max(1, 1_000 // count)
        rounds_here = max(5, rounds // (1 + count // 1_000))
        pairs = [(cpu_time(plain.step, steps), cpu_time(watched.step, steps)) for _ in range(rounds_here + 1)][1:]
        watched.close()
        # the mean, since rounds of the garbage collector come now and then
        more = statistics.fmean(b - a for a, b in pairs) / count
        curve[str(count)] = more
        print(f"| {count:,} | {statistics.median(a for a, _ in pairs) * 1e3:.2f} | {more * 1e6:.0f} |")
    return curve


def over_sizes(rounds: int) -> dict[str, dict[str, float]]:
    """Print and return what each set of statistics of one tensor costs, as multiples of its ``sum()``, native and eager."""
    print("\n| elements | sum (µs) | " + " | ".join(f"{name}, native / eager" for name in FIELDS) + " |")
    print("|---" * (len(FIELDS) + 2) + "|")
    curves: dict[str, dict[str, float]] = {f"{name}, {kernel}": {} for name in FIELDS for kernel in KERNELS}
    for size in SIZES:
        x = torch.randn(size)
        times = max(1, 2_000_000 // size)
        sums: list[float] = []
        costs: dict[tuple[str, str], list[float]] = {(name, kernel): [] for name in FIELDS for kernel in KERNELS}
        for _ in range(rounds):
            sums.append(cpu_time(lambda: x.sum().item(), times))  # noqa: B023  # called within the round
            for (name, kernel), ratios in costs.items():
                asked = needed_fields(FIELDS[name])
                took = cpu_time(lambda: measure(x, asked, native=kernel == "native"), times)  # noqa: B023
                ratios.append(took / sums[-1])
        for (name, kernel), ratios in costs.items():
            curves[f"{name}, {kernel}"][str(size)] = statistics.median(ratios)
        cells = (" / ".join(f"{curves[f'{n}, {kernel}'][str(size)]:.1f}" for kernel in KERNELS) for n in FIELDS)
        print(f"| {size:,} | {statistics.median(sums) * 1e6:.0f} | " + " | ".join(cells) + " |")
    return curves


def sink(rounds: int) -> None:
    """Print what a scalar costs on its way from a run into TensorBoard's file, the writer's thread included."""
    series = [Series("weights_norm2", f"layer.{i}") for i in range(300)]
    costs = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as directory:
            run, backend = Run(directory), TensorBoardBackend()

            def write(run: Run = run, backend: TensorBoardBackend = backend) -> None:
                for step in range(500):
                    for one in series:
                        run.show(one, 0.5, step, (backend,))
                    run.commit(step)
                run.close(None)

            costs.append(cpu_time(write) / (500 * len(series)))
    print(f"\nThe sink: {statistics.median(costs) * 1e6:.1f} µs of CPU time a scalar, 300 values a step, 500 steps")


def health(rounds: int) -> None:
    """Print the overhead that is measured from outside beside what the exporter says of itself."""
    print("\n| model | statistics | measured | by health() |\n|---|---|---|---|")
    for name, make in MODELS.items():
        for label, attach in {"norms": norms(), "full": fields(FULL)}.items():
            work, steps, pairs = make(), 10, []
            wall_time(work.step, steps)
            for _ in range(rounds):
                without = wall_time(work.step, steps)
                exporter = attach(work)  # whose clock goes on while something else runs, so nothing else does
                wall_time(work.step, 2)
                pairs.append((wall_time(work.step, steps) / without - 1, exporter.health().overhead))
                exporter.close()
            measured, said = (statistics.median(column) for column in zip(*pairs, strict=True))
            print(f"| {name} | {label} | {measured:.3f} | {said:.3f} |")


PARTS: dict[str, Callable[[int], Any]] = {"modules": over_modules, "sizes": over_sizes, "sink": sink, "health": health}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = {part: PARTS[part](arguments.rounds) for part in arguments.only}
    if arguments.write:
        known = json.loads(CURVES.read_text(encoding="utf-8")) if CURVES.exists() else {}
        curves = {part: curve for part, curve in found.items() if curve}
        CURVES.write_text(json.dumps(known | curves, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
