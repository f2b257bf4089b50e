"""Remedies were read beside the mistakes that they are for, and few of them are useless."""

import pytest

from ikkuna.diagnosis import get_rules
from tests.diagnosis.planted import FAULTS
from tests.diagnosis.remedies import judged, of_planted, of_set, table
from tests.diagnosis.unseen import SETS


@pytest.fixture(scope="module")
def remedies():
    return [*of_planted(), *(remedy for name in SETS for remedy in of_set(name))]


def test_at_most_one_in_a_hundred_remedies_is_useless():
    *_, (_, named, number, _, _) = table()
    assert int(named) > 600
    assert int(number) <= 0.01 * int(named)


def test_every_remedy_was_read(remedies):
    read = judged()["read"]
    unread = {
        (each.rule, each.advice) for each in remedies if each.advice and each.advice not in read.get(each.rule, ())
    }
    assert not unread


def test_every_remedy_of_a_planted_mistake_was_read():
    read, named = judged()["read"], {rule for _, rules, _ in FAULTS.values() for rule in rules}
    assert {
        rule.name: rule.advice for rule in get_rules() if rule.name in named and rule.advice not in read[rule.name]
    } == {}


def test_every_useless_remedy_is_that_of_a_finding(remedies):
    given = {(each.mistake, each.rule) for each in remedies}
    assert {(mistake, rule) for mistake, rules in judged()["useless"].items() for rule in rules} <= given
