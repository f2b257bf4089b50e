"""Prints the table of goals: the cost of a step on the host, beside the least that is possible and the goal.

The *limit* is what the bytes of the five kinds take at the bandwidth of ``sum()`` in this run, and 0.5 µs a module.
A *floor* is one ``sum()`` over each tensor, see ``overhead.py``.  Each part runs in a process of its own.  Times are process CPU
times of one thread; what is compared is interleaved.  With ``--before`` the same is measured with the package of another work tree:

    git worktree add --detach /tmp/before COMMIT
    python benchmarks/goals.py --before /tmp/before
    python benchmarks/goals.py --parts chains set_up         # some parts only

Run it while the machine does nothing else; the load is printed.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import gpu_models
import numpy as np
import rules
import torch
from overhead import FULL, MODELS, Workload, bare, floor, histograms, norms, watched
from scaling import chain
from torch.optim import optimizer as torch_optimizer

import ikkuna
from ikkuna.export.subscriber import NormSubscriber
from ikkuna.numerics.statistics.native import library
from ikkuna.numerics.statistics.native.kernels import ListMemory, flags_of

Found = dict[str, tuple[float, float | None]]
"""By name, what was measured and its limit."""

GLOBAL_HOOKS = "_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"

Attach = Callable[[Workload], object]

GOALS = {
    **{f"norms, {name}, floors": goal for name, goal in (("mlp", "0.65"), ("conv", "0.7"), ("transformer", "0.75"))},
    **{f"histograms beyond norms, {name}, floors": "1.5" for name in MODELS},
    **{f"norms, {name}, % of the step": "" for name in MODELS},
    **{f"torch._foreach_norm of parameters and gradients, {name}, % of the step": "" for name in MODELS},
    "page faults of a sampled step beyond a bare one, mlp": "0",
    "full statistics from memory, GB/s": "10",
    "full statistics in cache, GB/s": "25",
    "norm and copy of a weight, kept buffer, GB/s": "9",
    "norms with file, fixed, ms": "0.15",
    "norms with file, chain of 1,000, µs a module": "4",
    "norms with file, chain of 10,000, µs a module": "4",
    "default preset, chain of 10, sampled step, ms": "0.3",
    "idle step, chain of 10, warm caches, ms": "0.02",
    "idle step, chain of 10, cold caches, ms": "0.08",
    "default preset, mean at every=10, MLP, %": "1.5",
    "default preset, mean at every=10, GPT-2 shape, %": "1",
    "default preset, mean at every=10, ResNet-50, %": "1",
    "rules, mean, mlp, %": "0.5",
    "judging the loss of every step, mlp, %": "0.3",
    "judging the loss of every step, mlp, standard error, %": "0.05",
    "judging the loss of every step, mlp, step, ms": "25",
    "all judging, mean, mlp, %": "1",
    "all judging, mean, mlp, standard error, %": "0.05",
    "all judging, mean, mlp, step, ms": "25",
    "norms, GPT-2 shape, floors": "0.5",
    "norms, ResNet-50, floors": "0.95",
    "default preset at every step, GPT-2 shape, %": "16",
    "default preset at every step, ResNet-50, %": "7",
    "memory of the default preset, GPT-2 small, MB": "297",
    "kept bytes of it in health(), MB": "",
    "import of ikkuna beside torch, s": "0.15",
    "watch() of 10 layers, s": "0.02",
    "first sampled step of 10 layers, s": "0.03",
    "close() after three steps, wall time, s": "0.05",
    "first sampled step of 10,000 layers beyond the third, without pre-flight, s": "0.3",
}


PERIOD = 40
"""The number of steps after which rules sample the same statistics, from step 300 to step 3,000."""


@cache
def bandwidth(count: int = 1 << 26) -> float:
    """Return how many bytes a second ``sum()`` reads of a number of floats."""
    x = torch.ones(count)
    return 4 * count / min(timed(x.sum, max(1, (1 << 22) // count)) for _ in range(15))


def limit(make: Callable[[], Workload]) -> float:
    """Return the least time that the five kinds of a step can take, in seconds."""
    work, read = make(), [0]

    def forward(_module: object, _inputs: object, output: Any) -> None:
        read[0] += 2 * sum(x.nbytes for x in (output if isinstance(output, tuple) else (output,)) if x is not None)

    modules = [m for m in work.model.modules() if not list(m.children()) or m._parameters]
    handles = [module.register_forward_hook(forward) for module in modules]
    work.step()
    for handle in handles:
        handle.remove()
    read[0] += 4 * sum(p.nbytes for p in work.model.parameters())  # weight, gradient, and both operands of the update
    return read[0] / bandwidth() + 0.5e-6 * sum(1 for _ in work.model.modules())


def timed(function: Callable[[], object], times: int = 1) -> float:
    """Return the CPU time of a call."""
    began = time.process_time()
    for _ in range(times):
        function()
    return (time.process_time() - began) / times


def foreach_norms(work: Workload) -> None:
    """Compute the norms of all parameters and gradients at once: the least that a user can do."""
    parameters = list(work.model.parameters())

    def starts(*_: object) -> None:
        torch.stack([*torch._foreach_norm(parameters), *torch._foreach_norm([p.grad for p in parameters])]).tolist()

    work.optimizer.register_step_pre_hook(starts)


def with_file(directory: str) -> Attach:
    """Return a function that writes the norms of the five kinds at every step to an event file."""
    return watched(partial(NormSubscriber, subsample=1), log_dir=directory, verbosity=0)  # type: ignore[arg-type]


def default(directory: str, every: int) -> Attach:
    """Return a function that watches with the default preset, its rules and its flight recorder."""

    def attach(work: Workload) -> None:
        work.close = ikkuna.watch(work.model, loss=work.loss, every=every, log_dir=directory, verbosity=0).close

    return attach


def attached(make: Callable[[], Workload], variants: dict[str, Attach]) -> dict[str, Workload]:
    """Return a workload for each variant."""
    works = {}
    for name, attach in variants.items():
        torch.manual_seed(0)
        works[name] = make()
        attach(works[name])
    return works


def differences(
    works: dict[str, Workload], rounds: int, steps: int = 1, before: Callable[[], object] = lambda: None
) -> dict[str, float]:
    """Return the median of what each workload takes more than the first one, in seconds a step; the rounds are interleaved."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work.step(), work.step()
    for _ in range(rounds):
        for name, work in works.items():
            before()
            times[name].append(timed(work.step, steps))
    first = next(iter(works))
    for work in works.values():
        work.close()
    more = {name: statistics.median(a - b for a, b in zip(times[name], times[first], strict=True)) for name in works}
    return more | {first: statistics.median(times[first])}


def models() -> Found:
    """Measure norms and histograms of three models."""
    found: Found = {}
    variants: dict[str, Attach] = {
        "floor": floor,
        "norms": norms(),
        "h": histograms(exact=False),
        "peer": foreach_norms,
    }
    for name, make in MODELS.items():
        cost = differences(attached(make, {"bare": bare, **variants}), 40)
        unit, step, least = cost["floor"], cost["bare"], limit(make)
        found[f"norms, {name}, floors"] = cost["norms"] / unit, least / unit
        found[f"histograms beyond norms, {name}, floors"] = (cost["h"] - cost["norms"]) / unit, None
        found[f"norms, {name}, % of the step"] = cost["norms"] / step * 100, least / step * 100
        title = f"torch._foreach_norm of parameters and gradients, {name}, % of the step"
        found[title] = cost["peer"] / step * 100, None
    faults = []
    for work in attached(MODELS["mlp"], {"bare": bare, "norms": norms()}).values():
        for _ in range(5):
            work.step()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(10):
            work.step()
        faults.append((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 10)
        work.close()
    return found | {"page faults of a sampled step beyond a bare one, mlp": (faults[1] - faults[0], 0.0)}


def kernels() -> Found:
    """Measure the kernels on one large and one small tensor."""
    native, row = library(), np.zeros(14)
    assert native is not None

    def rate(count: int) -> float:
        x = torch.randn(count)
        measure = partial(native._measure[x.dtype], x.data_ptr(), count, flags_of(frozenset(FULL)), row.ctypes.data)
        return 4e-9 * count / min(timed(measure, max(1, (1 << 22) // count)) for _ in range(15))

    x = torch.randn(1 << 26).requires_grad_()  # others are not copied
    memory, copy = ListMemory(1, [x.nbytes]), np.ones(x.nbytes, np.uint8)
    memory.copy_to(np.array([copy.ctypes.data]))
    flags, rows = np.array([flags_of(frozenset(("sumsq",)))], np.int32), np.array([row.ctypes.data])
    copies = min(timed(lambda: native.reader.add_all([x], flags, rows, memory)) for _ in range(9))
    assert memory.is_copied.all()
    most = bandwidth() / 1e9
    return {
        "full statistics from memory, GB/s": (rate(1 << 26), most),
        "full statistics in cache, GB/s": (rate(1 << 16), bandwidth(1 << 16) / 1e9),
        "norm and copy of a weight, kept buffer, GB/s": (x.nbytes / copies / 1e9, most / 2),  # written as well
    }


def chains() -> Found:
    """Measure chains of small layers, where the number of calls is all that counts."""
    cost, found = {}, {}
    for layers, rounds in ((10, 300), (1_000, 15), (10_000, 4)):
        with tempfile.TemporaryDirectory() as directory:
            make = partial(chain, layers)
            cost[layers] = differences(attached(make, {"bare": bare, "norms": with_file(directory)}), rounds)["norms"]
    slope = (cost[1_000] - cost[10]) / 990
    found["norms with file, fixed, ms"] = (cost[10] - 10 * slope) * 1e3, 0.0
    for layers in (1_000, 10_000):
        least = limit(partial(chain, layers)) / layers * 1e6
        found[f"norms with file, chain of {layers:,}, µs a module"] = cost[layers] / layers * 1e6, least
    with tempfile.TemporaryDirectory() as directory:
        works = attached(partial(chain, 10), {"bare": bare, "default": default(directory, 1)})
        for _ in range(320):  # the first steps have more to judge
            works["default"].step()
        least = limit(partial(chain, 10)) * 1e3
        found["default preset, chain of 10, sampled step, ms"] = differences(works, 300)["default"] * 1e3, least
    cold = np.ones(1 << 26, np.uint8)
    for name, rounds, steps, before in (("warm", 150, 30, int), ("cold", 300, 1, lambda: cold.sum())):
        works = attached(partial(chain, 10), {"bare": bare, "idle": norms(10**9)})
        cost_idle = differences(works, rounds, steps, before)["idle"] * 1e3
        found[f"idle step, chain of 10, {name} caches, ms"] = cost_idle, 0.0
    return found


def gpt2_shape(length: int = 128, blocks: int = 4) -> Workload:
    """Return a GPT-2 on a number of tokens."""
    tokens = torch.randint(0, 50_257, (1, length + 1))
    return Workload(gpu_models.GPT2(blocks=blocks), tokens[:, :-1], tokens[:, 1:])


def resnet50() -> Workload:
    """Return ResNet-50 on 4 images."""
    whole = gpu_models.resnet50(torch.device("cpu"), tiny=False)
    return Workload(whole.model, whole.inputs[:4].clone(), whole.labels[:4].clone())


def means() -> Found:
    """Measure the mean cost of the default preset from step 320 on; the first steps are taken on small batches."""
    found: Found = {}
    for name, make, small, periods in (
        ("MLP", MODELS["mlp"], lambda x: x[:1], 4),
        ("GPT-2 shape", gpt2_shape, lambda x: x[:, :8], 1),
        ("ResNet-50", resnet50, lambda x: x[:2, :, :64, :64] if x.dim() > 1 else x[:2], 1),
    ):
        with tempfile.TemporaryDirectory() as directory:
            works = attached(make, {"bare": bare, "default": default(directory, 10)})
            seconds: dict[str, dict[int, list[float]]] = {key: {} for key in works}
            for work in works.values():
                whole = work.inputs, work.labels
                work.inputs, work.labels = map(small, whole)
                for _ in range(320):
                    work.step()
                work.inputs, work.labels = whole
                for _ in range(PERIOD):  # the loss jumps, which the recorder examines
                    work.step()
            for step in range(periods * PERIOD):
                for key, work in works.items():
                    seconds[key].setdefault(rules.kind_of(step), []).append(timed(work.step))
            steps = [rules.kind_of(step) for step in range(PERIOD)]
            plain, full = (statistics.mean(statistics.median(of[kind]) for kind in steps) for of in seconds.values())
            for work in works.values():
                work.close()
        found[f"default preset, mean at every=10, {name}, %"] = (full / plain - 1) * 100, limit(make) / plain * 10
    cost = rules.measure(MODELS["mlp"], 160, 3040)
    return found | {"rules, mean, mlp, %": ((cost["rules"] - cost["default"]) / cost["none"] * 100, 0.0)}


def judging() -> Found:
    """Measure what it costs to judge the loss of a step of an MLP, of at least 25 ms, and what all judging costs.

    The goals are for such a step; the batch is made larger where one of 128 rows takes less.
    The steps are those from step 3,200 on.  The first goal is that of a step between two that are sampled.  All judging has the
    gradients, NaN and Inf, the flight recorder and what is delivered, and is a mean over all steps.
    """
    found: Found = {}
    idle = [i for i in range(rules.PERIOD) if i % 10]
    for title, chosen, options in (
        ("judging the loss of every step, mlp", idle, {"rules": ["loss_spike"], "recorder": False}),
        ("all judging, mean, mlp", list(range(rules.PERIOD)), {"rules": ["loss_spike", "gradient_jump", "nonfinite"]}),
    ):
        with tempfile.TemporaryDirectory() as directory:
            work, run = MODELS["mlp"](), torch.autograd._engine_run_backward
            lengthen(work, 0.025)
            own, silent = NormSubscriber("weights", subsample=10**9), {"log_dir": directory, "verbosity": 0}
            close = ikkuna.watch(work.model, own, loss=work.loss, preflight=False, **silent, **options).close
            rules.warm(work, 3040)
            for _ in range(2 * rules.PERIOD):  # the loss jumps, which is judged as a spike, and no spike later
                work.step()
            more: list[list[float]] = [[] for _ in range(rules.PERIOD)]
            bare_times = []
            order = np.random.default_rng(0).permuted([[True, False]] * 30 * rules.PERIOD, axis=1).tolist()
            for step, is_watched in enumerate(order):
                seconds = {}
                for each in is_watched:
                    with unhooked(work, run):
                        seconds[each] = 0.0 if each else timed(work.step)
                    if each:
                        seconds[each] = timed(work.step)
                more[step % rules.PERIOD].append(seconds[True] - seconds[False])
                bare_times.append(seconds[False])
            close()
        step = float(np.median(bare_times))
        unit = step / 100
        mean, error = trimmed_mean([np.array(more[i]) / unit for i in chosen])
        found |= {f"{title}, %": (mean, 0.0), f"{title}, standard error, %": (error, None)}
        found[f"{title}, step, ms"] = step * 1e3, None
    return found


def lengthen(work: Workload, seconds: float) -> None:
    """Repeat the rows of the batch until a step takes so long."""
    while (takes := min(timed(work.step) for _ in range(15))) < seconds:
        rows = len(work.inputs)
        wanted = torch.arange(max(int(rows * 1.05 * seconds / takes), rows + 1)) % rows
        work.inputs, work.labels = work.inputs[wanted], work.labels[wanted]


@contextmanager
def unhooked(work: Workload, run_backward: Any) -> Iterator[None]:
    """Remove all hooks for a while.

    Two models would differ by where their memory lies, which changes the time of a step by more than hooks take.
    """
    modules = {module: (module._forward_hooks, module._forward_pre_hooks) for module in (work.model, work.loss)}
    steps = [(hooks, dict(hooks)) for hooks in map(vars(torch_optimizer).get, GLOBAL_HOOKS)]
    hooked = torch.autograd._engine_run_backward
    for module in modules:
        module._forward_hooks, module._forward_pre_hooks = OrderedDict(), OrderedDict()
    for hooks, _ in steps:
        hooks.clear()
    torch.autograd._engine_run_backward = run_backward
    try:
        yield
    finally:
        torch.autograd._engine_run_backward = hooked
        for hooks, kept in steps:
            hooks.update(kept)
        for module, (after, before) in modules.items():
            module._forward_hooks, module._forward_pre_hooks = after, before


def trimmed_mean(groups: list[Any]) -> tuple[float, float]:
    """Return the mean over groups of their means without the lowest and highest fifth, and its standard error."""
    means, errors = [], []
    for values in groups:
        low, high = np.quantile(values, (0.2, 0.8))
        means.append(values[(values >= low) & (values <= high)].mean())
        errors.append(np.clip(values, low, high).std(ddof=1) / 0.6 / len(values) ** 0.5)
    return float(np.mean(means)), float(np.sqrt(np.square(errors).sum()) / len(errors))


def peak(step: Callable[[], object]) -> int:
    """Return the largest resident memory in a step, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")  # the kernel forgets the largest value so far
    step()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024


def large() -> Found:
    """Measure norms and the default preset at every step of large models, and how much more memory a step takes at most."""
    found: Found = {}
    for name, make in {"GPT-2 shape": gpt2_shape, "ResNet-50": resnet50}.items():
        with tempfile.TemporaryDirectory() as directory:
            variants = {"bare": bare, "floor": floor, "norms": norms(), "default": default(directory, 1)}
            cost, least = differences(attached(make, variants), 7), limit(make)
        found[f"norms, {name}, floors"] = cost["norms"] / cost["floor"], least / cost["floor"]
        share = cost["default"] / cost["bare"] * 100
        found[f"default preset at every step, {name}, %"] = share, least / cost["bare"] * 100
    work = gpt2_shape(blocks=12)
    work.step(), work.step()
    peaks = [peak(work.step)]
    with tempfile.TemporaryDirectory() as directory:
        default(directory, 1)(work)
        work.step(), work.step()
        peaks.append(peak(work.step))
        kept = work.close.__self__.health().kept_bytes / 1e6  # type: ignore[attr-defined]
        work.close()
    found["memory of the default preset, GPT-2 small, MB"] = (peaks[1] - peaks[0]) / 1e6, None
    return found | {"kept bytes of it in health(), MB": (kept, None)}


SCRIPT = """
import gc, sys, time, torch, tempfile
from torch import nn
layers = int(sys.argv[1]); preflight = "auto" if layers == 10 else False
gc.collect()  # what torch's own import has left to collect
t = [time.process_time()]; lap = lambda: t.append(time.process_time())
import ikkuna; ikkuna.watch; lap()
model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers))); optimizer = torch.optim.SGD(model.parameters(), 0.1)
loss = nn.CrossEntropyLoss(); y = torch.arange(4)
def step(): optimizer.zero_grad(); loss(model(torch.randn(4, 8)), y).backward(); optimizer.step()
step(); lap()
run = ikkuna.watch(model, loss=loss, every=1, log_dir=tempfile.mkdtemp(), verbosity=0, preflight=preflight); lap()
step(); lap(); step(); lap(); step(); lap()
wall = time.perf_counter(); run.close(); wall = time.perf_counter() - wall
print(t[1] - t[0], t[3] - t[2], t[4] - t[3], wall, t[4] - t[3] - (t[6] - t[5]))
"""


def set_up() -> Found:
    """Measure the beginning and the end of short runs, of which the first compiles the modules as an installation does."""
    runs = [_short_run(10) for _ in range(6)][1:]
    columns = [*list(zip(*runs, strict=True))[:-1], [_short_run(10_000)[-1]]]
    return {name: (statistics.median(x), None) for name, x in zip(list(GOALS)[-len(columns) :], columns, strict=True)}


def _short_run(layers: int) -> list[float]:
    """Return what a process measures that trains a chain for three steps."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-c", SCRIPT, str(layers)],  # not the package in the working directory
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [float(x) for x in done.stdout.splitlines()[-1].split()]


PARTS = {part.__name__: part for part in (models, kernels, chains, means, judging, large, set_up)}


def run(part: str, tree: Path) -> Found:
    """Run a part in a process of its own, with the package of a work tree."""
    environment = os.environ | {"PYTHONPATH": f"{tree}:{tree / 'subscribers'}", "OMP_NUM_THREADS": "1"}
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
    print(f"load at the beginning: {os.getloadavg()[0]:.1f}")
    print(f"| what | {' | '.join(trees)} | limit | goal |\n|---|{'---|' * len(trees)}---|---|", flush=True)
    for part in arguments.parts:
        found = {version: run(part, tree) for version, tree in trees.items()}
        for name in (name for name in GOALS if name in found["now"]):
            cells = " | ".join(f"{of.get(name, (float('nan'),))[0]:.3g}" for of in found.values())
            least = found["now"][name][1]
            print(f"| {name} | {cells} | {'' if least is None else f'{least:.2g}'} | {GOALS[name]} |", flush=True)
    print(f"load at the end: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
