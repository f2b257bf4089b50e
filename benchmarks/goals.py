"""Prints the table of goals of the host: cost per value, per module and per step, beside the goal.

Each part runs in a process of its own.  Times are process CPU times of one thread; what is compared is interleaved inside of a process,
and the processes of two versions take turns.  With ``--before`` the same is measured with the package of another work tree:

    git worktree add --detach /tmp/before COMMIT
    python benchmarks/goals.py --before /tmp/before
    python benchmarks/goals.py --parts chains set_up         # some parts only

A floor is one ``sum()`` over each tensor, see ``overhead.py``.  Run it while the machine does nothing else; the load is printed.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import gpu_models
import torch
from overhead import FULL, KINDS, MODELS, Workload, bare, fields, floor, histograms, norms, watched
from scaling import chain

import ikkuna
from ikkuna.backends.backend import NullBackend
from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import (
    MeanSubscriber,
    MinMaxSubscriber,
    NonFiniteSubscriber,
    NormSubscriber,
    SparsitySubscriber,
    VarianceSubscriber,
)

Found = dict[str, float]
Attach = Callable[[Workload], object]

SIX = (NormSubscriber, MeanSubscriber, VarianceSubscriber, MinMaxSubscriber, SparsitySubscriber, NonFiniteSubscriber)
GOALS = {
    "a floor, mlp, ms": "",
    "a floor, conv, ms": "",
    "a floor, transformer, ms": "",
    "norms, mlp, floors": "1.2",
    "norms, conv, floors": "1.2",
    "norms, transformer, floors": "1.2",
    "full statistics, mlp, floors": "2",
    "full statistics, conv, floors": "2",
    "full statistics, transformer, floors": "2",
    "histograms beyond norms, mlp, floors": "3",
    "histograms beyond norms, conv, floors": "3",
    "histograms beyond norms, transformer, floors": "3",
    "step that is not sampled, mlp, ms by the stopwatch": "0.1",
    "six metrics, chain of 1,000, ms a step": "15",
    "norms, chain of 1,000, ms a step": "",
    "norms, chain of 1,000, to TensorBoard, floors": "0.6",
    "norms, chain of 10, µs a module": "",
    "norms, chain of 100, µs a module": "15",
    "norms, chain of 1,000, µs a module": "15",
    "norms, chain of 10,000, µs a module": "15",
    "add_modules, 10,000 modules, s": "0.1",
    "five registrations, 10,000 modules, s": "0.1",
    "first sampled step in addition to the bare one, 10,000 modules, s": "0.3",
    "later sampled steps in addition to the bare one, 10,000 modules, s": "",
    "default preset at every step, GPT-2 shape on 128 tokens, %": "2",
    "default preset at every step, GPT-2 shape on 1,024 tokens, %": "2",
    "default preset at every step, ResNet-50, %": "5",
    "memory of the default preset, GPT-2 shape on 128 tokens, MB": "60 to 90",
    "memory of the default preset, GPT-2 shape on 1,024 tokens, MB": "60 to 90",
    "memory of the default preset, ResNet-50, MB": "65 to 72",
    "norms, mlp, wall time, one thread, %": "",
    "norms, mlp, wall time, all threads, %": "as with one",
    "norms, conv, wall time, one thread, %": "",
    "norms, conv, wall time, all threads, %": "as with one",
}


def six() -> Attach:
    """Return a function that watches the five kinds with six metrics."""
    makes = [lambda kind, cls=cls: cls(kind, subsample=1, backend=NullBackend()) for cls in SIX]
    return watched(*makes)


def models() -> Found:
    """Measure norms, full statistics and histograms of three models."""
    variants: dict[str, Attach] = {"floor": floor, "norms": norms(), "full": fields(FULL), "h": histograms(exact=False)}
    found = {}
    for name in MODELS:
        cost = differences(attached(MODELS[name], {"bare": bare, **variants}), 40)
        unit = cost["floor"]
        found[f"a floor, {name}, ms"] = unit * 1e3
        found[f"norms, {name}, floors"] = cost["norms"] / unit
        found[f"full statistics, {name}, floors"] = cost["full"] / unit
        found[f"histograms beyond norms, {name}, floors"] = (cost["h"] - cost["norms"]) / unit
    work = MODELS["mlp"]()
    exporter = norms(10**9)(work)
    spent = []
    for _ in range(60):
        before = exporter._session.context.stopwatch.spent
        work.step()
        spent.append(exporter._session.context.stopwatch.spent - before)
    work.close()
    return found | {"step that is not sampled, mlp, ms by the stopwatch": statistics.median(spent) * 1e3}


def differences(works: dict[str, Workload], steps: int, clock: Callable[[], float] = time.process_time) -> Found:
    """Return the mean of what each workload takes more than the first one, in seconds a step; the rounds are interleaved."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work.step(), work.step()
    for _ in range(steps):
        for name, work in works.items():
            began = clock()
            work.step()
            times[name].append(clock() - began)
    first = next(iter(works))
    for work in works.values():
        work.close()
    more = {name: statistics.median(a - b for a, b in zip(times[name], times[first], strict=True)) for name in works}
    return more | {first: statistics.median(times[first])}


def attached(make: Callable[[], Workload], variants: dict[str, Attach]) -> dict[str, Workload]:
    """Return a workload for each variant."""
    works = {}
    for name, attach in variants.items():
        torch.manual_seed(0)
        works[name] = make()
        attach(works[name])
    return works


def chains() -> Found:
    """Measure chains of small layers."""
    with tempfile.TemporaryDirectory() as directory:
        to_files = watched(NormSubscriber, log_dir=directory, verbosity=0)  # type: ignore[arg-type]
        variants = {"bare": bare, "floor": floor, "norms": norms(), "six": six(), "tb": to_files}
        more = differences(attached(lambda: chain(1_000), variants), 25)
    found = {
        "six metrics, chain of 1,000, ms a step": more["six"] * 1e3,
        "norms, chain of 1,000, ms a step": more["norms"] * 1e3,
        "norms, chain of 1,000, to TensorBoard, floors": more["tb"] / more["floor"],
        "norms, chain of 1,000, µs a module": more["norms"] * 1e3,
    }
    for layers, steps in ((100, 150), (10, 400)):
        more = differences(attached(lambda layers=layers: chain(layers), {"bare": bare, "norms": norms()}), steps)
        found[f"norms, chain of {layers}, µs a module"] = more["norms"] / layers * 1e6
    return found


def set_up() -> Found:
    """Measure the set-up of 10,000 modules without the pauses of the garbage collector, and later steps with them."""
    work, count = chain(10_000), 10_000
    seconds: list[float] = []

    def timed(function: Callable[[], object]) -> float:
        began = time.process_time()
        function()
        return time.process_time() - began

    work.step()
    unobserved = statistics.median(timed(work.step) for _ in range(3))
    gc.disable()
    with Exporter(message_bus=MessageBus(), on_error="raise") as exporter:
        seconds.append(timed(lambda: exporter.add_modules(work.model)))
        subscribers = [NormSubscriber(kind, backend=NullBackend()) for kind in KINDS]
        seconds.append(timed(lambda: [*map(exporter.message_bus.register_subscriber, subscribers)]))
        seconds.append(timed(work.step) - unobserved)
        gc.enable()
        work.step()
        seconds.append(statistics.median(timed(work.step) for _ in range(3)) - unobserved)
    names = [name for name in GOALS if name.endswith("10,000 modules, s")]
    return dict(zip(names, seconds, strict=True)) | {"norms, chain of 10,000, µs a module": seconds[-1] / count * 1e6}


def gpt2_shape(length: int) -> Workload:
    """Return a GPT-2 of 4 blocks on a number of tokens."""
    tokens = torch.randint(0, 50_257, (1, length + 1))
    return Workload(gpu_models.GPT2(blocks=4), tokens[:, :-1], tokens[:, 1:])


def resnet50() -> Workload:
    """Return ResNet-50 on 4 images."""
    whole = gpu_models.resnet50(torch.device("cpu"), tiny=False)
    return Workload(whole.model, whole.inputs[:4].clone(), whole.labels[:4].clone())


def cost_and_peak(step: Callable[[], object]) -> tuple[float, int]:
    """Return the CPU time of a step, and the largest resident memory in it, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")  # the kernel forgets the largest value so far
    began = time.process_time()
    step()
    spent = time.process_time() - began
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return spent, int(status["VmHWM"].split()[0]) * 1024


def presets() -> Found:
    """Measure the default preset with rules and flight recorder at every step, and how much more memory a step takes at most."""
    found: Found = {}
    makes: dict[str, tuple[Callable[[], Workload], int]] = {
        "GPT-2 shape on 128 tokens": (lambda: gpt2_shape(128), 5),
        "GPT-2 shape on 1,024 tokens": (lambda: gpt2_shape(1024), 3),
        "ResNet-50": (resnet50, 5),
    }
    for name, (make, rounds) in makes.items():
        torch.manual_seed(0)
        work = make()
        for _ in range(2):
            work.step()
        plain, sampled = [], []
        for _ in range(rounds):  # the same model, so that its memory is not doubled
            with tempfile.TemporaryDirectory() as directory:
                options = {"log_dir": directory, "verbosity": 0, "backend": "null"}
                with ikkuna.watch(work.model, loss=work.loss, every=1, **options):
                    work.step(), work.step()
                    sampled.append(cost_and_peak(work.step))
            work.step()
            plain.append(cost_and_peak(work.step))
        (time_with, memory_with), (time_bare, memory_bare) = (
            map(statistics.median, zip(*x, strict=True)) for x in (sampled, plain)
        )
        found[f"default preset at every step, {name}, %"] = (time_with / time_bare - 1) * 100
        found[f"memory of the default preset, {name}, MB"] = (memory_with - memory_bare) / 1e6
    return found


def threads() -> Found:
    """Measure the overhead of norms in wall time with one thread, and with all cores."""
    found: Found = {}
    for name in ("mlp", "conv"):
        for label, count in {"one thread": 1, "all threads": os.cpu_count() or 1}.items():
            torch.set_num_threads(count)
            more = differences(attached(MODELS[name], {"bare": bare, "norms": norms()}), 40, time.perf_counter)
            found[f"norms, {name}, wall time, {label}, %"] = more["norms"] / more["bare"] * 100
    torch.set_num_threads(1)
    return found


PARTS = {
    "models": models,
    "chains": chains,
    "set_up": set_up,
    "presets": presets,
    "threads": threads,
}


def run(part: str, tree: Path) -> Found:
    """Run a part in a process of its own, with the package of a work tree."""
    environment = os.environ | {"PYTHONPATH": f"{tree}:{tree / 'subscribers'}", "OMP_NUM_THREADS": str(os.cpu_count())}
    command = [sys.executable, __file__, "--run", part]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: Found = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a work tree of another version")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--run", choices=list(PARTS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if arguments.run:
        print(json.dumps(PARTS[arguments.run]()))
        return
    trees: dict[str, Path] = {} if arguments.before is None else {"before": arguments.before}
    trees["now"] = Path(__file__).parents[1]
    found: dict[str, Found] = {version: {} for version in trees}
    print(f"load at the beginning: {os.getloadavg()[0]:.1f}")
    print(f"| what | {' | '.join(trees)} | goal |\n|---|{'---|' * len(trees)}---|", flush=True)
    for part in arguments.parts:
        for version, tree in trees.items():
            found[version] = run(part, tree)
        for name in (name for name in GOALS if name in found["now"]):
            cells = " | ".join(f"{found[version].get(name, float('nan')):.2f}" for version in trees)
            print(f"| {name} | {cells} | {GOALS[name]} |", flush=True)
    print(f"load at the end: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
