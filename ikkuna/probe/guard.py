"""Running a model without leaving a trace in it."""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ikkuna.errors import ConfigError

__all__ = ["untouched"]


@contextmanager
def untouched(model: nn.Module, train: bool = False) -> Iterator[None]:
    """Run the body with `model` in evaluation (or training) mode, and leave everything as it was found.

    That is: gradients, buffers, which parameters are trained, every module's mode, and the random numbers of torch,
    numpy and Python; also if the body raises.  Autograd is on inside, whatever it is outside.

    Raises
    ------
    ConfigError
        If the model has lazy parameters, which a pass would create.
    """
    if any(is_lazy(p) for p in (*model.parameters(), *model.buffers())):
        raise ConfigError("the model has lazy parameters, which looking inside would create; call it once before")
    with ExitStack() as stack:
        for restore in (_modes(model), _gradients(model), _buffers(model), _trained(model), _numpy_and_python()):
            stack.callback(restore)
        stack.enter_context(torch.random.fork_rng(_cuda_devices(model)))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if not train and _has_cuda_rnn(model):  # cuDNN refuses the backward pass of an RNN in evaluation mode
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        if any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules()):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for module in model.modules():  # not model.train(), which a user may have overridden
            module.training = train
        yield


def _modes(model: nn.Module) -> Callable[[], None]:
    before = [(module, module.training) for module in model.modules()]

    def restore() -> None:
        for module, training in before:
            module.training = training

    return restore


def _gradients(model: nn.Module) -> Callable[[], None]:
    """Take the gradients off, so that a ``backward()`` inside cannot add to them."""
    before = [(p, p.grad) for p in model.parameters()]
    for p, _ in before:
        p.grad = None

    def restore() -> None:
        for p, grad in before:
            p.grad = grad

    return restore


def _buffers(model: nn.Module) -> Callable[[], None]:
    before = [(m, name, b, _copy(b)) for m in model.modules() for name, b in m._buffers.items() if b is not None]

    def restore() -> None:
        for module, name, buffer, value in before:
            module._buffers[name] = buffer
            if not torch.equal(buffer, value):
                with torch.no_grad():
                    buffer.copy_(value)

    return restore


def _copy(buffer: Tensor) -> Tensor:
    return buffer.detach().clone()


def _trained(model: nn.Module) -> Callable[[], None]:
    before = [(p, p.requires_grad) for p in model.parameters()]

    def restore() -> None:
        for p, requires_grad in before:
            p.requires_grad_(requires_grad)

    return restore


def _numpy_and_python() -> Callable[[], None]:
    numbers, plain = np.random.get_state(), random.getstate()

    def restore() -> None:
        np.random.set_state(numbers)
        random.setstate(plain)

    return restore


def _cuda_devices(model: nn.Module) -> list[torch.device]:
    return list({p.device for p in model.parameters() if p.device.type == "cuda"})


def _has_cuda_rnn(model: nn.Module) -> bool:
    rnns = (module for module in model.modules() if isinstance(module, nn.RNNBase))
    return any(p.device.type == "cuda" for rnn in rnns for p in rnn.parameters())
