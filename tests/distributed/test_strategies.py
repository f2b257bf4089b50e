"""With every strategy, several ranks publish what one process publishes for the whole batch."""

import math

import pytest
import torch
from torch import nn

from ikkuna.metrics.messages.kinds import FORWARD_KINDS
from tests.distributed import loops, strategies
from tests.distributed.launch import launch

SAME_AS_ONE = ("ddp", "fsdp", "fsdp_after", "fsdp1", "tp", "tp_sequence")
ON_FOUR = ("ddp", "fsdp", "hsdp", "tp", "tp_and_data")
SHARDED_WHILE_WATCHED = ("fsdp_blocks_after", "fsdp_kept_after")
ALSO = (
    "fsdp_by_hand",
    "fsdp_sharded_later",
    *SHARDED_WHILE_WATCHED,
    "ddp_uneven",
    "ddp_positions",
    "sharded_optimizer",
    "fsdp_mixed",
    "ddp_no_sync",
    "fsdp_accumulated",
    "untouched_ddp",
    "untouched_fsdp",
    "untouched_fsdp1",
    "untouched_fsdp1_flat",
)


def run(names, size, directory):
    return launch([f"tests.distributed.strategies:{name}" for name in names], size, directory)


@pytest.fixture(scope="session")
def two(tmp_path_factory):
    return run((*SAME_AS_ONE, *ALSO), 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="session")
def four(tmp_path_factory):
    return run(ON_FOUR, 4, tmp_path_factory.mktemp("four"))


@pytest.fixture(scope="session")
def one():
    return loops.published_of(loops.network(), *loops.data())


def is_close(key, a, b, rtol=2e-4):
    """Compare to float32 rounding; a percentile jumps by a bin where an element lies on its edge."""
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) and math.isnan(b)
    return math.isclose(a, b, rel_tol=0.13 if "percentile" in key[0] else rtol, abs_tol=2e-6)


def differences(found, expected, rtol=2e-4, kinds=("",)):
    """Return missing, additional and different values."""
    expected = {key: value for key, value in expected.items() if key[0].startswith(tuple(kinds))}
    found = {key: value for key, value in found.items() if key[0].startswith(tuple(kinds))}
    wrong = [
        (k, found[k], expected[k]) for k in expected if k in found and not is_close(k, found[k], expected[k], rtol)
    ]
    return [*(found.keys() ^ expected.keys()), *wrong]


@pytest.mark.parametrize("strategy", SAME_AS_ONE)
def test_two_ranks_publish_what_one_process_does(two, one, strategy):
    assert len(one) > 700
    for outcome in two:
        assert not differences(outcome[strategy], one)
        assert not outcome.logs[strategy]


def test_each_rank_measures_its_part_of_a_sharded_optimizer(two):
    expected = strategies.sharded_optimizer(0, 1)
    assert len(expected) == 3 * 2 * 5
    for outcome in two:
        assert not differences(outcome["sharded_optimizer"], expected)


@pytest.mark.fault(202)
@pytest.mark.parametrize("strategy", SHARDED_WHILE_WATCHED)
def test_a_model_that_is_sharded_after_it_was_added(two, one, strategy):
    for outcome in two:
        assert not differences(outcome[strategy], one)
        assert not outcome.logs[strategy]


@pytest.mark.fault(202)
def test_a_model_that_is_sharded_after_its_first_step(two):
    def train(model, loss, _, inputs, labels):
        for part in (slice(0, 1), slice(1, None)):
            loops.steps(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), inputs[part], labels[part])

    expected = loops.published_of(loops.network(), *loops.data(), optimizer=lambda model: None, train=train)
    for outcome in two:
        published, faults = outcome["fsdp_sharded_later"]
        later, expected_later = ({k: v for k, v in found.items() if k[2] > 0} for found in (published, expected))
        assert not differences(later, expected_later)
        assert {key for key in expected if key not in published} == set()
        assert faults == (0, 0)


@pytest.mark.fault(202)
def test_parameters_that_fsdp_has_gathered_and_freed_are_never_read(two):
    model, loss = loops.network(), nn.CrossEntropyLoss()
    with loops.watching(model, loss, loops.every_metric()) as (exporter, expected):
        loops.steps_by_hand(model, loss, exporter, *loops.data())
    for outcome in two:
        assert not differences(outcome["fsdp_by_hand"], expected)


@pytest.mark.parametrize("strategy", ON_FOUR)
def test_four_ranks_publish_what_one_process_does(four, one, strategy):
    for outcome in four:
        assert not differences(outcome[strategy], one)


@pytest.mark.parametrize("strategy", [*SAME_AS_ONE, "ddp_uneven", "fsdp_mixed", "ddp_no_sync", "fsdp_accumulated"])
def test_every_rank_publishes_the_same(two, strategy):
    first, second = (outcome[strategy] for outcome in two)
    assert list(first) == list(second), "in the same order"
    assert not [key for key in first if first[key] != second[key] and not math.isnan(first[key])]


def test_unequal_batches_count_by_their_samples(two, one):
    expected = {key: value for key, value in one.items() if key[2] == 0}
    found = {key: value for key, value in two[0]["ddp_uneven"].items() if key[2] == 0}
    assert not differences(found, expected, kinds=("activations", "train_accuracy", "loss"))


@pytest.mark.fault(217)
def test_an_output_without_a_batch_axis_counts_once(two):
    expected = loops.published_of(loops.positional(), *loops.data())
    assert any(name == "positions" and kind.startswith("activations") for kind, name, _ in expected)
    assert not differences(two[0]["ddp_positions"], expected, kinds=("activations", "weight", "bias", "loss"))


def test_accumulation_agrees_with_one_process(two):
    def train(model, loss, optimizer, inputs, labels):
        # each rank's halves: what one process would see of the same four parts
        for x, y in zip(inputs, labels, strict=True):
            optimizer.zero_grad()
            for rows in ([0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]):
                (loss(model(x[rows]), y[rows]) / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    expected = loops.published_of(loops.network(), *loops.data(), train=train)
    for strategy in ("ddp_no_sync", "fsdp_accumulated"):
        assert not differences(two[0][strategy], expected)


def test_mixed_precision_keeps_kinds_apart(two, one):
    found = two[0]["fsdp_mixed"]
    assert found.keys() == one.keys()
    first = {key: value for key, value in one.items() if key[2] == 0}
    assert not differences({k: found[k] for k in first}, first, kinds=("weights", "biases"))
    norms = [(found[k], first[k]) for k in first if k[0].endswith("_norm2") and k[0].startswith(FORWARD_KINDS)]
    assert norms
    assert all(math.isclose(a, b, rel_tol=0.05) for a, b in norms), "computed in bfloat16"


@pytest.mark.parametrize("strategy", ["untouched_ddp", "untouched_fsdp", "untouched_fsdp1", "untouched_fsdp1_flat"])
def test_training_is_bit_identical(two, strategy):
    for outcome in two:
        plain, watched = outcome[strategy]
        assert plain == watched
        assert not [line for line in outcome.logs[strategy] if line.startswith("ERROR")]


def test_the_comparison_finds_a_difference(one):
    """The comparison detects a wrong value."""
    key = ("weights_norm2", "first", 0)
    assert differences({**one, key: one[key] * 1.001}, one)
    assert torch.distributed.is_available()
