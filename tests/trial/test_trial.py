"""Programs of the trial: a tenth of them runs here, and the stored results of all of them are right."""

import json
from dataclasses import replace

import pytest

from tests.trial.__main__ import RESULTS
from tests.trial.measurement import measure
from tests.trial.programs import PROGRAMS

ORDINARY = [name for name, program in PROGRAMS.items() if not program.needs][3::10]


@pytest.mark.parametrize("name", ORDINARY)
def test_program(name):
    assert measure(PROGRAMS[name]).wrong == []


def test_every_program_has_a_result_and_none_is_wrong():
    stored = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert stored.keys() == PROGRAMS.keys()
    assert {name: result["wrong"] for name, result in stored.items() if result["wrong"]} == {}
    assert {name: result["steps"] for name, result in stored.items()} == {
        name: list(program.steps) for name, program in PROGRAMS.items()
    }


def test_findings_are_judged():
    stored = json.loads(RESULTS.read_text(encoding="utf-8"))
    for name, result in stored.items():
        for rule, (severity, _) in result["findings"].items():
            verdict = PROGRAMS[name].judged[rule]
            assert verdict.startswith("true: ") or (severity == "info" and verdict.startswith("false: ")), (name, rule)


def test_a_wrong_number_of_steps_and_a_finding_that_is_not_judged_are_seen():
    program = PROGRAMS["full_batch"]
    wrong = measure(replace(program, steps=(59,), judged={})).wrong
    assert any("60 steps in place of 59" in line for line in wrong)
    assert any("repeated_batch is not judged" in line for line in wrong)
