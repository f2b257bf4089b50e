"""The Hessian through the subscriber: closed forms, what it leaves alone, and what has none."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, scaled_dot_product_attention
from torch.utils.data import TensorDataset

from ikkuna.errors import ConfigError, ConfigTypeError
from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import HessianSubscriber
from ikkuna.testing import RecordingBackend
from tests.metrics.probing import evaluated, unchanged
from tests.metrics.running import curves


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def linear(inputs, outputs):
    model = nn.Linear(inputs, outputs, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(random(outputs, inputs, seed=9))
    return model


def eigenvalues(found, top):
    return [found[f"hessian_eigenvalue_{i + 1}", None][0] for i in range(top)]


def check(loss, model, x, y, hessian, **options):
    """Compare all eigenvalues, the trace and the density with those of a matrix."""
    values = torch.linalg.eigvalsh(hessian).flip(0)
    size = len(values)
    data = TensorDataset(x, y)
    found = evaluated(
        lambda **o: HessianSubscriber(loss, data, top=size, steps=size, trace=400, density=20, every=1, **options, **o),
        *(model, unchanged),
    )
    assert eigenvalues(found, size) == pytest.approx(values.tolist(), abs=1e-9)
    assert found["hessian_smallest", None] == [pytest.approx(values[-1].item(), abs=1e-9)]
    assert max(found[f"hessian_residual_{i + 1}", None][0] for i in range(size)) < 1e-7
    [trace], [stderr] = found["hessian_trace", None], found["hessian_stderr", None]
    assert abs(trace - values.sum().item()) < 4 * stderr + 1e-9
    expected = 2 * (hessian.square().sum() - hessian.diagonal().square().sum()) / 400
    assert stderr == pytest.approx(expected.sqrt().item(), rel=0.25)
    [density] = found["hessian_density", None]
    assert density.num == size
    assert sum(density.bucket_counts) == pytest.approx(size)
    assert density.sum == pytest.approx(values.sum().item(), rel=0.3)
    assert density.sum_squares == pytest.approx(values.square().sum().item(), rel=0.3)


def test_linear_regression():
    x, y = random(40, 6), random(40, 1, seed=1)
    check(mse_loss, linear(6, 1), x, y, 2 / 40 * x.T @ x)


def test_logistic_regression():
    x, model = random(40, 5), linear(5, 1)
    labels = (random(40, 1, seed=1) > 0).double()
    p = model(x).sigmoid().detach()
    check(nn.BCEWithLogitsLoss(), model, x, labels, x.T @ (p * (1 - p) * x) / 40)


def test_softmax_regression():
    x, model = random(40, 3), linear(3, 3)
    labels = torch.arange(40) % 3
    p = model(x).softmax(1).detach()
    blocks = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    hessian = torch.einsum("nab,ni,nj->aibj", blocks, x, x).reshape(9, 9) / 40
    values = torch.linalg.eigvalsh(hessian).flip(0)
    found = evaluated(
        lambda **o: HessianSubscriber(cross_entropy, TensorDataset(x, labels), top=4, steps=9, every=1, **o),
        *(model, unchanged),
    )
    assert eigenvalues(found, 4) == pytest.approx(values[:4].tolist(), abs=1e-10)


def test_five_steps_are_exact_for_five_eigenvalues():
    turn = torch.linalg.qr(random(5, 5))[0]
    matrix = turn @ torch.diag(torch.tensor([5.0, 2.0, 1.0, -3.0, 0.0], dtype=torch.float64)) @ turn.T
    model = linear(5, 1)
    found = evaluated(
        lambda **o: HessianSubscriber(
            lambda output, _: (output @ matrix * output).sum() / 2,
            *(TensorDataset(torch.zeros(1), torch.zeros(1)),),
            **{"forward": lambda m, x: m.weight, "steps": 5, "every": 1, **o},
        ),
        *(model, unchanged),
    )
    assert eigenvalues(found, 5) == pytest.approx([5, 2, 1, 0, -3], abs=1e-14)
    assert found["hessian_smallest", None] == [pytest.approx(-3, abs=1e-14)]


def whole_hessian(model, loss, x, y):
    """The matrix, by torch's own reverse-mode Jacobian."""
    names, values = zip(*model.named_parameters(), strict=True)

    def of(flat):
        parts = flat.split([v.numel() for v in values])
        given = {n: p.view_as(v) for n, p, v in zip(names, parts, values, strict=True)}
        return loss(torch.func.functional_call(model, given, (x,)), y)

    return torch.autograd.functional.hessian(of, torch.cat([v.detach().reshape(-1) for v in values]))


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 3)),
    ).double()


def test_a_network_with_batch_norm_and_dropout_is_taken_in_evaluation_mode():
    model, x, y = network(), random(20, 4), torch.arange(20) % 3
    model(random(50, 4, seed=3))  # gives the batch norm statistics
    expected = torch.linalg.eigvalsh(whole_hessian(model.eval(), cross_entropy, x, y))
    model.train()
    found = evaluated(
        lambda **o: HessianSubscriber(cross_entropy, TensorDataset(x, y), top=3, steps=40, every=1, **o),
        *(model, unchanged),
    )
    assert eigenvalues(found, 3) == pytest.approx(expected.flip(0)[:3].tolist(), rel=1e-8)
    assert found["hessian_smallest", None] == [pytest.approx(expected[0].item(), rel=1e-6)]


def test_parameters_can_be_those_of_some_modules():
    model, x, y = network().eval(), random(20, 4), torch.arange(20) % 3
    whole = whole_hessian(model, cross_entropy, x, y)
    expected = torch.linalg.eigvalsh(whole[-21:, -21:])[-1].item()
    found = evaluated(
        lambda **o: HessianSubscriber(cross_entropy, TensorDataset(x, y), top=1, modules="4", every=1, **o),
        *(model, unchanged),
    )
    assert eigenvalues(found, 1) == [pytest.approx(expected, rel=1e-6)]


def test_gradients_are_unchanged_and_not_computed_for_the_model():
    model, x, y = network(), random(20, 4), torch.arange(20) % 3
    model[0].weight.requires_grad_(False)
    cross_entropy(model(x), y).backward()
    before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    evaluated(lambda **o: HessianSubscriber(cross_entropy, TensorDataset(x, y), top=1, every=1, **o), model, unchanged)
    for p, grad in zip(model.parameters(), before, strict=True):
        assert (p.grad is None) == (grad is None)
        assert grad is None or torch.equal(p.grad, grad)


class Attending(nn.Module):
    """One attention, by the fused kernel if torch takes that."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        y = self.fc(x).unflatten(-1, (2, 4)).transpose(1, 2)
        return scaled_dot_product_attention(y, y, y).mean((1, 2))


@pytest.mark.parametrize("model", [Attending(), nn.LSTM(8, 4, batch_first=True), nn.TransformerEncoderLayer(8, 2, 8)])
def test_attention_and_recurrent_networks_have_second_derivatives(model):
    x = torch.randn(5, 3, 8)

    def loss(outputs, labels):
        return (outputs[0] if isinstance(outputs, tuple) else outputs).square().sum()

    found = evaluated(
        lambda **o: HessianSubscriber(loss, TensorDataset(x, torch.zeros(5)), top=1, every=1, **o), model, unchanged
    )
    assert math.isfinite(eigenvalues(found, 1)[0])
    assert eigenvalues(found, 1)[0] > 0


class Once(torch.autograd.Function):
    """A function without a second derivative."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return grad * 2


def test_a_loss_that_is_not_twice_differentiable_is_refused_first_and_nan_later(caplog):
    data = TensorDataset(torch.ones(4, 3), torch.zeros(4, 2))
    losses = [mse_loss]
    metrics = []

    def make(loss, **options):
        metrics.append(HessianSubscriber(loss, data, top=1, every=1, **options))
        return metrics[-1]

    bad = lambda outputs, labels: Once.apply(outputs).square().sum()  # noqa: E731
    with pytest.raises(ConfigError, match="the loss cannot be differentiated twice"):
        evaluated(lambda **o: make(bad, **o), nn.Linear(3, 2))

    def spoil(model):
        metrics[-1].loss = bad

    found = evaluated(lambda **o: make(losses[0], **o), nn.Linear(3, 2), unchanged, spoil)
    assert [math.isnan(v) for v in found["hessian_eigenvalue_1", None]] == [False, True]
    assert "cannot be differentiated twice" in caplog.text


def test_a_loss_that_is_not_one_number_is_refused():
    data = TensorDataset(torch.ones(4, 3), torch.zeros(4, 2))
    with pytest.raises(ConfigError, match=r"a loss of one number, got the shape \(4, 2\)"):
        evaluated(lambda **o: HessianSubscriber(lambda a, b: a - b, data, **o), nn.Linear(3, 2))


def test_nothing_to_train_is_refused():
    data = TensorDataset(torch.ones(4, 3), torch.zeros(4, 2))
    with pytest.raises(ConfigError, match="at least one parameter that requires a gradient"):
        evaluated(lambda **o: HessianSubscriber(mse_loss, data, **o), nn.Linear(3, 2).requires_grad_(False))


def test_a_network_that_has_exploded_has_nan_and_a_reason(caplog):
    data = TensorDataset(torch.ones(4, 3), torch.zeros(4, 2))

    def explode(model):
        with torch.no_grad():
            model.weight.fill_(math.nan)

    found = evaluated(
        lambda **o: HessianSubscriber(nn.L1Loss(), data, top=2, trace=2, density=2, every=1, **o),
        *(nn.Sequential(nn.Linear(3, 2), nn.Tanh())[0], explode),
    )
    assert all(math.isnan(v) for values in found.values() for v in values)
    assert ("hessian_density", None) not in found
    assert "hessian_eigenvalue_1 is NaN: the loss or a derivative is not finite" in caplog.text


def test_more_eigenvalues_than_there_are_have_nan():
    found = evaluated(
        lambda **o: HessianSubscriber(
            mse_loss, TensorDataset(torch.ones(4, 1), torch.zeros(4, 1)), top=3, every=1, **o
        ),
        *(nn.Linear(1, 1, bias=False), unchanged),
    )
    assert eigenvalues(found, 1) == [pytest.approx(2.0)]
    assert [math.isnan(found[f"hessian_eigenvalue_{i}", None][0]) for i in (2, 3)] == [True, True]


def test_every_evaluation_starts_from_the_same_random_vector():
    model, x, y = network(), random(20, 4), torch.arange(20) % 3
    found = evaluated(
        lambda **o: HessianSubscriber(cross_entropy, TensorDataset(x, y), top=1, steps=3, trace=3, every=1, **o),
        *(model, unchanged, unchanged),
    )
    assert all(values[0] == values[1] for values in found.values())


def test_products_are_counted():
    """Top five cost at most 25 products, besides the one at registration."""
    from ikkuna.numerics.curvature import hessian_product as curvature

    calls, product = [], curvature.HessianProduct.__call__
    x, y = random(20, 4), torch.arange(20) % 3
    recording, bus = RecordingBackend(), MessageBus()
    with pytest.MonkeyPatch.context() as patch, Exporter(message_bus=bus, on_error="raise") as exporter:
        patch.setattr(curvature.HessianProduct, "__call__", lambda self, v: calls.append(1) or product(self, v))
        model = exporter(network())
        bus.register_subscriber(HessianSubscriber(cross_entropy, TensorDataset(x, y), every=1, backend=recording))
        calls.clear()
        session = exporter._session
        session.cycle.apply(session.context.tracker.forward_begins(0))
        session.context.tracker.forward_ends(0)
        exporter.step()
    assert len(calls) <= 25
    expected = torch.linalg.eigvalsh(whole_hessian(model.eval(), cross_entropy, x, y)).flip(0)
    assert eigenvalues(curves(recording), 5) == pytest.approx(expected[:5].tolist(), rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"loss": 3}, ConfigTypeError, "needs a loss of outputs and labels, got int"),
        ({"top": 0}, ConfigError, "needs top >= 1, got 0"),
        ({"top": 5, "steps": 4}, ConfigError, "needs steps >= 5, got 4"),
        ({"trace": -1}, ConfigError, "needs trace >= 0, got -1"),
        ({"density": True}, ConfigError, "needs density >= 0, got True"),
        ({"batch_size": 5}, ConfigError, "one batch; set its size with samples="),
        ({"samples": 9}, ConfigError, "samples=9, but the probe set has 4 items"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, message):
    data = TensorDataset(torch.ones(4, 3), torch.zeros(4, 2))
    with pytest.raises(error, match=message):
        HessianSubscriber(**{"loss": mse_loss, "dataset": data, **arguments})
