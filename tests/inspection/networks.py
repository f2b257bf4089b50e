"""Networks whose gradients are known, and recurrent layers computed by hand."""

import torch
from torch import nn


def reference(**options):
    """Return a relu RNN with input weight 1 and recurrent weight 0.5; for ones it returns 1, 1.5, 1.75, …"""
    options = {"batch_first": True, **options}
    rnn = nn.RNN(1, 1, nonlinearity="relu", bias=False, **options).double()
    for name, parameter in rnn.named_parameters():
        nn.init.constant_(parameter, 1.0 if "_ih_" in name else 0.5)
    return rnn


class Stack(nn.Module):
    """Layers in sequence; a recurrent layer passes on its output sequence."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            x = x[0] if isinstance(x, tuple) else x
        return x


ONES = torch.ones(1, 5, 1, dtype=torch.float64)


def step(rnn, suffix, x, h, c):
    """Compute one step of one direction: x (batch, input), h (batch, projected), c (batch, hidden)."""
    w = {key: getattr(rnn, key + suffix, None) for key in ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")}
    a = x @ w["weight_ih"].T + (0 if w["bias_ih"] is None else w["bias_ih"])
    b = h @ w["weight_hh"].T + (0 if w["bias_hh"] is None else w["bias_hh"])
    if isinstance(rnn, nn.GRU):
        (ra, za, na), (rb, zb, nb) = a.chunk(3, -1), b.chunk(3, -1)
        r, z = torch.sigmoid(ra + rb), torch.sigmoid(za + zb)
        return (1 - z) * torch.tanh(na + r * nb) + z * h, c
    if isinstance(rnn, nn.LSTM):
        i, f, g, o = (a + b).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return (h if w["weight_hr"] is None else h @ w["weight_hr"].T), c
    return (torch.relu(a + b) if rnn.nonlinearity == "relu" else torch.tanh(a + b)), c


def by_hand(rnn, x, first=0):
    """Return the states by layer (from `first` on), direction and step, and the output, for x (batch, time, input)."""
    everything = []
    for layer in range(first, rnn.num_layers):
        directions = []
        for suffix in (f"_l{layer}", f"_l{layer}_reverse")[: 1 + rnn.bidirectional]:
            size = getattr(rnn, "proj_size", 0) or rnn.hidden_size
            h, c = x.new_zeros(len(x), size), x.new_zeros(len(x), rnn.hidden_size)
            states = [None] * x.shape[1]
            for t in range(x.shape[1])[:: -1 if "reverse" in suffix else 1]:
                h, c = step(rnn, suffix, x[:, t], h, c)
                states[t] = h
            directions.append(states)
        everything.append(directions)
        x = torch.cat([torch.stack(states, 1) for states in directions], -1)
    return everything, x
