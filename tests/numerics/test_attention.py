"""Attention entropy against the dense softmax in float64."""

import math

import pytest
import torch

from ikkuna.errors import ConfigError
from ikkuna.numerics import attention
from ikkuna.numerics.attention import attention_means, attention_row, scores_row


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def dense(q, k, allowed=None, bias=None, scale=None):
    """Entropy, its share of the maximum, and largest logit of each head, from the full matrix."""
    q, k = q.double(), k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    raw = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    allowed = torch.ones_like(raw, dtype=torch.bool) if allowed is None else allowed.expand_as(raw)
    logits = (raw if bias is None else raw + bias).masked_fill(~allowed, -math.inf)
    p = logits.softmax(-1)
    entropy = torch.special.entr(p).sum(-1)
    count = allowed.sum(-1)
    heads = []
    for h in range(q.shape[1]):
        some, several = count[:, h] > 0, count[:, h] > 1
        share = entropy[:, h][several] / count[:, h][several].log()
        largest = raw.masked_fill(~allowed, -math.inf)[:, h].max()
        heads.append((entropy[:, h][some].mean().item(), share.mean().item(), largest.item()))
    return heads


def check(row, expected):
    entropy, share = attention_means(row.sums)
    for h, (e, s, m) in enumerate(expected):
        assert entropy[h].item() == pytest.approx(e, abs=1e-6)
        assert share[h].item() == pytest.approx(s, abs=1e-6, nan_ok=True)
        assert row.max_logit[h].item() == pytest.approx(m, rel=1e-5)


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("block", [1 << 22, 100])
def test_plain_and_grouped_attention(key_heads, block, monkeypatch):
    monkeypatch.setattr(attention, "_BLOCK", block)
    q, k = random(2, 4, 17, 8), random(2, key_heads, 13, 8, seed=1)
    check(attention_row(q, k), dense(q, k))
    check(attention_row(q, k, scale=2.0), dense(q, k, scale=2.0))
    check(attention_row(q[0], k[0]), dense(q[:1], k[:1]))


@pytest.mark.parametrize("block", [1 << 22, 100])
def test_masks_and_biases(block, monkeypatch):
    monkeypatch.setattr(attention, "_BLOCK", block)
    q, k = random(2, 3, 11, 8), random(2, 3, 11, 8, seed=1)
    causal = torch.ones(11, 11, dtype=torch.bool).tril()
    check(attention_row(q, k, is_causal=True), dense(q, k, causal))
    check(attention_row(q, k, mask=causal), dense(q, k, causal))
    padding = torch.ones(2, 1, 1, 11, dtype=torch.bool)
    padding[1, ..., 6:] = False
    check(attention_row(q, k, mask=padding), dense(q, k, padding))
    check(attention_row(q, k, mask=padding, is_causal=True), dense(q, k, padding & causal))
    bias = random(3, 11, 11, seed=2)
    check(attention_row(q, k, mask=bias), dense(q, k, bias=bias.double()))
    hard = torch.zeros(11, 11).masked_fill(~causal, -math.inf)
    check(attention_row(q, k, mask=hard), dense(q, k, causal))


def test_uniform_and_collapsed_heads():
    zeros = torch.zeros(1, 1, 4, 8)
    row = attention_row(zeros, zeros)
    assert attention_means(row.sums)[0].item() == pytest.approx(math.log(4))
    assert attention_means(row.sums)[1].item() == pytest.approx(1)
    assert row.max_logit.item() == 0
    sharp = 1e3 * torch.eye(8)[:4].reshape(1, 1, 4, 8)
    row = attention_row(sharp, sharp)
    assert attention_means(row.sums)[0].item() == 0
    assert row.max_logit.item() == pytest.approx(1e6 / math.sqrt(8))


def test_large_logits_do_not_cancel():
    """Two keys with the same huge logit leave an entropy of ln 2."""
    q, k = torch.full((1, 1, 1, 4), 3e3), torch.ones(1, 1, 2, 4) * 7.3
    assert attention_means(attention_row(q, k).sums)[0].item() == pytest.approx(math.log(2), abs=1e-6)


def test_queries_with_no_key_or_one_are_left_out():
    q, k = random(1, 2, 3, 4), random(1, 2, 3, 4, seed=1)
    mask = torch.tensor([[False, False, False], [True, False, False], [True, True, False]])
    row = attention_row(q, k, mask=mask)
    assert row.sums[:, 1].tolist() == [2, 2]
    assert row.sums[:, 3].tolist() == [1, 1]
    nothing = attention_row(q, k, mask=torch.zeros(3, 3, dtype=torch.bool))
    assert all(m.isnan().all() for m in attention_means(nothing.sums))
    assert nothing.max_logit.tolist() == [-math.inf] * 2


def test_calls_add_up():
    q, k = random(4, 2, 5, 8), random(4, 2, 9, 8, seed=1)
    whole, parts = attention_row(q, k), [attention_row(q[i : i + 2], k[i : i + 2]) for i in (0, 2)]
    assert torch.allclose(whole.sums, parts[0].sums + parts[1].sums)
    assert torch.equal(whole.max_logit, torch.maximum(parts[0].max_logit, parts[1].max_logit))


def test_a_nan_stays_in_its_head():
    q, k = random(1, 2, 3, 4), random(1, 2, 3, 4, seed=1)
    q[0, 1, 0, 0] = math.nan
    row = attention_row(q, k)
    assert row.max_logit.isnan().tolist() == [False, True]
    assert attention_means(row.sums)[0].isnan().tolist() == [False, True]


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (1, 2, 0, 4)])
def test_nothing_to_attend(shape):
    x = torch.empty(shape)
    assert attention_means(attention_row(x, x).sums)[0].isnan().all()
    keyless = attention_row(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 0, 4))
    assert keyless.sums.tolist() == [[0, 0, 0, 0]]


def test_half_precision_is_widened():
    q, k = random(1, 1, 5, 8), random(1, 1, 5, 8, seed=1)
    got = attention_row(q.bfloat16().requires_grad_(), k.bfloat16())
    check(got, dense(q.bfloat16(), k.bfloat16()))


@pytest.mark.parametrize("shape", [(2, 3, 5, 8), (2, 4, 5, 9), (3, 4, 5, 8), (2, 0, 5, 8), (5, 8)])
def test_shapes_that_do_not_belong_together_are_refused(shape):
    with pytest.raises(ConfigError, match="attention needs"):
        attention_row(torch.ones(2, 4, 5, 8), torch.ones(shape))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_given_scores_are_measured_as_those_of_queries_and_keys(dtype):
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 3, 4, 6, 8, dtype=torch.float64, generator=generator).unbind(0)
    mask = torch.ones(6, 6).tril().bool()
    expected = attention_row(query, key, mask)
    for hidden in (-math.inf, torch.finfo(dtype).min):
        scores = (query @ key.mT * 8**-0.5).to(dtype).masked_fill(~mask, hidden)
        largest, entropy = scores_row(scores).unbind(1)
        tolerance = 1e-12 if dtype is torch.float64 else 1e-5 if dtype is torch.float32 else 2e-3
        assert torch.allclose(largest, expected.max_logit, rtol=tolerance)
        assert torch.allclose(-entropy, attention_means(expected.sums)[0], rtol=tolerance)


def test_scores_with_a_nan_or_without_an_unmasked_key():
    scores = torch.zeros(2, 2, 3)
    scores[0, 0, 0], scores[1] = math.nan, -math.inf
    assert str(scores_row(scores).tolist()) == "[[nan, nan], [-inf, nan]]"
