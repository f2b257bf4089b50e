"""The graph of the first loss is read before training as it is read in training."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import ikkuna
from ikkuna.diagnosis.objective.graph import ObjectiveGraph
from ikkuna.diagnosis.objective.operations import softmaxes_over_other_axes
from ikkuna.diagnosis.objective.positions import added_masks, attentions, exchanged_heads
from tests.diagnosis.healthy_models import LanguageModel
from tests.diagnosis.test_objective import RIGHT, RULES, WRONG, train

# labels are counted, ratios of 1 must be there twice, and equal sides after an update
OF_SEVERAL_PASSES = {"one_label", "constant_result", "same_sides"}


def loud(findings):
    return {finding.rule for finding in findings if finding.severity != "info"}


def named(make):
    """Return what is found in the first pass of a program that is a model and an objective."""
    torch.manual_seed(0)
    model, objective = make()
    return loud(ikkuna.preflight(model, torch.zeros(1), objective=lambda model, _: objective(model))) & RULES


@pytest.mark.parametrize("name", RIGHT)
def test_right_objectives_are_not_accused_before_training(name):
    assert named(RIGHT[name]) == set()


@pytest.mark.parametrize("name", WRONG)
def test_wrong_objectives_are_named_before_training(name):
    make, rules = WRONG[name]
    assert rules - OF_SEVERAL_PASSES <= named(make) <= rules


# -- views in place of a transpose ---------------------------------------------------------------------------------------

SAMPLES, HEADS, LENGTH, WIDTH = 3, 4, 6, 2


def attended(q, k=None, fused=False):
    k = q if k is None else k
    if fused:
        return functional.scaled_dot_product_attention(q, k, k)
    return (q @ k.mT).softmax(-1) @ k


def transposed(x, fused):
    q = x.view(SAMPLES, LENGTH, HEADS, WIDTH).transpose(1, 2)
    return attended(q, fused=fused).transpose(1, 2).reshape(x.shape)


def transposed_and_in_one_axis(x, fused):
    q = x.view(SAMPLES, LENGTH, HEADS, WIDTH).transpose(1, 2).reshape(SAMPLES * HEADS, LENGTH, WIDTH)
    return attended(q).view(SAMPLES, HEADS, LENGTH, WIDTH).transpose(1, 2).flatten(2)


def time_first(x, fused):
    q = x.transpose(0, 1).reshape(LENGTH, SAMPLES * HEADS, WIDTH).transpose(0, 1)
    return attended(q).transpose(0, 1).reshape(LENGTH, SAMPLES, -1)


def as_many_heads_as_positions(x, fused):
    q = x[:, :HEADS].reshape(SAMPLES, HEADS, HEADS, WIDTH).transpose(1, 2)
    return attended(q, fused=fused).transpose(1, 2).reshape(SAMPLES, HEADS, -1)


def keys_for_groups(x, fused):
    """Two heads share a key."""
    q = x.view(SAMPLES, LENGTH, HEADS, WIDTH).transpose(1, 2)
    k = x[..., : HEADS // 2 * WIDTH].reshape(SAMPLES, LENGTH, HEADS // 2, WIDTH).transpose(1, 2)
    return attended(q, k.repeat_interleave(2, 1), fused).transpose(1, 2).flatten(2)


def channels_first(x, fused):
    q = x.mT.reshape(SAMPLES, HEADS, WIDTH, LENGTH).mT
    return attended(q, fused=fused).mT.reshape(SAMPLES, HEADS * WIDTH, LENGTH)


def windows(x, fused):
    return attended(x.view(SAMPLES * 3, LENGTH // 3, HEADS * WIDTH)).view(x.shape)


def split_by_a_view(x, fused):
    return attended(x.view(SAMPLES, HEADS, LENGTH, WIDTH), fused=fused).transpose(1, 2).reshape(x.shape)


def split_by_a_view_in_one_axis(x, fused):
    return attended(x.view(SAMPLES * HEADS, LENGTH, WIDTH)).flatten(1)


def merged_by_a_view(x, fused):
    return attended(x.view(SAMPLES, LENGTH, HEADS, WIDTH).transpose(1, 2), fused=fused).reshape(x.shape)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("attention", "count"),
    [
        *((each, 0) for each in (transposed, transposed_and_in_one_axis, time_first, as_many_heads_as_positions)),
        *((each, 0) for each in (keys_for_groups, channels_first, windows)),
        *((each, 1) for each in (split_by_a_view, split_by_a_view_in_one_axis, merged_by_a_view)),
    ],
)
def test_a_view_between_positions_and_heads_is_named(attention, count, fused):
    x = nn.Linear(5, HEADS * WIDTH)(torch.randn(SAMPLES, LENGTH, 5))
    graph = ObjectiveGraph([attention(x, fused).square().sum()])
    assert [finding.rule for _, finding in exchanged_heads(graph.nodes)] == count * ["viewed_axes"]


class Heads(nn.Module):
    """A classifier of sequences with one attention."""

    def __init__(self, attention):
        super().__init__()
        self.first, self.last, self.attention = nn.Linear(5, HEADS * WIDTH), nn.Linear(HEADS * WIDTH, 2), attention

    def forward(self, x):
        return self.last(self.attention(self.first(x), True).mean(1))


@pytest.mark.parametrize(("attention", "rules"), [(transposed, []), (merged_by_a_view, [("viewed_axes", "first")])])
def test_heads_are_judged_before_training_and_in_it(attention, rules, tmp_path):
    torch.manual_seed(0)
    model, x, y = Heads(attention), torch.randn(SAMPLES, LENGTH, 5), torch.tensor([0, 1, 1])
    assert [(f.rule, f.module) for f in ikkuna.preflight(model, (x, y), nn.CrossEntropyLoss())] == rules
    watched = ikkuna.watch(model, log_dir=tmp_path, backend="null")
    train(model, lambda model: functional.cross_entropy(model(x), y), 8)
    watched.close()
    assert [(f.rule, f.module) for f in watched.findings if f.rule == "viewed_axes"] == rules


# -- the axis of a softmax -----------------------------------------------------------------------------------------------


def by_hand(axis, between=lambda weights: weights, queries=LENGTH):
    """Return the result of an attention with a softmax over an axis, of which `between` is a part."""
    x = nn.Linear(5, WIDTH)(torch.randn(SAMPLES, HEADS, LENGTH, 5))
    scores = (x[..., :queries, :] @ x.mT / WIDTH**0.5).masked_fill(torch.zeros(LENGTH).bool(), -math.inf)
    return between(scores.softmax(axis)) @ x


def clusters(x):
    """Each descriptor belongs to clusters, over which the softmax is, and a cluster is the sum of its descriptors."""
    return nn.Conv1d(WIDTH, LENGTH, 1)(x.mT).softmax(1) @ x


RIGHT_AXES = {
    "keys": lambda: by_hand(-1),
    "keys with a positive axis and dropout": lambda: by_hand(3, nn.Dropout(0.1)),
    "slots": lambda: by_hand(-2, lambda weights: weights / weights.sum(-1, keepdim=True)),
    "fewer queries": lambda: by_hand(-2, queries=2),
    "the other direction": lambda: by_hand(-2, lambda weights: weights.mT),
    "clusters": lambda: clusters(nn.Linear(5, WIDTH)(torch.randn(SAMPLES, LENGTH, 5))),
}
WRONG_AXES = {
    "queries": lambda: by_hand(-2),
    "queries with dropout": lambda: by_hand(2, nn.Dropout(0.1)),
    "heads": lambda: by_hand(1),
    "samples": lambda: by_hand(0),
}


@pytest.mark.parametrize("name", [*RIGHT_AXES, *WRONG_AXES])
def test_a_softmax_of_attention_over_another_axis_than_keys_is_named(name):
    graph = ObjectiveGraph([(RIGHT_AXES | WRONG_AXES)[name]().square().sum()])
    expected = ["softmax_axis"] if name in WRONG_AXES else []
    assert [finding.rule for _, finding in softmaxes_over_other_axes(graph.nodes)] == expected


@pytest.mark.parametrize(
    ("axis", "rules"), [(-1, []), (-2, ["softmax_axis"]), (1, ["softmax_axis"]), (0, ["softmax_axis"])]
)
def test_the_axis_of_a_softmax_is_judged_before_training(axis, rules):
    def attention(x, fused):
        q = x.view(-1, LENGTH, HEADS, WIDTH).transpose(1, 2)
        return ((q @ q.mT).softmax(axis) @ q).transpose(1, 2).flatten(2)

    torch.manual_seed(0)
    batch = torch.randn(SAMPLES, LENGTH, 5), torch.tensor([0, 1, 1])
    found = ikkuna.preflight(Heads(attention), batch, nn.CrossEntropyLoss())
    assert [finding.rule for finding in found] == rules


# -- rows of labels ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(
    ("order", "rules"), [([0, 1, 2, 3], []), ([0, 2, 1, 3], ["labels_of_other_samples"]), ([1, 1, 2, 3], [])]
)
def test_labels_that_are_the_next_inputs_of_other_rows_are_named(order, rules, flat):
    """Labels that are those of a row of another batch are not judged."""
    torch.manual_seed(0)
    x = torch.randint(50, (4, 13))
    y = x[order, 1:] if len({*order}) == len(order) else torch.cat([torch.randint(50, (1, 12)), x[1:, 1:]])
    model = LanguageModel(flat, classes_second=not flat)
    found = ikkuna.preflight(model, (x[:, :-1], y.flatten() if flat else y), nn.CrossEntropyLoss())
    assert [f.rule for f in found] == rules


# -- masks -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape_of", "count"),
    [
        (lambda mask: mask[:, None, None], 1),
        (lambda mask: mask[:, None, None].expand(-1, HEADS, LENGTH, -1), 1),
        (lambda mask: mask[:, None, None].bool(), 0),
        (lambda mask: mask[:, None, :, None], 0),
        (lambda mask: mask[:1], 0),
        (lambda mask: mask[:1].T @ mask[:1], 0),
    ],
)
def test_masks_of_numbers_may_have_any_shape(shape_of, count):
    """Masks of queries, of all rows and of pairs of positions are not those of padding."""
    hidden = torch.arange(LENGTH) >= torch.tensor([4, 3, 5])[:, None]
    x = nn.Linear(5, WIDTH)(torch.randn(SAMPLES, HEADS, LENGTH, 5))
    result = functional.scaled_dot_product_attention(x, x, x, shape_of((~hidden).float()))
    seen = attentions(ObjectiveGraph([result.sum()]).nodes, SAMPLES, LENGTH)
    assert len(seen) == 1
    assert len(list(added_masks(seen, hidden))) == count
