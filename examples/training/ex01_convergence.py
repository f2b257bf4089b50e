"""Which layers converge first?

A small ConvNet learns handwritten digits, and its weights are saved at several times.
After training, the outputs of every layer at each of these times are compared with its final outputs.
The comparison is CKA on 256 digits that were not used for training.

The layers converge from the bottom up: at every time, a layer is closer to its final state than the layer above it.
The first convolution starts at 0.99, because its output mainly depends on the pixels.
The second one exceeds 0.99 after 250 steps, the linear layers after 450 and 500 steps.
"""

from pathlib import Path

import digits_data
import matplotlib.pyplot as plt
import torch
from torch import nn

from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import CKASubscriber
from ikkuna.testing import RecordingBackend


def convnet():
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def train(model, images, labels, epochs):
    """Yield the number of steps made and the weights, the more rarely the longer it lasts."""
    optimizer, loss_function = torch.optim.Adam(model.parameters(), 1e-3), nn.CrossEntropyLoss()
    step, due = 0, 0
    for _ in range(epochs):
        for chosen in torch.randperm(len(images)).split(50):
            if step >= due:
                yield step, {name: value.clone() for name, value in model.state_dict().items()}
                due = 1 + int(step * 1.15)
            optimizer.zero_grad()
            loss_function(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()
            step += 1


def compare_with_the_end(model, kept, probe):
    """Return the CKA of each layer at each kept time with its outputs now."""
    recording, bus = RecordingBackend(), MessageBus()
    with Exporter(message_bus=bus) as exporter:
        exporter.add_modules(model)
        metric = CKASubscriber(probe, to=["init"], between_layers=False, every=1, backend=recording)
        bus.register_subscriber(metric)  # it keeps what the model is now
        for _, weights in kept:
            model.load_state_dict(weights)
            model(probe[:1])
            exporter.step()
    curves = {}
    for series, value, _ in recording.values:
        curves.setdefault(series.name, []).append(value)
    return curves


def main(directory=".", epochs=30):
    torch.manual_seed(0)
    images, labels = digits_data.load(1797)
    model = convnet()
    kept = list(train(model, images[:1500], labels[:1500], epochs))
    curves = compare_with_the_end(model, kept, images[1500:1756])

    figure, ax = plt.subplots(figsize=(8, 4.5), layout="constrained")
    steps = [max(step, 0.7) for step, _ in kept]
    names = ("conv 1", "conv 2", "linear 1", "linear 2")
    for (layer, values), name, color in zip(curves.items(), names, plt.cm.viridis((0.0, 0.3, 0.6, 0.9)), strict=True):
        ax.plot(steps, values, label=f"{name} ({layer})", color=color)
    ax.set(xscale="log", xlabel="step", ylabel="CKA to the outputs in the end", ylim=(None, 1.01))
    ax.legend(frameon=False)
    ax.grid(alpha=0.25)
    path = Path(directory, "convergence.png")
    figure.savefig(path, dpi=100)
    plt.close(figure)
    return [path]


if __name__ == "__main__":
    main()
