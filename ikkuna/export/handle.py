"""The result of `ikkuna.watch`: an exporter that also shows the measured values."""

import html
import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ikkuna.backends.pictures.chart import ChartView, Line, QuantileView, heading
from ikkuna.backends.run import shortest_path
from ikkuna.diagnosis.findings import STYLES, Findings
from ikkuna.errors import ConfigError, ConfigTypeError, IkkunaError, unknown_name
from ikkuna.export.attachment import Attachment
from ikkuna.export.exporter import Exporter
from ikkuna.metrics.live_rules import RuleSubscriber
from ikkuna.metrics.messages.kinds import EVENT_KINDS
from ikkuna.metrics.subscriber.base import Subscriber
from ikkuna.numerics.bands import quartiles, unusual_rows
from ikkuna.observation.checkpoint import store_finished
from ikkuna.printable import printable, text_table
from ikkuna.store import SeriesValues, StoredRun
from ikkuna.store.finding import Finding
from ikkuna.store.names import Series
from ikkuna.store.quantity import LOGGED
from ikkuna.store.values import ModuleOrder
from ikkuna.support.console import announce
from ikkuna.support.modules import class_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class FunctionMetric(Subscriber):
    """Calls ``function(tensor)`` for each tensor of a kind, and shows the number that it returns.

    Over several calls, micro-batches and ranks the value is the mean of the numbers.
    The function is called in the hook, without gradients and autocast.
    It must not change the tensor; a result that stays on the device of the tensor does not make training wait for the device.

    Parameters
    ----------
    kind : str
        A kind with tensors, such as ``"activations"``.
    function : callable
        Takes a tensor, and returns a tensor of one element, a number, or ``None`` for no value.
    name : str
        The metric publishes ``{kind}_{name}``.
    **options : Any
        See `Subscriber`.

    Raises
    ------
    ConfigError, ConfigTypeError
        If an argument is invalid.

    Examples
    --------
    >>> FunctionMetric("activations", torch.amax, "peak").publishes
    ('activations_peak',)
    """

    is_of_function = True

    def __init__(self, kind: str, function: Callable[[Tensor], Any], name: str, **options: Any) -> None:
        if not callable(function):
            raise ConfigTypeError(f"metric() needs a function of a tensor, got {type(function).__name__}")
        if kind in (*EVENT_KINDS, LOGGED):
            raise ConfigError(f"metric() needs a kind with tensors, such as 'activations', got {kind!r}")
        super().__init__(kind, publishes=f"{kind}_{name}", **options)
        self.function = function

    def measure(self, message: Any) -> Tensor | None:
        """Return the number and a one that counts it."""
        found = self.function(message.data)
        if found is None:
            return None
        value = torch.as_tensor(found, dtype=torch.float64, device=message.data.device)
        if value.numel() != 1:
            shape = tuple(value.shape)
            raise ConfigError(f"the function of {self.publishes[0]!r} must return one number, got the shape {shape}")
        value = value.detach().reshape(())
        return torch.stack([value, torch.ones_like(value)])

    def compute(self, message: Any) -> None:
        """Emit the mean."""
        total, count = message.data
        self.emit(message, total / count)


_MOST = 16


def draw_kind(run: StoredRun, kind: str, modules: Sequence[str] | None = None, pass_name: str = "training") -> "Figure":
    """Return a figure of a kind: a line for each module, or quantiles over the modules if there are more than 16.

    The pictures of the backend ``"mpl"`` are drawn in the same way.

    Raises
    ------
    ConfigError
        If the run has no such kind or module.
    """
    from ikkuna.backends.pictures.drawing import draw_chart  # matplotlib takes half of the time to import ikkuna.watch

    names = run.names(kind, pass_name)
    if not names:
        run.series(kind, None, pass_name)  # raises the error that names the kinds
    for wanted in modules or ():
        run.series(kind, wanted, pass_name)
    chosen = names if modules is None else tuple(name for name in names if name in modules)
    if not chosen:
        raise ConfigError(f"plot({kind!r}) needs at least one module")
    title, count = heading(Series(kind, None, pass_name)), len(chosen)
    quantity = run.quantity(kind)
    label = quantity.label(kind)
    order = ModuleOrder(run.modules)
    if modules is None and count > _MOST:
        return draw_chart(
            ChartView(title, label, None, count, quantiles=_quantiles(run, kind, pass_name), quantity=quantity),
            order.key,
        )
    lines = []
    for name in chosen:
        found = run.series(kind, name, pass_name)
        lines.append(Line(name, found.steps, found.values))
    return draw_chart(ChartView(title, label, None, count, tuple(lines), quantity=quantity), order.key)


def _quantiles(run: StoredRun, kind: str, pass_name: str) -> QuantileView:
    """Return the quantiles of the modules that have a value at a step; NaN if one of these is not finite."""
    names, steps, values = run.matrix(kind, pass_name)
    broken = np.zeros(values.shape, bool)
    for row, name in zip(broken, names, strict=True):
        found = run.series(kind, name, pass_name)
        row[np.searchsorted(steps, found.steps)] = ~np.isfinite(found.values)
    return QuantileView(steps, np.where(broken.any(axis=0), np.nan, quartiles(np.where(broken, np.nan, values))))


_NOT_YET = "no value is stored yet; values are there after the first sampled step"
_UNREADABLE = "the run stores no file that can be read back; use the backend 'tb' or 'jsonl'"


class StoredValues:
    """The values of one run, of which each reading reads only what has been added.

    Examples
    --------
    >>> StoredValues().read(None)
    Traceback (most recent call last):
        ...
    ikkuna.errors.ConfigError: no value is stored yet; values are there after the first sampled step
    """

    def __init__(self) -> None:
        self._run: StoredRun | None = None

    def read(self, directory: Path | None) -> StoredRun:
        """Return the values in the directory of a run.

        Raises
        ------
        ConfigError
            If there is no directory, no file that can be read, or no value.
        """
        if directory is None:
            raise ConfigError(_NOT_YET)
        if self._run is None or self._run.path != directory:
            self.close()
            try:
                self._run = StoredRun(directory)
            except ConfigError as error:
                raise ConfigError(f"'{directory}': {_UNREADABLE}") from error
        else:
            self._run.update()
        if not self._run.kinds(None) and not self._run.histogram_kinds():
            raise ConfigError(_NOT_YET)
        return self._run

    def close(self) -> None:
        """Free the memory of the scanners."""
        if self._run is not None:
            self._run.close()
            self._run = None


_ROWS = 40


class SummaryTable(NamedTuple):
    """A table with a title."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


class Summary:
    """Some lines and tables, which show themselves at the prompt and in a notebook.

    Parameters
    ----------
    lines : sequence of str
        The lines before the tables.
    tables : sequence of SummaryTable
        The tables.

    Examples
    --------
    >>> print(Summary(["net: 2 modules"], [SummaryTable("", ("network", "last"), [("loss", "0.5")])]))
    net: 2 modules
    <BLANKLINE>
    network  last
    -------  ----
    loss     0.5
    """

    def __init__(self, lines: Sequence[str], tables: Sequence[SummaryTable]) -> None:
        self.lines = tuple(map(printable, lines))
        self.tables = tuple(map(_printable, (table for table in tables if table.rows)))

    def __str__(self) -> str:
        parts = ["\n".join(self.lines), *map(_text, self.tables)]
        return "\n\n".join(part for part in parts if part)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        lines = "<br>".join(html.escape(line) for line in self.lines)
        return f"<div>{lines}</div>" + "".join(map(_html, self.tables))


def _printable(table: SummaryTable) -> SummaryTable:
    rows = [tuple(map(printable, row)) for row in table.rows]
    return SummaryTable(printable(table.title), tuple(map(printable, table.header)), rows)


def _text(table: SummaryTable) -> str:
    lines = text_table(table.header, table.rows)
    return "\n".join([table.title, *lines] if table.title else lines)


def _html(table: SummaryTable) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in table.header)
    rows = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in table.rows]
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<p>{html.escape(table.title)}</p><table><tr>{head}</tr>{body}</table>"


def network_table(run: StoredRun) -> SummaryTable:
    """Return a row for each series that belongs to no module: first and last value, minimum and maximum."""
    rows = []
    for pass_name in run.passes():
        for series in run.network_series(pass_name):
            label = run.quantity(series.kind).label(series.label)
            title = label if pass_name == "training" else f"{label} ({pass_name})"
            rows.append((title, *_cells(run.series(series.kind, series.name, pass_name).values)))
    return SummaryTable("", ("network", "first", "last", "min", "max"), rows)


def spread_table(run: StoredRun) -> SummaryTable:
    """Return a row for each kind of modules: the least, median and greatest last value, and the modules that have them."""
    rows: list[tuple[str, ...]] = []
    for kind in sorted(run.module_kinds()):
        names = [name for name in run.names(kind) if name is not None]
        last = np.array([run.series(kind, name).values[-1] for name in names])
        finite = np.flatnonzero(np.isfinite(last))
        bad = str(len(last) - len(finite) or "")
        if not len(finite):
            rows.append((kind, str(len(names)), *[""] * 5, bad))
            continue
        low, high = finite[last[finite].argmin()], finite[last[finite].argmax()]
        middle = _number(float(np.median(last[finite])))
        least, most = ((_number(float(last[i])), names[i]) for i in (low, high))
        rows.append((kind, str(len(names)), *least, middle, *most, bad))
    header = ("last values of modules", "modules", "min", "module", "median", "max", "module", "not finite")
    return SummaryTable("", header, rows)


def series_table(run: StoredRun, kind: str) -> SummaryTable:
    """Return a row for each module of a kind; of more than 40 those that differ most from the others of their class.

    Raises
    ------
    ConfigError
        If the run has no such kind.
    """
    names, more = run.names(kind) or (None,), ""
    if len(names) > _ROWS:
        modules, _, values = run.matrix(kind)
        scores = unusual_rows(values, run.order.classes(modules), run.quantity(kind).worse)
        more = f" (the {_ROWS} of {len(modules):,} modules that differ most from the others)"
        names = tuple(modules[i] for i in sorted(np.argsort(-scores, kind="stable")[:_ROWS].tolist()))
    rows = [(str(name or "network"), *_cells(run.series(kind, name).values)) for name in names]
    return SummaryTable(f"{kind}{more}", ("module", "first", "last", "min", "max"), rows)


def _cells(values: NDArray[np.float64]) -> tuple[str, ...]:
    finite = values[np.isfinite(values)]
    ends = (float(finite.min()), float(finite.max())) if len(finite) else (math.nan, math.nan)
    return tuple(map(_number, (float(values[0]), float(values[-1]), *ends)))


def _number(value: float) -> str:
    return f"{value:.4g}"


_NAMED = 4  # findings that the last lines name


def _write_end(name: str, rules: RuleSubscriber | None, attachment: Attachment) -> None:
    """Write three lines: steps and loss, findings by importance, and what watching cost."""
    health, directory = attachment.health(), attachment.run_directory
    if not health.steps:
        return
    loss = None if rules is None else rules.judge.history.curve("loss")
    course = "" if loss is None or not loss.count else f", loss {loss.first[0]:.4g} → {loss.last:.4g}"
    last = attachment.session.context.tracker.counters.next.global_step - 1
    if course and loss is not None and loss.step != last:  # rules may read every second loss
        course += f" at step {loss.step}"
    place = "" if directory is None else f", in '{shortest_path(directory)}'"
    announce(f"{name}: {_plural(health.steps, 'step')}{course}{place}")
    findings = Findings() if rules is None else rules.findings
    worst = findings[0].severity if findings else "info"
    named = ", ".join(map(_place, findings[:_NAMED])) + (", …" if len(findings) > _NAMED else "")
    judged = f"{_plural(len(findings.judged), 'rule')} judged, {len(findings.skipped)} could not"
    judged = "no rules" if rules is None else f"{judged}; ikkuna.preflight() checks masks, axes and leaks too"
    mark = _plural(len(findings), "finding") if findings else "no findings"
    announce(f": {named}" if findings else f"; {judged}", mark=mark, styles=STYLES[worst] if findings else ())
    more = "" if directory is None else f"; ikkuna report {shlex.quote(shortest_path(directory))} shows more"
    announce(f"watching took {_time_of_step(attachment)}{more}")


def _time_of_step(attachment: Attachment) -> str:
    """Return what watching takes of a step on the training thread, from the second step on."""
    if (steps := attachment.session.cycle.steps - 1) < 1:
        return "an unknown time (the first step is not counted)"
    spent = 1000 * attachment.session.context.stopwatch.spent_later / steps
    return f"{spent:.2g} ms a step" if spent < 99.5 else f"{spent:.0f} ms a step"


def _place(finding: Finding) -> str:
    where = f" in {finding.module}" if finding.module else ""
    since = "" if finding.step is None else f" (step {finding.step})"
    return f"{finding.severity} {finding.rule}{where}{since}"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


F = TypeVar("F", bound=Callable[..., Any])
_HEATMAPS = 4
_EVERY = 10  # as the presets
_METRIC_OPTIONS = tuple(sorted(signature(Subscriber).parameters.keys() - {"kinds", "publishes", "join", "message_bus"}))


class WatchHandle(Exporter):
    """The exporter that `ikkuna.watch` returns.

    Its methods read what the run has stored, while training runs and after :meth:`close`.
    They need a backend whose files can be read back, ``"tb"`` or ``"jsonl"``.
    In distributed training, rank 0 writes the run, and only there is something to read.

    Examples
    --------
    >>> import tempfile
    >>> import ikkuna, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 1))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     with ikkuna.watch(model, every=1, log_dir=directory, verbosity=0) as watched:
    ...         for step in range(3):
    ...             optimizer.zero_grad()
    ...             model(torch.ones(4, 2)).mean().backward()
    ...             optimizer.step()
    ...     watched.history("loss").steps.tolist()
    [0, 1, 2]
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._stored = StoredValues()
        self._label = "nothing"
        self._every = _EVERY

    def read(self) -> StoredRun:
        """Return the stored run with the values of all finished steps.

        Raises
        ------
        ConfigError
            If no value is stored yet, or if no backend writes files that can be read back.
        """
        if not self._attachment.is_closed:
            store_finished(self.message_bus)
        return self._stored.read(self.run_directory)

    def history(self, kind: str, module: str | None = None, pass_name: str = "training") -> SeriesValues:
        """Return steps, values and times of a series as arrays.

        Parameters
        ----------
        kind : str
            The kind, such as ``"loss"`` or ``"weights_norm2"``.
        module : str, optional
            The module; by default the whole network.
        pass_name : str
            ``"training"``, or the name of another pass.

        Raises
        ------
        ConfigError
            If there is no such series; the message names those that are like it.
        """
        return self.read().series(kind, module, pass_name)

    def summary(self, kind: str | None = None) -> Summary:
        """Return a table of the network's values and of the least, median and greatest last values of modules.

        Before the first value it consists of one line.

        Parameters
        ----------
        kind : str, optional
            Show each module of this kind, at most 40.

        Raises
        ------
        ConfigError
            If the run has no such kind.
        """
        try:
            run = self.read()
        except ConfigError as error:
            if kind is not None:
                raise
            return Summary([self._state(), str(error)], [])
        lines = [self._state(), *map(str, self.findings)]
        if kind is not None:
            return Summary(lines[:1], [series_table(run, kind)])
        return Summary(lines, [network_table(run), spread_table(run)])

    def plot(self, kind: str, module: str | Sequence[str] | None = None, pass_name: str = "training") -> "Figure":
        """Return a figure of a kind: a line for each module, or quantiles if there are more than 16.

        Parameters
        ----------
        kind : str
            The kind.
        module : str or sequence of str, optional
            Draw these modules only.
        pass_name : str
            ``"training"``, or the name of another pass.

        Raises
        ------
        ConfigError
            If there is no value of this kind; the message names those that are like it.
        """
        modules = (module,) if isinstance(module, str) else module
        return draw_kind(self.read(), kind, modules, pass_name)

    def report(self, path: str | Path = "report.html") -> Path:
        """Write a report about the run so far, one page of HTML, and return its path.

        Raises
        ------
        ConfigError
            If no value is stored yet.
        OSError
            If the page cannot be written.
        """
        from ikkuna.report import write_report  # which imports jinja2

        return write_report(self.read().path, path)

    def metric(self, kind: str, name: str | None = None, **options: Any) -> Callable[[F], F]:
        """Return a decorator that registers a function of one tensor as a metric.

        Parameters
        ----------
        kind : str
            A kind with tensors, such as ``"activations"``.
        name : str, optional
            The metric publishes ``{kind}_{name}``; by default the name of the function.
        **options : Any
            ``every``, ``modules``, ``backend`` and others, see `ikkuna.export.subscriber.Subscriber`.
            By default the steps are those of the other metrics: the ``every`` of `ikkuna.watch`, or every tenth step.

        Raises
        ------
        ConfigError
            If an argument or an option is unknown or invalid, or if the name is taken.

        Examples
        --------
        >>> import ikkuna, torch
        >>> watched = ikkuna.watch(torch.nn.Linear(2, 2))
        >>> @watched.metric("activations")
        ... def near_zero(tensor):
        ...     return (tensor.abs() < 1e-3).double().mean()
        >>> "activations_near_zero" in watched.message_bus.kinds
        True
        >>> watched.close()
        """
        self._attachment.require_open()
        if not isinstance(kind, str):
            raise ConfigTypeError(f"metric() needs a kind, as in @monitor.metric('activations'), got {kind!r}")
        if unknown := [option for option in options if option not in _METRIC_OPTIONS]:
            raise ConfigError(unknown_name("option", unknown[0], _METRIC_OPTIONS))
        if options.keys().isdisjoint(("every", "subsample", "schedule")):
            options["every"] = self._every

        def register(function: F) -> F:
            label = name if name is not None else getattr(function, "__name__", "metric")
            self.message_bus.register_subscriber(FunctionMetric(kind, function, label, **options))
            return function

        return register

    # -- what it shows of itself ----------------------------------------------------------------------------------

    def begin(self, metrics: int, preset: str | None, every: int | None) -> None:
        """Describe what is watched in the line about the directory of the run; called after everything is registered.

        Parameters
        ----------
        metrics : int
            The number of metrics.
        preset : str or None
            The name of the preset.
        every : int or None
            The number of steps between two samples, if `ikkuna.watch` was given one.
        """
        self._every = every or _EVERY
        source = "" if preset is None else f" of preset {preset!r}"
        found = ((len(self.modules), "module"), (metrics, "metric"))
        counts = ", ".join(f"{count} {noun}{'s' * (count != 1)}" for count, noun in found)
        name = "modules" if self.model is None else class_name(self.model)
        self._label = f"{name} with {counts}{source}"
        self._attachment.at_end = partial(_write_end, name, self._attachment.rules)
        self.message_bus.settings = replace(self.message_bus.settings, subject=f"{self._label}; the run")

    def __repr__(self) -> str:
        return printable(f"<ikkuna.watch: {self._state()}>")

    def _state(self) -> str:
        health, directory = self.health(), self.run_directory
        parts = [self._label, f"in '{directory}'" if directory is not None else "no value stored yet"]
        parts.append(_plural(health.steps, "step"))
        if self._attachment.is_closed:
            parts.append("closed")
        elif self.message_bus.sampling.is_paused:
            parts.append("paused")
        if self._attachment.rules is not None:
            parts.append(_plural(len(self.findings), "finding"))
        parts.append(f"watching takes {_time_of_step(self._attachment)}")
        lost = {"errors": health.errors, "values lost": health.dropped, "tensors not readable": health.skipped}
        parts += [f"{count} {what}" for what, count in lost.items() if count]
        parts += [f"{name} disabled" for name in health.disabled]
        parts += [f"backend {name} cannot store values" for name in health.unwritable]
        return ", ".join(parts)

    def _repr_html_(self) -> str:
        """Return the summary and small heat maps for a notebook."""
        from ikkuna.report.modules import heatmaps_of

        try:
            shown = self.summary()._repr_html_()
            heatmaps = heatmaps_of(self.read())[:_HEATMAPS]
        except IkkunaError:
            return self.summary()._repr_html_()
        maps = "".join(
            f'<figure style="display:inline-block;width:420px;margin:4px"><figcaption>{html.escape(printable(each.title))}'
            f"</figcaption>{each.svg}</figure>"
            for each in heatmaps
        )
        return shown + maps
