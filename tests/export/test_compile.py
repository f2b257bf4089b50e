"""torch.compile: watched in the graph, bit-identical, and seen as in eager mode."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import ikkuna
from ikkuna.export import Exporter
from ikkuna.export.subscriber import CallbackSubscriber, NormSubscriber
from ikkuna.metrics.messages.kinds import MODULE_KINDS
from ikkuna.testing import RecordingBackend
from tests.export.test_invisible import same

BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


class Network(nn.Module):
    """In-place activation after a view, dropout, a module called twice, attention's shapes, a checkpointed block."""

    def __init__(self, dropout=0.1):
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.act = nn.ReLU(inplace=True)
        self.shared = nn.Linear(8, 8)
        self.dropout = nn.Dropout(dropout)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.act(self.up(x))
        x = self.shared(torch.tanh(self.shared(x)))
        x = checkpoint(self.block, self.dropout(x), use_reentrant=False)
        return self.head(self.norm(x).mean(1))


def make(dropout=0.1):
    torch.manual_seed(0)
    model = Network(dropout)
    return model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(compiled, model, loss, optimizer, steps=4, evaluate=False):
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        x = torch.randn(4, 5, 6, generator=generator)
        y = torch.randint(0, 3, (4,), generator=generator)
        optimizer.zero_grad()
        value = loss(compiled(x), y)
        value.backward()
        optimizer.step()
        losses.append(value.detach().clone())
        if evaluate:
            model.eval()
            with torch.no_grad():
                compiled(x)
            model.train()
    return {"losses": losses, "model": model.state_dict(), "optimizer": optimizer.state_dict()}


def compile_it(model, way, backend):
    if way == "wrapper":
        return torch.compile(model, backend=backend, fullgraph=True)
    model.compile(backend=backend, fullgraph=True)
    return model


def watched(bus, compiled, model, loss, kinds=MODULE_KINDS, subsample=1, backend=None):
    backend = backend or RecordingBackend()
    exporter = Exporter(message_bus=bus, on_error="raise")
    exporter.add_modules(compiled)
    exporter.set_loss(loss)
    for kind in kinds:
        bus.register_subscriber(NormSubscriber(kind, subsample=subsample, backend=backend))
    return exporter, backend


def values(backend):
    return {(series.kind, series.name, step): value for series, value, step in backend.values}


@pytest.mark.parametrize("way", ["wrapper", "method"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_compiled_step_is_bit_identical_and_two_graphs_at_most(backend, way, bus):
    model, loss, optimizer = make()
    plain = train(compile_it(model, way, backend), model, loss, optimizer)
    torch.compiler.reset()
    counters.clear()
    model, loss, optimizer = make()
    compiled = compile_it(model, way, backend)
    exporter, recording = watched(bus, compiled, model, loss, subsample=2)
    seen = train(compiled, model, loss, optimizer)
    exporter.close()
    same(plain, seen)
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
    assert {step for _, _, step in values(recording)} == {0, 2}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_step_is_seen_as_an_eager_one(backend, bus):
    """Without dropout, whose random numbers inductor draws in another way."""
    from ikkuna.export.messages import MessageBus

    results = []
    for compiling in (False, True):
        model, loss, optimizer = make(dropout=0.0)
        compiled = torch.compile(model, backend=backend, fullgraph=True) if compiling else model
        exporter, recording = watched(MessageBus(), compiled, model, loss)
        train(compiled, model, loss, optimizer)
        exporter.close()
        results.append(values(recording))
    eager, compiled = results
    itself = {("layer_inputs_norm2", "dropout", step) for step in range(4)}  # what dropout of 0 returns in eager mode
    assert compiled.keys() - itself == eager.keys()
    for key, value in eager.items():
        assert compiled[key] == pytest.approx(value, rel=2e-4, abs=1e-6), key


def test_network_kinds_of_a_compiled_model(bus):
    model, loss, optimizer = make(dropout=0.0)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    exporter, recording = watched(bus, compiled, model, loss, ("input_data", "network_output", "loss", "input_labels"))
    losses = train(compiled, model, loss, optimizer, steps=2)["losses"]
    exporter.close()
    got = values(recording)
    assert {key[0] for key in got} == {"input_data_norm2", "network_output_norm2", "loss_norm2", "input_labels_norm2"}
    assert got["loss_norm2", None, 1] == pytest.approx(losses[1].item())


def test_evaluation_in_between_adds_one_graph_and_no_value(bus):
    model, loss, optimizer = make()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    exporter, recording = watched(bus, compiled, model, loss, ("activations",), subsample=2)
    train(compiled, model, loss, optimizer, evaluate=True)
    exporter.close()
    assert counters["stats"]["unique_graphs"] == 3
    assert {step for _, _, step in values(recording)} == {0, 2}


def test_the_clock_of_a_compiled_model_is_right(bus):
    model, loss, optimizer = make()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    exporter, _ = watched(bus, compiled, model, loss, ("layer_gradients",), subsample=3)
    events = []
    bus.register_subscriber(
        CallbackSubscriber(
            ["batch_started", "batch_finished"], lambda m: events.append((m.kind, m.global_step)), backend="null"
        )
    )
    train(compiled, model, loss, optimizer, steps=5)
    exporter.close()
    assert events == [(kind, step) for step in range(5) for kind in ("batch_started", "batch_finished")]


def test_accumulated_compiled_micro_batches_are_one_step(bus):
    model, loss, optimizer = make(dropout=0.0)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    exporter, recording = watched(bus, compiled, model, loss, ("activations",))
    outputs = []
    for _ in range(2):
        outputs.clear()
        for _ in range(3):
            out = compiled(torch.randn(4, 5, 6))
            outputs.append(out.detach())
            loss(out, torch.randint(0, 3, (4,))).backward()
        optimizer.step()
        optimizer.zero_grad()
    exporter.close()
    assert values(recording)["activations_norm2", "head", 1] == pytest.approx(
        torch.cat(outputs).norm().item(), rel=1e-5
    )


def test_a_subscriber_added_after_the_first_call_has_the_model_compiled_again(bus, caplog):
    model, loss, optimizer = make()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    exporter, recording = watched(bus, compiled, model, loss, ("weights",))
    train(compiled, model, loss, optimizer, steps=2)
    bus.register_subscriber(NormSubscriber("activations", backend=recording))
    assert "torch.compiler.reset()" in caplog.text
    train(compiled, model, loss, optimizer, steps=2)
    exporter.close()
    assert {step for kind, _, step in values(recording) if kind == "activations_norm2"} == {2, 3}


@pytest.mark.fault(17)
def test_an_exporter_attached_after_the_first_call_sees_everything(bus):
    model, loss, optimizer = make()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    train(compiled, model, loss, optimizer, steps=2)
    exporter, recording = watched(bus, compiled, model, loss)
    train(compiled, model, loss, optimizer, steps=2)
    exporter.close()
    kinds = {kind for kind, _, _ in values(recording)}
    assert kinds == {f"{kind}_norm2" for kind in MODULE_KINDS}


def test_a_model_is_not_taken_for_compiled_because_another_one_of_its_class_was(bus, caplog):
    """The compiler keeps its programs with the class.  The model may be compiled later, and must not use them then."""
    other, loss, optimizer = make(dropout=0.0)
    train(torch.compile(other, backend="aot_eager", fullgraph=True), other, loss, optimizer, steps=1)
    model, loss, optimizer = make(dropout=0.0)
    exporter, _ = watched(bus, model, model, loss, ("activations",), subsample=2)
    train(model, model, loss, optimizer, steps=1)
    assert "torch.compiler.reset()" not in caplog.text
    assert not any(
        module._forward_hooks for module in model.modules() if module is not model
    )  # of a compiled one they stay
    exporter.close()


def test_a_model_of_a_class_that_was_compiled_is_measured_when_it_is_compiled(bus):
    other, loss, optimizer = make(dropout=0.0)
    train(torch.compile(other, backend="aot_eager", fullgraph=True), other, loss, optimizer, steps=1)
    model, loss, optimizer = make(dropout=0.0)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    exporter, recording = watched(bus, model, model, loss, ("activations",))
    train(compiled, model, loss, optimizer, steps=2)
    exporter.close()
    assert {step for kind, _, step in values(recording) if kind == "activations_norm2"} == {0, 1}


def test_a_compiled_sequence_is_measured_although_another_one_was_compiled_before(bus):
    """The compiler keeps the programs of all modules that torch defines with one frame around them."""

    def run(exporter=None):
        model, loss = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), nn.CrossEntropyLoss()
        optimizer, compiled = torch.optim.SGD(model.parameters(), 0.1), torch.compile(model, backend="aot_eager")
        if exporter is not None:
            exporter.add_modules(compiled)
            exporter.set_loss(loss)
        for _ in range(2):
            optimizer.zero_grad()
            loss(compiled(torch.ones(5, 3)), torch.zeros(5, dtype=torch.long)).backward()
            optimizer.step()

    recording = RecordingBackend()
    bus.register_subscriber(NormSubscriber("activations", backend=recording))
    run()
    with Exporter(message_bus=bus) as exporter:
        run(exporter)
    assert {(name, step) for _, name, step in values(recording)} == {(name, step) for name in "012" for step in (0, 1)}


def test_after_close_nothing_of_ours_is_in_the_graph(bus):
    model, loss, optimizer = make()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    exporter, recording = watched(bus, compiled, model, loss)
    train(compiled, model, loss, optimizer, steps=1)
    exporter.close()
    recording.values.clear()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    train(compiled, model, loss, optimizer, steps=2)
    assert recording.values == []


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, while it traces
def test_a_compiled_part_of_an_eager_model(bus):
    model, loss, optimizer = make()
    model.block.compile(backend="aot_eager", fullgraph=True)
    model.up.compile(backend="aot_eager", fullgraph=True)
    exporter, recording = watched(bus, model, model, loss, ("activations", "layer_gradients"), subsample=2)
    train(model, model, loss, optimizer, steps=6)
    exporter.close()
    got = values(recording)
    for name in ("up", "block.0", "head", "shared"):
        for kind in ("activations_norm2", "layer_gradients_norm2"):
            assert [step for step in range(6) if (kind, name, step) in got] == [0, 2, 4], (kind, name)
    assert counters["stats"]["unique_graphs"] <= 4


@pytest.mark.slow
def test_forward_taps_in_bf16_are_bit_identical_where_inductor_rounds_as_eager_does(bus):
    """By default inductor rounds less where it fuses more, so a look in between shows in the last bit of bf16."""

    def run(attach):
        torch.compiler.reset()
        model, loss, optimizer = make(dropout=0.0)
        model.bfloat16()
        compiled = torch.compile(model, backend="inductor", fullgraph=True)
        exporter = watched(bus, compiled, model, loss, ("activations",))[0] if attach else None
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            value = loss(compiled(torch.ones(4, 5, 6, dtype=torch.bfloat16)).float(), torch.zeros(4, dtype=torch.long))
            value.backward()
            optimizer.step()
            losses.append(value.detach().clone())
        if exporter is not None:
            exporter.close()
        return losses

    with torch._inductor.config.patch(emulate_precision_casts=True):  # monkeypatch would remove the setting at its end
        assert [a.item() for a in run(False)] == [b.item() for b in run(True)]


def test_a_compiled_optimizer_step(bus):
    model, loss, optimizer = make()
    exporter, recording = watched(bus, model, model, loss, ("weight_updates",))
    step = torch.compile(optimizer.step, backend="eager", fullgraph=False)
    for _ in range(2):
        optimizer.zero_grad()
        loss(model(torch.randn(4, 5, 6)), torch.zeros(4, dtype=torch.long)).backward()
        step()
    exporter.close()
    assert {s for _, _, s in values(recording)} == {0, 1}


def test_a_first_step_that_is_not_sampled_is_made_up_for(bus):
    model, loss, optimizer = make()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    exporter, recording = watched(bus, compiled, model, loss, ("activations",), subsample=4)
    exporter.load_state_dict({"global_step": 6, "train_step": 6, "epoch": 0})
    train(compiled, model, loss, optimizer, steps=4)
    exporter.close()
    assert {step for _, _, step in values(recording)} == {8}


def test_another_pass_of_a_compiled_model_runs_eagerly_and_is_seen(bus):
    model, loss, optimizer = make(dropout=0.0)
    model.compile(backend="aot_eager", fullgraph=True)
    exporter, recording = watched(bus, model, model, loss, kinds=["activations"])
    bus.register_subscriber(NormSubscriber("activations", publishes="testing_norm", tag="testing", backend=recording))
    train(model, model, loss, optimizer, steps=2)
    graphs = counters["stats"]["unique_graphs"]
    x = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(2))
    outputs = []
    model.head.register_forward_hook(lambda module, args, output: outputs.append(output.detach().clone()))
    exporter.evaluate([x])
    exporter.close()
    assert counters["stats"]["unique_graphs"] == graphs
    got = {name: value for (kind, name, _), value in values(recording).items() if kind == "testing_norm"}
    assert got["head"] == pytest.approx(outputs[0].norm().item(), rel=1e-6)
    assert {"up", "shared", "norm", "head", "block.0"} <= got.keys()


@pytest.mark.parametrize("way", ["wrapper", "method"])
def test_eager_on_sample_leaves_the_graph_alone_and_runs_sampled_steps_without_the_compiler(way, bus):
    runs = []

    def backend(graph, inputs):
        targets = {str(node.target) for node in graph.graph.nodes}
        assert not any("ikkuna" in target for target in targets), targets
        return lambda *args: runs.append(exporter.state_dict()["global_step"]) or graph.forward(*args)

    model, loss, optimizer = make()
    plain = train(model, model, loss, optimizer, steps=5)
    model, loss, optimizer = make()
    compiled = compile_it(model, way, backend)
    recording = RecordingBackend()
    exporter = Exporter(message_bus=bus, compiled="eager_on_sample", on_error="raise")
    exporter.add_modules(compiled)
    exporter.set_loss(loss)
    for kind in MODULE_KINDS:
        bus.register_subscriber(NormSubscriber(kind, subsample=2, backend=recording))
    seen = train(compiled, model, loss, optimizer, steps=5)
    assert runs == [1, 3]
    assert counters["stats"]["unique_graphs"] == 1
    same(plain, seen)  # the backend is the same operators, so here even this holds
    exporter.close()
    assert {step for _, _, step in values(recording)} == {0, 2, 4}
    kinds = {kind for kind, _, _ in values(recording)}
    assert kinds == {f"{kind}_norm2" for kind in MODULE_KINDS}
    train(compiled, model, loss, optimizer, steps=1)
    assert len(runs) == 3, "after close() the compiler is in charge again"


def test_eager_on_sample_puts_back_the_stance_the_user_chose(bus):
    model, loss, optimizer = make()
    compiled = torch.compile(model, backend="eager")
    with torch.compiler.set_stance("fail_on_recompile"):
        chosen = torch._dynamo.eval_frame._stance
        with Exporter(message_bus=bus, compiled="eager_on_sample") as exporter:
            exporter.add_modules(compiled)
            bus.register_subscriber(NormSubscriber("activations", backend="null"))
            assert torch._dynamo.eval_frame._stance.stance == "force_eager"
            train(compiled, model, loss, optimizer, steps=1)
        assert torch._dynamo.eval_frame._stance == chosen


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.one, self.other = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x):
        return torch.cond(x.sum() > 0, self.one, self.other, (torch.relu(self.body(x)),))


def losses_of_a_loop(model, backward, log_dir):
    torch.manual_seed(0)
    loss, optimizer, found = nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.1), []
    monitor = None if log_dir is None else ikkuna.watch(model, loss, log_dir=log_dir, every=1, verbosity=0)
    for _ in range(6):
        optimizer.zero_grad()
        found.append(backward(model, loss, torch.randn(8, 4), torch.randint(3, (8,))).item())
        optimizer.step()
    if monitor is not None:
        monitor.close()
        assert monitor.history("loss").values.tolist() == pytest.approx(found)
        assert monitor.health().errors == 0
    return found, [parameter.tolist() for parameter in model.parameters()]


def in_eager(model, loss, x, y):
    value = loss(model(x), y)
    value.backward()
    return value


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, while it traces
@pytest.mark.parametrize("compiled", [False, True])
def test_branches_of_a_condition_may_have_modules(compiled, tmp_path):
    found = []
    for log_dir in (None, tmp_path):
        torch.manual_seed(1)
        torch.compiler.reset()
        model = Branches()
        if compiled:
            model.compile(backend="aot_eager")
        found.append(losses_of_a_loop(model, in_eager, log_dir))
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, while it traces
def test_a_compiled_step_may_call_the_backward(tmp_path):
    """Compiled autograd takes what a hook returns as the gradient."""
    found = []
    for log_dir in (None, tmp_path):
        torch.manual_seed(1)
        torch.compiler.reset()
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        with torch._dynamo.config.patch(compiled_autograd=True):
            found.append(losses_of_a_loop(model, torch.compile(in_eager, backend="aot_eager"), log_dir))
    assert found[0] == found[1]
