"""The exporter follows a model whose modules and parameters are replaced while it is observed."""

import copy
import random

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from ikkuna.export import Exporter
from ikkuna.export.subscriber import CallbackSubscriber, NormSubscriber
from ikkuna.metrics.messages.kinds import MODULE_KINDS
from ikkuna.support.modules import named_modules, owned_parameters
from ikkuna.testing import RecordingBackend

pytestmark = pytest.mark.devices

KINDS = ("weights", "biases", "weight_gradients", "weight_updates", "activations", "layer_gradients")


def mlp():
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def step(model, inputs=None):
    """Make one step with a new optimizer, as after a layer was replaced."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer.zero_grad()
    model(torch.randn(6, 4) if inputs is None else inputs).square().mean().backward()
    optimizer.step()


@pytest.fixture
def norms(bus):
    """A function that observes a model; a dict (kind, name, step) → norm."""
    exporters = []

    def observe(model, kinds=KINDS, subsample=1, **options):
        backend = RecordingBackend()
        exporters.append(Exporter(message_bus=bus, on_error="raise", **options))
        exporters[-1].add_modules(model)
        for kind in kinds:
            bus.register_subscriber(NormSubscriber(kind, subsample=subsample, backend=backend))
        return exporters[-1], lambda: values_of(exporters[-1], backend)

    yield observe
    for exporter in exporters:
        exporter.close()


def values_of(exporter, backend):
    exporter.close()
    return {(series.kind.removesuffix("_norm2"), series.name, step): value for series, value, step in backend.values}


def expected_weights(model):
    """Return the norms of all weights and biases, computed in float64 from the tree of modules."""
    return {
        ("biases" if name.startswith("bias") else "weights", module): parameter.detach().double().norm().item()
        for module, layer in named_modules(model)
        for name, parameter in owned_parameters(layer)
    }


@pytest.mark.fault(211)
def test_a_replaced_layer_is_observed_from_the_next_step_on_and_the_removed_one_no_longer(norms, caplog):
    model = mlp()
    removed = model[2]
    exporter, values = norms(model)
    step(model)
    model[2] = nn.Linear(5, 2)
    with torch.no_grad():
        model[2].weight.fill_(2.0)
    after = expected_weights(model)
    outputs = []
    handle = model[2].register_forward_hook(lambda module, args, output: outputs.append(output))
    step(model)
    outputs[0].detach_()
    handle.remove()
    assert not removed._forward_hooks
    assert set(exporter.module_names) == {"0", "1", "2"}
    found = values()
    for kind in KINDS:
        assert (kind, "2", 1) in found, kind
    assert found["weights", "2", 1] == pytest.approx(after["weights", "2"], rel=1e-6)
    assert found["weights", "2", 1] == pytest.approx((4.0 * 10) ** 0.5)
    assert found["activations", "2", 1] == pytest.approx(outputs[0].double().norm().item(), rel=1e-6)
    assert [record.message for record in caplog.records] == ["the model has changed since it was added: replaced 2"]


@pytest.mark.fault(211)
def test_a_change_is_logged_once(norms, caplog):
    model = mlp()
    norms(model)
    for _ in range(3):
        model[2] = nn.Linear(5, 2)
        step(model)
    assert caplog.text.count("has changed") == 1


@pytest.mark.fault(211)
def test_a_layer_that_is_replaced_between_sampled_steps_is_observed_at_the_next_one(norms):
    model = mlp()
    _, values = norms(model, ("activations", "weights"), subsample=3)
    for i in range(5):
        if i == 1:
            model[0] = nn.Linear(4, 5)
        if i == 3:
            expected = expected_weights(model)["weights", "0"]
        step(model)
    found = values()
    assert {s for kind, name, s in found} == {0, 3}
    assert found["weights", "0", 3] == pytest.approx(expected, rel=1e-6)
    assert ("activations", "0", 3) in found


@pytest.mark.fault(211)
def test_pruning_shows_the_parameter_that_is_trained(norms):
    model = mlp()
    _, values = norms(model, ("weights", "weight_updates"))
    step(model)
    prune.random_unstructured(model[0], "weight", amount=0.5)
    expected = model[0].weight_orig.detach().double().norm().item()
    step(model)
    found = values()
    assert found["weights", "0.weight_orig", 1] == pytest.approx(expected, rel=1e-6)
    assert ("weight_updates", "0.weight_orig", 1) in found
    assert ("weights", "0", 1) not in found


class Adapted(nn.Module):
    """A layer with a low-rank adapter, as PEFT puts it in place of a linear layer."""

    def __init__(self, base):
        super().__init__()
        base.zero_grad()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def test_a_weight_whose_pruning_is_removed_has_its_own_name_again(norms):
    model = mlp()
    _, values = norms(model, ("weights",))
    step(model)
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    step(model)
    prune.remove(model[0], "weight")
    step(model)
    found = {(name, step) for _, name, step in values() if name != "2"}
    assert found == {("0", 0), ("0.weight_orig", 1), ("0", 2)}


@pytest.mark.parametrize("when", ["before", "during training"])
def test_the_parameters_of_a_scripted_layer_are_observed(when, norms, caplog):
    """Scripted modules take no hooks, so that their outputs are left out; one line says so."""
    model = mlp()
    if when == "before":
        model[0] = torch.jit.script(model[0])
    exporter, values = norms(model)
    step(model)
    if when != "before":
        with exporter.detached():
            model[0] = torch.jit.script(model[0])
    step(model)
    found = values()
    assert {s for kind, name, s in found if (kind, name) == ("weight_updates", "0")} == {0, 1}
    assert {s for kind, name, s in found if (kind, name) == ("activations", "2")} == {0, 1}
    assert caplog.text.count("0 is a scripted module") == 1
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.filterwarnings("error")
def test_an_inner_step_of_meta_learning_replaces_no_parameter(norms):
    """The result of an inner step is no leaf; torch warns of a look at its gradient."""
    model = mlp()
    _, values = norms(model, ("weights", "weight_gradients_unclipped"))
    optimizer, base, x = torch.optim.SGD(model.parameters(), 0.1), model[0].weight, torch.ones(2, 4)
    for _ in range(3):
        optimizer.zero_grad()
        [grad] = torch.autograd.grad(model(x).square().mean(), base, create_graph=True)
        model[0]._parameters["weight"] = base - 0.1 * grad
        model(x).square().mean().backward()
        model[0]._parameters["weight"] = base
        optimizer.step()
    found = values()
    for kind in ("weights", "weight_gradients_unclipped"):
        assert {s for k, name, s in found if (k, name) == (kind, "0")} == {0, 1, 2}


@pytest.mark.fault(211)
def test_adapters_that_are_added_later_are_observed(norms, caplog):
    model = mlp()
    _, values = norms(model)
    step(model)
    model[0] = Adapted(model[0])
    step(model)
    found = values()
    names = {name for kind, name, s in found if s == 1 and kind == "weight_gradients"}
    assert names == {"0.lora_A", "0.lora_B", "2"}
    assert ("weights", "0.base_layer", 1) in found
    assert not any(name == "0" and s == 1 for kind, name, s in found)
    assert "added 0.base_layer, 0.lora_A, 0.lora_B; removed 0" in caplog.text


@pytest.mark.fault(315)
def test_layers_that_no_longer_match_the_filter_do_not_raise_in_the_loop(bus, caplog):
    model = mlp()
    exporter = Exporter(message_bus=bus, module_filter=[nn.Linear])
    exporter.add_modules(model)
    seen = []
    bus.register_subscriber(CallbackSubscriber("weights", seen.append, backend="null"))
    step(model)
    model[0], model[2] = nn.Bilinear(2, 2, 5), nn.Identity()
    exporter.epoch_finished()
    assert exporter.modules == ()
    assert "removed 0, 2" in caplog.text
    model[0] = nn.Linear(4, 5)
    step(model)
    exporter.close()
    assert [message.module for message in seen] == ["0", "2", "0"]


@pytest.mark.fault(315)
def test_a_filter_that_raises_is_logged_once_and_does_not_reach_the_loop(bus, caplog):
    model = mlp()
    bad = []
    exporter = Exporter(message_bus=bus, module_filter=lambda named: named.module not in bad or 1 / 0)
    exporter.add_modules(model)
    bus.register_subscriber(NormSubscriber("weights", backend="null"))
    model[0] = nn.Linear(4, 5)
    bad.append(model[0])
    step(model)
    exporter.epoch_finished()
    step(model)
    exporter.close()
    assert exporter.health().errors == 1
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.fault(59)
@pytest.mark.parametrize("how", ["replaced", "tied", "resized", "removed"])
def test_a_parameter_that_is_replaced_tied_resized_or_removed(how, norms):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    _, values = norms(model, ("weights", "biases", "weight_updates"))
    step(model)
    if how == "replaced":
        model[0].weight = nn.Parameter(torch.full((4, 4), 3.0))
    elif how == "tied":
        model[0].weight = model[2].weight
    elif how == "resized":
        model[2].weight.data, model[2].bias.data = torch.ones(2, 4), torch.ones(2)
        model.zero_grad()
    else:
        model[0].bias = None
    expected = expected_weights(model)
    step(model)
    found = {(kind, name): value for (kind, name, s), value in values().items() if s == 1}
    if how == "tied":
        del expected["weights", "2"]  # one series under the first name
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-6)
    assert {key for key in found if key[0] != "weight_updates"} == expected.keys()


@pytest.mark.fault(211)
@pytest.mark.parametrize("seed", range(6))
def test_random_changes_give_the_weights_of_a_naive_walk(seed, norms):
    """Each step a random module or parameter is replaced, added or removed."""
    choose = random.Random(seed)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    exporter, values = norms(model, ("weights", "biases"))
    expected = {}
    for i in range(12):
        layer = choose.randrange(len(model))
        change = choose.choice(["layer", "weight", "add", "insert", "remove", "nothing", "nest", "load"])
        if change == "layer":
            model[layer] = nn.Linear(4, 4)
        elif change == "weight" and isinstance(model[layer], nn.Linear):
            model[layer].weight = nn.Parameter(torch.randn(4, 4))
        elif change == "add":
            model.append(nn.Linear(4, 4))
        elif change == "insert":
            model.insert(layer, nn.Linear(4, 4))
        elif change == "remove" and len(model) > 2:
            del model[layer]
        elif change == "nest":
            model[layer] = nn.Sequential(model[layer], nn.Linear(4, 4))
        elif change == "load":
            model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
        expected |= {(*key, i): value for key, value in expected_weights(model).items()}
        step(model)
    found = values()
    assert found == pytest.approx(expected, rel=1e-6)
    assert exporter.health().errors == 0


@pytest.mark.fault(211)
def test_a_layer_replaced_between_training_and_evaluation_is_seen_in_the_evaluation(bus):
    model = mlp()
    seen = []
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(model)
        bus.register_subscriber(CallbackSubscriber("activations", seen.append, tag="testing", backend="null"))
        step(model)
        model[2] = nn.Linear(5, 7)
        exporter.evaluate([torch.randn(2, 4)])
    assert [message.module for message in seen] == ["0", "1", "2"]


@pytest.mark.fault(211)
def test_a_wrapper_around_a_layer_changes_nothing(norms, caplog):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = mlp()
    _, values = norms(model, MODULE_KINDS)
    step(model)
    model[0] = checkpoint_wrapper(model[0])
    step(model)
    found = values()
    names = [{(kind, name) for kind, name, s in found if s == i} for i in range(2)]
    assert names[0] == names[1]
    assert not caplog.records


@pytest.mark.fault(211)
def test_a_layer_of_a_compiled_model_is_observed_from_the_second_step_on(norms, caplog):
    model = mlp()
    _, values = norms(model, ("activations", "weights"))
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for i in range(4):
        if i == 2:
            model[2] = nn.Linear(5, 2)
            optimizer.add_param_group({"params": model[2].parameters()})
        expected = expected_weights(model)["weights", "2"]
        optimizer.zero_grad()
        compiled(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()
    found = values()
    assert found["weights", "2", 3] == pytest.approx(expected, rel=1e-6)
    assert {s for kind, name, s in found if (kind, name) == ("activations", "2")} == {0, 1, 3}
    torch.compiler.reset()
