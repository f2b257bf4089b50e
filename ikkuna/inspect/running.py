"""Mean and standard deviation of a stream of data; states of its parts can be merged in any order.

A state contains the number of elements, their mean and the sum of squared deviations; a sum of squares would lose
digits by cancellation.  Two states are merged after Chan, Golub & LeVeque (1979).
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ikkuna.errors import ConfigError, ConfigTypeError
from ikkuna.numerics.elements import as_float64
from ikkuna.numerics.statistics.table import STATE, combine, observe, parts

__all__ = ["RunningMoments", "combine_mean_std"]


_WEIGHTS = ("frequency", "reliability")


def combine_mean_std(
    mean1: float, std1: float, n1: int, mean2: float, std2: float, n2: int, correction: int = 1
) -> tuple[float, float, int]:
    r"""Return mean, standard deviation and size of two groups together.

    .. math:: \mu = \frac{n_1\mu_1 + n_2\mu_2}{n}, \quad
        \sigma^2 = \frac{(n_1-c)\sigma_1^2 + (n_2-c)\sigma_2^2 + (\mu_2-\mu_1)^2\, n_1 n_2/n}{n - c}

    Parameters
    ----------
    mean1, mean2 : float
        Means of the groups; the mean of an empty group is ignored.
    std1, std2 : float
        Standard deviations of the groups; those of groups with less than two elements are ignored.
    n1, n2 : int
        Sizes of the groups.
    correction : int
        The :math:`c` of both deviations and of the result: 1 (Bessel) or 0 (population).

    Returns
    -------
    tuple
        ``(mean, std, n)``; the deviation of ``n <= correction`` elements is NaN.

    Examples
    --------
    >>> mean, std, n = combine_mean_std(2.5, 1.2909944487358056, 4, 20, 10, 3)      # [1, 2, 3, 4] and [10, 20, 30]
    >>> mean, round(std, 12), n
    (10.0, 11.030261405183, 7)
    """
    merged = RunningMoments(correction)
    for mean, std, n in ((mean1, std1, n1), (mean2, std2, n2)):
        merged.merge(RunningMoments.from_moments(mean, std, n, correction=correction))
    return float(merged.mean), float(merged.std), int(n1 + n2)


class RunningMoments:
    r"""Number, mean, variance, minimum and maximum of all data so far.

    Parameters
    ----------
    correction : int
        The variance is :math:`M_2 / (n - \mathrm{correction})`: 1 (Bessel, the default) or 0 (population).
    per_element : bool
        Keep one state for each position: each call of :meth:`update` is one observation of a tensor of fixed shape.
        By default there is one state for all elements, and every result is a float.
    nan : {'propagate', 'omit'}
        Let NaN and infinite elements propagate to the results, or only count them (``n_nonfinite``).
    weights : {None, 'frequency', 'reliability'}
        Meaning of the weights given to :meth:`update`: the number of occurrences of an element (denominator
        :math:`W - c`), or its reliability (:math:`W - c \sum w^2 / W`).

    Examples
    --------
    >>> moments = RunningMoments().update([1, 2, 3, 4])
    >>> moments += RunningMoments().update([10, 20, 30])
    >>> moments.n, moments.mean, moments.m2, moments.max
    (7, 10.0, 730.0, 30.0)
    """

    def __init__(
        self, correction: int = 1, *, per_element: bool = False, nan: str = "propagate", weights: str | None = None
    ) -> None:
        if nan not in ("propagate", "omit"):
            raise ConfigError(f"nan must be 'propagate' or 'omit', got {nan!r}")
        if weights is not None and weights not in _WEIGHTS:
            raise ConfigError(f"weights must be None or one of {_WEIGHTS}, got {weights!r}")
        self.correction, self.per_element, self.nan, self.weights = correction, per_element, nan, weights
        self._state: dict[str, Tensor] | None = None

    @classmethod
    def from_moments(cls, mean: Any, std: Any, n: int, *, correction: int = 1) -> "RunningMoments":
        """Return the state of a group with a known mean, standard deviation and size; its extremes are NaN."""
        moments = cls(correction)
        if n < 0:
            raise ConfigError(f"the size of a group must not be negative, got {n}")
        if n > 0:
            state = observe(torch.full((1,), float(mean), dtype=torch.float64, device="cpu"), None)
            spread = (n - correction) * float(std) ** 2 if n > 1 else 0.0
            known = {"total": n, "squares": n, "count": n, "m2": spread, "low": math.nan, "high": math.nan}
            state |= {key: torch.tensor(value, dtype=torch.float64, device="cpu") for key, value in known.items()}
            moments._state = state
        return moments

    def update(self, values: Any, weights: Any = None) -> "RunningMoments":
        """Add `values` (tensor, array, list or number of any dtype; of complex ones the magnitudes) and return ``self``.

        `weights` has their shape (pooled) or is one number (per element), and needs ``weights=`` in the constructor.
        """
        x = as_float64(values)
        if (weights is None) == (self.weights is not None):
            raise ConfigTypeError("update() needs weights if weights= was given to RunningMoments, and only then")
        w = None if weights is None else as_float64(weights).to(x.device)
        for part, weight in parts(x, w, self.per_element):
            self._merge_state(observe(part, weight))
        return self

    def merge(self, other: "RunningMoments") -> "RunningMoments":
        """Add all data of `other` and return ``self``; an empty `other` changes nothing."""
        if (self.per_element, self.weights) != (other.per_element, other.weights):
            raise ConfigError("only RunningMoments with the same per_element and weights can be merged")
        if other._state is not None:
            self._merge_state({key: value.clone() for key, value in other._state.items()})
        return self

    def _merge_state(self, new: dict[str, Tensor]) -> None:
        if self._state is None:
            self._state = new
        elif self._state["center"].shape != new["center"].shape:
            shapes = tuple(new["center"].shape), tuple(self._state["center"].shape)
            raise ConfigError("per_element needs observations of one shape, got {} after {}".format(*shapes))
        else:
            self._state = combine(self._state, new)

    def __iadd__(self, other: "RunningMoments") -> "RunningMoments":
        return self.merge(other)

    def __add__(self, other: "RunningMoments") -> "RunningMoments":
        return self.copy().merge(other)

    def copy(self) -> "RunningMoments":
        """Return an independent copy."""
        twin = RunningMoments(self.correction, per_element=self.per_element, nan=self.nan, weights=self.weights)
        return twin.merge(self)

    def _out(self, value: Tensor) -> Any:
        return value if self.per_element else value.item()

    def _read(self, key: str, default: float = math.nan) -> Tensor:
        return torch.tensor(default, dtype=torch.float64, device="cpu") if self._state is None else self._state[key]

    @property
    def n(self) -> Any:
        """Number of elements in the results: all elements, or only the finite ones with ``nan='omit'``."""
        count = self._read("count", 0.0)
        if self.nan == "propagate":
            count = count + self._nonfinite()
        return count.long() if self.per_element else int(count.item())

    @property
    def n_nonfinite(self) -> Any:
        """Number of NaN and infinite elements."""
        count = self._nonfinite()
        return count.long() if self.per_element else int(count.item())

    def _nonfinite(self) -> Tensor:
        return self._read("nans", 0.0) + self._read("above", 0.0) + self._read("below", 0.0)

    @property
    def m2(self) -> Any:
        """Sum of squared deviations from the mean."""
        return self._out(self._propagated(self._read("m2", 0.0)))

    @property
    def mean(self) -> Any:
        """Arithmetic mean; infinite if an element is infinite; NaN if one is NaN, or without data."""
        mean = torch.where(self._read("total", 0.0) > 0, self._read("center"), torch.nan)
        if self.nan == "propagate":
            above, below = self._read("above", 0.0) > 0, self._read("below", 0.0) > 0
            mean = torch.where(above, torch.inf, torch.where(below, -torch.inf, mean))
            mean = torch.where((self._read("nans", 0.0) > 0) | (above & below), torch.nan, mean)
        return self._out(mean)

    @property
    def var(self) -> Any:
        """Variance with the correction of the constructor; NaN if the denominator is not positive."""
        total, squares = self._read("total", 0.0), self._read("squares", 0.0)
        degrees = squares / total if self.weights == "reliability" else torch.ones_like(total)
        denominator = total - self.correction * degrees
        return self._out(self._propagated(torch.where(denominator > 0, self._read("m2") / denominator, torch.nan)))

    @property
    def std(self) -> Any:
        """Square root of the variance."""
        return self.var.sqrt() if self.per_element else math.sqrt(self.var)

    def _propagated(self, value: Tensor) -> Tensor:
        return value if self.nan == "omit" else torch.where(self._nonfinite() > 0, torch.nan, value)

    @property
    def min(self) -> Any:
        """Smallest element."""
        return self._extremum("low", "below", -torch.inf, torch.minimum)

    @property
    def max(self) -> Any:
        """Largest element."""
        return self._extremum("high", "above", torch.inf, torch.maximum)

    def _extremum(self, key: str, infinite: str, limit: float, pick: Any) -> Any:
        is_known = self._read("total", 0.0) > 0
        value = torch.where(is_known, self._read(key), torch.nan)
        if self.nan == "propagate":
            other = "above" if infinite == "below" else "below"
            only_other = ~is_known & (self._read(other, 0.0) > 0)
            value = torch.where(only_other, -limit, value)
            value = torch.where(self._read(infinite, 0.0) > 0, limit, value)
            value = torch.where(self._read("nans", 0.0) > 0, torch.nan, value)
        return self._out(value)

    def state_dict(self) -> dict[str, Any]:
        """Return the options and the state, as plain values and tensors."""
        options = {k: getattr(self, k) for k in ("correction", "per_element", "nan", "weights")}
        return {**options, "state": None if self._state is None else {k: v.clone() for k, v in self._state.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace options and state by those that :meth:`state_dict` returned."""
        self.__init__(  # type: ignore[misc]  # runs the checks of the constructor
            state["correction"], per_element=state["per_element"], nan=state["nan"], weights=state["weights"]
        )
        if state["state"] is not None:
            self._state = {key: state["state"][key].clone() for key in STATE}

    def all_reduce(self, group: Any = None) -> "RunningMoments":
        """Merge the states of all ranks of `group` in rank order, so that all ranks have bit-identical results.

        Every rank must call it, also a rank without data.  Without a process group the method does nothing.
        """
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return self
        gathered: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(gathered, None if self._state is None else self._state, group=group)
        device = None if self._state is None else self._state["center"].device
        self._state = None
        for state in gathered:
            if state is not None:
                self._merge_state({key: value.to(device) for key, value in state.items()})
        return self

    def __repr__(self) -> str:
        summary = (
            f"{tuple(self._read('center').shape)}" if self.per_element else f"mean={self.mean:.6g}, std={self.std:.6g}"
        )
        return f"RunningMoments(n={self.n if not self.per_element else int(self._read('count', 0.0).max())}, {summary})"
