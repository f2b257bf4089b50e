"""Gradients of outputs through time, of weights and of inputs."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from ikkuna.errors import ConfigError
from ikkuna.probe import get_gradients, get_outputs, vanishing
from tests.inspection.networks import ONES, Stack, by_hand, reference

KINDS = {
    "rnn": lambda: nn.RNN(4, 3, 2, nonlinearity="relu", bias=False, batch_first=True),
    "rnn tanh, time first": lambda: nn.RNN(4, 3),
    "gru": lambda: nn.GRU(4, 3, 2, bidirectional=True, batch_first=True),
    "gru, time first": lambda: nn.GRU(4, 3, 3),
    "lstm": lambda: nn.LSTM(4, 3, 2, batch_first=True),
    "lstm, bidirectional": lambda: nn.LSTM(4, 3, 3, bidirectional=True, batch_first=True),
    "lstm, projected": lambda: nn.LSTM(4, 3, 2, bidirectional=True, proj_size=2),
}


def last(output):
    return output[:, -1].sum()


def test_local_gradients_of_stacked_layers():
    """E74."""
    model = Stack(reference(), reference())
    first, second = get_gradients(model, ["layers.0", "layers.1"], ONES, loss_fn=last)
    assert first.flatten().tolist() == [0.0625, 0.125, 0.25, 0.5, 1.0]
    assert second.flatten().tolist() == [0, 0, 0, 0, 1]


def test_gradients_through_time():
    """E75."""
    model = Stack(reference())
    found = get_gradients(model, 0, ONES, loss_fn=last, through_time=True)
    assert found.flatten().tolist() == [0.0625, 0.125, 0.25, 0.5, 1.0]
    found = get_gradients(model, 0, ONES, loss_fn=torch.sum, through_time=True)
    assert found.flatten().tolist() == [1.9375, 1.875, 1.75, 1.5, 1]


def test_gradients_of_weights():
    """E76."""
    found = get_gradients(Stack(reference()), 0, ONES, loss_fn=last, wrt="weights")
    assert {name: value.item() for name, value in found.items()} == {"weight_ih_l0": 1.9375, "weight_hh_l0": 3.25}
    unused = get_gradients(
        nn.ModuleList([nn.Linear(1, 1)]), 0, closure=lambda: ONES.requires_grad_().sum(), wrt="weights"
    )
    assert unused["weight"].item() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_those_of_a_network_computed_by_hand(kind):
    """For every kind, direction and layer: the total derivative with respect to each state."""
    torch.manual_seed(0)
    rnn = KINDS[kind]().double()
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    weights = torch.randn(2, 5, 1, dtype=torch.float64)
    layers, output = by_hand(rnn, x)
    loss = (output.sin() * weights).sum()
    given = x if rnn.batch_first else x.transpose(0, 1)
    signs = weights if rnn.batch_first else weights.transpose(0, 1)
    for layer, directions in enumerate(layers):
        states = [state for direction in directions for state in direction]
        gradients = torch.autograd.grad(loss, states, retain_graph=True)
        parts = [torch.stack(gradients[i : i + 5], 1) for i in range(0, len(states), 5)]
        found = get_gradients(
            rnn, rnn, given, loss_fn=lambda out: (out[0].sin() * signs).sum(), through_time=True, rnn_layer=layer
        )
        torch.testing.assert_close(found, torch.cat(parts, -1))


@pytest.mark.parametrize("kind", KINDS)
def test_inner_layers_of_an_rnn(kind):
    """E85, and the local gradients of inner layers: what reaches them from the layer above."""
    torch.manual_seed(0)
    rnn = KINDS[kind]().double()
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    given = x if rnn.batch_first else x.transpose(0, 1)
    layers, _ = by_hand(rnn, x)
    for layer, directions in enumerate(layers):
        expected = torch.cat([torch.stack(states, 1) for states in directions], -1)
        torch.testing.assert_close(get_outputs(rnn, rnn, given, rnn_layer=layer), expected.detach())
        # Cut the layer's output off from its own recurrence: only the layers above see it.
        leaf = expected.detach().requires_grad_()
        _, above = by_hand(rnn, leaf, first=layer + 1)
        (local,) = torch.autograd.grad(above.sum(), leaf)
        found = get_gradients(rnn, rnn, given, loss_fn=lambda out: out[0].sum(), rnn_layer=layer)
        torch.testing.assert_close(found, local)


def test_layouts():
    """E78."""
    for given, expected in ((torch.randn(5, 2, 4), (2, 5, 3)), (torch.randn(5, 4), (1, 5, 3))):
        rnn = nn.GRU(4, 3)
        for options in ({}, {"through_time": True}):
            found = get_gradients(rnn, rnn, given, loss_fn=lambda out: out[0].sum(), **options)
            assert found.shape == expected
        assert get_outputs(rnn, rnn, given).shape == expected
        assert get_outputs(rnn, rnn, given, part="h_n").shape == (expected[0], 3)


@pytest.mark.parametrize("through_time", [False, True])
@pytest.mark.parametrize("lengths", [[5, 3, 2], [2, 5, 3]])
def test_packed_sequences(lengths, through_time):
    """E79, sorted or not: each sequence as if it were alone."""
    torch.manual_seed(0)
    rnn = nn.LSTM(4, 3, 2, batch_first=True, bidirectional=True).double()
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    packed = pack_padded_sequence(x, torch.tensor(lengths), batch_first=True, enforce_sorted=False)

    def loss(output):
        values, _ = pad_packed_sequence(output[0], batch_first=True)
        return values.sin().sum() + output[1][0].sum()

    options = {"loss_fn": loss, "through_time": through_time}
    for layer in (0, 1):
        found = get_gradients(rnn, rnn, packed, rnn_layer=layer, **options)
        holes = get_gradients(rnn, rnn, packed, rnn_layer=layer, pad="nan", **options)
        assert found.shape == (3, 5, 6)
        for i, length in enumerate(lengths):
            alone = get_gradients(
                rnn,
                rnn,
                x[i : i + 1, :length],
                loss_fn=lambda out: out[0].sin().sum() + out[1][0].sum(),
                through_time=through_time,
                rnn_layer=layer,
            )
            torch.testing.assert_close(found[i : i + 1, :length], alone)
            assert not found[i, length:].any()
            assert holes[i, length:].isnan().all()
            assert not holes[i, :length].isnan().any()
    outs = get_outputs(rnn, rnn, packed)
    torch.testing.assert_close(outs, pad_packed_sequence(rnn(packed)[0], batch_first=True)[0].detach())


def test_the_default_loss_and_sample_weights():
    """E80."""
    model, x = nn.Sequential(nn.Identity()), torch.tensor([[1.0, 2], [3, 4]])
    assert get_gradients(model, 0, x, torch.zeros(2, 2)).tolist() == [[0.5, 1], [1.5, 2]]
    for loss_fn in (None, mse_loss, nn.MSELoss(), lambda a, b: (a - b) ** 2):
        found = get_gradients(model, 0, x, torch.zeros(2, 2), loss_fn, sample_weight=[1, 3])
        assert found.tolist() == [[0.5, 1], [4.5, 6]]
    with pytest.raises(ConfigError, match="sample_weight"):
        get_gradients(model, 0, x, torch.zeros(2, 2), lambda a, b: (a - b).sum(), sample_weight=[1, 3])


def test_whole_number_targets_mean_cross_entropy():
    model, x = nn.Sequential(nn.Identity()), torch.randn(3, 5)
    y = torch.tensor([0, 4, 2])
    x.requires_grad_()
    (expected,) = torch.autograd.grad(cross_entropy(x, y), x)
    torch.testing.assert_close(get_gradients(model, 0, x.detach(), y), expected)
    sequence = torch.randn(2, 7, 5)
    assert get_gradients(model, 0, sequence, torch.zeros(2, 7, dtype=torch.long)).shape == (2, 7, 5)
    assert get_gradients(model, 0, sequence, torch.zeros(2, 5, dtype=torch.long)).shape == (2, 7, 5)


@pytest.mark.parametrize(
    ("y", "match"),
    [(None, "give loss_fn"), (torch.zeros(3), "no loss can be guessed"), (torch.zeros(9, dtype=torch.long), "guessed")],
)
def test_a_loss_that_cannot_be_guessed(y, match):
    with pytest.raises(ConfigError, match=match):
        get_gradients(nn.Linear(2, 2), 0, torch.ones(4, 2), y)


def test_an_invalid_loss():
    model, x = nn.Linear(2, 2), torch.ones(4, 2)
    with pytest.raises(ConfigError, match="one number"):
        get_gradients(model, 0, x, loss_fn=lambda out: out)
    with pytest.raises(ConfigError, match="does not depend"):
        get_gradients(model, 0, x, loss_fn=lambda out: out.detach().sum())
    with pytest.raises(ConfigError, match="closure"):
        get_gradients(model, 0)
    with pytest.raises(ConfigError, match="closure must return the loss"):
        get_gradients(model, 0, closure=lambda: 3.0)


def test_invalid_values():
    """E84."""
    with pytest.raises(ValueError, match=r"'outputs', 'weights', 'inputs'"):
        get_gradients(nn.Linear(1, 1), 0, torch.ones(1, 1), mode="cactus")
    with pytest.raises(ConfigError, match="pad"):
        get_gradients(nn.Linear(1, 1), 0, torch.ones(1, 1), loss_fn=torch.sum, pad=3)
    with pytest.raises(ConfigError, match="rnn_layer"):
        get_gradients(reference(), 0, ONES, loss_fn=lambda o: o[0].sum(), rnn_layer=4)
    with pytest.raises(ConfigError, match="no part 'h_n'"):
        get_outputs(nn.Linear(1, 1), 0, torch.ones(1, 1), part="h_n")


def test_the_last_state_when_only_that_is_used():
    rnn = nn.LSTM(4, 3, 2, batch_first=True, bidirectional=True)
    x = torch.randn(2, 5, 4)
    found = get_gradients(rnn, rnn, x, loss_fn=lambda out: (out[1][0][-1] * 2).sum() + out[1][0][-2].sum())
    assert found.tolist() == [[1, 1, 1, 2, 2, 2]] * 2
    cells = get_gradients(rnn, rnn, x, loss_fn=lambda out: out[1][1][-2:].sum(), part="c_n")
    assert cells.tolist() == [[1] * 6] * 2


def test_cells_are_stacked_over_their_calls():
    class Unrolled(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRUCell(4, 3)

        def forward(self, x):
            h = x.new_zeros(len(x), 3)
            for t in range(x.shape[1]):
                h = self.cell(x[:, t], h)
            return h

    torch.manual_seed(0)
    model, x = Unrolled().double(), torch.randn(2, 5, 4, dtype=torch.float64)
    rnn = nn.GRU(4, 3, batch_first=True).double()
    rnn.load_state_dict({f"{name}_l0": value for name, value in model.cell.state_dict().items()})
    torch.testing.assert_close(get_outputs(model, "cell", x), rnn(x)[0].detach())
    expected = get_gradients(rnn, rnn, x, loss_fn=lambda out: out[1].sum(), through_time=True)
    torch.testing.assert_close(get_gradients(model, "cell", x, loss_fn=torch.sum), expected)
    assert get_gradients(model, "cell", x, loss_fn=torch.sum, wrt="inputs").shape == (2, 5, 4)


def test_an_in_place_activation_does_not_hide_the_output():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))
    model[0].weight.data = torch.tensor([[1.0, 0], [0, -1]])
    model[0].bias.data.zero_()
    for x in (torch.ones(1, 2), torch.ones(1, 1, 2)):  # a 3-D Linear returns a view
        assert get_outputs(model, 0, x).flatten().tolist() == [1, -1]
        found = get_gradients(model, 0, x, loss_fn=lambda out: (out * torch.tensor([2.0, 3])).sum())
        assert found.flatten().tolist() == [2, 0]


def test_frozen_models_and_inputs():
    model = nn.Sequential(nn.Conv1d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(9, 2)).requires_grad_(False)
    x = torch.randn(4, 2, 5)
    assert get_gradients(model, 0, x, loss_fn=torch.sum).shape == (4, 3, 3)
    assert get_gradients(model, 0, x, loss_fn=torch.sum, wrt="weights")["bias"].shape == (3,)
    x.requires_grad_()
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    torch.testing.assert_close(get_gradients(model, None, x.detach(), loss_fn=torch.sum, wrt="inputs"), expected)
    assert get_gradients(model, 3, x, loss_fn=torch.sum, wrt="inputs").shape == (4, 9)
    assert not any(p.requires_grad for p in model.parameters())
    with torch.no_grad():
        assert get_gradients(model, 0, x, loss_fn=torch.sum).abs().sum() > 0


def test_arrays_lists_tuples_and_dictionaries_are_inputs():
    model = nn.Bilinear(2, 3, 1)
    a, b = np.ones((4, 2)), np.ones((4, 3))
    one = get_outputs(model, 0, (a, b))
    torch.testing.assert_close(get_outputs(model, 0, {"input1": a.tolist(), "input2": b}), one)
    assert one.dtype is torch.float32
    assert get_gradients(model, 0, (a, b), np.zeros((4, 1))).shape == (4, 1)


def test_nested_outputs():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            out = self.inner(x)
            return (out["a"][0] * 2 + out["b"]).sum()

    class Inner(nn.Module):
        def forward(self, x):
            return {"a": (x * 3, "text"), "b": x}

    x = torch.ones(2, 2)
    assert get_outputs(Nested(), "inner", x).tolist() == [[3, 3], [3, 3]]
    assert get_gradients(Nested(), "inner", x).tolist() == [[2, 2], [2, 2]]
    assert get_outputs(Nested(), "inner", x, part="1").tolist() == [[1, 1], [1, 1]]


def test_results_have_the_given_order():
    """E83, in part."""
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    x = torch.ones(1, 2)
    assert [out.shape[-1] for out in get_outputs(model, ["2", "0"], x)] == [1, 3]
    assert list(get_outputs(model, "*", x, as_dict=True)) == ["0", "1", "2"]
    assert list(get_gradients(model, [2, 0], x, loss_fn=torch.sum, as_dict=True)) == ["2", "0"]


def test_a_layer_that_was_not_called():
    model = nn.Sequential(nn.Linear(1, 1))
    model[0].unused = nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="not called"):
        get_outputs(model, "0.unused", torch.ones(1, 1))
    assert get_outputs(model, "*", torch.ones(1, 1)) == []  # its only leaf


def test_a_vanishing_gradient():
    """E110."""
    found = vanishing(0.5 ** torch.arange(99, -1, -1, dtype=torch.float64))
    assert (found.below, found.zero) == (0.73, 0.0)
    assert found.norms[-1] == 1.0


def test_integer_parameters_are_left_out():
    model = nn.Sequential(nn.Linear(2, 2))
    model.codes = nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)
    found = get_gradients(model, None, torch.ones(1, 2), loss_fn=lambda output: output.sum(), wrt="weights")
    assert list(found) == ["0.weight", "0.bias"]
