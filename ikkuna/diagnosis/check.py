"""Applies rules to a finished run."""

import os
from collections.abc import Iterable

import numpy as np

from ikkuna.diagnosis.findings import Findings
from ikkuna.diagnosis.installed import get_rules
from ikkuna.diagnosis.judge import Judge
from ikkuna.diagnosis.network import Network
from ikkuna.diagnosis.rule import Rule
from ikkuna.reading import StoredRun, read_run

__all__ = ["check", "judge_run"]


def check(path: str | os.PathLike[str], rules: str | Rule | Iterable[str | Rule] = "default") -> Findings:
    """Apply rules to the values of a finished run.

    The rules read the same series as while the model trained, in the order of steps.
    ``findings.skipped`` states which rules could not judge, and ``findings.needed`` which subscriber would let them.

    Parameters
    ----------
    path : str or path-like
        The directory of a run, an event file, or a file of JSON lines.
    rules : str, Rule, or iterable of them
        See `get_rules`.

    Raises
    ------
    ConfigError
        If there is no run, or if a rule is invalid.
    PluginError
        If a rule is unknown.
    """
    judge = Judge(get_rules(rules))
    run = read_run(path)
    judge.history.network = Network(run.modules)
    judge_run(judge, run)
    return judge.findings


def judge_run(judge: Judge, run: StoredRun, every: int = 1) -> tuple[int, int]:
    """Pass the values of a run to a judge, one step after another, and return the numbers of judged and of stored steps.

    Several files of one run, such as those of two backends, are merged by steps; a resumed run begins again at an earlier step.

    Parameters
    ----------
    judge : Judge
        The rules.
    run : StoredRun
        The run.
    every : int
        Judge every n-th stored step only.
    """
    names = [series.name for series in run.all_series]
    groups = {(series.kind, series.pass_name): i for i, series in enumerate(run.all_series)}
    group_of = np.array([groups[series.kind, series.pass_name] for series in run.all_series], np.int64)
    judged = stored = 0
    for numbers, steps, values in run.session_columns(judge.kinds):
        unique, begins = np.unique(steps, return_index=True)
        ends = np.append(begins, len(steps))[1:]
        chosen = zip(unique[::every].tolist(), begins[::every].tolist(), ends[::every].tolist(), strict=True)
        for step, begin, end in chosen:
            found = group_of[numbers[begin:end]]
            for group in np.unique(found).tolist():
                mask, head = found == group, run.all_series[group]
                own = [names[number] for number in numbers[begin:end][mask].tolist()]
                judge.add_all(head.kind, own, step, values[begin:end][mask].tolist(), head.pass_name)
            judge.finish_step(step)
        judged, stored = judged + len(unique[::every]), stored + len(unique)
    return judged, stored
