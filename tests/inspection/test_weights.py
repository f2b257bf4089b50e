"""Layers by name, gates, norms, penalties and health."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from ikkuna.errors import ConfigError
from ikkuna.probe import (
    channel_correlation,
    channel_health,
    detect_nans,
    find_layer,
    find_layers,
    get_rnn_weights,
    get_weights,
    rnn_summary,
    sequence_summary,
    weight_penalties,
    weights_norm,
)
from tests.inspection.networks import ONES, by_hand, reference


def shapes(parts, panel):
    return [tuple(getattr(part, panel).shape) for part in parts]


def test_an_lstm_by_gate():
    """E67."""
    (part,) = get_rnn_weights(nn.LSTM(4, 3))
    assert part.gates == ("input", "forget", "cell", "output")
    assert [tuple(matrix.shape) for matrix in part] == [(4, 12), (3, 12), (2, 12)]
    assert part[0] is part.kernel
    assert part.projection is None


def test_layers_and_directions():
    """E68."""
    rnn = nn.LSTM(4, 3, 2, bidirectional=True)
    parts = get_rnn_weights(rnn)
    assert [(p.layer, p.direction) for p in parts] == [(0, "forward"), (0, "backward"), (1, "forward"), (1, "backward")]
    assert shapes(parts, "kernel") == [(4, 12), (4, 12), (6, 12), (6, 12)]
    assert sum(panel.numel() for part in parts for panel in part.panels().values()) == 480
    assert torch.equal(parts[1].kernel, rnn.weight_ih_l0_reverse.T)
    assert parts[1].kernel.data_ptr() != rnn.weight_ih_l0_reverse.data_ptr()


def test_projection():
    """E69."""
    parts = get_rnn_weights(nn.LSTM(4, 3, 2, bidirectional=True, proj_size=2))
    assert shapes(parts, "recurrent") == [(2, 12)] * 4
    assert shapes(parts, "kernel")[2:] == [(4, 12)] * 2
    assert shapes(parts, "projection") == [(3, 2)] * 4
    assert sum(panel.numel() for part in parts for panel in part.panels().values()) == 408


def test_gates_of_a_gru_have_pytorch_s_order():
    """E70."""
    rnn = nn.GRU(4, 3)
    rnn.weight_ih_l0.data = torch.tensor([1.0, 2, 3]).repeat_interleave(3)[:, None].expand(9, 4).contiguous()
    (part,) = get_rnn_weights(rnn)
    assert [part.gate(name).kernel.unique().tolist() for name in ("reset", "update", "new")] == [[1], [2], [3]]
    with pytest.raises(KeyError, match="reset, update, new"):
        part.gate("forget")


def test_a_named_gate_does_what_the_mathematics_says():
    """With its forget gate at 0 an LSTM keeps nothing; with its update gate at 1 a GRU keeps all."""
    torch.manual_seed(0)
    x = torch.randn(2, 6, 4, dtype=torch.float64)
    lstm, gru = nn.LSTM(4, 3, batch_first=True).double(), nn.GRU(4, 3, batch_first=True).double()
    _silence(lstm, "forget", -1e4)
    i, _, g, o = ((x @ lstm.weight_ih_l0.T + lstm.bias_ih_l0 + lstm.bias_hh_l0)[:, 0]).chunk(4, -1)
    lstm.weight_hh_l0.data.zero_()
    first = torch.sigmoid(o) * torch.tanh(torch.sigmoid(i) * torch.tanh(g))
    torch.testing.assert_close(lstm(x)[0][:, 0], first)
    shuffled = x.clone()
    shuffled[:, :-1] = torch.randn(2, 5, 4, dtype=torch.float64)
    torch.testing.assert_close(lstm(shuffled)[0][:, -1], lstm(x)[0][:, -1])  # the past does not matter
    _silence(gru, "update", 1e4)
    start = torch.randn(1, 2, 3, dtype=torch.float64)
    torch.testing.assert_close(gru(x, start)[1], start)  # nothing new gets in


def _silence(rnn, gate, bias):
    (part,) = get_rnn_weights(rnn)
    start = part.gates.index(gate) * part.hidden
    rows = slice(start, start + part.hidden)
    for name, parameter in rnn.named_parameters():
        parameter.data[rows] = bias / 2 if "bias" in name else 0
    assert not get_rnn_weights(rnn)[0].gate(gate).kernel.any()


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells_and_missing_biases(kind):
    """E72."""
    (part,) = get_rnn_weights(kind(4, 3, bias=False))
    assert part.bias is None
    assert list(part.panels()) == ["kernel", "recurrent"]
    assert get_rnn_weights(kind(4, 3))[0].bias.shape[0] == 2
    assert kind.__name__.removesuffix("Cell") in rnn_summary(kind(4, 3))


def test_parametrised_weights_are_those_in_use():
    """E73."""
    rnn = nn.utils.parametrizations.weight_norm(nn.LSTM(4, 3), "weight_hh_l0")
    (part,) = get_rnn_weights(rnn)
    torch.testing.assert_close(part.recurrent, rnn.weight_hh_l0.detach().T)
    assert get_weights(rnn, rnn)["weight_hh_l0"].shape == (12, 3)
    with pytest.raises(ConfigError, match="parametrised"):
        get_rnn_weights(rnn, mode="grads")


def test_gradients_by_gate():
    model = nn.GRU(4, 3, batch_first=True)
    with pytest.raises(ConfigError, match="no gradients yet"):
        get_rnn_weights(model, mode="grads")
    x = torch.randn(2, 5, 4)
    (asked,) = get_rnn_weights(model, mode="grads", x=x, loss_fn=lambda out: out[0].sum())
    assert model.weight_ih_l0.grad is None
    model(x)[0].sum().backward()
    (stored,) = get_rnn_weights(model, mode="grads")
    torch.testing.assert_close(asked.kernel, stored.kernel)
    torch.testing.assert_close(stored.kernel, model.weight_ih_l0.grad.T)


def test_models_without_an_rnn():
    with pytest.raises(ConfigError, match="no recurrent layer"):
        get_rnn_weights(nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="not a recurrent layer but a Linear"):
        get_rnn_weights(nn.Sequential(nn.Linear(1, 1), nn.GRU(1, 1)), "0")
    with pytest.raises(ConfigError, match="mode"):
        get_rnn_weights(nn.GRU(1, 1), mode="x")


def test_the_summary_of_a_sequence():
    """E86."""
    rnn = reference(bidirectional=True)
    output = rnn(ONES)
    assert output[0][:, -1].flatten().tolist() == [1.9375, 1.0]
    assert sequence_summary(rnn, output).flatten().tolist() == [1.9375, 1.9375]
    _, by_steps = by_hand(rnn, ONES)
    assert by_steps[0, 0].tolist() == [1.0, 1.9375]


def test_summary_text():
    """E92."""
    text = rnn_summary(nn.LSTM(4, 3, bidirectional=True))
    for word in ("layer 0 forward", "layer 0 backward", "weight_ih_l0_reverse", "(12, 4)", "forget 3:6"):
        assert word in text


def test_layers_by_position_name_and_kind(caplog):
    """E83."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.b = nn.Sequential(nn.Linear(1, 1), nn.LSTM(1, 1))
            self.a = nn.Linear(1, 1)

    model = Net()
    assert find_layer(model, 0) == ("b.0", model.b[0])
    assert find_layer(model, -1) == ("a", model.a)
    assert find_layer(model, "lstm") == ("b.1", model.b[1])
    assert find_layer(model, model.a)[0] == "a"
    assert [name for name, _ in find_layers(model, ["b", "a"])] == ["b", "a"]
    assert [name for name, _ in find_layers(model, "*")] == ["b.0", "b.1", "a"]
    assert not caplog.records
    assert find_layer(model, "linear")[0] == "b.0"
    assert "several layers match" in caplog.text
    for wrong in ("zzz", ["a", "zzz"], 7, nn.Linear(1, 1), 1.5):
        with pytest.raises(KeyError):
            find_layers(model, wrong)
    with pytest.raises(KeyError, match=r"b\.1 \(LSTM\)"):
        find_layers(model, "zzz")


def test_weights_by_part():
    model = nn.Sequential(nn.GRU(2, 3), nn.Linear(3, 1))
    assert get_weights(model, "gru/weight_hh").shape == (9, 3)
    assert list(get_weights(model, "*", as_dict=True)) == ["0", "1"]
    assert [sorted(each) for each in get_weights(model, ["1"])] == [["bias", "weight"]]
    with pytest.raises(KeyError, match="has no parameter 'zzz'"):
        get_weights(model, "gru/zzz")


def test_norms_of_units():
    """E89."""
    layer = nn.Linear(2, 2, bias=False)
    layer.weight.data = torch.tensor([[1.0, 3], [2, 4]])
    found = weights_norm(layer, "linear")[""]["weight"]
    assert found == {"max": [pytest.approx(4.47213595499958)], "mean": [pytest.approx(3.81720680758398)]}
    assert weights_norm(layer, "linear", p=1)[""]["weight"] == {"max": [6], "mean": [5]}


def test_norms_grow_into_a_history():
    model = nn.Sequential(nn.Linear(2, 2), nn.ConvTranspose1d(2, 3, 1))
    first = weights_norm(model, [0])
    second = weights_norm(model, "*", first, omit="bias")
    assert [len(second[name]["weight"]["max"]) for name in ("0", "1")] == [2, 1]
    assert len(first["0"]["weight"]["max"]) == 1
    units = []
    weights_norm(model, [1], stats={"count": lambda norms: units.append(len(norms)) or norms.max()})
    assert units == [3, 3]  # output channels, of weight and bias


def test_penalties():
    """E91."""
    layer = nn.Linear(2, 1, bias=False)
    layer.weight.data = torch.tensor([[3.0, 4.0]])
    parameters = list(layer.parameters())
    assert weight_penalties(layer, torch.optim.SGD(parameters, 1.0, weight_decay=0.1))["weight"].loss == pytest.approx(
        1.25
    )
    assert weight_penalties(layer, penalties={"weight": (0, 0.1)})["weight"].loss == pytest.approx(2.5)
    assert weight_penalties(layer, penalties={"weight": (0.1, 0)})["weight"].loss == pytest.approx(0.7)
    for optimizer in (torch.optim.AdamW, torch.optim.Adafactor, torch.optim.Muon):
        found = weight_penalties(layer, optimizer(parameters, weight_decay=0.1))["weight"]
        assert found.kind == "decoupled"
        assert math.isnan(found.loss)
    assert weight_penalties(layer, torch.optim.SGD(parameters, 1.0)) == {}
    with pytest.raises(ConfigError, match="optimizer"):
        weight_penalties(layer)


def test_nans_are_reported():
    """E87."""
    data = [math.nan, math.inf, -math.inf, 0]
    assert detect_nans(data) == "25.0% NaN, 50.0% Inf"
    assert detect_nans(data, include_inf=False) == "25.0% NaN"
    assert detect_nans([math.inf, 0]) == "50.0% Inf"
    assert detect_nans([0]) is None
    assert detect_nans([]) is None
    assert detect_nans(torch.tensor([math.nan] + [0] * 9999)) == "1 of 10000 NaN"


def test_health_of_channels():
    x = torch.zeros(4, 10, 5)
    x[..., 1] = 1.0
    x[0, 0, 2] = 2e3
    x[0, 0, 3] = math.nan
    x[..., 4] = torch.randn(4, 10)
    found = channel_health(x)
    assert (found.dead, found.exploding) == ((0,), (2, 3))
    assert (found.dead_fraction, found.exploding_fraction) == (0.2, 0.4)
    assert channel_health(x.movedim(-1, 1), channel_axis=1) == found
    with pytest.raises(ConfigError, match="channel_axis"):
        channel_health(x, channel_axis=3)


def test_correlation_of_channels():
    x = np.random.default_rng(0).normal(size=(3, 50, 4))
    x[..., 3] = 2.0
    found = channel_correlation(x).numpy()
    np.testing.assert_allclose(found[:3, :3], np.corrcoef(x[..., :3].reshape(-1, 3).T), atol=1e-12)
    assert np.isnan(found[3]).all()
    with pytest.raises(ConfigError, match="at least 2"):
        channel_correlation([[1.0]])


def test_constant_channels_have_no_correlation():
    x = np.stack([np.full(1000, 0.1), np.full(1000, 0.3)], 1)
    assert channel_correlation(x).isnan().all()


def test_complex_weights_have_norms_of_their_magnitudes():
    layer = nn.Linear(2, 1, bias=False, dtype=torch.complex64)
    layer.weight.data.copy_(torch.tensor([[3 + 4j, 12j]]))
    assert weight_penalties(layer, penalties={"weight": (1, 1)})["weight"].loss == pytest.approx(17 + 169)
    assert weights_norm(layer)[""]["weight"]["max"] == [pytest.approx(13)]
