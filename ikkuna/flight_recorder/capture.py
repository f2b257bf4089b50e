"""Copies what a step needs to run again: batches, random states, parameters and optimizer states."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ikkuna.distributed.dtensor import is_distributed
from ikkuna.flight_recorder.options import MemoryBudget
from ikkuna.support.failures import log, raise_users_exception
from ikkuna.support.random_states import RandomStates

__all__ = ["CannotCopyError", "CapturedStep", "StepCapture", "copy_state", "copy_values", "size_of"]

_PLAIN = (bool, int, float, complex, str, type(None))


class CannotCopyError(Exception):
    """A value cannot be copied into a dump."""


@dataclass(slots=True)
class CapturedStep:
    """Inputs from which one step was computed.

    Parameters
    ----------
    step, train_step, epoch : int
        The counters.
    random : list of RandomStates
        The states of the random generators before the forward of each micro-batch.
    state : dict, optional
        Copies of parameters, buffers, modes and optimizer states before the step.
    model_calls, loss_calls : list
        For each micro-batch the positional and named arguments of the model, and of the loss module without the model's output.
    """

    step: int
    train_step: int
    epoch: int
    random: list[RandomStates]
    state: dict[str, Any] | None = None
    model_calls: list[Any] = field(default_factory=list)
    loss_calls: list[Any] = field(default_factory=list)


class StepCapture:
    """Copies the batches of steps, and before some of them the state of the training.

    It keeps the steps from the last but one copy of the state on, at most as many bytes of batches as allowed.

    Parameters
    ----------
    state_every : int
        See `RecorderOptions`.
    budget : MemoryBudget
        The largest sizes of the batches of all steps that are kept, and of a copy of the state.
    max_bytes : int
        The largest size of a dump.

    Attributes
    ----------
    refusal : str
        Why something was not copied; empty if nothing was refused.
    """

    def __init__(self, state_every: int, budget: MemoryBudget, max_bytes: int) -> None:
        self._budget = budget
        self._state_every = state_every
        self._max_bytes, self._max_state = min(max_bytes // 2, budget.steps), min(max_bytes, budget.state)
        self._steps: deque[CapturedStep] = deque()
        self._bytes = 0
        self.refusal = ""

    @property
    def steps(self) -> list[CapturedStep]:
        """The steps that can run again, oldest first."""
        return list(self._steps)

    def begin(self, step: CapturedStep, model: nn.Module | None, optimizers: list[Optimizer]) -> None:
        """Begin a step, and copy the state before it if that is due."""
        while (
            self._steps and self._steps[-1].step >= step.step
        ):  # it was skipped or abandoned, or an earlier one was loaded
            self._forget(self._steps.pop())
        if self._state_every and step.step % self._state_every == 0 and model is not None:
            step.state = self._copied(lambda: self._copy_state(model, optimizers))
        self._steps.append(step)
        if step.state is not None:
            with_state = [i for i, each in enumerate(self._steps) if each.state is not None]
            while len(with_state) > 2 and self._steps[0] is not self._steps[with_state[-2]]:
                self._forget(self._steps.popleft())
                with_state = [i for i, each in enumerate(self._steps) if each.state is not None]
        elif not self._state_every and len(self._steps) > 2:
            self._forget(self._steps.popleft())

    def add_model_call(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], random: Callable[[], RandomStates]
    ) -> None:
        """Copy what the model is called with, and from the second call of a step on the states of the random generators."""
        if not self._steps:
            return
        if self._steps[-1].model_calls:  # the states before the first call were read when the step began
            self._steps[-1].random.append(random())
        if (copy := self._copied(lambda: copy_values([args, dict(kwargs)]))) is not None:
            self._steps[-1].model_calls.append(copy)
            self._count(copy)

    def add_loss_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Copy what the loss module is called with, except its first argument, which is the output of the model."""
        if self._steps and (copy := self._copied(lambda: copy_values([args[1:], dict(kwargs)]))) is not None:
            self._steps[-1].loss_calls.append(copy)
            self._count(copy)

    def _copy_state(self, model: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
        needed = _size_of_state(model, optimizers)
        if needed > self._max_state:
            raise CannotCopyError(
                f"the state of the training has {needed} bytes, more than {self._max_state}; "
                "RecorderOptions(max_bytes=…, max_memory=…) allow more"
            )
        if not self._budget.has_room(needed):
            raise CannotCopyError(f"the state of the training has {needed} bytes, and memory is short")
        return copy_state(model, optimizers)

    def _copied(self, copy: Any) -> Any:
        try:
            return copy()
        except (CannotCopyError, torch.OutOfMemoryError, MemoryError) as error:
            raise_users_exception(error)
            if not self.refusal:
                self.refusal = f"{error}"
                log.warning("a step cannot be recorded for a replay: %s", error)
            return None

    def _count(self, copy: Any) -> None:
        self._bytes += size_of(copy)
        while self._bytes > self._max_bytes and self._steps:
            if not self.refusal:
                self.refusal = f"batches of more than {self._max_bytes} bytes are not kept"
                log.warning("a step cannot be recorded for a replay: %s", self.refusal)
            self._forget(self._steps.popleft())

    def _forget(self, step: CapturedStep) -> None:
        self._bytes -= size_of([step.model_calls, step.loss_calls])


def copy_state(model: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
    """Return copies of parameters, buffers and optimizer states, and the names of the modules in evaluation mode."""
    return {  # copy_values() detaches tensors, so that autograd need not be off
        "parameters": {name: copy_values(value) for name, value in model.named_parameters()},
        "buffers": {name: copy_values(value) for name, value in model.named_buffers()},
        "evaluated": [name for name, module in model.named_modules() if not module.training],
        "gradients": {
            name: copy_values(value.grad) for name, value in model.named_parameters() if value.grad is not None
        },
        "optimizers": [_copy_optimizer(optimizer) for optimizer in optimizers],
    }


def _size_of_state(model: nn.Module, optimizers: list[Optimizer]) -> int:
    """Return the size of what :func:`copy_state` would copy."""
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    states = [dict(state) for optimizer in optimizers for state in optimizer.state.values()]
    return size_of([parameters, list(model.buffers()), gradients, states])


def _copy_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """Return a copy of an optimizer's state by the numbers of its parameters, and what is plain in its groups."""
    numbers = {id(p): i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    groups = []
    for group in optimizer.param_groups:
        plain = {key: value for key, value in group.items() if isinstance(value, (*_PLAIN, Tensor, tuple))}
        groups.append(copy_values(plain) | {"params": [numbers[id(p)] for p in group["params"]]})
    states = {numbers[id(p)]: copy_values(dict(state)) for p, state in optimizer.state.items() if id(p) in numbers}
    return {"state": states, "param_groups": groups}


def copy_values(value: Any) -> Any:
    """Return a copy of tensors and plain values in tuples, lists and dicts.

    Raises
    ------
    CannotCopyError
        If there is another object, or a sharded tensor.
    """
    if isinstance(value, Tensor):
        if is_distributed(value):
            raise CannotCopyError("a sharded tensor cannot be copied into a dump of one rank")
        if type(value) not in (Tensor, nn.Parameter, nn.Buffer):
            raise CannotCopyError(f"a {type(value).__name__} cannot be copied into a dump")
        return value.detach().clone()
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, tuple | list) and type(value) in (tuple, list, torch.Size):
        return [*map(copy_values, value)] if isinstance(value, list) else tuple(map(copy_values, value))
    if isinstance(value, Mapping):
        return {str(key): copy_values(item) for key, item in value.items()}
    raise CannotCopyError(
        f"a {type(value).__name__} cannot be copied into a dump; pass tensors, numbers, texts, lists and dicts"
    )


def size_of(value: Any) -> int:
    """Return the number of bytes of all tensors in a nested value."""
    if isinstance(value, Tensor):
        return value.numel() * value.itemsize
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return sum(map(size_of, items))
