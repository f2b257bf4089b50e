"""Verdicts on what was found, from judgements that were made by hand, and the tables of the documentation.

``judgements.json`` holds, for each program, the rules whose finding states the labelled cause (*right*) or a true symptom
of it (*symptom*), by reading the texts; any other warning or error on the program is wrong.  ``watch:rule`` and
``preflight:rule`` are judgements of one of both, ``rule: words`` of texts with these words.
For a healthy program *false* says why an accusation is wrong.
"""

import json
from collections import Counter, defaultdict
from pathlib import Path

from tests.diagnosis.unseen import SETS, Case, cases

FOLDER = Path(__file__).parent
COLUMNS = ("watch", "preflight")
LOUD = ("warning", "error")
ORDER = ("named", "without its module", "at info", "symptom", "wrong", "silent")


def near(found: dict, case: Case) -> bool:
    """Return whether a finding names the module, one inside it, or one around it other than the whole model.

    A parameter of the model itself has the class of the model before its name.
    """
    names = [name for name in (found["module"], *found["modules"]) if name]
    if any(name.endswith(f".{case.module}") for name in names):
        root = type(case.build().model).__name__.lower()
        names = [name.removeprefix(f"{root}.") for name in names]
    return any(
        name == case.module or name.startswith(f"{case.module}.") or case.module.startswith(f"{name}.")
        for name in names
    )


def fits(entry: str, column: str, found: dict) -> bool:
    """Return whether an entry of a judgement is that of a finding."""
    rule, _, words = entry.partition(": ")
    return rule in (found["rule"], f"{column}:{found['rule']}") and words in found["text"]


def verdict(case: Case, result: dict[str, list[dict]], judged: dict, columns: tuple[str, ...] = COLUMNS) -> str:
    """Return one of `ORDER` for a program with a fault, by the findings of these columns."""
    found = [(column, f) for column in columns for f in result[column]]

    def those(judgement: str) -> list[dict]:
        return [f for column, f in found if any(fits(entry, column, f) for entry in judged.get(judgement, ()))]

    right = [f for f in those("right") if f["severity"] in LOUD]
    if right:
        placed = case.module is None or any(near(f, case) for f in right)
        return "named" if placed else "without its module"
    if those("right"):
        return "at info"
    if any(f["severity"] in LOUD for f in those("symptom")):
        return "symptom"
    return "wrong" if any(f["severity"] in LOUD for _, f in found) else "silent"


def verdicts(results: dict, judgements: dict, columns: tuple[str, ...] = COLUMNS) -> dict[str, str]:
    return {
        name: verdict(case, results[name], judgements.get(name, {}), columns)
        for name, case in cases(*SETS).items()
        if not case.healthy and name in results
    }


def accused(results: dict) -> dict[str, list[tuple[str, dict]]]:
    """Return the warnings and errors on healthy programs, each with its column."""
    loud = {
        name: [(column, f) for column in COLUMNS for f in results[name][column] if f["severity"] in LOUD]
        for name, case in cases(*SETS).items()
        if case.healthy and name in results
    }
    return {name: found for name, found in loud.items() if found}


def strays(results: dict, judgements: dict) -> list[tuple[str, str]]:
    """Return program and rule of each warning and error on a program with a fault that is neither its cause nor a symptom."""
    found = []
    for name, case in cases(*SETS).items():
        if name not in results:
            continue
        judged = judgements.get(name, {})
        known = [*judged.get("right", ()), *judged.get("symptom", ())]
        for column in () if case.healthy else COLUMNS:
            loud = [f for f in results[name][column] if f["severity"] in LOUD]
            found += [(name, f["rule"]) for f in loud if not any(fits(entry, column, f) for entry in known)]
    return sorted(set(found))


def table(results: dict, judgements: dict) -> list[tuple[str, ...]]:
    """Return the counts of verdicts by family, for knowable causes, with a head and two last rows for all families."""
    counts: dict[str, Counter] = defaultdict(Counter)
    known = cases(*SETS)
    for columns, whole in ((COLUMNS, "all"), (("watch",), "all, by ``ikkuna.watch`` alone")):
        for name, result in verdicts(results, judgements, columns).items():
            for group in (known[name].family, whole) if columns is COLUMNS else (whole,):
                counts[group][result] += known[name].knowable
    ordered = sorted(counts, key=lambda group: group.startswith("all"))
    rows = [(group, str(counts[group].total()), *(str(counts[group][v]) for v in ORDER)) for group in ordered]
    return [("family", "kinds", *ORDER), *rows]


def load(name: str) -> dict:
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))
