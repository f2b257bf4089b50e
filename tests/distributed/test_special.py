"""Other features on several ranks: every subscriber, evaluation, full matrices, spread, files, stages."""

import math

import pytest
import torch
from torch import nn

from ikkuna.testing import small_model
from tests.distributed import large_models, loops, special
from tests.distributed.launch import launch
from tests.distributed.test_strategies import differences
from tests.subscribers import EVERY_SUBSCRIBER

NAMES = (
    *(
        "every_subscriber",
        "evaluation_ddp",
        "evaluation_fsdp",
        "matrices",
        "matrices_of_slices",
        "spread",
        "nan_on_one_rank",
        "files",
    ),
    *(
        "pipeline",
        "evaluation_on_rank_0",
        "validation_of_ranks",
        "two_exporters",
        "scaled_and_checkpointed",
        "compiled",
    ),
    *("stored_by_torch", "shards_stored_by_torch"),
    *("noise_of_ranks", "found_loss", "ranks_that_part", "ranks_that_agree", "ranks_with_shards", "recorded_ranks"),
)


@pytest.fixture(scope="session")
def two(tmp_path_factory):
    names = [f"tests.distributed.special:{name}" for name in NAMES]
    names.append("tests.distributed.large_models:large_model_metrics")
    return launch(names, 2, tmp_path_factory.mktemp("special"))


def same(a, b):
    return a.keys() == b.keys() and all(a[k] == b[k] or (math.isnan(a[k]) and math.isnan(b[k])) for k in a)


# What a rank cannot know of the others' data: a spectrum of all activations, quantiles of one rank's sample of them; figures of outputs;
# which rows the others have.
# The scale of integers is that of one rank's data as well.
OF_ONE_RANK = (
    *("RankSubscriber-activations", "PredictionSubscriber", "QuantizationSubscriber-int8"),
    *("DimensionSubscriber", "DimensionSubscriber-gradients", "InputRowsSubscriber"),
)
# What each rank computes before it is reduced, which one process never has, and what is made of it.
BEFORE_REDUCTION = ("micro_gradients", "GradientNoiseScale", "GradientSNR")
# Each rank has a clock and a memory of its own; a sum over ranks is rounded in another way than that of one process.
OF_ITS_OWN = ("SpeedSubscriber", "FingerprintSubscriber")
# Ranks are what they are about; the second publishes nothing in one process.
OF_RANKS = ("RankSpreadSubscriber", "RankSpreadSubscriber-gradients")
OF_SEVERAL_RANKS = ("ReplicaSubscriber", "BufferReplicaSubscriber")


@pytest.mark.parametrize("name", EVERY_SUBSCRIBER)
def test_every_subscriber_publishes_the_same_on_every_rank_and_in_one_process(two, name):
    first, second = (outcome["every_subscriber"][name] for outcome in two)
    assert same(first, second) or (name in OF_ITS_OWN and first.keys() == second.keys())
    expected = special.published_by(name, small_model(), *special.rows())
    if name in OF_SEVERAL_RANKS:
        assert not expected
        assert set(first.values()) == ({0.0} if name == "ReplicaSubscriber" else set())  # no buffer is kept equal
        return
    if name in (*OF_RANKS, *OF_ITS_OWN):
        assert first.keys() == expected.keys()
    elif name in OF_ONE_RANK or any(word in name for word in BEFORE_REDUCTION):
        assert {key[0] for key in first} == {key[0] for key in expected}
    else:
        assert not differences(first, expected, rtol=1e-3)


@pytest.mark.parametrize("strategy", ["evaluation_ddp", "evaluation_fsdp"])
def test_evaluation_agrees_with_one_process(two, strategy):
    losses, expected = special.tested(loops.network(), *loops.data())
    for outcome in two:
        _, found = outcome[strategy]
        assert not differences(found, expected)
    assert any(key[0] == "test_accuracy" for key in expected)
    assert any(key[0] == "by_epoch" for key in expected)
    mean = [sum(x) / 2 for x in zip(*(outcome[strategy][0] for outcome in two), strict=True)]
    assert mean == pytest.approx(losses, rel=1e-5)


def test_a_metric_of_full_matrices_is_nan_on_shards_and_logs_why_once(two):
    expected = loops.published_of(loops.network(), *loops.data(), special.matrix_metrics())
    for outcome in two:
        assert not differences(outcome["matrices"][1], expected, rtol=1e-3)
    for outcome, found, why in (
        *((outcome, outcome["matrices"][0], "gather=True") for outcome in two),
        *((outcome, outcome["matrices_of_slices"], "FSDP1 gives each rank a slice") for outcome in two),
    ):
        of_whole = ("weights_spectral_norm", "weights_stable_rank", "weights_effective_rank", "weights_cosine")
        kinds = {key[0] for key, value in found.items() if math.isnan(value) and not math.isnan(expected.get(key, 0))}
        assert kinds >= set(of_whole)
        others = {k: v for k, v in found.items() if k[0] not in kinds}
        assert len(others) > 20
        assert not differences(others, {k: v for k, v in expected.items() if k[0] not in kinds})
        told = [line for name in ("matrices", "matrices_of_slices") for line in outcome.logs[name] if why in line]
        assert len(told) == 3, "once by each of three subscribers"


def test_the_spread_names_the_odd_rank(two):
    for outcome in two:
        found = outcome["spread"]
        key = ("first", 0)
        assert found["activations_ranks_rms_argmax", *key] == 1
        assert found["activations_ranks_rms_argmin", *key] == 0
        low, middle, high = (found[f"activations_ranks_rms_{what}", *key] for what in ("min", "median", "max"))
        assert low < middle < high
        assert high > 10 * low
        assert middle == (low + high) / 2
        assert found["weights_ranks_rms_min", *key] == found["weights_ranks_rms_max", *key]


def test_a_spread_compares_the_data_of_each_rank(two):
    inputs, labels = loops.local(*loops.data(), 0, 2)
    alone = loops.published_of(
        loops.network(), inputs[:1], labels[:1], [special.installed.RankSpreadSubscriber("activations", backend="null")]
    )
    key = ("activations_ranks_rms_min", "first", 0)
    assert two[0]["spread"][key] == pytest.approx(alone[key], rel=1e-6)
    assert alone["activations_ranks_rms_argmax", "first", 0] == 0


def test_a_nan_of_one_rank_is_published_with_the_rank(two):
    for outcome in two:
        found = outcome["nan_on_one_rank"]
        assert not math.isnan(found["input_data_mean", None, 1])
        for kind in ("input_data_mean", "input_data_min", "input_data_max", "input_data_ranks_mean_median"):
            assert math.isnan(found[kind, None, 2])
        assert math.isnan(found["activations_mean", "first", 2])
        assert found["input_data_nonfinite", None, 2] == 1
        assert found["input_data_ranks_mean_argmax", None, 2] == 1
        inputs = loops.data()[0][2].clone()
        inputs[6, 0] = 0
        assert found["input_data_norm2", None, 2] == pytest.approx(inputs.norm().item(), rel=1e-6)


def test_there_is_one_run(two):
    for outcome in two:
        files, tags = outcome["files"]
        assert {name.split("/")[0] for name in files} == {"run0001"}
        assert sum("tfevents" in name for name in files) == 1
        assert list(tags) == ["run0001"]
        assert "weights_norm2/first" in tags["run0001"]


def test_stages_of_a_pipeline_publish_their_union(two):
    first, second = (outcome["pipeline"] for outcome in two)
    assert first == second
    assert {key[1] for key in first} == {"first", "block.0", "block.1", "block.2"}
    torch.manual_seed(1)
    model = loops.network()
    expected = model.block[0].weight.norm().item()
    assert first["weights_norm2", "block.0", 0] == pytest.approx(expected, rel=1e-6)


def test_a_test_on_rank_0_alone_does_not_disturb_others(two):
    ours, others = (outcome["evaluation_on_rank_0"] for outcome in two)
    training = {key: value for key, value in ours.items() if key[0] == "weights_norm2"}
    assert len(training) == 6 * 5
    assert training == {key: value for key, value in others.items() if key[0] == "weights_norm2"}
    assert {key[2] for key in ours if key[0] == "activations_norm2"} == {2, 5}
    assert not any(key[0] == "activations_norm2" for key in others)


def test_a_validation_in_the_loop_is_that_of_each_rank_alone(two):
    for outcome, count in zip(two, (2, 1), strict=True):
        published, expected = outcome["validation_of_ranks"]
        assert published == expected
        assert len(expected) == count


def test_exporters_share_a_bus_and_follow_each_other(two):
    one = loops.published_of(loops.network(), *loops.data())
    for outcome in two:
        both, after = outcome["two_exporters"]
        assert not differences(after, one)
        expected = {k: v for k, v in one.items() if k[0] == "activations_norm2"}
        for name in ("a", "b"):
            mine = {(kind, module[2:], step): v for (kind, module, step), v in both.items() if module[0] == name}
            assert not differences(mine, expected)


def test_a_run_continues_from_a_checkpoint_of_torch(two):
    """Torch keeps of equal names what one of the ranks has, and loads the names that a new exporter has."""
    for outcome in two:
        whole, halves, names = outcome["stored_by_torch"]
        assert len(whole) == 2 * 6 * 5
        assert halves == whole
        assert names == ["run0001"]
        assert not outcome.logs["stored_by_torch"]


def test_ranks_begin_anew_without_the_states_of_all_their_shards(two):
    """Torch has kept the state of one rank, and no rank measures its part of a distance from another step than the others."""
    for outcome in two:
        whole, halves, names = outcome["shards_stored_by_torch"]
        assert names == ["run0001"]
        assert {key: value for key, value in halves.items() if key[2] < 3} == {
            key: value for key, value in whole.items() if key[2] < 3
        }
        assert not any(value for key, value in halves.items() if key[2] == 3 and key[0] == "weights_distance_from_init")
    logged = [outcome.logs["shards_stored_by_torch"] for outcome in two]
    assert [len(lines) for lines in logged] == [1, 0]
    assert "the states hold other parts of the parameters than the ranks do" in logged[0][0]


def test_a_gradient_scaler_and_a_checkpoint_change_nothing(two):
    expected = special.scaled_and_checkpointed(0, 1)
    for outcome in two:
        assert not differences(outcome["scaled_and_checkpointed"], expected)
    assert {key[2] for key in expected} == {0, 1, 2}


def test_a_compiled_model_publishes_the_same(two):
    one = loops.published_of(loops.network(), *loops.data())
    for outcome in two:
        assert not differences(outcome["compiled"], one)
    assert isinstance(loops.network(), nn.Module)


def test_ranks_are_micro_batches_to_the_noise_of_gradients(two):
    """Two ranks publish what one process publishes that processes their batches one after the other."""
    parts = [zip(*loops.local(*loops.data(), rank, 2), strict=True) for rank in range(2)]
    one = special.noise(loops.network(), list(zip(*parts, strict=True)))
    for outcome in two:
        assert not differences(outcome["noise_of_ranks"], one)
    terms = [value for (kind, _, _), value in one.items() if kind in ("gradient_square", "gradient_covariance_trace")]
    assert len(terms) == 2 * loops.STEPS
    assert all(map(math.isfinite, terms))


def test_a_loss_that_is_found_is_the_mean_over_ranks_of_the_sums_of_their_micro_batches(two):
    (first, own), (second, other) = (outcome["found_loss"] for outcome in two)
    assert first == second
    assert first == pytest.approx([(a + b) / 2 for a, b in zip(own, other, strict=True)], rel=1e-6)


def test_the_rules_name_the_weight_that_differs_between_ranks(two):
    for outcome in two:
        assert outcome["ranks_that_part"][0] == [("ranks_differ", "first", 2)]


@pytest.mark.parametrize("name", ["ranks_that_agree", "ranks_with_shards"])
def test_equal_ranks_and_shards_have_no_finding(two, name):
    for outcome in two:
        findings, judged = outcome[name]
        assert findings == []  # the norm layer's weights are equal in all shards of the first step
        assert judged == (("ranks_differ",) if name == "ranks_that_agree" else ())


def test_each_rank_writes_the_dump_of_its_own_batches(two):
    """The NaN in the data of rank 1 reaches the loss of all ranks; each dump has the rank and the steps before."""
    places, ranks, steps, batches = zip(*(outcome["recorded_ranks"] for outcome in two), strict=True)
    assert places == ("dumps", "dumps_rank1")
    assert ranks == ((0, 2), (1, 2))
    assert steps == ([0, 1, 2, 3, 4],) * 2
    assert batches == (0, 1)  # the number of elements that are NaN in the recorded batch of the last step


def test_metrics_of_large_models_are_those_of_one_process(two):
    """The entropy of a head is the smallest mean of a rank, because means over other data are compared, not added."""
    inputs, labels = loops.data()
    expected = large_models.published_of(large_models.attending(), inputs, labels)
    kinds = {"network_output_z_loss", "gradient_momentum_agreement", "weight_decay_share", "scores_max"}
    assert {key[0] for key in expected} == {*kinds, "scores_entropy"}
    first, second = (outcome["large_model_metrics"] for outcome in two)
    for found, again in zip(first, second, strict=True):
        assert found == again
        assert not differences(_of(kinds, found), _of(kinds, expected))
        entropies = [_of({"scores_entropy"}, values) for values in (found, expected)]
        assert entropies[0].keys() == entropies[1].keys()
        assert all(0 < value <= entropies[1][key] + 1e-6 for key, value in entropies[0].items())


def _of(kinds, values):
    return {key: value for key, value in values.items() if key[0] in kinds}
