"""The history that rules have read, as arrays, and back."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ikkuna.diagnosis.findings import Finding
from ikkuna.diagnosis.history import History
from ikkuna.diagnosis.judge import Judge
from ikkuna.diagnosis.rule import Rule

__all__ = ["feed_history", "history_arrays", "rule_facts"]


def history_arrays(history: History) -> dict[str, NDArray[Any]]:
    """Return the values of all series that are kept: the first 20 and the last 400 of each."""
    kinds, names, passes = [], [], []
    series, steps, values = [], [], []
    for number, (kind, pass_name, name, curve) in enumerate(history.all_curves()):
        kinds.append(kind)
        names.append("" if name is None else f"={name}")
        passes.append(pass_name)
        early = max(min(len(curve.first), curve.count - len(curve.values)), 0)
        points = [
            *zip(curve.first_steps[:early], curve.first[:early], strict=True),
            *zip(curve.steps, curve.values, strict=True),
        ]
        series += [number] * len(points)
        steps += [step for step, _ in points]
        values += [value for _, value in points]
    return {
        "kinds": np.array(kinds, np.str_),
        "names": np.array(names, np.str_),
        "passes": np.array(passes, np.str_),
        "series": np.array(series, np.int64),
        "steps": np.array(steps, np.int64),
        "values": np.array(values, np.float64),
    }


def feed_history(judge: Judge, arrays: Mapping[str, NDArray[Any]], before: int) -> list[Finding]:
    """Judge the values of the steps before `before` again, in the order of steps; return the findings."""
    keys = [arrays[name].tolist() for name in ("kinds", "names", "passes")]
    order = np.argsort(arrays["steps"], kind="stable")
    found: list[Finding] = []
    present: int | None = None
    for i in order[arrays["steps"][order] < before].tolist():
        step, number = int(arrays["steps"][i]), int(arrays["series"][i])
        if present is not None and step != present:
            found += judge.finish_step(present)
        present = step
        kind, name, pass_name = (column[number] for column in keys)
        judge.add(kind, name[1:] if name else None, step, float(arrays["values"][i]), pass_name)
    if present is not None:
        found += judge.finish_step(present)
    return found


def rule_facts(rules: tuple[Rule, ...]) -> list[dict[str, Any]]:
    """Return the names, the thresholds and the patience of rules as plain values."""
    return [
        {"name": rule.name, "patience": rule.patience} | {name: float(getattr(rule, name)) for name in rule.thresholds}
        for rule in rules
    ]
