"""Gates and timesteps of recurrent layers, against float64 numpy, seen through an exporter."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from ikkuna.errors import ConfigError
from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import CallbackSubscriber, GateSubscriber, TimestepGradientSubscriber
from ikkuna.testing import RecordingBackend
from tests.metrics.running import curves

pytestmark = pytest.mark.devices

GATES = {"LSTM": "ifgo", "GRU": "rzn", "RNN": "h"}


class Model(nn.Module):
    """A linear layer that feeds a recurrent one; the loss sees all outputs, or the last."""

    def __init__(self, rnn, last=False):
        super().__init__()
        self.feed = nn.Linear(3, rnn.input_size)
        self.rnn = rnn
        self.last = last

    def forward(self, x):
        out, _ = self.rnn(self.feed(x))
        return out[:, -1] if self.last else out


def trained(model, makers, steps=2, batches=1, length=6):
    """Train with `batches` micro-batches a step; return the curves, and what the callback saw by kind, name and step."""
    recording, bus, seen = RecordingBackend(), MessageBus("recurrent"), {}

    def keep(message):
        seen.setdefault((message.kind, message.series_name), {}).setdefault(message.global_step, []).append(
            message.data.double().cpu().numpy().copy()
        )

    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(0)
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(model)
        for make in makers:
            bus.register_subscriber(make(backend=recording))
        kinds = ("weights", "biases", "weight_gradients", "weight_updates", "bias_gradients", "layer_gradients")
        bus.register_subscriber(CallbackSubscriber(kinds, keep))
        for _ in range(steps):
            optimizer.zero_grad()
            for _ in range(batches):
                model(torch.randn(4, length, 3, generator=generator)).square().mean().backward()
            optimizer.step()
    return curves(recording), seen


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_gates_of_all_layers_directions_and_matrices(kind):
    model = Model(kind(2, 5, num_layers=2, bidirectional=True, batch_first=True))
    kinds = ["weights", "weight_gradients", "weight_updates", "biases", "bias_gradients"]
    found, seen = trained(model, [lambda **o: GateSubscriber(kinds, **o)])
    gates = GATES[kind.__name__]
    expected = {}
    for (what, name), steps in seen.items():
        if what in kinds and name.startswith("rnn."):
            for i, gate in enumerate(gates):
                norms = [np.linalg.norm(np.split(x, len(gates))[i]) for (x,) in steps.values()]
                expected[f"{what}_gate_norm2", f"{name}.{gate}"] = norms
    assert len(expected) == 5 * 2 * 2 * 2 * len(gates)
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert found[key] == pytest.approx(values, rel=1e-12), key


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_gates_of_a_projected_lstm_and_of_cells():
    """Projected outputs make the recurrent matrix narrow; its rows are those of four gates still."""
    model = Model(nn.LSTM(2, 6, proj_size=2, batch_first=True))
    found, seen = trained(model, [lambda **o: GateSubscriber("weights", **o)], steps=1)
    assert {name for _, name in found} == {f"rnn.weight_{m}_l0.{g}" for m in ("ih", "hh") for g in "ifgo"}
    [weight] = seen["weights", "rnn.weight_hh_l0"][0]
    assert found["weights_gate_norm2", "rnn.weight_hh_l0.f"] == [pytest.approx(np.linalg.norm(weight[6:12]), rel=1e-12)]

    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRUCell(3, 4)

        def forward(self, x):
            return self.cell(x[:, 0])

    found, _ = trained(Cell(), [lambda **o: GateSubscriber("weights", **o)], steps=1)
    assert {name for _, name in found} == {f"cell.weight_{m}.{g}" for m in ("ih", "hh") for g in "rzn"}


def test_a_gate_set_to_zero_has_norm_0_and_a_gate_with_a_nan_has_nan():
    model = Model(nn.LSTM(2, 5, batch_first=True))
    with torch.no_grad():
        model.rnn.weight_hh_l0[5:10] = 0.0  # forget
        model.rnn.weight_hh_l0[-1, 0] = math.nan  # output
    found, _ = trained(model, [lambda **o: GateSubscriber("weights", **o)], steps=1)
    norms = {name[-1]: values[0] for (_, name), values in found.items() if "weight_hh" in name}
    assert norms["f"] == 0.0
    assert math.isnan(norms["o"])
    assert norms["i"] > 0


def test_a_model_without_recurrent_layers_publishes_no_gate_and_no_timestep():
    makers = [lambda **o: GateSubscriber(**o), lambda **o: TimestepGradientSubscriber(**o)]
    assert trained(nn.Linear(3, 2), makers)[0] == {}


@pytest.mark.parametrize("name", ["weight_hh_l0", "weight_ih_l0"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_gates_of_a_weight_that_is_computed_from_others_are_those_of_its_parts(kind, name):
    model = Model(kind(2, 5, batch_first=True))
    nn.utils.parametrizations.weight_norm(model.rnn, name)
    kinds = ["weights", "weight_gradients", "weight_updates"]
    effective = getattr(model.rnn, name).detach().double().cpu().numpy().copy()
    found, seen = trained(model, [lambda **o: GateSubscriber(kinds, **o)], steps=2)
    gates = GATES[kind.__name__]
    other = "weight_ih_l0" if name == "weight_hh_l0" else "weight_hh_l0"
    parts = [f"rnn.{part}" for part in (f"{name}.original0", f"{name}.original1", other)]
    assert {key for _, key in found} == {f"{part}.{gate}" for part in parts for gate in gates}
    for what in kinds:
        for part in parts:
            for i, gate in enumerate(gates):
                norms = [np.linalg.norm(np.split(x, len(gates))[i]) for (x,) in seen[what, part].values()]
                assert found[f"{what}_gate_norm2", f"{part}.{gate}"] == pytest.approx(norms, rel=1e-12)
    for i, gate in enumerate(gates):
        norm = np.linalg.norm(np.split(effective, len(gates))[i])
        assert found["weights_gate_norm2", f"rnn.{name}.original0.{gate}"][0] == pytest.approx(norm, rel=1e-6)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_gates_of_parts_of_another_shape():
    """A norm of columns has one row, which belongs to all gates; the old ``weight_norm`` has names of its own."""
    model = Model(nn.GRU(2, 4, batch_first=True))
    nn.utils.parametrizations.weight_norm(model.rnn, "weight_hh_l0", dim=1)
    nn.utils.weight_norm(model.rnn, "weight_ih_l0")
    found, _ = trained(model, [lambda **o: GateSubscriber("weights", **o)], steps=1)
    parts = ("weight_hh_l0.original1", "weight_ih_l0_g", "weight_ih_l0_v")
    assert {name for _, name in found} == {f"rnn.{part}.{gate}" for part in parts for gate in "rzn"}


# -- timesteps --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_norms_of_timesteps_and_their_reach(kind, batch_first):
    model = Model(kind(2, 5, batch_first=batch_first))
    makers = [lambda **o: TimestepGradientSubscriber((0, 2, -1, -4, 99, -99), batch_first=batch_first, **o)]
    found, seen = trained(model, makers, steps=3, batches=2)
    assert {name for _, name in found} == {"rnn", "rnn.t0", "rnn.t2", "rnn.t-1", "rnn.t-4"}
    calls = seen["layer_gradients", "rnn"]
    axes = (0, 2) if batch_first else (1, 2)
    squares = [[(x**2).sum(axes) for x in step] for step in calls.values()]
    for t in (0, 2, -1, -4):
        expected = [math.sqrt(sum(call[t] for call in step)) for step in squares]
        assert found["layer_gradients_timestep_norm2", f"rnn.t{t}"] == pytest.approx(expected, rel=1e-12)
    reach = [np.mean([np.mean(call >= call.max() / 1e4) for call in step]) for step in squares]
    assert found["layer_gradients_timestep_reach", "rnn"] == pytest.approx(reach)


def unrolled(rnn, sequences):
    """Run a recurrent layer by hand, a cell and a timestep at a time; return inputs and outputs of each sequence, by timestep."""
    cell = getattr(nn, f"{type(rnn).__name__}Cell")(rnn.input_size, rnn.hidden_size)
    cell.load_state_dict({name: getattr(rnn, f"{name}_l0").detach() for name in cell.state_dict()})
    inputs, outputs = [], []
    for sequence in sequences:
        inputs.append([x.detach().clone().requires_grad_() for x in sequence])
        outputs.append([])
        state = None
        for x in inputs[-1]:
            state = cell(x, state)
            outputs[-1].append((state[0] if isinstance(state, tuple) else state).clone())  # what leaves the layer
            outputs[-1][-1].retain_grad()
    return inputs, outputs


def share_of_reached(norms):
    return np.mean(np.array(norms) >= max(norms) / 100)


TIMES = (0, 1, 6, -1, -2, -7, 9, -9)


class Packed(nn.Module):
    """A recurrent layer between two that hand packed sequences on; the loss sees every timestep."""

    def __init__(self, kind):
        super().__init__()
        self.below = nn.Identity()
        self.rnn = kind(3, 4)

    def forward(self, sequences):
        out, _ = self.rnn(self.below(nn.utils.rnn.pack_sequence(sequences, enforce_sorted=False)))
        return nn.utils.rnn.unpack_sequence(out)


def weighed(outputs):
    """Return a loss of lists of timesteps that gives each one another gradient, from either end."""
    return sum(
        (y * (1 + t + 10.0 ** (t - len(steps)))).square().sum() for steps in outputs for t, y in enumerate(steps)
    )


@pytest.mark.host("torch packs sequences by lengths of the host, which the default device of the tests is not")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_timesteps_of_packed_sequences_are_those_of_a_network_unrolled_by_hand(kind):
    """At the layer itself, and below it, where gradients have travelled through time."""
    torch.manual_seed(1)
    sequences = [torch.randn(n, 3, requires_grad=True) for n in (3, 7, 5, 1)]
    model, recording, bus = Packed(kind), RecordingBackend(), MessageBus("packed")
    by_hand = dict(zip(("below", "rnn"), unrolled(model.rnn, sequences), strict=True))
    weighed(by_hand["rnn"]).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(model)
        for name in by_hand:
            options = {} if name == "rnn" else {"modules": name, "publishes": ["n", "r"]}
            bus.register_subscriber(TimestepGradientSubscriber(TIMES, backend=recording, **options))
        weighed(model(sequences)).backward()
        optimizer.step()
    found = {(series.kind[-5:], series.name): value for series, value, _ in recording.values}
    expected = {}
    for name, norm, reach in (("rnn", "norm2", "reach"), ("below", "n", "r")):
        grads = [[y.grad.double().cpu().numpy() for y in steps] for steps in by_hand[name]]
        norms = {
            t: math.sqrt(sum((steps[t] ** 2).sum() for steps in grads if -len(steps) <= t < len(steps)))
            for t in range(-7, 7)
        }
        expected |= {(norm, f"{name}.t{t}"): norms[t] for t in TIMES if t in norms}
        expected[reach, name] = share_of_reached([norms[t] for t in range(-7, 0)])
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_timesteps_of_an_unbatched_sequence_are_those_of_a_network_unrolled_by_hand(kind):
    torch.manual_seed(1)
    model = nn.ModuleDict({"rnn": kind(3, 4), "cell": nn.RNNCell(3, 4), "fc": nn.Linear(3, 4)})
    sequence, recording, bus = torch.randn(6, 3), RecordingBackend(), MessageBus("unbatched")
    _, [by_hand] = unrolled(model["rnn"], [sequence])
    weighed([by_hand]).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(model)
        bus.register_subscriber(TimestepGradientSubscriber((0, 2, -1, -6, 6), backend=recording))
        for _ in range(2):  # the root is never called: its parts are seen from the second step on
            optimizer.zero_grad()
            out, _ = model["rnn"](sequence)
            rest = model["cell"](sequence).sum() + model["fc"](sequence).sum()
            (rest + weighed([out])).backward()
            optimizer.step()
    norms = [np.linalg.norm(y.grad.double().cpu().numpy()) for y in by_hand]
    expected = {("layer_gradients_timestep_norm2", f"rnn.t{t}"): norms[t] for t in (0, 2, -1, -6)}
    expected["layer_gradients_timestep_reach", "rnn"] = share_of_reached(norms)
    found = {(series.kind, series.name): value for series, value, step in recording.values if step == 1}
    assert found == pytest.approx(expected, rel=1e-5)


def test_the_layer_below_shows_the_reach_if_the_loss_uses_the_last_output():
    """At the recurrent layer only the last timestep has a gradient; below it, the gradient has travelled."""
    torch.manual_seed(0)
    model = Model(nn.RNN(2, 5, batch_first=True), last=True)
    makers = [
        lambda **o: TimestepGradientSubscriber((0, -1), batch_first=True, **o),
        lambda **o: TimestepGradientSubscriber((0, -1), batch_first=True, modules="feed", publishes=["n", "r"], **o),
    ]
    found, seen = trained(model, makers, steps=1)
    assert found["layer_gradients_timestep_norm2", "rnn.t0"] == [0.0]
    assert found["layer_gradients_timestep_reach", "rnn"] == [1 / 6]
    [gradient] = seen["layer_gradients", "feed"][0]
    assert found["n", "feed.t0"] == [pytest.approx(np.linalg.norm(gradient[:, 0]), rel=1e-12)]
    assert found["n", "feed.t0"][0] > 0
    assert found["r", "feed"] > [1 / 6]


def test_a_vanishing_gradient_falls_from_timestep_to_timestep():
    """A linear recurrence with weight 1/2 halves the gradient at every step back."""
    rnn = nn.RNN(1, 1, nonlinearity="relu", bias=False, batch_first=True)
    model = Model(rnn, last=True)
    with torch.no_grad():
        rnn.weight_ih_l0.fill_(1.0)
        rnn.weight_hh_l0.fill_(0.5)
        model.feed.weight.zero_()
        model.feed.bias.fill_(1.0)
    makers = [lambda **o: TimestepGradientSubscriber((-1, -2, -4, -8), batch_first=True, modules="feed", **o)]
    found, _ = trained(model, makers, steps=1, length=10)
    norms = [found["layer_gradients_timestep_norm2", f"feed.t{t}"][0] for t in (-1, -2, -4, -8)]
    assert np.divide(norms, norms[0]) == pytest.approx([1, 1 / 2, 1 / 8, 1 / 128])
    assert found["layer_gradients_timestep_reach", "feed"] == pytest.approx([0.7])  # 2**-6 is above 1 %, 2**-7 below


def test_no_gradient_has_no_reach():
    model = Model(nn.GRU(2, 5, batch_first=True))
    model.register_forward_hook(lambda module, args, output: output * 0.0)
    found, _ = trained(model, [lambda **o: TimestepGradientSubscriber((-1,), batch_first=True, **o)], steps=1)
    assert found["layer_gradients_timestep_norm2", "rnn.t-1"] == [0.0]
    assert math.isnan(found["layer_gradients_timestep_reach", "rnn"][0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GateSubscriber("activations"), r"needs kinds of parameters \(weights, .*\), got 'activations'"),
        (lambda: TimestepGradientSubscriber(()), r"needs timesteps such as \(0, -1\), got \(\)"),
        (lambda: TimestepGradientSubscriber((0.5,)), r"needs timesteps such as \(0, -1\), got \(0.5,\)"),
        (lambda: TimestepGradientSubscriber((1, 1)), r"differ from each other, got \(1, 1\)"),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
