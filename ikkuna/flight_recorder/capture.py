"""Keeps what a step needs to run again: batches, random states, parameters and optimizer states."""

import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ikkuna.distributed.dtensor import is_distributed
from ikkuna.flight_recorder.options import MemoryBudget, RecorderOptions
from ikkuna.support.failures import log, raise_users_exception
from ikkuna.support.random_states import RandomStates
from ikkuna.support.torch_internals import pytree

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
        The states of the random generators before the forward of each micro-batch; empty if they were not read.
    state : dict, optional
        Copies of parameters, buffers, modes and optimizer states before the step.
    model_calls, loss_calls : list
        For each micro-batch the positional and named arguments of the model, and of the loss module without the model's output;
        tensors are `KeptTensor` objects.
    outputs : list
        For each call of the loss module what it got from the model; ``None`` for one that is not kept.
    ids : list
        For each micro-batch the ids of its rows that the user has given, or ``None``.
    kept : list of KeptTensor
        The tensors of the calls and outputs.
    nbytes : int
        Number of bytes of these.
    """

    step: int
    train_step: int
    epoch: int
    random: list[RandomStates]
    state: dict[str, Any] | None = None
    model_calls: list[Any] = field(default_factory=list)
    loss_calls: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    ids: list[Any] = field(default_factory=list)
    kept: list["KeptTensor"] = field(default_factory=list)
    nbytes: int = 0

    def content(self) -> dict[str, Any] | None:
        """Return what ``batches.pt`` holds of the step, as copies; ``None`` if a tensor was changed since the step received it."""
        if any(tensor.is_changed for tensor in self.kept):
            return None
        calls = {name: pytree.tree_map(_copy_of_kept, getattr(self, name)) for name in ("model_calls", "loss_calls")}
        return {name: getattr(self, name) for name in ("step", "train_step", "epoch")} | calls


class KeptTensor:
    """A tensor that is kept by reference, or a copy of one.

    Parameters
    ----------
    tensor : Tensor
        Detached; it shares its memory with the loop unless it is a copy.
    is_copy : bool
        Whether nothing else refers to its memory.
    """

    __slots__ = ("__weakref__", "_version", "is_copy", "tensor")

    def __init__(self, tensor: Tensor, is_copy: bool) -> None:
        self.tensor, self.is_copy = tensor, is_copy
        self._version = tensor._version

    @property
    def is_changed(self) -> bool:
        """Whether its memory was written to, as far as torch counts it, or was passed on with other content."""
        return self._version != self.tensor._version

    def was_overwritten(self) -> None:
        """Mark its content as lost."""
        self._version = -1


def _copy_of_kept(value: Any) -> Any:
    return (
        value.tensor.clone() if isinstance(value, KeptTensor) and not value.is_copy else getattr(value, "tensor", value)
    )


_STEPS_WITHOUT_STATE = 2
_WASTE = 1.25  # a reference keeps at most this many times the bytes of the tensor


class StepCapture:
    """Keeps the batches of steps, and copies the state of the training before some of them.

    Tensors in host memory are kept by reference.  They are copied if they are in the shared memory of a data loader's worker, which
    may be short; if they are a small part of a larger memory; and from the first time on that the loop was seen to reuse its memory:
    a tensor in the ring was changed in place, or the model received another tensor in the memory of one in the ring.
    The step to which this happens loses its batch.
    Tensors on devices are kept, as copies in pinned host memory, only if that is asked for.

    It keeps the steps from the last but one copy of the state on, without a state 2, and at most as many bytes of batches as allowed.

    Parameters
    ----------
    options : RecorderOptions
        The settings.
    budget : MemoryBudget
        The largest sizes of the batches of all steps that are kept, and of a copy of the state.

    Attributes
    ----------
    refusal : str
        Why something was not kept; empty if nothing was refused.
    copied : int
        Number of tensors of the loop that were copied.
    """

    def __init__(self, options: RecorderOptions, budget: MemoryBudget) -> None:
        self._budget, self._options, self._state_every = budget, options, options.state_every
        self._max_bytes = min(options.max_bytes // 2, budget.steps)
        self._max_state = min(options.max_bytes, budget.state)
        self._steps: deque[CapturedStep] = deque()
        self._bytes = 0
        self._addresses: weakref.WeakValueDictionary[int, KeptTensor] = weakref.WeakValueDictionary()
        self._present: set[int] = set()  # addresses of the present micro-batch
        self._reused: set[int] = set()
        self._copies_all = False
        self._devices: set[torch.device] = set()
        self._ids: Any = None
        self.refusal = ""
        self.copied = 0

    @property
    def steps(self) -> list[CapturedStep]:
        """The steps that are kept, oldest first."""
        return list(self._steps)

    def begin(self, step: CapturedStep, model: nn.Module | None, optimizers: Callable[[], list[Optimizer]]) -> None:
        """Begin a step, and copy the state before it if that is due."""
        if self._steps and not self._copies_all:
            self._copies_all = any(tensor.is_changed for tensor in self._steps[-1].kept)
        while (
            self._steps and self._steps[-1].step >= step.step
        ):  # it was skipped or abandoned, or an earlier one was loaded
            self._forget(self._steps.pop())
        if self._state_every and step.step % self._state_every == 0 and model is not None:
            step.state = self._copied(lambda: self._copy_state(model, optimizers()))
        self._steps.append(step)
        if step.state is not None:
            with_state = [each for each in self._steps if each.state is not None]
            while len(with_state) > 1 and self._steps[0] is not with_state[-2]:
                self._forget(self._steps.popleft())
        elif not self._state_every and len(self._steps) > _STEPS_WITHOUT_STATE:
            self._forget(self._steps.popleft())

    def set_ids(self, ids: Any) -> None:
        """Set the ids of the rows of the next call of the model."""
        self._ids = ids

    def add_model_call(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], random: Callable[[], RandomStates]
    ) -> None:
        """Keep what the model is called with, and from the second call of a step on the states of the random generators."""
        ids, self._ids = self._ids, None
        self._present.clear()
        if not self._steps:
            return
        step = self._steps[-1]
        step.ids.append(ids)
        if step.model_calls and step.random:  # the states before the first call were read when the step began
            step.random.append(random())
        self._add(step, step.model_calls, [args, dict(kwargs)])

    def add_loss_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Keep what the loss module is called with; its first argument, the output of the model, only for the losses of rows."""
        if not self._steps:
            return
        step = self._steps[-1]
        self._add(step, step.loss_calls, [args[1:], dict(kwargs)])
        if self._steps and self._steps[-1] is step and step.loss_calls:
            output = args[0] if args else None
            if type(output) is Tensor and output.is_cpu and size_of(output) <= self._max_bytes // 4:
                step.outputs.append(kept := KeptTensor(output.detach(), False))
                self._count(step, [kept], size_of(output))
            else:
                step.outputs.append(None)

    def _add(self, step: CapturedStep, calls: list[Any], call: Any) -> None:
        """Keep a call, unless it is too large."""
        tensors: list[KeptTensor] = []
        if (size := size_of(call)) > self._max_bytes:
            self._refuse(f"batches of more than {self._max_bytes} bytes are not kept")
        elif (kept := self._copied(partial(copy_values, call, partial(self._kept, tensors)))) is not None:
            calls.append(kept)
            self._count(step, tensors, size)

    def _kept(self, tensors: list[KeptTensor], tensor: Tensor) -> KeptTensor:
        """Return a reference to a tensor, or a copy, and append it to `tensors`."""
        kept = self._reference_or_copy(tensor.detach())
        tensors.append(kept)
        return kept

    def _reference_or_copy(self, tensor: Tensor) -> KeptTensor:
        """Return a reference to a detached tensor, or a copy."""
        if tensor.layout is not torch.strided:
            raise CannotCopyError(f"batches of the layout {tensor.layout} are not kept")
        if not tensor.is_cpu:
            if not (self._options.record_batches or self._state_every):
                raise CannotCopyError(
                    f"batches on {tensor.device.type} are kept with RecorderOptions(record_batches=True)"
                )
            self._devices.add(tensor.device)
            return KeptTensor(_copy_to_host(tensor), True)
        address = tensor.data_ptr()
        if (known := self._addresses.get(address)) is not None and address not in self._present:
            self._reused.add(address)
            known.was_overwritten()
        if (
            self._copies_all
            or not tensor.numel()
            or address in self._reused
            or tensor.is_shared()
            or tensor.is_inference()
            or tensor.untyped_storage().nbytes() > _WASTE * tensor.numel() * tensor.itemsize
        ):
            self.copied += 1
            return KeptTensor(tensor.clone(), True)
        self._addresses[address] = kept = KeptTensor(tensor, False)
        self._present.add(address)
        return kept

    def wait(self) -> None:
        """Wait until the copies of batches on devices are complete."""
        for device in self._devices:
            torch.get_device_module(device).synchronize(device)

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
            self._refuse(f"{error}")
            return None

    def _refuse(self, why: str) -> None:
        """Store why something was not kept; log it once if the user has asked for it."""
        if not self.refusal:
            self.refusal = why
            if self._options.record_batches or self._state_every:
                log.warning("a step cannot be recorded for a replay: %s", why)

    def _count(self, step: CapturedStep, tensors: list[KeptTensor], size: int) -> None:
        step.kept += tensors
        step.nbytes += size
        self._bytes += size
        while self._bytes > self._max_bytes and self._steps:
            self._refuse(f"batches of more than {self._max_bytes} bytes are not kept")
            self._forget(self._steps.popleft())

    def _forget(self, step: CapturedStep) -> None:
        self._bytes -= step.nbytes


def _copy_to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor of a device into pinned memory; the copy is complete when the device has finished its present work."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.device.type == "cuda")
    return host.copy_(tensor, non_blocking=True)


def copy_state(model: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
    """Return copies of what a step changes, and the names of frozen parameters and of modules in evaluation mode."""
    return {  # copy_values() detaches tensors, so that autograd need not be off
        "parameters": {name: copy_values(value) for name, value in model.named_parameters()},
        "buffers": {name: copy_values(value) for name, value in model.named_buffers()},
        "evaluated": [name for name, module in model.named_modules() if not module.training],
        "frozen": [name for name, value in model.named_parameters() if not value.requires_grad],
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
    """Return a copy of an optimizer's state by the numbers of its parameters, what is plain in its groups, and its class."""
    numbers = {id(p): i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    groups = []
    for group in optimizer.param_groups:
        plain = {key: value for key, value in group.items() if isinstance(value, (*_PLAIN, Tensor, tuple))}
        groups.append(copy_values(plain) | {"params": [numbers[id(p)] for p in group["params"]]})
    states = {numbers[id(p)]: copy_values(dict(state)) for p, state in optimizer.state.items() if id(p) in numbers}
    return {"state": states, "param_groups": groups, "class": type(optimizer).__name__}


def _clone(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def copy_values(value: Any, of_tensor: Callable[[Tensor], Any] = _clone) -> Any:
    """Return a copy of tensors and plain values in tuples, lists and dicts.

    Parameters
    ----------
    value : Any
        The value.
    of_tensor : callable, optional
        Returns what stands for a tensor; by default a copy.

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
        return of_tensor(value)
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, tuple | list) and type(value) in (tuple, list, torch.Size):
        return type(value)([of_tensor(x) if type(x) is Tensor else copy_values(x, of_tensor) for x in value])
    if isinstance(value, Mapping):
        return {str(key): copy_values(item, of_tensor) for key, item in value.items()}
    raise CannotCopyError(
        f"a {type(value).__name__} cannot be copied into a dump; pass tensors, numbers, texts, lists and dicts"
    )


def size_of(value: Any) -> int:
    """Return the number of bytes of all tensors in a nested value."""
    if isinstance(value, Tensor):
        return value.numel() * value.itemsize
    total = 0
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        total += item.numel() * item.itemsize if isinstance(item, Tensor) else size_of(item)
    return total
