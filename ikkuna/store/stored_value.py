"""Decodes what is no number: histograms and pages of text of event files, when they are needed."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ikkuna.store.event_reader import KIND_HISTOGRAM, KIND_TENSOR, MalformedError, fields, floats, number

_FLOATS = {1: "<f4", 2: "<f8", 3: "<i4", 9: "<i8"}
_TEXT = 8  # string_val of a tensor


@dataclass(frozen=True, slots=True)
class StoredHistogram:
    """A stored histogram.

    Parameters
    ----------
    min, max, num, sum, sum_squares : float
        Extremes, number, sum and sum of squares of the values.
    bucket_limits, bucket_counts : ndarray (buckets,)
        The right limit of each bucket, and the number of values in it.
    """

    min: float
    max: float
    num: float
    sum: float
    sum_squares: float
    bucket_limits: NDArray[np.float64]
    bucket_counts: NDArray[np.float64]


class StoredValue(NamedTuple):
    """Where a value is in an event file.

    Parameters
    ----------
    path : Path
        The file.
    step : int
        The step.
    time : float
        The time.
    place, size : int
        Position and size of the ``Summary.Value``.
    """

    path: Path
    step: int
    time: float
    place: int
    size: int

    def read(self) -> bytes:
        """Return the bytes; fewer if the file has been shortened."""
        with open(self.path, "rb") as file:
            file.seek(self.place)
            return file.read(self.size)

    def histogram(self) -> StoredHistogram | None:
        """Return the histogram; ``None`` if it is damaged."""
        return decode_histogram(self.read())


class ReadHistogram(NamedTuple):
    """A histogram that has been read already.

    Parameters
    ----------
    step : int
        The step.
    value : StoredHistogram
        The histogram.
    """

    step: int
    value: StoredHistogram

    def histogram(self) -> StoredHistogram:
        """Return the histogram."""
        return self.value


def _part(data: bytes, wanted: int) -> bytes:
    """Return the last field of this number."""
    found = b""
    for field, value, _ in fields(data):
        if field == wanted and isinstance(value, bytes):
            found = value
    return found


def decode_histogram(data: bytes) -> StoredHistogram | None:
    """Return the histogram in a ``Summary.Value``; ``None`` if there is none."""
    numbers = dict.fromkeys(range(1, 6), 0.0)
    limits, counts = list[float](), list[float]()
    try:
        for field, value, _ in fields(_part(data, KIND_HISTOGRAM)):
            if field in numbers:
                numbers[field] = number(value)
            elif field == 6:
                limits += floats(value)
            elif field == 7:
                counts += floats(value)
    except MalformedError:
        return None
    if len(limits) != len(counts):
        return None
    low, high, count, total, squares = numbers.values()
    return StoredHistogram(low, high, count, total, squares, np.array(limits), np.array(counts))


def decode_text(data: bytes) -> str | None:
    """Return the text in a ``Summary.Value``; ``None`` if there is none."""
    try:
        texts = [value for field, value, _ in fields(_part(data, KIND_TENSOR)) if field == _TEXT]
    except MalformedError:
        return None
    first = texts[0] if texts else None
    return first.decode(errors="replace") if isinstance(first, bytes) else None


def plugin_name(data: bytes) -> str:
    """Return the name of the plugin of TensorBoard that shows a ``Summary.Value``; empty if it names none."""
    try:
        return _part(_part(_part(data, 9), 1), 1).decode(errors="replace")
    except MalformedError:
        return ""


def decode_tensor_scalar(data: bytes) -> float | None:
    """Return the number in the tensor of a ``Summary.Value``; ``None`` if it has none or several.

    TensorFlow writes scalars as tensors.
    """
    kind, content, numbers = 0, b"", list[float]()
    try:
        for field, value, _ in fields(_part(data, KIND_TENSOR)):
            if field == 1 and isinstance(value, int):
                kind = value
            elif field == 4 and isinstance(value, bytes):
                content = value
            elif field in (5, 6) and isinstance(value, bytes):  # float_val, double_val
                numbers += np.frombuffer(value, "<f4" if field == 5 else "<f8").tolist()
        if content and kind in _FLOATS:
            numbers = np.frombuffer(content, _FLOATS[kind]).tolist()
    except (MalformedError, ValueError):
        return None
    return float(numbers[0]) if len(numbers) == 1 else None
