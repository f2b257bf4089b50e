"""After a failure of one rank the others continue to train, and one ERROR says what is missing.

A rank that waited without a bound would be alive when `launch` stops the processes, which is an error.
"""

import math

import pytest

from tests.distributed import faults, loops
from tests.distributed.launch import launch
from tests.distributed.test_strategies import differences

NAMES = (
    *("attached_on_one_rank", "attached_on_both_again", "different_subscribers", "different_arguments", "late"),
    *(
        "late_while_modules_are_read",
        "far_behind",
        "closed_early",
        "silent_at_the_end",
        "attached_on_one_rank_of_shards",
        "own_collective",
        "failing_subscriber",
        "state_on_one_rank",
        "resumed_without_a_state",
        "nothing_to_resume",
        "group_destroyed",
        "stopped",
    ),
)


def run(names, size, directory):
    return launch([f"tests.distributed.faults:{name}" for name in names], size, directory)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run(NAMES, 2, tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def alone():
    return faults.train(faults.norms())["published"]


def errors(outcome, scenario):
    return [line for line in outcome.logs[scenario] if line.startswith("ERROR")]


def test_an_exporter_on_one_rank_continues_alone(two, alone):
    found = two[0]["attached_on_one_rank"]
    assert not differences(found["published"], alone)
    (told,) = errors(two[0], "attached_on_one_rank")
    assert "rank 1 of 2 did not come within 1 s" in told
    assert found["calls"] == 1, "it waits once"


def test_an_exporter_on_one_rank_does_not_disturb_later_ones(two, alone):
    first, second = (outcome["attached_on_both_again"] for outcome in two)
    assert first["published"] == second["published"]
    assert not errors(two[0], "attached_on_both_again")
    norm = first["published"]["activations_norm2", "first", 0]
    assert norm == pytest.approx(2**0.5 * alone["activations_norm2", "first", 0], rel=1e-6), "of both ranks"


def test_different_subscribers_are_named(two, alone):
    for outcome in two:
        (told,) = errors(outcome, "different_subscribers")
        assert "rank 1, compared with rank 0, lacks MeanSubscriber(biases;" in told
        assert "has MeanSubscriber(weights;" in told
        found = outcome["different_subscribers"]["published"]
        assert not differences(found, alone, kinds=("weights_norm2", "activations_norm2"))
        (told,) = errors(outcome, "different_arguments")
        assert "p=3" in told
        assert "p=4" in told


def test_ranks_that_begin_at_different_steps_are_named(two):
    for outcome in two:
        (told,) = errors(outcome, "state_on_one_rank")
        assert "rank 0 begins at step 7, rank 1 at step 0; call load_state_dict() on every rank" in told
    steps = {key[2] for key in two[0]["state_on_one_rank"]["published"]}
    assert steps == set(range(7, 7 + faults.STEPS)), "its own values"


def test_all_ranks_continue_the_latest_run_of_rank_0(two):
    first, second = (outcome["resumed_without_a_state"] for outcome in two)
    assert {key[2] for key in first} == {3, 4}
    assert first == second
    assert not errors(two[0], "resumed_without_a_state")


def test_if_rank_0_has_no_run_to_continue_all_ranks_raise(two):
    first, second = (outcome["nothing_to_resume"] for outcome in two)
    assert "has no run; resume='auto' begins a new run then" in first
    assert second == f"rank 0: {first}"


def test_training_stops_at_the_end_of_the_same_step_on_all_ranks(two):
    first, second = (outcome["stopped"] for outcome in two)
    assert first == second
    assert first[0] == "dead_units"
    assert 0 < first[1] < 40


@pytest.mark.parametrize("scenario", ["late", "late_while_modules_are_read"])
def test_no_rank_waits_for_one_that_is_late(two, scenario):
    first, second = (outcome[scenario] for outcome in two)
    assert first["published"] == second["published"]
    assert len({key[2] for key in first["published"]}) == faults.STEPS, "nothing is lost"
    assert not errors(two[0], scenario)
    assert first["health"].dropped == 0


def test_the_queue_is_bounded_and_all_ranks_count_dropped_measurements(two):
    first, second = (outcome["far_behind"] for outcome in two)
    assert first["published"] == second["published"]
    there = {key[2] for key in first["published"]}
    assert 0 < len(there) < faults.STEPS
    rows = 4 + 7  # weights and activations
    assert first["health"].dropped == second["health"].dropped == (faults.STEPS - len(there)) * (rows + 1)
    assert len(errors(two[0], "far_behind")) == 1


def test_a_rank_that_leaves_early_is_logged(two):
    first = two[0]["closed_early"]
    assert len({key[2] for key in first["published"]}) == faults.STEPS
    assert len(errors(two[0], "closed_early")) == 1
    assert not errors(two[1], "closed_early")


def test_close_does_not_wait_for_ever_for_a_silent_rank(two):
    first = two[0]["silent_at_the_end"]
    assert len({key[2] for key in first["published"]}) == faults.STEPS
    (told,) = errors(two[0], "silent_at_the_end")
    assert "did not send their measurements in time" in told


def test_no_collective_is_called_by_one_rank_alone(two):
    published, disabled = two[0]["attached_on_one_rank_of_shards"]
    assert disabled == ("TestAccuracySubscriber",)
    assert {key[0] for key in published} == {"weights_norm2", "weights_spectral_norm", "weights_power_residual"}
    assert all(math.isnan(value) == (key[0] != "weights_norm2") for key, value in published.items())


def test_a_subscriber_that_needs_the_model_may_call_the_other_ranks(two):
    first, second = (outcome["own_collective"] for outcome in two)
    assert first == second
    published, is_bit_identical = first
    assert is_bit_identical
    agreed = {key[1:]: value for key, value in published.items() if key[0] == "agreed"}
    assert agreed
    for key, value in agreed.items():
        assert value == pytest.approx(2 * published["weights_norm2", *key], rel=1e-6)


def test_a_subscriber_that_fails_on_one_rank_does_not_affect_others(two):
    first, second = (outcome["failing_subscriber"] for outcome in two)
    assert first["published"] == second["published"]
    assert first["health"].errors == 0
    assert second["health"].errors > 0


def test_the_group_may_be_destroyed_before_close(two):
    first, second = (outcome["group_destroyed"] for outcome in two)
    assert first["published"] == second["published"]
    assert len({key[2] for key in first["published"]}) == faults.STEPS
    assert not errors(two[0], "group_destroyed")


@pytest.mark.parametrize("scenario", ["killed_last", "killed_first"])
def test_the_others_continue_after_a_rank_dies(scenario, alone, tmp_path):
    outcomes = run([scenario], 2, tmp_path)
    victim = 1 if scenario == "killed_last" else 0
    assert outcomes[victim].exitcode == -9
    left = outcomes[1 - victim]
    assert left.exitcode is not None
    found = left[scenario]
    (told,) = errors(left, scenario)
    if victim:  # the other one kept the store, which died with it
        assert "rank 1 does not answer" in told
    assert found["steps"] == faults.STEPS
    last = {key: value for key, value in alone.items() if key[2] == faults.STEPS - 1}
    assert not differences({key: found["published"][key] for key in last}, last), "its own values"
    assert loops.STEPS
