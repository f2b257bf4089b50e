"""Run code on a model without a lasting effect on the model, on random states or on data loaders."""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["undisturbed", "undisturbed_randomness"]

_Restore = Callable[[], None]


@contextmanager
def undisturbed(model: nn.Module, batches: Any = (), *, train: bool = False, autograd: bool = False) -> Iterator[None]:
    """Run the body with `model` in evaluation mode and restore its state afterwards, also after an exception.

    The training flag of every module, the buffers and all random states are restored, and FSDP2 modules free the
    parameters that they gathered.

    Parameters
    ----------
    model : nn.Module
        The model; its methods ``train`` and ``eval`` are not called, because a user may have overridden them.
    batches : iterable, optional
        A data loader whose generators are restored, too (see :func:`undisturbed_randomness`).
    train : bool
        Use training mode instead of evaluation mode.
    autograd : bool
        Enable autograd, remove all gradients for the duration of the body, and restore them and every
        ``requires_grad`` flag.  Otherwise autograd is off.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.callback(_reshard, model)
        stack.enter_context(undisturbed_randomness(batches))
        stack.callback(_training_flags(model))
        stack.callback(_buffers(model))
        if autograd:
            stack.callback(_gradients(model))
        stack.enter_context(torch.set_grad_enabled(autograd))
        for module in model.modules():
            module.training = train
        yield


@contextmanager
def undisturbed_randomness(batches: Any = ()) -> Iterator[None]:
    """Restore the random states of Python, numpy, torch and every accelerator after the body.

    The generators of the data loader `batches`, of its samplers and of its data set are restored, too.
    """
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        for generator in (torch.default_generator, *_generators(batches)):
            stack.callback(generator.set_state, generator.get_state())
        for restore in _accelerators():
            stack.callback(restore)
        yield


def _generators(batches: Any) -> Iterator[torch.Generator]:
    batch_sampler = getattr(batches, "batch_sampler", None)
    samplers = (getattr(batches, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    for owner in (batches, *samplers, getattr(batches, "dataset", None)):
        if isinstance(generator := getattr(owner, "generator", None), torch.Generator):
            yield generator


def _accelerators() -> Iterator[_Restore]:
    """Yield a function that restores the random state of each device of the accelerator, if it is in use."""
    if not torch.accelerator.is_available() or (accelerator := torch.accelerator.current_accelerator()) is None:
        return
    module = torch.get_device_module(accelerator)
    if not getattr(module, "is_initialized", module.is_available)():
        return
    for index in range(module.device_count()):
        device = () if accelerator.type == "mps" else (index,)  # torch.mps has one device and no argument for it
        yield partial(module.set_rng_state, module.get_rng_state(*device), *device)


def _reshard(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(type(module), "_get_fsdp_state"):  # FSDP2 keeps the parameters of its root for a backward pass
            module.reshard()  # type: ignore[operator]


def _training_flags(model: nn.Module) -> _Restore:
    before = [(module, module.training) for module in model.modules()]

    def restore() -> None:
        for module, training in before:
            module.training = training

    return restore


def _buffers(model: nn.Module) -> _Restore:
    with torch.no_grad():
        before = [(m, name, b, b.clone()) for m in model.modules() for name, b in m._buffers.items() if b is not None]

    def restore() -> None:
        for module, name, buffer, value in before:
            module._buffers[name] = buffer
            if not _equal(buffer, value):  # an unneeded copy would break a backward pass that saved the buffer
                with torch.no_grad():
                    buffer.copy_(value)

    return restore


def _equal(a: Tensor, b: Tensor) -> bool:
    local = [x.to_local() if hasattr(x, "to_local") else x for x in (a, b)]  # of a DTensor, without communication
    return torch.equal(*local)


def _gradients(model: nn.Module) -> _Restore:
    before = [(p, p.grad, p.requires_grad) for p in model.parameters()]
    for parameter, _, _ in before:
        parameter.grad = None

    def restore() -> None:
        for parameter, grad, requires_grad in before:
            parameter.grad = grad
            parameter.requires_grad_(requires_grad)

    return restore
