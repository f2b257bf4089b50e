"""The graph of the first loss is read before training as it is read in training."""

import pytest
import torch

import ikkuna
from tests.diagnosis.test_objective import RIGHT, RULES, WRONG

OF_SEVERAL_PASSES = {"one_label", "constant_result"}  # labels are counted, and ratios of 1 must be there twice


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
