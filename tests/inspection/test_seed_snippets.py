"""The published code blocks of three similar projects, with other import lines and PyTorch models."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import ikkuna.monitor as monitor
import ikkuna.netdict as nnstat
from ikkuna.plot import features_0D, features_1D, features_2D, rnn_heatmap, rnn_histogram
from ikkuna.probe import get_gradients, get_outputs

NNSTAT_BASIC = """
W0 = nnstat.get_weight(model)
loss = model(X, Y)
loss.backward()
G = nnstat.get_grad(model)
optimizer.step()
model.zero_grad()
Mom = nnstat.get_optimizer_state(model, optimizer, "exp_avg")
W1 = nnstat.get_weight(model)
update = W1 - W0
"""

NNSTAT_DESCRIBE = """
W0.norm(2) # get the l2 norm of W0
W0.describe() # get a bunch of statistics of W0
W0.describe(layerwise=True) # get a bunch of statistics of W0 for each layer
W0.describe_layers(layerwise=True, include="ln") # get a bunch of statistics of W0 for each layer whose name contains "ln"
"""
NNSTAT_STATS = 'nnstat.compute_stats(model, optimizer, ["exp_avg", "exp_avg_sg"])'
NNSTAT_LOG = "wandb.log(W0.describe_layers(display=False), step=step)"


class LossModel(nn.Module):
    """A model that is called with its targets and returns the loss."""

    def __init__(self):
        super().__init__()
        self.ln = nn.LayerNorm(4)
        self.fc1 = nn.Linear(4, 5)
        self.fc2 = nn.Linear(5, 3)

    def forward(self, x, t):
        return cross_entropy(self.fc2(self.fc1(self.ln(x)).relu()), t)


def test_nnstat():
    model = LossModel()
    logged = []
    names = {
        "nnstat": nnstat,
        "model": model,
        "optimizer": torch.optim.Adam(model.parameters(), lr=0.01),
        "X": torch.randn(8, 4),
        "Y": torch.randint(3, (8,)),
        "wandb": SimpleNamespace(log=lambda values, step: logged.append((values, step))),
        "step": 3,
    }
    exec(NNSTAT_BASIC, names)
    assert names["update"].norm(2) > 0
    assert set(names["Mom"]) == set(names["W0"]) == set(names["G"])
    exec(NNSTAT_DESCRIBE, names)
    assert list(names["W0"].describe_layers(include="ln")) == ["ln.weight", "ln.bias"]
    with pytest.raises(KeyError, match="did you mean 'exp_avg_sq'"):  # a slip in the printed block
        exec(NNSTAT_STATS, names)
    exec(NNSTAT_STATS.replace("exp_avg_sg", "exp_avg_sq"), names)
    exec(NNSTAT_LOG, names)
    assert isinstance(logged[0][0], dict)
    assert logged[0][0]["fc1.weight"]["num_params"] == 20


MONITOR = """
# Prepare the model.
model = MLP()
optimizer.setup(model)

# Forward computation, back propagation and a parameter update.
# The gradients are still stored inside each parameter after those steps.
loss = model(x, t)
loss.backward()
optimizer.update()

# Use the plugin to collect data and nicely ask Chainer to include it in the log.
weight_report = monitor.weight_statistics(model)
chainer.report(weight_report) # Mean, std, min, max, percentiles

bias_report = monitor.bias_statistics(model)
chainer.report(bias_report)

fst_layer_grads = monitor.weight_gradient_statistics(model, layer_name='fc1')
chainer.report(fst_layer_grads)

zeros = monitor.sparsity(model, include_bias=False)
chainer.report(zeros)
"""


class Optimizer:
    """Torch's SGD behind Chainer's two methods."""

    def setup(self, model):
        self.sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    def update(self):
        self.sgd.step()


def test_chainer_param_monitor():
    log = {}
    names = {
        "monitor": monitor,
        "chainer": SimpleNamespace(report=log.update),
        "MLP": LossModel,
        "optimizer": Optimizer(),
        "x": torch.randn(8, 4),
        "t": torch.randint(3, (8,)),
    }
    exec(MONITOR, names)
    assert len(log) == 11 * 3 + 3
    assert "LossModel/fc1/weight/grad/percentile/3" in log
    assert log["LossModel/*/weight/sparsity/total"] == 35


SEE_RNN_TRAIN = """
def make_data(batch_shape):
    return np.random.randn(*batch_shape), \\
           np.random.uniform(-1, 1, (batch_shape[0], units))

def train_model(model, iterations, batch_shape):
    x, y = make_data(batch_shape)
    for i in range(iterations):
        model.train_on_batch(x, y)
        print(end='.')  # progbar
        if i % 40 == 0:
            x, y = make_data(batch_shape)

units = 6
batch_shape = (16, 100, 2*units)

model = make_model(LSTM, batch_shape, units)
train_model(model, 300, batch_shape)

x, y  = make_data(batch_shape)
grads_all  = get_gradients(model, 1, x, y)  # return_sequences=True,  layer index 1
grads_last = get_gradients(model, 2, x, y)  # return_sequences=False, layer index 2

features_1D(grads_all, n_rows=2, xy_ticks=[1,1])
features_2D(grads_all, n_rows=8, xy_ticks=[1,1], norm=(-.01, .01))
features_0D(grads_last)
"""


class Keras(nn.Module):
    """Input, a sequence layer and a last-state layer, trained by Keras' method."""

    def __init__(self, layer, inputs, units, bidirectional=False):
        super().__init__()
        self.input = nn.Identity()
        self.rnn1 = layer(inputs, units, batch_first=True, bidirectional=bidirectional)
        self.rnn2 = layer(units * (1 + bidirectional), units, batch_first=True)
        self.optimizer = torch.optim.Adam(self.parameters(), 4e-3)

    def forward(self, x):
        sequence, _ = self.rnn1(self.input(x))
        _, state = self.rnn2(sequence)
        return (state[0] if isinstance(state, tuple) else state)[-1]

    def train_on_batch(self, x, y):
        self.optimizer.zero_grad()
        mse_loss(self(torch.tensor(x).float()), torch.tensor(y).float()).backward()
        self.optimizer.step()


def see_rnn_names():
    return {
        "np": np,
        "get_gradients": get_gradients,
        "get_outputs": get_outputs,
        "features_0D": features_0D,
        "features_1D": features_1D,
        "features_2D": features_2D,
        "rnn_histogram": rnn_histogram,
        "rnn_heatmap": rnn_heatmap,
        "LSTM": nn.LSTM,
        "make_model": lambda layer, shape, units: Keras(layer, shape[-1], units),
    }


def test_see_rnn_usage(capsys):
    names = see_rnn_names()
    exec(SEE_RNN_TRAIN.replace("300", "5"), names)  # fewer iterations, to be quick
    assert names["grads_all"].shape == (16, 100, 6)
    assert names["grads_last"].shape == (16, 6)


SEE_RNN_COMMON = """
grads = get_gradients(model, 1, x, y)  # return_sequences=True,  layer index 1
outs  = get_outputs(model, 1, x)       # return_sequences=True,  layer index 1
"""

SEE_RNN_EXAMPLES = {
    "1": "features_1D(outs[:1], share_xy=False)\nfeatures_1D(outs[:1], share_xy=True, y_zero=True)",
    "2": "features_1D(grads[:1], n_rows=2)",
    "3 and 4": "features_1D(grads, n_rows=2)\nfeatures_2D(grads, n_rows=4, norm=(-.01, .01))",
    "5": "features_1D(grads[0, :, :])\nfeatures_2D(grads[:, :, 0], norm=(-.0001, .0001))",
    "6": "features_2D(grads[0], norm=(-.0001, .0001), reflect_half=True)",
    "7": "grads = get_gradients(model, 2, x, y)\nfeatures_0D(grads)",
    "8": "features_2D(grads, n_rows=8, norm=(-.0001, .0001), xy_ticks=[0,0], title_mode=False)",
    "9": "rnn_histogram(model, 'lstm', equate_axes=False, bias=False)\n"
    "rnn_histogram(model, 'lstm', equate_axes=True,  bias=False)\nrnn_heatmap(model, 'lstm')",
    "10": "rnn_histogram(model, 'bidir', equate_axes=2)\nrnn_heatmap(model, 'bidir', norm=(-.8, .8))",
    "11": "rnn_heatmap(gru, 'gru', mode='grads', input_data=x, labels=y, cmap=None, absolute_value=True)",
    "13": "features_2D(w, n_rows=16, norm=(-.1, .1), tight=True, borderwidth=1, title_mode=title)",
}


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(0)
    names = see_rnn_names()
    model = Keras(nn.LSTM, 6, 3, bidirectional=True)
    names |= {
        "model": model,
        "gru": Keras(nn.GRU, 6, 3),
        "x": np.random.default_rng(0).normal(size=(16, 20, 6)),
        "y": np.zeros((16, 3)),
        "w": torch.randn(16, 64, 128) / 20,
        "title": "((Layer Channels vs. Kernels) vs. Weights) vs. Input Channels -- norm = (-0.1, 0.1)",
    }
    exec(SEE_RNN_COMMON, names)
    return names


@pytest.mark.parametrize("example", SEE_RNN_EXAMPLES)
def test_see_rnn_examples(trained, example):
    exec(SEE_RNN_EXAMPLES[example], dict(trained))
