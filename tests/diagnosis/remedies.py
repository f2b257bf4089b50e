"""Counts remedies that would not remove the mistake that their finding names.

``remedies.json`` was written by reading each advice beside the mistake: *read* holds the texts that were read, by rule, and *useless* the
rules that name a mistake, but whose advice would not remove it or does harm, by planted mistake or program.  All others would remove it.
An advice of several parts is right if the part that applies to the program removes the mistake, and no part that applies does harm.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.diagnosis.unseen import SETS, cases
from tests.diagnosis.unseen.judge import COLUMNS, LOUD, fits, load

FOLDER = Path(__file__).parent


class Remedy(NamedTuple):
    """The advice of findings of one rule that name a mistake; planted mistakes have several runs."""

    mistake: str
    rule: str
    count: int = 1
    advice: str | None = None


def judged() -> dict[str, dict[str, list[str]]]:
    return json.loads((FOLDER / "remedies.json").read_text(encoding="utf-8"))


def of_planted() -> Iterator[Remedy]:
    """Yield the findings that name planted mistakes, which the measurement has counted."""
    for name, counts in json.loads((FOLDER / "measured.json").read_text(encoding="utf-8"))["faults"].items():
        for rule, number in counts["by"].items():
            yield Remedy(name, rule, number)


def of_set(name: str) -> Iterator[Remedy]:
    """Yield the warnings and errors that name the mistakes of a set, each advice once."""
    prefix = "" if name == "first" else f"{name}_"
    results, judgements = load(f"{prefix}results.json"), load(f"{prefix}judgements.json")
    results |= load("fourth_again.json") if name == "fourth" else {}
    for program in cases(name):
        right = judgements.get(program, {}).get("right", ())
        found = [(column, f) for column in COLUMNS for f in results[program][column] if f["severity"] in LOUD]
        named = {(f["rule"], f["advice"]) for column, f in found if any(fits(entry, column, f) for entry in right)}
        yield from (Remedy(program, rule, advice=advice) for rule, advice in sorted(named))


def table() -> list[tuple[str, ...]]:
    """Return the number of findings that name a mistake, and of those with a useless remedy, by set."""
    useless, rows = judged()["useless"], []
    groups = {"planted mistakes": [*of_planted()], **{f"{name} set": [*of_set(name)] for name in SETS}}
    groups["all"] = [remedy for group in groups.values() for remedy in group]
    for group, remedies in groups.items():
        wrong = [each for each in remedies if each.rule in useless.get(each.mistake, ())]
        named, number = sum(each.count for each in remedies), sum(each.count for each in wrong)
        which = ", ".join(f"``{each.rule}`` for {each.mistake}" for each in wrong) if group != "all" else ""
        rows.append((group, str(named), str(number), f"{number / named:.1%}", which))
    return [("mistakes", "findings", "useless remedies", "share", "which"), *rows]
