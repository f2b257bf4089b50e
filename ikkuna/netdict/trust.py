"""The norm of the weights divided by the norm of their update."""

import math
from collections.abc import Mapping
from typing import Any

from ikkuna.errors import ConfigError
from ikkuna.netdict.net_dict import NetDict
from ikkuna.netdict.selection import Pattern

__all__ = ["compute_trust_ratio", "trust_ratio"]


def trust_ratio(
    w_prev: Mapping[str, Any],
    w_new: Mapping[str, Any],
    lr: float = 1.0,
    numerator: str = "new",
    eps: float = 0.0,
    pattern: Pattern = None,
    layerwise: bool = True,
) -> Any:
    r"""Return :math:`\mathrm{lr} \cdot \|W_t\|_2 / (\|W_t - W_{t-1}\|_2 + \varepsilon)`.

    After You, Gitman & Ginsburg, *Large Batch Training of Convolutional Networks* (2017).

    Parameters
    ----------
    w_prev, w_new : mapping of str to Tensor
        The weights before and after the step.
    lr : float
        The learning rate, for the ratio to the update before it was scaled.
    numerator : {'new', 'old'}
        Which weights are the numerator.
    eps : float
        The constant :math:`\varepsilon`.
    pattern : str or list of str, optional
        Use only the tensors whose name matches.
    layerwise : bool
        Return a ratio for each tensor, as a NetDict; otherwise one for the whole net.

    Returns
    -------
    NetDict or float
        NaN if the weights did not change.

    Raises
    ------
    ConfigError
        If the names differ, or if `numerator` has another value.

    Examples
    --------
    >>> trust_ratio({"w": [3.0, 3.0]}, {"w": [3.0, 4.0]})
    NetDict(w=5.0)
    """
    if numerator not in ("new", "old"):
        raise ConfigError(f"numerator must be 'new' or 'old', got {numerator!r}")
    old, new = NetDict(w_prev, copy=False).select(pattern), NetDict(w_new, copy=False).select(pattern)
    update, above = new - old, new if numerator == "new" else old
    if not layerwise:
        return _ratio(above.norm(2), update.norm(2), lr, eps)
    lengths = above.norm(2, layerwise=True)
    steps = update.norm(2, layerwise=True)
    return NetDict({name: _ratio(lengths[name], steps[name], lr, eps) for name in steps}, copy=False)


def compute_trust_ratio(w0: Mapping[str, Any], w1: Mapping[str, Any], lr: float = 1.0, **options: Any) -> Any:
    """Return :func:`trust_ratio` of the step from `w0` to `w1`."""
    return trust_ratio(w0, w1, lr, **options)


def _ratio(above: float, below: float, lr: float, eps: float) -> float:
    return lr * above / (below + eps) if below + eps > 0 else math.nan
