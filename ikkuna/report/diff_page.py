"""Compares two stored runs, and writes a page with both side by side."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ikkuna.atomic_file import atomic_file
from ikkuna.reading import read_run
from ikkuna.report.content import RunContent, module_kinds, network_charts, presence, run_name
from ikkuna.report.difference import RunDifference, compare_runs
from ikkuna.report.heatmaps import ReportHeatmap, draw_heatmap
from ikkuna.report.page import page_target, render, separate_names
from ikkuna.visualization.pictures.colour_scale import ColourScale

__all__ = ["compare_paths", "write_diff"]

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
    target = page_target(path)
    progress("drawing")
    page = render(
        "diff.html",
        title=f"ikkuna: {first.name} and {second.name}",
        first=first,
        second=second,
        found=found,
        partings=found.partings[:_ROWS],
        charts=network_charts([first, second]),
        pairs_of_maps=_pairs(first, second),
    )
    with atomic_file(target) as file:
        file.write(page.encode("utf-8", "replace"))
    progress("")
    return target


def _pairs(first: RunContent, second: RunContent) -> list[tuple[ReportHeatmap, ReportHeatmap]]:
    """Return the heat maps of each common kind; both have the common modules and one scale."""
    pairs = []
    for kind in (kind for kind in module_kinds(first.run) if kind in second.run.kinds()):
        common = set(second.run.names(kind))
        names = [name for name in first.run.names(kind) if name is not None and name in common]
        if not names:
            continue
        matrices = [content.run.matrix(kind) for content in (first, second)]
        chosen = [(steps, values[[own.index(name) for name in names]]) for own, steps, values in matrices]
        scale = ColourScale.of(kind, np.concatenate([values.ravel() for _, values in chosen]))
        drawn = []
        for content, (steps, values) in zip((first, second), chosen, strict=True):
            present = presence(content.run, kind, names, steps)
            title = f"{kind} · {content.name}"
            drawn.append(draw_heatmap(title, kind, names, steps, values, present, scale, is_narrow=True))
        pairs.append((drawn[0], drawn[1]))
    return pairs
