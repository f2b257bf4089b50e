"""Transformer layers in evaluation mode compute the same bits with and without hooks."""

import copy
import logging
import warnings

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from ikkuna.export import Exporter
from ikkuna.export.subscriber import NormSubscriber
from ikkuna.testing import RecordingBackend

KINDS = ("activations", "layer_gradients")


class Classifier(nn.Module):
    """A head on an encoder."""

    def __init__(self, layers=2, frozen=True, no_grad=False):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.encoder = nn.TransformerEncoder(layer, layers).eval()
        self.encoder.requires_grad_(not frozen)
        self.no_grad = no_grad
        self.head = nn.Linear(16, 3)

    def train(self, mode=True):
        super().train(mode)
        self.encoder.eval()
        return self

    def forward(self, x):
        with torch.set_grad_enabled(not self.no_grad):
            features = self.encoder(x)
        return self.head(features.mean(1))


@pytest.fixture(autouse=True)
def no_process_wide_hook_stays():
    yield
    assert not torch_module._global_forward_hooks
    assert not torch_module._global_forward_pre_hooks


def batch(seed):
    return torch.randn(4, 5, 16, generator=torch.Generator().manual_seed(seed))


def train(model, steps=3):
    """Return the outputs of all steps, and the weights at the end."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    outputs = []
    for step in range(steps):
        optimizer.zero_grad()
        output = model(batch(step))
        output.square().sum().backward()
        optimizer.step()
        outputs.append(output.detach())
    return [*outputs, *model.state_dict().values()]


def watch(bus, model, **options):
    recording = RecordingBackend()
    exporter = Exporter(message_bus=bus, on_error="raise", **options)
    exporter.add_modules(model)
    for kind in KINDS:
        bus.register_subscriber(NormSubscriber(kind, backend=recording))
        bus.register_subscriber(NormSubscriber(kind, tag="testing", backend=recording))
    return exporter, recording


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.fault(204)
@pytest.mark.parametrize("case", ["frozen", "no_grad"])
def test_a_frozen_encoder_below_a_trained_head(bus, caplog, case):
    """torch computes the encoder by its fast path as without ikkuna; one line says that modules in it are not observed."""
    model = Classifier(frozen=case == "frozen", no_grad=case == "no_grad")
    unwatched = train(copy.deepcopy(model))
    exporter, recording = watch(bus, model)
    watched = train(model)
    exporter.close()
    assert same(watched, unwatched)
    assert {series.name for series, _, _ in recording.values} == {"head"}
    (line,) = [
        r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and "one operator" in r.getMessage()
    ]
    assert "TransformerEncoderLayer" in line


@pytest.mark.fault(204)
def test_a_frozen_encoder_in_a_compiled_model(bus, caplog):
    """The graph of a watched model computes it by the same operator as that of an unwatched one."""
    model = Classifier(layers=1)
    reference = copy.deepcopy(model)
    unwatched = train(torch.compile(reference, backend="eager"))
    torch.compiler.reset()
    exporter, recording = watch(bus, model)
    watched = train(torch.compile(model, backend="eager"))
    exporter.close()
    torch.compiler.reset()
    assert same(watched, unwatched)
    assert {series.name for series, _, _ in recording.values} == {"head"}


@pytest.mark.fault(204)
def test_an_encoder_in_evaluation_mode_that_is_trained(bus, caplog):
    """Its modules are called one by one, and observed."""
    model = Classifier(frozen=False)
    unwatched = train(copy.deepcopy(model))
    exporter, recording = watch(bus, model)
    watched = train(model)
    exporter.close()
    assert same(watched, unwatched)
    names = {series.name for series, _, _ in recording.values if series.kind == "layer_gradients_norm2"}
    assert {"encoder.layers.0.linear1", "encoder.layers.1.norm2", "head"} <= names
    assert not [r for r in caplog.records if "one operator" in r.getMessage()]


@pytest.mark.fault(204)
def test_without_the_fast_path(bus, caplog):
    """If torch's fast path is switched off, modules of a frozen encoder are observed."""
    model = Classifier()
    exporter, recording = watch(bus, model)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        train(model)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    exporter.close()
    assert {"encoder.layers.0.linear1", "encoder.layers.1.norm2", "head"} <= {s.name for s, _, _ in recording.values}
    assert not [r for r in caplog.records if "one operator" in r.getMessage()]


@pytest.mark.fault(204)
def test_the_users_own_evaluation(bus):
    """In another pass, and between steps, an evaluation gives the same bits."""
    model = Classifier(frozen=False)
    reference = copy.deepcopy(model).eval()
    exporter, _ = watch(bus, model)
    with torch.no_grad():
        expected = reference(batch(0))
        model.eval()
        assert torch.equal(model(batch(0)), expected)
        exporter.test()
        assert torch.equal(model(batch(0)), expected)
        exporter.train()
    seen = []
    exporter.evaluate([batch(0)], visit=lambda output, labels: seen.append(output))
    exporter.close()
    assert torch.equal(seen[0], expected)


@pytest.mark.fault(204)
@pytest.mark.parametrize("exporters", [1, 2])
def test_a_root_that_is_such_a_layer(bus, exporters):
    """Its calls are counted and its output is observed, also in evaluation mode."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    with torch.no_grad():
        expected = copy.deepcopy(layer)(batch(0))
    recordings, opened = [], []
    for number in range(exporters):
        exporter = Exporter(message_bus=bus if not number else type(bus)("second"), on_error="raise", depth=0)
        exporter.add_modules(layer)
        recording = RecordingBackend()
        exporter.message_bus.register_subscriber(NormSubscriber("activations", tag="testing", backend=recording))
        recordings.append(recording)
        opened.append(exporter)
    for exporter in opened:
        exporter.test()
    with torch.no_grad():
        assert torch.equal(layer(batch(0)), expected)
    for exporter in opened:
        exporter.train()
        exporter.close()
    for recording in recordings:
        ((_, value, _),) = recording.values
        assert value == pytest.approx(expected.double().norm().item(), rel=1e-6)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in layer.modules())


@pytest.mark.fault(204)
def test_a_root_that_is_such_a_layer_and_takes_keyword_arguments(bus):
    """Its inputs and outputs are observed in evaluation mode, too."""
    layer, recording = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval(), RecordingBackend()
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(layer)
        for kind in ("input_data", "network_output"):
            bus.register_subscriber(NormSubscriber(kind, tag="testing", backend=recording))
        exporter.test()
        output = layer(src=batch(0))
        exporter.train()
    seen = {series.kind: value for series, value, _ in recording.values}
    expected = {"input_data_norm2": batch(0), "network_output_norm2": output}
    assert seen == pytest.approx({kind: x.double().norm().item() for kind, x in expected.items()}, rel=1e-6)


@pytest.mark.fault(204)
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_layer_that_raises(bus, error):
    """Its hooks are back at the next step."""
    model = Classifier(frozen=False)
    exporter, recording = watch(bus, model)

    fails = []

    def fail(module, args):
        if fails:
            raise error("by the user")

    model.encoder.layers[1].linear1.register_forward_pre_hook(fail)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        fails[:] = [True] if step == 1 else []
        optimizer.zero_grad()
        try:
            model(batch(0)).sum().backward()
        except error:
            continue
        optimizer.step()
    exporter.close()
    steps = [step for series, _, step in recording.values if series.name == "encoder.layers.1.norm2"]
    assert sorted(set(steps)) == [0, 1]
