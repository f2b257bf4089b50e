"""Drives an exporter for the callbacks of all trainers."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import nn

from ikkuna.backends.run import Run
from ikkuna.export.exporter import Exporter
from ikkuna.export.watch import watch
from ikkuna.metrics.subscriber import Subscriber

_TESTING = "testing"


class MonitoredTraining:
    """Calls an exporter for a trainer.

    If the exporter is closed, for example because the model is watched again elsewhere, all methods do nothing.

    Parameters
    ----------
    subscribers : sequence of Subscriber
        The metrics; empty for those of the preset.
    options : dict
        The options of `ikkuna.watch` that the user has set.

    Attributes
    ----------
    exporter : Exporter or None
        The exporter of the last training; ``None`` before the first one.
    loaded_step : int or None
        The step of the state that was loaded; ``None`` without one.
    """

    def __init__(self, subscribers: Sequence[Subscriber], options: dict[str, Any]) -> None:
        self.exporter: Exporter | None = None
        self._subscribers = tuple(subscribers)
        self._options = options
        self._state: dict[str, Any] | None = None
        self._epoch = 0
        self.loaded_step: int | None = None
        self._pause: AbstractContextManager[None] | None = None

    def begin(self, model: nn.Module, log_dir: Path, defaults: dict[str, Any]) -> Exporter:
        """Observe a model; the options of the user have priority over `log_dir` and `defaults`."""
        self.close()
        options = {"log_dir": log_dir, "resume": "auto", **defaults, **self._options}
        self.exporter = exporter = watch(model, *self._subscribers, **options)
        self._epoch, self.loaded_step = 0, None
        state, self._state = self._state, None
        try:
            if state:
                self.load(state)
        except BaseException:
            exporter.close()
            raise
        return exporter

    def is_open(self) -> bool:
        """Return whether a training is observed."""
        return self.exporter is not None and not self.exporter.is_closed

    def state(self) -> dict[str, Any]:
        """Return the state of the exporter for a checkpoint; empty if nothing is observed."""
        return self.exporter.state_dict() if self.exporter is not None and self.is_open() else {}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a state, now or when the training begins."""
        if self.exporter is None or not self.is_open():
            self._state = state
            return
        self.exporter.load_state_dict(state)
        self._epoch, self.loaded_step = state["epoch"], state["global_step"]

    @property
    def run(self) -> Run | None:
        """The run of the exporter; ``None`` before its first value."""
        return self.exporter.message_bus.run if self.exporter is not None else None

    def reach_epoch(self, epoch: int) -> None:
        """End epochs until `epoch` of them have ended; a checkpoint may be older than the end of its epoch."""
        while self._epoch < epoch and self.exporter is not None and self.is_open():
            self.exporter.epoch_finished()
            self._epoch += 1

    def begin_evaluation(self) -> None:
        """Record from now on as the pass ``testing``, if a subscriber takes it; otherwise as a validation in the loop."""
        if self.exporter is None or not self.is_open():
            return
        if any(each.subscription.tag == _TESTING for each in self.exporter.message_bus.registered):
            self.exporter.test(_TESTING)

    def end_evaluation(self) -> None:
        """Return to training."""
        if self.exporter is not None and self.is_open():
            self.exporter.train()

    def pause(self) -> None:
        """Record nothing until :meth:`unpause`."""
        if self.exporter is not None and self.is_open() and self._pause is None:
            self._pause = self.exporter.paused()
            self._pause.__enter__()

    def unpause(self) -> None:
        """Record again."""
        pause, self._pause = self._pause, None
        if pause is not None:
            pause.__exit__(None, None, None)

    def fail(self, error: BaseException) -> None:
        """Close the exporter, after a dump of the last steps if they are recorded."""
        self.unpause()
        if self.exporter is not None and self.is_open():
            self.exporter.__exit__(type(error), error, error.__traceback__)

    def close(self) -> None:
        """Close the exporter."""
        self.unpause()
        if self.exporter is not None:
            self.exporter.close()
