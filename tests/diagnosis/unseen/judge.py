"""Verdicts on what was found, from judgements that were made by hand, and the tables of the documentation.

``judgements.json`` holds, for each program, the rules whose finding states the labelled cause (*right*) or a true symptom
of it (*symptom*), by reading the texts; any other warning or error on the program is wrong.  ``watch:rule`` and
``preflight:rule`` are judgements of one of both.  For a healthy program *false* says why an accusation is wrong.
"""

import json
from collections import Counter, defaultdict
from pathlib import Path

from tests.diagnosis.unseen import Case, cases

FOLDER = Path(__file__).parent
COLUMNS = ("watch", "preflight")
LOUD = ("warning", "error")
ORDER = ("named", "without its module", "at info", "symptom", "wrong", "silent")


def near(found: dict, module: str) -> bool:
    """Return whether a finding names the module, one inside it, or one around it other than the whole model."""
    names = [name for name in (found["module"], *found["modules"]) if name]
    return any(name == module or name.startswith(f"{module}.") or module.startswith(f"{name}.") for name in names)


def verdict(case: Case, result: dict[str, list[dict]], judged: dict, columns: tuple[str, ...] = COLUMNS) -> str:
    """Return one of `ORDER` for a program with a fault, by the findings of these columns."""
    found = [(column, f) for column in columns for f in result[column]]

    def those(judgement: str) -> list[dict]:
        names = judged.get(judgement, ())
        return [f for column, f in found if f["rule"] in names or f"{column}:{f['rule']}" in names]

    right = [f for f in those("right") if f["severity"] in LOUD]
    if right:
        placed = case.module is None or any(near(f, case.module) for f in right)
        return "named" if placed else "without its module"
    if those("right"):
        return "at info"
    if any(f["severity"] in LOUD for f in those("symptom")):
        return "symptom"
    return "wrong" if any(f["severity"] in LOUD for _, f in found) else "silent"


def verdicts(results: dict, judgements: dict, columns: tuple[str, ...] = COLUMNS) -> dict[str, str]:
    return {
        name: verdict(case, results[name], judgements.get(name, {}), columns)
        for name, case in cases().items()
        if not case.healthy and name in results
    }


def accused(results: dict) -> dict[str, list[dict]]:
    """Return the warnings and errors on healthy programs."""
    loud = {
        name: [f for column in COLUMNS for f in results[name][column] if f["severity"] in LOUD]
        for name, case in cases().items()
        if case.healthy and name in results
    }
    return {name: found for name, found in loud.items() if found}


def strays(results: dict, judgements: dict) -> list[tuple[str, str]]:
    """Return program and rule of each warning and error on a program with a fault that is neither its cause nor a symptom."""
    found = []
    for name, case in cases().items():
        judged = judgements.get(name, {})
        known = {*judged.get("right", ()), *judged.get("symptom", ())}
        for column in () if case.healthy else COLUMNS:
            rules = [f["rule"] for f in results[name][column] if f["severity"] in LOUD]
            found += [(name, rule) for rule in rules if not {rule, f"{column}:{rule}"} & known]
    return sorted(set(found))


def table(results: dict, judgements: dict, columns: tuple[str, ...] = COLUMNS) -> list[tuple[str, ...]]:
    """Return the counts of verdicts by family, for knowable causes, with a head and a last row for all families."""
    counts: dict[str, Counter] = defaultdict(Counter)
    total: Counter = Counter()
    for name, result in verdicts(results, judgements, columns).items():
        if cases()[name].knowable:
            counts[cases()[name].family][result] += 1
            total[result] += 1
    rows = [(family, str(count.total()), *(str(count[v]) for v in ORDER)) for family, count in counts.items()]
    return [("family", "kinds", *ORDER), *rows, ("all", str(total.total()), *(str(total[v]) for v in ORDER))]


def load(name: str) -> dict:
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))
