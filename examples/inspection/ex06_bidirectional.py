"""Gradients of a bidirectional GRU with 512 channels.

The lower half of the channels reads the sequence backwards.
``reflect_half`` reverses its time axis, so that both halves are in the order of computation.
"""

from pathlib import Path

import torch
from networks import Recurrent, train
from torch import nn

from ikkuna.plot import features_2D
from ikkuna.probe import get_gradients


def main(directory="."):
    torch.manual_seed(0)
    model = Recurrent(nn.GRU, units=256, bidirectional=True)
    x, y = train(model, 4, units=256, lr=1e-3)
    grads = get_gradients(model, "rnn1", x, y)

    path = Path(directory, "bidirectional.png")
    features_2D(grads[0], norm=(-0.0001, 0.0001), reflect_half=True, title="grads", savepath=path)
    return [path]


if __name__ == "__main__":
    main()
