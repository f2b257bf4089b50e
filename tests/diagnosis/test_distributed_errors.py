"""Silent errors of trainings on several ranks: what the rules find, and that the mended programs have no finding."""

import pytest

from tests.diagnosis.real_errors.distributed import ERRORS, EVERY, NOT_REBUILT
from tests.distributed.launch import launch

# The sample in which each error must be named, and the module: the first sample with a difference.
FIRST = {
    "norms_clipped_on_the_first_rank": ("norm", 0),
    "clipped_by_the_norm_of_own_shards": ("fc1", 0),
    "replicas_that_begin_different": ("norm", 0),
    "router_gradient_not_reduced": ("gate", 0),
    "moved_after_wrapping": ("fc0", 0),
    "wrapper_bypassed": ("fc0", 0),
    "data_lost_in_a_collective": ("fc1", 2 * EVERY),
    "weights_lost_on_the_way": ("fc1", 0),
    "different_models_with_averaged_gradients": ("fc0", 3 * EVERY),  # three samples show that gradients are averaged
    "frozen_module_not_broadcast": ("1", 0),
    "rate_restored_on_one_rank": ("fc0", EVERY),
    "optimizer_skips_on_one_rank": ("fc1", EVERY),
}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    name = "tests.diagnosis.real_errors.distributed:all_errors"
    first, second = launch([name], 2, tmp_path_factory.mktemp("errors"))
    assert first["all_errors"] == second["all_errors"]
    return first


@pytest.mark.slow
@pytest.mark.parametrize("name", ERRORS)
def test_exactly_the_listed_rules_find_the_error(outcome, name):
    found = outcome["all_errors"][name, False]
    assert {rule for rule, *_ in found} == ERRORS[name].rules
    if name in FIRST:
        assert [(module, step) for _, module, step, _ in found] == [FIRST[name]]
    assert ERRORS[name].rules or ERRORS[name].reason


@pytest.mark.slow
@pytest.mark.parametrize("name", ERRORS)
def test_the_mended_program_has_no_finding(outcome, name):
    assert outcome["all_errors"][name, True] == []


def test_each_error_has_a_public_source_and_those_left_out_a_reason():
    assert len({error.source for error in ERRORS.values()}) == len(ERRORS) == 16
    assert all(error.source.startswith("https://") for error in ERRORS.values())
    assert all(NOT_REBUILT.values())
