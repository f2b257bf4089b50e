"""Connects a session with its bus, until it is closed or unreachable."""

import gc
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ikkuna.errors import ClosedError
from ikkuna.export import checkpoint, evaluation
from ikkuna.export.at_exit import close_at_exit
from ikkuna.export.bus.bus import MessageBus
from ikkuna.export.health import Health, health_of
from ikkuna.export.hooks.install import pause_after_fork
from ikkuna.export.model.roots import Root, Roots
from ikkuna.export.recorder.flight_recorder import FlightRecorder
from ikkuna.export.session.session import Session
from ikkuna.logger import log
from ikkuna.modules import NamedModule
from ikkuna.visualization.run import Run
from ikkuna.visualization.run_settings import RunSettings

__all__ = ["Attachment", "attachments_of", "release_unreachable"]

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
    is_closed : bool
        Whether it was closed.
    """

    _last_run: Run | None = None

    def __init__(
        self, owner: object, bus: MessageBus, roots: Roots, native: bool, in_graph: bool, settings: RunSettings
    ) -> None:
        self.is_closed = True
        self._owner = weakref.ref(owner)
        self.bus = bus
        self._health: Health | None = None
        self.recorder: FlightRecorder | None = None
        self.session = Session(bus, roots, self._names_of_others, native, in_graph)
        bus.attach(self, settings)
        try:
            if settings.resume is True:
                checkpoint.continue_latest(self.session)
        except BaseException:
            bus.detach(self)
            raise
        self.is_closed = False
        _OPEN.add(self)
        pause_after_fork(self.session.context)
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

    def health(self) -> Health:
        """Return the state of the monitor itself; after :meth:`close` that at the end."""
        return self._health if self._health is not None else health_of(self.session, recorder=self.recorder)

    def close(self) -> None:
        """Publish what is pending, and remove every hook; with the last exporter of the bus the run is closed and readable."""
        if self.is_closed:
            return
        session, bus = self.session, self.bus
        try:
            session.finish(for_good=True)
            bus.drain(wait=True)  # while a subscriber can still evaluate the model
        finally:
            self.is_closed = True
            if self.recorder is not None:
                self.recorder.close()
            _OPEN.discard(self)
            session.exchange.close()
            session.hooks.uninstall()
            self._last_run = run = bus.run
            registered = bus.registered
            bus.detach(self)
            self._health = health_of(session, run, registered, self.recorder)

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
