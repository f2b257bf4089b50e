"""Counts and entropies of routers against numpy in float64."""

import math

import numpy as np
import pytest
import torch

from ikkuna.errors import ConfigError
from ikkuna.numerics.attention import dispatch_row, router_figures, router_row


def reference(logits, top_k, capacity_factor=None):
    """Entropy, z-loss, load and dropped share, one token at a time."""
    z = logits.double().numpy().reshape(-1, logits.shape[-1])
    tokens, experts = z.shape
    counts, entropies, squares = np.zeros(experts), [], []
    for token in z:
        p = np.exp(token - token.max())
        p /= p.sum()
        entropies.append(-sum(v * math.log(v) for v in p if v > 0))
        squares.append((token.max() + math.log(np.exp(token - token.max()).sum())) ** 2)
        counts[np.argsort(-token)[:top_k]] += 1
    dropped = math.nan
    if capacity_factor is not None:
        capacity = math.ceil(capacity_factor * top_k * tokens / experts)
        dropped = sum(max(0, n - capacity) for n in counts) / (tokens * top_k)
    return np.mean(entropies), np.mean(squares), counts * experts / counts.sum(), dropped


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("shape", "top_k", "factor"), [((3, 7, 5), 2, 1.0), ((40, 8), 1, None), ((1, 2), 2, 1.25)])
def test_figures_are_those_of_the_definition(dtype, shape, top_k, factor):
    logits = (4 * torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).to(dtype)
    found = router_figures(router_row(logits, top_k, factor).numpy())
    entropy, z_loss, load, dropped = reference(logits, top_k, factor)
    assert found.entropy == pytest.approx(entropy, rel=1e-5)
    assert found.z_loss == pytest.approx(z_loss, rel=1e-5)
    assert found.load.tolist() == pytest.approx(load.tolist())
    assert found.dropped == pytest.approx(dropped, nan_ok=True)


def test_rows_of_several_calls_are_summed():
    logits = torch.randn(30, 6, generator=torch.Generator().manual_seed(2))
    parts = sum(router_row(part, 2) for part in logits.split(11))
    whole = router_row(logits, 2)
    torch.testing.assert_close(parts, whole, equal_nan=True)


def test_each_call_has_its_own_capacity():
    """Both calls overload one expert; together the load is even."""
    one, other = torch.tensor([[1.0, 0.0]] * 4), torch.tensor([[0.0, 1.0]] * 4)
    row = router_row(one, 1, 1.0) + router_row(other, 1, 1.0)
    assert router_figures(row.numpy()).dropped == 0.5
    assert router_figures(router_row(torch.cat([one, other]), 1, 1.0).numpy()).dropped == 0


def test_chosen_experts_give_the_same_load_as_logits():
    logits = torch.randn(30, 6, generator=torch.Generator().manual_seed(3))
    chosen = dispatch_row(logits.topk(2).indices, 6)
    assert chosen[:6].tolist() == router_row(logits, 2)[:6].tolist()
    figures = router_figures(chosen.numpy())
    assert math.isnan(figures.entropy)
    assert figures.dropped == 0


def test_large_logits_do_not_overflow():
    figures = router_figures(router_row(torch.tensor([[1e4, -1e4, 0.0]]), 1).numpy())
    assert figures.entropy == 0
    assert figures.z_loss == pytest.approx(1e8)


def test_excluded_experts_are_not_chosen():
    logits = torch.tensor([[0.0, -math.inf, 0.0], [0.0, -math.inf, -math.inf]])
    row = router_row(logits, 2)
    assert row[:3].tolist() == [2, 0, 1]
    assert router_figures(row.numpy()).entropy == pytest.approx(math.log(2) / 2)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_token_that_is_not_finite_chooses_no_expert(bad):
    figures = router_figures(router_row(torch.tensor([[bad, 0.0], [0.0, 1.0]]), 1).numpy())
    assert figures.load.tolist() == [0, 2]
    assert math.isnan(figures.z_loss)


def test_without_tokens_everything_is_undefined():
    figures = router_figures(router_row(torch.zeros(0, 3), 1, 1.0).numpy())
    assert np.isnan([figures.entropy, figures.z_loss, figures.dropped, *figures.load]).all()


def test_other_inputs_are_refused():
    with pytest.raises(ConfigError, match=r"needs logits \(…, experts\), got the shape \(\)"):
        router_row(torch.tensor(1.0), 1)
    with pytest.raises(ConfigError, match=r"needs integers \(…, k\), got torch.float32 \(2, 2\)"):
        dispatch_row(torch.ones(2, 2), 3)
