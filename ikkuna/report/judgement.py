"""Applies the rules to a run in limited time."""

from ikkuna.diagnosis import Findings, Judge, Network, get_rules
from ikkuna.diagnosis.check import judge_run
from ikkuna.reading import StoredRun

__all__ = ["judge_in_time"]

_VALUES, _STEPS = 150_000, 1000


def judge_in_time(run: StoredRun, limit: int = _VALUES) -> tuple[Findings, str]:
    """Return the findings of the default rules, and a sentence about the steps that they judged.

    If a run has more than 1,000 steps, or `limit` values that the rules read, they judge evenly spaced steps only.
    """
    judge = Judge(get_rules("default"), Network(run.modules))
    sizes = [run.size(series) for series in run.all_series if series.kind in judge.kinds]
    count, most = sum(sizes), max(sizes, default=0)
    every = max(1, -(-count // limit), -(-most // _STEPS))
    judged, stored = judge_run(judge, run, every)
    text = f"The rules judged {judged:,} of {stored:,} steps; `ikkuna check` judges all of them." if every > 1 else ""
    return judge.findings, text
