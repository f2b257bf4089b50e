"""A resumed run goes on in the same directory and the same curves."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import ikkuna
from ikkuna.errors import ConfigError, LogDirError
from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import LossSubscriber, MeanSubscriber, NormSubscriber
from ikkuna.reading import read_run
from ikkuna.store.json_lines import read
from ikkuna.store.run_directory import read_run_file
from tests.export.resumed import Training

ROOT = Path(__file__).parents[2]


def make(backend="tb"):
    return lambda training: [
        NormSubscriber("weights", backend=backend),
        MeanSubscriber("weight_gradients", subsample=3, backend=backend),
        LossSubscriber(backend=backend),
    ]


def interrupted(tmp_path, backend, saved, killed, total, resume=True, **options):
    """Train to `killed`, and again from the checkpoint of step `saved` to `total`; return the directory of the second run."""
    first = Training(make(backend), log_dir=tmp_path, **options)
    first.train(saved)
    checkpoint = first.checkpoint()
    first.train(killed - saved)
    first.exporter.message_bus.run.flush(10)
    first.exporter.close()
    return continued(tmp_path, backend, checkpoint, total, resume, **options)


def continued(tmp_path, backend, checkpoint, total, resume=True, **options):
    again = Training(make(backend), checkpoint, log_dir=tmp_path, resume=resume, **options)
    again.train(total - again.step)
    directory = again.exporter.message_bus.run.directory
    again.exporter.close()
    return directory


def straight(tmp_path, backend, total):
    training = Training(make(backend), log_dir=tmp_path)
    training.train(total)
    directory = training.exporter.message_bus.run.directory
    training.exporter.close()
    return directory


def points(directory):
    """Return the values of a run that no restart has replaced."""
    run = read_run(directory)
    found = [
        (kind, name, step, value)
        for kind in run.kinds()
        for name in run.names(kind)
        for step, value in zip(*run.series(kind, name)[:2], strict=True)
    ]
    return sorted(found, key=repr)


def steps_of_loss(directory):
    return read_run(directory).series("loss").steps.tolist()


@pytest.mark.parametrize(("saved", "killed"), [(4, 7), (4, 4), (1, 8)])
@pytest.mark.parametrize("backend", ["tb", "jsonl"])
def test_a_resumed_run_is_one_curve_without_holes_or_duplicates(tmp_path, backend, saved, killed):
    directory = interrupted(tmp_path / "a", backend, saved, killed, 9)
    assert directory == tmp_path / "a" / "run0001"
    assert points(directory) == points(straight(tmp_path / "b", backend, 9))


def test_the_reader_of_tensorboard_shows_one_curve(tmp_path):
    directory = interrupted(tmp_path / "a", "tb", 4, 7, 9)
    whole = straight(tmp_path / "b", "tb", 9)
    curves = []
    for path in (directory, whole):
        reader = EventAccumulator(str(path)).Reload()
        tags = reader.Tags()["scalars"]
        curves.append({tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in tags})
    assert curves[0] == curves[1]
    assert curves[0]["Network/loss"][-1][0] == 8


def test_training_that_goes_back_in_one_process_is_one_curve_too(tmp_path):
    training = Training(make(["tb", "jsonl"]), log_dir=tmp_path)
    training.train(3)
    checkpoint = training.checkpoint()
    training.train(4)
    training.model.load_state_dict(checkpoint["model"])
    training.optimizer.load_state_dict(checkpoint["optimizer"])
    training.exporter.load_state_dict(checkpoint["exporter"])
    training.step = 3
    training.train(2)
    directory = training.exporter.message_bus.run.directory
    training.exporter.close()
    steps = steps_of_loss(directory)
    assert steps == [0, 1, 2, 3, 4]
    reader = EventAccumulator(str(directory)).Reload()
    assert [event.step for event in reader.Scalars("Network/loss")] == [0, 1, 2, 3, 4]
    assert [entry["step"] for entry in read(directory) if entry.get("kind") == "loss"] == [0, 1, 2, 3, 4]


def test_the_pictures_of_the_earlier_process_stay(tmp_path):
    directory = interrupted(tmp_path, "mpl", 2, 3, 5)
    names = {path.name: sorted(file.name for file in path.iterdir()) for path in directory.iterdir() if path.is_dir()}
    assert set(names) == {"pictures", "pictures_from_step_2"}
    assert "loss.png" in names["pictures"]
    assert "loss.png" in names["pictures_from_step_2"]


def test_a_killed_process_is_resumed_by_another_one(tmp_path):
    """The first process dies at once after it has saved, without any chance to flush."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, torch\n"
        "from tests.export.resumed import Training\n"
        "from tests.export.test_resumed_runs import make\n"
        "training = Training(make(['tb', 'jsonl']), log_dir=sys.argv[1])\n"
        "training.train(3)\n"
        "torch.save(training.checkpoint(), sys.argv[2])\n"
        "training.train(2)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "subscribers")))}
    environment["OMP_NUM_THREADS"] = str(torch.get_num_threads())  # sums depend on it
    done = subprocess.run(
        [sys.executable, script, tmp_path / "a", tmp_path / "checkpoint"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
    )
    assert done.returncode == -9, done.stderr.decode()
    directory = continued(tmp_path / "a", ["tb", "jsonl"], torch.load(tmp_path / "checkpoint"), 6)
    whole = straight(tmp_path / "b", ["tb", "jsonl"], 6)
    assert points(directory) == points(whole)
    keys = ("kind", "module", "pass", "step", "value")
    assert [[e.get(k) for k in keys] for e in read(directory)] == [[e.get(k) for k in keys] for e in read(whole)]


# -- which directory --------------------------------------------------------------------------------------------------


def checkpoint_of(tmp_path, **options):
    training = Training(make(), log_dir=tmp_path, **options)
    training.train(2)
    checkpoint = training.checkpoint()
    training.exporter.close()
    return checkpoint


def test_without_resume_a_new_run_begins(tmp_path):
    checkpoint = checkpoint_of(tmp_path)
    assert continued(tmp_path, "tb", checkpoint, 3, resume=False) == tmp_path / "run0002"
    assert steps_of_loss(tmp_path / "run0001") == [0, 1]


def test_a_run_is_found_after_its_directory_was_moved(tmp_path):
    checkpoint = checkpoint_of(tmp_path / "a")
    os.rename(tmp_path / "a", tmp_path / "b")
    assert continued(tmp_path / "b", "tb", checkpoint, 3) == tmp_path / "b" / "run0001"


def test_a_directory_of_another_run_is_not_continued(tmp_path):
    checkpoint = checkpoint_of(tmp_path / "a")
    checkpoint_of(tmp_path / "b")
    assert continued(tmp_path / "b", "tb", checkpoint, 3) == tmp_path / "a" / "run0001"


def test_a_run_whose_directory_is_gone_is_an_error_or_begins_anew(tmp_path, caplog):
    checkpoint = checkpoint_of(tmp_path / "a")
    os.rename(tmp_path / "a" / "run0001", tmp_path / "elsewhere")
    straight(tmp_path / "a", "tb", 1)
    with pytest.raises(LogDirError, match="the run of the state is neither in"):
        Training(make(), checkpoint, log_dir=tmp_path / "a", resume=True)
    assert continued(tmp_path / "a", "tb", checkpoint, 3, resume="auto") == tmp_path / "a" / "run0002"
    assert "run0001' of the run is gone; a new run begins at step 2" in caplog.text


def test_auto_without_a_state_begins_a_new_run(tmp_path):
    straight(tmp_path, "tb", 1)
    training = Training(make(), log_dir=tmp_path, resume="auto")
    training.train(1)
    assert training.exporter.message_bus.run.directory == tmp_path / "run0002"
    training.exporter.close()


@pytest.mark.parametrize("backend", ["tb", "jsonl"])
def test_resume_without_a_state_continues_the_latest_run_after_its_last_step(tmp_path, backend):
    straight(tmp_path, backend, 3)
    training = Training(make(backend), log_dir=tmp_path, resume=True)
    training.train(2)
    directory = training.exporter.message_bus.run.directory
    training.exporter.close()
    assert directory == tmp_path / "run0001"
    assert steps_of_loss(directory) == [0, 1, 2, 3, 4]


def test_a_named_run_is_the_latest_one_too(tmp_path):
    checkpoint = checkpoint_of(tmp_path, run_name="mine")
    assert continued(tmp_path, "tb", checkpoint, 3) == tmp_path / "mine"
    training = Training(make(), log_dir=tmp_path, resume=True)
    training.train(1)
    assert training.exporter.message_bus.run.directory == tmp_path / "mine"
    training.exporter.close()


def test_there_must_be_a_run_to_resume(tmp_path):
    bus = MessageBus("empty")
    with pytest.raises(LogDirError, match="has no run 'mine'; resume='auto' begins a new run then"):
        Exporter(message_bus=bus, log_dir=tmp_path, run_name="mine", resume=True)
    assert not bus.sources
    Exporter(message_bus=bus, log_dir=tmp_path).close()  # the bus is as before


# -- other models -----------------------------------------------------------------------------------------------------


class Other(nn.Linear):
    pass


MODELS = {
    "class": (nn.Linear(2, 2), Other(2, 2), r"to Linear \(2 parameters\), not Other \(2 parameters\)"),
    "shape": (
        nn.Linear(2, 2),
        nn.Linear(3, 2),
        r"to .* with weight of shape \[2, 2\], not .* with weight of shape \[2, 3\]",
    ),
    "names": (nn.Linear(2, 2), nn.Linear(2, 2, bias=False), r"to Linear \(2 parameters\) with bias, not .* without it"),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_state_of_another_model_is_refused(tmp_path, case):
    before, after, text = MODELS[case]
    exporters = [ikkuna.watch(model, log_dir=tmp_path, rules=None) for model in (before, after)]
    step = exporters[1].state_dict()
    with pytest.raises(ConfigError, match=f"the state belongs to another model: {text}"):
        exporters[1].load_state_dict({**exporters[0].state_dict(), "global_step": 7})
    assert exporters[1].state_dict()["global_step"] == step["global_step"] == 0
    for exporter in exporters:
        exporter.close()


def test_a_run_of_another_model_is_refused_when_the_model_is_added(tmp_path):
    straight(tmp_path, "tb", 1)
    match = r"the run in '.*run0001' belongs to another model: to Net"
    with (
        Exporter(message_bus=MessageBus(), log_dir=tmp_path, resume=True) as exporter,
        pytest.raises(ConfigError, match=match),
    ):
        exporter.add_modules(nn.Linear(2, 2))


def test_wrappers_make_no_other_model(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2))
    with ikkuna.watch(model, log_dir=tmp_path) as exporter:
        state = exporter.state_dict()
    with ikkuna.watch(nn.DataParallel(model), log_dir=tmp_path) as exporter:
        exporter.load_state_dict(state)


# -- names, hyper-parameters, and the line at the start ---------------------------------------------------------------


def test_a_named_run_never_overwrites_another_one(tmp_path):
    names = []
    for _ in range(3):
        training = Training(make(), log_dir=tmp_path, run_name="mine")
        training.train(1)
        names.append(training.exporter.message_bus.run.directory.name)
        training.exporter.close()
    assert names == ["mine", "mine_2", "mine_3"]


@pytest.mark.parametrize("name", ["", "a/b", "..", "x" * 201, 3, " "])
def test_a_name_that_is_no_directory_is_refused(name, tmp_path):
    with pytest.raises(ConfigError, match="run_name needs a"):
        Exporter(message_bus=MessageBus(), log_dir=tmp_path, run_name=name)


@pytest.mark.parametrize(
    ("option", "value"), [("resume", "yes"), ("verbosity", -1), ("verbosity", True), ("config", 3)]
)
def test_the_settings_of_a_run_are_checked(option, value, tmp_path):
    with pytest.raises(ConfigError, match=f"{option} "):
        Exporter(message_bus=MessageBus(), log_dir=tmp_path, **{option: value})


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no text")


def test_hyper_parameters_are_shown_by_tensorboard_and_stored(tmp_path, caplog):
    caplog.set_level(logging.INFO, "ikkuna")
    config = {
        "lr": 0.1,
        "layers": {"count": 3, "names": ["a", "b"]},
        "amp": True,
        "seed": None,
        "decay": float("nan"),
        "loss": Unprintable(),
        "model": nn.ReLU(),
        "scale": torch.tensor(2.0),
    }
    training = Training(make(["tb", "jsonl"]), log_dir=tmp_path, config=config)
    training.train(1)
    directory = training.exporter.message_bus.run.directory
    training.exporter.close()
    assert "config: stored as text: loss, model" in caplog.text
    flat = {
        "lr": 0.1,
        "layers.count": 3,
        "layers.names": "['a', 'b']",
        "amp": True,
        "seed": None,
        "decay": "nan",
        "loss": "<Unprintable>",
        "model": "ReLU()",
        "scale": 2.0,
    }
    assert read_run_file(directory).config == flat
    reader = EventAccumulator(str(directory)).Reload()
    assert b"| lr | 0.1 |" in reader.Tensors("Text/Config")[0].tensor_proto.string_val[0]
    start = hparams(reader)["_hparams_/session_start_info"].session_start_info.hparams
    assert start["lr"].number_value == 0.1
    assert start["amp"].bool_value
    assert start["decay"].string_value == "nan"
    [page] = [entry for entry in read(directory) if "title" in entry]
    assert page["title"] == "Config"
    assert json.loads((directory / "run.json").read_text())["model"]["class"] == "Net"


def hparams(reader):
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    content = reader.PluginTagToContent("hparams")
    return {tag: HParamsPluginData.FromString(data) for tag, data in content.items()}


def test_one_line_says_where_the_run_is(tmp_path, caplog):
    caplog.set_level(logging.INFO, "ikkuna")
    directory = straight(tmp_path, "tb", 2)
    lines = [record.getMessage() for record in caplog.records if "the run" in record.getMessage()]
    assert lines == [f"ikkuna: the run is written to '{directory}'; tensorboard --logdir {tmp_path}"]


def test_verbosity_silences_the_line(tmp_path, caplog):
    caplog.set_level(logging.INFO, "ikkuna")
    training = Training(make("jsonl"), log_dir=tmp_path, verbosity=0)
    training.train(1)
    training.exporter.close()
    assert "the run" not in caplog.text


SCRIPT = """
import logging
from ikkuna.support.console import announce
announce("without configuration")
logging.getLogger("ikkuna").setLevel(logging.WARNING)
announce("with a level")
logging.getLogger("ikkuna").setLevel(logging.NOTSET)
logging.basicConfig(level=logging.ERROR)
announce("with a handler")
logging.getLogger("ikkuna").setLevel(logging.INFO)
announce("with a handler and a level")
"""


def test_the_line_is_shown_without_configuration_of_logging_and_obeys_it():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == ["ikkuna: without configuration", "INFO:ikkuna:with a handler and a level"]
