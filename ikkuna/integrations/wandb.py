"""The backend that logs to Weights & Biases."""

import html
import os
from typing import Any

import numpy as np

from ikkuna.backends.loggers import RemoteBackend, StepValues, matrix_picture
from ikkuna.support.console import announce
from ikkuna.support.failures import log, raise_users_exception
from ikkuna.support.plugins import import_extra

_STEP = "ikkuna/step"
_MOST_ALERTS, _BETWEEN_ALERTS = 20, 600  # seconds


class WandbBackend(RemoteBackend):
    """Log to Weights & Biases, with one call of ``log`` for each step.

    Sections are the kinds, because a tag is ``{kind}/{module}``.
    Without a login, values are stored offline in the directory of the run, and the log says how to send them.
    If the user's script has an active run, values are added to it, with the axis ``ikkuna/step``, and it stays open.
    Weights & Biases ignores what is logged with a ``step=`` behind the last row of a run, so values are in the row of their
    optimizer step, or in a later one that the script has reached; there the last of several values of a tag remains.
    Pass a run of its own if the script logs with a ``step=`` that is less than the number of the optimizer step, such as the epoch.
    Otherwise a run is created, with the name of the run's directory, and finished at the end.
    A resumed run continues the same run; Weights & Biases keeps its values of steps that are repeated.

    Parameters
    ----------
    run : wandb.Run, optional
        The run to log to.
    project : str
        The project of a run that is created.
    mode : str, optional
        ``"online"`` or ``"offline"``; by default the environment variable ``WANDB_MODE``, or ``"online"`` with a login.
    init : dict, optional
        Further arguments of ``wandb.init``.
    has_own_rows : bool
        Whether each step begins a new row of an active run; for scripts that log without a ``step=``, as the ``Trainer`` of
        transformers does.
    **options : Any
        See `LoggerBackend`.

    Raises
    ------
    PluginError
        If wandb is not installed.
    """

    def __init__(
        self,
        run: Any = None,
        *,
        project: str = "ikkuna",
        mode: str | None = None,
        init: dict[str, Any] | None = None,
        has_own_rows: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._wandb = import_extra("wandb")
        self._target: Any = run
        self._owns_run = False
        self._project = project
        self._mode = mode
        self._init = init or {}
        self._defined: set[str] = set()
        self._alerts = 0
        self._has_own_rows = has_own_rows
        self._first_row = _next_row(run or self._wandb.run)
        self._row = -1

    def start(self) -> None:
        """Use the active run, or create one."""
        wandb = self._wandb
        self._target = self._target or wandb.run
        if self._target is not None:
            self._target.define_metric(_STEP, hidden=True)
            return
        directory = self.directory()
        mode = self._mode or os.environ.get("WANDB_MODE") or ("online" if self._has_login() else "offline")
        arguments: dict[str, Any] = {
            "project": self._project,
            "name": directory.name,
            "id": self.identity(),
            "resume": "allow" if mode == "online" else None,
            "dir": str(directory),
            "mode": mode,
            "reinit": "create_new",  # beside a run that the user's script may create
            "settings": wandb.Settings(console="off", silent=True),
        }
        self._target = self._created({**arguments, **self._init})
        self._owns_run = True
        if mode == "offline":
            announce(
                f"ikkuna: wandb stores the run offline; send it with: wandb sync {os.path.dirname(self._target.dir)}"
            )
        elif self._target.url:
            announce(f"ikkuna: the run is shown at {self._target.url}")

    def _created(self, arguments: dict[str, Any]) -> Any:
        """Return a new run; if another backend of this process uses the same identity, a number is appended to it."""
        identity = arguments["id"]
        for number in range(2, 10):
            try:
                return self._wandb.init(**arguments)
            except Exception as error:
                raise_users_exception(error)
                if identity is None or "is in use" not in str(error):
                    raise
                arguments["id"] = f"{identity}-{number}"
        return self._wandb.init(**arguments)

    def _has_login(self) -> bool:
        """Return whether an API key is known; asking wandb to log in would wait for input."""
        try:
            return bool(self._wandb.api.api_key)
        except Exception as error:
            raise_users_exception(error)
            log.info("wandb: the login cannot be read (%s); the run is stored offline", error)
            return False

    def log_step(self, values: StepValues) -> None:
        """Log the values of a step in one call."""
        run = self._target
        if values.config:
            run.config.update(values.config, allow_val_change=True)
        self._alert(values)
        if not values.count:
            return
        data: dict[str, Any] = dict(values.scalars)
        data |= {tag: self._histogram(each) for tag, each in values.histograms.items()}
        data |= {tag: self._wandb.Image(matrix_picture(each, tag)) for tag, each in values.matrices.items()}
        for title, text in values.texts.items():
            data[f"Text/{title}"] = self._wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False)
        if self._owns_run:
            run.log(data, step=values.step)
            return
        for tag in data.keys() - self._defined:
            run.define_metric(tag, step_metric=_STEP)
            self._defined.add(tag)
        run.define_metric(_STEP, hidden=True)  # raises if the run has ended, where its `step` waits for half a minute
        if self._has_own_rows or run.settings.mode == "shared":
            run.log({**data, _STEP: values.step})
            return
        reached = _next_row(run)
        # a run that had rows before gets one more for each step; those of the script may be ahead
        before, self._row = self._row, max(values.step, reached, min(self._row + 1, self._first_row + values.step))
        self._dropped += values.count if self._row == before else 0  # it takes the place of the values before
        where = {"step": self._row} if self._row > reached else {"commit": False}
        run.log({**data, _STEP: values.step}, **where)

    def _alert(self, values: StepValues) -> None:
        """Raise an alert for each warning and error, at most 20 in a run and one of a rule in ten minutes."""
        for finding in values.findings:
            if finding.severity == "info" or self._alerts >= _MOST_ALERTS:
                continue
            self._alerts += 1
            level = self._wandb.AlertLevel.ERROR if finding.severity == "error" else self._wandb.AlertLevel.WARN
            text = f"{finding} {finding.advice}"
            self._target.alert(f"ikkuna: {finding.rule}", text, level=level, wait_duration=_BETWEEN_ALERTS)

    def _histogram(self, histogram: Any) -> Any:
        """Return a histogram with at most 512 bins, the most that wandb shows."""
        limits, counts = (np.asarray(part, float) for part in (histogram.bucket_limits, histogram.bucket_counts))
        group = -(-len(counts) // 512)
        counts = np.add.reduceat(counts, np.arange(0, len(counts), group)) if len(counts) else counts
        limits = np.append(limits[group - 1 :: group], limits[-1:])[: len(counts)] if len(counts) else limits
        edges = np.concatenate([[min(float(histogram.min), *limits[:1])], limits])
        return self._wandb.Histogram(np_histogram=(counts.tolist(), edges.tolist()))

    def finish(self) -> None:
        """Finish the run, unless it is the user's."""
        if self._owns_run:
            self._target.finish()


def _next_row(run: Any) -> int:
    """Return the row that a run writes next; 0 without a run."""
    return 0 if run is None or run.settings.mode == "shared" else int(run.step)
