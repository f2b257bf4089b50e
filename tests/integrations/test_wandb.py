"""Values logged to Weights & Biases offline are read back by its own reader."""

import json
import math
from pathlib import Path

import pytest

from ikkuna.integrations.wandb import WandbBackend
from ikkuna.store.names import Series
from ikkuna.testing import check_backend
from tests.integrations.training import add_everything, train

wandb = pytest.importorskip("wandb")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(autouse=True)
def no_login(monkeypatch, tmp_path_factory):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("NETRC", str(home / "netrc"))


def records(directory):
    """Yield the records of all offline runs below a directory."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    wandb.teardown()  # the service of wandb writes the files in a process of its own, which has ended then
    for path in sorted(Path(directory).rglob("*.wandb")):
        store = DataStore()
        store.open_for_scan(str(path))
        while (data := store.scan_data()) is not None:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            yield record
        store.close()


def history(directory):
    """Return the logged rows: dicts of values by their keys."""
    rows = []
    for record in records(directory):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def test_the_contract_is_kept(tmp_path):
    check_backend(WandbBackend, tmp_path)


def test_a_thousand_tags_and_values_that_are_not_finite_are_read_back(tmp_path):
    """One row for each step; without a login everything is offline."""
    add_everything(WandbBackend(), tmp_path)
    rows = history(tmp_path)
    assert [row["_step"] for row in rows] == [0, 1]
    for step, row in enumerate(rows):
        found = {key: value for key, value in row.items() if key.startswith("weights_norm2/")}
        assert found == {f"weights_norm2/layer.{number}": number + step / 2 for number in range(1000)}
        assert math.isnan(float(row["Network/nan"]))
        assert float(row["Network/inf"]) == math.inf
        assert float(row["Network/minus"]) == -math.inf
        assert row["Matrices/similarity/_type"] == "image-file"
        assert row["Text/Page/_type"] == "html-file"
    assert len(list(tmp_path.rglob("*.png"))) == 2
    page, *_ = sorted(tmp_path.rglob("*.html"))
    assert "a &lt;b&gt; &amp; c" in page.read_text()


def test_a_training_is_one_run_with_its_config_name_and_histograms(tmp_path, caplog):
    backend = WandbBackend()
    _, health = train(backend, tmp_path, run_name="mine")
    assert health.dropped == 0
    rows = history(tmp_path)
    assert [row["_step"] for row in rows] == [0, 1, 2]
    assert all(row["weights_norm2/linear"] > 0 for row in rows)
    for row in rows:
        assert row["weights/linear/_type"] == "histogram"
        assert sum(row["weights/linear/values"]) == 4
        assert len(row["weights/linear/bins"]) == len(row["weights/linear/values"]) + 1 <= 513
    runs = [record.run for record in records(tmp_path) if record.WhichOneof("record_type") == "run"]
    assert runs[0].display_name == "mine"
    configs = [record.config for record in records(tmp_path) if record.WhichOneof("record_type") == "config"]
    items = [item for part in (*configs, *(run.config for run in runs)) for item in part.update]
    assert {item.key: item.value_json for item in items}["lr"] == "0.1"


def test_two_backends_are_two_runs(tmp_path):
    first, second = WandbBackend(), WandbBackend()
    _, health = train([first, second], tmp_path)
    assert health.dropped == 0
    assert [row["_step"] for row in history(tmp_path)] == [0, 1, 2] * 2


def test_an_active_run_of_the_user_keeps_its_steps_and_stays_open(tmp_path):
    run = wandb.init(mode="offline", dir=str(tmp_path), settings=wandb.Settings(console="off", silent=True))
    try:
        wandb.log({"own": 1})
        train(WandbBackend(), tmp_path)
        wandb.log({"own": 2})
    finally:
        run.finish()
    rows = history(tmp_path)
    assert [row["own"] for row in rows if "own" in row] == [1, 2]
    assert [row["ikkuna/step"] for row in rows if "ikkuna/step" in row] == [0, 1, 2]


@pytest.mark.parametrize("first", [0, 3])
def test_what_the_script_logs_with_a_step_is_kept(tmp_path, first):
    """Also in a second training of the same run, whose steps begin again."""
    run = wandb.init(mode="offline", dir=str(tmp_path), settings=wandb.Settings(console="off", silent=True))
    for _ in range(first):
        run.log({"before": 1})
    backend = WandbBackend(run)
    for step in range(4):
        backend.add_scalar(Series("loss"), step / 2, step)
        backend.commit(step)
        assert backend.flush(60)
        if step % 2:
            run.log({"own": step}, step=first + step)
    assert backend.close(60)
    run.finish()
    rows = history(tmp_path)
    assert [row["own"] for row in rows if "own" in row] == [1, 3]
    assert [(row["ikkuna/step"], row["Network/loss"]) for row in rows if "Network/loss" in row] == [
        (step, step / 2) for step in range(4)
    ]
    assert backend.dropped == 0


def test_values_behind_the_rows_of_the_script_take_the_place_of_each_other(tmp_path):
    run = wandb.init(mode="offline", dir=str(tmp_path), settings=wandb.Settings(console="off", silent=True))
    backend = WandbBackend(run)
    run.log({"own": 1}, step=9)
    for step in (6, 7):
        backend.add_scalar(Series("loss"), step / 2, step)
        backend.commit(step)
        backend.flush(60)
    run.log({"own": 2}, step=10)
    backend.close(60)
    run.finish()
    rows = [{key: row.get(key) for key in ("_step", "own", "Network/loss")} for row in history(tmp_path)]
    assert rows == [{"_step": 9, "own": 1, "Network/loss": 3.5}, {"_step": 10, "own": 2, "Network/loss": None}]
    assert backend.dropped == 1


def test_rows_of_their_own_replace_no_values_of_each_other(tmp_path):
    """The script logs as often, without a step, and is ahead."""
    run = wandb.init(mode="offline", dir=str(tmp_path), settings=wandb.Settings(console="off", silent=True))
    backend = WandbBackend(run, has_own_rows=True)
    for step in range(8):
        run.log({"own": step})
        backend.add_scalar(Series("loss"), step / 2, step)
        backend.commit(step)
        if step % 4 == 3:
            backend.flush(60)
    backend.close(60)
    run.finish()
    rows = history(tmp_path)
    assert [row["own"] for row in rows if "own" in row] == list(range(8))
    assert [row["ikkuna/step"] for row in rows if "Network/loss" in row] == list(range(8))
    assert backend.dropped == 0
