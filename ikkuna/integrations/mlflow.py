"""The backend that logs to MLflow."""

import json
import re
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np

from ikkuna.backends.loggers import RemoteBackend, StepValues, matrix_picture, metric_name
from ikkuna.store.values import LISTS, NUMBERS
from ikkuna.support.failures import log
from ikkuna.support.plugins import import_extra

_METRICS, _PARAMS = 1000, 100  # the most that one request of MLflow takes
_TAG, _FINDING_TAG, _TAG_LENGTH = "ikkuna.run", "ikkuna.finding", 5000


class MlflowBackend(RemoteBackend):
    """Log to MLflow: numbers as metrics, in batches of up to 1000; histograms, images and texts as artifacts.

    If the user's script has an active run when the first value is shown, values are added to it, and it stays open.
    Otherwise a run is created in `experiment`, with the name of the run's directory, and terminated at the end.
    A resumed run continues the same run.
    Characters that MLflow refuses in names are replaced by ``:`` and their code.

    Parameters
    ----------
    tracking_uri : str, optional
        The server or store; by default that of MLflow.
    experiment : str
        The experiment of a run that is created.
    run_id : str, optional
        The run to log to.
    **options : Any
        See `LoggerBackend`.

    Raises
    ------
    PluginError
        If mlflow is not installed.
    """

    def __init__(
        self,
        tracking_uri: str | None = None,
        *,
        experiment: str = "ikkuna",
        run_id: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._mlflow = import_extra("mlflow")
        self._entities = import_extra("mlflow.entities")
        self._tracking_uri = tracking_uri
        self._experiment = experiment
        self._run_id = run_id
        self._owns_run = False
        self._client: Any = None
        self._is_prepared = False

    def commit(self, step: int) -> None:
        """Queue the values of the step; the active run is known to the thread that trains alone."""
        if not self._is_prepared:
            self._is_prepared = True
            active = self._mlflow.active_run()
            if self._run_id is None and active is not None:
                self._run_id = active.info.run_id
        super().commit(step)

    def start(self) -> None:
        """Use the active run, or create one."""
        self._client = client = self._mlflow.MlflowClient(self._tracking_uri)
        if self._run_id is not None:
            return
        found = client.get_experiment_by_name(self._experiment)
        experiment = client.create_experiment(self._experiment) if found is None else found.experiment_id
        name, identity = self.directory().name, self.identity() or ""
        if self._resumed_at is not None and identity:
            runs = client.search_runs([experiment], f"tags.`{_TAG}` = '{identity}'", max_results=1)
            self._run_id = runs[0].info.run_id if runs else None
        if self._run_id is None:
            self._run_id = client.create_run(experiment, run_name=name, tags={_TAG: identity}).info.run_id
        else:
            client.update_run(self._run_id, status="RUNNING")
        self._owns_run = True

    def log_step(self, values: StepValues) -> None:
        """Log the values of a step."""
        client, run, now = self._client, self._run_id, int(time.time() * 1000)
        self._log_params(values)
        metric = self._entities.Metric
        for part in _parts(values.scalars, _METRICS):
            client.log_batch(run, metrics=[metric(_name(tag), value, now, values.step) for tag, value in part])
        for tag, histogram in values.histograms.items():
            numbers = {name: np.asarray(getattr(histogram, name), float).tolist() for name in (*NUMBERS, *LISTS)}
            client.log_text(run, json.dumps(numbers), f"histograms/{_name(tag)}/{values.step}.json")
        for tag, matrix in values.matrices.items():
            client.log_image(run, matrix_picture(matrix, tag), f"{_name(tag)}/{values.step}.png")
        for finding in values.findings:
            client.set_tag(run, f"{_FINDING_TAG}.{finding.rule}", f"{finding} {finding.advice}"[:_TAG_LENGTH])
        for title, text in values.texts.items():
            client.log_text(run, text, f"texts/{_name(title)}/{values.step}.md")

    def _log_params(self, values: StepValues) -> None:
        param = self._entities.Param
        for part in _parts(values.config, _PARAMS):
            try:
                self._client.log_batch(self._run_id, params=[param(_name(name), str(value)) for name, value in part])
            except self._mlflow.MlflowException as error:  # a parameter of a resumed run has another value
                log.warning("mlflow keeps the hyper-parameters of the run: %s", error)

    def finish(self) -> None:
        """Terminate the run, unless it is the user's."""
        if self._owns_run:
            self._client.set_terminated(self._run_id)


def _parts(items: Mapping[str, Any], size: int) -> Iterator[list[tuple[str, Any]]]:
    """Yield the items in lists of at most `size`."""
    iterator = iter(items.items())
    while part := list(islice(iterator, size)):
        yield part


def _name(tag: str) -> str:
    """Return a name that MLflow accepts beside metrics of the script.

    Examples
    --------
    >>> _name("weights_norm2/features.0"), _name("a%5Bb(c)")
    ('weights_norm2/features.0', 'a:5Bb:28c:29')
    """
    accepted = re.sub(r"[^\w. /-]", lambda found: ":" if found[0] == "%" else f":{ord(found[0]):02X}", tag)
    return metric_name(accepted)
