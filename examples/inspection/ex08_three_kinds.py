"""LSTM, GRU and plain RNN, each with 256 units: in which one does the gradient reach the earliest timesteps?"""

from pathlib import Path

import torch
from networks import Recurrent, train
from torch import nn

from ikkuna.plot import features_2D
from ikkuna.probe import get_gradients


def main(directory="."):
    paths = []
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        torch.manual_seed(0)
        model = Recurrent(kind, units=256)
        x, y = train(model, 3, units=256, lr=1e-3)
        grads = get_gradients(model, "rnn1", x, y)
        paths.append(Path(directory, f"three_kinds_{kind.__name__.lower()}.png"))
        features_2D(grads, n_rows=8, norm=(-0.0001, 0.0001), xy_ticks=[0, 0], title_mode=False, savepath=paths[-1])
    return paths


if __name__ == "__main__":
    main()
