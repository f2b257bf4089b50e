"""Applies rules to a finished run."""

import os
from collections.abc import Iterable

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
    ``findings.skipped`` states which rules could not judge, and which subscriber would let them.

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


def judge_run(judge: Judge, run: StoredRun) -> None:
    """Pass the values of a run to a judge, one step after another.

    Several files of one run, such as those of two backends, are merged by steps; a resumed run begins again at an earlier step.
    """
    for points in run.sessions(judge.kinds):
        step = None
        for point in points:
            if step is not None and point.step != step:
                judge.finish_step(step)
            step = point.step
            judge.add(point.kind, point.name, step, point.value, point.pass_name)
        if step is not None:
            judge.finish_step(step)
