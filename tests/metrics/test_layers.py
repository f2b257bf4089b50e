"""Metrics of what is wrong with a layer: dead units, saturation, lost precision, doubt."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ikkuna.errors import ConfigError
from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import (
    DeadUnitsSubscriber,
    PerplexitySubscriber,
    PrecisionSubscriber,
    SaturationSubscriber,
)
from ikkuna.numerics.layers import active_units
from ikkuna.testing import RecordingBackend
from tests.metrics.running import curves, watched
from tests.metrics.strategies import numbers, tensors
from tests.zoo import CASES, Loop

FEW = settings(deadline=None, max_examples=60)


def dead_and_dormant(steps, inactivity=0.01, tau=0.025):
    """Return both shares of (position, unit) arrays of a window."""
    x = np.concatenate(steps)
    active, strength = (x > 0).mean(0), np.abs(x).mean(0)
    score = strength / strength.mean() if strength.any() else strength
    return ((active < inactivity) | (active == 0)).mean(), (score <= tau).mean()


@FEW
@given(st.integers(0, 99), st.sampled_from([(5, 4), (2, 3, 4), (3, 4, 2, 2)]), st.integers(1, 3))
def test_dead_and_dormant_units_over_a_window(seed, shape, window):
    generator = torch.Generator().manual_seed(seed)
    axis = 1 if len(shape) == 4 else -1
    steps = []
    for _ in range(4):
        x = torch.randn(shape, generator=generator).relu().movedim(axis, -1)
        x = x * torch.tensor([0.0, 1e-3, 1.0, float(torch.rand((), generator=generator) > 0.5)])
        steps.append(x.movedim(-1, axis))
    found = watched(lambda **o: DeadUnitsSubscriber(window=window, **o), *steps)
    flat = [x.movedim(axis, -1).reshape(-1, 4).double().numpy() for x in steps]
    expected = [dead_and_dormant(flat[max(0, i + 1 - window) : i + 1]) for i in range(4)]
    assert found["activations_dead"] == pytest.approx([dead for dead, _ in expected])
    assert found["activations_dormant"] == pytest.approx([dormant for _, dormant in expected])


@FEW
@given(st.integers(0, 99), st.sampled_from([(6,), (5, 4), (2, 3, 4), (3, 4, 2, 2), (2, 4, 3, 2, 2)]), st.integers(1, 3))
def test_units_that_are_never_active_over_a_window(seed, shape, window):
    """Without dormant units and with an inactivity of 0, only the sign of the largest element counts."""
    generator = torch.Generator().manual_seed(seed)
    axis = 1 if len(shape) > 3 else -1
    steps = [torch.randn(shape, generator=generator) - 1.2 for _ in range(4)]
    found = watched(lambda **o: DeadUnitsSubscriber(window=window, inactivity=0, tau=None, **o), *steps)
    units = [x.reshape(-1, 1) if x.ndim == 1 else x.movedim(axis, -1).flatten(0, -2) for x in steps]
    expected = [
        (torch.cat(units[max(0, i + 1 - window) : i + 1]).numpy() <= 0).all(0).mean() for i in range(len(steps))
    ]
    assert found == {"activations_dead": pytest.approx(expected)}


@pytest.mark.parametrize("shape", [(10_000, 3), (1, 100, 3), (7, 3, 40, 50), (1, 3, 200, 100)])
def test_of_a_large_layer_an_equally_spaced_part_is_read(shape):
    """A unit that is always active is active in every part, and one that never is in none; a NaN is no sign of death."""
    axis = 1 if len(shape) > 3 else -1
    x = torch.full(shape, -1.0)
    x.movedim(axis, -1)[..., 0] = 1.0
    x.movedim(axis, -1)[..., 2] = torch.nan
    assert active_units(x, positions=64).tolist() == [1.0, 0.0, 1.0]


def test_a_layer_with_a_huge_negative_bias_is_dead():
    layer = nn.Sequential(nn.Linear(8, 6), nn.ReLU())
    nn.init.constant_(layer[0].bias, -1e3)
    found = watched(lambda **o: DeadUnitsSubscriber(**o), layer(torch.randn(4, 8)).detach())
    assert found == {"activations_dead": [1.0], "activations_dormant": [1.0]}


def test_units_that_do_not_fit_are_left_out():
    """A rectifier shared by layers of different width, a change of width, a tensor without axes, no number at all."""
    wide, narrow = torch.ones(2, 8), torch.zeros(2, 3)
    found = watched(lambda **o: DeadUnitsSubscriber(**o), [wide, narrow], narrow, torch.tensor(1.0), torch.empty(0, 4))
    assert found["activations_dead"] == [0.0, 1.0]
    found = watched(lambda **o: DeadUnitsSubscriber(channel_axis=3, **o), wide)
    assert not found
    found = watched(lambda **o: DeadUnitsSubscriber(**o), torch.full((2, 2), math.nan))
    assert all(math.isnan(v) for values in found.values() for v in values)


@FEW
@given(tensors(empty=True), st.sampled_from(["tanh", "sigmoid"]), st.sampled_from([0.05, 0.2]))
def test_saturation_of_inputs(x, function, slope):
    found = watched(lambda **o: SaturationSubscriber("activations", function, slope=slope, of="input", **o), x)
    values = numbers(x)
    values = values[~np.isnan(values)]
    bound = math.acosh(slope**-0.5) if function == "tanh" else math.acosh(0.5 / slope - 1)
    expected = np.mean(np.abs(values) > bound) if len(values) else math.nan
    assert found["activations_saturation"] == pytest.approx([expected], nan_ok=True)


def test_saturation_of_outputs_is_that_of_inputs():
    x = 3 * torch.randn(1000, generator=torch.Generator().manual_seed(0))
    for function, of in (("tanh", torch.tanh), ("sigmoid", torch.sigmoid)):
        [inputs] = watched(lambda f=function, **o: SaturationSubscriber("activations", f, of="input", **o), x).values()
        [outputs] = watched(lambda f=function, **o: SaturationSubscriber("activations", f, **o), of(x)).values()
        assert inputs == pytest.approx(outputs, abs=2e-3)


LIMITS = {"fp16": (2.0**-25, 2.0**-14, 65520), "e4m3": (2.0**-10, 2.0**-6, 464), "e5m2": (2.0**-17, 2.0**-14, 61440)}


@FEW
@given(st.sampled_from(sorted(LIMITS)), st.integers(0, 99), st.sampled_from([1e-7, 1e-4, 1.0, 1e4]))
def test_lost_precision_is_that_of_thresholds(name, seed, scale):
    x = torch.randn(5000, generator=torch.Generator().manual_seed(seed)) * scale
    x[:500] = 0.0
    found = watched(lambda **o: PrecisionSubscriber("activations", name, exact=True, **o), x)
    flush, normal, over = LIMITS[name]
    a = np.abs(numbers(x))
    nonzero = a[a > 0]
    assert found[f"activations_{name}_underflow"] == pytest.approx([np.mean(nonzero <= flush)])
    assert found[f"activations_{name}_subnormal"] == pytest.approx([np.mean((nonzero > flush) & (nonzero < normal))])
    assert found[f"activations_{name}_overflow"] == pytest.approx([np.mean(a >= over)])


DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@pytest.mark.fault(213)
@pytest.mark.parametrize("name", DTYPES)
def test_every_bfloat16_is_classified_as_by_a_cast(name):
    """The 128 numbers of each sign and exponent are a step of their own.

    A cast to e4m3 may saturate: there 464, the tie between 448 and the next number of the grid, is the last that does not overflow.
    """
    steps = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).reshape(-1, 128)
    found = watched(lambda **o: PrecisionSubscriber("activations", name, **o), *steps)
    expected = {"underflow": [], "subnormal": [], "overflow": []}
    for x in (step[step.isfinite()].float() for step in steps):
        cast = x.to(DTYPES[name]).float()
        nonzero = x != 0
        overflow = x.abs() > 464 if name == "e4m3" else cast.isinf()
        subnormal = (cast != 0) & (x.abs() < torch.finfo(DTYPES[name]).tiny)
        counts = (
            ((cast == 0) & nonzero).sum() / nonzero.sum(),
            subnormal.sum() / nonzero.sum(),
            overflow.float().mean(),
        )
        for values, share in zip(expected.values(), counts, strict=True):
            values.append(share.item())
    for loss, shares in expected.items():
        assert found[f"activations_{name}_{loss}"] == pytest.approx(shares, rel=1e-6, nan_ok=True)


@pytest.mark.fault(213)
@pytest.mark.parametrize("exact", [False, True])
def test_a_tie_that_a_cast_rounds_to_zero_is_an_underflow(exact):
    x = torch.tensor([2.0**-10, 2.0**-10 + 2.0**-17, 464.0, 465.0])
    found = watched(lambda **o: PrecisionSubscriber("activations", "e4m3", exact=exact, **o), x)
    assert list(found.values()) == [[0.25], [0.25], [0.25]]


def test_a_sample_estimates_the_shares_of_all_elements():
    x = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0)) * 1e-7
    sampled, exact = (
        watched(lambda exact=exact, **o: PrecisionSubscriber("activations", exact=exact, **o), x, x, [x, x[:1000]])
        for exact in (False, True)
    )
    for kind, values in exact.items():
        assert sampled[kind] == pytest.approx(values, abs=0.006)
    first, second, _ = sampled["activations_fp16_underflow"]
    assert first != second, "each step draws anew"


def test_a_sample_counts_for_all_elements_of_its_call():
    calls = [torch.full((1_000_000,), 1e-12), torch.ones(50_000)]
    found = watched(lambda **o: PrecisionSubscriber("activations", **o), calls)
    assert found["activations_fp16_underflow"] == pytest.approx([20 / 21])


def test_a_loss_scale_moves_the_thresholds():
    x = torch.randn(4000, generator=torch.Generator().manual_seed(0)) * 1e-6
    plain = watched(lambda **o: PrecisionSubscriber("activations", scale=1024.0, **o), x)
    scaled = watched(lambda **o: PrecisionSubscriber("activations", **o), x * 1024)
    assert plain == scaled


def test_nothing_to_divide_by():
    found = watched(lambda **o: PrecisionSubscriber("activations", exact=True, **o), torch.zeros(4))
    assert found["activations_fp16_overflow"] == [0.0]
    assert math.isnan(found["activations_fp16_underflow"][0])
    found = watched(lambda **o: PrecisionSubscriber("activations", **o), torch.full((4,), math.nan))
    assert all(math.isnan(v) for values in found.values() for v in values)


def test_perplexity_is_that_of_the_mean_loss():
    loop = Loop(CASES["mlp-accumulated"])
    recording, bus, losses = RecordingBackend(), MessageBus(), []
    loop.loss.register_forward_hook(lambda module, args, output: losses.append(output.item()))
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(loop.model)
        exporter.set_loss(loop.loss)
        bus.register_subscriber(PerplexitySubscriber(backend=recording))
        loop.run(1)
    assert curves(recording)["perplexity", None] == pytest.approx([math.exp(np.mean(losses))])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DeadUnitsSubscriber(window=0), "window >= 1, got 0"),
        (lambda: DeadUnitsSubscriber(inactivity=2), "inactivity in \\[0, 1\\] and tau >= 0, got 2 and 0.025"),
        (lambda: DeadUnitsSubscriber(tau=-1), "got 0.01 and -1"),
        (lambda: SaturationSubscriber("activations", "relu"), "'tanh' or 'sigmoid', .* got 'relu'"),
        (lambda: SaturationSubscriber("activations", "sigmoid", slope=0.3), "between 0 and 0.25, got 0.3"),
        (lambda: PrecisionSubscriber("weights", "fp4"), "needs one of the formats fp16, bf16, e4m3, e5m2, got 'fp4'"),
        (lambda: PrecisionSubscriber("weights", scale=0.0), "scale above 0, got 0.0"),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
