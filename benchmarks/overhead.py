"""Measures the overhead: CPU time of a training step in one thread, all variants interleaved, relative to a reference.

The floor is one ``sum()`` of each tensor of the five kinds weights, weight gradients, weight updates (clone and subtraction included),
activations and layer gradients of every layer, in every step.  Overhead is the ratio to the unmonitored step, less one.

    python benchmarks/overhead.py [--models mlp conv transformer] [--rounds 40] [--variants norms full …] [--compiled]
"""

import argparse
import itertools
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from ikkuna_subscribers.distribution import HistogramSubscriber, PercentileSubscriber
from torch import nn

from ikkuna.backends.backend import NullBackend
from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import NormSubscriber, SharedStatisticSubscriber, Subscriber

KINDS = ("weights", "weight_gradients", "weight_updates", "activations", "layer_gradients")
FULL = ("n", "mean", "m2", "min", "max", "l1", "sumsq", "zeros", "nans", "infs")


class Workload:
    """A model, its data and its optimizer, from one seed."""

    def __init__(self, model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        self.model, self.inputs, self.labels = model, inputs, labels
        self.loss = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        self.close: Callable[[], None] = lambda: None

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss(self.model(self.inputs).flatten(0, -2), self.labels.flatten()).backward()
        self.optimizer.step()


def mlp() -> Workload:
    layers = [
        nn.Linear(784, 1024),
        nn.ReLU(),
        nn.Linear(1024, 1024),
        nn.ReLU(),
        nn.Linear(1024, 1024),
        nn.ReLU(),
        nn.Linear(1024, 10),
    ]
    return Workload(nn.Sequential(*layers), torch.randn(128, 784), torch.randint(0, 10, (128,)))


def conv() -> Workload:
    blocks: list[nn.Module] = []
    for i, width in enumerate((32, 32, 64, 64, 128, 128)):
        before = (3, 32, 32, 64, 64, 128)[i]
        blocks += [nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()] + [nn.MaxPool2d(2)] * (
            i % 2
        )
    return Workload(
        nn.Sequential(*blocks, nn.Flatten(), nn.Linear(2048, 10)),
        torch.randn(16, 3, 32, 32),
        torch.randint(0, 10, (16,)),
    )


def transformer() -> Workload:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, dropout=0.0)
    model = nn.Sequential(
        nn.Embedding(100, 256), nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), nn.Linear(256, 100)
    )
    return Workload(model, torch.randint(0, 100, (8, 64)), torch.randint(0, 100, (8, 64)))


MODELS = {"mlp": mlp, "conv": conv, "transformer": transformer}


class Fields(SharedStatisticSubscriber):
    """Requests statistics and reads one of them."""

    results = ("fields",)

    def __init__(self, kind: str, fields: tuple[str, ...], **options: object) -> None:
        super().__init__(kind, backend=NullBackend(), **options)  # type: ignore[arg-type]
        self.fields = fields

    def values(self, record: Any) -> tuple[Any]:
        return (record.n,)


def bare(work: Workload) -> None:
    """Watch nothing."""


def floor(work: Workload) -> None:
    """Sum every tensor once."""
    modules = [m for m in work.model.modules() if not list(m.children()) or m._parameters]
    weights = [p for n, p in work.model.named_parameters() if "bias" not in n.rsplit(".", 1)[-1]]
    before: list[torch.Tensor] = []

    def forward(module: nn.Module, args: object, output: object) -> None:
        first = output if isinstance(output, torch.Tensor) else output[0]
        first.detach().sum()
        if first.requires_grad:
            first.register_hook(lambda grad: (grad.sum(), None)[1])

    def starts(*_: object) -> None:
        for p in weights:
            p.detach().sum(), p.grad.sum()
        before[:] = [p.detach().clone() for p in weights]

    def ends(*_: object) -> None:
        for p, b in zip(weights, before, strict=True):
            torch.sub(p.detach(), b, out=b).sum()

    for module in modules:
        module.register_forward_hook(forward)
    work.optimizer.register_step_pre_hook(starts)
    work.optimizer.register_step_post_hook(ends)


def watched(*makes: Callable[[str], Subscriber], **options: str) -> Callable[[Workload], Exporter]:
    """Watch the five kinds with a subscriber made by each of `makes`."""

    def attach(work: Workload) -> Exporter:
        exporter = Exporter(message_bus=MessageBus(), on_error="raise", **options)
        exporter.add_modules(work.model)
        for make, kind in itertools.product(makes, KINDS):
            exporter.message_bus.register_subscriber(make(kind))
        work.close = exporter.close
        return exporter

    return attach


def norms(subsample: int = 1, **options: str) -> Callable[[Workload], Exporter]:
    return watched(lambda kind: NormSubscriber(kind, subsample=subsample, backend=NullBackend()), **options)


def fields(names: tuple[str, ...], subsample: int = 1, **options: str) -> Callable[[Workload], Exporter]:
    return watched(lambda kind: Fields(kind, names, subsample=subsample), **options)


def histograms(exact: bool) -> Callable[[Workload], Exporter]:
    """Seven percentiles and a histogram of 30 buckets of each tensor in every step, delivered but not written."""
    return watched(
        lambda kind: PercentileSubscriber(kind, exact=exact, backend=NullBackend()),
        lambda kind: HistogramSubscriber(kind, exact=exact, subsample=1, backend=NullBackend()),
    )


def compiled(watch: Callable[[Workload], object]) -> Callable[[Workload], None]:
    """Compile the model, and watch it."""

    def attach(work: Workload) -> None:
        work.model.compile()
        watch(work)

    return attach


def by_hand(work: Workload) -> None:
    """Write the norms of weights and gradients with tensorboardX, as people do."""
    import tempfile

    from tensorboardX import SummaryWriter

    writer = SummaryWriter(tempfile.mkdtemp())
    steps = iter(range(10**9))

    def starts(*_: object) -> None:
        step = next(steps)
        for name, p in work.model.named_parameters():
            writer.add_scalar(f"weight/{name}", p.detach().norm(), step)
            writer.add_scalar(f"gradient/{name}", p.grad.norm(), step)

    work.optimizer.register_step_pre_hook(starts)
    work.close = writer.close


def histograms_by_hand(work: Workload) -> None:
    """Write histograms of weights and gradients with tensorboardX."""
    import tempfile

    from tensorboardX import SummaryWriter

    writer = SummaryWriter(tempfile.mkdtemp())
    steps = iter(range(10**9))

    def starts(*_: object) -> None:
        step = next(steps)
        for name, p in work.model.named_parameters():
            writer.add_histogram(f"weight/{name}", p.detach(), step)
            writer.add_histogram(f"gradient/{name}", p.grad, step)

    work.optimizer.register_step_pre_hook(starts)
    work.close = writer.close


def wandb_watch(work: Workload) -> None:
    """Watch weights and gradients with wandb, offline, as ``wandb.watch(log="all")`` does."""
    import os
    import tempfile

    import wandb

    os.environ["WANDB_SILENT"] = "true"
    run = wandb.init(mode="offline", dir=tempfile.mkdtemp(), settings=wandb.Settings(x_disable_stats=True))
    run.watch(work.model, log="all", log_freq=1)
    step = work.step

    def logged() -> None:
        step()
        run.log({})

    work.step = logged  # type: ignore[method-assign]
    work.close = run.finish


VARIANTS: dict[str, Callable[[Workload], object]] = {
    "floor": floor,
    "norms": norms(),
    "full": fields(FULL),
    "full+m3,m4": fields((*FULL, "m3", "m4")),
    "norms, eager kernels": norms(kernels="eager"),
    "full, eager kernels": fields(FULL, kernels="eager"),
    "full+m3,m4, eager kernels": fields((*FULL, "m3", "m4"), kernels="eager"),
    "codes sampled": fields(("sampled_codes", "min", "max")),
    "codes exact": fields(("codes", "min", "max")),
    "histograms sampled": histograms(exact=False),
    "histograms exact": histograms(exact=True),
    "norms every 10th": norms(10),
    "full every 10th": fields(FULL, 10),
    "idle": norms(10**9),
    "tensorboardX norms by hand": by_hand,
    "tensorboardX histograms by hand": histograms_by_hand,
    "wandb.watch": wandb_watch,
}


COMPILED: dict[str, Callable[[Workload], object]] = {
    "norms": compiled(norms()),
    "full": compiled(fields(FULL)),
    "norms every 10th": compiled(norms(10)),
    "idle": compiled(norms(10**9)),
}


def measure(
    model: str, variants: dict[str, Callable[[Workload], object]], reference: Callable[[Workload], object], rounds: int
) -> dict[str, float]:
    """Return the overhead of each variant: the median over interleaved rounds of the ratio to the reference, minus one."""
    works = {}
    for name, attach in {"bare": reference, **variants}.items():
        torch.manual_seed(0)
        works[name] = MODELS[model]()
        attach(works[name])
    steps = 10 if any("10th" in name for name in variants) else 2
    times: dict[str, list[float]] = {name: [] for name in works}
    for round_ in range(rounds + 1):
        for name, work in works.items():
            start = time.process_time()
            for _ in range(steps):
                work.step()
            if round_:  # the first warms up
                times[name].append(time.process_time() - start)
    for work in works.values():
        work.close()
    return {
        name: statistics.median(t / b for t, b in zip(times[name], times["bare"], strict=True)) - 1 for name in variants
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument(
        "--variants", nargs="+", default=[v for v in VARIANTS if v != "wandb.watch"], choices=list(VARIANTS)
    )
    parser.add_argument("--compiled", action="store_true", help="compare compiled models with compiled models")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for model in arguments.models:
        if arguments.compiled:
            overheads = measure(model, COMPILED, compiled(bare), arguments.rounds)
            print(f"\n| {model}, compiled | overhead |\n|---|---|")
            print("\n".join(f"| {name} | {overhead:.3f} |" for name, overhead in overheads.items()))
            continue
        variants = {name: VARIANTS[name] for name in dict.fromkeys(("floor", *arguments.variants))}
        overheads = measure(model, variants, bare, arguments.rounds)
        print(f"\n| {model} | overhead | floors |\n|---|---|---|")
        for name, overhead in overheads.items():
            print(f"| {name} | {overhead:.3f} | {overhead / overheads['floor']:.2f} |")


if __name__ == "__main__":
    main()
