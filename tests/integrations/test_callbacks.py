"""The callbacks of trainers show what a plain loop shows, bit for bit."""

import sys
from importlib import import_module, reload

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import ikkuna
from ikkuna.errors import ConfigError, PluginError
from ikkuna.export.subscriber import CallbackSubscriber, LossSubscriber, NormSubscriber
from tests.integrations import digits

# a training that is resumed uses the directories of the first one
pytestmark = pytest.mark.filterwarnings("ignore:.*exists and is not empty")


def callback(name, *subscribers, **options):
    if name == "lightning":
        from ikkuna.integrations.lightning import IkkunaCallback
    else:
        from ikkuna.integrations.transformers import IkkunaCallback
    return IkkunaCallback(*(subscribers or digits.subscribers()), **options)


def fitted(name, directory, *callbacks, resume=None, **options):
    """Train; return the model."""
    if name == "lightning":
        from lightning.pytorch.callbacks import ModelCheckpoint

        saved = ModelCheckpoint(directory / "saved", filename="{epoch}", save_top_k=-1)
        trainer = digits.lightning_trainer(directory, saved, *callbacks, **options)
        module = digits.lightning_module()()
        trainer.fit(module, digits.batches(), digits.batches(), ckpt_path=resume, weights_only=True)
        return module.net
    trainer = digits.transformers_trainer(directory, *callbacks, **options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer.model.net


def steps_and_epochs(seen):
    """Return a subscriber that collects the epoch of each step."""

    def collect(message):
        seen.append((message.global_step, message.epoch))

    return CallbackSubscriber("batch_finished", collect, backend="null")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The values of the plain loop, and its parameters."""
    directory, model = digits.plain(tmp_path_factory.mktemp("plain"))
    return digits.points(directory), list(model.parameters())


@pytest.mark.parametrize("name", ["lightning", "transformers"])
def test_the_values_are_those_of_a_plain_loop(name, plain, tmp_path):
    """Norms, loss, learning rate, epochs, validation passes, with accumulation and clipping."""
    seen = []
    monitor = callback(name, *digits.subscribers(), steps_and_epochs(seen), backend="jsonl", rules=None)
    model = fitted(name, tmp_path, monitor)
    found = digits.points(tmp_path / "run" / "run0001", "net.")
    expected, parameters = plain
    assert {kind for _, kind, *_ in found} >= {"loss", "learning_rate", "weight_gradients_norm2", "activations_norm2"}
    assert found == expected
    assert all(map(torch.equal, model.parameters(), parameters))
    assert monitor.exporter.is_closed
    assert seen == [(step, step // 3) for step in range(6)]


def checkpointed(name, directory, *callbacks, **options):
    """Train with a checkpoint after each epoch; return the path of the first one."""
    if name == "lightning":
        fitted(name, directory, *callbacks, **options)
        return directory / "saved" / "epoch=0.ckpt"
    fitted(name, directory, *callbacks, save_strategy="epoch", **options)
    return directory / "checkpoint-3"


@pytest.mark.parametrize("name", ["lightning", "transformers"])
def test_a_checkpoint_that_is_older_than_the_last_step_continues_the_run(name, plain, tmp_path):
    """Epoch 1 is trained, lost, and trained again: one run without holes or duplicates, with the epochs counted on."""
    options = {"backend": ["jsonl", "tb"], "rules": None}
    checkpoint = checkpointed(name, tmp_path, callback(name, **options))
    seen = []
    again = callback(name, *digits.subscribers(), steps_and_epochs(seen), **options)
    model = fitted(name, tmp_path, again, resume=str(checkpoint))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run0001"]
    expected, parameters = plain
    assert digits.points(tmp_path / "run" / "run0001", "net.") == expected
    assert all(map(torch.equal, model.parameters(), parameters))
    assert seen == [(3, 1), (4, 1), (5, 1)]
    reader = EventAccumulator(str(tmp_path / "run" / "run0001")).Reload()
    assert [event.step for event in reader.Scalars("Network/loss")] == list(range(6))


def test_the_loggers_of_a_lightning_trainer_show_the_values(tmp_path, caplog):
    """Two loggers get the same numbers; the curves of a resumed training have no duplicates in TensorBoard's reader."""
    from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

    class Kept(Logger):
        name, version = "kept", 0

        def __init__(self):
            super().__init__()
            self.rows = {}

        def log_hyperparams(self, params):
            self.params = params

        def log_metrics(self, metrics, step):
            self.rows.setdefault(step, {}).update(metrics)

    def loggers():
        return [TensorBoardLogger(tmp_path, "tb", 0), kept, CSVLogger(tmp_path)]

    def monitor():
        return callback("lightning", LossSubscriber(), NormSubscriber("weights"), rules=None)

    kept = Kept()
    checkpoint = checkpointed("lightning", tmp_path, monitor(), logger=loggers())
    fitted("lightning", tmp_path, monitor(), resume=checkpoint, logger=loggers())
    reader = EventAccumulator(str(tmp_path / "tb" / "version_0")).Reload()
    shown = {tag: {e.step: e.value for e in reader.Scalars(tag)} for tag in ("Network/loss", "weights_norm2/0")}
    for tag, values in shown.items():
        assert [event.step for event in reader.Scalars(tag)] == list(range(6))
        assert {step: row[tag] for step, row in kept.rows.items() if tag in row} == pytest.approx(values)
    assert not [record for record in caplog.records if record.name == "ikkuna" and record.levelname == "WARNING"]
    assert kept.params["rate"] == digits.RATE
    assert kept.params["accumulate_grad_batches"] == digits.ACCUMULATION


@pytest.mark.parametrize("name", ["lightning", "transformers"])
def test_a_missing_trainer_names_the_extra(name, monkeypatch):
    module = import_module(f"ikkuna.integrations.{name}")
    monkeypatch.setitem(sys.modules, {"lightning": "lightning.pytorch"}.get(name, name), None)
    with pytest.raises(PluginError, match=rf'pip install "ikkuna\[{name}\]"'):
        reload(module)


def test_an_unknown_module_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no module 'nett'; it has 'net'"):
        fitted("lightning", tmp_path, callback("lightning", module="nett"))


def test_a_model_that_is_watched_twice_is_watched_by_the_last_one(tmp_path, caplog):
    """The first of two callbacks does nothing from then on, and raises nothing."""
    first, second = (callback("transformers", LossSubscriber(), backend="jsonl", rules=None) for _ in range(2))
    fitted("transformers", tmp_path, first, second)
    assert "closed the exporter of the earlier watch()" in caplog.text
    assert (first.exporter.health().steps, second.exporter.health().steps) == (0, 6)


def test_a_checkpoint_without_the_state_begins_a_new_run_at_its_step(tmp_path, caplog):
    options = {"backend": "jsonl", "rules": None}
    checkpoint = checkpointed("transformers", tmp_path, callback("transformers", **options))
    (checkpoint / "ikkuna_0.pt").unlink()
    fitted("transformers", tmp_path, callback("transformers", **options), resume=str(checkpoint))
    assert "contains no ikkuna_0.pt; a new run begins at this step" in caplog.text
    assert {step for *_, step in digits.points(tmp_path / "run" / "run0002")} == {3, 4, 5}


def test_a_state_of_another_model_is_refused(tmp_path):
    checkpoint = checkpointed("transformers", tmp_path, callback("transformers", rules=None), epochs=1)
    path = checkpoint / "ikkuna_0.pt"
    with ikkuna.watch(nn.Linear(3, 3)) as exporter:
        torch.save({**torch.load(path), "model": exporter.state_dict()["model"]}, path)
    with pytest.raises(ConfigError, match="belongs to another model"):
        fitted("transformers", tmp_path, callback("transformers", rules=None), resume=str(checkpoint))


@pytest.mark.parametrize("name", ["lightning", "transformers"])
def test_an_exception_in_training_reaches_the_user(name, tmp_path):
    class Failing(nn.Module):
        def forward(self, x):
            raise RuntimeError("mine")

    monitor = callback(name, LossSubscriber(), rules=None, backend="jsonl")
    if name == "lightning":
        module = digits.lightning_module()()
        module.net.append(Failing())
        trainer = digits.lightning_trainer(tmp_path, monitor, num_sanity_val_steps=0)
        with pytest.raises(RuntimeError, match="mine"):
            trainer.fit(module, digits.batches(), digits.batches())
        assert monitor.exporter.is_closed
    else:
        trainer = digits.transformers_trainer(tmp_path, monitor)
        trainer.model.net.append(Failing())
        with pytest.raises(RuntimeError, match="mine"):
            trainer.train()
        monitor.exporter.close()


def test_the_validation_of_a_trainer_is_seen_as_that_of_a_loop(tmp_path):
    """Without a subscriber of another pass, as with the presets."""
    function, expected, found = nn.CrossEntropyLoss(), [], []
    seen = CallbackSubscriber("loss", lambda m: found.append(float(m.data)), tag="validation", backend="null")

    class Module(digits.lightning_module()):
        def validation_step(self, batch, index):
            expected.append(function(self.net(batch[0]), batch[1]).item())

    monitor = callback("lightning", seen, loss=function, rules=None)
    trainer = digits.lightning_trainer(tmp_path, monitor, num_sanity_val_steps=0)
    trainer.fit(Module(), digits.batches(), digits.batches())
    assert found == pytest.approx(expected)
    assert len(found) == 6 * digits.EPOCHS
