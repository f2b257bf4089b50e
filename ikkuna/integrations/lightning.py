"""The callback for Lightning; needs ``pip install "ikkuna[lightning]"``."""

from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from ikkuna.errors import ConfigError
from ikkuna.integrations.monitored_training import MonitoredTraining
from ikkuna.metrics.subscriber import Subscriber
from ikkuna.support.failures import log
from ikkuna.support.plugins import import_extra

_lightning: Any = import_extra("lightning.pytorch")
_loggers: Any = import_extra("lightning.pytorch.loggers")
_SETTINGS = ("max_epochs", "max_steps", "accumulate_grad_batches", "gradient_clip_val", "precision")
_EVENTS = (
    "tensorboard.compat.proto.event_pb2",
    "tensorboardX.proto.event_pb2",
)  # of the writers of torch and tensorboardX


class IkkunaCallback(_lightning.Callback):  # type: ignore[misc]  # the class of an optional dependency
    """Monitors ``Trainer.fit`` of Lightning.

    Epochs end with the trainer's, validation is recorded as the pass ``testing``, and the sanity check is not recorded.
    The checkpoints of the trainer contain the state of the exporter; a resumed training continues its run.

    Parameters
    ----------
    *subscribers : Subscriber
        The metrics; by default those of the preset.
    module : str, optional
        The name of the module to watch inside the ``LightningModule``; ``""`` for the ``LightningModule`` itself.
        By default it is the ``LightningModule``; but if this has no ``forward``, and exactly one of the modules
        inside has all the parameters, it is that one.
    **options : Any
        Options of `ikkuna.watch`.  These have other defaults: ``log_dir`` is ``run`` in the trainer's ``default_root_dir``,
        ``config`` the hyper-parameters of the module and the trainer, ``resume`` is ``"auto"``,
        and ``backend`` the trainer's loggers, or ``"tb"`` if there are none.
        A ``CSVLogger`` is no backend by default, because it cannot be called from a thread.

    Raises
    ------
    PluginError
        When this module is imported, if Lightning is not installed.
    """

    def __init__(self, *subscribers: Subscriber, module: str | None = None, **options: Any) -> None:
        self._training = MonitoredTraining(subscribers, options)
        self._module = module
        self._writers: list[Any] = []

    @property
    def exporter(self) -> Any:
        """The exporter of the last training; ``None`` before the first one."""
        return self._training.exporter

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to observe the module."""
        hyper_parameters = {name: getattr(trainer, name) for name in _SETTINGS}
        defaults: dict[str, Any] = {"config": {**hyper_parameters, **pl_module.hparams}}
        self._writers = [
            logger.experiment
            for logger in trainer.loggers
            if trainer.is_global_zero and isinstance(logger, _loggers.TensorBoardLogger)
        ]
        if backends := _backends(trainer):
            defaults["backend"] = backends
        directory = Path(trainer.default_root_dir) / "run"
        self._training.begin(_watched(pl_module, self._module), directory, defaults)
        self._mark_restart()

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        """Record nothing during the check."""
        self._training.pause()

    def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
        """Record again."""
        self._training.unpause()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Count the epochs as the trainer does."""
        self._training.reach_epoch(trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """End the epoch."""
        self._training.reach_epoch(trainer.current_epoch + 1)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Record the validation as another pass."""
        if not trainer.sanity_checking:
            self._training.begin_evaluation()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Return to training."""
        if not trainer.sanity_checking:
            self._training.end_evaluation()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the exporter."""
        self._training.fail(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Close the exporter at the end of the training."""
        if stage == "fit":
            self._training.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the exporter, which the trainer stores in its checkpoints."""
        state = self._training.state()
        if state:  # what the loggers have not stored yet would be missing in a training that is resumed from here
            run = self._training.run
            if run is not None:
                run.flush(2.0)
            for writer in self._writers:
                writer.flush()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the state in a checkpoint."""
        self._training.load(state_dict)
        self._mark_restart()

    def _mark_restart(self) -> None:
        """Let TensorBoard drop what an earlier process has written of the steps that are repeated."""
        if (step := self._training.loaded_step) is None:
            return
        for writer in self._writers:
            events = import_module(_EVENTS[type(writer).__module__.startswith("tensorboardX")])
            start = events.SessionLog(status=events.SessionLog.START)
            writer.file_writer.add_event(events.Event(step=step, session_log=start))


def _watched(pl_module: Any, name: str | None) -> nn.Module:
    """Return the module to watch.

    Raises
    ------
    ConfigError
        If there is no module of this name.
    """
    if name is not None:
        try:
            found: nn.Module = pl_module.get_submodule(name)
        except AttributeError as error:
            children = ", ".join(repr(child) for child, _ in pl_module.named_children())
            raise ConfigError(f"the LightningModule has no module {name!r}; it has {children}") from error
        return found
    module: nn.Module = pl_module
    if type(module).forward is not _lightning.LightningModule.forward:
        return module
    owners = [child for child in module.children() if any(True for _ in child.parameters())]
    if len(owners) == 1 and not any(True for _ in module.parameters(recurse=False)):
        return owners[0]
    return module


def _backends(trainer: Any) -> list[Any]:
    """Return the trainer's loggers as backends; the writer of TensorBoard also shows histograms and images."""
    found = []
    for logger in trainer.loggers:
        if isinstance(logger, _loggers.TensorBoardLogger):
            found.append(logger.experiment)
        elif isinstance(logger, _loggers.CSVLogger):
            log.info("ikkuna: a CSVLogger cannot be called from a thread; its file does not contain the metrics")
        elif type(logger).__name__ != "DummyLogger":
            found.append(logger)
    return found
