"""Centred kernel alignment against published numbers and its definition."""

import math

import numpy as np
import pytest
import torch

from ikkuna.errors import ConfigError
from ikkuna.numerics.representation import Scatter, centred_kernels, cka_of_hsic, principal_basis, to_rows


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def hsic_matrix(representations):
    """The unbiased independence criterion of every pair."""
    kernels, n = centred_kernels(representations), len(representations[0])
    return kernels @ kernels.mT / (n * (n - 3))


def linear_cka(x, y):
    return cka_of_hsic(hsic_matrix([x, y]))[0, 1]


def notebook():
    """The data of the notebook that accompanies Kornblith et al. (2019)."""
    rng = np.random.RandomState(1337)
    x = rng.randn(100, 10)
    return torch.from_numpy(x), torch.from_numpy(rng.randn(100, 10) + x)


def test_the_numbers_of_the_notebook():
    x, y = notebook()
    assert linear_cka(x, y).item() == pytest.approx(0.51346, abs=5e-6)


def test_the_estimator_is_its_definition():
    """A mean over all ordered quadruples of different rows (Song et al.)."""
    from itertools import permutations

    x, y = random(6, 3), random(6, 4, seed=1)
    k, kl = (x @ x.T).numpy(), (y @ y.T).numpy()
    terms = [k[i, j] * (kl[i, j] + kl[q, r] - 2 * kl[i, q]) for i, j, q, r in permutations(range(6), 4)]
    assert hsic_matrix([x, y])[0, 1].item() == pytest.approx(np.mean(terms))


def test_independent_data_has_none():
    x, y = random(256, 512), random(256, 512, seed=1)
    assert linear_cka(x, y).item() == pytest.approx(0, abs=0.02)


def test_mini_batches_add_up_to_the_whole():
    x = random(2048, 20)
    y = x @ random(20, 30, seed=1) * 0.3 + random(2048, 30, seed=2)
    whole = linear_cka(x, y).item()
    for size in (8, 32, 128):
        hsic = sum(hsic_matrix([a, b]) for a, b in zip(x.split(size), y.split(size), strict=True))
        assert cka_of_hsic(hsic)[0, 1].item() == pytest.approx(whole, abs=0.02)


def test_rotation_and_scale_do_not_matter_other_maps_do():
    x, y = random(60, 8), random(60, 12, seed=1) + random(60, 8) @ random(8, 12, seed=2)
    q = torch.linalg.qr(random(8, 8, seed=3))[0]
    value = linear_cka(x, y).item()
    assert linear_cka(-1e6 * x @ q + 5, y).item() == pytest.approx(value)
    assert linear_cka(y, x).item() == pytest.approx(value)
    assert linear_cka(x, x).item() == pytest.approx(1)
    assert linear_cka(x @ random(8, 8, seed=4), y).item() != pytest.approx(value, abs=1e-3)


def test_a_matrix_of_layers_holds_every_pair():
    layers = [random(50, d, seed=d) for d in (3, 5, 9)]
    got = cka_of_hsic(hsic_matrix(layers))
    for i in range(3):
        for j in range(3):
            assert got[i, j].item() == pytest.approx(linear_cka(layers[i], layers[j]).item())


def test_duplicates_and_dead_columns_do_no_harm():
    x = random(50, 6)
    padded = torch.cat([x, torch.zeros(50, 3)], 1)
    assert linear_cka(padded, x).item() == pytest.approx(1)


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (torch.ones(9, 3), random(9, 2)),
        (torch.full((9, 3), math.nan), random(9, 2)),
        (torch.full((9, 3), math.inf), random(9, 2)),
        (torch.empty(0, 3), torch.empty(0, 2)),
        (torch.empty(1, 3), torch.empty(1, 2)),
        (torch.empty(9, 0), random(9, 2)),
    ],
)
def test_what_is_undefined_is_nan(x, y):
    assert math.isnan(linear_cka(x, y).item())


def test_few_rows():
    assert math.isnan(linear_cka(random(3, 2), random(3, 2)).item())


def test_unlike_rows_are_refused():
    with pytest.raises(ConfigError, match="equal numbers of rows"):
        linear_cka(random(5, 2), random(6, 2))


def test_rows_of_each_layout():
    x = random(2, 3, 4, 5)
    assert torch.equal(to_rows(x), x.permute(0, 2, 3, 1).reshape(-1, 3))
    assert torch.allclose(to_rows(x, pool=True), x.mean((2, 3)))
    assert torch.equal(to_rows(x[0]), x[0].reshape(-1, 5))
    assert torch.allclose(to_rows(x[0], pool=True), x[0].mean(1))
    assert to_rows(x[0, 0]).shape == to_rows(x[0, 0], pool=True).shape == (4, 5)
    assert to_rows(x[0, 0, 0]).shape == (5, 1)
    assert to_rows(torch.ones(2, 3, dtype=torch.bfloat16).requires_grad_()).dtype is torch.float64
    assert torch.equal(to_rows(x.to(memory_format=torch.channels_last)), to_rows(x))


@pytest.mark.parametrize("scale", [1e-22, 1e-8, 1.0, 1e12, 1e25])
@pytest.mark.parametrize("offset", [0.0, 300.0])
def test_single_precision_is_right_to_a_millionth(scale, offset):
    """Also where squares leave its range; what the offset costs has been lost when the numbers were rounded."""
    common = random(96, 20) @ random(20, 4000, seed=2)
    x, y = (
        ((noise + share * common + offset) * scale).float()
        for noise, share in ((random(96, 4000, seed=3), 0.2), (random(96, 4000, seed=4), 0.05))
    )
    for pair in ((x, y), (x, x[:, :9]), (random(96, 4000, seed=5).float(), y)):
        expected = linear_cka(*(side.double() for side in pair)).item()
        assert linear_cka(*pair).item() == pytest.approx(expected, abs=1e-6)


def test_constants_in_single_precision_have_no_similarity():
    for constant in (0.1, 0.3, 0.7, 1.1):
        for n in (7, 9, 11, 100):
            assert math.isnan(linear_cka(torch.full((n, 3), constant), random(n, 2).float()).item())
            assert centred_kernels([torch.full((n, 3), constant)]).count_nonzero() == 0


def test_products_that_torch_may_round_further_are_made_in_double_precision():
    x = random(40, 300).float()
    expected, single = centred_kernels([x.double()]), centred_kernels([x])
    assert not torch.equal(single, expected)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert torch.equal(centred_kernels([x]), expected)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("shape", [(50, 4), (10, 5, 4), (10, 4, 5, 1), (50,)])
def test_the_parts_of_complex_numbers_are_two_features(shape):
    x = torch.complex(random(*shape), 5 * random(*shape, seed=1))
    y = torch.complex(x.real, 5 * random(*shape, seed=2))
    pairs = [torch.stack([to_rows(z.real), to_rows(z.imag)], -1).flatten(1) for z in (x, y)]
    assert [to_rows(z).equal(pair) for z, pair in zip((x, y), pairs, strict=True)] == [True, True]
    assert linear_cka(to_rows(x), to_rows(y)).item() == linear_cka(*pairs).item() < 0.9


def test_kernels_and_bases_take_complex_rows():
    x = torch.complex(random(50, 4), random(50, 4, seed=1))
    assert centred_kernels([x]).equal(centred_kernels([to_rows(x)]))
    assert principal_basis(x, 1).shape == (50, 8)
    assert Scatter.of(x).covariance().equal(Scatter.of(to_rows(x)).covariance())
