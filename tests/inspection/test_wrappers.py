"""No name of a wrapper appears in a result, and a wrapped model gives the results of the model itself."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.utils import parametrizations
from torch.utils.data import TensorDataset

from ikkuna import monitor, netdict, plot, probe
from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import AttentionSubscriber, NormSubscriber
from ikkuna.support.modules import is_bias, named_modules, named_parameters, unwrap
from ikkuna.testing import RecordingBackend

MARKS = (
    "module.",
    "_orig_mod",
    "_wrapped_module",
    "Optimized",
    "Distributed",
    "DataParallel",
    "Parametrized",
    "Wrapper",
)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.block = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh())
        self.rnn = nn.LSTM(5, 3, batch_first=True)
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.rnn(self.block(self.norm(x)))[0])


def compiled(model):
    return torch.compile(model, backend="eager")


def inner_checkpoint(model):
    model.block = checkpoint_wrapper(model.block)
    return model


def inner_compile(model):
    model.block = compiled(model.block)
    return model


def averaged(model):
    return torch.optim.swa_utils.AveragedModel(model)


class OwnDDP(nn.parallel.DistributedDataParallel):
    """A subclass of a wrapper."""


WRAPPERS = {
    "compile": compiled,
    "DDP": nn.parallel.DistributedDataParallel,
    "a subclass of DDP": OwnDDP,
    "DataParallel": nn.DataParallel,
    "AveragedModel": averaged,
    "checkpoint inside": inner_checkpoint,
    "compile inside": inner_compile,
    "compile of DDP": lambda model: compiled(nn.parallel.DistributedDataParallel(model)),
    "DDP of compile of checkpoint": lambda model: nn.parallel.DistributedDataParallel(
        compiled(inner_checkpoint(model))
    ),
    "checkpoint of compile inside": lambda model: inner_checkpoint(inner_compile(model)),
}


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory):
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def trained(model):
    """Return an Adam optimizer after one step, with the gradients kept."""
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    torch.manual_seed(0)
    model(torch.randn(2, 6, 4)).square().mean().backward()
    optimizer.step()
    return optimizer


def results(model, optimizer):
    """Return results of every part of the inspection half in comparable form."""
    torch.manual_seed(1)
    x = torch.randn(2, 6, 4)
    summed = {"loss_fn": torch.sum}
    report = {
        "weights": netdict.get_weight(model).describe(layerwise=True),
        "gradients": netdict.get_grad(model).describe(layerwise=True),
        "state": netdict.get_optimizer_state(model, optimizer).describe(layerwise=True),
        "statistics": monitor.weight_statistics(model),
        "one layer": monitor.bias_gradient_statistics(model, "block.0"),
        "sparsity": monitor.sparsity(model, include_bias=True),
        "outputs": probe.get_outputs(model, "*", x, as_dict=True),
        "first": probe.get_outputs(model, ["block.0", "linear"], x, as_dict=True),
        "layer gradients": probe.get_gradients(model, "*", x, as_dict=True, **summed),
        "input gradients": probe.get_gradients(model, "*", x, wrt="inputs", as_dict=True, **summed),
        "weight gradients": probe.get_gradients(model, ["block", "head"], x, wrt="weights", as_dict=True, **summed),
        "layer weights": probe.get_weights(model, "*", as_dict=True),
        "nested weights": probe.get_weights(model, ["block"], as_dict=True),
        "norms": probe.weights_norm(model),
        "penalties": {k: v.loss for k, v in probe.weight_penalties(model, penalties={"weight": (1.0, 0.0)}).items()},
        "rnn": probe.rnn_summary(model),
        "flow": plot.flow_of(model).names,
        "layer": probe.find_layer(model, "lstm")[0],
        "modules": [name for name, _ in named_modules(model)],
    }
    with pytest.raises(KeyError) as unknown:
        probe.find_layer(model, "nowhere")
    with pytest.raises(KeyError) as position:
        probe.find_layer(model, 99)
    with pytest.raises(KeyError) as missing:
        monitor.weight_statistics(model, "nowhere")
    return {**report, "errors": [str(error.value) for error in (unknown, position, missing)]}


def same(a, b):
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return a == b


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of torch.compile itself, inside a model
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_model_gives_what_the_model_gives(wrapper):
    torch.manual_seed(2)
    plain = Model()
    wrapped = WRAPPERS[wrapper](copy.deepcopy(plain))
    expected, found = results(plain, trained(plain)), results(wrapped, trained(wrapped))
    assert not [mark for mark in MARKS if mark in repr(found)]
    differing = [key for key in expected if not same(expected[key], found[key])]
    assert not differing, [(expected[key], found[key]) for key in differing]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # of FSDP itself, for one rank on a CPU
def test_a_model_in_fsdp_gives_the_same_names_and_outputs_and_can_be_trained():
    plain, x = Model(), torch.randn(2, 6, 4)
    wrapped, options = copy.deepcopy(plain), {"use_orig_params": True, "device_id": torch.device("cpu")}
    wrapped.head = FullyShardedDataParallel(wrapped.head, **options)
    wrapped = FullyShardedDataParallel(wrapped, **options)
    assert list(netdict.get_weight(wrapped)) == list(netdict.get_weight(plain))
    assert monitor.weight_statistics(wrapped) == monitor.weight_statistics(plain)
    assert same(probe.get_outputs(wrapped, "*", x, as_dict=True), probe.get_outputs(plain, "*", x, as_dict=True))
    for model in (plain, wrapped):
        model(x).sum().backward()
    assert netdict.get_grad(wrapped) == netdict.get_grad(plain)


def test_fully_shard_appears_in_no_name_and_parameters_are_sharded_again():
    model, x = Model(), torch.randn(2, 6, 4)
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    for module in (model.head, model):
        torch.distributed.fsdp.fully_shard(module, mesh=mesh)
    before = [type(p).__name__ for p in model.parameters()]
    found = probe.get_outputs(model, "*", x, as_dict=True)
    assert [type(p).__name__ for p in model.parameters()] == before
    gradients = probe.get_gradients(model, "*", x, loss_fn=torch.sum, as_dict=True)
    assert list(found) == list(gradients) == ["norm", "block.0", "block.1", "block.2", "block.3", "rnn", "head"]
    assert [type(p).__name__ for p in model.parameters()] == before
    assert probe.find_layer(model, "model") == ("", model)
    with pytest.raises(KeyError, match=r"no layer 'nowhere' in Model; .*head \(Linear\)"):
        probe.find_layer(model, "nowhere")


def test_a_wrapped_layer_can_be_given_as_the_layer():
    model = inner_checkpoint(Model())
    assert probe.find_layer(model, model.block)[0] == "block"
    assert "Model/block/weight/data/min" in monitor.weight_statistics(model, model.block)
    assert unwrap(model.block) is probe.find_layer(model, "block")[1]


def test_parametrised_tensors_have_the_names_of_the_live_half():
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(3, 2)), parametrizations.spectral_norm(nn.Linear(2, 2))
    )
    names = ["0.bias", "0.weight.original0", "0.weight.original1", "1.bias", "1.weight"]
    assert [name for name, _ in named_parameters(model)] == names
    assert list(netdict.get_weight(model)) == names
    assert list(probe.get_gradients(model, 0, torch.ones(1, 3), loss_fn=torch.sum, wrt="weights")) == [
        "bias",
        "weight.original0",
        "weight.original1",
    ]
    assert list(probe.get_weights(model, 0)) == ["bias", "weight"]
    assert "Linear/*/weight/data/min" in monitor.weight_statistics(model[0])
    with pytest.raises(KeyError, match=r"0 \(Linear\)"):
        probe.find_layer(model, "nowhere")


def test_shared_tensors_appear_once():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    names = ["0.weight", "0.bias", "1.bias"]
    assert [name for name, _ in named_parameters(model)] == list(netdict.get_weight(model)) == names
    assert list(probe.get_weights(nn.ModuleList([model]), "0")) == names
    shared = nn.Sequential(model[0], model[0])
    assert [name for name, _ in named_modules(shared)] == ["", "0"]


@pytest.mark.parametrize(
    ("name", "expected"),
    {
        "bias": True,
        "fc.bias": True,
        "rnn.bias_ih_l0_reverse": True,
        "attention.in_proj_bias": True,
        "bias_k": True,
        "fc.bias.original": True,
        "fc.bias.original0": True,
        "fc.parametrizations.bias.original1": True,
        "weight": False,
        "rnn.weight_ih_l0": False,
        "fc.weight.original1": False,
        "relative_attention_bias.weight": False,
        "bias_net.scale": False,
        "cls_token": False,
    }.items(),
)
def test_the_last_part_of_a_name_decides_whether_it_is_a_bias(name, expected):
    assert is_bias(name) is expected


def test_every_part_agrees_on_what_a_bias_is():
    """Three rules used to differ for a module with bias in its name and for a parametrised bias."""
    model = nn.Module()
    model.relative_bias = nn.Embedding(4, 3)
    model.fc = parametrizations.weight_norm(nn.Linear(3, 2), "bias", dim=None)
    biases = [name for name, _ in named_parameters(model) if is_bias(name)]
    assert biases == ["fc.bias.original0", "fc.bias.original1"]
    model.scale = nn.Parameter(torch.ones(7))  # neither a weight nor a bias
    total = monitor.sparsity(model)["Module/*/weight/sparsity/total"]
    assert total == 4 * 3 + 3 * 2
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert plot.flow_of(model).names == ("scale", "relative_bias.weight", "fc.weight")
    assert plot.flow_of(netdict.get_grad(model)).names == ("scale", "relative_bias.weight", "fc.weight")


def live_names(model, observed, subscriber):
    """Return the names of the modules for which a subscriber shows values in one training step."""
    shown = RecordingBackend()
    with Exporter(message_bus=MessageBus("wrappers")) as exporter:
        exporter.set_model(model)
        exporter.add_modules(observed)
        exporter.message_bus.register_subscriber(subscriber(backend=shown))
        trained(model)
    return sorted({series.name for series, _, _ in shown.values})


def test_parts_of_a_model_have_no_names_of_wrappers_in_the_live_half():
    model = inner_checkpoint(Model())
    names = live_names(model, unwrap(model.block), lambda **o: NormSubscriber("activations", **o))
    assert [name for name in names if "block" in name] == ["block.0", "block.1", "block.2", "block.3"]


def test_attention_has_no_names_of_wrappers():
    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = checkpoint_wrapper(nn.MultiheadAttention(4, 2, batch_first=True))

        def forward(self, x):
            return self.attention(x, x, x)[0]

    model, data = Attending(), TensorDataset(torch.randn(4, 6, 4))
    names = live_names(model, model, lambda **o: AttentionSubscriber(data, every=1, **o))
    assert names == ["attention:head_0", "attention:head_1"]
