"""Observes modules and parameters that the user puts in place of others."""

from collections.abc import Callable

from ikkuna.export.hooks.context import HookContext
from ikkuna.export.hooks.hook_set import HookSet
from ikkuna.logger import log

__all__ = ["ReplacedModules"]


class ReplacedModules:
    """Observes the modules and parameters that the user has put in place of others since they were added.

    Parameters
    ----------
    context : HookContext
    hooks : HookSet
        The hooks of the exporter.
    taken : callable
        Returns the names of modules that other exporters of the bus observe.
    demand_changed : callable
        Called when other modules are observed.
    """

    def __init__(
        self,
        context: HookContext,
        hooks: HookSet,
        taken: Callable[[], frozenset[str]],
        demand_changed: Callable[[], None],
    ) -> None:
        self._context, self._hooks = context, hooks
        self._taken, self._demand_changed = taken, demand_changed
        self._has_warned = False

    def follow(self, inside_step: bool = False) -> None:
        """Find replaced modules and parameters, and observe them.

        The hooks of a compiled model cannot change inside a step, because its graph runs then.
        """
        context = self._context
        try:
            if context.parameters.modules_have_changed() and not (inside_step and context.model.is_compiled):
                self._follow_modules()
            else:
                context.parameters.refresh()
        except Exception as error:  # of the user's filter of modules, for example
            context.error_guard.report_internal("finding the modules that were replaced", error)

    def _follow_modules(self) -> None:
        context, model = self._context, self._context.model
        try:
            change = model.follow(self._taken())
        finally:
            context.parameters.track(model.modules, model.callable)
        if not change.names:  # a wrapper was put around a module
            return
        self._hooks.modules.forget(change.names)
        self._hooks.include_copies()
        self._demand_changed()
        if not self._has_warned:
            self._has_warned = True
            log.warning("the model has changed since it was added: %s", change)
