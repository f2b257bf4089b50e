"""Judges runs that are finished or still being written."""

import os
from collections.abc import Iterable, Iterator
from heapq import merge
from itertools import chain, groupby, zip_longest
from operator import attrgetter, itemgetter

import numpy as np

from ikkuna.diagnosis.findings import Findings
from ikkuna.diagnosis.history import Network
from ikkuna.diagnosis.judge import Judge
from ikkuna.diagnosis.rule import Rule, get_rules
from ikkuna.diagnosis.stored_findings import read_findings
from ikkuna.diagnosis.stored_values import ValueGroup, read_rule_values
from ikkuna.store import StoredRun, read_run


def check(
    path: str | os.PathLike[str], rules: str | Rule | Iterable[str | Rule] | None = None, muted: bool = False
) -> Findings:
    """Return the findings of a finished run.

    Parameters
    ----------
    path : str or path-like
        The directory of a run, an event file, or a file of JSON lines.
    rules : str, Rule, or iterable of them, optional
        Judge the run again with these rules, see `get_rules`; by default see `findings_of`.
    muted : bool
        Whether to return muted findings too.

    Raises
    ------
    ConfigError
        If there is no run, or if a rule is invalid.
    PluginError
        If a rule is unknown.
    """
    chosen = None if rules is None else get_rules(rules)
    run = read_run(path)
    if chosen is None:
        return findings_of(run, muted)
    found, stored = judge_again(run, chosen), read_findings(run.path)
    found.muted = frozenset() if stored is None else stored.muted
    return found if muted else found.heard()


def findings_of(run: StoredRun, muted: bool = False) -> Findings:
    """Return the findings that rules have stored while the model trained, without muted ones unless `muted`.

    If the run has none stored, because it was trained without rules or is a single file, the default rules judge it;
    ``findings.note`` says so.
    """
    if (stored := read_findings(run.path)) is not None:
        return stored if muted else stored.heard()
    found = judge_again(run, get_rules("default"))
    note = "The run has no stored findings: the default rules have judged its values now."
    return Findings(found, found.judged, found.skipped, found.needed, note)


def judge_again(run: StoredRun, rules: Iterable[Rule]) -> Findings:
    """Return what rules find in every step of a run.

    They read the values that the rules have read while the model trained, in double precision.
    Kinds without such values are read from what was shown.  A part of a resumed training begins with an empty history.
    ``findings.skipped`` states which rules could not judge, and ``findings.needed`` which subscriber would let them.
    """
    judge = Judge(rules)
    read = read_rule_values(run.path)
    judge.history.network = Network((read and read.modules) or run.modules)
    shown = _shown_sessions(run, judge.kinds - read.kinds if read is not None else judge.kinds)
    for stored, others in zip_longest(read.sessions if read is not None else (), shown):
        begin, steps = stored or (None, [])
        if begin is not None:
            judge.rewind(begin)
        _judge_session(judge, steps, others or iter(()))
    return judge.findings


def _judge_session(judge: Judge, steps: list[tuple[int, list[ValueGroup]]], others: Iterator[ValueGroup]) -> None:
    """Pass the values of a part of the training to a judge, one judged step after another.

    If the steps at whose end the rules judged are not stored, they are those of the values.
    """
    shown = ((step, list(groups)) for step, groups in groupby(others, attrgetter("step")))
    for step, found in groupby(merge(steps, shown, key=itemgetter(0)), itemgetter(0)):
        for group in chain.from_iterable(groups for _, groups in found):
            judge.add_all(group.kind, group.names, group.step, group.values, group.pass_name)
        judge.finish_step(step)


def _shown_sessions(run: StoredRun, kinds: frozenset[str]) -> Iterator[Iterator[ValueGroup]]:
    """Yield the values of some kinds that were shown, for each part of the training between two restarts.

    Several files of one run, such as those of two backends, are merged by steps; a resumed run begins again at an earlier step.
    """
    names = [series.name for series in run.all_series]
    numbers = {(series.kind, series.pass_name): i for i, series in enumerate(run.all_series)}
    number_of = np.array([numbers[series.kind, series.pass_name] for series in run.all_series], np.int64)

    def groups(series: np.ndarray, steps: np.ndarray, values: np.ndarray) -> Iterator[ValueGroup]:
        unique, begins = np.unique(steps, return_index=True)
        ends = np.append(begins, len(steps))[1:]
        for step, begin, end in zip(unique.tolist(), begins.tolist(), ends.tolist(), strict=True):
            found = number_of[series[begin:end]]
            for number in np.unique(found).tolist():
                mask, head = found == number, run.all_series[number]
                own = [names[each] for each in series[begin:end][mask].tolist()]
                yield ValueGroup(head.kind, head.pass_name, own, step, values[begin:end][mask].tolist())

    for columns in run.session_columns(kinds):
        yield groups(*columns)
