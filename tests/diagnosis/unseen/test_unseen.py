"""The programs that were written before their author had read the rules: what is found stays found."""

import warnings

import pytest
import torch

from tests.diagnosis.unseen import cases
from tests.diagnosis.unseen.__main__ import run
from tests.diagnosis.unseen.judge import ORDER, accused, load, verdict, verdicts

FAULTS = [name for name, case in cases().items() if not case.healthy]
HEALTHY = [name for name, case in cases().items() if case.healthy]


@pytest.fixture(scope="module")
def judgements():
    return load("judgements.json")


@pytest.fixture
def findings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def find(name):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run(cases()[name])

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield find
    torch.set_num_threads(threads)


def test_there_are_enough_kinds_families_and_reports():
    faults, healthy = [cases()[name] for name in FAULTS], [cases()[name] for name in HEALTHY]
    assert len(faults) >= 60
    assert len({case.family for case in faults}) >= 12
    assert sum(bool(case.report) for case in faults) >= 12
    assert len(healthy) >= 60
    assert len({case.family for case in healthy}) >= 20


@pytest.mark.parametrize("results", ["results_before.json", "results.json"])
def test_every_stored_result_is_judged(results, judgements):
    results = load(results)
    assert set(results) == set(cases())
    assert set(verdicts(results, judgements).values()) <= set(ORDER)
    for name, found in accused(results).items():
        assert {f["rule"] for _, f in found} <= set(judgements[name]["false"]), name


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_what_was_named_is_still_named(name, findings, judgements):
    stored, found = load("results.json")[name], findings(name)
    judged = judgements.get(name, {})
    before, now = (verdict(cases()[name], rows, judged) for rows in (stored, found))
    assert ORDER.index(now) <= ORDER.index(before), f"{before}, now {now}"


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_programs_are_not_accused_of_anything_new(name, findings):
    known = {f["rule"] for _, f in accused(load("results.json")).get(name, ())}
    found = findings(name)
    loud = {f["rule"] for column in ("watch", "preflight") for f in found[column] if f["severity"] != "info"}
    assert loud <= known
