"""Run a model over data and leave no trace of it."""

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ikkuna.distributed.dtensor import reshard

__all__ = ["run", "undisturbed"]


@contextmanager
def undisturbed(model: nn.Module, batches: Iterable[Any]) -> Iterator[None]:
    """Put everything an evaluation can move back as it was, also after an exception.

    That is the training flag of every module, buffers, the random states of torch, numpy and Python,
    and those of the loader's own generators.  Inside, the model is in evaluation mode and there is no gradient.
    """
    modules = list(model.modules())
    flags = [(module, module.training) for module in modules]
    python, numpy = random.getstate(), np.random.get_state()
    states = [(generator, generator.get_state()) for generator in (*_defaults(model), *_generators(batches))]
    with torch.no_grad():
        buffers = [(b, b._version, b.clone()) for m in modules for b in m._buffers.values() if b is not None]
        try:
            model.eval()
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
            for generator, state in states:
                generator.set_state(state)
            for module, training in flags:
                module.training = training
            reshard(model)
            for buffer, version, copy in buffers:
                if buffer._version != version:
                    buffer.copy_(copy)


def _defaults(model: nn.Module) -> Iterator[torch.Generator]:
    """Yield torch's own generators, of the devices that the model is on."""
    yield torch.default_generator
    if torch.cuda.is_initialized():
        for index in {p.device.index for p in model.parameters() if p.is_cuda}:
            yield torch.cuda.default_generators[index]


def _generators(batches: Iterable[Any]) -> Iterator[torch.Generator]:
    for owner in (batches, getattr(batches, "sampler", None), getattr(batches, "dataset", None)):
        if isinstance(generator := getattr(owner, "generator", None), torch.Generator):
            yield generator


def run(
    model: nn.Module,
    loss: nn.Module | None,
    batches: Iterable[Any],
    visit: Callable[[Any, Any], object] | None = None,
    call: Callable[[nn.Module, Any], Any] | None = None,
) -> None:
    """Run the model over batches, undisturbed: pairs ``(inputs, labels)``, or inputs alone.

    A tuple or dict of inputs is spread out, unless `call` computes the outputs; `loss` and `visit` get outputs and labels.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    with undisturbed(model, batches):
        for batch in batches:
            pair = batch if isinstance(batch, tuple | list) and len(batch) == 2 else (batch, None)
            inputs, labels = (_to(part, device) for part in pair)
            outputs = (call or _call)(model, inputs)
            if loss is not None and isinstance(outputs, Tensor) and isinstance(labels, Tensor):
                loss(outputs, labels)
            if visit is not None:
                visit(outputs, labels)


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _to(part, device) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_to(part, device) for part in value)
    return value
