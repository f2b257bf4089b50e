"""Attention through the subscriber, against the dense softmax in float64."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.data import Dataset

from ikkuna.errors import ConfigError
from ikkuna.export.subscriber import AttentionSubscriber
from tests.metrics.probing import evaluated, unchanged
from tests.numerics.test_attention import dense

BATCH, LENGTH, WIDTH, HEADS = 3, 6, 8, 2


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Attending(nn.Module):
    """Calls an attention with masks of one's choice."""

    def __init__(self, attention, **masks):
        super().__init__()
        self.attention = attention
        self.masks = masks

    def forward(self, x):
        given = {name: mask[: len(x)] if name == "key_padding_mask" else mask for name, mask in self.masks.items()}
        x = x if self.attention.batch_first else x.transpose(0, 1)
        return self.attention(x, x, x, **given)[0]


def multihead(**options):
    torch.manual_seed(0)
    made = nn.MultiheadAttention(WIDTH, HEADS, **{"batch_first": True, **options})
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made


def weights_of(attention, x, **masks):
    """Return the entropy and evenness of the weights that torch itself gives out, by head."""
    attention = attention.double().eval()
    x = x.double() if attention.batch_first else x.double().transpose(0, 1)
    given = {n: m.double() if m.is_floating_point() else m for n, m in masks.items()}
    p = attention(x, x, x, need_weights=True, average_attn_weights=False, **given)[1]
    entropy = torch.special.entr(p).sum(-1)
    count = (p > 0).sum(-1)
    attention.float()
    return [
        (entropy[:, h].mean().item(), (entropy[:, h] / count[:, h].log())[count[:, h] > 1].mean().item())
        for h in range(p.shape[1])
    ]


CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
PADDING = torch.arange(LENGTH) >= torch.tensor([[6], [4], [3]])
MASKS = {
    "none": {},
    "causal": {"attn_mask": CAUSAL},
    "padding": {"key_padding_mask": PADDING},
    "both": {"attn_mask": CAUSAL, "key_padding_mask": PADDING},
    "bias": {"attn_mask": random(LENGTH, LENGTH, seed=3)},
    "bias and padding": {
        "attn_mask": random(BATCH * HEADS, LENGTH, LENGTH, seed=3),
        "key_padding_mask": PADDING.float() * -3,
    },
}


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize(
    "options", [{}, {"batch_first": False}, {"bias": False}, {"add_bias_kv": True, "add_zero_attn": True}]
)
def test_multihead_attention_agrees_with_its_own_weights(masks, options):
    attention, x = multihead(**options), random(BATCH, LENGTH, WIDTH)
    model = Attending(attention, **MASKS[masks])
    found = evaluated(lambda **o: AttentionSubscriber(x, every=1, **o), model, unchanged)
    for head, (entropy, evenness) in enumerate(weights_of(attention, x, **MASKS[masks])):
        name = f"attention:head_{head}"
        assert found["attention_entropy", name] == [pytest.approx(entropy, abs=1e-6)]
        assert found["attention_evenness", name] == [pytest.approx(evenness, abs=1e-6)]
    assert len(found) == 3 * HEADS


def test_keys_of_another_width():
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(WIDTH, HEADS, kdim=5, vdim=7, batch_first=True)

    class Cross(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = attention

        def forward(self, x):
            return self.attention(query=x, key=x[:, :4, :5], value=x[:, :4, :7])[0]

    x = random(BATCH, LENGTH, WIDTH)
    found = evaluated(lambda **o: AttentionSubscriber(x, every=1, **o), Cross(), unchanged)
    attention.double()
    p = attention(x.double(), x[:, :4, :5].double(), x[:, :4, :7].double(), average_attn_weights=False)[1]
    expected = torch.special.entr(p).sum(-1).mean((0, 2))
    assert [found["attention_entropy", f"attention:head_{h}"][0] for h in range(HEADS)] == pytest.approx(
        expected.tolist(), abs=1e-6
    )


def test_a_transformer_in_evaluation_mode_is_seen_though_it_has_a_fast_path():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    x = random(BATCH, LENGTH, WIDTH)
    found = evaluated(
        lambda **o: AttentionSubscriber(x, forward=lambda m, x: m(x, src_key_padding_mask=PADDING), every=1, **o),
        *(model, unchanged),
    )
    expected = weights_of(model.layers[0].self_attn, x, key_padding_mask=PADDING)
    got = [found["attention_entropy", f"layers.0.self_attn:head_{h}"][0] for h in range(HEADS)]
    assert got == pytest.approx([entropy for entropy, _ in expected], abs=1e-6)
    assert {name for _, name in found} == {f"layers.{i}.self_attn:head_{h}" for i in range(2) for h in range(HEADS)}


class Grouped(nn.Module):
    """A causal attention of grouped queries with a rotation, as decoders have it, with a bias."""

    def __init__(self, heads=4, key_heads=2, dim=4, bias=None):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(WIDTH, heads * dim), nn.Linear(WIDTH, key_heads * dim)
        self.heads, self.key_heads, self.bias = heads, key_heads, bias

    def queries_and_keys(self, x):
        q = self.q_proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k = self.k_proj(x).unflatten(-1, (self.key_heads, -1)).transpose(1, 2)
        angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None]
        return [y * angle.cos() + y.roll(1, -1) * angle.sin() for y in (q, k)]

    def forward(self, x):
        q, k = self.queries_and_keys(x)
        return scaled_dot_product_attention(
            q, k, k, attn_mask=self.bias, is_causal=self.bias is None, scale=0.7, enable_gqa=True
        )


@pytest.mark.parametrize("bias", [None, random(LENGTH, LENGTH, seed=5)])
def test_calls_of_the_function_are_seen_with_rotation_groups_and_scale(bias):
    torch.manual_seed(0)
    model, x = nn.Sequential(Grouped(bias=bias)), random(BATCH, LENGTH, WIDTH)
    found = evaluated(lambda **o: AttentionSubscriber(x, batch_size=2, every=1, **o), model, unchanged)
    q, k = model[0].queries_and_keys(x)
    allowed = None if bias is not None else ~CAUSAL
    expected = dense(q.detach(), k.detach(), allowed, None if bias is None else bias.double(), 0.7)
    for head, (entropy, evenness, largest) in enumerate(expected):
        assert found["attention_entropy", f"0:head_{head}"] == [pytest.approx(entropy, abs=1e-6)]
        assert found["attention_evenness", f"0:head_{head}"] == [pytest.approx(evenness, abs=1e-6)]
        assert found["attention_max_logit", f"0:head_{head}"] == [pytest.approx(largest, rel=1e-5)]


class Written(nn.Module):
    """An attention that is written out."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 4)

    def forward(self, x):
        q = self.query(x).unflatten(-1, (2, 4)).transpose(1, 2)
        k = self.key(x).unflatten(-1, (1, 4)).transpose(1, 2)
        return (q @ k.mT / 2).softmax(-1) @ k


def test_projections_can_be_named():
    torch.manual_seed(0)
    model, x = nn.Sequential(Written(), nn.Flatten(), nn.LazyLinear(3)), random(BATCH, LENGTH, WIDTH)
    model(x)
    named = {"query": "*.query", "key": "*.key", "heads": 2, "key_heads": 1}
    found = evaluated(lambda **o: AttentionSubscriber(x, **named, every=1, **o), model, unchanged)
    q = model[0].query(x).detach().unflatten(-1, (2, 4)).transpose(1, 2)
    k = model[0].key(x).detach().unflatten(-1, (1, 4)).transpose(1, 2)
    for head, (entropy, _, _) in enumerate(dense(q, k)):
        assert found["attention_entropy", f"0:head_{head}"] == [pytest.approx(entropy, abs=1e-6)]
    causal = evaluated(lambda **o: AttentionSubscriber(x, **named, is_causal=True, every=1, **o), model, unchanged)
    assert causal["attention_entropy", "0:head_1"][0] == pytest.approx(dense(q, k, ~CAUSAL)[1][0], abs=1e-6)


def test_entropy_collapse_shows():
    """Queries that grow look at fewer and fewer keys."""
    torch.manual_seed(0)
    model, x = Attending(multihead()), random(BATCH, LENGTH, WIDTH)

    def grow(model):
        with torch.no_grad():
            model.attention.in_proj_weight[:WIDTH] *= 4

    found = evaluated(lambda **o: AttentionSubscriber(x, every=1, **o), model, unchanged, grow, grow, grow, grow)
    evenness, largest = (found[f"attention_{what}", "attention:head_0"] for what in ("evenness", "max_logit"))
    assert evenness == sorted(evenness, reverse=True)
    assert evenness[-1] < 0.01 < 0.1 < evenness[0]
    assert largest[-1] > 20 * largest[0] > 0


def test_zero_queries_attend_evenly():
    model = Attending(multihead())
    nn.init.zeros_(model.attention.in_proj_weight)
    nn.init.zeros_(model.attention.in_proj_bias)
    found = evaluated(lambda **o: AttentionSubscriber(random(2, 5, WIDTH), every=1, **o), model, unchanged)
    assert found["attention_entropy", "attention:head_0"] == [pytest.approx(math.log(5))]
    assert found["attention_evenness", "attention:head_0"] == [pytest.approx(1)]
    assert found["attention_max_logit", "attention:head_0"] == [0]


def test_modules_choose_attentions():
    model = nn.ModuleDict({"a": Attending(multihead()), "b": Attending(multihead())})
    model.forward = lambda x: model["b"](model["a"](x))
    found = evaluated(
        lambda **o: AttentionSubscriber(random(2, 5, WIDTH), modules="b.*", every=1, **o), model, unchanged
    )
    assert {name for _, name in found} == {"b.attention:head_0", "b.attention:head_1"}


def test_a_nan_is_that_of_its_head_and_has_a_reason(caplog):
    model = Attending(multihead())

    def spoil(model):
        with torch.no_grad():
            model.attention.in_proj_weight[0] = math.nan

    found = evaluated(lambda **o: AttentionSubscriber(random(2, 5, WIDTH), every=1, **o), model, spoil)
    assert math.isnan(found["attention_entropy", "attention:head_0"][0])
    assert math.isfinite(found["attention_entropy", "attention:head_1"][0])
    assert "no query had a key, or one was not finite" in caplog.text


def test_a_model_without_attention_is_refused_first_and_nan_later(caplog):
    with pytest.raises(ConfigError, match="found no attention: no MultiheadAttention and no call"):
        evaluated(lambda **o: AttentionSubscriber(random(4, 8), **o), nn.Linear(8, 2))
    model = Attending(multihead())

    def forget(model):
        model.forward = lambda x: x

    found = evaluated(lambda **o: AttentionSubscriber(random(2, 5, WIDTH), every=1, **o), model, unchanged, forget)
    assert [math.isnan(v) for v in found["attention_entropy", "attention:head_0"]] == [False, True]
    assert "found no attention" in caplog.text


class Dicts(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(1, 50, (7,), generator=generator)
        return {"input_ids": tokens, "attention_mask": (torch.arange(7) < 7 - index).long()}


def test_models_of_transformers_agree_with_the_weights_they_return():
    import transformers

    torch.manual_seed(0)
    shape = {
        "vocab_size": 50,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 32,
    }
    kinds = {
        "bert": (transformers.BertModel, transformers.BertConfig(**shape)),
        "llama": (transformers.LlamaModel, transformers.LlamaConfig(**shape, num_key_value_heads=2)),
    }
    for make, config in kinds.values():
        model = make(config).eval()
        found = evaluated(lambda **o: AttentionSubscriber(Dicts(), every=1, **o), model, unchanged)
        batch = torch.utils.data.default_collate([Dicts()[i] for i in range(4)])
        model.set_attn_implementation("eager")
        weights = model(**batch, output_attentions=True).attentions
        for name, p in zip(dict.fromkeys(n.partition(":")[0] for _, n in found), weights, strict=True):
            entropy = torch.special.entr(p.double()).sum(-1).mean((0, 2))
            got = [found["attention_entropy", f"{name}:head_{h}"][0] for h in range(4)]
            assert got == pytest.approx(entropy.tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"query": "*.q"}, "takes query=, key= and heads= together, .* key=None, heads=None"),
        ({"is_causal": True}, "only with them key_heads= and is_causal="),
        ({"query": "q", "key": "k", "heads": 0}, "needs heads >= 1, got 0"),
        ({"query": "q", "key": "k", "heads": 4, "key_heads": 3}, "key_heads that divide heads, got 3 and 4"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        AttentionSubscriber(random(2, 5, 8), **arguments)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"query": "*.nothing", "key": "*.key", "heads": 2}, "matches 0 modules and key='\\*.key' matches 1"),
        ({"query": "*.query", "key": "*.key", "heads": 3}, "8 features cannot be split into 3 heads"),
    ],
)
def test_names_that_do_not_fit_are_refused(named, message):
    with pytest.raises(ConfigError, match=message):
        evaluated(lambda **o: AttentionSubscriber(random(2, 5, WIDTH), **named, **o), nn.Sequential(Written()))
