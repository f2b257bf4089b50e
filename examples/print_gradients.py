"""Print the norm of the gradient of every parameter at every tenth step of a training.

python examples/print_gradients.py [STEPS]
"""

import sys

import torch
from torch import nn

from ikkuna.export import Exporter
from ikkuna.export.subscriber import CallbackSubscriber


def print_gradient(message):
    print(f"step {message.global_step}  {message.series_name:12}  {message.kind:16}  norm {message.data.norm():.3e}")


def watch_gradients(model):
    exporter = Exporter()
    exporter.add_modules(model)
    gradients = ["weight_gradients", "bias_gradients"]
    exporter.message_bus.register_subscriber(CallbackSubscriber(gradients, print_gradient, every=10))
    return exporter


def main(steps=30):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters())
    with watch_gradients(model):
        for _ in range(steps):
            x = torch.randn(32, 8)
            optimizer.zero_grad()
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
