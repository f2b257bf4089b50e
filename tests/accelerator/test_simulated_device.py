"""The simulated device computes what the CPU computes, and refuses what an accelerator refuses."""

import math

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.accelerator.models import MODELS, train
from tests.simulated_device import Stream, memory, recorded, streams

pytestmark = pytest.mark.simulated


def trained(name, optimizer, device):
    torch.manual_seed(0)
    with torch.device("cpu"):
        model, inputs, labels = MODELS[name]()
    model, inputs, labels = model.to(device), inputs.to(device), labels.to(device)
    optimizer = optimizer(model.parameters())
    torch.manual_seed(1)
    with sdpa_kernel(SDPBackend.MATH):
        for _ in range(3):
            train(model, optimizer, inputs, labels)
    return [x.cpu() for p in model.parameters() for x in (p.detach(), p.grad)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("optimizer", [lambda p: torch.optim.SGD(p, 0.1, 0.9), torch.optim.AdamW], ids=["sgd", "adamw"])
def test_training_has_the_bits_of_the_host(name, optimizer):
    on_host, on_device = trained(name, optimizer, "cpu"), trained(name, optimizer, "sim")
    assert all(map(torch.equal, on_host, on_device))
    assert all(bool(x.isfinite().all()) for x in on_device)


def test_tensors_are_plain_and_cannot_be_read_by_the_host():
    x = torch.ones(3)
    assert type(x) is torch.Tensor
    assert not x.is_cpu
    assert x.data_ptr() >= 1 << 62
    with pytest.raises(TypeError):
        x.numpy()
    with pytest.raises(RuntimeError, match="two devices"):
        x + torch.ones(3, device="cpu")
    assert (x + torch.tensor(1.0, device="cpu")).tolist() == [2, 2, 2]


def test_views_share_memory_which_is_freed():
    used = memory.used
    x = torch.zeros(4, 4)
    x.t()[1:, 2].add_(1)
    assert x.cpu()[2].tolist() == [0, 1, 1, 1]
    assert memory.used == used + 64
    y = x[0]
    del x
    assert memory.used == used + 64
    del y
    assert memory.used == used


def test_a_copy_that_was_not_waited_for_is_not_a_number(monkeypatch):
    x, event = torch.ones(2), torch.sim.Event()
    host = torch.empty(2, pin_memory=True, device="cpu")
    host.copy_(x, non_blocking=True)
    event.record()
    x.zero_()  # later in the stream
    assert host.isnan().all()
    assert [event.query() for _ in range(streams.LATENCY + 1)][-1]
    assert host.tolist() == [1, 1]
    monkeypatch.setattr(streams, "LATENCY", math.inf)
    host.copy_(x, non_blocking=True)
    event.record()
    assert not any(event.query() for _ in range(9))
    assert host.isnan().all()
    event.synchronize()
    assert host.tolist() == [0, 0]


WAITING = {
    "item": lambda x: x.sum().item(),
    "a mask": lambda x: x[x > 0],
    "copy": lambda x: x.cpu(),
    "list": lambda x: x.tolist(),
    "assignment by mask": lambda x: x.index_put_((x > 0,), x[0]),
    "nonzero": torch.nonzero,
    "equal": lambda x: torch.equal(x, x),
    "a condition": lambda x: bool(x.any()),
    "new tensor": lambda x: torch.tensor([1.0]),
}


@pytest.mark.parametrize("name", WAITING)
def test_waiting_is_recorded(name):
    x = torch.ones(3)
    with recorded() as log:
        WAITING[name](x)
    assert log.count("sync") == 1


def test_computing_does_not_wait():
    x = torch.ones(3)
    with recorded() as log:
        torch.var_mean(x)
        torch.where(x > 0, x, -x)
    assert log.count("sync") == 0
    assert [entry.name for entry in log] == ["var_mean", "gt", "neg", "where"]
    assert log.launches == 4


def test_memory_is_limited(monkeypatch):
    monkeypatch.setattr(memory, "limit", memory.used + 100)
    with pytest.raises(torch.OutOfMemoryError):
        torch.ones(26)
    assert len(torch.ones(25)) == 25


def test_a_stream_must_wait_for_what_another_one_has_written():
    other = Stream()
    x = torch.ones(3)
    with torch.sim.stream(other):
        y = torch.full((3,), 2.0)
    with pytest.raises(RuntimeError, match="another stream"):
        x + y
    torch.sim.current_stream().wait_stream(other)
    assert (x + y).tolist() == [3, 3, 3]


def test_lists_of_tensors_take_few_launches():
    tensors = [torch.ones(10) for _ in range(200)]
    with recorded() as log:
        torch._foreach_mul_(tensors, 2.0)
    assert log.launches == 2


def test_autograd_runs_in_a_thread_of_the_device():
    x = torch.ones(3, requires_grad=True)
    (x * nn.Parameter(torch.full((3,), 2.0))).sum().backward()
    assert x.grad.tolist() == [2, 2, 2]


def test_the_exception_of_a_hook_is_raised_by_the_backward():
    x, fails = torch.ones(3, requires_grad=True), torch.zeros(1)

    def hook(grad):
        fails.numpy()

    y = x * 2
    handle = y.register_hook(hook)
    with pytest.raises(TypeError, match="can't convert"):
        y.sum().backward()
    handle.remove()
    (x * 2).sum().backward()
    assert x.grad.tolist() == [4, 4, 4]  # the first backward went on
