"""Pipelines with the schedules of torch: every rank publishes the numbers of one process that trains the whole model."""

import pytest
import torch

from tests.distributed import pipelines
from tests.distributed.launch import launch
from tests.distributed.test_strategies import differences

SCHEDULES = ("gpipe", "one_forward_one_backward", "interleaved")
NAMES = (*SCHEDULES, "watched", "watched_interleaved", "equal_names", "whole_model")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    names = [f"tests.distributed.pipelines:{name}" for name in NAMES]
    return launch(names, 2, tmp_path_factory.mktemp("pipelines"))


@pytest.fixture(scope="module")
def one():
    torch.manual_seed(0)
    return pipelines.one_process()


def without_unclipped(values):
    """Leave out gradients before clipping: a rank with several stages divides those of a stage between two backwards."""
    return {key: value for key, value in values.items() if "unclipped" not in key[0]}


@pytest.mark.fault(216)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_stages_publish_what_one_process_does(two, one, schedule):
    assert {"gradients_global_norm", "input_data_norm2", "network_output_norm2", "loss_mean", "tested"} <= {
        key[0] for key in one
    }
    for outcome in two:
        published, is_bit_identical, health = outcome[schedule]
        if schedule == "interleaved":
            assert not differences(without_unclipped(published), without_unclipped(one))
        else:
            assert not differences(published, one)
        assert is_bit_identical
        assert not outcome.logs[schedule]
        assert (health.errors, health.dropped, health.skipped, health.steps) == (0, 0, 0, pipelines.STEPS)


def test_stages_whose_rules_choose_their_own_modules_share_their_values(two, one):
    expected = {key: value for key, value in one.items() if key[0] in ("weights_norm2", "gradients_global_norm")}
    for outcome in two:
        assert not differences(outcome["watched"], expected)
        assert not any("different measurements" in line for line in outcome.logs["watched"])


def test_several_stages_of_a_rank_are_watched_as_one_module_dict(two, one):
    expected = {key: value for key, value in one.items() if key[0] in ("weights_norm2", "gradients_global_norm")}
    for outcome in two:
        found = {(kind, name and name[2:], step): v for (kind, name, step), v in outcome["watched_interleaved"].items()}
        assert not differences(found, expected)
        assert not outcome.logs["watched_interleaved"]


@pytest.mark.fault(216)
def test_stages_with_equal_names_are_told_to_be_named(two):
    for outcome in two:
        [line] = [line for line in outcome.logs["equal_names"] if "stages" in line]
        assert "stages 0 and 1 of the pipeline both have modules named '0'" in line
        assert "add_modules(('a name', stage_module))" in line
        assert outcome["equal_names"]


@pytest.mark.fault(216)
def test_a_model_of_which_only_a_stage_runs_is_refused(two):
    for name, outcome in zip(("first", "last"), two, strict=True):
        message, modules = outcome["whole_model"]
        assert message.startswith(f"of the ModuleDict this process runs only {name!r}, a stage of a pipeline")
        assert f"add_modules(({name!r}, stage_module))" in message
        assert modules == ()
