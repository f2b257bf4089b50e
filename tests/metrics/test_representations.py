"""SVCCA, CKA and layer saturation: published numbers, identities, and undefined values."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from ikkuna.errors import ConfigError
from ikkuna.export.subscriber import CKASubscriber, LayerSaturationSubscriber, SVCCASubscriber
from ikkuna.numerics.representation import centred_kernels, cka_of_hsic
from ikkuna.store.values import Matrix
from tests.metrics.probing import Fixed, evaluated, rows, unchanged, with_tensors

ALL = "layers.*"


def hsic_matrix(representations):
    """The unbiased independence criterion of every pair."""
    kernels, n = centred_kernels(representations), len(representations[0])
    return kernels @ kernels.mT / (n * (n - 3))


def linear_cka(x, y):
    return cka_of_hsic(hsic_matrix([x, y]))[0, 1]


def notebook():
    """The data of google-research's notebook on representation similarity."""
    state = np.random.RandomState(1337)
    x = state.randn(100, 10)
    return torch.from_numpy(x), torch.from_numpy(state.randn(100, 10) + x)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_cka_of_the_notebook():
    x, y = notebook()
    found = evaluated(lambda **o: CKASubscriber(rows(100), every=1, modules=ALL, **o), Fixed(x, y), with_tensors(y, y))
    assert found["cka_to_previous", "layers.0"][0] == pytest.approx(0.51346, abs=5e-6)
    assert found["cka_to_init", "layers.1"] == [pytest.approx(1.0, abs=1e-12)]
    assert found["cka_between_layers", "layers.0"] == [pytest.approx(1.0, abs=1e-12)]


def test_svcca_of_the_notebook():
    """With all variance kept it is the mean canonical correlation."""
    x, y = notebook()
    found = evaluated(
        lambda **o: SVCCASubscriber(rows(100), variance=1.0, every=1, modules=ALL, **o), Fixed(x), with_tensors(y)
    )
    assert found["svcca_to_init", "layers.0"][0] == pytest.approx(0.73101, abs=5e-6)
    assert found["svcca_to_previous", "layers.0"] == found["svcca_to_init", "layers.0"]


@pytest.mark.parametrize("batch_size", [7, 50, 256])
def test_self_similarity_is_one_for_data_without_full_rank(batch_size):
    x = random(200, 5) @ random(5, 20, seed=1)
    x[:, 3] = 0
    for make in (SVCCASubscriber, CKASubscriber):
        found = evaluated(
            lambda make=make, **o: make(rows(200), batch_size=batch_size, every=1, modules=ALL, to=["previous"], **o),
            *(Fixed(x), unchanged, unchanged),
        )
        [values] = [v for (kind, _), v in found.items() if kind.endswith("_to_previous")]
        assert values == pytest.approx([1.0, 1.0], abs=1e-12)


def test_batches_of_the_forward_do_not_matter_to_svcca():
    x, y = random(120, 6), random(120, 6, seed=1)
    found = [
        evaluated(
            lambda s=s, **o: SVCCASubscriber(rows(120), batch_size=s, every=1, modules=ALL, **o),
            Fixed(x),
            with_tensors(y),
        )
        for s in (120, 50)
    ]
    assert found[0]["svcca_to_init", "layers.0"] == pytest.approx(found[1]["svcca_to_init", "layers.0"], rel=1e-12)


def test_independent_data_have_the_correlation_of_chance():
    x, y = random(2000, 100), random(2000, 100, seed=1)
    found = evaluated(
        lambda **o: SVCCASubscriber(rows(2000), variance=1.0, every=1, modules=ALL, **o), Fixed(x), with_tensors(y)
    )
    [chance] = found["svcca_chance", "layers.0"]
    assert found["svcca_to_init", "layers.0"] == [pytest.approx(chance, abs=0.005)]
    assert chance == pytest.approx(0.1905, rel=0.01)  # as 500 features and 10,000 rows have


def test_cka_of_independent_wide_data_is_about_zero():
    """Biased, it would be 0.66."""
    x, y = random(256, 512), random(256, 512, seed=1)
    found = evaluated(lambda **o: CKASubscriber(rows(256), every=1, modules=ALL, **o), Fixed(x, y), unchanged)
    assert abs(found["cka_between_layers", "layers.0"][0]) < 0.02


def test_mini_batches_of_cka_are_summed_before_the_division():
    x = random(4096, 8)
    y = x @ random(8, 8, seed=1) + 2 * random(4096, 8, seed=2)
    values = [
        evaluated(
            lambda s=s, **o: CKASubscriber(rows(4096), batch_size=s, every=1, modules=ALL, **o), Fixed(x, y), unchanged
        )["cka_between_layers", "layers.0"][0]
        for s in (4096, 512, 32)
    ]
    assert values == pytest.approx([values[0]] * 3, abs=0.02)


def test_invariances():
    x = random(300, 6)
    turn, stretch = torch.linalg.qr(random(6, 6, seed=1))[0], random(6, 6, seed=2)
    for to, svcca, cka in ((x @ turn * 3, 1.0, 1.0), (x @ stretch + 5, 1.0, None)):
        found = evaluated(
            lambda **o: SVCCASubscriber(rows(300), variance=1.0, every=1, modules=ALL, **o), Fixed(x), with_tensors(to)
        )
        assert found["svcca_to_init", "layers.0"] == [pytest.approx(svcca, abs=1e-9)]
        found = evaluated(lambda **o: CKASubscriber(rows(300), every=1, modules=ALL, **o), Fixed(x), with_tensors(to))
        assert (found["cka_to_init", "layers.0"][0] == pytest.approx(1.0, abs=1e-9)) == (cka is not None)


def test_the_matrix_of_all_layers_is_shown():
    x, y, z = (random(64, 8, seed=s) for s in range(3))
    found = evaluated(
        lambda **o: CKASubscriber(rows(64), to=(), every=1, modules=ALL, **o), Fixed(x, x + y, z), unchanged
    )
    [matrix] = found["cka_between_layers", None]
    assert isinstance(matrix, Matrix)
    assert matrix.rows == matrix.columns == ("layers.0", "layers.1", "layers.2")
    assert np.allclose(matrix.values, matrix.values.T)
    assert np.allclose(matrix.values.diagonal(), 1)
    assert matrix.values[0, 1] > 0.3 > abs(matrix.values[0, 2])
    expected = (matrix.values.sum(1) - 1) / 2
    assert [found["cka_between_layers", f"layers.{i}"][0] for i in range(3)] == pytest.approx(expected.tolist())


def test_layouts():
    """Channels of images and features of sequences are features; their positions are rows."""
    image, sequence = random(40, 3, 4, 5), random(40, 7, 6)
    model = Fixed(image, sequence)
    found = evaluated(lambda **o: LayerSaturationSubscriber(rows(40), every=1, modules=ALL, **o), model, unchanged)
    assert found["intrinsic_dimension", "layers.0"] == [3.0]
    assert found["intrinsic_dimension", "layers.1"] == [6.0]


@pytest.mark.parametrize("pool", [False, True])
def test_layouts_of_similarities(pool):
    model = Fixed(random(40, 3, 4, 5), random(40, 7, 6))
    found = evaluated(lambda **o: SVCCASubscriber(rows(40), pool=pool, every=1, modules=ALL, **o), model, unchanged)
    assert [found["svcca_to_init", f"layers.{i}"] for i in (0, 1)] == [[pytest.approx(1.0)]] * 2
    found = evaluated(lambda **o: CKASubscriber(rows(40), pool=pool, every=1, modules=ALL, **o), model, unchanged)
    assert [found["cka_to_init", f"layers.{i}"] for i in (0, 1)] == [[pytest.approx(1.0)]] * 2


def test_batches_of_cka_are_weighted_by_their_size():
    x, y = random(20, 3), random(20, 3, seed=1) + random(20, 3)
    found = evaluated(
        lambda **o: CKASubscriber(rows(20), batch_size=12, every=1, modules=ALL, **o), Fixed(x, y), unchanged
    )
    total = sum(len(a) * hsic_matrix([a, b]) for a, b in zip(x.split(12), y.split(12), strict=True))
    assert found["cka_between_layers", "layers.0"] == pytest.approx([cka_of_hsic(total)[0, 1].item()], rel=1e-5)


def test_layer_saturation_counts_planted_directions():
    planted = random(500, 3) @ random(3, 12, seed=1)
    unequal = torch.diag(torch.tensor([0.98, 0.015, 0.005], dtype=torch.float64).sqrt()) * math.sqrt(3)
    exact = torch.cat([unequal, -unequal]).repeat(90, 1)[:500]
    model = Fixed(planted, random(500, 10, seed=2), exact[:498].repeat(2, 1)[:500])
    by_definition = evaluated(
        lambda **o: LayerSaturationSubscriber(rows(498), every=1, modules=ALL, **o), model, unchanged
    )
    delve = evaluated(
        lambda **o: LayerSaturationSubscriber(rows(498), compat="delve", every=1, modules=ALL, **o), model, unchanged
    )
    assert [by_definition["intrinsic_dimension", f"layers.{i}"][0] for i in range(3)] == [3, 10, 2]
    assert [by_definition["layer_saturation", f"layers.{i}"][0] for i in range(3)] == [3 / 12, 1, 2 / 3]
    assert delve["intrinsic_dimension", "layers.2"] == [1]


def test_a_real_network_is_compared_with_its_state_at_registration():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 4))
    probe = torch.randn(64, 6)
    before = [model[0](probe).detach(), model(probe).detach()]

    def change(model):
        with torch.no_grad():
            model[2].weight.normal_(generator=torch.Generator().manual_seed(1))

    found = evaluated(lambda **o: CKASubscriber(probe, every=1, **o), model, change)
    assert {name for _, name in found} == {"0", "2", None}  # layers with parameters
    assert found["cka_to_init", "0"] == [pytest.approx(1.0, abs=1e-12)]  # not what the in-place ReLU left
    assert found["cka_to_init", "2"] == [pytest.approx(linear_cka(before[1], model(probe)).item(), rel=1e-9)]
    first_and_last = found["cka_between_layers", "0"][0]
    assert first_and_last == pytest.approx(linear_cka(before[0], model(probe)).item(), rel=1e-6)


@pytest.mark.parametrize("broken", [torch.zeros(60, 4), torch.full((60, 4), math.nan)], ids=["constant", "NaN"])
def test_a_layer_without_variance_has_nan_and_a_reason(broken, caplog):
    healthy = random(60, 4)
    for make in (
        lambda **o: SVCCASubscriber(rows(60), every=1, modules=ALL, **o),
        lambda **o: CKASubscriber(rows(60), every=1, modules=ALL, **o),
        lambda **o: LayerSaturationSubscriber(rows(60), every=1, modules=ALL, **o),
    ):
        caplog.clear()
        found = evaluated(make, Fixed(broken.double(), healthy), unchanged, unchanged)
        own = [v for (_, name), values in found.items() if name == "layers.0" for v in values]
        assert len(own) >= 4
        assert all(math.isnan(v) for v in own)
        assert caplog.text.count("constant or not finite") == (
            1 if "SVCCA" in caplog.text else caplog.text.count("is NaN")
        )
        assert not any(
            math.isnan(v) for (k, n), vs in found.items() if n == "layers.1" and "between" not in k for v in vs
        )


def test_too_few_rows_for_svcca_are_refused_and_few_are_logged(caplog):
    with pytest.raises(ConfigError, match=r"layers.0 has 30 features and 59 rows, but needs at least 60 rows"):
        evaluated(lambda **o: SVCCASubscriber(rows(59), modules=ALL, **o), Fixed(random(59, 30)))
    evaluated(lambda **o: SVCCASubscriber(rows(60), modules=ALL, **o), Fixed(random(60, 30)))
    assert "60 rows are fewer than ten times its 30 features" in caplog.text


def test_a_layer_that_grows_has_nan_and_a_reason(caplog):
    wider = with_tensors(random(59, 40))
    found = evaluated(lambda **o: SVCCASubscriber(rows(59), every=1, modules=ALL, **o), Fixed(random(59, 20)), wider)
    assert math.isnan(found["svcca_to_init", "layers.0"][0])
    assert "40 features and 59 rows, but needs at least 80 rows" in caplog.text


def test_few_rows_limit_the_saturation_and_that_is_logged(caplog):
    found = evaluated(
        lambda **o: LayerSaturationSubscriber(rows(5), every=1, modules=ALL, **o), Fixed(random(5, 30)), unchanged
    )
    assert found["intrinsic_dimension", "layers.0"] == [4]
    assert "5 rows of 30 features have at most 4 directions" in caplog.text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SVCCASubscriber(rows(9), to="first"), r"compares to 'previous' and 'init', got \['first'\]"),
        (lambda: SVCCASubscriber(rows(9), to=[]), "needs to= 'previous', 'init' or both"),
        (lambda: SVCCASubscriber(rows(9), variance=0), r"needs a variance in \(0, 1\], got 0"),
        (lambda: CKASubscriber(rows(9), to=[], between_layers=False), "something to compare to"),
        (lambda: CKASubscriber(rows(3)), "batches of at least 4 inputs, got batch_size=256 and 3 inputs"),
        (lambda: CKASubscriber(rows(9), batch_size=3), "got batch_size=3 and 9 inputs"),
        (lambda: LayerSaturationSubscriber(rows(9), threshold=1.5), r"threshold in \(0, 1\] .* got 1.5"),
        (lambda: LayerSaturationSubscriber(rows(9), compat="x"), "got 0.99, 'x'"),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
