"""A loss that rises because something else than the weights moves it is no mistake; one that the steps raise is."""

import warnings

import pytest
import torch

import ikkuna
from tests.diagnosis.unseen import moving_targets
from tests.diagnosis.unseen.moving_targets import RECIPES
from tests.diagnosis.unseen.programs import classifier, language_model
from tests.diagnosis.unseen.recipes import Draw

MOVING = [name for name, (_, make) in RECIPES.items() if make.__module__ == moving_targets.__name__]


@pytest.fixture
def findings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def find(program):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with ikkuna.watch(program.model, *filter(None, [program.loss]), verbosity=0) as monitor:
                program.loop(program)
        return {finding.rule: finding for finding in monitor.findings}

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield find
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", MOVING)
def test_nothing_is_wrong_with_a_loss_that_is_moved(name, findings):
    torch.manual_seed(12)
    found = findings(RECIPES[name][1](Draw(12)))
    assert not [str(finding) for finding in found.values() if finding.severity != "info"]


@pytest.mark.parametrize("build", [classifier, language_model])
def test_steps_that_are_too_long_are_named(build, findings):
    torch.manual_seed(0)
    program = build()
    program.optimizer = torch.optim.SGD(program.model.parameters(), lr=0.5, momentum=0.99)
    named = findings(program)
    assert "error" in {named[rule].severity for rule in ("diverges", "lr_too_high") if rule in named}
