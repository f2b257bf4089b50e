"""The result of `ikkuna.watch`: an exporter that also shows the measured values."""

import html
from collections.abc import Callable, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ikkuna.errors import ConfigError, IkkunaError, unknown_name
from ikkuna.export.checkpoint import store_finished
from ikkuna.export.exporter import Exporter
from ikkuna.export.subscriber.base import Subscriber
from ikkuna.modules import class_name
from ikkuna.reading import SeriesValues, StoredRun
from ikkuna.watching.function_metric import FunctionMetric
from ikkuna.watching.stored_values import StoredValues
from ikkuna.watching.summary import Summary, network_table, series_table, spread_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["WatchHandle"]

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
        from ikkuna.watching.figures import draw_kind  # which imports matplotlib

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
        self.message_bus.settings = replace(self.message_bus.settings, subject=f"{self._label}; the run")

    def __repr__(self) -> str:
        return f"<ikkuna.watch: {self._state()}>"

    def _state(self) -> str:
        health, directory = self.health(), self.run_directory
        parts = [self._label, f"in '{directory}'" if directory is not None else "no value stored yet"]
        parts.append(f"{health.steps} steps")
        if self._attachment.is_closed:
            parts.append("closed")
        elif self.message_bus.sampling.is_paused:
            parts.append("paused")
        if self._rules is not None:
            parts.append(f"{len(self.findings)} findings")
        parts.append(f"its own time is {health.overhead:.1%} of the rest of a step")
        lost = {"errors": health.errors, "values lost": health.dropped, "tensors not readable": health.skipped}
        parts += [f"{count} {what}" for what, count in lost.items() if count]
        parts += [f"{name} disabled" for name in health.disabled]
        parts += [f"backend {name} cannot store values" for name in health.unwritable]
        return ", ".join(parts)

    def _repr_html_(self) -> str:
        """Return the summary and small heat maps for a notebook."""
        from ikkuna.report.content import heatmaps_of

        try:
            shown = self.summary()._repr_html_()
            heatmaps = heatmaps_of(self.read())[:_HEATMAPS]
        except IkkunaError:
            return self.summary()._repr_html_()
        maps = "".join(
            f'<figure style="display:inline-block;width:420px;margin:4px"><figcaption>{html.escape(each.title)}'
            f"</figcaption>{each.svg}</figure>"
            for each in heatmaps
        )
        return shown + maps
