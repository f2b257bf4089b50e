"""The small recurrent networks of the examples in this directory."""

import torch
from torch import nn
from torch.nn.functional import mse_loss


class Recurrent(nn.Module):
    """Two recurrent layers: the first gives out its whole sequence, the second its last state."""

    def __init__(self, kind=nn.LSTM, inputs=12, units=6, bidirectional=False):
        super().__init__()
        self.rnn1 = kind(inputs, units, batch_first=True, bidirectional=bidirectional)
        self.rnn2 = kind(units * (1 + bidirectional), units, batch_first=True)

    def forward(self, x):
        sequence, _ = self.rnn1(x)
        _, state = self.rnn2(sequence)
        last = state[0] if isinstance(state, tuple) else state
        return last[-1]


def make_data(units=6, inputs=12, samples=16, timesteps=100):
    return torch.randn(samples, timesteps, inputs), torch.rand(samples, units) * 2 - 1


def train(model, iterations, units=6, inputs=12, lr=4e-3, timesteps=100):
    """Fit noise; what is learned does not matter here, how the gradient travels does."""
    optimizer = torch.optim.Adam(model.parameters(), lr)
    for i in range(iterations):
        if i % 40 == 0:
            x, y = make_data(units, inputs, timesteps=timesteps)
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
    return x, y
