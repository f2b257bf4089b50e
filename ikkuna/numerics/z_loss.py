r"""The squared logarithm of the normaliser of a softmax."""

import torch
from torch import Tensor

__all__ = ["z_loss_row"]

_BLOCK = 1 << 22  # logits converted at a time: 16 MiB of float32


def z_loss_row(logits: Tensor) -> Tensor:
    r"""Return the sum of :math:`\ln^2 Z_n` over the items *n*, and their number, with :math:`Z_n = \sum_c e^{z_{nc}}`.

    Parameters
    ----------
    logits : Tensor
        ``(…, classes)``, floating; minus infinity excludes a class.

    Returns
    -------
    Tensor
        ``(2,)``, float64; the rows of several calls can be summed.
        The sum is NaN if an item has a NaN, plus infinity, or no class.

    Notes
    -----
    One pass over the logits, with at most 16 MiB for their copies in float32.

    References
    ----------
    A. Chowdhery et al., PaLM: scaling language modeling with pathways, 2022, section 5.

    Examples
    --------
    >>> total, items = z_loss_row(torch.zeros(3, 4))
    >>> round(total.item() / items.item(), 4)      # the square of ln 4
    1.9218
    """
    rows = logits.detach().reshape(-1, logits.shape[-1])
    total = torch.zeros((), dtype=torch.float64, device=rows.device)
    for block in rows.split(max(1, _BLOCK // max(1, rows.shape[1]))):
        normalizer = (block if block.dtype is torch.float64 else block.float()).logsumexp(1)
        total = total + torch.where(normalizer.isfinite(), normalizer, torch.nan).square().sum(dtype=torch.float64)
    return torch.stack([total, torch.full_like(total, len(rows))])
