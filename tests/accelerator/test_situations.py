"""Ways to train on an accelerator: what they cost is counted, and the values are those of the tensors."""

import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ikkuna.export import Exporter
from ikkuna.export.subscriber import NormSubscriber
from ikkuna.numerics.statistics.device import triton_launcher
from ikkuna.testing import RecordingBackend
from tests.simulated_device import Stream, recorded
from tests.simulated_device.triton import ReferenceKernels

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("kernels")]

OURS = {"measure_one", "measure_list", "merge_rows", "cat", "copy_"}
"""The operators of a sampled step: rows are written, merged, put together and copied."""


class Training:
    """A model that is trained, norms of some kinds by kind, module and step, and the outputs that a hook has seen."""

    def __init__(self, bus, model, *kinds, **options):
        self.model, self.backend, self.seen = model, RecordingBackend(), {}
        self.renew_optimizer()
        self.exporter = None
        self.step_number = 0
        if kinds:
            self.exporter = Exporter(message_bus=bus, **{"on_error": "raise", **options})
            self.exporter.add_modules(model)
            for kind in kinds:
                bus.register_subscriber(NormSubscriber(kind, backend=self.backend))
            for name, layer in model.named_children():
                layer.register_forward_hook(lambda module, args, output, name=name: self._see(name, output))

    def renew_optimizer(self):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def _see(self, name, output):
        self.seen["activations_norm2", name, self.step_number] = output.detach()

    def step(self, x, forward=None):
        """Make a step; return what the device had to do."""
        with recorded() as log:
            self.optimizer.zero_grad()
            output = (forward or self.model)(x)
            output.float().square().mean().backward()
            self.optimizer.step()
        self.step_number += 1
        return log

    def close(self):
        """Return the values, and the norms of the outputs."""
        self.exporter.close()
        found = {(series.kind, series.name, step): value for series, value, step in self.backend.values}
        return found, {key: x.cpu().double().norm().item() for key, x in self.seen.items()}


def layers(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def added(alone, watched, x, forward=None):
    """Return the entries of a step with an exporter that one without has not, without the events that are asked."""
    logs = [training.step(x, forward and forward(training.model)) for training in (alone, watched)]
    entries = [[entry for entry in log if entry.kind != "query"] for log in logs]
    for entry in entries[0]:
        entries[1].remove(entry)
    return entries[1]


def counts(entries):
    launches = [entry.name for entry in entries if entry.kind == "launch"]
    assert not [entry for entry in entries if entry.kind == "sync"]
    assert sum(entry.kind == "d2h" for entry in entries) == 1
    assert set(launches) <= OURS
    return launches.count("measure_one"), launches.count("measure_list")


def test_autocast(bus):
    """Outputs are measured in the dtype that autocast gives them, without another launch."""

    def forward(model):
        def run(x):
            with torch.autocast("sim", torch.bfloat16):
                return model(x)

        return run

    alone, watched, x = Training(bus, layers()), Training(bus, layers(), "activations", "weights"), torch.randn(6, 8)
    for training in (alone, watched):
        training.step(x, forward(training.model))
    assert counts(added(alone, watched, x, forward)) == (3, 1)
    assert watched.seen["activations_norm2", "0", 1].dtype is torch.bfloat16
    found, expected = watched.close()
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-6)


def test_channels_last(bus):
    """Outputs are read in the order of their memory, without a copy."""

    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
        return model.to(memory_format=torch.channels_last)

    alone, watched = Training(bus, make()), Training(bus, make(), "activations", "weight_gradients")
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    for training in (alone, watched):
        training.step(x)
    assert counts(added(alone, watched, x)) == (3, 1)
    assert watched.seen["activations_norm2", "0", 1].is_contiguous(memory_format=torch.channels_last)
    found, expected = watched.close()
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-6)


def test_checkpoint_with_offload(bus):
    """Inputs of the checkpoint wait on the host; what is computed again is not measured again."""

    def forward(model):
        def run(x):
            with torch.autograd.graph.save_on_cpu(pin_memory=True):
                return checkpoint(model, x, use_reentrant=False)

        return run

    alone, watched, x = Training(bus, layers()), Training(bus, layers(), "activations"), torch.randn(6, 8)
    waits = [len(training.step(x, forward(training.model)).waits) for training in (alone, watched)]
    assert waits[0] == waits[1]
    before = added(alone, watched, x, forward)
    assert [entry.name for entry in before].count("measure_one") == 3
    for ours, theirs in zip(alone.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(ours.cpu(), theirs.cpu())
    found, expected = watched.close()
    assert found == pytest.approx(expected, rel=1e-6)


class OnTwoDevices(nn.Sequential):
    """A model whose last layer is on the host."""

    def forward(self, x):
        first, relu, last = self
        return last(relu(first(x)).cpu())


def test_a_model_on_two_devices(bus):
    model = OnTwoDevices(*layers())
    model[2].cpu()
    watched, x = Training(bus, model, "activations", "weights", "weight_updates"), torch.randn(6, 8)
    log = [watched.step(x) for _ in range(3)][-1]
    assert sum(entry.kind == "d2h" and entry.written < 1000 and not entry.where for entry in log) >= 1
    assert {entry.where for entry in log.waits} == {""}  # the user's own copy
    found, expected = watched.close()
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-6)
    assert {name for kind, name, _ in found if kind == "weight_updates_norm2"} == {"0", "2"}


def test_a_model_that_moves_to_another_device(bus):
    watched, x = Training(bus, layers(), "activations", "weight_updates"), torch.randn(6, 8)
    for device in ("sim", "cpu", "sim"):
        watched.model.to(device)
        watched.renew_optimizer()
        for _ in range(2):
            watched.step(x.to(device))
    found, expected = watched.close()
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-6)
    assert {step for kind, _, step in found if kind == "weight_updates_norm2"} == set(range(6))


def test_inference_on_another_stream_meanwhile(bus):
    """Its outputs belong to no step, and training waits for nothing of it."""
    watched, x, stream = Training(bus, layers(), "activations"), torch.randn(6, 8), Stream()
    inferred, over, failed = threading.Event(), threading.Event(), []

    def infer():
        stream.wait_stream(torch.sim.default_stream())
        try:
            with torch.device("sim"), torch.sim.stream(stream), torch.no_grad():
                while not over.is_set():
                    watched.model[2](torch.full((50, 16), 100.0))
                    inferred.set()
        except Exception as error:
            failed.append(error)

    def forward(x):
        thread = threading.Thread(target=infer)
        thread.start()
        assert inferred.wait(timeout=60)
        try:
            return watched.model(x)
        finally:
            over.set()  # before the optimizer changes the weights
            thread.join()

    watched.step(x)
    assert watched.step(x, forward).waits == []
    watched.step(x)
    found, _ = watched.close()
    assert failed == []
    assert {step for _, _, step in found} == {0, 1, 2}
    assert max(found.values()) < 100


@pytest.mark.parametrize("failing", ["measure_one", "measure_list", "merge_rows"])
def test_a_kernel_that_has_no_memory(bus, monkeypatch, failing):
    """Training goes on, and the values that are missing are counted."""
    launch = triton_launcher.launch

    def fails(kernel, *args, **constants):
        if kernel.__name__ == failing:
            raise torch.OutOfMemoryError("sim out of memory")
        launch(kernel, *args, **constants)

    watched, x = Training(bus, layers(), "activations", "weights", on_error="log"), torch.randn(6, 8)
    watched.step(x)
    before = watched.model[0].weight.detach().cpu().clone()
    with monkeypatch.context() as patch:
        patch.setattr(triton_launcher, "launch", fails)
        watched.step(x)
    assert not torch.equal(before, watched.model[0].weight.detach().cpu())
    watched.step(x)
    found, _ = watched.close()
    health = watched.exporter.health()
    assert health.errors + health.skipped > 0
    steps = {kind: {step for k, _, step in found if k == kind} for kind in ("activations_norm2", "weights_norm2")}
    lost = {"measure_one": "activations_norm2", "measure_list": "weights_norm2"}
    for kind, known in steps.items():
        assert known == ({0, 2} if lost.get(failing, kind) == kind else {0, 1, 2})


def test_kernels_take_no_tensor_that_they_cannot_read():
    """They would read memory that is not the tensor's."""
    with torch.device("cpu"):
        kernels, x = ReferenceKernels(torch.device("cpu")), torch.randn(4, 8)
        freed = torch.randn(4, 8)
        freed.untyped_storage().resize_(64)
        refused = [x.t(), x[:, ::2], x.view(-1)[1:], freed, x[:0], x.double(), x.to_sparse(), x.expand(2, 4, 8)]
        assert kernels.takes(x)
        assert kernels.takes(x.requires_grad_())
        assert [kernels.takes(y.detach()) for y in refused] == [False] * len(refused)
