"""Applies rules to a finished run."""

import os
from collections.abc import Iterable

from ikkuna.diagnosis.findings import Findings
from ikkuna.diagnosis.history import TRAINING
from ikkuna.diagnosis.installed import get_rules
from ikkuna.diagnosis.judge import Judge
from ikkuna.diagnosis.network import Network
from ikkuna.diagnosis.rule import Rule
from ikkuna.visualization.reading import Point, read_run

__all__ = ["check", "judge_points"]


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
    judge_points(judge, run.points)
    return judge.findings


def judge_points(judge: Judge, points: Iterable[Point]) -> None:
    """Pass stored values to a judge, one step after another.

    Several files of one run, such as those of two backends, are merged by steps; a resumed run begins again at an earlier step.
    """
    for session in _sessions(points):
        by_step: dict[int, list[Point]] = {}
        for point in session:
            by_step.setdefault(point.step, []).append(point)
        for step in sorted(by_step):
            for point in by_step[step]:
                judge.add(point.kind, point.name, step, point.value, point.pass_name)
            judge.finish_step(step)


def _sessions(points: Iterable[Point]) -> list[list[Point]]:
    """Split values where a series of the training goes back to an earlier step."""
    sessions: list[list[Point]] = [[]]
    latest: dict[tuple[str, str | None], int] = {}
    for point in points:
        key = point.kind, point.name
        if point.pass_name == TRAINING:
            if point.step < latest.get(key, -1):
                sessions.append([])
                latest = {}
            latest[key] = point.step
        sessions[-1].append(point)
    return sessions
