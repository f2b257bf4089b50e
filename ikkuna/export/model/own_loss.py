"""Recognises models that compute their own loss from labels, such as those of transformers."""

import inspect

from torch import nn

from ikkuna.modules import unwrap
from ikkuna.signal_handlers import raise_users_exception

__all__ = ["is_shifted", "takes_labels"]

_CAUSAL = ("ForCausalLM", "LMHeadModel")


def takes_labels(model: nn.Module) -> bool:
    """Return whether a model's forward has a parameter ``labels``.

    Examples
    --------
    >>> takes_labels(nn.Linear(2, 2))
    False
    """
    try:
        return "labels" in inspect.signature(unwrap(model).forward).parameters
    except (TypeError, ValueError) as error:
        raise_users_exception(error)
        return False


def is_shifted(model: nn.Module) -> bool:
    """Return whether a model compares each output with the label of the next position.

    This holds for causal language models of transformers, which are recognised by the names of their classes.

    Examples
    --------
    >>> class GPT2LMHeadModel(nn.Module): ...
    >>> is_shifted(GPT2LMHeadModel()), is_shifted(nn.Linear(2, 2))
    (True, False)
    """
    config = getattr(model, "config", None)
    names = (cls.__name__ for cls in type(model).__mro__)
    return any(name.endswith(_CAUSAL) for name in names) and not getattr(config, "is_encoder_decoder", False)
