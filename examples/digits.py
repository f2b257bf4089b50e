"""Train and monitor a small ConvNet on the handwritten digits of scikit-learn.  Lines of ikkuna are marked with # *."""

import sys
from collections import OrderedDict

import torch
from sklearn.datasets import load_digits
from table import print_table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ikkuna.export import Exporter  # *
from ikkuna.export.subscriber import (  # *
    LossSubscriber,
    NormSubscriber,
    RatioSubscriber,
    Subscriber,
    TrainAccuracySubscriber,
    VarianceSubscriber,
)


class NearZeroSubscriber(Subscriber):  # * a metric of your own
    """Share of elements with |x| < eps."""

    def __init__(self, kind, eps=1e-3, **options):
        super().__init__(kind, publishes=f"{kind}_near_zero", **options)
        self.eps = eps

    def measure(self, message):
        near = torch.count_nonzero(message.data.abs() < self.eps)
        return torch.stack([near, torch.full_like(near, message.data.numel())])

    def compute(self, message):
        near, n = message.data
        self.emit(message, near / n)


def convnet():
    layers = OrderedDict()
    for number, (before, after) in enumerate([(1, 16), (16, 32)], 1):
        layers[f"conv{number}"] = nn.Conv2d(before, after, 3, padding=1)
        layers[f"norm{number}"] = nn.BatchNorm2d(after)
        layers[f"relu{number}"] = nn.ReLU(inplace=True)
        layers[f"pool{number}"] = nn.MaxPool2d(2)
    layers |= {"flatten": nn.Flatten(), "dropout": nn.Dropout(0.2), "hidden": nn.Linear(128, 64)}
    layers |= {"relu3": nn.ReLU(inplace=True), "classifier": nn.Linear(64, 10)}
    return nn.Sequential(layers)


def main(epochs=20, log_dir="run"):
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    train = TensorDataset(images[:1500], torch.tensor(digits.target[:1500]))
    loader = DataLoader(train, batch_size=50, shuffle=True)
    model, loss_function = convnet(), nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    with Exporter(log_dir=log_dir) as exporter:  # *
        exporter.add_modules(model)  # *
        exporter.set_loss(loss_function)  # *
        for subscriber in (  # *
            LossSubscriber(),  # *
            TrainAccuracySubscriber(),  # *
            NormSubscriber("weights", every=5),  # *
            NormSubscriber("layer_gradients", every=5),  # *
            VarianceSubscriber("activations", every=5),  # *
            RatioSubscriber(["weight_updates", "weights"], every=5),  # *
            NearZeroSubscriber("activations", every=5),  # *
        ):
            exporter.message_bus.register_subscriber(subscriber)  # *
        for _ in range(epochs):
            for inputs, labels in loader:
                optimizer.zero_grad()
                loss_function(model(inputs), labels).backward()
                optimizer.step()
            exporter.epoch_finished()  # *
    print_table(log_dir, ["weights_norm2", "weight_updates_weights_ratio", "activations_near_zero"])


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:3])
