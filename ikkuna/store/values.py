"""Values that are no numbers: histograms, matrices, images, and tables of modules."""

import io
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard

import numpy as np
from numpy.typing import NDArray

from ikkuna.errors import ConfigError, ConfigTypeError
from ikkuna.store.finding import Finding
from ikkuna.store.names import Series, decode, encode, natural_key
from ikkuna.support.failures import raise_users_exception

NUMBERS, LISTS = ("min", "max", "num", "sum", "sum_squares"), ("bucket_limits", "bucket_counts")
"""The numbers and the lists of a histogram."""


class HistogramLike(Protocol):
    """Counts of numbers between edges, with their sums.

    Bucket *i* ends at ``bucket_limits[i]``, where bucket *i + 1* begins.
    """

    @property
    def min(self) -> float: ...  # noqa: D102 - the names are those of TensorBoard's HistogramProto
    @property
    def max(self) -> float: ...  # noqa: D102
    @property
    def num(self) -> float: ...  # noqa: D102
    @property
    def sum(self) -> float: ...  # noqa: D102
    @property
    def sum_squares(self) -> float: ...  # noqa: D102
    @property
    def bucket_limits(self) -> Sequence[float]: ...  # noqa: D102
    @property
    def bucket_counts(self) -> Sequence[float]: ...  # noqa: D102


def is_histogram(value: Any) -> TypeGuard[HistogramLike]:
    """Return whether `value` has all attributes of a :class:`HistogramLike`; ``isinstance`` would be much slower.

    Examples
    --------
    >>> is_histogram(1.0)
    False
    """
    return all(hasattr(value, name) for name in (*NUMBERS, *LISTS))


_CHANNELS = (1, 3, 4)


@dataclass(frozen=True, eq=False, slots=True)
class Image:
    """A picture.

    Parameters
    ----------
    png : bytes
        The picture as a PNG file.

    Examples
    --------
    >>> Image.of(np.zeros((2, 3), np.uint8)).png[1:4]
    b'PNG'
    """

    png: bytes

    @classmethod
    def of(cls, value: Any) -> "Image":
        """Encode an array of pixels, an image of Pillow, or a figure of matplotlib.

        Raises
        ------
        ConfigError
            If an array has no shape of a picture.
        """
        from PIL.Image import fromarray  # matplotlib brings it; importing it takes a tenth of a second

        buffer = io.BytesIO()
        if hasattr(value, "savefig"):
            value.savefig(buffer, format="png")
        else:
            picture = fromarray(_pixels(value)) if isinstance(value, np.ndarray) else value
            picture.save(buffer, format="PNG")
        return cls(buffer.getvalue())


def is_pixels(shape: tuple[int, ...], dtype: str) -> bool:
    """Return whether an array is a picture.

    It has 8-bit numbers and the shape (height, width), (height, width, channel) or (channel, height, width).

    Examples
    --------
    >>> is_pixels((32, 32, 3), "uint8"), is_pixels((32, 32), "float32")
    (True, False)
    """
    has_channels = len(shape) == 3 and (shape[2] in _CHANNELS or shape[0] in _CHANNELS)
    return dtype.endswith("uint8") and 0 not in shape and (len(shape) == 2 or has_channels)


def _pixels(array: NDArray[Any]) -> NDArray[np.uint8]:
    if not is_pixels(array.shape, str(array.dtype)):
        raise ConfigError(
            f"a picture needs 8-bit pixels of shape (height, width, channel), got {array.dtype} {array.shape}"
        )
    if array.ndim == 3 and array.shape[2] not in _CHANNELS:
        array = np.moveaxis(array, 0, 2)
    return np.ascontiguousarray(array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array)


@dataclass(frozen=True, eq=False)
class Matrix:
    """Numbers with a name for each row and each column.

    Parameters
    ----------
    rows, columns : tuple of str
        The names.
    values : ndarray
        (row, column), float64; may contain NaN and infinities.
    limits : (float, float), optional
        Ends of the colour scale; by default the least and the greatest finite value.

    Examples
    --------
    >>> Matrix(("a", "b"), ("x",), np.array([[1.0], [0.5]])).values.shape
    (2, 1)
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: NDArray[np.float64]
    limits: tuple[float, float] | None = None


Shape = tuple[int, ...] | None
"""``None`` for a parameter without a shape, such as that of a lazy module."""


@dataclass(frozen=True, slots=True)
class ModuleEntry:
    """The description of a module.

    Parameters
    ----------
    name : str
        Its dotted name.
    class_name : str
        The name of its class.
    parameters : tuple of tuple
        Name and shape of each parameter that it owns and does not share with an earlier module.
    aliases : tuple of str
        Other names of the module.
    source : str
        The class of the user's program that contains the module, with its file and line; empty if it is unknown.
    """

    name: str
    class_name: str
    parameters: tuple[tuple[str, Shape], ...] = ()
    aliases: tuple[str, ...] = ()
    source: str = field(default="", repr=False)

    @property
    def count(self) -> int:
        """Number of elements of all parameters that have a shape."""
        return sum(math.prod(shape) for _, shape in self.parameters if shape is not None)


def module_table(modules: Sequence[ModuleEntry]) -> str:
    """Return a Markdown table with name, class, number of parameters and their shapes; names are encoded as in tags.

    Examples
    --------
    >>> print(module_table([ModuleEntry("fc", "Linear", (("weight", (2, 3)), ("bias", (2,)))), ModuleEntry("act", "ReLU")]))
    | # | module | class | parameters | shapes |
    |--:|:--|:--|--:|:--|
    | 0 | `fc` | Linear | 8 | weight 2×3, bias 2 |
    | 1 | `act` | ReLU | 0 |  |
    <BLANKLINE>
    2 modules, 8 parameters.
    """
    lines = ["| # | module | class | parameters | shapes |", "|--:|:--|:--|--:|:--|"]
    for number, entry in enumerate(modules):
        shapes = ", ".join(f"{name} {_shape(shape)}" for name, shape in entry.parameters)
        cells = (str(number), f"`{encode(entry.name)}`", entry.class_name, f"{entry.count:,}", shapes)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    total = sum(entry.count for entry in modules)
    return "\n".join([*lines, "", f"{len(modules):,} modules, {total:,} parameters."])


def _shape(shape: Shape) -> str:
    if shape is None:
        return "not known yet"
    return "×".join(map(str, shape)) or "scalar"


def read_module_table(text: str) -> tuple[ModuleEntry, ...]:
    """Return the modules of a table written by :func:`module_table`, without their aliases; lines of another form are skipped.

    Examples
    --------
    >>> entries = [ModuleEntry("fc", "Linear", (("weight", (2, 3)), ("bias", (2,)))), ModuleEntry("act", "ReLU")]
    >>> read_module_table(module_table(entries)) == tuple(entries)
    True
    """
    found = []
    for line in text.splitlines():
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 5 and cells[0].isdigit():
            parameters = tuple(_parameter(part) for part in cells[4].split(", ") if " " in part)
            found.append(ModuleEntry(decode(cells[1].strip("`")), cells[2], parameters))
    return tuple(found)


def _parameter(text: str) -> tuple[str, Shape]:
    name, _, shape = text.partition(" ")
    if shape == "scalar":
        return name, ()
    sizes = shape.split("×")
    return name, tuple(map(int, sizes)) if all(map(str.isdigit, sizes)) else None


class ModuleOrder:
    """Sorts names of series by the position of their modules in the network.

    Parameters
    ----------
    modules : iterable of ModuleEntry
        The modules in their order in the network.  If there are none, all names are sorted alphabetically.

    Examples
    --------
    >>> order = ModuleOrder([ModuleEntry("stem", "Linear"), ModuleEntry("lstm", "LSTM")])
    >>> sorted(["lstm:1.0", "lstm.weight_ih_l10", "lstm.weight_ih_l2", "stem"], key=order.key)
    ['stem', 'lstm.weight_ih_l2', 'lstm.weight_ih_l10', 'lstm:1.0']
    >>> order.belongs("lstm:1.0"), order.belongs("group 0")
    (True, False)
    """

    def __init__(self, modules: Iterable[ModuleEntry] = ()) -> None:
        self.modules = tuple(modules)
        self._positions = {name: i for i, entry in enumerate(self.modules) for name in (entry.name, *entry.aliases)}

    def _position(self, name: str) -> int | None:
        """Return the position of the module with this name, or of the module with a parameter or output of this name."""
        while name not in self._positions and (end := max(name.rfind("."), name.rfind(":"))) > 0:
            name = name[:end]
        return self._positions.get(name)

    def entry(self, name: str) -> ModuleEntry | None:
        """Return the module with this name, or the module with a parameter or output of this name."""
        position = self._position(name)
        return None if position is None else self.modules[position]

    def classes(self, names: Iterable[str | None]) -> list[str]:
        """Return the class of the module of each name; an empty text without one."""
        entries = (self.entry(name or "") for name in names)
        return [entry.class_name if entry else "" for entry in entries]

    def belongs(self, name: str) -> bool:
        """Return whether `name` is a module, a parameter or an output; always ``True`` without modules."""
        return not self._positions or self._position(name) is not None

    def key(self, name: str) -> tuple[int, list[str | int]]:
        """Return the sorting key of a name; names that belong to no module come last."""
        position = self._position(name)
        return len(self._positions) if position is None else position, natural_key(name)


def shown(series: Series, value: Any, step: int) -> tuple[str, tuple[Any, ...]]:
    """Return the name of the backend's method that adds a value, and its arguments; see `Run.show`."""
    if isinstance(value, float):
        return "add_scalar", (series, value, step)
    if hasattr(value, "tensorboard_buckets"):  # the `Histogram` of `ikkuna.numerics.statistics`
        value = value.tensorboard_buckets()
    if isinstance(value, str):
        return "add_text", (series.title or series.label, value, step)
    if isinstance(value, Finding):
        return "add_finding", (value, step)
    if isinstance(value, Matrix):
        return "add_matrix", (series, checked_matrix(series.kind, value), step)
    if isinstance(value, Image):
        return "add_image", (series, value, step)
    if is_histogram(value):
        check_histogram(series.kind, value)
        return "add_histogram", (series, value, step)
    try:
        return "add_scalar", (series, float(value), step)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise_users_exception(error)
        what = f"{series.kind!r} shows a number, a histogram, a matrix or a text, got {type(value).__name__}"
        raise ConfigTypeError(what) from error


def checked_matrix(kind: str, matrix: Matrix) -> Matrix:
    """Return a copy of a matrix, because it is drawn later; `kind` is named in errors.

    Raises
    ------
    ConfigTypeError
        If it contains something else than real numbers and strings on the host.
    ConfigError
        If its parts do not fit together.

    Examples
    --------
    >>> checked_matrix("similarity", Matrix(("a",), ("x", "y"), np.zeros((2, 1))))
    Traceback (most recent call last):
        ...
    ikkuna.errors.ConfigError: 'similarity' shows a matrix with 1 names of rows and 2 of columns, but its shape is (2, 1)
    """
    rows, columns = _names(kind, matrix.rows), _names(kind, matrix.columns)
    values = _array(kind, "the values of a matrix", matrix.values)
    if values.shape != (len(rows), len(columns)):
        raise ConfigError(
            f"{kind!r} shows a matrix with {len(rows)} names of rows and {len(columns)} of columns, "
            f"but its shape is {values.shape}"
        )
    if matrix.limits is None:
        return Matrix(rows, columns, values)
    limits = _array(kind, "the limits of a matrix", matrix.limits)
    if limits.shape != (2,) or not np.isfinite(limits).all() or limits[0] > limits[1]:
        raise ConfigError(f"{kind!r} shows a matrix whose limits are not two finite numbers in order")
    return Matrix(rows, columns, values, (float(limits[0]), float(limits[1])))


def _names(kind: str, names: Iterable[str]) -> tuple[str, ...]:
    try:
        found = tuple(names)
    except TypeError as error:
        raise ConfigTypeError(f"{kind!r} shows a matrix whose names are {type(names).__name__}, not strings") from error
    if wrong := [name for name in found if not isinstance(name, str)]:
        raise ConfigTypeError(f"{kind!r} shows a matrix with a name of type {type(wrong[0]).__name__}, not a string")
    return found


def check_histogram(kind: str, histogram: HistogramLike) -> None:
    """Raise an error if a histogram cannot be stored; `kind` is named in it.

    Raises
    ------
    ConfigTypeError
        If it contains something else than real numbers on the host.
    ConfigError
        If it has not as many counts as limits.
    """
    for name in NUMBERS:
        value = getattr(histogram, name)
        if type(value) is not float and _array(kind, f"{name} of a histogram", value).shape != ():
            raise ConfigTypeError(f"{kind!r} shows a histogram whose {name} is not a single number")
    limits = _array(kind, "bucket_limits of a histogram", histogram.bucket_limits)
    counts = _array(kind, "bucket_counts of a histogram", histogram.bucket_counts)
    if limits.ndim != 1 or limits.shape != counts.shape:
        raise ConfigError(
            f"{kind!r} shows a histogram with bucket_limits of shape {limits.shape} and bucket_counts of shape {counts.shape}"
        )


def _array(kind: str, what: str, values: Any) -> NDArray[np.float64]:
    """Return numbers as a new array; other values are no numbers."""
    try:
        found = np.asarray(values)
        if found.dtype.kind not in "biuf":
            raise TypeError(f"{found.dtype} is no type of real numbers")
        return np.array(found, np.float64)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise_users_exception(error)
        raise ConfigTypeError(f"{kind!r} shows {what} that are not real numbers on the host: {error}") from error
