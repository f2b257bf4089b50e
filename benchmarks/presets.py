"""Measures the cost of the presets of ``ikkuna.watch``, as a share of the CPU time of a training step.

One thread is used, and all variants are interleaved in blocks of ten steps.
A period has 400 steps.  Steps of which the same is measured form a class; up to six steps of each class are measured per variant,
and a figure is the mean over the period of the medians of the classes.  The other steps train with a batch of one sample.
The first 400 steps, in which rules sample more often, are excluded.
``own`` is the CPU time of the training thread inside of ikkuna; ``difference`` is that of the whole process minus that of an
unobserved step, which includes what the hooks cost torch and the caches, and has the noise of two steps.
Values are shown with the backend ``null``; ``--backend tb`` writes event files in a temporary directory.
``watch`` is a preset with rules and the flight recorder, as ``ikkuna.watch`` registers them by default.

    python benchmarks/presets.py [--models mlp conv transformer] [--periods 3] [--backend null] [--metrics PRESET]
"""

import argparse
import math
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from overhead import MODELS, Workload

import ikkuna
from ikkuna.diagnosis import RecorderOptions
from ikkuna.export.subscriber import Subscriber
from ikkuna.metrics.subscriber.bases import GROUP, Preset
from ikkuna.observation.steps import counters
from ikkuna.store.values import ModuleEntry
from ikkuna.support.plugins import load_plugin

PERIOD = 400
BLOCK = 10
PRESETS = ("economy", "default", "full")
MEASURED = {
    1: (5, 65, 137, 197, 269, 339),
    2: (4, 66, 136, 198, 268, 338),
    10: (10, 30, 70, 90, 110, 130),
    20: (20, 60, 140, 180, 220, 260),
    40: (40, 120, 280, 360),
    50: (50, 150, 250, 350),
    80: (80, 160, 240, 320),
    100: (100, 300),
    200: (200,),
    400: (0,),
}
"""The steps of a period that are measured, by their class, see `class_of`."""


def class_of(step: int) -> int:
    """Return a number that is equal for steps of which the same is measured: 2 for the loss alone, 1 for nothing."""
    return math.gcd(step, PERIOD) if step % 10 == 0 else 2 - step % 2


def watched(directory: str, preset: str | None, *metrics: Subscriber, **options: Any) -> Callable[[Workload], None]:
    """Return a function that observes a workload."""

    def attach(work: Workload) -> None:
        handle = ikkuna.watch(
            work.model, *metrics, loss=work.loss, preset=preset, log_dir=directory, verbosity=0, **options
        )
        work.close = handle.close
        work.spent = lambda: handle._session.context.stopwatch.spent

    return attach


def variants_of(arguments: argparse.Namespace, directory: str) -> dict[str, Callable[[Workload], None]]:
    """Return the functions that observe each variant's workload."""
    plain = {"rules": None, "recorder": False, "backend": arguments.backend}
    # a dump would be followed by steps in which everything is measured
    whole = {"recorder": RecorderOptions(max_dumps=0), "backend": arguments.backend}
    if arguments.metrics:
        preset = load_plugin(GROUP, arguments.metrics, Preset)()
        preset.network = tuple(ModuleEntry(str(i), "ReLU") for i in range(30))
        metrics = {f"{type(s).__name__} {s.kinds[0]}": s for s in preset.subscribers(True)}
        return {name: watched(directory, None, s, **plain) for name, s in metrics.items()}
    if arguments.backend != "null":  # the thread that writes is shared by all metrics
        return {f"{name}, watch": watched(directory, name, **whole) for name in PRESETS}
    alone = {name: watched(directory, name, **plain) for name in PRESETS}
    return alone | {f"{name}, watch": watched(directory, name, **whole) for name in PRESETS}


def measure(make: Callable[[], Workload], attach: dict[str, Callable[[Workload], None]], periods: int) -> Any:
    """Return the mean CPU seconds of a step of each variant, and how many of them were spent inside of ikkuna."""
    counters.time = SimpleNamespace(perf_counter=time.thread_time)
    works = {"none": make()}
    for name, function in attach.items():
        torch.manual_seed(0)
        works[name] = make()
        function(works[name])
    times = {name: defaultdict[int, list[tuple[float, float]]](list) for name in works}
    measured = {step for steps in MEASURED.values() for step in steps}
    for work in works.values():
        work.step()  # step 0, so that each block of the others ends with a step that may be sampled
    for begin in range(0, PERIOD * (periods + 1), BLOCK):
        for name, work in works.items():
            whole = work.inputs, work.labels
            for step in range(begin + 1, begin + BLOCK + 1):
                is_measured = begin >= PERIOD and step % PERIOD in measured
                work.inputs, work.labels = whole if is_measured else tuple(part[:1] for part in whole)
                began = time.process_time(), spent_by(work)
                work.step()
                ended = time.process_time(), spent_by(work)
                if is_measured:
                    times[name][class_of(step)].append((ended[0] - began[0], ended[1] - began[1]))
            work.inputs, work.labels = whole
    for work in works.values():
        work.close()
    classes = [class_of(step) for step in range(PERIOD)]
    return {
        name: tuple(
            statistics.mean(statistics.median(pair[i] for pair in found[each]) for each in classes) for i in (0, 1)
        )
        for name, found in times.items()
    }


def spent_by(work: Workload) -> float:
    """Return the seconds that ikkuna has spent."""
    return work.spent() if hasattr(work, "spent") else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--periods", type=int, default=3)
    parser.add_argument("--backend", default="null")
    parser.add_argument("--metrics", choices=PRESETS, help="measure each metric of this preset alone")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for model in arguments.models:
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as directory:
            cost = measure(MODELS[model], variants_of(arguments, directory), arguments.periods)
        bare, _ = cost.pop("none")
        print(f"\n| {model}, step of {bare * 1e3:.1f} ms | own, ms | own | difference |\n|---|---|---|---|")
        for name, (whole, own) in cost.items():
            print(f"| {name} | {own * 1e3:.2f} | {own / bare:.2%} | {whole / bare - 1:.1%} |", flush=True)


if __name__ == "__main__":
    main()
