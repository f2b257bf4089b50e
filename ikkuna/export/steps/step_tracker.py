"""Tells where one step ends and the next begins, from what can be seen of a training loop."""

import logging
import weakref
from typing import Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from ikkuna.errors import ConfigError
from ikkuna.export.messages.stamp import Stamp
from ikkuna.export.model.parameters import TrackedParameters
from ikkuna.export.steps.running_optimizers import step_calls

__all__ = ["TRAINING", "Clock", "Listener"]

log = logging.getLogger("ikkuna")

TRAINING = "training"

_PATIENCE = 300  # forwards without any step: more than people accumulate
_FEW = 20  # which a gradient scaler may skip before it has found its scale


class Listener(Protocol):
    """What hears the clock."""

    def step_opened(self, stamp: Stamp) -> None:
        """A step begins."""

    def step_closed(self, stamp: Stamp, skipped: bool) -> None:
        """A step is over; `skipped` if no optimizer made it."""


class Clock:
    """Counts optimizer steps.

    A step opens with the outermost training forward (the root in training mode, gradients enabled), or late, with an optimizer's step.
    After a step whose forwards were all in evaluation mode those count as well, until one in training mode is seen:
    batch norm and dropout are kept still like that while the rest is trained.
    It closes when the optimizers that own tracked parameters have stepped; which ones these are is learned from the first step
    that is closed by the forward after it, unless those seen so far own everything.

    Parameters
    ----------
    parameters : the parameters whose optimizers count
    """

    def __init__(self, parameters: TrackedParameters) -> None:
        self.parameters = parameters
        self.global_step = 0
        self.train_step = 0
        self.epoch = 0
        self.pass_name = TRAINING
        self.is_open = False
        self.depth = 0
        self.counting = True
        self.steps_per_epoch: int | None = None
        self._listener: weakref.ref[Listener] | None = None
        self._stepped: dict[int, Optimizer] = {}
        self._known: set[int] = set()
        self._inside: dict[int, tuple[Optimizer, int]] = {}  # how deep the calls of its step() are
        self._modes: set[bool] = set()  # that roots were in when they were called with gradients
        self._trains_in_evaluation = False
        self._stepless: int | None = 0  # forwards before the first step; None after it, or once told

    def listen(self, listener: Listener) -> None:
        """Let `listener`, held weakly, hear of every step."""
        self._listener = weakref.ref(listener)

    @property
    def stamp(self) -> Stamp:
        """The stamp of the open step, or of the one to come."""
        return Stamp(self.global_step, self.train_step, self.epoch)

    def pass_stamp(self, name: str) -> Stamp:
        """Return the stamp of what a pass sees after the last step, or inside an open one."""
        back = 0 if self.is_open else 1
        return Stamp(max(self.global_step - back, 0), max(self.train_step - back, 0), self.epoch, name)

    # -- the root -------------------------------------------------------------------------------------------------

    def root_entered(self, module: nn.Module, in_closure: bool = False) -> bool:
        """Note that a root is called; say whether this is an outermost call that counts."""
        self.depth += 1
        if self.depth > 1:
            return False
        self.counting = self._counts_outside(module)
        if self.pass_name == TRAINING and torch.is_grad_enabled():
            self._modes.add(module.training)
        if self.counting and self.pass_name == TRAINING:
            self.begin(in_closure)
        return self.counting

    def compiled_root_entered(self, counts: bool, in_closure: bool) -> None:
        """Note that a compiled root is called; `counts` if in training mode and with gradients."""
        self.counting = counts and self.pass_name == TRAINING
        if self.counting:
            self._modes.add(True)
            self.begin(in_closure)

    def begin(self, in_closure: bool) -> None:
        """Note that a forward begins that belongs to a step: to the open one, unless an optimizer has stepped in that."""
        if not in_closure:
            self._inside.clear()  # a step() that raised left its mark
        self.close_pending()
        self.open()
        if self._stepless is not None:
            self._stepless += 1
            if self._stepless == _PATIENCE:
                self.tell_of_missing_steps()

    def tell_of_missing_steps(self) -> None:
        """Say, once, that there were forwards, but never a step."""
        if self._stepless is not None and self._stepless > _FEW:
            log.warning(
                "%d forwards in training and no step: nothing is published before one is over. Optimizers of torch.optim are seen; "
                "after the step of any other, or of none, call exporter.step()",
                self._stepless,
            )
            self._stepless = None

    def root_left(self) -> bool:
        """Note that a root has returned or raised; say whether it was an outermost call that counts."""
        self.depth = max(0, self.depth - 1)
        return self.depth == 0 and self.counting

    @property
    def is_outside(self) -> bool:
        """Whether no root is running, in training."""
        return self.depth == 0 and self.pass_name == TRAINING

    def counts(self, module: nn.Module) -> bool:
        """Whether a call of `module` belongs to what is recorded now."""
        return self.counting if self.depth else self._counts_outside(module)

    def _counts_outside(self, module: nn.Module) -> bool:
        return self.pass_name != TRAINING or (
            torch.is_grad_enabled() and (module.training or self._trains_in_evaluation)
        )

    # -- optimizers -----------------------------------------------------------------------------------------------

    def optimizer_starts(self, optimizer: Optimizer) -> bool:
        """Note that an optimizer's step begins; say whether it counts: it owns tracked parameters and is not part of another step."""
        if self._inside:
            self._forget_raised()
        if self.pass_name != TRAINING or not self.parameters.of(optimizer) or self._is_wrapped(optimizer):
            return False
        depth = self._depth(optimizer)
        if depth == 0:
            if id(optimizer) in self._stepped:
                self.close()
            if not self.is_open and self._known and id(optimizer) not in self._known:
                self._known.add(id(optimizer))  # one that steps now and then: from now on steps wait for it
            self.open()
        self._inside[id(optimizer)] = optimizer, depth + 1
        return depth == 0

    def _forget_raised(self) -> None:
        """Forget the calls of ``step()`` that raised, and the step they were to make; the innermost that runs has just begun."""
        running = [id(known) for known in step_calls()][1:]
        inside = {key: (known, running.count(key)) for key, (known, _) in self._inside.items() if key in running}
        if len(inside) < len(self._inside):
            self.close_pending()
            self.abandon()
        self._inside = inside

    def _depth(self, optimizer: Optimizer) -> int:
        return self._inside[id(optimizer)][1] if id(optimizer) in self._inside else 0

    def _is_wrapped(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer steps within the step of another that owns all it owns, as one does that Lookahead was given."""
        others = [outer for outer, _ in self._inside.values() if outer is not optimizer]
        owned = set(self.parameters.of(optimizer)) if others else set()
        return any(owned.issubset(self.parameters.of(outer)) for outer in others)

    def optimizer_ended(self, optimizer: Optimizer) -> bool:
        """Note that an optimizer's step is over; say whether it counts."""
        depth = self._depth(optimizer)
        self._inside.pop(id(optimizer), None)
        if depth > 1:
            self._inside[id(optimizer)] = optimizer, depth - 1
        elif depth == 1:
            self._stepped[id(optimizer)] = optimizer
        return depth == 1

    @property
    def awaits_optimizer(self) -> bool:
        """Whether a step is open in which no optimizer has stepped."""
        return self.is_open and not self._stepped

    @property
    def epoch_is_full(self) -> bool:
        """Whether the epoch has all the steps it was said to have."""
        return self.steps_per_epoch is not None and self.train_step >= self.steps_per_epoch

    @property
    def first_optimizer(self) -> bool:
        """Whether no optimizer has stepped in this step yet."""
        return not self._stepped

    # -- steps ----------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Open a step, if none is."""
        if self.is_open:
            return
        self.is_open = True
        if self._listener is not None and (listener := self._listener()) is not None:
            listener.step_opened(self.stamp)

    def close_if_complete(self) -> None:
        """Close the step if every optimizer of it has stepped."""
        learned = bool(self._known) and self._known <= self._stepped.keys()
        if self._stepped and (learned or self.parameters.all_owned_by(self._stepped.values())):
            self.close()

    def close_pending(self) -> None:
        """Close the step if an optimizer has stepped in it: whatever comes now belongs to the next one."""
        if self._stepped:
            self.close()

    def close(self) -> None:
        """Close the step, if one is open, and go on to the next number."""
        if not self.is_open:
            return
        stamp = self.stamp
        self._known = self._known or set(self._stepped)
        self._note_modes()
        self._stepless = None
        self.global_step += 1
        self.train_step += 1
        self._end(stamp, skipped=False)

    def _note_modes(self) -> None:
        if self._modes:
            was, self._trains_in_evaluation = self._trains_in_evaluation, self._modes == {False}
            if self._trains_in_evaluation and not was:
                log.info(
                    "training goes on in evaluation mode: forwards with gradients count from step %d on",
                    self.global_step + 1,
                )
            self._modes.clear()

    def abandon(self) -> None:
        """End the open step without counting it: nobody made it, and the next one takes its number."""
        if self.is_open:
            self._end(self.stamp, skipped=True)

    def _end(self, stamp: Stamp, skipped: bool) -> None:
        self.is_open = False
        self._stepped.clear()
        if self._listener is not None and (listener := self._listener()) is not None:
            listener.step_closed(stamp, skipped)

    def set_steps_per_epoch(self, steps: int | None) -> None:
        """Let epochs end by themselves after so many steps."""
        if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
            raise ConfigError(f"steps_per_epoch must be an int >= 1 or None, got {steps!r}")
        self.steps_per_epoch = steps

    def state_dict(self) -> dict[str, int]:
        """Return what to go on counting from."""
        return {"global_step": self.global_step, "train_step": self.train_step, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on counting from what `state_dict` returned."""
        keys = self.state_dict().keys()
        if (
            not isinstance(state, dict)
            or state.keys() != keys
            or any(not isinstance(v, int) or v < 0 for v in state.values())
        ):
            raise ConfigError(f"load_state_dict() needs what state_dict() returned, got {state!r}")
        self.global_step, self.train_step, self.epoch = (state[key] for key in keys)

    def next_epoch(self) -> None:
        """Begin another epoch."""
        self.epoch += 1
        self.train_step = 0
        self._inside.clear()
