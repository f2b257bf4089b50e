"""Evaluations in the user's own training loop, recorded as a pass by themselves."""

from collections.abc import Callable

from ikkuna.distributed.rendezvous import World
from ikkuna.metrics.bus.bus import MessageBus
from ikkuna.metrics.bus.delivery import Finished
from ikkuna.metrics.messages.stamp import VALIDATION, Stamp
from ikkuna.observation.hooks.context import HookContext
from ikkuna.observation.rows.plan import Plan
from ikkuna.observation.rows.recorder import Recorder
from ikkuna.support.failures import log

_PASS_IT = "pass its module, as in loss = nn.CrossEntropyLoss() and watch(model, loss)"


class Validation:
    """Records the losses of evaluations in the training loop as the pass ``validation``, beside the recorder of the training.

    A loss belongs to it if it is computed without gradients, after a forward of an evaluation, see `LoopEvents.is_evaluating`,
    or while all modules of a model that is never called as a whole are in evaluation mode.
    The evaluations between two steps are one pass, and so are those inside a step, because the weights are the same in all of them.
    The inputs of the model are recorded as well, if the last evaluation is at least 10 steps ago.
    Nothing else is: an open step and the hooks of modules stay as they are.
    The values are those of this rank, because others may not evaluate.

    Parameters
    ----------
    bus : MessageBus
        Receives the measurements.
    context : HookContext
    plan_of : callable
        Returns what is measured in a step or pass.
    recorder : Recorder
        A recorder of its own, which does not communicate.

    Attributes
    ----------
    is_open : bool
        Whether a pass is recorded that has not ended.
    """

    def __init__(
        self, bus: MessageBus, context: HookContext, plan_of: Callable[[Stamp], Plan], recorder: Recorder
    ) -> None:
        self._bus, self._context, self._plan_of = bus, context, plan_of
        self._recorder = recorder
        self._is_settled = self.is_open = False

    def recorder(self, loss: bool = True) -> Recorder:
        """Return the recorder of the pass, which begins if it has not; `loss` is whether it records one."""
        self._is_settled = self._is_settled or loss
        if self._recorder.rows is None:
            self._recorder.open(*self._planned())
            self.is_open = self._recorder.rows is not None
        return self._recorder

    def _planned(self) -> tuple[Stamp, Plan]:
        """Return the stamp and the plan of the pass, on several ranks without rules, which have to decide the same on each."""
        stamp = self._context.tracker.pass_stamp(VALIDATION)
        plan = self._plan_of(stamp)
        if World.here().size > 1:
            own = tuple(each for each in plan.subscriptions if each.subscription.tag is not None)
            return stamp, Plan(own, sampled=plan.sampled)  # the others still receive what these publish
        return stamp, plan

    def end(self, is_complete: bool = True) -> None:
        """Publish the measurements of the pass, if there is one and it is complete."""
        if self.is_open:
            self.is_open, rows = False, self._recorder.close()
            if rows is not None and is_complete:
                self._bus.queue.append(Finished(rows, None))
        if not self._is_settled and self._context.events.repeated > 1:
            self._is_settled = True
            if "loss" in self._planned()[1].kinds:
                is_inside = self._context.model.loss is not None and self._context.model.is_compiled
                log.warning(
                    "no loss is seen in the evaluations of the loop: if they compute one, %s, so that over-fitting is judged",
                    "call the loss outside of the compiled function there" if is_inside else _PASS_IT,
                )
