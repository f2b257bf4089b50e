"""Spectral norms against singular values in float64 and explicit operators."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ikkuna.errors import ConfigError
from ikkuna.numerics.spectrum import as_matrix, conv_operator_norm, spectral_norm

SCALES = st.sampled_from([2.0**exponent for exponent in (-140, -126, -64, 0, 64, 115)])
ENTRY = st.floats(-100, 100, width=32)
MATRIX = hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=12), elements=ENTRY)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact(w):
    return np.linalg.svd(w.double().reshape(w.shape[0], -1).numpy(), compute_uv=False)[0]


@given(MATRIX, SCALES)
@settings(deadline=None, max_examples=120)
def test_a_small_matrix_is_exact_in_the_first_call(w, scale):
    w = w * np.float32(scale)
    sigma, residual, u = spectral_norm(torch.from_numpy(w))
    rounding = w.size * float(np.finfo(np.float32).smallest_subnormal)  # of each product
    assert sigma.item() == pytest.approx(exact(torch.from_numpy(w)), rel=2e-4, abs=rounding)
    assert u.norm().item() == pytest.approx(1, rel=1e-4)
    assert residual >= 0


@pytest.mark.parametrize("scale", [1e-310, 1e-200, 1e200, 1e306])
def test_float64_has_its_whole_range(scale):
    w = random(6, 9).double() * scale
    unit = float(w.abs().max())
    sigma, residual, u = spectral_norm(w)
    assert sigma.item() / unit == pytest.approx(exact(w / unit), rel=1e-9)
    assert residual < 1e-9
    assert u.norm().item() == pytest.approx(1)


@pytest.mark.parametrize("shape", [(256, 256), (1024, 300), (100, 2000), (64, 16, 3, 3)])
def test_a_cold_start_is_within_a_thousandth(shape):
    w = random(*shape)
    sigma, residual, _ = spectral_norm(w)
    assert sigma.item() == pytest.approx(exact(w), rel=2e-3)
    assert sigma.item() <= exact(w) * (1 + 1e-6)
    assert residual < 0.05


def test_a_warm_start_follows_a_drifting_matrix():
    w, u = random(200, 200), None
    for step in range(60):
        w = w + 1e-3 * random(200, 200, seed=step + 1)
        sigma, _, u = spectral_norm(w, u, iterations=1)
    assert sigma.item() == pytest.approx(exact(w), rel=1e-3)


def test_the_residual_bounds_the_error_of_a_bad_start():
    w = random(60, 40)
    values = np.linalg.svd(w.double().numpy(), compute_uv=False)
    u = random(60, seed=3)
    u /= u.norm()
    for _ in range(30):
        sigma, residual, u = spectral_norm(w, u, iterations=1)
        r = residual.item()
        assert abs(values - sigma.item()).min() <= r * (1 + r / 2) * sigma.item() + 1e-5
    assert r < 0.1


def test_a_planted_gap_converges_at_its_rate():
    q1, q2 = (torch.linalg.qr(random(80, 80, seed=s).double())[0] for s in (1, 2))
    w = (q1 * torch.linspace(0.5, 0, 80).double()) @ q2
    w = w + 0.5 * torch.outer(q1[:, 0], q2[0])
    sigma, residual, _ = spectral_norm(w, q1.mean(1) / q1.mean(1).norm(), iterations=40)
    assert sigma.item() == pytest.approx(1.0, rel=1e-12)
    assert residual < 1e-7


@pytest.mark.parametrize(
    ("w", "sigma"),
    [
        (torch.linalg.qr(random(50, 50))[0], 1.0),
        (torch.diag(torch.tensor([3.0, -7.0, 2.0])), 7.0),
        (torch.outer(torch.arange(4.0), torch.ones(9)), math.sqrt(14 * 9)),
        (torch.zeros(5, 7), 0.0),
        (torch.ones(1, 1) * -2, 2.0),
        (torch.tensor([3.0, 4.0]), 5.0),
        (torch.tensor(-3.0), 3.0),
        (torch.full((3, 4), 1e30), 1e30 * math.sqrt(12)),
        (torch.full((3, 4), 1e-30), 1e-30 * math.sqrt(12)),
        (torch.eye(3, dtype=torch.bfloat16) * 2, 2.0),
        (torch.eye(3, dtype=torch.float16) * 300, 300.0),
        (torch.eye(3, dtype=torch.int64), 1.0),
        (torch.eye(4).to_sparse(), 1.0),
        (torch.ones(1).expand(6, 6), 6.0),
        (torch.eye(3).requires_grad_(), 1.0),
    ],
)
def test_known_norms(w, sigma):
    got, residual, _ = spectral_norm(w)
    assert got.item() == pytest.approx(sigma, rel=1e-5)
    assert residual < 1e-3
    assert not got.requires_grad


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_bad_element_makes_nan_and_does_not_spoil_the_next_call(bad):
    w = random(20, 10)
    spoiled = w.clone()
    spoiled[3, 3] = bad
    for start in (None, spectral_norm(w)[2]):
        sigma, _, u = spectral_norm(spoiled, start)
        assert math.isnan(sigma.item())
        assert u.isfinite().all()
        assert spectral_norm(w, u, iterations=100)[0].item() == pytest.approx(exact(w), rel=1e-4)


def test_a_zero_matrix_leaves_a_usable_start():
    _, _, u = spectral_norm(torch.zeros(10, 10))
    w = random(10, 10)
    assert spectral_norm(w, u, iterations=200)[0].item() == pytest.approx(exact(w), rel=1e-4)


@pytest.mark.parametrize("start", [torch.ones(3), torch.ones(20, 1)])
def test_a_start_of_another_shape_is_ignored(start):
    w = random(20, 10)
    sigma, _, u = spectral_norm(w, start, iterations=200)
    assert sigma.item() == pytest.approx(exact(w), rel=1e-4)
    assert u.shape == (20,)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0,)])
def test_an_empty_matrix_has_no_norm(shape):
    sigma, residual, u = spectral_norm(torch.empty(shape))
    assert math.isnan(sigma.item())
    assert math.isnan(residual.item())
    assert u.shape == (shape[0],)


def test_a_meta_tensor_has_no_norm():
    assert math.isnan(spectral_norm(torch.empty(3, 3, device="meta"))[0].item())


def test_scaling_and_rotation():
    w = random(30, 20).double()
    q = torch.linalg.qr(random(30, 30, seed=5).double())[0]
    sigma = spectral_norm(w)[0].item()
    assert spectral_norm(-3 * w)[0].item() == pytest.approx(3 * sigma, rel=1e-6)
    assert spectral_norm(q @ w)[0].item() == pytest.approx(sigma, rel=1e-6)
    assert spectral_norm(w.T)[0].item() == pytest.approx(sigma, rel=1e-6)


def test_no_iteration_is_refused_and_the_global_generator_untouched():
    before = torch.random.get_rng_state()
    spectral_norm(random(100, 100))
    assert torch.equal(before, torch.random.get_rng_state())
    with pytest.raises(ConfigError, match="at least 1"):
        spectral_norm(torch.eye(2), iterations=0)


def test_products_with_the_matrix_are_counted():
    """A warm call costs two products for each iteration, no more."""
    from torch.utils._python_dispatch import TorchDispatchMode

    w, touched = random(128, 128), []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket in (torch.ops.aten.mv, torch.ops.aten.mm):
                touched.append(func.overloadpacket)
            return func(*args, **(kwargs or {}))

    u = spectral_norm(w)[2]
    with Count():
        spectral_norm(w, u, iterations=4)
    assert touched == [torch.ops.aten.mv] * 8


def test_the_metric_takes_two_pairs_of_products_of_a_warm_matrix():
    """A pair is one product with the matrix and one with its transpose; four are what a step may cost."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from ikkuna.export.messages import ModuleMessage, Stamp
    from ikkuna.export.subscriber import SpectralNormSubscriber

    w, products = random(1024, 1024), []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket in (torch.ops.aten.mv, torch.ops.aten.mm):
                products.append(func.overloadpacket)
            return func(*args, **(kwargs or {}))

    metric, message = SpectralNormSubscriber(), ModuleMessage(Stamp(0, 0, 0), "weights", w, module="fc", name="fc")
    metric.measure(message)
    with Count():
        row = metric.measure(message)
    assert products == [torch.ops.aten.mv] * 4
    assert row[0].item() == pytest.approx(torch.linalg.matrix_norm(w.double(), 2).item(), rel=1e-3)


def explicit_conv(weight, n, circular):
    ci = weight.shape[1]
    eye = torch.eye(ci * n * n, dtype=torch.float64).reshape(-1, ci, n, n)
    pad = [(k - 1) // 2 for k in weight.shape[2:]]
    if circular:
        eye = torch.nn.functional.pad(eye, (pad[1], pad[1], pad[0], pad[0]), mode="circular")
        pad = [0, 0]
    return torch.nn.functional.conv2d(eye, weight, padding=pad).flatten(1)


def test_the_operator_norm_is_that_of_the_explicit_matrix():
    weight = random(6, 4, 3, 3).double()
    got = conv_operator_norm(weight, 8).item()
    assert got == pytest.approx(exact(explicit_conv(weight, 8, circular=True)), rel=1e-12)
    assert got >= exact(explicit_conv(weight, 8, circular=False)) * (1 - 1e-9)
    reshaped = exact(as_matrix(weight))
    assert reshaped <= got <= 3 * reshaped


def test_known_operator_norms():
    assert conv_operator_norm(torch.ones(1, 1, 3, 3), 8).item() == pytest.approx(9)
    one_by_one = random(5, 7, 1, 1)
    assert conv_operator_norm(one_by_one, 4).item() == pytest.approx(exact(one_by_one))
    assert conv_operator_norm(torch.ones(1, 1, 5), 3).item() == pytest.approx(5)  # longer than its input
    assert conv_operator_norm(torch.zeros(2, 2, 3, 3), 5).item() == 0
    assert conv_operator_norm(random(2, 3, 3, 3, 3), (4, 5, 6)).item() > 0
    grouped = torch.cat([torch.ones(1, 1, 3), 2 * torch.ones(1, 1, 3)])
    assert conv_operator_norm(grouped, 9, groups=2).item() == pytest.approx(6)


def test_bad_kernels():
    assert math.isnan(conv_operator_norm(torch.full((1, 1, 3), math.nan), 4).item())
    assert math.isnan(conv_operator_norm(torch.empty(0, 1, 3), 4).item())
    with pytest.raises(ConfigError, match="as many positive sizes"):
        conv_operator_norm(torch.ones(3, 3), 4)
    with pytest.raises(ConfigError, match="as many positive sizes"):
        conv_operator_norm(torch.ones(1, 1, 3, 3), (4,))


def test_the_norm_of_a_complex_matrix():
    x = torch.randn(6, 5, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    sigma, residual, start = spectral_norm(x.conj())
    assert sigma.item() == pytest.approx(torch.linalg.matrix_norm(x, 2).item(), rel=1e-5)
    assert residual < 1e-3
    assert spectral_norm(x.conj(), start)[0].item() == pytest.approx(sigma.item(), rel=1e-5)


def test_the_operator_norm_of_a_complex_kernel():
    kernel = torch.randn(3, 2, 3, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))
    by_frequency = np.fft.fft(kernel.numpy(), 7).transpose(2, 0, 1)
    assert conv_operator_norm(kernel, 7).item() == pytest.approx(np.linalg.svd(by_frequency)[1].max())
