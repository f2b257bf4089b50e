"""Gradients of the last state, which has no time axis: one column of channels per sample."""

from pathlib import Path

import torch
from networks import Recurrent, train

from ikkuna.plot import features_0D
from ikkuna.probe import get_gradients


def main(directory="."):
    torch.manual_seed(0)
    model = Recurrent()
    x, y = train(model, 60)
    grads = get_gradients(model, "rnn2", x, y)

    path = Path(directory, "last_state.png")
    features_0D(grads, title="grads", savepath=path)
    return [path]


if __name__ == "__main__":
    main()
