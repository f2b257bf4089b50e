"""A row that is computed after the step."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["DeferredRow"]


_CHUNK = 1 << 26  # bytes of the matrices that are stacked


class DeferredRow(NamedTuple):
    """Result of ``measure`` if its row comes from an operation that waits for a device, such as a decomposition.

    A copy of the tensor is kept, and after the step the rows of all copies of one shape and `compute` are computed in few calls,
    beside training.  On the host the row is computed at once.
    While the rows of four steps, or 1 GiB of copies, wait to be computed, further ones are dropped and counted.
    The rows of a subscriber that returns this are not merged; it sets ``merge = "last"``.

    Parameters
    ----------
    tensor : Tensor
        The borrowed tensor, or a new one.
    compute : callable
        Maps a stack of tensors ``(n, ...)`` to their rows ``(n, size)``.

    Examples
    --------
    >>> DeferredRow(torch.ones(2, 3), lambda stack: stack.flatten(1).sum(1, keepdim=True)).row()
    tensor([6.])
    """

    tensor: Tensor
    compute: Callable[[Tensor], Tensor]

    def row(self) -> Tensor:
        """Return the row."""
        return self.compute(self.tensor.detach().unsqueeze(0))[0]

    def copied(self) -> "DeferredRow":
        """Return this row with a copy of the tensor."""
        return DeferredRow(self.tensor.detach().clone(), self.compute)

    @staticmethod
    def rows(deferred: "list[DeferredRow]") -> list[Tensor]:
        """Return the rows of several, in float64 on the host; this waits for the device."""
        groups: dict[object, list[int]] = {}
        for i, (x, compute) in enumerate(deferred):
            groups.setdefault((x.shape, x.dtype, x.device, compute), []).append(i)
        found: dict[int, Tensor] = {}
        for group in groups.values():
            x, compute = deferred[group[0]]
            size = max(1, _CHUNK // max(1, 8 * x.numel()))
            for part in (group[i : i + size] for i in range(0, len(group), size)):
                rows = compute(torch.stack([deferred[i].tensor for i in part])).cpu().double()
                found |= zip(part, rows, strict=True)
        return [found[i] for i in range(len(deferred))]
