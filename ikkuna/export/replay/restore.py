"""Puts the state of a dump into a model and its optimizers."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ikkuna.diagnosis import Dump
from ikkuna.errors import DumpError

__all__ = ["check_fits", "restore_state"]


def check_fits(dump: Dump, model: nn.Module, state: dict[str, Any], optimizers: list[Optimizer]) -> None:
    """Raise `DumpError` if the state of a dump is not that of such a model and such optimizers."""
    for what, own in (("parameters", dict(model.named_parameters())), ("buffers", dict(model.named_buffers()))):
        stored = state[what]
        missing, unknown = sorted(stored.keys() - own.keys()), sorted(own.keys() - stored.keys())
        if missing or unknown:
            lacks = f"it lacks {_listed(missing)}" if missing else f"the dump lacks {_listed(unknown)}"
            raise DumpError(f"the dump '{dump.path}' is of another model: among the {what} {lacks}")
        for name, value in stored.items():
            if value.shape != own[name].shape or value.dtype != own[name].dtype:
                raise DumpError(
                    f"the dump '{dump.path}' is of another model: {name} is {_described(value)} there, and {_described(own[name])} here"
                )
    stored_optimizers = state["optimizers"]
    if stored_optimizers and len(stored_optimizers) != len(optimizers):
        raise DumpError(f"the dump has the states of {len(stored_optimizers)} optimizers, got {len(optimizers)}")
    for stored, optimizer in zip(stored_optimizers, optimizers, strict=False):
        sizes = [len(group["params"]) for group in stored["param_groups"]]
        own_sizes = [len(group["params"]) for group in optimizer.param_groups]
        if sizes != own_sizes:
            raise DumpError(f"the optimizer of the dump has groups of {sizes} parameters, got groups of {own_sizes}")


def restore_state(model: nn.Module, state: dict[str, Any], optimizers: list[Optimizer]) -> None:
    """Overwrite parameters, buffers, gradients, modes, and optimizer states."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state["parameters"][name])
            gradient = state["gradients"].get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
        for name, buffer in model.named_buffers():
            buffer.copy_(state["buffers"][name])
    for name, module in model.named_modules():
        module.training = name not in state["evaluated"]
    for stored, optimizer in zip(state["optimizers"], optimizers, strict=False):
        kept = optimizer.state_dict()["param_groups"]  # what a dump cannot hold stays as the script has set it
        groups = [own | new for own, new in zip(kept, stored["param_groups"], strict=True)]
        optimizer.load_state_dict({"state": stored["state"], "param_groups": groups})


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _described(value: Tensor) -> str:
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
