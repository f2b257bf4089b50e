"""The inspection half leaves everything as it was, also after an exception."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

from ikkuna.errors import ConfigError
from ikkuna.probe import get_gradients, get_outputs, get_rnn_weights, get_weights, rnn_summary, weights_norm
from ikkuna.support.undisturbed import undisturbed, undisturbed_randomness


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.rnn = nn.LSTM(4, 3, 2, batch_first=True, dropout=0.5)
        self.head = nn.Linear(3, 2)
        self.head.weight.requires_grad_(False)

    def forward(self, x):
        x = self.drop(self.norm(x.transpose(1, 2)).transpose(1, 2))
        return self.head(self.rnn(x)[0][:, -1])


def state(model):
    return {
        "values": [(name, value.clone()) for name, value in model.state_dict().items()],
        "grads": [None if p.grad is None else (id(p.grad), p.grad.clone()) for p in model.parameters()],
        "versions": [p._version for p in model.parameters()],
        "trained": [p.requires_grad for p in model.parameters()],
        "modes": [module.training for module in model.modules()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()],
        "random": (torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()),
        "buffers": [id(b) for b in model.buffers()],
    }


def same(a, b):
    if isinstance(a, dict):
        return all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b


def fails(*_):
    raise RuntimeError("on purpose")


def noisy(output):
    random.random()
    np.random.rand()
    return output.sum() + torch.rand(())


def backwards(output):
    loss = output.sum()
    loss.backward(retain_graph=True)
    return loss


CALLS = {
    "outputs": lambda m, x: get_outputs(m, "*", x, train=True),
    "gradients": lambda m, x: get_gradients(m, ["rnn", "norm"], x, loss_fn=noisy, train=True),
    "through time": lambda m, x: get_gradients(m, "rnn", x, loss_fn=noisy, through_time=True, train=True),
    "weights": lambda m, x: get_gradients(m, "head", x, loss_fn=noisy, wrt="weights", train=True),
    "inputs": lambda m, x: get_gradients(m, None, x, loss_fn=noisy, wrt="inputs"),
    "backward": lambda m, x: get_gradients(m, "head", x, loss_fn=backwards),
    "gates": lambda m, x: get_rnn_weights(m, "rnn", mode="grads", x=x, loss_fn=noisy),
}


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_nothing_changes(call, trained):
    """E81."""
    torch.manual_seed(0)
    model, x = Model(), torch.randn(5, 6, 4)
    model.drop.eval()
    if trained:
        model(x).sum().backward()
    before = state(model)
    CALLS[call](model, x)
    assert same(state(model), before)


@pytest.mark.parametrize("wrt", ["outputs", "weights", "inputs"])
def test_nothing_changes_when_the_loss_raises(wrt):
    """E81."""
    model, x, wrong = Model(), torch.randn(5, 6, 4), torch.randn(5, 6, 3)
    model(x).sum().backward()
    before = state(model)
    with pytest.raises(RuntimeError, match="on purpose"):
        get_gradients(model, "rnn", x, loss_fn=fails, wrt=wrt, train=True)
    with pytest.raises(RuntimeError):
        get_outputs(model, "rnn", wrong, train=True)
    assert same(state(model), before)


def test_a_buffer_that_is_replaced_comes_back():
    model = nn.BatchNorm1d(2)
    before = model.running_mean
    with undisturbed(model):
        model.running_mean = torch.ones(2) * 9
    assert model.running_mean is before
    assert before.tolist() == [0, 0]


def test_lazy_models_are_refused():
    with pytest.raises(ConfigError, match="lazy"):
        get_outputs(nn.Sequential(nn.LazyLinear(2)), 0, torch.ones(1, 2))


def test_results_are_copies():
    model = nn.Sequential(nn.Identity())
    x = torch.ones(1, 2)
    out = get_outputs(model, 0, x)
    x.zero_()
    assert out.tolist() == [[1, 1]]
    assert not out.requires_grad


@pytest.mark.parametrize("autograd", [False, True])
def test_modes_buffers_and_gradients_are_restored(autograd):
    model = Model()
    model.drop.eval()
    model(torch.randn(5, 6, 4)).sum().backward()
    before = state(model)
    with undisturbed(model, autograd=autograd, train=True):
        assert torch.is_grad_enabled() is autograd
        assert all(module.training for module in model.modules())
        model.norm.running_mean += 1
        model.norm.num_batches_tracked.data += 1
        out = model(torch.randn(5, 6, 4)).sum()
        if autograd:
            assert all(p.grad is None for p in model.parameters())
            model.head.weight.requires_grad_()
            out.backward()
    assert same(state(model), before)


def test_own_train_and_eval_methods_are_not_called():
    class Merging(nn.Linear):
        def train(self, mode=True):
            raise AssertionError

    with undisturbed(Merging(2, 2)):
        pass


def test_a_pending_backward_survives_where_buffers_did_not_change():
    model = nn.BatchNorm1d(2).eval()
    out = model(torch.randn(3, 2)).sum()
    with undisturbed(model):
        model(torch.randn(3, 2))
    out.backward()


def test_a_pending_backward_survives_running_statistics_that_were_restored():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    out, before = model(torch.randn(3, 2)).sum(), copy.deepcopy(model.state_dict())
    with undisturbed(model, train=True):
        model(torch.randn(3, 2))
    out.backward()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.fault(224)
def test_generators_of_loaders_and_samplers_are_restored():
    data = torch.utils.data.TensorDataset(torch.arange(8))
    data.generator = torch.Generator()
    samplers = [torch.utils.data.RandomSampler(data, generator=torch.Generator()) for _ in range(2)]
    loaders = [
        torch.utils.data.DataLoader(data, shuffle=True, generator=torch.Generator()),
        torch.utils.data.DataLoader(data, sampler=samplers[0]),
        torch.utils.data.DataLoader(data, batch_sampler=torch.utils.data.BatchSampler(samplers[1], 2, False)),
    ]

    def drawn(loader):
        return [*(batch.tolist() for (batch,) in loader), torch.rand(1, generator=data.generator)]

    for loader in loaders:
        with undisturbed_randomness(loader):
            first = drawn(loader)
        assert drawn(loader) == first


@pytest.mark.fault(224)
@pytest.mark.parametrize(("kind", "devices"), [("cuda", [0, 1]), ("mps", [()])])
def test_every_device_of_the_accelerator_is_restored(kind, devices, monkeypatch):
    """The module of the device is replaced by one with a state for each device."""
    states = dict.fromkeys(devices, 0)

    class Module:
        is_available = is_initialized = staticmethod(lambda: True)
        device_count = staticmethod(lambda: len(devices))

        @staticmethod
        def get_rng_state(*device):
            return states[device[0] if device else ()]

        @staticmethod
        def set_rng_state(value, *device):
            states[device[0] if device else ()] = value

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    with undisturbed_randomness():
        states.update((device, 7) for device in devices)
    assert set(states.values()) == {0}
    Module.is_initialized = staticmethod(lambda: False)
    Module.get_rng_state = None
    with undisturbed_randomness():
        pass


def test_reading_a_parametrised_weight_does_not_move_its_buffers():
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(40, 40)))
    before = state(model)
    get_weights(model, 0)
    weights_norm(model)
    assert same(state(model), before)
    rnn = nn.utils.parametrizations.spectral_norm(nn.RNN(9, 8), "weight_hh_l0")
    model.append(rnn)
    before = state(model)
    get_rnn_weights(model)
    rnn_summary(model)
    assert same(state(model), before)
