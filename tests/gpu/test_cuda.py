"""On a CUDA device the values are those of the CPU, training is bit-identical, and nothing waits for the device."""

import gc
import math

import pytest
import torch

from benchmarks.gpu_models import MODELS
from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import NormSubscriber
from ikkuna.testing import RecordingBackend
from tests.gpu.loops import HISTOGRAMS, KINDS, STEPS, DeviceLoop, published, subscribers, waits_of_training, watched

pytestmark = pytest.mark.gpu

WITHOUT_DROPOUT = ("mlp", "mlp-sgd", "mlp-evaluated", "mlp-closure", "mlp-accumulated", "tied", "frozen", "structured")
"""Loops without random numbers, which the CPU and the device draw differently."""
IN_ONE_PASS = ("mlp", "conv-bn-dropout", "lstm", "attention", "checkpointed", "spectral-norm", "conv-bf16")
RELATIVE = 1e-3  # the weights themselves differ after some steps


def differing(found, expected):
    wrong = [key for key in expected if key in found and not close(found[key], expected[key])]
    return [*(found.keys() ^ expected.keys()), *((key, found[key], expected[key]) for key in wrong)]


def close(one, other):
    return math.isclose(one, other, rel_tol=RELATIVE, abs_tol=1e-6) or (math.isnan(one) and math.isnan(other))


@pytest.mark.parametrize("name", WITHOUT_DROPOUT)
def test_values_are_those_of_the_cpu(name, device):
    expected = published(name, "cpu")
    assert len(expected) > 100
    assert not differing(published(name, device), expected)


def test_exact_percentiles_and_histograms_are_those_of_the_cpu(device):
    found, expected = (published("mlp", where, HISTOGRAMS) for where in (device, "cpu"))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, float):
            assert found[key] == pytest.approx(value, rel=0.13, abs=1e-6), key  # a bin is an eighth wide
        else:
            assert found[key].num == value.num, key


@pytest.mark.parametrize("name", IN_ONE_PASS)
def test_training_is_bit_identical(name, device, deterministic):
    def trained(watch):
        loop = DeviceLoop(name, device)
        torch.cuda.manual_seed_all(0)
        exporter = watched(loop, subscribers(RecordingBackend())) if watch else None
        losses = loop.run(STEPS)
        random = torch.cuda.get_rng_state()
        if exporter is not None:
            exporter.close()
        return [*losses, *loop.model.state_dict().values(), *(p.grad for p in loop.model.parameters()), random]

    for alone, other in zip(trained(False), trained(True), strict=True):
        assert (alone is None and other is None) or torch.equal(alone, other)


@pytest.mark.parametrize("name", ["mlp", "conv-bn-dropout", "lstm", "mlp-accumulated", "checkpointed"])
def test_no_step_waits_for_the_device(name, device):
    loop, backend = DeviceLoop(name, device), RecordingBackend()
    exporter = watched(loop, subscribers(backend))
    loop.run(1)  # allocates buffers and loads kernels
    torch.cuda.synchronize()
    with waits_of_training() as found:
        loop.run(STEPS - 1)
    exporter.close()
    assert found == []
    assert exporter.health().errors == 0
    assert {step for _, _, step in backend.values} == set(range(STEPS))


def test_histograms_of_many_large_and_small_tensors(device):
    """GPT-2 small has tensors whose numbers are all counted beside others of which a sample is, in one launch."""
    work, backend = MODELS["gpt2"](device, False), RecordingBackend()
    exporter = watched(work, [make(kind, subsample=1, backend=backend) for kind in KINDS for make in HISTOGRAMS])
    for _ in range(3):
        work.step()
    torch.cuda.synchronize()  # raises the error of an earlier kernel
    exporter.close()
    assert exporter.health().errors == 0
    assert {step for _, _, step in backend.values} == {0, 1, 2}
    del work, exporter
    gc.collect()
    torch.cuda.empty_cache()


def test_values_of_another_stream_are_those_of_the_default_stream(device):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    expected = published("mlp", device)
    assert not differing(published("mlp", device, around=lambda: torch.cuda.stream(stream)), expected)


def test_a_busy_device_delays_no_value(device):
    """Copies of many steps are under way while the device is occupied; each arrives under its own step."""
    loop, backend = DeviceLoop("mlp", device), RecordingBackend()
    exporter = watched(loop, subscribers(backend, kinds=("weights",)))
    expected = published("mlp", device, kinds=("weights",))
    torch.cuda._sleep(10**8)
    loop.run(STEPS)
    exporter.close()
    found = {(series.kind, series.name, step): value for series, value, step in backend.values}
    assert not differing(found, expected)


def test_a_scaled_loss_gives_the_unscaled_gradients_of_the_cpu(device):
    kinds = ("weight_gradients", "weight_updates")

    def scaled(where):
        loop, backend = DeviceLoop("mlp-sgd", where), RecordingBackend()
        scaler = torch.amp.GradScaler(torch.device(where).type, init_scale=1024.0)
        exporter = watched(loop, subscribers(backend, kinds=kinds))
        for _ in range(STEPS):
            inputs, labels = loop.batch()
            loop.optimizer.zero_grad()
            scaler.scale(loop.loss(loop.model(inputs), labels)).backward()
            scaler.step(loop.optimizer)
            scaler.update()
        exporter.close()
        return {(series.kind, series.name, step): value for series, value, step in backend.values}

    assert not differing(scaled(device), scaled("cpu"))


def test_memory_of_the_device_does_not_grow(device):
    loop = DeviceLoop("mlp", device)
    exporter = watched(loop, subscribers(RecordingBackend(), kinds=KINDS))
    loop.run(2)
    torch.cuda.synchronize()
    early = torch.cuda.memory_allocated()
    loop.run(STEPS)
    torch.cuda.synchronize()
    tables = 512 * 64  # of the addresses of gradients, which may be others
    assert torch.cuda.memory_allocated() <= early + tables
    exporter.close()


@pytest.mark.parametrize("name", ["mlp-sgd"])
def test_a_graph_is_captured_and_replayed_beside_steps_that_are_recorded(name, device, caplog):
    """Nothing of the capture is recorded, and nothing is left in the graph."""
    loop, backend = DeviceLoop(name, device), RecordingBackend()
    exporter = watched(loop, subscribers(backend))
    loop.run(2)
    inputs, labels = loop.batch()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # torch asks for these before a capture
            loop.optimizer.zero_grad(set_to_none=True)
            loop.loss(loop.model(inputs), labels).backward()
    torch.cuda.current_stream().wait_stream(side)
    loop.optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loop.loss(loop.model(inputs), labels).backward()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    loop.run(2)
    exporter.close()
    assert exporter.health().errors == 0
    assert {step for _, _, step in backend.values} == set(range(4))
    assert len([record for record in caplog.records if "CUDA graph" in record.message]) == 1


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_values_of_a_compiled_model_are_those_of_the_cpu(device, mode):
    """With ``reduce-overhead``, which replays graphs, sampled steps run without the compiler."""

    def values(where):
        loop, backend = DeviceLoop("mlp-sgd", where), RecordingBackend()
        if where != "cpu":
            loop.model.compile(mode=mode)
        exporter = watched(loop, subscribers(backend))
        loop.run(STEPS)
        exporter.close()
        assert exporter.health().errors == 0
        return {(series.kind, series.name, step): value for series, value, step in backend.values}

    assert not differing(values(device), values("cpu"))


def test_without_memory_for_measurements_training_goes_on(device):
    """The memory of the process is limited to what training needs, and a little more."""
    layer = torch.nn.Linear(4096, 4096, device=device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = torch.randn(8, 4096, device=device)

    def step():
        optimizer.zero_grad()
        layer(x).sum().backward()
        optimizer.step()

    step()
    exporter = Exporter(message_bus=MessageBus("gpu"))
    exporter.add_modules(layer)
    exporter.message_bus.register_subscriber(NormSubscriber("weight_updates", backend=RecordingBackend()))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    before = layer.weight.detach().cpu()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (16 << 20)) / total)
    try:
        step()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    exporter.close()
    assert not torch.equal(before, layer.weight.detach().cpu())
    assert exporter.health().skipped > 0
    assert exporter.health().errors == 0
