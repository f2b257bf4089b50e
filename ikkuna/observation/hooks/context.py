"""Objects that all adapters of torch's hooks share: permits of native functions, graph operators, running optimizers.

The compiler neither looks into these operators nor removes them.  Their bodies end where the eager hooks end, so a compiled step is
measured by the same code.  They keep no tensor: the compiler reuses its memory as soon as the operator has returned.

A graph receives the number of a module as a tensor, because it would be compiled again for each module if the number were a constant.
The number of a call is a constant: the compiler merges operators with equal arguments, such as two calls of one module
that return the same tensor, or receive the same gradient.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from threading import get_ident
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from ikkuna.distributed.dtensor import divided
from ikkuna.metrics.bus.delivery import StepObserver
from ikkuna.metrics.bus.error_guard import ErrorGuard
from ikkuna.numerics.statistics.native.hook_functions import GRADIENTS as FOR_GRADIENTS
from ikkuna.numerics.statistics.native.hook_functions import (
    MICRO_GRADIENTS,
    CountedSteps,
    Function,
    Permits,
    hook_functions,
)
from ikkuna.numerics.statistics.native.hook_functions import OUTPUTS as FOR_OUTPUTS
from ikkuna.numerics.statistics.native.kernels import NOTHING
from ikkuna.observation.hooks.call_stack import count_running_calls
from ikkuna.observation.hooks.hook import MAY_CAPTURE, Hook, Stopwatch, in_backward
from ikkuna.observation.model.parameters import TrackedParameters
from ikkuna.observation.model.watched_model import WatchedModel
from ikkuna.observation.rows.plan import NOTHING as NOTHING_PLANNED
from ikkuna.observation.rows.plan import Site, WantedRows
from ikkuna.observation.rows.recorder import Recorder
from ikkuna.observation.steps.forwards import MICRO_PART, Decision, Forward, LoopEvents
from ikkuna.observation.steps.step_tracker import StepTracker
from ikkuna.store.finding import Finding
from ikkuna.support.failures import log
from ikkuna.support.torch_internals import current_trace, graph_task, insert_as_constant, sequence_number

_OF_OPTIMIZERS = vars(torch_optimizer)
_SCALER_STEP = torch.amp.GradScaler.step.__code__


def running_steps() -> tuple[list[Optimizer], torch.amp.GradScaler | None]:
    """Return the optimizers whose ``step()`` runs on this thread, and the gradient scaler that calls the outermost of them.

    The innermost optimizer comes first, and each as often as it calls itself.
    A step that raises calls no post hook, but torch's wrapper of it is not on the stack any more.
    A scaler that is disabled is none.

    Examples
    --------
    >>> running_steps()
    ([], None)
    """
    found: list[Optimizer] = []
    scaler: torch.amp.GradScaler | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:  # without a generator: this runs at every step
        code = frame.f_code
        if "wrapper" in code.co_name and frame.f_globals is _OF_OPTIMIZERS:
            optimizer = frame.f_locals.get("self")
            if isinstance(optimizer, Optimizer):
                found.append(optimizer)
        elif code is _SCALER_STEP:
            scaler = frame.f_locals["self"]
        frame = frame.f_back
    return found, scaler if scaler is not None and scaler.is_enabled() else None


class Computation:
    """Whether anything was computed for a backward since the last step of an optimizer.

    autograd numbers the operators that it records on each thread.  The number is read at the steps of optimizers alone, so it costs
    nothing between them, and it counts whatever computes gradients: roots, modules outside any root, functions.
    All steps of optimizers inside one backward belong together.

    Examples
    --------
    >>> computation, x = Computation(), torch.ones(2, requires_grad=True)
    >>> computation.is_new(), x.sum().requires_grad, computation.is_new()
    (False, True, True)
    """

    __slots__ = ("_number", "_task", "_thread")

    def __init__(self) -> None:
        self.step_ended()

    def step_ended(self) -> None:
        """Begin anew at the end of an optimizer's step."""
        self._thread, self._task, self._number = get_ident(), graph_task(), sequence_number()

    def step_has_ended(self, thread: int, number: int) -> None:
        """Begin anew at the end of a step outside of a backward, where `sequence_number` returned `number` on a thread."""
        self._thread, self._task, self._number = thread, -1, number

    def leave_out(self, count: int) -> None:
        """Do not count operators that ikkuna itself has called."""
        self._number += count

    def is_new(self) -> bool:
        """Return whether anything was computed; not if the last step was that of another thread, which cannot be compared."""
        if (task := graph_task()) != -1:
            return task != self._task
        return sequence_number() > self._number and get_ident() == self._thread


class LossScale:
    """Removes the factor of the gradient scaler that has called the last optimizer.

    A backward does not show which scaler has scaled its loss; the next step of an optimizer does.

    Attributes
    ----------
    is_used : bool
        Whether a gradient scaler has called the last optimizer.
    """

    def __init__(self) -> None:
        self.is_used = False
        self._scaler: weakref.ref[torch.amp.GradScaler] | None = None

    def set_scaler(self, scaler: torch.amp.GradScaler | None) -> bool:
        """Set the scaler that calls the running optimizer; return whether it is another one than at the step before."""
        known = self._scaler() if self._scaler is not None else None
        self._scaler = None if scaler is None else weakref.ref(scaler)
        self.is_used = scaler is not None
        return scaler is not known

    @property
    def factor(self) -> Tensor | None:
        """The factor of the scaler, a tensor that it changes in place; ``None`` without a scaler."""
        scaler = self._scaler() if self._scaler is not None else None
        return None if scaler is None else scaler._scale

    def removed_from(self, grad: Tensor) -> Tensor:
        """Return a gradient without the factor, in at least float32."""
        scale = self.factor
        return grad if scale is None else divided(grad, scale.to(grad.device, non_blocking=True))


INPUTS, OUTPUTS, GRADIENTS, VIEW, BASE = range(5)
"""Role of a tensor for a module: an input, an output, the gradient of an output, of an output that is a view, of the base of that view."""


class ObservedSites(NamedTuple):
    """The sites of one module's tensors, or of the network's; ``None`` if no subscriber wants them.

    Parameters
    ----------
    inputs, outputs, gradients : Site or None
        The sites of what the module receives, of what it returns, and of the gradients with respect to that.
    """

    inputs: Site | None = None
    outputs: Site | None = None
    gradients: Site | None = None


class GraphReceiver(Protocol):
    """Receives what compiled graphs measure."""

    def observed(self, site: Site, tensor: Tensor, path: str, role: int) -> None:
        """Handle a tensor, detached; never raise."""

    def root_called(self, training: bool, gradients: bool) -> None:
        """Handle the call of a compiled root; never raise."""


class Sites:
    """The sites of one exporter; each is one object."""

    def __init__(self) -> None:
        self._receiver: weakref.ref[GraphReceiver] | None = None
        self._sites: dict[tuple[str, str | None], Site] = {}
        self._numbers: dict[str, Tensor] = {}

    @property
    def receiver(self) -> GraphReceiver | None:
        """The object that receives what compiled graphs measure at these sites."""
        return self._receiver() if self._receiver is not None else None

    def set_receiver(self, receiver: GraphReceiver) -> None:
        """Set the receiver, which is held weakly."""
        self._receiver = weakref.ref(receiver)

    def __call__(self, kind: str, module: str | None = None) -> Site:
        """Return the site of a kind and module."""
        site = self._sites.get((kind, module))
        return site if site is not None else self._sites.setdefault((kind, module), Site(kind, module))

    def number(self, module: str, observed: ObservedSites) -> Tensor:
        """Return a tensor with the number by which compiled graphs name a module, and set the sites of the module.

        The network has an empty name.
        """
        self.create_numbers((module,))
        tensor = self._numbers[module]
        number = int(tensor)
        reference = _NUMBERED[number][0] if number in _NUMBERED else self._reference(number)
        _NUMBERED[number] = reference, observed
        return tensor

    def create_numbers(self, modules: Iterable[str]) -> None:
        """Create the numbers of modules that have none."""
        if names := [name for name in modules if name not in self._numbers]:
            with torch.inference_mode(False):  # autograd saves the number for the backward
                numbers = torch.tensor([next(_NEXT_NUMBER) for _ in names], dtype=torch.int64, device="cpu")
                self._numbers.update(zip(names, (number.clone() for number in numbers.unbind()), strict=True))

    def _reference(self, number: int) -> "weakref.ref[Sites]":
        return weakref.ref(self, lambda _: _NUMBERED.pop(number, None))


# process-wide: a graph outlives the objects it was traced with
_NUMBERED: dict[int, tuple["weakref.ref[Sites]", ObservedSites]] = {}
_NEXT_NUMBER = count()
_CALLS: "weakref.WeakKeyDictionary[Any, count[int]]" = weakref.WeakKeyDictionary()


def next_call() -> int:
    """Return how many calls were traced before into the graph that is being compiled."""
    return next(_CALLS.setdefault(current_trace(), count()))


insert_as_constant(next_call)


def _find(number: Tensor) -> tuple[GraphReceiver, ObservedSites] | None:
    reference, observed = _NUMBERED.get(int(number), (None, None))
    sites = reference() if reference is not None else None
    receiver = sites.receiver if sites is not None else None
    return None if receiver is None or observed is None else (receiver, observed)


# torch.library.custom_op would add six Python calls to each call
torch.library.define("ikkuna::observe", "(Tensor tensor, Tensor number, int role, str path, int call) -> ()")
torch.library.define("ikkuna::root_called", "(Tensor number, bool training, bool gradients, int call) -> ()")


@torch.library.impl("ikkuna::observe", "CompositeExplicitAutograd")
def _observe(tensor: Tensor, number: Tensor, role: int, path: str, call: int) -> None:
    if (found := _find(number)) is not None:
        receiver, observed = found
        if (site := observed[min(role, GRADIENTS)]) is not None:
            receiver.observed(site, tensor.detach(), path, role)


@torch.library.impl("ikkuna::root_called", "CompositeExplicitAutograd")
def _root_called(number: Tensor, training: bool, gradients: bool, call: int) -> None:
    if (found := _find(number)) is not None:
        found[0].root_called(training, gradients)


def trace_nothing(*args: object) -> None:
    """Stand for the operators while the compiler traces."""


# register_fake would search all modules for its caller, which takes a tenth of the time to import ikkuna
torch.library.impl("ikkuna::observe", "Meta", trace_nothing)
torch.library.impl("ikkuna::root_called", "Meta", trace_nothing)

observe = torch.ops.ikkuna.observe.default
"""Pass a tensor of the module with a number to the receiver; `call` differs between the operators of a graph."""

root_called = torch.ops.ikkuna.root_called.default
"""Report a call of a root to the receiver, with whether it is in training mode and has gradients."""

# An operator that returns nothing is removed as dead code without this mark.
torch.fx.node.has_side_effect(observe)
torch.fx.node.has_side_effect(root_called)


class NativePath:
    """Two permits, one for outputs of modules and one for their gradients, and the native functions that need them.

    The hooks in Python define what is recorded.  At its end, a hook that has recorded something opens a permit for what would be
    recorded in the same way.  Every hook in Python, and everything that the user calls, closes both permits first.
    So a permit is valid only as long as nothing but native functions and the user's own code has run since it was opened.

    Parameters
    ----------
    recorder : Recorder
        The recorder of training; other passes are recorded in Python.

    Attributes
    ----------
    close : callable
        Ends both permits.
    threads : memoryview
        See `Permits`.
    counted : CountedSteps
        What native functions know of steps that are only counted.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._functions = hook_functions(recorder.kernels)
        self._wanted_rows = WantedRows(recorder.index)
        self._permits = Permits()
        self.close, self.threads = self._permits.close, self._permits.threads
        self.counted = CountedSteps()
        self._plan = weakref.ref(NOTHING_PLANNED)
        self._wanted = self._wanted_rows.of(NOTHING_PLANNED)

    def seconds(self) -> float:
        """Return the time that native functions have taken, and the counting of steps."""
        return self._permits.seconds() + self.counted.nanoseconds * 1e-9

    def event_handlers(self, idle: object) -> list[object]:
        """Return what handles the usual events of counted steps, in their order, see `HookFunctions.handlers`; none without them."""
        return [] if self._functions is None else self._functions.handlers(self.counted, idle)

    def call_natively(self, cls: type, has_several: bool = False) -> None:
        """Let objects of a class be called without Python where that is possible, see `HookFunctions`."""
        if self._functions is not None:
            self._functions.call_natively(cls, has_several)

    def permit_outputs(self, recorder: Recorder, forward: Forward) -> None:
        """Permit the measurement of what modules return on this thread, in a forward whose root is running."""
        if recorder.plan.forward and forward.number >= 0:
            self._open(FOR_OUTPUTS, recorder, forward.number, forward.part)

    def permit_gradients(self, recorder: Recorder, forward: Forward, part: int) -> None:
        """Permit the measurement of gradients of a forward, and of parameters, in the backward that runs on this thread."""
        if forward.number >= 0:
            self._open(FOR_GRADIENTS, recorder, forward.number, part, graph_task())
        self.permit_micro_gradients(recorder)

    def permit_micro_gradients(self, recorder: Recorder) -> None:
        """Permit the measurement of gradients of parameters in the backward that runs on this thread."""
        if recorder.plan.micro_gradients:
            self._open(MICRO_GRADIENTS, recorder, -1, MICRO_PART, graph_task())

    def _open(self, which: int, recorder: Recorder, forward: int, part: int, task: int = -1) -> None:
        kernels, rows = recorder.kernels, recorder.rows
        if self._functions is None or recorder is not self._recorder or kernels is None or rows is None:
            return
        if part < 0 or (MAY_CAPTURE and torch.cuda.is_initialized()):
            return
        plan = recorder.plan
        if self._plan() is not plan or len(self._wanted) != len(recorder.index.keys):
            self._plan, self._wanted = weakref.ref(plan), self._wanted_rows.of(plan)
        host = rows.part(part).host
        if len(self._wanted) > len(host.values):
            host.reserve(len(self._wanted))
        has_inputs = "layer_inputs" in plan.kinds
        self._permits.open(which, get_ident(), host.location, self._wanted, forward, task, has_inputs)

    def output_function(
        self, recorder: Recorder, sites: ObservedSites, forward_hooks: Mapping[int, Any] | None, gradients: list[Any]
    ) -> Function | None:
        """Return a function that records what a module receives and returns; ``None`` if that has to be done in Python.

        Parameters
        ----------
        recorder : Recorder
            The recorder in whose rows the output is measured.
        sites : ObservedSites
            The sites of the module.
        forward_hooks, gradients
            See `HookFunctions.output`.
        """
        if self._functions is None or recorder is not self._recorder:
            return None
        rows = [NOTHING if site is None else recorder.index.row(site, "") for site in sites]
        return self._functions.output(self._permits, rows, forward_hooks, gradients)

    def gradient_hook(self, recorder: Recorder, site: Site, forward: Forward, hook: Hook) -> object:
        """Return what native functions register in place of the hook of a gradient; ``None`` if that has to be done in Python."""
        if self._functions is None or recorder is not self._recorder or forward.number < 0:
            return None
        return self._functions.gradient(self._permits, recorder.index.row(site, ""), forward.number, hook)

    def watch(self, output: Tensor, gradient_hook: object) -> bool:
        """Register what `gradient_hook` has returned on an output that is no view; return whether that was done."""
        return (
            self._functions is not None and gradient_hook is not None and self._functions.watch(output, gradient_hook)
        )

    def micro_gradient_hook(self, recorder: Recorder, row: int, hook: Hook) -> object:
        """Return what native functions register in place of the hook of a parameter's gradient; ``None`` if Python has to do it."""
        if self._functions is None or recorder is not self._recorder:
            return None
        return self._functions.gradient(self._permits, row, -1, hook, MICRO_GRADIENTS)

    def watch_parameters(self, parameters: list[Tensor], gradient_hooks: list[object]) -> object:
        """Register what `micro_gradient_hook` has returned for each parameter; return what keeps the nodes with these hooks."""
        assert self._functions is not None
        return self._functions.watch_parameters(parameters, gradient_hooks)


def _is_incomplete(*args: object) -> None:
    raise RuntimeError("the session is not composed yet")


def _log_finding(finding: Finding) -> None:
    log.warning("%s Try: %s.", finding, finding.advice)


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
    events : LoopEvents
        Recognises evaluation passes in the training loop.
    idle_handlers : dict
        Functions of hooks → functions that count a step that no subscriber samples, and return whether the tracker needs no event.
    native_handlers : dict
        Functions of hooks → what does the same with usual events without Python, if there is anything.
    parameters : TrackedParameters
        The parameters and their optimizers.
    sites : Sites
        The sites of the exporter.
    stopwatch : Stopwatch
        Counts the time that hooks take.
    loss_scale : LossScale
        The factor of a gradient scaler.
    found : callable
        Receives findings about the training as a whole; without rules they are logged.
    computation : Computation
        Whether anything was computed since the last step of an optimizer.
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
    events: LoopEvents = field(default_factory=LoopEvents)
    idle_handlers: Mapping[Callable[..., object], Callable[..., bool]] = field(default_factory=dict)
    native_handlers: Mapping[Callable[..., object], object] = field(default_factory=dict)
    parameters: TrackedParameters = field(default_factory=TrackedParameters)
    sites: Sites = field(default_factory=Sites)
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    loss_scale: LossScale = field(default_factory=LossScale)
    found: Callable[[Finding], object] = _log_finding
    computation: Computation = field(default_factory=Computation)
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
        _ = self.tracker.state  # any use of the tracker ends the counting of steps beside it
        self._is_paused = is_paused

    @property
    def is_off(self) -> bool:
        """Whether nothing is recorded now: recording is suspended or interrupted, or a subscriber's code runs on this thread."""
        return self._is_paused or self.is_interrupted or self.error_guard.thread.subscriber_is_running

    def averaged(self, grad: Tensor) -> Tensor:
        """Return a gradient without the factor of a gradient scaler, and divided by the number of ranks, whose mean loss counts."""
        if self.loss_scale.is_used:
            grad = self.loss_scale.removed_from(grad)
        return divided(grad, self.replicas) if self.replicas > 1 else grad

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

    def interrupt(self) -> None:
        """Record nothing until the next forward, and count nothing without the tracker."""
        self.is_interrupted, self.idle_handlers, self.native.counted.thread = True, {}, 0

    def observe(self, observer: StepObserver | None) -> None:
        """Let an observer see steps as a whole, in place of the one before."""
        _ = self.tracker.state  # as in `is_paused`
        self.observer = observer

    def handle(self, where: str, error: BaseException) -> None:
        """Handle an exception that leaves a hook: report an error of ikkuna, and raise what belongs to the user.

        The state of the step is unknown after an exception that is raised, so the step is abandoned.
        """
        before = self.is_interrupted
        self.interrupt()
        if not isinstance(error, Exception):
            raise error
        self.error_guard.report_internal(where, error)
        self.is_interrupted = before
