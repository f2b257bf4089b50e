"""Copies and pickles of an observed model contain no hooks."""

import copy
import copyreg
import io
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

from ikkuna.export import Exporter
from ikkuna.export.subscriber import CallbackSubscriber
from ikkuna.metrics.messages.kinds import MODULE_KINDS
from ikkuna.observation.hooks.hook import Hook


class Stateful(nn.Linear):
    """A module with a state of its own."""

    def __getstate__(self):
        return {**self.__dict__, "extra": 3}


@pytest.fixture
def model():
    return nn.Sequential(Stateful(4, 5), nn.ReLU(), nn.Linear(5, 5), nn.Linear(5, 2))


@pytest.fixture
def watched(model, bus):
    """The model between two steps that are both sampled, when hooks stay on the layers."""
    table = dict(copyreg.dispatch_table)
    exporter = Exporter(message_bus=bus, on_error="raise")
    exporter.add_modules(model)
    bus.register_subscriber(CallbackSubscriber(MODULE_KINDS, lambda message: None, backend="null"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert all(hooks(module) for module in model)
    yield model
    exporter.close()
    assert copyreg.dispatch_table == table


def hooks(module):
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    return file.getvalue()


COPIES = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    **{f"pickle {n}": lambda m, n=n: pickle.loads(pickle.dumps(m, n)) for n in (2, 5)},
    "torch.save": lambda m: torch.load(io.BytesIO(saved(m)), weights_only=False),
    "average": lambda m: torch.optim.swa_utils.AveragedModel(m).module,
}


@pytest.mark.fault(207)
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_has_no_hooks_of_ikkuna_and_all_of_the_user(how, watched):
    watched[1].register_forward_hook(_note, with_kwargs=True, always_call=True)
    other = COPIES[how](watched)
    parts = list(other) if how != "copy" else []  # a shallow copy shares its children
    assert [hook for module in (other, *parts) for hook in hooks(module)] == [_note] * bool(parts)
    assert all(hooks(module) for module in watched)
    for module in parts:
        marks = {*module._forward_hooks_with_kwargs, *module._forward_hooks_always_called}
        assert marks <= module._forward_hooks.keys()
    assert other.state_dict().keys() == watched.state_dict().keys()
    if parts:
        assert other[0].extra == 3


def _note(module, args, kwargs, output):
    """Do nothing; a hook of the user."""


@pytest.mark.fault(207)
def test_an_average_of_weights_can_be_scripted_while_the_model_is_observed(bus):
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU())
    with Exporter(message_bus=bus) as exporter:
        exporter.add_modules(model)
        bus.register_subscriber(CallbackSubscriber("activations", lambda message: None, backend="null"))
        average = copy.deepcopy(model)
    assert torch.jit.script(average)(torch.ones(1, 4)).shape == (1, 5)
    assert not hooks(average)


LOAD = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ikkuna":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
import torch
model = torch.load(sys.argv[1], weights_only=False)
print(tuple(model(torch.ones(2, 4)).shape), "ikkuna" in sys.modules)
"""


@pytest.mark.fault(207)
@pytest.mark.parametrize("marked", [True, False], ids=["as always", "class that the user has registered"])
def test_a_model_that_was_saved_while_it_was_observed_is_loaded_without_ikkuna(marked, bus, tmp_path):
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU())
    if not marked:
        copyreg.pickle(nn.Sequential, lambda module: module.__reduce_ex__(2))
    try:
        with Exporter(message_bus=bus) as exporter:
            exporter.add_modules(model)
            (tmp_path / "model.pt").write_bytes(saved(model))
    finally:
        if not marked:
            del copyreg.dispatch_table[nn.Sequential]
    command = [sys.executable, "-c", LOAD, str(tmp_path / "model.pt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.stdout == "(2, 5) False\n", done.stderr


@pytest.mark.fault(207)
def test_two_exporters_share_what_they_register_for_copies(bus):
    from ikkuna.export.messages import MessageBus

    model = nn.Linear(2, 2)
    one, two = (Exporter(message_bus=each) for each in (bus, MessageBus()))
    one.add_modules(model)
    two.add_modules(model)
    one.close()
    assert not [hook for hook in hooks(copy.deepcopy(model)) if isinstance(hook, Hook)]
    two.close()
    assert nn.Linear not in copyreg.dispatch_table
