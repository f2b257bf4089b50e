"""Run the user's model for a probe."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ikkuna.errors import ConfigError
from ikkuna.modules import wrapped_modules
from ikkuna.undisturbed import undisturbed

__all__ = ["isolated", "without_replica_wrappers"]

_REPLICA_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


@contextmanager
def isolated(model: nn.Module, train: bool = False) -> Iterator[None]:
    """Run the body with autograd and without compiled code, and restore the model afterwards.

    See :func:`~ikkuna.undisturbed.undisturbed`.

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
