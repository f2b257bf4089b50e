"""Runs code on a model without a lasting effect on the model, on random states or on data loaders."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ikkuna.errors import ConfigError
from ikkuna.support.failures import Switch, restoring
from ikkuna.support.failures import switched as switched
from ikkuna.support.modules import wrapped_modules
from ikkuna.support.torch_internals import kept_version, set_grad_enabled

T = TypeVar("T")
_Restore = Callable[[], object]


def gradients(enabled: bool) -> Switch:
    """Return the switch of autograd on this thread."""
    return set_grad_enabled, torch.is_grad_enabled(), enabled


@contextmanager
def undisturbed(model: nn.Module, *, train: bool = False, autograd: bool = False) -> Iterator[None]:
    """Run the body with `model` in evaluation mode and restore its state afterwards, also after an exception.

    The training flag of every module, the buffers and all random states are restored, and FSDP2 modules free the
    parameters that they gathered.

    Parameters
    ----------
    model : nn.Module
        The model; its methods ``train`` and ``eval`` are not called, because a user may have overridden them.
    train : bool
        Use training mode instead of evaluation mode.
    autograd : bool
        Enable autograd, remove all gradients for the duration of the body, and restore them and every
        ``requires_grad`` flag.  Otherwise autograd is off.
    """
    with torch.inference_mode(False), _undoing() as undo:
        _enter(undo, model, (), train, autograd)
        yield


def run_undisturbed(body: Callable[[], T], model: nn.Module, batches: Any = ()) -> T:
    """Return the result of `body`, which runs as in the context `undisturbed`.

    Everything is restored also if an exception such as `KeyboardInterrupt` comes while it is restored.
    No context manager written in Python can promise that, because its end is a call that can be interrupted.
    """
    undo = _Undo()

    def run() -> T:
        _enter(undo, model, batches, train=False, autograd=False)
        return body()

    with torch.inference_mode(False):
        return restoring(run, undo)


class _Undo:
    """Calls functions that undo changes, the last one first; it can be called again."""

    def __init__(self) -> None:
        self._functions: list[_Restore] = []

    def add(self, function: Callable[..., object], *arguments: Any) -> None:
        self._functions.append(partial(function, *arguments))

    def __call__(self) -> None:
        errors = []
        for function in reversed(self._functions):
            try:
                function()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


@contextmanager
def _undoing() -> Iterator[_Undo]:
    undo = _Undo()
    try:
        try:
            yield undo
        finally:
            undo()
    except BaseException:
        undo()
        raise


def _enter(undo: _Undo, model: nn.Module, batches: Any, train: bool, autograd: bool) -> None:
    undo.add(_reshard, model)
    _keep_randomness(undo, batches)
    undo.add(_training_flags(model))
    undo.add(_buffers(model))
    if autograd:
        _remove_gradients(undo, model)
    undo.add(set_grad_enabled, torch.is_grad_enabled())
    set_grad_enabled(autograd)
    for module in model.modules():
        module.training = train


@contextmanager
def undisturbed_randomness(batches: Any = ()) -> Iterator[None]:
    """Restore the random states of Python, numpy, torch and every accelerator after the body.

    The generators of the data loader `batches`, of its samplers and of its data set are restored, too.
    """
    with _undoing() as undo:
        _keep_randomness(undo, batches)
        yield


def _keep_randomness(undo: _Undo, batches: Any) -> None:
    undo.add(random.setstate, random.getstate())
    undo.add(np.random.set_state, np.random.get_state())
    for generator in (torch.default_generator, *_generators(batches)):
        undo.add(generator.set_state, generator.get_state())
    for restore in _accelerators():
        undo.add(restore)


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
    before = [
        (m, name, b, b.detach().clone()) for m in model.modules() for name, b in m._buffers.items() if b is not None
    ]

    def restore() -> None:
        for module, name, buffer, value in before:
            module._buffers[name] = buffer
            is_plain = type(buffer) is Tensor and not buffer.is_inference()
            if (is_plain and not buffer.is_cpu) or not _equal(buffer, value):  # a comparison would wait for the device
                with (
                    kept_version(buffer) if is_plain else nullcontext()
                ):  # a backward may come that has saved the buffer
                    _write(buffer, value)

    return lambda: switched([gradients(False)], restore)


def _write(buffer: Tensor, value: Tensor) -> None:
    if buffer.shape != value.shape:  # ranges of quantisation are resized in place
        buffer.resize_(value.shape)
    buffer.copy_(value)


def _equal(a: Tensor, b: Tensor) -> bool:
    local = [x.to_local() if hasattr(x, "to_local") else x for x in (a, b)]  # of a DTensor, without communication
    return torch.equal(*local)


def _remove_gradients(undo: _Undo, model: nn.Module) -> None:
    before = [(p, p.grad, p.requires_grad) for p in model.parameters()]

    def restore() -> None:
        for parameter, grad, requires_grad in before:
            parameter.grad = grad
            parameter.requires_grad_(requires_grad)

    undo.add(restore)
    for parameter, _, _ in before:
        parameter.grad = None


_REPLICA_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


@contextmanager
def isolated(model: nn.Module, train: bool = False) -> Iterator[None]:
    """Run the body with autograd and without compiled code, and restore the model afterwards.

    See :func:`~ikkuna.support.undisturbed.undisturbed`.

    Parameters
    ----------
    model : nn.Module
        The model.
    train : bool
        Use training mode instead of evaluation mode.

    Raises
    ------
    ConfigError
        If the model has lazy parameters, because a forward pass would create them.
    """
    if any(is_lazy(p) for p in (*model.parameters(), *model.buffers())):
        raise ConfigError("the model has lazy parameters, which a probe would create; call the model once before")
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # compiled code does not call the hooks of the modules inside it
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if not train and _has_cuda_rnn(model):  # cuDNN refuses the backward pass of an RNN in evaluation mode
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        stack.enter_context(undisturbed(model, train=train, autograd=True))
        yield


def without_replica_wrappers(model: nn.Module) -> nn.Module:
    """Return the model without outer wrappers that compile it or synchronise its replicas.

    Other wrappers stay, because a call needs them: FSDP gathers parameters, and Fabric casts inputs.
    """
    for module in wrapped_modules(model):
        if not (isinstance(module, _REPLICA_WRAPPERS) or hasattr(module, "_orig_mod")):
            break
    return module


def _has_cuda_rnn(model: nn.Module) -> bool:
    rnns = (module for module in model.modules() if isinstance(module, nn.RNNBase))
    return any(p.device.type == "cuda" for rnn in rnns for p in rnn.parameters())


def as_tensor(value: Any, model: nn.Module) -> Any:
    """Return arrays, lists and numbers as tensors on the device of the model, and other values unchanged.

    Floating-point data gets the dtype of the model's parameters.
    """
    if isinstance(value, Tensor) or not (hasattr(value, "__array__") or isinstance(value, list | int | float)):
        return value
    if isinstance(value, list) and any(isinstance(each, Tensor) for each in value):
        return value  # several values, as a loader returns them
    tensor = torch.as_tensor(value)
    like = next((p for p in model.parameters() if p.is_floating_point()), None)
    if like is None:
        return tensor
    return tensor.to(like.device, like.dtype if tensor.is_floating_point() else tensor.dtype)


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Return ``model(inputs)``; a tuple or list is passed as several arguments, a dictionary as named arguments."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def run_model(model: nn.Module, x: Any) -> Any:
    """Return ``model(x)``; a tuple is passed as several arguments, a dictionary as named arguments."""
    if isinstance(x, dict):
        return model(**{name: as_tensor(value, model) for name, value in x.items()})
    if isinstance(x, tuple) and not hasattr(x, "_fields"):
        return model(*(as_tensor(value, model) for value in x))
    return model(as_tensor(x, model))
