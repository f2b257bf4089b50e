"""Weights of a bidirectional LSTM: one picture for each direction, with the same limits."""

from pathlib import Path

import torch
from networks import Recurrent, train

from ikkuna.plot import rnn_heatmap, rnn_histogram


def main(directory="."):
    torch.manual_seed(0)
    model = Recurrent(inputs=16, units=256, bidirectional=True)
    train(model, 2, units=256, inputs=16, timesteps=30)

    rnn_histogram(model, "bidir", equate_axes=2, savepath=Path(directory, "bidirectional_histogram.png"))
    rnn_heatmap(model, "bidir", norm=(-0.8, 0.8), savepath=Path(directory, "bidirectional_heatmap.png"))
    names = (f"bidirectional_{form}_{i}.png" for form in ("histogram", "heatmap") for i in (0, 1))
    return [Path(directory, name) for name in names]


if __name__ == "__main__":
    main()
