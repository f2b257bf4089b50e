"""Learns what healthy runs of a project have in common, and finds where another run departs from it."""

import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ikkuna.diagnosis.findings import Findings
from ikkuna.errors import ConfigError
from ikkuna.store import StoredRun, read_run
from ikkuna.store.finding import Finding
from ikkuna.support.arrays import arrays_of, check_axes, write_arrays
from ikkuna.support.failures import raise_users_exception
from ikkuna.support.files import atomic_file, open_regular

_GROWTH = 1.5
_ROUNDING = 1e-4
_OF_RANGE = 0.02
_TINY = float(np.finfo(np.float32).tiny)
_LEAST_SCORE = 3.0
_MARGIN = 2.0
_FORMAT = 1
_STATISTICS = ("the least value", "the median", "the largest value")
_MOST = 1 << 31
_Key = tuple[str, str, str]
_AXES = {
    "kinds": ("U", "series"), "names": ("U", "series"), "passes": ("U", "series"),
    "edges": ("i", "edges"), "reached": ("i", "intervals"), "is_log": ("b", "series"),
    "centre": ("f", "series intervals 3"), "spread": ("f", "series intervals 3"), "facts": ("f", "3"),
}  # fmt: skip
_Path = str | os.PathLike[str]


@dataclass(frozen=True)
class Baseline:
    r"""The envelopes of the series of healthy runs.

    The steps are divided into intervals whose lengths grow by half.  In each interval a series is described by three statistics:
    its least value, its median and its largest value.  A series that is positive in all runs, and whose kind has no upper limit,
    is described by its decimal logarithm.
    With runs :math:`r`, the centre is :math:`c = \operatorname{median}_r m_r` and the spread :math:`s` is the largest of
    :math:`\max_r |m_r - c|`, its median over the intervals, and a resolution: 0.02 of the range if the kind has one, otherwise
    :math:`10^{-4} |c|` (:math:`10^{-4}` of a logarithm).
    The score of another run is :math:`|m - c| / s`.

    The limit of the score is not a constant: each healthy run is judged by an envelope of the other ones, and the limit is twice
    the largest score that one of them has in any series and interval, and at least 3.  If a new run is healthy, and is the same
    kind of sample as the n learned ones, then its largest score exceeds theirs with a probability of :math:`1/(n+1)`; twice
    theirs is rarer.

    Parameters
    ----------
    keys : list of tuple of str
        Kind, name of the module (empty for the network) and pass of each series.
    edges : ndarray (intervals + 1,)
        Interval ``b`` has the steps from ``edges[b]`` to ``edges[b + 1] - 1``.
    reached : ndarray (intervals,)
        The last step with a value in each interval; a run that ends before it is not judged there.
    is_log : ndarray (series,)
        Whether the series is described by its logarithm.
    centre, spread : ndarray (series, intervals, 3)
        The envelopes of least value, median and largest value; NaN where a run has no value.
    limit : float
        The limit of the score.
    runs : int
        The number of learned runs.
    """

    keys: list[_Key]
    edges: NDArray[np.int64]
    reached: NDArray[np.int64]
    is_log: NDArray[np.bool_]
    centre: NDArray[np.float64]
    spread: NDArray[np.float64]
    limit: float
    runs: int

    def write(self, path: _Path) -> Path:
        """Write the baseline to a file; it has single precision."""
        target = Path(path)
        kinds, names, passes = zip(*self.keys, strict=True)
        with atomic_file(target) as file:
            write_arrays(
                file,
                {
                    "kinds": np.array(kinds),
                    "names": np.array(names),
                    "passes": np.array(passes),
                    "edges": self.edges,
                    "reached": self.reached,
                    "is_log": self.is_log,
                    "centre": self.centre.astype(np.float32),
                    "spread": self.spread.astype(np.float32),
                    "facts": np.array([_FORMAT, self.runs, self.limit]),
                },
            )
        return target

    @classmethod
    def read(cls, path: _Path) -> "Baseline":
        """Read a file that `write` has written.

        Raises
        ------
        ConfigError
            If there is no such file, or if it is not a baseline.
        """
        try:
            with open_regular(Path(path)) as file:
                found = arrays_of(file, os.fstat(file.fileno()).st_size)
            check_axes(found, _AXES, f"'{path}'")
            keys = list(zip(*(found[name].tolist() for name in ("kinds", "names", "passes")), strict=True))
        except Exception as error:  # any error of a parser means that it is another file, or damaged
            raise_users_exception(error)
            raise ConfigError(f"'{path}' cannot be read as a baseline: {error}") from error
        written, runs, limit = found["facts"].tolist()
        edges = found["edges"]
        is_right = len(edges) == len(found["reached"]) + 1 and edges[0] == 0 and (np.diff(edges) > 0).all()
        if written != _FORMAT or not is_right or not (0 < runs < _MOST and limit > 0):
            raise ConfigError(f"'{path}' is not a baseline of this version of ikkuna")
        centre, spread = (found[name].astype(np.float64) for name in ("centre", "spread"))
        spread = np.where(spread > 0, spread, np.nan)  # as where a run has no value
        return cls(keys, edges, found["reached"], found["is_log"], centre, spread, float(limit), int(runs))

    def judge(self, run: StoredRun) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the statistics of a run and their scores, each of shape ``(series, intervals, 3)``.

        A score is NaN where the run or the baseline has no value, and infinite where the run has values that are not finite.
        """
        series = _all_series(run)
        ended = max((int(steps[-1]) for steps, _ in series.values() if len(steps)), default=-1)
        own = _statistics(series, self.keys, self.edges, self.is_log)
        scores = np.abs(own - self.centre) / self.spread
        scores[:, self.reached > ended] = np.nan
        return own, scores


def _all_series(run: StoredRun) -> dict[_Key, tuple[NDArray[np.int64], NDArray[np.float64]]]:
    """Return steps and values of the series by which runs can be compared."""
    found = {}
    for pass_name in run.passes():
        for kind in run.kinds(pass_name):
            if run.quantity(kind).is_comparable:
                for name in run.names(kind, pass_name):
                    steps, values, _ = run.series(kind, name, pass_name)
                    found[kind, name or "", pass_name] = steps, values
    return found


def _statistics(
    series: dict[_Key, tuple[NDArray[np.int64], NDArray[np.float64]]],
    keys: Sequence[_Key],
    edges: NDArray[np.int64],
    is_log: NDArray[np.bool_],
) -> NDArray[np.float64]:
    """Return least value, median and largest value of each series in each interval; infinite if a value is not finite."""
    found = np.full((len(keys), len(edges) - 1, 3), np.nan)
    for i, key in enumerate(keys):
        steps, values = series.get(key, (np.empty(0, np.int64), np.empty(0)))
        order = np.argsort(steps, kind="stable")
        steps, values = steps[order], values[order]
        if is_log[i]:
            with np.errstate(all="ignore"):
                values = np.log10(values)
        bounds = np.searchsorted(steps, edges)
        for b in np.flatnonzero(np.diff(bounds)).tolist():
            part = values[bounds[b] : bounds[b + 1]]
            finite = np.isfinite(part).all()
            found[i, b] = (part.min(), np.median(part), part.max()) if finite else np.inf
    return found


def _edges(last: int) -> NDArray[np.int64]:
    """Return the edges of intervals up to a last step."""
    edges = [0, 1]
    while edges[-1] <= last:
        edges.append(max(edges[-1] + 1, round(edges[-1] * _GROWTH)))
    edges[-1] = last + 1
    return np.array(edges, np.int64)


def _envelope(
    found: NDArray[np.float64], is_log: NDArray[np.bool_], ranges: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return centre and spread of statistics of shape ``(runs, series, intervals, 3)``."""
    finite = np.where(np.isinf(found), np.nan, found)
    centre = np.median(finite, axis=0)
    spread = np.abs(finite - centre).max(axis=0)
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # of series without a value in all runs
        usual = np.nan_to_num(np.nanmedian(spread, axis=1, keepdims=True))
    rounding = _ROUNDING * np.where(is_log[:, None, None], 1.0, np.abs(centre))
    resolution = np.where(np.isfinite(ranges), _OF_RANGE * ranges, 0.0)[:, None, None]
    return centre, np.maximum.reduce([spread, usual + rounding, resolution + np.zeros_like(centre)]) + _TINY


def learn(runs: Iterable[_Path]) -> Baseline:
    """Learn the envelopes of healthy runs.

    Parameters
    ----------
    runs : iterable of path
        At least three runs of one project that are known to be healthy, with different seeds.

    Raises
    ------
    ConfigError
        If there are fewer than three runs, if one is given twice, or if they have no series in common.
    """
    stored = [read_run(path) for path in runs]
    if len(stored) < 3:
        raise ConfigError(f"a baseline needs at least 3 healthy runs, got {len(stored)}")
    paths = [run.path.resolve() for run in stored]
    if twice := next((run.path for run, path in zip(stored, paths, strict=True) if paths.count(path) > 1), None):
        raise ConfigError(
            f"a baseline needs different runs, which show how far healthy ones are apart; '{twice}' is given twice"
        )
    series = [_all_series(run) for run in stored]
    keys = sorted(set.intersection(*(set(each) for each in series)))
    if not keys:
        raise ConfigError("the runs have no series in common")
    last = min(max(int(steps[-1]) for steps, _ in each.values() if len(steps)) for each in series)
    edges = _edges(last)
    quantities = [stored[0].quantity(kind) for kind, _, _ in keys]
    ranges = np.array([quantity.high - quantity.low for quantity in quantities])
    is_positive = np.array([all((each[key][1] > 0).all() for each in series) for key in keys])
    is_log = is_positive & np.isinf(ranges)
    found = np.stack([_statistics(each, keys, edges, is_log) for each in series])
    steps = np.unique(np.concatenate([each[key][0] for each in series for key in keys]))
    reached = steps[np.maximum(np.searchsorted(steps, edges[1:]) - 1, 0)]
    limit = _LEAST_SCORE
    for left_out in range(len(stored)):
        centre, spread = _envelope(np.delete(found, left_out, axis=0), is_log, ranges)
        scores = np.abs(found[left_out] - centre) / spread
        limit = max(limit, _MARGIN * float(np.nanmax(scores, initial=0.0, where=np.isfinite(scores))))
    return Baseline(keys, edges, reached, is_log, *_envelope(found, is_log, ranges), limit, len(stored))


def check_baseline(run: _Path, baseline: _Path | Baseline) -> Findings:
    """Find where a run departs from healthy runs of the same project.

    Each kind that departs is one finding, at the first interval in which one of its series does, in the module with the
    largest score there.

    Parameters
    ----------
    run : path
        The run.
    baseline : path or Baseline
        The result of `learn`, or its file.

    Raises
    ------
    ConfigError
        If there is no such run, or if the file is not a baseline.
    """
    known = baseline if isinstance(baseline, Baseline) else Baseline.read(baseline)
    stored = read_run(run)
    own, scores = known.judge(stored)
    largest = np.fmax.reduce(scores, axis=-1)
    beyond = np.nan_to_num(largest, nan=0.0, posinf=np.inf) > known.limit
    of_kind: dict[tuple[str, str], list[int]] = {}
    for i in np.flatnonzero(beyond.any(axis=1)).tolist():
        of_kind.setdefault((known.keys[i][0], known.keys[i][2]), []).append(i)
    found = []
    for rows in of_kind.values():
        first = min(int(np.argmax(beyond[i])) for i in rows)
        worst = max((i for i in rows if beyond[i, first]), key=lambda i: float(largest[i, first]))
        modules = tuple(known.keys[i][1] for i in rows if known.keys[i][1])
        found.append(_departure(known, own[worst, first], scores[worst, first], (worst, first), modules))
    found.sort(key=lambda finding: (finding.step or 0, -(finding.value or 0.0)))
    compared = int((~np.isnan(largest)).any(axis=1).sum())
    note = f"compared with {known.runs} healthy runs in {compared} series; the limit of the score is {known.limit:.3g}"
    return Findings(_of_modules(stored, known) + found, judged=["departs_from_baseline"], note=note)


def _departure(
    known: Baseline,
    own: NDArray[np.float64],
    scores: NDArray[np.float64],
    place: tuple[int, int],
    modules: tuple[str, ...],
) -> Finding:
    """Return the finding about a series (first of `place`) in an interval (second)."""
    (kind, name, pass_name), interval = known.keys[place[0]], place[1]
    which = int(np.nanargmax(scores))
    centre, spread = known.centre[place][which], known.spread[place][which]
    figures = own[which], centre - spread, centre + spread
    value, low, high = (10.0**figure for figure in figures) if known.is_log[place[0]] else figures
    of_pass = "" if pass_name == "training" else f" of the pass {pass_name!r}"
    return Finding(
        "departs_from_baseline",
        "warning",
        f"{_STATISTICS[which]} of {kind}{of_pass} in the steps {known.edges[interval]} to {known.edges[interval + 1] - 1} is "
        f"{value:.4g}; in the healthy runs it lies between {low:.4g} and {high:.4g} (score {scores[which]:.3g}).",
        module=name or None,
        kind=kind,
        step=int(known.edges[interval]),
        value=float(scores[which]),
        advice="compare code, data and settings with those of the healthy runs, for example with ikkuna diff",
        modules=modules,
    )


def _of_modules(run: StoredRun, known: Baseline) -> list[Finding]:
    """Return a finding if the run lacks modules that the healthy runs have."""
    own = {name for _, name, _ in _all_series(run)}
    missing = tuple(sorted({name for _, name, _ in known.keys if name} - own))
    if not missing:
        return []
    text = f"{len(missing)} modules of the healthy runs have no values in this run, such as {missing[0]!r}."
    advice = "compare the models, and the arguments of watch"
    return [Finding("departs_from_baseline", "warning", text, module=missing[0], modules=missing, advice=advice)]
