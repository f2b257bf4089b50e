"""Tensors by name, with arithmetic, statistics and files."""

import json
import math
import operator
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ikkuna.errors import ConfigError, SnapshotError
from ikkuna.inspect.netdict.description import (
    Description,
    as_tensor,
    broadcast,
    columns_of,
    fields_of,
    inner_product,
    power_norm,
    record_of,
    row_of,
    statistics_of,
)
from ikkuna.numerics.statistics.histogram import SIGMA, percentiles
from ikkuna.printable import printable
from ikkuna.support.files import atomic_file, atomic_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SPECIAL = frozenset("*+?^$|\\()[]{}")

Pattern = str | re.Pattern[str] | Sequence["str | re.Pattern[str]"] | None


def matcher(pattern: Pattern) -> Callable[[str], bool]:
    """Return a function that tests whether a name contains the string, or one of the strings, in `pattern`.

    A compiled expression, a string that begins with ``re:``, and a string with a backslash or one of ``*+?^$|()[]{}``,
    which are rare in names, is searched for as a regular expression.  ``None`` matches every name.

    Raises
    ------
    ConfigError
        If a string is no valid expression.

    Examples
    --------
    >>> list(filter(matcher(["ln", "re:bias$"]), ["ln1.weight", "fc.weight", "fc.bias"]))
    ['ln1.weight', 'fc.bias']
    >>> list(filter(matcher(".*query.*"), ["h.0.query.weight", "h.0.key.weight"]))
    ['h.0.query.weight']
    """
    if pattern is None:
        return lambda name: True
    parts = [pattern] if isinstance(pattern, str | re.Pattern) else list(pattern)
    tests = [_test(part) for part in parts]
    return lambda name: any(test(name) for test in tests)


def _test(part: str | re.Pattern[str]) -> Callable[[str], bool]:
    if not isinstance(part, str):
        return lambda name: part.search(name) is not None
    if not part.startswith("re:") and not _SPECIAL.intersection(part):
        return lambda name: part in name
    try:
        expression = re.compile(part.removeprefix("re:"))
    except re.error as error:
        raise ConfigError(f"the pattern {part!r} is no valid regular expression: {error}") from error
    return lambda name: part in name or expression.search(name) is not None


def _divide(a: Any, b: Any) -> Any:
    """Return the quotient of floating-point division, also for a number divided by zero."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a / b
    return _float(torch.tensor(a, dtype=torch.float64, device="cpu") / b)


def _float(value: Tensor) -> float:
    return float(value.item())


def _like(value: Any, result: Tensor) -> Any:
    return result if isinstance(value, Tensor) else _float(result)


def _check_shapes(name: str, a: Any, b: Any) -> None:
    left, right = getattr(a, "shape", torch.Size()), getattr(b, "shape", torch.Size())
    if left == right:
        return
    try:
        joint = np.broadcast_shapes(left, right)
    except ValueError:
        joint = None
    if joint not in (tuple(left), tuple(right)):
        raise ConfigError(f"{name!r} has shape {tuple(left)} on the left and {tuple(right)} on the right")


_TORCH = (".pt", ".pth")


def save(values: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write tensors and numbers by name to `path`; a failed write leaves no file.

    The suffixes ``.pt`` and ``.pth`` select the format of torch, every other suffix safetensors
    (``pip install ikkuna[snapshots]``).

    Raises
    ------
    SnapshotError
        If safetensors is needed and not installed, or if a value cannot be stored.
    """
    target = Path(path)
    tensors = {name: _plain(value) for name, value in values.items()}
    numbers = [name for name, value in values.items() if not isinstance(value, Tensor)]
    try:
        if target.suffix in _TORCH:
            with atomic_file(target) as file:
                torch.save({name: value if name in numbers else tensors[name] for name, value in values.items()}, file)
        else:
            order = {"names": json.dumps(list(values)), "numbers": json.dumps(numbers)}
            safetensors = _safetensors()
            with atomic_path(target) as partial:
                safetensors.save_file(tensors, partial, metadata=order)
    except (RuntimeError, TypeError, ValueError) as error:
        raise SnapshotError(f"cannot store the snapshot in {str(target)!r}: {error}") from error


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of a file written by :func:`save`, with the names in their order.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    SnapshotError
        If the file is damaged, or if loading it would run code.
    """
    source = Path(path)
    if not source.is_file():
        raise FileNotFoundError(f"no snapshot file {str(source)!r}")
    try:
        return _load_torch(source) if source.suffix in _TORCH else _load_safetensors(source)
    except SnapshotError:
        raise
    except Exception as error:  # any error of a parser means that the file is not a snapshot
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SnapshotError(f"{str(source)!r} is damaged or not a snapshot: {reason}") from error


def _load_torch(source: Path) -> dict[str, Any]:
    values = torch.load(source, weights_only=True, map_location="cpu")
    good = isinstance(values, dict) and all(isinstance(key, str) for key in values)
    if not good or not all(isinstance(value, Tensor | int | float) for value in values.values()):
        raise SnapshotError(f"{str(source)!r} does not hold tensors by name")
    return dict(values)


def _load_safetensors(source: Path) -> dict[str, Any]:
    _safetensors()
    from safetensors import safe_open

    with safe_open(source, framework="pt") as file:
        order = file.metadata() or {}
        numbers = set(json.loads(order.get("numbers", "[]")))
        names = json.loads(order["names"]) if "names" in order else list(file.keys())
        tensors = {name: file.get_tensor(name) for name in names}
    return {name: tensor.item() if name in numbers else tensor for name, tensor in tensors.items()}


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise SnapshotError(
            "safetensors is not installed: run pip install ikkuna[snapshots], or use the suffix .pt"
        ) from error
    return safetensors.torch


def _plain(value: Any) -> Tensor:
    """Return a contiguous tensor that shares no memory with another one, as the format requires."""
    if not isinstance(value, Tensor):
        dtype = torch.int64 if isinstance(value, int) else torch.float64
        return torch.tensor(value, dtype=dtype, device="cpu")
    return value.detach().clone(memory_format=torch.contiguous_format)


class NetDict(Mapping[str, Any]):
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
        right = NetDict(other, copy=False)
        return all(torch.equal(as_tensor(value), as_tensor(right[name])) for name, value in self.items())

    __hash__ = None  # type: ignore[assignment]  # like every mapping

    def __repr__(self) -> str:
        shown = (f"{k}={v!r}" if not isinstance(v, Tensor) else f"{k}: {tuple(v.shape)}" for k, v in self.items())
        return printable(f"NetDict({', '.join(shown)})")

    def paired(self, other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Return both values for each name.

        Raises
        ------
        ConfigError
            If the names differ, or if two shapes cannot be broadcast to one of them.
        """
        if set(self) != set(other):
            only = [f"only on the left: {name}" for name in self if name not in other]
            only += [f"only on the right: {name}" for name in other if name not in self]
            raise ConfigError(f"both sides need the same names; {'; '.join(only[:6])}")
        right = other if isinstance(other, NetDict) else NetDict(other, copy=False)
        for name in self:
            _check_shapes(name, self[name], right[name])
        return {name: (self[name], right[name]) for name in self}

    def _combine(self, other: Any, function: Callable[[Any, Any], Any]) -> "NetDict":
        if isinstance(other, Mapping):
            values = {name: function(a, b) for name, (a, b) in self.paired(other).items()}
        elif isinstance(other, Real) or (isinstance(other, Tensor) and other.ndim == 0):
            values = {name: function(value, other) for name, value in self.items()}
        else:
            return NotImplemented  # type: ignore[no-any-return]  # Python then tries the operator of the other operand
        return self.with_values(values)

    def __add__(self, other: Any) -> "NetDict":
        return self._combine(other, operator.add)

    __radd__ = __add__

    def __sub__(self, other: Any) -> "NetDict":
        return self._combine(other, operator.sub)

    def __rsub__(self, other: Any) -> "NetDict":
        return self._combine(other, lambda a, b: b - a)

    __array_ufunc__ = None  # a number of numpy on the left lets this class multiply

    def __mul__(self, other: Any) -> "NetDict":
        return self._combine(other, operator.mul)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> "NetDict":
        return self._combine(other, _divide)

    def __rtruediv__(self, other: Any) -> "NetDict":
        return self._combine(other, lambda a, b: _divide(b, a))

    def __pow__(self, other: Any) -> "NetDict":
        return self._combine(other, operator.pow)

    def __neg__(self) -> "NetDict":
        return self._combine(-1, operator.mul)

    def __abs__(self) -> "NetDict":
        return self.abs()

    def abs(self) -> "NetDict":
        """Return the magnitudes."""
        return self._combine(0, lambda a, _: abs(a))

    def sqrt(self) -> "NetDict":
        """Return the square roots."""
        return self._combine(0, lambda a, _: _like(a, as_tensor(a).sqrt()))

    def sign(self) -> "NetDict":
        """Return -1, 0 or 1 for every element; NaN for NaN."""
        return self._combine(0, lambda a, _: _like(a, torch.where((x := as_tensor(a)).isnan(), x, x.sign())))

    def clip(self, min: float | None = None, max: float | None = None) -> "NetDict":
        """Return every element limited to the range from `min` to `max`."""
        return self._combine(0, lambda a, _: _like(a, torch.clamp(as_tensor(a), min, max)))

    def at(self, index: int) -> Any:
        """Return the value at a position."""
        return list(self._values.values())[index]

    def select(self, pattern: Pattern) -> "NetDict":
        """Return the entries whose name matches `pattern` (see :func:`~ikkuna.inspect.netdict.net_dict.matcher`)."""
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
        return [as_tensor(value) for value in self.values()]

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
        r"""Return :math:`(\sum |x_i|^p)^{1/p}` over all elements; 0 if there are none, NaN if one is NaN.

        An infinite element makes it infinite; that of order 0 is NaN then.

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
        single = np.ndim(q) == 0
        if layerwise and not single:
            raise ConfigError(f"percentile(layerwise=True) needs one percentile, such as q=50, got {q!r}")
        if layerwise:
            return self._layerwise(lambda one: one.percentile(q))
        cuts = percentiles(self.tensors(), [q] if single else q)
        return cuts[0] if single else cuts

    def dot(self, other: Mapping[str, Any], layerwise: bool = False) -> Any:
        r"""Return the inner product with a mapping of the same names, accumulated in float64.

        That of complex numbers is the real part of :math:`\sum_i \bar a_i b_i`.
        """
        products = {name: inner_product(*broadcast(*pair)) for name, pair in self.paired(other).items()}
        return NetDict(products, copy=False) if layerwise else math.fsum(products.values())

    def cosine(self, other: Mapping[str, Any], layerwise: bool = False) -> Any:
        r"""Return :math:`\langle a, b \rangle / (\|a\| \|b\|)`, the inner product of :meth:`dot`; NaN if one of the norms is 0."""
        pairs = {name: broadcast(*pair) for name, pair in self.paired(other).items()}
        left, right = (NetDict({name: pair[i] for name, pair in pairs.items()}, copy=False) for i in (0, 1))
        if layerwise:
            return NetDict({k: NetDict({k: left[k]}, copy=False).cosine({k: right[k]}) for k in left}, copy=False)
        length = left.norm(2) * right.norm(2)
        return left.dot(right) / length if length > 0 else math.nan

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
            Statistics to compute (see :data:`~ikkuna.inspect.netdict.description.STATISTICS`), or ``shape`` of each tensor.
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
        from ikkuna.inspect.plot.net import net_histogram

        return net_histogram(self.select(pattern), layerwise=layerwise, **options)

    hist = histogram

    def heatmap(self, pattern: Pattern = None, **options: Any) -> "Figure":
        """Return a figure with an image of each tensor: rows are the first axis, columns all other axes."""
        from ikkuna.inspect.plot.net import net_heatmap

        return net_heatmap(self.select(pattern), **options)

    def save(self, path: Any) -> None:
        """Write the values to a file (see :func:`ikkuna.inspect.netdict.net_dict.save`)."""
        save(self, path)

    @classmethod
    def load(cls, path: Any) -> "NetDict":
        """Read a file (see :func:`ikkuna.inspect.netdict.net_dict.load`)."""
        return cls(load(path), copy=False)


def _own(value: Any, copy: bool, device: str | torch.device, dtype: torch.dtype | None) -> Tensor | float:
    if isinstance(value, bool | int | float):
        return value
    if not isinstance(value, Tensor):
        value = torch.from_numpy(np.array(value))
    tensor: Tensor = value.detach()
    return tensor.to(tensor.device if device == "same" else device, dtype or tensor.dtype, copy=copy)
