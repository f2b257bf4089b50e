"""Silent errors from public trackers: what the checks and rules find, and that the mended programs have no finding."""

import pytest
import torch

from tests.diagnosis.real_errors.errors import ERRORS

SLOW = ("layers_that_begin_equal", "accumulation_without_division", "workers_with_the_same_seed")
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in ERRORS]


def found_in(name, is_mended):
    found = []
    for judge in ("check_before", "train"):
        torch.manual_seed(0)
        found.append(getattr(ERRORS[name].build(is_mended), judge)())
    return found


@pytest.mark.parametrize("name", NAMES)
def test_exactly_the_listed_checks_and_rules_find_the_error(name):
    error = ERRORS[name]
    checks, rules = found_in(name, is_mended=False)
    assert (checks, rules) == (error.checks, error.rules)
    assert error.reason or (error.checks and error.rules)


@pytest.mark.parametrize("name", NAMES)
def test_the_mended_program_has_no_finding(name):
    assert found_in(name, is_mended=True) == [set(), set()]


def test_at_least_ten_errors_have_a_public_source():
    assert len({error.source for error in ERRORS.values()}) >= 10
    assert all(error.source.startswith("https://") for error in ERRORS.values())
