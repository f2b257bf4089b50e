"""The cost of probe sets: products of the Hessian in gradients, and one CKA as a share of an epoch.

    python benchmarks/probes.py

Process CPU time of one thread, interleaved; the median of the ratio over rounds.  Beside it what theory asks for: operations of
matrix products and convolutions of a product of the Hessian, over those of a gradient; and of a look of CKA the forward pass alone.
With PyHessian on the path its eigenvalues are found beside ours: the same network, the same batch.
"""

import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from overhead import conv, transformer
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ikkuna.backends.backend import NullBackend
from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import CKASubscriber
from ikkuna.numerics.curvature import HessianProduct
from ikkuna.numerics.curvature.lanczos import Matvec, Ritz, lanczos_coefficients, ritz_of

ROUNDS = 15
TOP, STEPS = 5, 25


def lanczos(product: Matvec, size: int, steps: int = STEPS, dtype: torch.dtype = torch.float32) -> Ritz:
    return ritz_of(lanczos_coefficients(product, size, steps, torch.Generator().manual_seed(0), dtype))


def seconds(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32).unsqueeze(1)[:1500] / 16, torch.tensor(data.target[:1500])


def convnet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.2), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def epoch(model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor) -> None:
    for x, y in zip(images.split(50), labels.split(50), strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def trained(epochs: int = 5) -> nn.Module:
    torch.manual_seed(0)
    model, (images, labels) = convnet(), digits()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        epoch(model, optimizer, images, labels)
    return model


# -- products of the Hessian ------------------------------------------------------------------------------------------


def dense(*widths: int) -> nn.Module:
    layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class Costs(NamedTuple):
    """In gradients, each a forward and a backward pass: a product, its operations, and the five largest eigenvalues."""

    product: float
    operations: float
    top_five: float


def costs(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> Costs:
    model.eval()
    parameters = list(model.parameters())

    def loss() -> torch.Tensor:
        return nn.functional.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())

    def gradient() -> None:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            torch.autograd.grad(loss(), parameters)

    product = HessianProduct(loss, parameters)
    vector = torch.randn(product.size)
    ratios = [seconds(lambda: product(vector)) / seconds(gradient) for _ in range(ROUNDS + 3)]
    own = [seconds(gradient), seconds(lambda: lanczos(product, product.size)), seconds(gradient)]
    operations = counted_operations(lambda: product(vector)) / counted_operations(gradient)
    return Costs(statistics.median(ratios[3:]), operations, 2 * own[1] / (own[0] + own[2]))


def counted_operations(work: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


def print_products() -> None:
    images, labels = digits()
    attention, blocks = transformer(), conv()
    cases = {
        "digits ConvNet, 500 images": (trained(), images[:500], labels[:500]),
        "the same without batch norm": (without_batch_norm(convnet()), images[:500], labels[:500]),
        "six-block ConvNet, 16 images": (blocks.model, blocks.inputs, blocks.labels),
        "MLP 256-512-10, 256 rows": (dense(256, 512, 10), torch.randn(256, 256), torch.randint(10, (256,))),
        "MLP 256-512²-10": (dense(256, 512, 512, 10), torch.randn(256, 256), torch.randint(10, (256,))),
        "MLP 512⁸-10": (dense(*[512] * 8, 10), torch.randn(256, 512), torch.randint(10, (256,))),
        "6×256 transformer": (attention.model, attention.inputs, attention.labels),
    }
    for name, case in cases.items():
        found = costs(*case)
        print(
            f"{name:28} a product {found.product:5.2f} gradients, counted {found.operations:5.2f}, "
            f"top {TOP} with {STEPS} products {found.top_five:5.1f}"
        )


def without_batch_norm(model: nn.Module) -> nn.Module:
    return nn.Sequential(*(part for part in model.children() if not isinstance(part, nn.BatchNorm2d)))


# -- eigenvalues ------------------------------------------------------------------------------------------------------


def hessian(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> HessianProduct:
    return HessianProduct(lambda: nn.functional.cross_entropy(model(inputs), labels), model.parameters())


def print_eigenvalues() -> None:
    images, labels = digits()
    batch = images[:500], labels[:500]
    precise = hessian(trained().eval().double(), batch[0].double(), batch[1])
    exact = lanczos(precise, precise.size, 100, torch.float64).values.flip(0)[:TOP]
    product = hessian(trained().eval(), *batch)
    calls: list[int] = []

    def counted(vector: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return product(vector)

    spent = seconds(lambda: lanczos(counted, product.size))
    found = lanczos(product, product.size)
    _print_found("Lanczos", len(calls), spent, found.values.flip(0)[:TOP], exact)
    print(f"{'':10} bounds {[f'{v:.1g}' for v in found.bounds.flip(0)[:TOP].tolist()]}")
    if importlib.util.find_spec("pyhessian"):
        _print_pyhessian(*batch, exact)
    else:
        print("PyHessian  is not installed")


def _print_found(name: str, products: int, spent: float, values: torch.Tensor, exact: torch.Tensor) -> None:
    errors = ((values - exact) / exact).abs().tolist()
    print(f"{name:10} {products:4} products, {spent:.2f} s, relative errors {[f'{e:.1g}' for e in errors]}")


def _print_pyhessian(images: torch.Tensor, labels: torch.Tensor, exact: torch.Tensor) -> None:
    theirs = importlib.import_module("pyhessian.hessian")  # the package has a class of that name
    calls: list[int] = []
    product = theirs.hessian_vector_product
    theirs.hessian_vector_product = lambda *arguments: (calls.append(1), product(*arguments))[1]
    made = theirs.hessian(trained(), nn.CrossEntropyLoss(), data=(images, labels), cuda=False)
    found: list[float] = []
    spent = seconds(lambda: found.extend(made.eigenvalues(top_n=TOP)[0]))
    _print_found("PyHessian", len(calls), spent, torch.tensor(found, dtype=torch.float64), exact)


# -- representations --------------------------------------------------------------------------------------------------


def shares(model: nn.Module, probe: torch.Tensor, unit: Callable[[], object], units: float) -> list[float]:
    """Return the shares of an epoch, which takes `units` units, of one look of CKA and of the forward of the probe set.

    A look compares to the last look, to the first one and between all layers.
    """
    rows: list[tuple[float, float]] = []

    class Timed(CKASubscriber):
        def compute(self, message: object) -> None:
            whole = units * seconds(unit)
            look = seconds(lambda: super(Timed, self).compute(message))  # type: ignore[arg-type]
            rows.append((look / whole, seconds(lambda: forward(model, probe)) / whole))

    with Exporter(message_bus=MessageBus(), on_error="raise") as exporter:
        exporter.add_modules(model)
        exporter.message_bus.register_subscriber(Timed(probe, batch_size=128, every=1, backend=NullBackend()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # the weights stay finite
        for _ in range(ROUNDS):
            optimizer.zero_grad()
            model(probe[:4]).sum().backward()
            optimizer.step()
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def forward(model: nn.Module, probe: torch.Tensor) -> None:
    model.eval()
    with torch.no_grad():
        for batch in probe.split(128):
            model(batch)
    model.train()


def print_representations() -> None:
    images, labels = digits()
    model, copy, work = trained(1), trained(1), conv()
    optimizer = torch.optim.AdamW(copy.parameters(), lr=3e-3)
    for n in (32, 64, 128, 256):
        print_shares(
            f"digits ConvNet, {n:3}", *shares(model, images[:n], lambda: epoch(copy, optimizer, images, labels), 1)
        )
    twin = conv()
    for n in (128, 512):
        probe = torch.randn(n, 3, 32, 32)
        print_shares(f"six-block ConvNet, {n}", *shares(work.model, probe, twin.step, 50_000 / len(twin.inputs)))


def print_shares(name: str, look: float, forward: float) -> None:
    print(f"CKA of the {name} images: {look:6.2%} of an epoch, the forward alone {forward:6.2%}")


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print_products()
    print_eigenvalues()
    print_representations()


if __name__ == "__main__":
    main()
