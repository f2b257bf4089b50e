"""Gradients of one sample, early in training: how far back does the loss reach?

The gradient flows from right to left.
Where the curve is flat, the network learns nothing from these timesteps.
"""

from pathlib import Path

import torch
from networks import Recurrent, train

from ikkuna.plot import features_1D
from ikkuna.probe import get_gradients, vanishing


def main(directory="."):
    torch.manual_seed(0)
    model = Recurrent()
    x, y = train(model, 20)
    grads = get_gradients(model, "rnn1", x, y)
    print(f"share of steps with a gradient below 1e-8: {vanishing(grads[:1]).below:.2f}")

    path = Path(directory, "vanishing_gradient.png")
    features_1D(grads[:1], n_rows=2, title="grads", savepath=path)
    return [path]


if __name__ == "__main__":
    main()
