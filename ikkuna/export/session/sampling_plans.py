"""Decides what is measured at each step, as subscribers, the user and other processes ask for it."""

import torch

from ikkuna.distributed.world import World
from ikkuna.export.bus.bus import MessageBus
from ikkuna.export.hooks.context import HookContext
from ikkuna.export.hooks.modules import ModuleHooks
from ikkuna.export.messages.stamp import TRAINING, Stamp
from ikkuna.export.rows.plan import Demand, Plan
from ikkuna.export.steps.step_tracker import State
from ikkuna.logger import log
from ikkuna.numerics.statistics import closure
from ikkuna.numerics.statistics.device import warm_up
from ikkuna.visualization.files.control_file import CONTROL_FILE

__all__ = ["SamplingPlans"]


class SamplingPlans:
    """The plans of steps, and the changes of what is sampled.

    Parameters
    ----------
    bus : MessageBus
        Knows the subscribers.
    context : HookContext
    modules : ModuleHooks
        Prepared for what is wanted.
    """

    def __init__(self, bus: MessageBus, context: HookContext, modules: ModuleHooks) -> None:
        self._bus, self._context, self._modules = bus, context, modules
        self._demand = Demand()

    def of(self, stamp: Stamp) -> Plan:
        """Return the plan of a step or of another pass."""
        return self._demand.plan(self._bus.registered, stamp)

    def of_next_step(self) -> Plan:
        """Return the plan of the open step, or of the next one."""
        return self.of(self._context.tracker.stamp)

    def demand_changed(self) -> None:
        """Handle a change of what subscribers want."""
        wishes = Plan(tuple(r for r in self._bus.registered if not r.disabled))
        if wishes.takes_data:
            tensors = (named.parameter for named in self._context.parameters.all)
            parameters = {(x.device, x.dtype) for x in tensors if not x.is_cpu}
            warm_up(parameters, {closure(r.subscriber.fields) for r in wishes.subscriptions if r.subscriber.fields})
        if self._modules.prepare(wishes, self.of_next_step()):
            log.warning("torch.compiler.reset(): the model was compiled before all that is wanted of it now was known")
            torch.compiler.reset()

    def change_sampling(self, paused: bool | None = None, every: int | None = -1) -> None:
        """Change what is sampled from the next step on; see `Sampling.change`."""
        tracker = self._context.tracker
        next_step = tracker.counters.global_step + (tracker.state is not State.IDLE)
        self._bus.sampling.change(next_step, paused, every)
        self._demand = Demand()
        self.demand_changed()
        if tracker.state is State.IDLE and tracker.pass_name == TRAINING:
            self._modules.keep_for(self.of_next_step())

    def follow_control_file(self) -> None:
        """Change the sampling as another process requests it, unless other ranks would sample other steps."""
        if (run := self._bus.run) is None or (request := run.control.take()) is None:
            return
        if World.here().size > 1:
            log.warning("%s is ignored, because all ranks must sample the same steps", CONTROL_FILE)
            return
        self.change_sampling(*request)
        log.info("sampling is changed by %s: %s", CONTROL_FILE, request)
