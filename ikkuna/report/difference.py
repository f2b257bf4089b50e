"""Compares two stored runs, and writes a page with both side by side."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ikkuna.backends.pictures.cells import ColourScale
from ikkuna.diagnosis.stored_findings import read_findings
from ikkuna.report.charts import folded
from ikkuna.report.content import RunContent, network_charts, run_name
from ikkuna.report.heatmaps import ReportHeatmap, draw_heatmap
from ikkuna.report.modules import module_kinds
from ikkuna.report.page import page_target, render, separate_names, write_page
from ikkuna.store import SeriesValues, StoredRun, read_run
from ikkuna.store.quantity import step_order
from ikkuna.store.values import ModuleOrder

_FACTOR = 6.0
_PERSISTENT = 3  # values


@dataclass(frozen=True, slots=True)
class Parting:
    """The first difference of a series beyond the noise.

    Parameters
    ----------
    kind : str
        The kind.
    module : str or None
        The name of the series; ``None`` for the network.
    step : int
        The step.
    first, second : float
        The values of the two runs.
    noise : float
        The difference up to which values count as equal at this step.
    """

    kind: str
    module: str | None
    step: int
    first: float
    second: float
    noise: float


@dataclass(slots=True)
class RunDifference:
    """How two runs differ.

    Parameters
    ----------
    partings : list of Parting
        The first difference of each series that differs, in the order of steps; within a step in the order of a training step.
    compared : int
        The number of compared series, which have a common step.
    only_first, only_second : list of str
        Names of modules that one run lacks.
    common : int
        The number of common modules.
    config, environment : dict of str to tuple
        The settings that differ, with the values of both runs.
    """

    partings: list[Parting] = field(default_factory=list)
    compared: int = 0
    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    common: int = 0
    config: dict[str, tuple[str, str]] = field(default_factory=dict)
    environment: dict[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def is_same_model(self) -> bool:
        """Whether both runs have the same modules."""
        return not self.only_first and not self.only_second

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)


def compare_runs(
    first: StoredRun, second: StoredRun, repeats: Sequence[StoredRun] = (), tolerance: float = 1e-4
) -> RunDifference:
    """Return the first difference of each common series.

    Values count as different if ``|a - b|`` exceeds all of these:

    * `tolerance` times the larger of ``|a|`` and ``|b|``
    * with `repeats`, which repeat the first run: 6 times their largest difference from it up to this step
    * without: 6 times the largest difference between the two runs before this step that was within the noise

    and if this is so for most of the next 3 common steps.  Values of a kind that is declared as exact, as a fingerprint, are different
    if they are not equal.
    Only steps that both runs have are compared, and no kinds that are declared as not comparable, as those that measure time.

    Parameters
    ----------
    first, second : StoredRun
        The runs.
    repeats : sequence of StoredRun
        Further runs with the settings of the first run.
    tolerance : float
        The relative difference that counts as rounding.
    """
    found = RunDifference()
    for pass_name in (name for name in first.passes() if name in second.passes()):
        for kind in first.kinds(pass_name):
            if not (first.quantity(kind).is_comparable and second.quantity(kind).is_comparable):
                continue
            names = set(second.names(kind, pass_name))
            repeated = [(each, set(each.names(kind, pass_name))) for each in repeats]
            for name in (name for name in first.names(kind, pass_name) if name in names):
                pair = first.series(kind, name, pass_name), second.series(kind, name, pass_name)
                if not np.isin(pair[0].steps, pair[1].steps).any():
                    continue
                others = [each.series(kind, name, pass_name) for each, known in repeated if name in known]
                found.compared += 1
                label = kind if pass_name == "training" else f"{kind}.{pass_name}"
                exact = first.quantity(kind).is_exact
                if (
                    parting := _parting(label, name, *pair, () if exact else others, 0.0 if exact else tolerance)
                ) is not None:
                    found.partings.append(parting)
    order = ModuleOrder(first.modules)
    places = {kind: step_order(kind, first.quantities) for kind in first.kinds(None)}
    found.partings.sort(key=lambda parting: training_order(parting.step, parting.kind, parting.module, order, places))
    _compare_modules(found, first, second)
    return found


def _compare_modules(found: RunDifference, first: StoredRun, second: StoredRun) -> None:
    names = [[entry.name for entry in run.modules] or list(run.module_names()) for run in (first, second)]
    known = [set(of_run) for of_run in names]
    found.only_first = [name for name in names[0] if name not in known[1]]
    found.only_second = [name for name in names[1] if name not in known[0]]
    found.common = len(names[0]) - len(found.only_first)


def training_order(
    step: int, kind: str, module: str | None, order: ModuleOrder, places: Mapping[str, tuple[int, bool]]
) -> tuple[Any, ...]:
    """Return a key that sorts values by their steps, and within a step as training computes them.

    `places` has the place of each kind in a step and whether that is in the backward pass, where the last layer comes first.
    """
    place, is_backward = places[kind.partition(".")[0] if kind not in places else kind]
    position, natural = order.key(module) if module is not None else (-1, [])
    return step, place, -position if is_backward else position, natural, kind


def _aligned(a: SeriesValues, b: SeriesValues) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    steps, left, right = np.intersect1d(a.steps, b.steps, return_indices=True)
    return steps, a.values[left], b.values[right]


def _distance(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ``|a - b|``: 0 where both are the same, also for NaN, and infinite where only one of them is finite."""
    with np.errstate(all="ignore"):
        distance = np.abs(a - b)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    distance[~same & ~np.isfinite(distance)] = np.inf
    distance[same] = 0.0
    return distance


def _parting(
    kind: str,
    name: str | None,
    a: SeriesValues,
    b: SeriesValues,
    repeats: Iterable[SeriesValues],
    tolerance: float,
) -> Parting | None:
    steps, left, right = _aligned(a, b)
    distance = _distance(left, right)
    noise = tolerance * np.maximum(
        np.abs(np.nan_to_num(left, posinf=0, neginf=0)), np.abs(np.nan_to_num(right, posinf=0, neginf=0))
    )
    spread = _spread_of(repeats, a, steps)
    noise = np.maximum(noise, _FACTOR * spread) if spread is not None else _noise_before(distance, noise)
    beyond = distance > noise
    for i in np.flatnonzero(beyond).tolist():
        following = beyond[i : i + _PERSISTENT]
        if 2 * int(following.sum()) > len(following):
            return Parting(kind, name, int(steps[i]), float(left[i]), float(right[i]), float(noise[i]))
    return None


def _noise_before(distance: NDArray[np.float64], least: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return for each step 6 times the largest difference before it that was within the noise, or `least` if that is more."""
    if not (distance > least).any():
        return least
    noise, largest = least.copy(), 0.0
    for i, (own, rounding) in enumerate(zip(distance.tolist(), least.tolist(), strict=True)):
        noise[i] = max(rounding, _FACTOR * largest)
        if own <= noise[i]:
            largest = max(largest, own)
    return noise


def _spread_of(
    repeats: Iterable[SeriesValues], a: SeriesValues, steps: NDArray[np.int64]
) -> NDArray[np.float64] | None:
    """Return the largest difference between repeats up to each step; ``None`` without repeats."""
    found = None
    for repeat in repeats:
        own, left, right = _aligned(a, repeat)
        if not len(own):
            continue
        largest = np.maximum.accumulate(np.nan_to_num(_distance(left, right), posinf=0.0))
        places = np.searchsorted(own, steps, "right") - 1
        spread = np.where(places >= 0, largest[np.maximum(places, 0)], 0.0)
        found = spread if found is None else np.maximum(found, spread)
    return found


_ROWS = 40

_Path = str | os.PathLike[str]


def compare_paths(
    first: _Path, second: _Path, repeats: Sequence[_Path] = (), tolerance: float = 1e-4
) -> tuple[RunDifference, RunContent, RunContent]:
    """Return how two stored runs differ, and the two runs.

    Parameters
    ----------
    first, second : str or path-like
        Directories of runs, event files, or files of JSON lines.
    repeats : sequence of str or path-like
        Runs with the settings of the first run, to measure the noise.
    tolerance : float
        See `compare_runs`.

    Raises
    ------
    ConfigError
        If there is no run.
    """
    contents = [RunContent(run_name(Path(path)), read_run(path), number) for number, path in enumerate((first, second))]
    for content in contents:
        content.read_settings()
        content.findings = (read_findings(content.run.path) or content.findings).heard()
    separate_names(contents)
    a, b = contents
    found = compare_runs(a.run, b.run, [read_run(path) for path in repeats], tolerance)
    found.config = _changed(a.config, b.config)
    found.environment = _changed(a.environment, b.environment)
    found.environment.pop("created", None)
    return found, a, b


def _changed(a: dict[str, str], b: dict[str, str]) -> dict[str, tuple[str, str]]:
    missing = "—"
    names = [*a, *(name for name in b if name not in a)]
    pairs = {name: (a.get(name, missing), b.get(name, missing)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def write_diff(
    found: RunDifference,
    first: RunContent,
    second: RunContent,
    path: _Path,
    progress: Callable[[str], None] = lambda text: None,
) -> Path:
    """Write a page with both runs side by side, on one scale for each kind.

    Parameters
    ----------
    found : RunDifference
        The result of `compare_paths`.
    first, second : RunContent
        The runs.
    path : str or path-like
        The page.
    progress : callable
        Called with a text before each part of the work.

    Raises
    ------
    ConfigError
        If there is no directory for the page.
    """
    return write_page(page_target(path), lambda: difference_page(found, first, second), progress)


def difference_page(found: RunDifference, first: RunContent, second: RunContent, **values: Any) -> str:
    """Return the page with both runs side by side; `values` are further values of the template."""
    return render(
        "diff.html",
        title=f"ikkuna: {first.name} and {second.name}",
        first=first,
        second=second,
        found=found,
        partings=found.partings[:_ROWS],
        charts=folded(network_charts([first, second])),
        pairs_of_maps=_pairs(first, second),
        **values,
    )


def _pairs(first: RunContent, second: RunContent) -> list[tuple[ReportHeatmap, ReportHeatmap]]:
    """Return the heat maps of each common kind; both have the common modules and one scale."""
    pairs = []
    for kind in (kind for kind in module_kinds(first.run) if kind in second.run.kinds()):
        common = set(second.run.names(kind))
        names = [name for name in first.run.names(kind) if name is not None and name in common]
        if not names:
            continue
        matrices = [content.run.matrix(kind) for content in (first, second)]
        rows = [{name: row for row, name in enumerate(own)} for own, _, _ in matrices]
        chosen = [
            (steps, values[[row[name] for name in names]])
            for row, (_, steps, values) in zip(rows, matrices, strict=True)
        ]
        quantity = first.run.quantity(kind)
        scale = ColourScale.of(quantity, np.concatenate([values.ravel() for _, values in chosen]))
        drawn = []
        for content, (steps, values) in zip((first, second), chosen, strict=True):
            present = content.run.presence(kind, names, steps)
            title = f"{kind} · {content.name}"
            drawn.append(draw_heatmap(title, quantity, names, steps, values, present, scale, is_narrow=True))
        pairs.append((drawn[0], drawn[1]))
    return pairs
