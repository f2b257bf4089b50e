"""Writes the page of a report."""

import json
import os
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ikkuna.diagnosis.check import findings_of
from ikkuna.diagnosis.findings import Findings, details_html
from ikkuna.errors import ConfigError
from ikkuna.report.charts import folded
from ikkuna.report.content import RunContent, network_charts, run_name, wall_times
from ikkuna.report.heatmaps import distributions_of
from ikkuna.report.modules import (
    Block,
    KindTable,
    abnormal_modules,
    blocks_of,
    fan_charts,
    kind_tables,
    module_rows,
    spread_chart,
    table_heatmaps,
)
from ikkuna.store import StoredRun, read_run
from ikkuna.support.files import atomic_file
from ikkuna.version import __version__

_FILES = Path(__file__).parent / "page"
_FLAT = 40  # modules in one table


def write_report(
    runs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    path: str | os.PathLike[str] = "report.html",
    progress: Callable[[str], None] = lambda text: None,
    muted: bool = False,
) -> Path:
    """Write a report about one or several runs: one page of HTML that needs no other file and no network.

    Parameters
    ----------
    runs : str, path-like, or sequence of them
        Directories of runs, event files, or files of JSON lines.
    path : str or path-like
        The page; it appears complete or not at all.
    progress : callable
        Called with a text before each part of the work.
    muted : bool
        Whether to show muted findings too.

    Returns
    -------
    Path
        The page.

    Raises
    ------
    ConfigError
        If there is no run, or if there is no directory for the page.
    OSError
        If the page cannot be written.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     values = Path(directory) / "values.1.jsonl"
    ...     _ = values.write_text('{"kind": "loss", "module": null, "pass": "training", "step": 0, "value": 0.5}')
    ...     page = write_report(directory, Path(directory) / "report.html")
    ...     "<figcaption>loss" in page.read_text(encoding="utf-8")
    True
    """
    paths = [runs] if isinstance(runs, str | os.PathLike) else list(runs)
    target, contents = page_target(path), []
    for number, each in enumerate(paths):
        progress(f"reading {each}")
        run = read_run(each)
        content = RunContent(run_name(run.path), run, number)
        content.findings = findings_of(run, muted)
        content.read_settings()
        contents.append(content)
    return write_page(target, lambda: report_page(contents), progress)


def write_page(target: Path, draw: Callable[[], str], progress: Callable[[str], None]) -> Path:
    """Write the page that `draw` returns to a file, which appears complete or not at all; return the file."""
    progress("drawing")
    page = draw()
    with atomic_file(target) as file:
        file.write(page.encode("utf-8", "replace"))
    progress("")
    return target


def page_target(path: str | os.PathLike[str]) -> Path:
    """Return the path of a page, before the work for it begins.

    Raises
    ------
    ConfigError
        If its directory does not exist, or if it is a directory, a device or a pipe itself.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise ConfigError(f"cannot write '{target}': the directory '{target.parent}' does not exist")
    if target.exists() and not target.is_file():
        raise ConfigError(f"cannot write '{target}': it is a directory, a device or a pipe")
    return target


def report_page(contents: Sequence[RunContent], *, url: str = "", part: str = "", **values: Any) -> str:
    """Return the page of a report about runs.

    Parameters
    ----------
    contents : sequence of RunContent
        The runs.
    url : str
        The beginning of the address from which a chart fetches its numbers again, for a page that a server follows.
    part : str
        The beginning of the address from which parts of the page are fetched; by default they are in the page.
    **values : Any
        Further values of the template.
    """
    separate_names(contents)
    rest = {} if part else {content.name: layer_values(content, list(kind_tables(content.run))) for content in contents}
    times = [] if len(contents) > 1 else wall_times(contents[0].run)
    return render(
        "report.html",
        title=f"ikkuna: {', '.join(content.name for content in contents)}",
        runs=[{**head_values(content), **rest.get(content.name, {})} for content in contents],
        charts=folded(network_charts(contents)),
        several=len(contents) > 1,
        url=url,
        part=part,
        times=times,
        **values,
    )


def separate_names(contents: Sequence[RunContent]) -> None:
    """Give runs of the same name the names of their parents too."""
    parents = [list(content.run.path.resolve().parents) for content in contents]
    while any(parents) and len({content.name for content in contents}) < len(contents):
        names = [content.name for content in contents]
        for content, above in zip(contents, parents, strict=True):
            if names.count(content.name) > 1 and above:
                content.name = f"{above.pop(0).name}/{content.name}"


def head_values(content: RunContent) -> dict[str, Any]:
    """Return the values of the first part of a page: the size of a run, and its findings."""
    return {
        "name": content.name,
        "colour": content.colour % 8,
        "findings": content.findings,
        "unjudged": _unjudged(content.findings),
        "facts": _facts(content.run),
    }


def layer_values(content: RunContent, tables: Sequence[KindTable]) -> dict[str, Any]:
    """Return the values of the part of a page about layers."""
    run = content.run
    kinds, rows = module_rows(run)
    spreads = (spread_chart(table, content.findings) for table in tables)
    return {
        "path": str(run.path),
        "abnormal": abnormal_modules(content, tables),
        "heatmaps": [maps for table in tables if (maps := table_heatmaps(run, table))],
        "spreads": folded([chart for chart in spreads if chart is not None]),
        "fans": fan_charts(run),
        "distributions": distributions_of(run),
        "kinds": kinds,
        "tree": blocks_of(rows) if len(rows) > _FLAT else Block("", rows),
        "config": content.config,
        "environment": content.environment,
        "texts": {title: text for title, text in run.texts.items() if title not in ("Modules", "Config")},
    }


def _unjudged(findings: Findings) -> dict[str, str]:
    """Return the names of the rules that could not judge for the same reason, and the reason."""
    reasons: dict[str, list[str]] = {}
    for name, text in {
        **findings.skipped,
        **{name: f"not measured: {text}" for name, text in findings.needed.items()},
    }.items():
        reasons.setdefault(text, []).append(name)
    return {", ".join(names): text for text, names in reasons.items()}


def _facts(run: StoredRun) -> list[str]:
    """Return sentences about the size of a run, and about what is missing."""
    facts = [f"{run.count:,} values to step {run.last_step:,}", f"{len(run.kinds(None)):,} kinds"]
    if run.modules:
        facts.append(f"{len(run.modules):,} modules, {sum(entry.count for entry in run.modules):,} parameters")
    if run.lost:
        facts.append(f"{run.lost:,} bytes or lines are damaged and were skipped")
    if run.waiting:
        facts.append("the last record is incomplete: the run was being written, or it ended without close()")
    return facts


def render(name: str, **values: Any) -> str:
    """Return a page made from a template of this package, with the style sheet and the script of all pages."""
    shared = {
        "library": _text("uPlot.iife.min.js"),
        "library_style": _text("uPlot.min.css"),
        "style": _text("style.css"),
        "script": _text("figures.js"),
        "nonce": "",
        "home": "",
        "times": [],
        "follow": "",
        "state": "",
        "version": __version__,
        "now": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
    return _environment().get_template(name).render(**{**shared, **values})


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_FILES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["json"] = partial(json.dumps, separators=(",", ":"))  # safe where the template escapes it
    environment.filters["details"] = details_html
    return environment


@cache
def _text(name: str) -> str:
    return (_FILES / name).read_text(encoding="utf-8")
