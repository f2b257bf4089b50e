"""The sections of the rules are generated from their docstrings, their tests and the stored measurement."""

import json
import re

import pytest

from ikkuna.diagnosis import get_rules
from tests.diagnosis.planted import FAULTS
from tests.documentation.test_tables import extension

page = pytest.fixture(scope="module", name="page")(lambda: (yield from extension("ikkuna_rules")))
NAMES = sorted(rule.name for rule in get_rules("all") if type(rule).__module__.startswith("ikkuna_subscribers."))


@pytest.fixture(scope="module", name="sections")
def _sections(page):
    return {name: (text, svg) for name, text, svg in page.sections()}


@pytest.mark.parametrize("name", NAMES)
def test_each_rule_has_a_section_with_its_threshold_its_figures_and_a_picture(sections, name):
    text, svg = sections[name]
    assert re.findall(r"^:(.*?):", text, re.MULTILINE) == [
        "Severity",
        "Threshold and its source",
        "Measured",
        "Cannot see",
        "Try",
    ]
    assert re.search(r"in \d+ healthy runs", text)
    assert svg.count("<polyline") == (
        1 if name in ("nonfinite", "no_gradient") else 2
    )  # NaN, and values that are missing
    assert len(svg) < 10_000


def test_a_rule_with_a_planted_mistake_shows_its_code_and_its_recall(sections):
    text, _ = sections["not_zeroed"]
    assert "case.clears = False" in text
    assert re.search(r"It named \d+ of \d+ planted mistakes", text)


def test_the_stored_measurement_is_consistent_and_of_the_rules_and_faults_of_today(page):
    """Run ``python -m tests.diagnosis.measure report --table tests/diagnosis/measured.json`` after a change of either."""
    measured = json.loads(page.MEASURED.read_text(encoding="utf-8"))
    assert set(measured["rules"]) == {rule.name for rule in get_rules()}
    assert set(measured["faults"]) <= set(FAULTS)
    for figure in ("runs", "found", "named", "near", "with_module"):
        assert measured[figure] == sum(counts[figure] for counts in measured["faults"].values())
    assert measured["found"] >= 0.9 * measured["runs"]
    assert measured["healthy"]["alarms"] <= 0.01 * measured["healthy"]["runs"]
