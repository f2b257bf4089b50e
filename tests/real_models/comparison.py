"""Comparisons of what ikkuna publishes with what the reference has seen, and of training runs bit by bit."""

import logging
import math
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ikkuna.testing import RecordingBackend
from tests.real_models.reference import STATISTICS, Key, Observation

__all__ = ["RELATIVE_ERROR", "differences", "errors", "logged", "others_may_warn", "published", "require_none"]

RELATIVE_ERROR = 2e-6
"""The error of norms, means and variances, which are sums in single precision."""

_ROUNDED = 2.0**-23  # updates are differences in single precision


@contextmanager
def others_may_warn() -> Iterator[None]:
    """Ignore warnings inside a ``with`` block, except those that ikkuna causes, which are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", module="ikkuna")
        yield


@contextmanager
def logged() -> Iterator[list[str]]:
    """Collect the log lines of ikkuna of level WARNING and above."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ikkuna")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def published(backend: RecordingBackend) -> dict[Key, dict[str, float]]:
    """Return what was published, by kind, series and step, and by the name of the statistic."""
    found: dict[Key, dict[str, float]] = {}
    for series, value, step in backend.values:
        kind, _, statistic = series.kind.rpartition("_")
        statistics = found.setdefault((kind, series.name, step), {})
        assert statistic not in statistics, "published twice"
        statistics[statistic] = value
    return found


def require_none(found: Collection[Any], what: str) -> None:
    """Fail with the first of what was found, if anything was."""
    assert not found, f"{len(found)} {what}: {sorted(map(str, found))[:10]}"


def errors(
    key: Key,
    seen: Observation,
    found: Mapping[str, float],
    relative: float = RELATIVE_ERROR,
    statistics: Collection[str] = STATISTICS,
) -> Iterator[str]:
    """Yield a line for each of `statistics` that differs; the error of a mean is relative to the root mean square."""
    expected, scale = {name: value for name, value in seen.statistics().items() if name in statistics}, seen.scale
    assert found.keys() == expected.keys(), key
    for statistic, value in expected.items():
        shown = found[statistic]
        if statistic in ("min", "max"):
            allowed = _ROUNDED * abs(value) if key[0].endswith("_updates") else 0.0
        else:
            scales = {"mean": scale, "norm2": value, "variance": value + 0.1 * scale**2}
            allowed = relative * scales[statistic]
        if not (shown == value or abs(shown - value) <= allowed or (math.isnan(shown) and math.isnan(value))):
            yield f"{statistic} of {key} is {shown}, should be {value}"


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Return where two nested structures differ by any bit."""
    if isinstance(one, Tensor):
        return [] if isinstance(other, Tensor) and _same_bits(one, other) else [path]
    if isinstance(one, Mapping):
        if one.keys() != other.keys():
            return [path]
        return [line for key in one for line in differences(one[key], other[key], f"{path}.{key}")]
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return [path]
        return [
            line for i, pair in enumerate(zip(one, other, strict=True)) for line in differences(*pair, f"{path}.{i}")
        ]
    return [] if one == other else [path]


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if hasattr(one, "tensor_impl"):  # quantised by torchao, which cannot compare
        one, other = one.dequantize(), other.dequantize()
    return torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: Tensor) -> Tensor:
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return dense.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
