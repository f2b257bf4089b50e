"""Gradients of a GRU's weights in grey levels: which gate has the largest gradients?"""

from pathlib import Path

import torch
from networks import Recurrent, train
from torch import nn

from ikkuna.plot import rnn_heatmap


def main(directory="."):
    torch.manual_seed(0)
    model = Recurrent(nn.GRU, inputs=16, units=64)
    x, y = train(model, 10, units=64, inputs=16)

    path = Path(directory, "gradient_intensity.png")
    rnn_heatmap(model, "gru", mode="grads", input_data=x, labels=y, cmap=None, absolute_value=True, savepath=path)
    return [path]


if __name__ == "__main__":
    main()
