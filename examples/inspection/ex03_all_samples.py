"""Gradients of all samples after 20 iterations, as curves and as images.

In the images, blue is negative, white is zero and red is positive.
If only the right edge is coloured, the network ignores the early timesteps.
"""

from pathlib import Path

import torch
from networks import Recurrent, train

from ikkuna.plot import features_1D, features_2D
from ikkuna.probe import get_gradients


def main(directory=".", iterations=20):
    torch.manual_seed(0)
    model = Recurrent()
    x, y = train(model, iterations)
    grads = get_gradients(model, "rnn1", x, y)

    paths = [Path(directory, f"gradient_{form}_{iterations}.png") for form in ("curves", "images")]
    features_1D(grads, n_rows=2, title="grads", savepath=paths[0])
    features_2D(grads, n_rows=4, norm=(-0.01, 0.01), title="grads", savepath=paths[1])
    return paths


if __name__ == "__main__":
    main()
