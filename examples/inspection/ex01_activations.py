"""Activations of a bidirectional RNN: do its channels differ?

The first picture scales each channel separately, which shows the shapes.
The second picture uses one scale for all channels, which shows the magnitudes.
"""

from pathlib import Path

import torch
from networks import Recurrent, make_data, train
from torch import nn

from ikkuna.plot import features_1D
from ikkuna.probe import get_outputs


def relu_rnn(*args, **kwargs):
    return nn.RNN(*args, nonlinearity="relu", **kwargs)


def main(directory="."):
    torch.manual_seed(0)
    model = Recurrent(relu_rnn, units=32, bidirectional=True)
    train(model, 20, units=32, lr=1e-3)
    x, _ = make_data(units=32)
    outs = get_outputs(model, "rnn1", x)

    paths = [Path(directory, name) for name in ("activations_own_limits.png", "activations_same_limits.png")]
    features_1D(outs[:1], share_xy=False, title="outputs", savepath=paths[0])
    features_1D(outs[:1], share_xy=True, y_zero=True, title="outputs", savepath=paths[1])
    return paths


if __name__ == "__main__":
    main()
