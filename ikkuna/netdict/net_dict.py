"""Tensors by name, with arithmetic and statistics."""

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ikkuna.netdict.arithmetic import Arithmetic
from ikkuna.netdict.description import Description, columns_of, fields_of, record_of, row_of, statistics_of
from ikkuna.netdict.norms import inner_product, power_norm
from ikkuna.netdict.selection import Pattern, matcher
from ikkuna.numerics.statistics.percentile import SIGMA, percentiles

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["NetDict"]


class NetDict(Arithmetic):
    """An ordered, immutable mapping of names to tensors (or numbers): a snapshot of a net.

    Arithmetic works name by name and returns a new object.  The other operand is a number, or a mapping with the same
    names whose values have the same shapes or can be broadcast to them.  Statistics treat all elements as one vector;
    with ``layerwise=True`` they are computed for each name and returned as a NetDict of numbers.

    Parameters
    ----------
    values : mapping of str to Tensor, ndarray, list or float
        The values by name.
    copy : bool
        Copy the data, so that later changes of the source have no effect.
    device : str or torch.device
        Device of the tensors; ``'same'`` keeps each tensor where it is.
    dtype : torch.dtype, optional
        Data type of the tensors; unchanged by default.

    Examples
    --------
    >>> D = NetDict({"a": [3.0, 4.0], "b": [[1.0, 2.0], [2.0, 4.0]]})
    >>> D.norm(1), D.norm(math.inf), (D - 1).max()
    (16.0, 4.0, 3.0)
    >>> D.norm(2, layerwise=True)
    NetDict(a=5.0, b=5.0)
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        *,
        copy: bool = True,
        device: str | torch.device = "same",
        dtype: torch.dtype | None = None,
    ) -> None:
        self._values = {str(name): _own(value, copy, device, dtype) for name, value in values.items()}

    def with_values(self, values: Mapping[str, Any]) -> "NetDict":
        """Return a new NetDict with `values`, which are not copied."""
        return NetDict(values, copy=False)

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            raise KeyError(f"no entry {name!r}; available: {', '.join(self._values) or 'none'}")
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping) or set(self) != set(other):
            return False
        return all(torch.equal(torch.as_tensor(value), torch.as_tensor(other[name])) for name, value in self.items())

    __hash__ = None  # type: ignore[assignment]  # like every mapping

    def __repr__(self) -> str:
        shown = (f"{k}={v!r}" if not isinstance(v, Tensor) else f"{k}: {tuple(v.shape)}" for k, v in self.items())
        return f"NetDict({', '.join(shown)})"

    def at(self, index: int) -> Any:
        """Return the value at a position."""
        return list(self._values.values())[index]

    def select(self, pattern: Pattern) -> "NetDict":
        """Return the entries whose name matches `pattern` (see :func:`~ikkuna.netdict.selection.matcher`)."""
        fits = matcher(pattern)
        return NetDict({name: value for name, value in self.items() if fits(name)}, copy=False)

    filter = select

    def map(self, function: Callable[[Any], Any]) -> "NetDict":
        """Return a NetDict with ``function(value)`` for every value."""
        return NetDict({name: function(value) for name, value in self.items()}, copy=False)

    def to(self, device: str | torch.device = "same", dtype: torch.dtype | None = None) -> "NetDict":
        """Return a copy on another device or with another dtype."""
        return NetDict(self, device=device, dtype=dtype)

    def clone(self) -> "NetDict":
        """Return an independent copy."""
        return NetDict(self)

    def is_compatible(self, other: Mapping[str, Any]) -> bool:
        """Return whether `other` has the same names, in any order."""
        return set(self) == set(other)

    def tensors(self) -> list[Tensor]:
        """Return the values as tensors; numbers become float64 tensors."""
        return [
            v if isinstance(v, Tensor) else torch.tensor(v, dtype=torch.float64, device="cpu") for v in self.values()
        ]

    def _layerwise(self, compute: Callable[["NetDict"], float]) -> "NetDict":
        values = {name: compute(NetDict({name: value}, copy=False)) for name, value in self.items()}
        return NetDict(values, copy=False)

    def _statistic(self, name: str, layerwise: bool, correction: int = 1) -> Any:
        if layerwise:
            return self._layerwise(lambda one: float(one._statistic(name, False, correction)))
        record = record_of(self.tensors(), fields_of([name]))
        return statistics_of(record, [name], correction)[name]

    def numel(self, layerwise: bool = False) -> Any:
        """Return the number of elements."""
        return self._statistic("num_params", layerwise)

    def norm(self, p: float = 2, layerwise: bool = False) -> Any:
        r"""Return :math:`(\sum |x_i|^p)^{1/p}` over all elements; 0 if there are none.

        Parameters
        ----------
        p : float
            A positive number, ``inf`` (largest magnitude), ``-inf`` (smallest magnitude) or 0 (number of non-zeros).
        layerwise : bool
            Return the norm of each tensor.

        Raises
        ------
        ConfigError
            If `p` has another value.
        """
        return self._layerwise(lambda one: one.norm(p)) if layerwise else power_norm(self.tensors(), p)

    def mean(self, layerwise: bool = False) -> Any:
        """Return the mean of all elements."""
        return self._statistic("mean", layerwise)

    def var(self, layerwise: bool = False, correction: int = 1) -> Any:
        r"""Return :math:`\sum (x_i - \bar x)^2 / (n - \mathrm{correction})` of all elements together."""
        return self._statistic("variance", layerwise, correction)

    def std(self, layerwise: bool = False, correction: int = 1) -> Any:
        """Return the square root of the variance."""
        return self._statistic("std", layerwise, correction)

    def min(self, layerwise: bool = False) -> Any:
        """Return the smallest element."""
        return self._statistic("min", layerwise)

    def max(self, layerwise: bool = False) -> Any:
        """Return the largest element."""
        return self._statistic("max", layerwise)

    def skew(self, layerwise: bool = False) -> Any:
        """Return Fisher's skewness, from population moments; NaN for constant data."""
        return self._statistic("skew", layerwise)

    def kurtosis(self, layerwise: bool = False) -> Any:
        """Return the excess kurtosis, from population moments; NaN for constant data."""
        return self._statistic("kurtosis", layerwise)

    def percentile(self, q: Any = SIGMA, layerwise: bool = False) -> Any:
        """Return the percentile `q`, or a list of percentiles, of all elements; layerwise only one percentile."""
        if layerwise:
            return self._layerwise(lambda one: float(one.percentile(q)))
        single = isinstance(q, int | float)
        cuts = percentiles(self.tensors(), [q] if single else q)
        return cuts[0] if single else cuts

    def dot(self, other: Mapping[str, Any], layerwise: bool = False) -> Any:
        """Return the inner product with a mapping of the same names, accumulated in float64."""
        pairs = self.paired(other)
        products = {name: inner_product(*pair) for name, pair in pairs.items()}
        return NetDict(products, copy=False) if layerwise else math.fsum(products.values())

    def cosine(self, other: Mapping[str, Any], layerwise: bool = False) -> Any:
        r"""Return :math:`\langle a, b \rangle / (\|a\| \|b\|)`; NaN if one of the norms is 0."""
        right = other if isinstance(other, NetDict) else NetDict(other, copy=False)
        if layerwise:
            return NetDict(
                {k: NetDict({k: self[k]}, copy=False).cosine({k: right[k]}) for k in self.paired(right)}, copy=False
            )
        length = self.norm(2) * right.norm(2)
        return self.dot(right) / length if length > 0 else math.nan

    def describe(
        self,
        layerwise: bool = False,
        stats: Any = None,
        include: Pattern = None,
        exclude: Any = None,
        pattern: Pattern = None,
        display: bool = False,
        correction: int = 1,
    ) -> Description:
        """Return statistics of all elements, or of each tensor.

        Parameters
        ----------
        layerwise : bool
            Return a row for each tensor.
        stats : sequence of str, optional
            Statistics to compute (see :data:`~ikkuna.netdict.description.STATISTICS`), or ``shape`` of each tensor.
        include, pattern : str, re.Pattern or list of them
            Use only the tensors whose name matches.
        exclude : str or list of str
            Statistics to leave out.  A string that is not a statistic excludes the tensors whose name contains it.
        display : bool
            Write the table to the standard output too.
        correction : int
            Correction of variance and standard deviation.

        Returns
        -------
        Description
            Empty if no tensor is selected; ``to_dict()`` makes it flat.

        Raises
        ------
        ConfigError
            If a statistic does not exist.
        """
        columns, hidden = columns_of(stats, exclude, layerwise)
        chosen = self.select(include).select(pattern)
        chosen = NetDict({k: v for k, v in chosen.items() if not (hidden and matcher(hidden)(k))}, copy=False)
        if layerwise:
            rows = zip(chosen, chosen.tensors(), strict=True)
            result = Description({name: row_of([tensor], columns, correction) for name, tensor in rows})
        else:
            result = Description(row_of(chosen.tensors(), columns, correction) if len(chosen) else {})
        if display:
            sys.stdout.write(f"{result!r}\n")
        return result

    def describe_layers(
        self,
        include: Pattern = None,
        exclude: Any = None,
        display: bool = False,
        layerwise: bool = True,
        **options: Any,
    ) -> Description:
        """Return :meth:`describe` with a row for each tensor."""
        return self.describe(layerwise, include=include, exclude=exclude, display=display, **options)

    def to_dict(self) -> dict[str, float]:
        """Return numbers by name for a logger: the values, or the result of :meth:`describe_layers` for tensors."""
        if any(isinstance(value, Tensor) for value in self.values()):
            return self.describe(layerwise=True).to_dict()
        return {name: float(value) for name, value in self.items()}

    def histogram(self, layerwise: bool = False, pattern: Pattern = None, **options: Any) -> "Figure":
        """Return a figure with a histogram of all elements, or with one for each tensor."""
        from ikkuna.plot.net import net_histogram

        return net_histogram(self.select(pattern), layerwise=layerwise, **options)

    hist = histogram

    def heatmap(self, pattern: Pattern = None, **options: Any) -> "Figure":
        """Return a figure with an image of each tensor: rows are the first axis, columns all other axes."""
        from ikkuna.plot.net import net_heatmap

        return net_heatmap(self.select(pattern), **options)

    def save(self, path: Any) -> None:
        """Write the values to a file (see :func:`ikkuna.netdict.files.save`)."""
        from ikkuna.netdict.files import save

        save(self, path)

    @classmethod
    def load(cls, path: Any) -> "NetDict":
        """Read a file (see :func:`ikkuna.netdict.files.load`)."""
        from ikkuna.netdict.files import load

        return cls(load(path), copy=False)


def _own(value: Any, copy: bool, device: str | torch.device, dtype: torch.dtype | None) -> Tensor | float:
    if isinstance(value, bool | int | float):
        return value
    if not isinstance(value, Tensor):
        value = torch.from_numpy(np.array(value))
    tensor: Tensor = value.detach()
    return tensor.to(tensor.device if device == "same" else device, dtype or tensor.dtype, copy=copy)
