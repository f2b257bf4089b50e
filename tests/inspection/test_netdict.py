"""Snapshots and their arithmetic."""

import json
import math
import pickle
import re

import numpy as np
import pytest
import scipy.stats
import torch
from torch import nn

import ikkuna.netdict as nnstat
from ikkuna.errors import ConfigError, SnapshotError
from ikkuna.netdict import NetDict


@pytest.fixture
def net():
    return NetDict({"a": [3.0, 4.0], "b": [[1.0, 2.0], [2.0, 4.0]]})


def test_norms(net):
    """E39."""
    found = [net.norm(p) for p in (2, 1, math.inf, 3, 0)]
    assert found == pytest.approx([7.0710678118654755, 16, 4, 5.561297766521235, 6])
    assert all(type(norm) is float for norm in found)
    assert net.numel() == 6
    assert net.norm(2, layerwise=True) == NetDict({"a": 5.0, "b": 5.0})
    assert net.norm(-math.inf) == 1.0
    assert net.norm(0.5) == pytest.approx(sum(abs(x) ** 0.5 for x in (3, 4, 1, 2, 2, 4)) ** 2)
    with pytest.raises(ConfigError, match="order"):
        net.norm(-1)


def test_statistics_of_all_elements(net):
    """E40."""
    found = net.describe()
    expected = {
        "mean": 2.6666666666666665,
        "variance": 1.4666666666666666,
        "std": 1.2110601416389968,
        "skew": -0.054820244468683874,
        "kurtosis": -1.3884297520661162,
        "abs_max": 4,
        "abs_mean": 2.6666666666666665,
        "L2_squared": 50,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert (net.mean(), net.var(), net.skew(), net.min(), net.max()) == pytest.approx(
        (2.6666666666666665, 1.4666666666666666, -0.054820244468683874, 1, 4)
    )
    assert net.percentile(50) == 2.5


def test_against_scipy():
    torch.manual_seed(0)
    net = NetDict({"x": torch.randn(300_000) ** 3, "y": torch.rand(7, 5)})
    everything = np.concatenate([value.double().numpy().ravel() for value in net.values()])
    assert net.skew() == pytest.approx(scipy.stats.skew(everything), rel=1e-4)
    assert net.kurtosis() == pytest.approx(scipy.stats.kurtosis(everything), rel=1e-4)
    assert net.var(correction=0) == pytest.approx(everything.var(), rel=1e-5)
    assert net.norm(2) == pytest.approx(np.linalg.norm(everything), rel=1e-6)


def test_statistics_of_each_tensor_are_not_averaged(net):
    """E41."""
    assert net.var(layerwise=True).to_dict() == pytest.approx({"a": 0.5, "b": 1.5833333333333333})
    assert net.var() != pytest.approx((0.5 + 1.5833333333333333) / 2)


@pytest.fixture
def adam():
    model = nn.Linear(2, 1, bias=False).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    (model.weight * torch.tensor([[1.0, -2.0]])).sum().backward()
    optimizer.step()
    model.zero_grad()
    return model, optimizer


def test_optimizer_state_after_zero_grad(adam):
    """E43."""
    first, second = (nnstat.get_optimizer_state(*adam, key)["weight"] for key in ("exp_avg", "exp_avg_sq"))
    assert first.flatten().tolist() == pytest.approx([0.1, -0.2])
    assert second.flatten().tolist() == pytest.approx([0.001, 0.004])
    update = nnstat.get_adam_update({"weight": first}, {"weight": second}, eps=0.0)
    assert update["weight"].flatten().tolist() == pytest.approx([3.16227766, -3.16227766])


def test_an_unknown_state_lists_the_known(adam):
    """E44."""
    model, optimizer = adam
    model.extra = nn.Parameter(torch.zeros(1))  # one that the optimizer does not know
    before = len(optimizer.state)
    with pytest.raises(KeyError, match=r"exp_avg_sq.*exp_avg.*exp_avg_sq"):
        nnstat.get_optimizer_state(model, optimizer, "exp_avg_sg")
    assert len(optimizer.state) == before
    with pytest.raises(KeyError, match="step"):
        nnstat.get_optimizer_state(model, torch.optim.Adam(model.parameters()), "exp_avg")


def test_missing_gradients():
    """E45."""
    model = nn.Sequential(nn.Linear(2, 1), nn.Linear(2, 1))
    model[0].bias.requires_grad_(False)
    model[0](torch.ones(1, 2)).sum().backward()
    assert list(nnstat.get_grad(model)) == ["0.weight"]
    assert list(nnstat.get_grad(model, missing="nan")) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert nnstat.get_grad(model, missing="nan")["1.weight"].isnan().all()
    assert not nnstat.get_grad(model, missing="zeros")["1.weight"].any()
    with pytest.raises(ConfigError, match="skip"):
        nnstat.get_grad(model, missing="drop")


def test_describing_a_whole_net_twice(net):
    """E46."""
    assert "mean" not in net.describe(exclude=["mean", "std"])
    found = net.describe()
    assert (found["num_params"], found["L1_norm"], found["L2_norm"]) == (6, 16, pytest.approx(7.0710678))
    assert "mean" in found


def test_layers_are_selected_by_a_part_of_their_name(net):
    """E47 and E52."""
    assert list(net.describe_layers(include="b")) == ["b"]
    assert net.describe_layers(layerwise=True, include="b") == net.describe_layers(include="b")
    assert net.describe_layers(include="zzz") == {}
    model = NetDict({"0.weight": [1.0], "0.bias": [2.0]})
    assert list(model.select("zzz0")) == []
    assert list(model.select(["weight", "re:^0.b"])) == ["0.weight", "0.bias"]
    assert list(model.select(re.compile("s$"))) == ["0.bias"]
    assert list(model.describe_layers(exclude="bias")) == ["0.weight"]


@pytest.mark.fault(214)
def test_a_string_with_special_characters_is_a_regular_expression():
    model = NetDict({"0.query.weight": [1.0], "0.key.weight": [2.0], "a+b": [3.0]})
    assert list(model.select(".*query.*")) == ["0.query.weight"]
    assert list(model.select(["^0.k", "a+b"])) == ["0.key.weight", "a+b"]
    assert list(model.select("key|query")) == ["0.query.weight", "0.key.weight"]
    assert list(model.select("y.w")) == ["0.query.weight", "0.key.weight"]
    for wrong in ("*query", "re:("):
        with pytest.raises(ConfigError, match="is no valid regular expression"):
            model.select(wrong)


def test_logged_values_are_flat_numbers(net):
    """E48."""
    flat = net.describe_layers(display=False).to_dict()
    assert (flat["a/L2_norm"], flat["b/L2_norm"]) == (5.0, 5.0)
    assert all(isinstance(number, int | float) for number in flat.values())
    json.dumps(flat)
    assert net.to_dict() == flat
    assert net.norm(2, layerwise=True).to_dict() == {"a": 5.0, "b": 5.0}


def test_a_description_is_written_only_on_request(net, capsys):
    net.describe()
    assert capsys.readouterr().out == ""
    net.describe(display=True)
    assert "L2_norm" in capsys.readouterr().out


def test_arithmetic(net):
    """E49."""
    assert net * 2 == 2 * net == net + net
    assert (1 - net)["a"].tolist() == [-2, -3]
    assert all((value == 1).all() for value in (net / net).values())
    assert abs(-net) == net
    assert (net**2).sqrt() == net
    assert net.clip(max=3)["a"].tolist() == [3, 3]
    assert (net / net.norm(2, layerwise=True)).norm(2, layerwise=True).to_dict() == pytest.approx({"a": 1, "b": 1})
    assert NetDict({"a": 0.0}).sign() == NetDict({"a": 0.0})
    assert net != {"a": 1}
    with pytest.raises(ConfigError, match="only on the left: b"):
        net + {"a": 1.0}
    with pytest.raises(ConfigError, match=r"'a' has shape \(2,\) on the left and \(3,\)"):
        net + NetDict({"a": [1.0, 2, 3], "b": 1.0})
    with pytest.raises(TypeError):
        net + "1"


def test_zero_divided_by_zero_is_nan_for_numbers_too():
    assert math.isnan((NetDict({"a": 0.0}) / NetDict({"a": 0.0}))["a"])
    assert (NetDict({"a": 1.0}) / 0)["a"] == math.inf


def test_cosine(net):
    assert net.cosine(net) == pytest.approx(1)
    assert net.cosine(-net, layerwise=True).to_dict() == pytest.approx({"a": -1, "b": -1})
    assert math.isnan(net.cosine(net * 0))
    assert net.dot(net) == pytest.approx(50)


def test_trust_ratio():
    """E50."""
    before, after = {"w": [3.0, 3.0]}, {"w": [3.0, 4.0]}
    assert nnstat.trust_ratio(before, after)["w"] == 5.0
    assert nnstat.trust_ratio(before, after, numerator="old")["w"] == pytest.approx(4.242640687119285)
    assert nnstat.compute_trust_ratio(before, after, 0.1)["w"] == pytest.approx(0.5)
    assert nnstat.trust_ratio(before, after, layerwise=False) == 5.0
    assert math.isnan(nnstat.trust_ratio(before, before)["w"])
    with pytest.raises(ConfigError, match="numerator"):
        nnstat.trust_ratio(before, after, numerator="both")


def test_a_scalar_parameter():
    """E61."""
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(3.0))
    assert nnstat.get_weight(model).describe(layerwise=True)["scale"]["L2_norm"] == 3.0
    assert math.isnan(nnstat.get_weight(model).describe()["variance"])


def test_a_snapshot_stays_as_it_was():
    """E62, and the example of the seed that gave 0."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = nnstat.get_weight(model)
    norm = before.norm()
    model(torch.ones(1, 3)).sum().backward()
    gradient = nnstat.get_grad(model)
    optimizer.step()
    model.zero_grad()
    after = nnstat.get_weight(model)
    assert (after - before).norm() == pytest.approx(0.5 * gradient.norm())
    assert before.norm() == norm
    assert after.norm() != norm
    assert before["weight"].data_ptr() != model.weight.data_ptr()
    assert not before["weight"].requires_grad
    source = torch.ones(2)
    copied = NetDict({"x": source})
    source.zero_()
    assert copied["x"].tolist() == [1, 1]


def test_an_empty_net():
    """E63."""
    empty = NetDict({})
    assert (repr(empty), empty.norm(), empty.norm(math.inf), empty.describe()) == ("NetDict()", 0.0, 0.0, {})
    assert repr(empty.describe()) == "(nothing to describe)"
    assert math.isnan(empty.mean())


def test_an_exploded_tensor_has_no_healthy_numbers():
    net = NetDict({"a": [1.0, math.nan], "b": [1.0, 2.0]})
    assert math.isnan(net.norm())
    assert math.isnan(net.norm(math.inf))
    assert net.describe(layerwise=True, stats=["nonfinite", "mean"])["b"] == {"nonfinite": 0, "mean": 1.5}
    assert net.describe(stats="nonfinite") == {"nonfinite": 1}


def test_constant_data_has_no_shape():
    net = NetDict({"a": torch.full((1000,), 0.1)})
    assert math.isnan(net.skew())
    assert math.isnan(net.kurtosis())


@pytest.mark.parametrize("name", ["snapshot.safetensors", "snapshot.pt", "snapshot"])
def test_files(net, tmp_path, name):
    """E64."""
    mixed = NetDict({"z": torch.ones(2, 3).T, "loss": 0.5, **net})
    mixed.save(tmp_path / name)
    loaded = NetDict.load(tmp_path / name)
    assert loaded == mixed
    assert list(loaded) == list(mixed)
    assert type(loaded["loss"]) is float
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_torch_reads_the_pt_file(net, tmp_path):
    """E64."""
    net.save(tmp_path / "snapshot.pt")
    values = torch.load(tmp_path / "snapshot.pt", weights_only=True)
    assert list(values) == ["a", "b"]


class Hostile:
    def __reduce__(self):
        return (open, ("owned", "w"))


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_hostile_or_damaged_file_is_refused(tmp_path, suffix, monkeypatch, net):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / f"file{suffix}"
    file.write_bytes(pickle.dumps({"a": Hostile()}))
    with pytest.raises(SnapshotError, match="damaged"):
        NetDict.load(file)
    torch.save({"a": Hostile()}, file)
    with pytest.raises(SnapshotError):
        NetDict.load(file)
    assert not (tmp_path / "owned").exists()
    net.save(file)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SnapshotError):
        NetDict.load(file)
    with pytest.raises(FileNotFoundError):
        NetDict.load(tmp_path / f"missing{suffix}")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(SnapshotError, match="by name"):
        NetDict.load(tmp_path / "list.pt")


def test_figures_of_a_net():
    """E65."""
    net = NetDict({"conv": torch.randn(8, 4, 3, 3), "bias": torch.randn(5), "fc": torch.randn(2, 3)})
    assert len(net.hist(layerwise=True, pattern=["conv", "fc"]).axes) == 2
    assert len(net.histogram().axes) == 1
    images = [ax.images[0].get_array().shape for ax in net.heatmap().axes if ax.images]
    assert images == [(8, 36), (1, 5), (2, 3)]
    with pytest.raises(ConfigError, match="no data to draw"):
        net.hist(pattern="zzz")


def test_stats_of_weights_gradients_and_state_together(adam):
    model, optimizer = adam
    report = nnstat.compute_stats(model, optimizer, ["exp_avg", "exp_avg_sq"])
    assert list(report) == ["weight", "grad", "exp_avg", "exp_avg_sq"]
    assert report["grad"] == {}
    assert report["exp_avg"]["L2_norm"] == pytest.approx(math.hypot(0.1, 0.2))


def test_an_unknown_statistic_is_named(net):
    with pytest.raises(ConfigError, match="did you mean 'kurtosis'"):
        net.describe(stats=["kurtosi"])
    assert net.describe(stats=["var", "numel"]) == {"variance": pytest.approx(1.4666666666666666), "num_params": 6}
    assert net.describe(layerwise=True, stats=["shape"])["b"] == {"shape": (2, 2)}


def test_the_same_name_missing():
    with pytest.raises(KeyError, match="available: a"):
        NetDict({"a": 1.0})["b"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_more(dtype):
    net = NetDict({"x": torch.full((100_000,), 0.1, dtype=dtype)})
    value = float(torch.tensor(0.1, dtype=dtype))
    assert net.norm(1) == pytest.approx(100_000 * value, rel=1e-6)
    assert net.norm(2) == pytest.approx(value * math.sqrt(100_000), rel=1e-5)  # float32 inside a chunk


@pytest.mark.parametrize("number", [2, 2.0, np.float64(2), np.int64(2), np.float32(2)])
def test_a_number_may_be_on_either_side(number):
    net = NetDict({"a": torch.tensor([1.0, 3.0])})
    for found, expected in (
        (number * net, [2, 6]),
        (net * number, [2, 6]),
        (number - net, [1, -1]),
        (number / net, [2, 2 / 3]),
    ):
        assert found["a"].tolist() == pytest.approx(expected)


def test_the_cosine_is_that_of_the_operands_after_broadcasting():
    assert NetDict({"a": torch.ones(3, 4)}).cosine({"a": torch.ones(4)}) == pytest.approx(1)
    assert NetDict({"a": [1.0, 2.0, 3.0]}).cosine({"a": 1.0}) == pytest.approx(6 / math.sqrt(14 * 3))
    assert NetDict({"a": [1.0, 2.0, 3.0]}).cosine({"a": 1.0}, layerwise=True)["a"] == pytest.approx(6 / math.sqrt(42))


def test_the_inner_product_of_complex_numbers_is_the_real_part_of_the_conjugated_product():
    x, y = torch.tensor([1j, 2 + 0j]), torch.tensor([1 + 1j, 3j])
    net = NetDict({"a": x})
    assert (net.dot(net), net.cosine(net)) == pytest.approx((5, 1))
    assert net.dot({"a": y}) == pytest.approx((x.conj() * y).sum().real.item())
    assert net.dot({"a": torch.tensor([1.0, 3.0])}) == pytest.approx(6)


def test_sparse_gradients_have_inner_products():
    layer = nn.Embedding(4, 2, sparse=True)
    layer(torch.tensor([1, 1])).sum().backward()
    gradient = nnstat.get_grad(layer)
    assert (gradient.dot(gradient), gradient.cosine(gradient)) == pytest.approx((8, 1))
    assert gradient.norm(-math.inf) == 0
    assert gradient.norm(3) == pytest.approx(16 ** (1 / 3))


def test_numbers_are_in_double_precision():
    assert (NetDict({"a": 0.1}).clip(0, 1)["a"], NetDict({"a": 1e300}).clip(0)["a"]) == (0.1, 1e300)
    assert NetDict({"a": 2.0}).sqrt()["a"] == math.sqrt(2)
    assert NetDict({"a": 0.1}) != NetDict({"a": 0.1 + 1e-12})
    assert NetDict({"a": [0.1]}) == {"a": [0.1]}
    assert NetDict({"a": -3}).sign()["a"] == -1


@pytest.mark.parametrize("value", [math.nan, torch.tensor([math.nan])])
def test_the_sign_of_nan_is_nan(value):
    assert math.isnan(float(NetDict({"a": value}).sign()["a"]))


@pytest.mark.parametrize("order", [-math.inf, 0, 0.5, 1, 2, 3, math.inf])
def test_norms_at_the_limits(order):
    for names in (("a", "b"), ("b", "a")):
        values = {"a": [1.0, 2.0], "b": [math.nan]}
        assert math.isnan(NetDict({name: values[name] for name in names}).norm(order))
    infinite = NetDict({"a": [1.0, -math.inf]}).norm(order)
    assert infinite == (1 if order < 0 else math.inf) or (order == 0 and math.isnan(infinite))
    assert NetDict({"a": [3.0], "b": torch.zeros(0)}).norm(order) == pytest.approx(3 if order else 1)


@pytest.mark.parametrize("order", [200, 300.5])
@pytest.mark.parametrize("value", [0.01, 1e30])
def test_a_power_does_not_leave_the_range(order, value):
    assert NetDict({"a": [value, 0.0]}).norm(order) == pytest.approx(value)


def test_a_layerwise_percentile_is_one():
    with pytest.raises(ConfigError, match="needs one percentile"):
        NetDict({"a": [1.0, 2.0]}).percentile(layerwise=True)
    assert NetDict({"a": [1.0, 2.0]}).percentile(np.int64(50), layerwise=True)["a"] == 1.5


def test_integer_parameters_have_no_gradient():
    model = nn.Linear(2, 2)
    model.codes = nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)
    assert list(nnstat.get_grad(model, missing="nan")) == ["weight", "bias"]
    assert "codes" in nnstat.get_weight(model)


def test_a_state_of_all_parameters_is_not_that_of_the_first():
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.LBFGS(layer.parameters())

    def closure():
        optimizer.zero_grad()
        loss = layer(torch.ones(4, 3)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    with pytest.raises(KeyError, match="no state 'd'"):
        nnstat.get_optimizer_state(layer, optimizer, "d")
    assert list(nnstat.get_optimizer_state(layer, optimizer, "n_iter")) == ["weight"]


def test_the_noise_scale_of_complex_weights_counts_both_parts():
    weight = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    model = nn.Module()
    model.weight = weight
    signal = torch.tensor([1 + 2j, 3 - 1j])
    found = nnstat.compute_noise_scale(model, lambda: (signal.conj() * weight).sum().real, 1, num_iters=2)
    assert found.grad_sq == pytest.approx(15)


def test_an_empty_tensor_has_no_image():
    with pytest.raises(ConfigError, match="no data to draw"):
        NetDict({"a": torch.zeros(0, 3)}).heatmap()
    assert "b (1, 2)" in [ax.get_title() for ax in NetDict({"a": torch.zeros(0, 3), "b": [[1.0, 2.0]]}).heatmap().axes]
