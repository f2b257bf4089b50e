"""How sharp does the loss become?

Two networks learn 500 digits by full-batch gradient descent.
The largest eigenvalue of the Hessian rises to 2 / learning rate (dashed), slightly exceeds it, and stays there.
Above this value, each step along the eigenvector overshoots further than the previous one.
The loss is smooth before this point and decreases with jumps after it.
"""

from pathlib import Path

import digits_data
import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import HessianSubscriber, LossSubscriber
from ikkuna.testing import RecordingBackend


def train(images, targets, rate, steps, every):
    """Return the steps, sharpness and loss of a run."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    optimizer, loss_function = torch.optim.SGD(model.parameters(), rate), nn.MSELoss()
    recording, bus = RecordingBackend(), MessageBus()
    with Exporter(message_bus=bus) as exporter:
        exporter.add_modules(model)
        exporter.set_loss(loss_function)
        data = TensorDataset(images, targets)
        bus.register_subscriber(HessianSubscriber(loss_function, data, top=1, every=every, backend=recording))
        bus.register_subscriber(LossSubscriber(every=every, backend=recording))
        for _ in range(steps):
            optimizer.zero_grad()
            loss_function(model(images), targets).backward()
            optimizer.step()
    curves = {}
    for series, value, step in recording.values:
        curves.setdefault(series.kind, []).append((step, value))
    return [zip(*curves[kind], strict=True) for kind in ("hessian_eigenvalue_1", "loss")]


def main(directory=".", steps=3000, every=20):
    images, labels = digits_data.load(500)
    targets = nn.functional.one_hot(labels, 10).float()
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, layout="constrained")
    for rate, color in ((1.0, "#0072b2"), (0.5, "#d55e00")):
        sharpness, loss = train(images, targets, rate, steps, every)
        upper.plot(*sharpness, color=color, label=f"learning rate {rate}")
        upper.axhline(2 / rate, color=color, linestyle="--", linewidth=1)
        lower.plot(*loss, color=color)
    upper.set(ylabel="largest eigenvalue of the Hessian", ylim=(0, None))
    lower.set(xlabel="step", ylabel="loss", yscale="log")
    upper.legend(frameon=False)
    for ax in (upper, lower):
        ax.grid(alpha=0.25)
    path = Path(directory, "sharpness.png")
    figure.savefig(path, dpi=100)
    plt.close(figure)
    return [path]


if __name__ == "__main__":
    main()
