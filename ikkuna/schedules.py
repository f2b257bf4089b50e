"""Functions of a step that say whether it is sampled, for the argument ``schedule`` of subscribers."""

import math
from collections.abc import Callable

from ikkuna.errors import ConfigError, is_integer

__all__ = ["at", "logarithmic"]


def logarithmic(per_decade: int = 10) -> Callable[[int], bool]:
    r"""Return a schedule whose steps have equal distances on a logarithmic axis: 0 and :math:`\lceil 10^{k / n} \rceil`.

    Parameters
    ----------
    per_decade : int
        The number n of steps from 10 to 100, and in each later decade; early steps that coincide count once.

    Raises
    ------
    ConfigError
        If `per_decade` is not a positive integer.

    Examples
    --------
    >>> samples = logarithmic(4)
    >>> [step for step in range(200) if samples(step)]
    [0, 1, 2, 4, 6, 10, 18, 32, 57, 100, 178]
    """
    if not is_integer(per_decade, 1):
        raise ConfigError(f"logarithmic() needs per_decade >= 1, got {per_decade!r}")

    def samples(step: int) -> bool:
        if step < 1:
            return step == 0
        near = round(per_decade * math.log10(step))
        # the exact powers of ten are rounded up by no error of the power
        return any(math.ceil(10 ** (k / per_decade) * (1 - 1e-12)) == step for k in range(max(near - 1, 0), near + 2))

    return samples


def at(*steps: int) -> Callable[[int], bool]:
    """Return a schedule of single steps.

    Examples
    --------
    >>> [step for step in range(10) if at(0, 3, 7)(step)]
    [0, 3, 7]
    """
    chosen = frozenset(steps)
    return lambda step: step in chosen
