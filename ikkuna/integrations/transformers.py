"""The callback for the ``Trainer`` of transformers; needs ``pip install "ikkuna[transformers]"``."""

from pathlib import Path
from typing import Any

import torch

from ikkuna.integrations.monitored_training import MonitoredTraining
from ikkuna.metrics.subscriber import Subscriber
from ikkuna.support.failures import log
from ikkuna.support.files import atomic_path
from ikkuna.support.plugins import import_extra

_transformers: Any = import_extra("transformers")
_BACKENDS = {"tensorboard": "tb", "wandb": "wandb", "mlflow": "mlflow"}  # of the trackers in report_to


class IkkunaCallback(_transformers.TrainerCallback):  # type: ignore[misc]  # the class of an optional dependency
    """Monitors ``Trainer.train`` of transformers.

    Epochs end with the trainer's, and evaluations during the training are recorded as the pass ``testing``.
    Beside each checkpoint the state of the exporter is stored in ``ikkuna_{rank}.pt``; a resumed training continues its run.
    The state is looked for in ``args.resume_from_checkpoint`` and in ``output_dir``; if it is missing, a warning is logged,
    and a new run begins at the step of the checkpoint.

    Parameters
    ----------
    *subscribers : Subscriber
        The metrics; by default those of the preset.
    **options : Any
        Options of `ikkuna.watch`.  These have other defaults: ``log_dir`` is ``run`` in ``output_dir``, ``run_name`` and ``config``
        are those of the ``TrainingArguments``, ``resume`` is ``"auto"``, and ``backend`` contains the backends of
        the trackers ``tensorboard``, ``wandb`` and ``mlflow`` in ``report_to``, or ``"tb"`` if there are none.

    Raises
    ------
    PluginError
        When this module is imported, if transformers is not installed.
    """

    def __init__(self, *subscribers: Subscriber, **options: Any) -> None:
        self._training = MonitoredTraining(subscribers, options)

    @property
    def exporter(self) -> Any:
        """The exporter of the last training; ``None`` before the first one."""
        return self._training.exporter

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **unused: Any) -> None:
        """Begin to observe the model."""
        defaults = {"config": args.to_sanitized_dict()}
        if args.run_name and args.run_name != args.output_dir:
            defaults["run_name"] = Path(args.run_name).name
        if backends := [_backend(name) for name in args.report_to if name in _BACKENDS]:
            defaults["backend"] = backends
        if state.global_step > 0:
            self._training.load(_stored(args, state))
        self._training.begin(model, Path(args.output_dir) / "run", defaults)
        if args.eval_on_start:
            self._training.begin_evaluation()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        """Count the epochs as the trainer does."""
        self._training.end_evaluation()
        self._training.reach_epoch(_whole_epochs(state))

    def on_step_begin(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        """Return to training if an evaluation has ended without an event."""
        self._training.end_evaluation()

    def on_step_end(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        """Record the evaluation that follows as another pass."""
        if control.should_evaluate:
            self._training.begin_evaluation()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        """End the epoch."""
        self._training.reach_epoch(_whole_epochs(state))
        if control.should_evaluate:
            self._training.begin_evaluation()

    def on_evaluate(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        """Return to training."""
        self._training.end_evaluation()

    def on_save(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        """Store the state of the exporter in the checkpoint that was saved."""
        directory = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if not directory.is_dir() or not (content := self._training.state()):
            return
        try:
            with atomic_path(directory / _file_name(args)) as path:
                torch.save(content, path)
        except OSError as error:  # the trainer has stored its own state, and training continues
            log.warning("the state of the monitor cannot be stored in '%s': %s", directory, error)

    def on_train_end(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        """Close the exporter."""
        self._training.close()


def _backend(tracker: str) -> Any:
    """Return the backend of a tracker in ``report_to``."""
    if tracker != "wandb":
        return _BACKENDS[tracker]
    from ikkuna.integrations.wandb import WandbBackend

    return WandbBackend(has_own_rows=True)


def _whole_epochs(state: Any) -> int:
    return int((state.epoch or 0) + 1e-6)


def _file_name(args: Any) -> str:
    return f"ikkuna_{args.process_index}.pt"


def _stored(args: Any, state: Any) -> dict[str, Any]:
    """Return the state of the exporter that belongs to the checkpoint; without it the counters of the trainer."""
    places = [Path(args.output_dir) / f"checkpoint-{state.global_step}"]
    if isinstance(args.resume_from_checkpoint, str):
        places.insert(0, Path(args.resume_from_checkpoint))
    for place in places:
        if (path := place / _file_name(args)).is_file():
            content: dict[str, Any] = torch.load(path, weights_only=True)
            return content
    log.warning(
        "the checkpoint of step %d contains no %s; a new run begins at this step", state.global_step, _file_name(args)
    )
    return {"global_step": state.global_step, "train_step": 0, "epoch": _whole_epochs(state)}
