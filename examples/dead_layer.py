"""Train a network with a dead layer, find the layer, repair it, and draw both runs."""

import sys
from collections import OrderedDict
from pathlib import Path

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn

import ikkuna
from ikkuna.export.subscriber import SparsitySubscriber
from ikkuna.plot import layer_step_heatmap
from ikkuna.reading import find_runs, read_run


def network():
    sizes = {"hidden1": (64, 128), "hidden2": (128, 128), "hidden3": (128, 128), "hidden4": (128, 128)}
    layers = OrderedDict()
    for name, (inputs, outputs) in sizes.items():
        layers[name] = nn.Linear(inputs, outputs)
        layers[name.replace("hidden", "relu")] = nn.ReLU()
    layers["classifier"] = nn.Linear(128, 10)
    return nn.Sequential(layers)


def train(model, log_dir, steps):
    """Train on handwritten digits, and return the findings and the stored run."""
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    loss_function = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    exporter = ikkuna.watch(model, loss=loss_function, log_dir=log_dir)
    exporter.message_bus.register_subscriber(SparsitySubscriber("activations", modules="relu*", every=10))
    for _ in range(steps):
        rows = torch.randint(0, len(images), (64,))
        optimizer.zero_grad()
        loss_function(model(images[rows]), labels[rows]).backward()
        optimizer.step()
    exporter.close()
    return exporter.findings, read_run(find_runs(Path(log_dir))[-1])


def picture(findings, broken, repaired):
    """Draw the loss of both runs, and the share of zeros of each layer in both."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    axes = figure.subplots(1, 3, width_ratios=(1, 1, 1))
    for run, label in ((broken, "as found"), (repaired, "repaired")):
        steps, loss, _ = run.series("loss")
        axes[0].plot(steps, loss, label=label)
    axes[0].set(title="loss", xlabel="step", ylim=(0, None))
    axes[0].legend()
    for ax, run, title in zip(axes[1:], (broken, repaired), ("share of zeros, as found", "repaired"), strict=True):
        names, steps, values = run.matrix("activations_sparsity")
        layer_step_heatmap(values, layers=names, steps=steps, norm=(0, 1), label="share of zeros", ax=ax)
        ax.set_title(title)
    [first, *_] = [finding for finding in findings if finding.module]
    figure.suptitle(f"{first.severity}: {first.rule} in {first.module} at step {first.step}", fontweight="bold")
    return figure


def main(directory=".", steps=200):
    torch.manual_seed(0)
    model = network()
    nn.init.constant_(model.hidden3.bias, -5.0)  # the mistake
    findings, broken = train(model, Path(directory, "run"), steps)
    print(findings)

    torch.manual_seed(0)
    _, repaired = train(network(), Path(directory, "run"), steps)
    path = Path(directory, "dead_layer.png")
    picture(findings, broken, repaired).savefig(path, dpi=72)
    return path


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
