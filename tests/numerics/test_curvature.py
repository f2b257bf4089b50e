"""Hessians against closed forms."""

import math

import numpy as np
import pytest
import torch

from ikkuna.errors import ConfigError
from ikkuna.numerics.curvature.hessian_product import HessianProduct, quadratic_forms, trace_of
from ikkuna.numerics.curvature.lanczos import lanczos_coefficients, ritz_of

DOUBLE = torch.float64


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def lanczos(product, steps):
    return ritz_of(lanczos_coefficients(product, product.size, steps, torch.Generator().manual_seed(0), DOUBLE))


def hutchinson_trace(matvec, size, samples=30, seed=0, dtype=DOUBLE):
    return trace_of(quadratic_forms(matvec, size, samples, torch.Generator().manual_seed(seed), dtype))


def dense(product):
    return torch.stack([product(row) for row in torch.eye(product.size, dtype=DOUBLE)])


def test_linear_regression():
    x, y, w = random(30, 5), random(30), random(5, seed=1).requires_grad_()
    product = HessianProduct(lambda: ((x @ w - y) ** 2).mean(), [w])
    assert torch.allclose(dense(product), 2 / 30 * x.T @ x)
    assert torch.allclose(product.gradient, 2 / 30 * x.T @ (x @ w - y))
    assert product.loss.item() == pytest.approx(((x @ w - y) ** 2).mean().item())
    assert w.grad is None


def test_logistic_regression():
    x, w = random(40, 4), random(4, seed=1).requires_grad_()
    y = (random(40, seed=2) > 0).double()
    product = HessianProduct(lambda: torch.nn.functional.binary_cross_entropy_with_logits(x @ w, y), [w])
    p = torch.sigmoid(x @ w).detach()
    assert torch.allclose(dense(product), x.T @ torch.diag(p * (1 - p)) @ x / 40)


def test_softmax_regression():
    x, w = random(20, 3), random(4, 3, seed=1).requires_grad_()
    y = torch.arange(20) % 4
    product = HessianProduct(lambda: torch.nn.functional.cross_entropy(x @ w.T, y), [w])
    p = torch.softmax(x @ w.T, 1).detach()
    expected = sum(torch.kron(torch.diag(a) - torch.outer(a, a), torch.outer(b, b)) for a, b in zip(p, x, strict=True))
    assert torch.allclose(dense(product), expected / 20)
    values = lanczos(product, 12).values
    truth = torch.linalg.eigvalsh(expected / 20)
    assert values[-1].item() == pytest.approx(truth[-1].item(), rel=1e-9)
    assert values.min() > -1e-9


def network():
    torch_state = torch.random.get_rng_state()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2)).double()
    torch.random.set_rng_state(torch_state)
    x, y = random(50, 4), torch.arange(50) % 2
    return net, lambda: torch.nn.functional.cross_entropy(net(x), y)


def test_a_network_agrees_with_functional_autograd():
    net, loss = network()
    product = HessianProduct(loss, net.parameters())
    hessian = dense(product)
    assert torch.allclose(hessian, hessian.T)
    state = dict(net.named_parameters())
    x, y = random(50, 4), torch.arange(50) % 2

    def functional(*values):
        return torch.nn.functional.cross_entropy(
            torch.func.functional_call(net, dict(zip(state, values, strict=True)), x), y
        )

    blocks = torch.autograd.functional.hessian(functional, tuple(state.values()))
    sizes = [p.numel() for p in state.values()]
    expected = torch.cat(
        [
            torch.cat([b.reshape(m, n) for b, n in zip(r, sizes, strict=True)], 1)
            for r, m in zip(blocks, sizes, strict=True)
        ]
    )
    assert torch.allclose(hessian, expected)
    assert all(p.grad is None for p in net.parameters())
    truth = torch.linalg.eigvalsh(expected)
    ritz = lanczos(product, 25)
    assert ritz.values[-3:].tolist() == pytest.approx(truth[-3:].tolist(), rel=1e-6)


def test_the_trace_is_within_its_standard_error():
    net, loss = network()
    product = HessianProduct(loss, net.parameters())
    truth = dense(product).trace().item()
    value, error = hutchinson_trace(product, product.size, 100)
    assert abs(value - truth) < 3 * error


def test_the_standard_error_is_that_of_the_theory():
    a = random(30, 30) + random(30, 30).T
    theory = math.sqrt(2 * (a.square().sum() - a.diagonal().square().sum()).item() / 40)
    values, errors = np.array([hutchinson_trace(lambda v: a @ v, 30, 40, seed) for seed in range(200)]).T
    assert values.mean() == pytest.approx(a.trace().item(), abs=3 * theory / math.sqrt(200))
    assert values.std() == pytest.approx(theory, rel=0.15)
    assert errors.mean() == pytest.approx(theory, rel=0.1)


def test_traces_at_the_edges():
    assert math.isnan(hutchinson_trace(lambda v: v, 3, 0)[0])
    assert math.isnan(hutchinson_trace(lambda v: v, 0)[0])
    assert math.isnan(hutchinson_trace(lambda v: v, 3, 1)[1])
    assert math.isnan(hutchinson_trace(lambda v: v * math.nan, 3)[0])


def test_losses_without_curvature():
    w = random(3).requires_grad_()
    unused = random(2).requires_grad_()
    product = HessianProduct(lambda: (3 * w).sum(), [w, unused])
    assert product(torch.ones(5, dtype=DOUBLE)).tolist() == [0] * 5
    constant = HessianProduct(lambda: torch.tensor(1.0), [w])
    assert constant.gradient.tolist() == [0] * 3
    relu = HessianProduct(lambda: torch.relu(w).sum() ** 1, [w])
    assert relu(torch.ones(3, dtype=DOUBLE)).tolist() == [0] * 3


def test_parameters_of_two_dtypes_and_frozen_ones():
    a, b = torch.ones(2, requires_grad=True), random(1).requires_grad_()
    frozen = torch.ones(4)
    product = HessianProduct(lambda: (a.double() ** 2).sum() * b.sum(), [a, frozen, b])
    assert product.size == 3
    got = dense(product)
    value = b.item()
    assert torch.allclose(got, torch.tensor([[2 * value, 0, 2], [0, 2 * value, 2], [2, 2, 0]], dtype=DOUBLE))


def test_attention_has_a_second_derivative():
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).double()
    x = random(3, 5, 8)
    product = HessianProduct(lambda: layer(x, x, x, need_weights=False)[0].square().mean(), layer.parameters())
    v = torch.ones(product.size, dtype=DOUBLE)
    u = random(product.size)
    assert (u @ product(v)).item() == pytest.approx((v @ product(u)).item())


def test_unsuitable_losses_are_refused():
    w = torch.ones(3, requires_grad=True)
    with pytest.raises(ConfigError, match="one number"):
        HessianProduct(lambda: w, [w])
    with pytest.raises(ConfigError, match="at least one parameter"):
        HessianProduct(lambda: w.sum(), [torch.ones(1)])
    with pytest.raises(ConfigError, match="differentiated twice"):
        HessianProduct(lambda: torch.pdist(w[:, None]).pow(2).sum(), [w])(torch.ones(3))


def test_products_cost_less_than_two_gradients():
    """One forward pass and one backward pass are recorded, and each product walks the graph once more."""
    calls = []
    w = random(4).requires_grad_()

    def loss():
        calls.append(1)
        return (w**4).sum()

    product = HessianProduct(loss, [w])
    lanczos(product, 4)
    assert len(calls) == 1


class Once(torch.autograd.Function):
    """A function without a second derivative."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return 2 * grad


def test_a_function_that_is_differentiable_once_is_refused_where_it_matters():
    """Autograd itself would leave its part of the Hessian out without an error."""
    w = random(3).requires_grad_()
    with pytest.raises(ConfigError, match="once_differentiable"):
        HessianProduct(lambda: Once.apply(w).square().sum(), [w])
    assert torch.equal(dense(HessianProduct(lambda: Once.apply(w.square()).sum(), [w])), 4 * torch.eye(3, dtype=DOUBLE))
