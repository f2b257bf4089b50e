"""Weights of an LSTM with 256 units, gate by gate.

Histograms show distributions; the image shows the weight of each input and each unit.
PyTorch initialises all biases alike, so the forget gate has no bright band as in Keras.
"""

from pathlib import Path

import torch
from networks import Recurrent, train

from ikkuna.plot import rnn_heatmap, rnn_histogram


def main(directory="."):
    torch.manual_seed(0)
    model = Recurrent(inputs=20, units=256)
    train(model, 4, units=256, inputs=20)

    paths = [Path(directory, f"lstm_{form}.png") for form in ("own_axes", "same_axes", "heatmap")]
    rnn_histogram(model, "lstm", equate_axes=False, bias=False, savepath=paths[0])
    rnn_histogram(model, "lstm", equate_axes=True, bias=False, savepath=paths[1])
    rnn_heatmap(model, "lstm", savepath=paths[2])
    return paths


if __name__ == "__main__":
    main()
