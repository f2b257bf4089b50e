"""Objects that all adapters of torch's hooks share."""

from collections.abc import Callable
from dataclasses import dataclass, field

from ikkuna.export.bus.error_guard import ErrorGuard
from ikkuna.export.hooks.call_stack import count_running_calls
from ikkuna.export.hooks.graph_operators import Sites
from ikkuna.export.hooks.hook import in_backward
from ikkuna.export.hooks.loss_scale import LossScale
from ikkuna.export.hooks.native_path import NativePath
from ikkuna.export.model.parameters import TrackedParameters
from ikkuna.export.model.watched_model import WatchedModel
from ikkuna.export.rows.observer import StepObserver
from ikkuna.export.rows.recorder import Recorder
from ikkuna.export.steps.decisions import Decision
from ikkuna.export.steps.step_tracker import StepTracker
from ikkuna.export.steps.stopwatch import Stopwatch
from ikkuna.logger import log

__all__ = ["HookContext"]


def _is_incomplete(*args: object) -> None:
    raise RuntimeError("the session is not composed yet")


@dataclass(slots=True, weakref_slot=True)
class HookContext:
    """The objects that adapters translate hooks into calls of.

    Parameters
    ----------
    recorder : Recorder
        Measures tensors; another one during another pass over data.
    error_guard : ErrorGuard
        Handles errors.
    model : WatchedModel
        Roots, observed modules and loss.
    native : NativePath
        Permits native functions to do what hooks in Python have decided.
    apply : callable
        Carries out the decisions of the tracker; set when the parts that do so exist.
    abandon : callable
        Abandons the open step, whatever state it is in; set likewise.
    tracker : StepTracker
        The state of the training loop.
    parameters : TrackedParameters
        The parameters and their optimizers.
    sites : Sites
        The sites of the exporter.
    stopwatch : Stopwatch
        Counts the time that hooks take.
    loss_scale : LossScale
        The factor of a gradient scaler.
    replicas : int
        Number of ranks over which gradients are averaged.
    is_interrupted : bool
        Whether an exception that belongs to the user, such as `KeyboardInterrupt`, has left a hook.
        Nothing is recorded then until the next forward.
    observer : StepObserver, optional
        Observes steps as a whole.
    has_seen_capture : bool
        Whether the model was called while a CUDA graph was captured.
    """

    recorder: Recorder
    error_guard: ErrorGuard
    model: WatchedModel
    native: NativePath
    apply: Callable[[tuple[Decision, ...]], None] = _is_incomplete
    abandon: Callable[[], None] = _is_incomplete
    tracker: StepTracker = field(default_factory=StepTracker)
    parameters: TrackedParameters = field(default_factory=TrackedParameters)
    sites: Sites = field(default_factory=Sites)
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    loss_scale: LossScale = field(default_factory=LossScale)
    replicas: int = 1
    _is_paused: bool = False
    is_interrupted: bool = False
    observer: StepObserver | None = None
    has_seen_capture: bool = False

    @property
    def is_paused(self) -> bool:
        """Whether the user has suspended recording."""
        return self._is_paused

    @is_paused.setter
    def is_paused(self, is_paused: bool) -> None:
        self.native.close()
        self._is_paused = is_paused

    @property
    def is_off(self) -> bool:
        """Whether nothing is recorded now: recording is suspended or interrupted, or a subscriber's code runs on this thread."""
        return self._is_paused or self.is_interrupted or self.error_guard.thread.subscriber_is_running

    def resumes(self, running: int = 0) -> bool:
        """Return whether recording goes on with the forward that begins, because only an exception has interrupted it.

        Parameters
        ----------
        running : int
            Number of calls of roots that run on this thread if the forward is an outermost one.
        """
        if self.is_paused or self.error_guard.thread.subscriber_is_running or in_backward():
            return False
        if count_running_calls(self.model.callable) > running:
            return False
        self.stopwatch.restart()
        self.abandon()
        self.is_interrupted = False
        return True

    def is_captured(self) -> None:
        """Log once that a CUDA graph of the model is captured: an operator that measures would become a part of each replay."""
        if not self.has_seen_capture:
            self.has_seen_capture = True
            log.warning(
                "a CUDA graph is being captured: nothing is recorded of the calls in it, and nothing when it is replayed; "
                "steps without the graph are recorded"
            )

    def handle(self, where: str, error: BaseException) -> None:
        """Handle an exception that leaves a hook: report an error of ikkuna, and raise what belongs to the user.

        The state of the step is unknown after an exception that is raised, so the step is abandoned.
        """
        before, self.is_interrupted = self.is_interrupted, True
        if not isinstance(error, Exception):
            raise error
        self.error_guard.report_internal(where, error)
        self.is_interrupted = before
