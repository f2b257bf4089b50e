"""Applies the rules to a run in limited time."""

import numpy as np

from ikkuna.diagnosis import Findings, Judge, Network, get_rules
from ikkuna.reading import StoredRun

__all__ = ["judge_in_time"]

_VALUES, _STEPS = 75_000, 1000


def judge_in_time(run: StoredRun, limit: int = _VALUES) -> tuple[Findings, str]:
    """Return the findings of the default rules, and a sentence about the steps that they judged.

    If a run has more than 1,000 steps, or `limit` values that the rules read, they judge evenly spaced steps only.
    """
    judge = Judge(get_rules("default"), Network(run.modules))
    sessions = list(run.session_columns(judge.kinds))
    count = sum(len(steps) for _, steps, _ in sessions)
    most = max((len(np.unique(steps)) for _, steps, _ in sessions), default=0)
    every = max(1, -(-count // limit), -(-most // _STEPS))
    judged, there = 0, 0
    for series, steps, values in sessions:
        unique = np.unique(steps)
        chosen = unique[::every]
        judged, there = judged + len(chosen), there + len(unique)
        mask = np.isin(steps, chosen) if every > 1 else np.ones(len(steps), bool)
        _judge(judge, run, series[mask].tolist(), steps[mask].tolist(), values[mask].tolist())
    text = f"The rules judged {judged:,} of {there:,} steps; `ikkuna check` judges all of them." if every > 1 else ""
    return judge.findings, text


def _judge(judge: Judge, run: StoredRun, series: list[int], steps: list[int], values: list[float]) -> None:
    latest = None
    for number, step, value in zip(series, steps, values, strict=True):
        if latest is not None and step != latest:
            judge.finish_step(latest)
        latest = step
        head = run.all_series[number]
        judge.add(head.kind, head.name, step, value, head.pass_name)
    if latest is not None:
        judge.finish_step(latest)
