"""Two pictures of 256 channels: curves compare samples, an image compares channels."""

from pathlib import Path

import torch
from networks import Recurrent, train

from ikkuna.plot import features_1D, features_2D
from ikkuna.probe import get_gradients


def main(directory="."):
    torch.manual_seed(0)
    model = Recurrent(units=256)
    x, y = train(model, 6, units=256, lr=1e-3)
    grads = get_gradients(model, "rnn1", x, y)

    paths = [Path(directory, f"many_channels_{form}.png") for form in ("curves", "image", "one_channel")]
    features_1D(grads[0, :, :], title="grads", savepath=paths[0])
    features_2D(grads[0], norm=(-0.0001, 0.0001), title="grads", savepath=paths[1])
    features_2D(grads[:, :, 0], dims="NT", norm=(-0.0001, 0.0001), title="grads", savepath=paths[2])
    return paths


if __name__ == "__main__":
    main()
