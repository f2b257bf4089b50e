"""Values logged to MLflow are read back through its client."""

import json
import math

import pytest

from ikkuna.integrations.mlflow import MlflowBackend
from ikkuna.store.names import Series
from ikkuna.testing import check_backend
from tests.integrations.training import add_everything, train

mlflow = pytest.importorskip("mlflow")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")]


@pytest.fixture
def uri(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # versions from 3.15 on refuse it otherwise
    monkeypatch.chdir(tmp_path)
    return (tmp_path / "store").as_uri()


def runs(uri):
    client = mlflow.MlflowClient(uri)
    return client, client.search_runs([client.get_experiment_by_name("ikkuna").experiment_id], order_by=["start_time"])


def test_the_contract_is_kept(tmp_path, uri):
    (tmp_path / "work").mkdir()
    check_backend(lambda: MlflowBackend(uri), tmp_path / "work")


def test_a_thousand_tags_and_values_that_are_not_finite_are_read_back(tmp_path, uri):
    (tmp_path / "run0001").mkdir()
    add_everything(MlflowBackend(uri), tmp_path / "run0001")
    client, [run] = runs(uri)
    metrics = run.data.metrics
    assert {key: value for key, value in metrics.items() if key.startswith("weights_norm2/")} == {
        f"weights_norm2/layer.{number}": number + 0.5 for number in range(1000)
    }
    found = [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, "weights_norm2/layer.7")]
    assert found == [(0, 7.0), (1, 7.5)]
    assert math.isnan(metrics["Network/nan"])
    assert metrics["Network/inf"] == math.inf
    assert metrics["Network/minus"] == -math.inf
    artifacts = {each.path for each in client.list_artifacts(run.info.run_id, "texts/Page")}
    assert artifacts == {"texts/Page/0.md", "texts/Page/1.md"}
    assert len(client.list_artifacts(run.info.run_id, "Matrices/similarity")) == 2


def test_a_resumed_training_is_one_run_with_its_config_name_and_histograms(tmp_path, uri):
    state, health = train(MlflowBackend(uri), tmp_path, run_name="mine")
    assert health.dropped == 0
    train(MlflowBackend(uri), tmp_path, steps=2, state=state, resume=True)
    client, [run] = runs(uri)
    assert run.info.run_name == "mine"
    assert run.info.status == "FINISHED"
    assert run.data.params == {"lr": "0.1"}
    history = client.get_metric_history(run.info.run_id, "weights_norm2/linear")
    assert [each.step for each in history] == [0, 1, 2, 3, 4]
    path = client.download_artifacts(run.info.run_id, "histograms/weights/linear/0.json")
    with open(path) as file:
        assert sum(json.load(file)["bucket_counts"]) == 4


def test_an_active_run_of_the_user_stays_open(tmp_path, uri):
    mlflow.set_tracking_uri(uri)
    with mlflow.start_run() as active:
        train(MlflowBackend(uri), tmp_path)
        assert mlflow.active_run() is not None
        mlflow.log_metric("own", 1.0)
    metrics = mlflow.MlflowClient(uri).get_run(active.info.run_id).data.metrics
    assert {"own", "weights_norm2/linear"} <= metrics.keys()


@pytest.mark.parametrize("is_first", [True, False])
def test_metrics_of_the_script_and_values_of_the_same_kind_do_not_exclude_each_other(tmp_path, uri, is_first):
    """A store in files has a file for each metric, and a directory for what is before a slash."""
    mlflow.set_tracking_uri(uri)
    backend = MlflowBackend(uri)
    with mlflow.start_run() as active:
        if is_first:
            mlflow.log_metrics({"loss": 2.0, "learning_rate": 0.1})
        for kind, name in (("loss", None), ("loss", "objective"), ("learning_rate", "group 0")):
            backend.add_scalar(Series(kind, name), 0.5, 0)
        backend.commit(0)
        assert backend.close(60)
        mlflow.log_metrics({"loss": 3.0, "learning_rate": 0.2})
    metrics = mlflow.MlflowClient(uri).get_run(active.info.run_id).data.metrics
    ours = "Network/loss", "Network/loss objective", "Network/learning_rate group 0"
    assert metrics == {"loss": 3.0, "learning_rate": 0.2, **dict.fromkeys(ours, 0.5)}
