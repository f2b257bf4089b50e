"""Permits native functions to do what a hook in Python has decided, for the hooks that follow."""

import weakref
from collections.abc import Mapping
from threading import get_ident
from typing import Any

import torch

from ikkuna.export.hooks.graph_operators import ObservedSites
from ikkuna.export.hooks.hook import MAY_CAPTURE
from ikkuna.export.rows.plan import NOTHING as NOTHING_PLANNED
from ikkuna.export.rows.recorder import Recorder
from ikkuna.export.rows.site import Site
from ikkuna.export.rows.wanted_rows import WantedRows
from ikkuna.export.steps.forward import Forward
from ikkuna.numerics.statistics.native.hook_functions import NOTHING, Function, Permits
from ikkuna.torch_internals import graph_task

__all__ = ["NativePath"]


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
    seconds : callable
        Returns the time that native functions have taken.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._functions = None if recorder.kernels is None else recorder.kernels.hook_functions
        self._wanted_rows = WantedRows(recorder.index)
        self._permits = Permits()
        self.close = self._permits.close
        self.seconds = self._permits.seconds
        self._plan = weakref.ref(NOTHING_PLANNED)
        self._wanted = self._wanted_rows.of(NOTHING_PLANNED)

    def permit_outputs(self, recorder: Recorder, forward: Forward) -> None:
        """Permit the measurement of what modules return on this thread, in a forward whose root is running."""
        if recorder.plan.forward:
            self._open(recorder, forward, forward.part)

    def permit_gradients(self, recorder: Recorder, forward: Forward, part: int) -> None:
        """Permit the measurement of gradients of a forward in the backward that runs on this thread."""
        self._open(recorder, forward, part, graph_task())

    def _open(self, recorder: Recorder, forward: Forward, part: int, task: int | None = None) -> None:
        kernels, rows = recorder.kernels, recorder.rows
        if self._functions is None or recorder is not self._recorder or kernels is None or rows is None:
            return
        if part < 0 or forward.number < 0 or (MAY_CAPTURE and torch.cuda.is_initialized()):
            return
        plan = recorder.plan
        if self._plan() is not plan or len(self._wanted) != len(recorder.index.keys):
            self._plan, self._wanted = weakref.ref(plan), self._wanted_rows.of(plan)
        host = rows.part(part).host
        host.reserve(len(self._wanted))
        self._permits.open(get_ident(), host.location, self._wanted, forward.number, task)

    def output_function(
        self, recorder: Recorder, sites: ObservedSites, forward_hooks: Mapping[int, Any] | None, dictionaries: list[Any]
    ) -> Function | None:
        """Return a function that records what a module returns; ``None`` if that has to be done in Python.

        Parameters
        ----------
        recorder : Recorder
            The recorder in whose rows the output is measured.
        sites : ObservedSites
            The sites of the module.
        forward_hooks, dictionaries
            See `HookFunctions.output`.
        """
        if self._functions is None or recorder is not self._recorder or sites.inputs is not None:
            return None
        row, gradient_row = (
            NOTHING if site is None else recorder.index.row(site, "") for site in (sites.outputs, sites.gradients)
        )
        return self._functions.output(self._permits, row, gradient_row, forward_hooks, dictionaries)

    def gradient_function(self, recorder: Recorder, site: Site, forward: Forward) -> Function | None:
        """Return a function that records the gradient of an output; ``None`` if that has to be done in Python."""
        if self._functions is None or recorder is not self._recorder or forward.number < 0:
            return None
        return self._functions.gradient(self._permits, recorder.index.row(site, ""), forward.number)
