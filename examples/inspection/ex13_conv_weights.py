"""Weights of a sparse convolutional autoencoder: one strip for each position of the kernel.

Some input channels are uniformly weak, others have bands of strong weights.
"""

from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import mse_loss

from ikkuna.plot import features_2D
from ikkuna.probe import get_weights


def main(directory="."):
    torch.manual_seed(0)
    encoder = nn.Conv1d(64, 128, 16, stride=8, padding=4)
    decoder = nn.ConvTranspose1d(128, 64, 16, stride=8, padding=4)
    model = nn.Sequential(encoder, nn.Dropout1d(0.5), nn.ReLU(), decoder)
    signal = torch.randn(8, 4, 256).cumsum(-1) / 8
    x = torch.randn(64, 4) @ signal * torch.linspace(0, 1, 64)[:, None]
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(40):
        optimizer.zero_grad()
        (mse_loss(model(x), x) + 1e-3 * encoder.weight.abs().mean()).backward()
        optimizer.step()

    w = get_weights(model, "0/weight").permute(2, 1, 0)  # (kernel position, input channel, output channel)
    title = "((Layer Channels vs. Kernels) vs. Weights) vs. Input Channels -- norm = (-0.1, 0.1)"
    path = Path(directory, "conv_weights.png")
    features_2D(w, n_rows=16, norm=(-0.1, 0.1), tight=True, borderwidth=1, title_mode=title, savepath=path)
    return [path]


if __name__ == "__main__":
    main()
