"""Connects a session with its bus, until it is closed or unreachable, and reports its state."""

import atexit
import gc
import os
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from ikkuna.backends.run import Run
from ikkuna.diagnosis.judge import Judge
from ikkuna.distributed.rendezvous import World
from ikkuna.errors import ClosedError
from ikkuna.flight_recorder.recorder import FlightRecorder
from ikkuna.metrics.bus.bus import MessageBus
from ikkuna.metrics.live_rules import RuleSubscriber
from ikkuna.metrics.messages.stamp import TRAINING
from ikkuna.metrics.subscriber.registered import Registered
from ikkuna.observation import checkpoint, evaluation
from ikkuna.observation.model.roots import Root, Roots
from ikkuna.observation.session import Session
from ikkuna.printable import printable
from ikkuna.store.run_directory import RunSettings
from ikkuna.support.failures import log
from ikkuna.support.modules import NamedModule
from ikkuna.support.process_hooks import hook_process


class _Closeable(Protocol):
    def close(self) -> None: ...


def close_at_exit(thing: _Closeable) -> None:
    """Call ``thing.close()`` at the end of the process; only a weak reference to `thing` is kept until then.

    Processes that `multiprocessing` has forked end without the functions of `atexit`.
    """
    reference = weakref.ref(thing)

    def close() -> None:
        if (alive := reference()) is not None:
            alive.close()

    if parent_process() is None:
        weakref.finalize(thing, atexit.unregister, atexit.register(close)).atexit = False
    else:
        weakref.finalize(thing, Finalize(None, close, exitpriority=0).cancel).atexit = False


_WIDTH = 15
_LONGEST = 100


@dataclass(frozen=True, slots=True, repr=False)
class Health:
    """The state of the monitor itself; ``print()`` shows it as a table.

    Parameters
    ----------
    acked_step : int
        The last step whose values the operating system has; -1 before the first.  Further values of a step, such as those of
        ``log()``, can come until the next step ends, so the last step is acknowledged by then, or by ``close()``.
    steps : int
        Number of training steps.
    errors : int
        Number of caught errors, of subscribers, of rules, of the user's function for findings, and of ikkuna.
    dropped : int
        Number of values that were lost before they were written, of incomplete bundles, of rows that other ranks did not keep,
        and of values that a device computes more slowly than they are sampled.
    unwritable : tuple of str
        The backends that cannot store values now, by name or class: the last attempt failed, or they are disabled.
        It is empty again when the disk has recovered and the waiting values are written.
    disabled : tuple of str
        Names of the disabled subscribers, which are their classes or what the function of a user publishes, and of the disabled rules.
    skipped : int
        Number of series whose tensors cannot be read, such as packed weights that cannot be dequantised,
        and of updates for which memory was missing.
    overhead : float
        Time that ikkuna spent on the training thread, and CPU time of the threads that draw pictures while the model trains,
        divided by the rest of the time, from the second step on.
        It does not contain the microseconds that torch takes on the way to each hook.
    dumps : int
        Number of dumps of the flight recorder that are on the disk.
    failed_dumps : int
        Number of dumps that could not be written.
    kept_bytes : int
        Memory that is kept for copies of weights on the host between sampled steps.
        It is freed after 100 steps of which no subscriber samples parameters, and by ``exporter.release_memory()``.
    seconds : dict of str to float
        Time spent in the code of each subscriber, by class and kinds; includes the subscribers of its results.

    Examples
    --------
    >>> Health(99, 100, 0, 0, (), (), 0, 0.0123, 0, 0, 4096, {"NormSubscriber(weights)": 0.25, "LossSubscriber(loss)": 0.5})
    acked_step     99
    steps          100
    errors         0
    dropped        0
    unwritable     none
    disabled       none
    skipped        0
    overhead       1.23%
    dumps          0
    failed_dumps   0
    kept_bytes     4096
    seconds
      0.5          LossSubscriber(loss)
      0.25         NormSubscriber(weights)
    """

    acked_step: int
    steps: int
    errors: int
    dropped: int
    unwritable: tuple[str, ...]
    disabled: tuple[str, ...]
    skipped: int
    overhead: float
    dumps: int
    failed_dumps: int
    kept_bytes: int
    seconds: dict[str, float]

    def __str__(self) -> str:
        facts = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "seconds"}
        facts["overhead"] = f"{self.overhead:.2%}"
        lines = [f"{name:<{_WIDTH}}{_text(value)}" for name, value in facts.items()]
        slowest = sorted(self.seconds.items(), key=lambda pair: -pair[1])
        lines += ["seconds", *(f"  {spent:<{_WIDTH - 2}.3g}{_shortened(label)}" for label, spent in slowest)]
        return "\n".join(map(printable, lines))

    __repr__ = __str__


def health_of(
    session: Session,
    run: Run | None = None,
    subscribers: tuple[Registered, ...] = (),
    recorder: FlightRecorder | None = None,
    judge: Judge | None = None,
) -> Health:
    """Return the health of a session and its bus; `run` and `subscribers` are those of a bus that was closed since."""
    bus = session.bus
    run, subscribers = run or bus.run, subscribers or bus.registered
    seconds: dict[str, float] = {}
    for registered in subscribers:
        seconds[registered.label] = seconds.get(registered.label, 0.0) + registered.seconds
    return Health(
        acked_step=-1 if run is None else int(min(run.acked_step, session.logged.first_step - 1)),
        steps=session.cycle.steps,
        errors=bus.error_guard.errors + (judge.errors if judge is not None else 0),
        dropped=(run.dropped if run is not None else 0)
        + sum(registered.dropped for registered in subscribers)
        + session.exchange.dropped
        + session.logged.dropped,
        unwritable=run.unwritable if run is not None else (),
        disabled=(*bus.error_guard.disabled, *(judge.disabled if judge is not None else ())),
        skipped=session.skipped,
        overhead=session.context.stopwatch.overhead(0.0 if run is None else run.drawing_seconds),
        dumps=len(recorder.dumps) if recorder is not None else 0,
        failed_dumps=recorder.failed if recorder is not None else 0,
        kept_bytes=session.hooks.optimizers.table.memory.nbytes,
        seconds=seconds,
    )


def _text(value: object) -> str:
    """Return a value of the table; names are separated by commas."""
    return (", ".join(map(str, value)) or "none") if isinstance(value, tuple) else str(value)


def _shortened(label: str) -> str:
    return label if len(label) <= _LONGEST else f"{label[: _LONGEST - 1]}…"


_OPEN: "weakref.WeakSet[Attachment]" = weakref.WeakSet()  # of this process, which has one pool of threads


class Attachment:
    """A session on its bus.

    The exporter and the hooks on the model refer to it, and the bus refers to it weakly.
    It is closed by the user, at the end of the process, or by the garbage collector when exporter and model are gone.

    Parameters
    ----------
    owner : object
        The exporter, referred to weakly.
    bus : MessageBus
        The bus.
    roots : Roots
        The added modules.
    native, in_graph : bool
        See `Session`.
    settings : RunSettings
        The directory of the runs, and what the user chooses for this one.

    Attributes
    ----------
    bus : MessageBus
        The bus.
    session : Session
        The session.
    recorder : FlightRecorder, optional
        Keeps the last steps.
    rules : RuleSubscriber, optional
        Applies rules after each step.
    at_end : callable, optional
        Called with this attachment after it was closed, on rank 0 and unless the verbosity is 0.
    is_closed : bool
        Whether it was closed.
    """

    _last_run: Run | None = None
    _registered: tuple[Registered, ...] = ()

    def __init__(
        self, owner: object, bus: MessageBus, roots: Roots, native: bool, in_graph: bool, settings: RunSettings
    ) -> None:
        self.is_closed = self._is_released = True
        self._owner = weakref.ref(owner)
        self.bus = bus
        self._health: Health | None = None
        self.recorder: FlightRecorder | None = None
        self.rules: RuleSubscriber | None = None
        self._unhook: list[Callable[[], None]] = []
        self.at_end: Callable[[Attachment], None] | None = None
        self.session = Session(bus, roots, self._names_of_others, native, in_graph)
        bus.attach(self, settings)
        try:
            if settings.resume is True:
                checkpoint.continue_latest(self.session)
        except BaseException:
            bus.detach(self)
            raise
        self._verbosity = bus.settings.verbosity
        self.is_closed = self._is_released = False
        _OPEN.add(self)
        close_at_exit(self)

    # -- as the source of a bus -----------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module | None:
        """The module that is the whole model; ``None`` if several modules were added and none was set."""
        return self.session.context.model.roots.whole

    @property
    def modules(self) -> tuple[NamedModule, ...]:
        """The observed modules with their names."""
        return self.session.context.model.modules

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The living optimizers that own parameters of the model."""
        return tuple(self.session.context.parameters.optimizers())

    @property
    def module_names(self) -> frozenset[str]:
        """The names of the observed modules."""
        return frozenset(named.name for named in self.modules)

    @property
    def is_forgotten(self) -> bool:
        """Whether the user has no reference to the exporter any more; only the model keeps it."""
        return self._owner() is None

    def demand_changed(self) -> None:
        """Prepare for subscribers that were added or removed."""
        self.session.plans.demand_changed()

    def evaluate(
        self,
        batches: Iterable[Any],
        name: str | None = "testing",
        *,
        visit: Callable[[Any, Any], object] | None = None,
        forward: Callable[[nn.Module, Any], Any] | None = None,
    ) -> None:
        """Run the model over data without an effect on training; see `Exporter.evaluate`."""
        self.require_open()
        session = self.session
        model = session.context.model.the_model()
        loss = None if name is None else session.context.model.loss

        def run() -> None:
            session.run_in_pass(name, lambda: evaluation.run(model, loss, batches, visit, forward))

        self.bus.error_guard.run_recorded(run)

    # -- the end of the process -----------------------------------------------------------------------------------

    def hook_process(self, signals: tuple[str, ...] = ()) -> None:
        """Connect with the hooks of the process until it is closed: its last exception, and signals.

        Raises
        ------
        ConfigError
            If a signal cannot be handled.
        """
        self._unhook.append(hook_process(self, signals))

    def process_fails(self, error: BaseException) -> None:
        """Pass the exception to the rules, which name it and its module, and to the flight recorder."""
        if self.rules is not None:
            try:
                tracker = self.session.context.tracker
                stamp = tracker.pass_stamp(TRAINING)
                self.rules.process_fails(error, stamp, stamp.global_step < tracker.counters.next.global_step)
            except Exception as failure:
                self.bus.error_guard.report_internal("naming the exception that ends the process", failure)
        if self.recorder is not None:
            self.recorder.process_fails(error)

    def signal_arrived(self, name: str, is_end: bool) -> None:
        """Pass a signal to the flight recorder; `is_end` is whether the signal usually ends the process."""
        if self.recorder is not None:
            self.recorder.signal_arrived(name, is_end)

    # -- names ----------------------------------------------------------------------------------------------------

    def _names_of_others(self) -> frozenset[str]:
        return frozenset(name for source in self.bus.sources if source is not self for name in source.module_names)

    def make_room(self, root: Root) -> None:
        """Close forgotten exporters of this bus that observe modules under the names of those below `root`.

        This happens when a cell of a notebook is run again.
        """
        forgotten = [source for source in self.bus.sources if source is not self and source.is_forgotten]
        names = {named.name for named in self.session.context.model.roots.find((root,))} if forgotten else set()
        for source in forgotten:
            if not names.isdisjoint(source.module_names):
                log.warning(
                    "bus %r: closed an earlier exporter, to which no variable refers any more, because another one "
                    "observes modules of the same names",
                    self.bus.name,
                )
                source.close()

    @property
    def run_directory(self) -> Path | None:
        """The directory of the run, also after :meth:`close`; ``None`` before the first stored value."""
        run = self._last_run if self.is_closed else self.bus.run
        return None if run is None else run.directory

    # -- the end --------------------------------------------------------------------------------------------------

    def require_open(self) -> None:
        """Raise `ClosedError` if it was closed."""
        if self.is_closed:
            raise ClosedError("this exporter is closed; create another one")

    @property
    def _judge(self) -> Judge | None:
        return None if self.rules is None else self.rules.judge

    def health(self) -> Health:
        """Return the state of the monitor itself; after :meth:`close` that at the end."""
        return (
            self._health
            if self._health is not None
            else health_of(self.session, recorder=self.recorder, judge=self._judge)
        )

    def close(self, is_given_up: bool = False) -> None:
        """Publish what is pending, and remove every hook; with the last exporter of the bus the run is closed and readable.

        If an exception such as `KeyboardInterrupt` interrupts it, a second call does what is left.

        Parameters
        ----------
        is_given_up : bool
            Whether the program goes on without it, so that a training that has not begun is no mistake.
        """
        if self._is_released:
            return
        try:
            if not self.is_closed:
                self.session.finish(for_good=True, has_ended=not is_given_up)
                self.bus.drain(wait=True)  # while a subscriber can still evaluate the model
        finally:
            self._release()
        if self._verbosity and self.at_end is not None and World.here().rank == 0:
            self.at_end(self)

    def _release(self) -> None:
        """Remove every hook, and release everything else; each step may be repeated after an interruption."""
        session, bus = self.session, self.bus
        session.hooks.uninstall()
        if not self.is_closed:
            self._last_run, self._registered, self.is_closed = bus.run, bus.registered, True
        for unhook in self._unhook:
            unhook()
        if self.recorder is not None:
            self.recorder.close()
        session.exchange.close()
        session.hooks.optimizers.table.memory.release()
        bus.detach(self)
        self._health = health_of(session, self._last_run, self._registered, self.recorder, self._judge)
        self._is_released = True
        _OPEN.discard(self)

    def __del__(self) -> None:
        """Close the session of an exporter and a model that are both gone."""
        try:
            self.close()
        except Exception as error:
            self.bus.error_guard.report_internal("closing an exporter", error)


def attachments_of(model: nn.Module) -> list[Attachment]:
    """Return the open sessions that observe a model as a whole."""
    return [each for each in list(_OPEN) if each.model is model]


def release_unreachable() -> None:
    """Close the exporters of models that are gone, if there can be any.

    Models and exporters refer to each other, so that only the garbage collector deletes them, and it runs too rarely
    for threads and files.
    """
    if any(each.is_forgotten for each in list(_OPEN)):
        gc.collect()


def _pause_after_fork() -> None:
    """Suspend recording in a forked child, where a data loader may call the model."""
    for each in list(_OPEN):
        each.session.context.is_paused = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pause_after_fork)
