"""What a compiled graph holds of ikkuna: two opaque operators, which the compiler neither looks into nor removes.

Their bodies end where the eager taps end, so a compiled step is measured by the same code.
They keep nothing: the compiler reuses a tensor's memory as soon as the operator has returned.
"""

import torch
from torch import Tensor

from ikkuna.export.hooks.slots import SLOTS

__all__ = ["observe", "tick"]


@torch.library.custom_op("ikkuna::observe", mutates_args=())
def observe(tensor: Tensor, slot: int, path: str) -> None:
    """Show a tensor to whoever owns the slot."""
    SLOTS.take(slot, tensor.detach(), path)


@torch.library.custom_op("ikkuna::tick", mutates_args=())
def tick(slot: int, counts: bool) -> None:
    """Tell whoever owns the slot that the root is called; `counts` if in training mode and with gradients."""
    SLOTS.tick(slot, counts)


@observe.register_fake
def _(tensor: Tensor, slot: int, path: str) -> None:
    return None


@tick.register_fake
def _(slot: int, counts: bool) -> None:
    return None


# Without this mark an operator that returns nothing is dead code.
torch.fx.node.has_side_effect(torch.ops.ikkuna.observe.default)
torch.fx.node.has_side_effect(torch.ops.ikkuna.tick.default)
