"""Training on CUDA with every installed subscriber, with checkpoints on the host, and without memory for a kernel."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ikkuna.numerics.statistics.device import triton_launcher
from ikkuna.testing import RecordingBackend
from tests.gpu.loops import STEPS, DeviceLoop, subscribers, waits_of_training, watched
from tests.subscribers import EVERY_SUBSCRIBER, NEEDS

pytestmark = pytest.mark.gpu


@pytest.mark.filterwarnings("ignore:called a synchronizing")  # of the thread of ikkuna, which may end later
@pytest.mark.parametrize("subscriber", EVERY_SUBSCRIBER)
@pytest.mark.parametrize("name", ["mlp", "conv-bn-dropout"])
def test_no_installed_subscriber_waits_for_the_device(name, subscriber, device):
    loop, backend = DeviceLoop(name, device), RecordingBackend()
    needed = [make(backend="null") for make in NEEDS.get(subscriber, ())]
    exporter = watched(loop, [*needed, EVERY_SUBSCRIBER[subscriber](backend=backend)])
    loop.run(1)  # allocates buffers and loads kernels
    torch.cuda.synchronize()
    with waits_of_training() as found:
        loop.run(STEPS - 1)
    exporter.close()
    assert found == []
    assert exporter.health().errors == 0


def test_checkpoints_on_the_host_do_not_change_training(device, deterministic):
    def trained(watch):
        loop, backend = DeviceLoop("mlp-sgd", device), RecordingBackend()
        exporter = watched(loop, subscribers(backend)) if watch else None
        for _ in range(STEPS):
            inputs, labels = loop.batch()
            loop.optimizer.zero_grad()
            with torch.autograd.graph.save_on_cpu(pin_memory=True):
                output = checkpoint(loop.model, inputs, use_reentrant=False)
            loop.loss(output, labels).backward()
            loop.optimizer.step()
        if exporter is not None:
            exporter.close()
            assert exporter.health().errors == 0
            assert {step for _, _, step in backend.values} == set(range(STEPS))
        return list(loop.model.parameters())

    for alone, other in zip(trained(False), trained(True), strict=True):
        assert torch.equal(alone, other)


def test_a_kernel_that_has_no_memory_costs_only_its_values(device, monkeypatch):
    launch = triton_launcher.launch

    def fails(kernel, *args, **constants):
        if kernel.__name__ == "measure_one":
            raise torch.OutOfMemoryError("CUDA out of memory")
        launch(kernel, *args, **constants)

    loop, backend = DeviceLoop("mlp", device), RecordingBackend()
    exporter = watched(loop, subscribers(backend, kinds=("activations", "weights")), on_error="log")
    loop.run(1)
    with monkeypatch.context() as patch:
        patch.setattr(triton_launcher, "launch", fails)
        loop.run(1)
    loop.run(1)
    exporter.close()
    steps = {(series.kind, step) for series, _, step in backend.values}
    assert ("weights_norm2", 1) in steps
    assert ("activations_norm2", 1) not in steps
    assert ("activations_norm2", 2) in steps
    assert exporter.health().errors > 0
