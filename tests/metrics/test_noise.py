"""Metrics of a gradient's noise, in training loops whose gradients have a known mean and covariance."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

from ikkuna.errors import ConfigError
from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import GradientNoiseScaleSubscriber, GradientSNRSubscriber
from ikkuna.numerics.noise import noise_scale
from ikkuna.testing import RecordingBackend
from tests.metrics.running import curves

WIDTH, TRACE = 140, 330.0


class Known(nn.Module):
    """The mean of <w, x>: the gradient of w is the mean of x, whatever w is."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.layer = nn.Linear(width, 1, bias=False)

    def forward(self, x):
        return self.layer(x).mean()


def samples(generator, size):
    """Draw gradients of samples with |G|^2 = 1 and tr Sigma = 330."""
    return WIDTH**-0.5 + math.sqrt(TRACE / WIDTH) * torch.randn(size, WIDTH, generator=generator)


def trained(make, steps, micro_batches, size, draw=samples, model=None, divide=True, after_backward=lambda p: None):
    """Train with accumulated gradients; return kind → values, and the gradient of each micro-batch of each step."""
    recording, generator = RecordingBackend(), torch.Generator().manual_seed(0)
    model = model or Known()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    with Exporter(message_bus=MessageBus(), on_error="raise") as exporter:
        exporter.add_modules(model)
        exporter.message_bus.register_subscriber(make(backend=recording))
        for _ in range(steps):
            optimizer.zero_grad()
            batches = [draw(generator, size) for _ in range(micro_batches)]
            for x in batches:
                (model(x) / (micro_batches if divide else 1)).backward()
            after_backward(model.parameters())
            optimizer.step()
            seen.append([x.mean(0).double().numpy() for x in batches])
    return {kind: values for (kind, _), values in curves(recording).items()}, seen


def ratios(seen, size):
    """Return the noise scale that each step alone would tell."""
    found = []
    for step in seen:
        whole = sum(step) / len(step)
        noise = noise_scale(np.mean([g @ g for g in step]), whole @ whole, size, len(step) * size)
        found.append(noise.trace / noise.grad_sq)
    return found


def test_the_noise_scale_of_a_model_with_known_covariance():
    found, seen = trained(lambda **o: GradientNoiseScaleSubscriber(beta=0.9999, **o), 1500, 2, 16)
    assert found["gradient_noise_scale"][-1] == pytest.approx(330, rel=0.1)
    assert found["gradient_covariance_trace"][-1] == pytest.approx(330, rel=0.01)
    assert found["gradient_square"][-1] == pytest.approx(1, rel=0.1)
    assert found["noise_hides_gradient"][-1] == 0
    assert np.median(ratios(seen, 16)) < 165  # or the test would say nothing


@pytest.mark.parametrize("divide", [True, False])
def test_both_terms_are_those_of_the_formula(divide):
    found, seen = trained(lambda **o: GradientNoiseScaleSubscriber(beta=0.0, **o), 6, 3, 4, divide=divide)
    scale = 1 if divide else 9
    for i, step in enumerate(seen):
        whole = sum(step) / 3
        expected = noise_scale(np.mean([g @ g for g in step]), whole @ whole, 4, 12)
        assert found["gradient_covariance_trace"][i] == pytest.approx(scale * expected.trace, rel=1e-5)
        assert found["gradient_square"][i] == pytest.approx(scale * expected.grad_sq, rel=1e-4, abs=1e-4)
        assert found["noise_hides_gradient"][i] == (expected.grad_sq <= 0)
        assert found["gradient_noise_scale"][i] == pytest.approx(expected.noise_scale, rel=1e-3, nan_ok=True)


def test_where_noise_hides_the_gradient_there_is_no_scale():
    def opposite(generator, size):
        opposite.sign = -opposite.sign
        return opposite.sign * torch.ones(size, WIDTH)

    opposite.sign = 1
    found, _ = trained(GradientNoiseScaleSubscriber, 2, 2, 4, opposite)
    assert found["gradient_square"] == pytest.approx([-WIDTH, -WIDTH])
    assert found["noise_hides_gradient"] == [1, 1]
    assert all(map(math.isnan, found["gradient_noise_scale"]))


def test_clipping_does_not_change_the_noise_scale():
    def clip(parameters):
        nn.utils.clip_grad_norm_(parameters, 1e-3)

    plain, _ = trained(GradientNoiseScaleSubscriber, 3, 4, 8)
    clipped, _ = trained(GradientNoiseScaleSubscriber, 3, 4, 8, after_backward=clip)
    assert clipped == plain


@pytest.mark.parametrize("subsample", [1, 2])
def test_without_accumulation_steps_stand_for_micro_batches(subsample):
    found, seen = trained(
        lambda **o: GradientNoiseScaleSubscriber(16, steps=4, beta=0.0, subsample=subsample, **o), 16, 1, 16
    )
    gradients = [step[0] for step in seen][::subsample]
    windows = [gradients[i : i + 4] for i in range(0, len(gradients), 4)]
    for i, window in enumerate(windows):
        pairs = [a @ b for a, b in itertools.combinations(window, 2)]
        assert found["gradient_square"][i] == pytest.approx(np.mean(pairs), rel=1e-4, abs=1e-3)
    assert len(found["gradient_noise_scale"]) == len(windows)


def test_one_gradient_in_a_window_has_no_noise_and_is_logged_once(caplog):
    found, _ = trained(GradientNoiseScaleSubscriber, 3, 1, 4)
    assert all(math.isnan(value) for values in found.values() for value in values)
    assert caplog.text.count("accumulate micro-batches, set steps=2") == 1


def test_a_broken_step_is_left_out():
    def broken(generator, size):
        broken.calls += 1
        return samples(generator, size) * (math.nan if broken.calls == 3 else 1)

    broken.calls = 0
    found, _ = trained(GradientNoiseScaleSubscriber, 3, 2, 4, broken)
    for values in found.values():
        assert values[1] == pytest.approx(values[0], nan_ok=True)
        assert math.isfinite(found["gradient_covariance_trace"][2])


def test_a_repeated_step_starts_a_new_window():
    """A gradient scaler throws gradients away: they are no micro-batches of the next step."""
    recording, model = RecordingBackend(), Known()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    with Exporter(message_bus=MessageBus(), on_error="raise") as exporter:
        exporter.add_modules(model)
        exporter.message_bus.register_subscriber(GradientNoiseScaleSubscriber(beta=0.0, backend=recording))
        for is_kept in (False, True):
            batches = [samples(generator, 4) for _ in range(2)]
            for x in batches:
                (model(x) / 2).backward()
            if is_kept:
                optimizer.step()
            optimizer.zero_grad()
    [value] = curves(recording)["gradient_square", None]
    one, other = (x.mean(0) for x in batches)
    assert value == pytest.approx((one @ other).item(), rel=1e-4)


@pytest.mark.parametrize("reduction", ["mean", "median"])
def test_the_snr_over_micro_batches(reduction):
    found, seen = trained(lambda **o: GradientSNRSubscriber(window=5, reduction=reduction, **o), 3, 5, 4)
    assert len(found["weight_micro_gradients_snr"]) == 3
    for value, step in zip(found["weight_micro_gradients_snr"], seen, strict=True):
        g = np.array(step)
        ratio = g.mean(0) ** 2 / g.var(0, ddof=1)
        expected = ratio.mean() if reduction == "mean" else np.median(ratio)
        assert value == pytest.approx(expected, rel=1e-4)


def test_the_snr_over_steps_comes_at_the_end_of_each_window():
    found, seen = trained(lambda **o: GradientSNRSubscriber("weight_gradients", window=3, **o), 7, 1, 4)
    assert len(found["weight_gradients_snr"]) == 2
    g = np.array([step[0] for step in seen[3:6]])
    ratio = g.mean(0) ** 2 / g.var(0, ddof=1)
    assert found["weight_gradients_snr"][1] == pytest.approx(np.median(ratio), rel=1e-4)


def test_gradients_that_do_not_change_have_no_snr():
    found, _ = trained(lambda **o: GradientSNRSubscriber(window=2, **o), 1, 2, 4, lambda g, n: torch.ones(n, WIDTH))
    assert math.isnan(found["weight_micro_gradients_snr"][0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GradientNoiseScaleSubscriber(0), "batch_size > 0 in samples, got 0"),
        (lambda: GradientNoiseScaleSubscriber(math.nan), "batch_size > 0 in samples, got nan"),
        (lambda: GradientNoiseScaleSubscriber(steps=0), "steps >= 1, got 0"),
        (lambda: GradientNoiseScaleSubscriber(beta=1), r"in \[0, 1\), got 1"),
        (lambda: GradientNoiseScaleSubscriber(publishes="a"), "publishes= needs 4 names"),
        (
            lambda: GradientSNRSubscriber("activations"),
            "needs one of the kinds weight_micro_gradients, .*; got 'activations'",
        ),
        (lambda: GradientSNRSubscriber(window=1), "window >= 2, got 1"),
        (lambda: GradientSNRSubscriber(reduction="max"), "'mean' or 'median', got 'max'"),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_ranks_and_steps_are_not_both_micro_batches():
    with pytest.raises(ConfigError, match="takes ranks=True or steps > 1, got both"):
        GradientNoiseScaleSubscriber(ranks=True, steps=2)
