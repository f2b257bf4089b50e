"""P6 and P7: idle is nearly free, and what was put on a model comes off."""

import copy
import io
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ikkuna.export import Exporter
from ikkuna.export.subscriber import CallbackSubscriber, NormSubscriber
from ikkuna.metrics.messages.kinds import MODULE_KINDS
from ikkuna.observation.hooks import context, optimizers, parameter_table
from ikkuna.observation.hooks.parameter_table import CopyMemory, ParameterList
from tests.zoo import CASES, Loop


def hooks(model):
    """Count hooks by module name: forward, forward pre, backward."""
    return {
        name or "root": (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
        for name, m in model.named_modules()
        if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks
    }


@pytest.fixture
def hooks_in_python(monkeypatch):
    """A tensor does not show the hooks that native functions register on it."""
    monkeypatch.setattr(context, "hook_functions", lambda kernels: None)


@pytest.fixture
def watched(bus):
    loop = Loop(CASES["conv-bn-dropout"])
    exporter = Exporter(message_bus=bus, on_error="raise")
    exporter.add_modules(loop.model)
    exporter.set_loss(loop.loss)
    bus.register_subscriber(CallbackSubscriber(MODULE_KINDS, lambda message: None, subsample=2, backend="null"))
    yield loop, exporter
    exporter.close()


def test_no_child_hook_outside_a_step_and_in_unsampled_steps(watched):
    loop, _ = watched
    inside = []
    loop.loss.register_forward_hook(lambda *_: inside.append(hooks(loop.model)))
    loop.run(4)
    assert hooks(loop.model) == {"root": (1, 1, 0)}
    assert inside[1] == inside[3] == {"root": (1, 1, 0)}
    assert {"features.0", "classifier"} <= set(inside[0])


@pytest.mark.usefixtures("hooks_in_python")
def test_no_tensor_hook_on_a_layer_in_unsampled_steps(watched):
    loop, _ = watched
    outputs = []
    loop.model.features[0].register_forward_hook(lambda module, args, output: outputs.append(output))
    armed = []
    loop.loss.register_forward_hook(lambda *_: armed.append(bool(outputs[-1]._backward_hooks)))
    loop.run(4)
    assert armed == [True, False, True, False]


def test_parameters_are_copied_only_in_sampled_steps(watched, monkeypatch):
    loop, exporter = watched
    copies, clone, take = set(), parameter_table._clone_or_memory, ParameterList.take
    tracker = exporter._session.context.tracker

    def noted(function):
        return lambda *args: copies.add(tracker.counters.next.global_step) or function(*args)

    monkeypatch.setattr(parameter_table, "_clone_or_memory", noted(clone))
    monkeypatch.setattr(ParameterList, "take", noted(take))
    loop.run(4)
    assert copies == {0, 2}


def test_memory_for_copies_is_kept_and_freed_after_100_unsampled_steps_on_request_and_at_the_end(bus):
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    size = 4 * (64 * 64 + 64)

    def run(steps):
        for _ in range(steps):
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()

    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(model)
        kinds = ("weight_updates", "bias_updates")
        handles = [bus.register_subscriber(NormSubscriber(kind, backend="null", subsample=2)) for kind in kinds]
        assert exporter.health().kept_bytes == 0
        run(1)
        memory = exporter._session.hooks.optimizers.table.memory
        [first] = memory.buffers
        assert size <= exporter.health().kept_bytes <= size + 256
        run(2)
        assert list(memory.buffers) == [first]
        exporter.release_memory()
        assert exporter.health().kept_bytes == 0
        run(2)
        assert exporter.health().kept_bytes >= size
        for handle in handles:
            handle.remove()
        run(99)
        assert exporter.health().kept_bytes >= size
        run(2)
        assert exporter.health().kept_bytes == 0
        bus.register_subscriber(NormSubscriber("weight_updates", backend="null"))
        run(1)
        assert exporter.health().kept_bytes >= size - 256
    assert exporter.health().kept_bytes == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5000)), max_size=40))
def test_no_two_lists_have_the_same_memory(calls):
    memory, used = CopyMemory(), []
    for takes, size in calls:
        if takes or not used:
            used.append(memory.take(size))
            assert used[-1].nbytes >= size
        else:
            kept, buffer = memory.nbytes, used.pop(size % len(used))
            memory.give_back(buffer)
            assert memory.nbytes == kept + buffer.nbytes
        assert len({buffer.ctypes.data for buffer in used}) == len(used)
    memory.release()
    assert memory.nbytes == 0


def test_nothing_is_left_after_close(watched):
    loop, exporter = watched
    loop.run(3)
    exporter.close()
    assert hooks(loop.model) == {}
    assert hooks(loop.loss) == {}
    assert not optimizers.BEFORE_STEP.hooks
    assert not optimizers.AFTER_STEP.hooks
    assert all(not p._backward_hooks for p in loop.model.parameters())


def test_close_in_the_middle_of_a_step_takes_child_hooks_off(watched):
    loop, exporter = watched
    loop.model(loop.batch()[0])
    assert len(hooks(loop.model)) > 1
    exporter.close()
    assert hooks(loop.model) == {}


def roundtrip(model, how):
    if how == "deepcopy":
        return copy.deepcopy(model)
    if how == "pickle":
        return pickle.loads(pickle.dumps(model))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("when", ["idle", "in a step"])
def test_a_hooked_model_can_be_copied_and_the_copy_is_unwatched(how, when, bus):
    loop = Loop(CASES["attention"])
    seen = []
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(loop.model)
        bus.register_subscriber(CallbackSubscriber("activations", seen.append, backend="null"))
        loop.run(1)
        if when == "in a step":
            loop.model(loop.batch()[0])
        other = roundtrip(loop.model, how)
        assert other.state_dict().keys() == loop.model.state_dict().keys()
        seen.clear()
        other.train()(loop.batch()[0]).sum().backward()
        torch.optim.SGD(other.parameters(), lr=0.1).step()
        assert seen == []


def test_an_averaged_model_works(bus):
    loop = Loop(CASES["mlp"])
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(loop.model)
        bus.register_subscriber(NormSubscriber("weights", backend="null"))
        averaged = torch.optim.swa_utils.AveragedModel(loop.model)
        loop.run(2)
        averaged.update_parameters(loop.model)
        assert exporter.health().steps == 2
        assert torch.isfinite(averaged(loop.batch()[0])).all()


def test_detached_takes_every_hook_off_for_a_while(watched):
    loop, exporter = watched
    loop.run(1)
    with exporter.detached():
        assert hooks(loop.model) == {}
        assert torch.jit.trace(loop.model.eval(), loop.batch()[0]) is not None
    loop.model.train()
    assert hooks(loop.model) == {"root": (1, 1, 0)}
    loop.run(1)
    assert exporter.health().steps == 2


def test_paused_looks_away(watched):
    loop, exporter = watched
    with exporter.paused():
        loop.run(1)
    assert exporter.health().steps == 0
    loop.run(1)
    assert exporter.health().steps == 1


@pytest.mark.fault(10)
def test_two_exporters_on_one_model_are_independent(bus):
    from ikkuna.export.messages import MessageBus

    loop = Loop(CASES["mlp"])
    counts = {"one": 0, "two": 0}
    exporters = {}
    for name, own in (("one", bus), ("two", MessageBus())):
        exporters[name] = Exporter(message_bus=own, on_error="raise")
        exporters[name].add_modules(loop.model)
        count = CallbackSubscriber(
            "activations", lambda m, n=name: counts.__setitem__(n, counts[n] + 1), modules="0", backend="null"
        )
        own.register_subscriber(count)
    loop.run(2)
    exporters["one"].close()
    loop.run(2)
    exporters["two"].close()
    assert counts == {"one": 2, "two": 4}


@pytest.mark.fault(50)
def test_torch_func_passes_unseen(bus):
    model = nn.Linear(2, 2)
    got = []
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(model)
        bus.register_subscriber(CallbackSubscriber(["activations", "layer_gradients"], got.append, backend="null"))
        parameters = dict(model.named_parameters())
        torch.func.grad(lambda p, x: torch.func.functional_call(model, p, (x,)).sum())(parameters, torch.ones(3, 2))
        torch.func.vmap(lambda x: torch.func.functional_call(model, parameters, (x,)))(torch.ones(3, 2))
    assert got == []
