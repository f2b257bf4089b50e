"""Statistics of the modules of a model during one forward pass."""

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ikkuna.diagnosis.preflight_checks.batch import by_sample, tensors_of
from ikkuna.numerics.activation import dead_share, unit_counters

__all__ = [
    "CallRecord",
    "ForwardRecord",
    "IndexOutsideError",
    "RectifierRecord",
    "recorded",
    "share_between_samples",
    "widened",
]

_RECTIFIERS = {
    *(functional.relu, functional.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_),
    *(functional.relu6, functional.hardtanh),
}


class IndexOutsideError(Exception):
    """An embedding got an index that it does not have."""

    def __init__(self, module: str, low: int, high: int, size: int) -> None:
        super().__init__(f"indices from {low} to {high} for an embedding of {size} rows")
        self.module, self.low, self.high, self.size = module, low, high, size


@dataclass(frozen=True)
class CallRecord:
    """The output of one call of a module.

    Parameters
    ----------
    name : str
        Name of the module.
    module : nn.Module
        The module.
    rms : float
        Root mean square of the output.
    finite : bool
        Whether all elements are finite.
    between : float
        See :func:`share_between_samples`.
    """

    name: str
    module: nn.Module
    rms: float
    finite: bool
    between: float


@dataclass(frozen=True)
class RectifierRecord:
    """The units of one call of a rectifier.

    Parameters
    ----------
    name : str
        Name of the module that called it.
    units : int
        Number of units.
    dead : float
        Share of the units that are 0 for the whole batch.
    """

    name: str
    units: int
    dead: float


@dataclass
class ForwardRecord:
    """The calls of one forward pass, in the order in which they ended.

    Parameters
    ----------
    calls : list of CallRecord
        The calls whose output contains a floating-point tensor.
    rectifiers : list of RectifierRecord
        The rectifiers, also functional ones.
    called : dict of nn.Module to int
        Position of the first call of each module.
    running : list of str
        Names of the modules that are running, the innermost last; after an exception, the modules that raised it.
    """

    calls: list[CallRecord] = field(default_factory=list)
    rectifiers: list[RectifierRecord] = field(default_factory=list)
    called: dict[nn.Module, int] = field(default_factory=dict)
    running: list[str] = field(default_factory=list)


def share_between_samples(output: Tensor, size: int | None) -> float:
    r"""Return the share of an output's energy that differs between samples.

    :math:`1 - \lVert\bar h\rVert^2 / \overline{\lVert h_n\rVert^2}` with the output :math:`h_n` of sample :math:`n`.
    NaN if the output has no axis of `size` samples, if `size` is below 2, or if all elements are 0.

    Examples
    --------
    >>> share_between_samples(torch.tensor([[1.0, 2.0], [1.0, 2.0]]), 2)
    0.0
    >>> share_between_samples(torch.tensor([[1.0], [-1.0]]), 2)
    1.0
    """
    arranged = by_sample(output.detach(), size)
    if arranged is None or len(arranged) < 2 or not output.numel():
        return math.nan
    samples = widened(arranged.reshape(len(arranged), -1))
    energy = samples.square().sum(1).mean()
    differing = (samples - samples.mean(0)).square().sum(1).mean()
    return float(differing / energy) if energy > 0 else math.nan


def widened(x: Tensor) -> Tensor:
    """Return `x` in a dtype in which squares do not overflow; some accelerators have no float64."""
    return x.double() if x.device.type == "cpu" else x.float()


@contextmanager
def recorded(model: nn.Module, names: Mapping[nn.Module, str], size: int | None) -> Iterator[ForwardRecord]:
    """Record the calls of the modules in `names` while the body runs `model`."""
    record = ForwardRecord()
    with ExitStack() as stack:
        for module, name in names.items():
            hooks = _ModuleHooks(record, name, size)
            stack.callback(module.register_forward_pre_hook(hooks.begin, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(hooks.end).remove)
        stack.enter_context(_RectifierMode(record))
        yield record


class _ModuleHooks:
    def __init__(self, record: ForwardRecord, name: str, size: int | None) -> None:
        self.record, self.name, self.size = record, name, size

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.record.called.setdefault(module, len(self.record.called))
        self.record.running.append(self.name)
        if type(module).forward in (nn.Embedding.forward, nn.EmbeddingBag.forward):  # others may add an offset
            _check_indices(self.name, module, args[0] if args else kwargs.get("input"))

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        self.record.running.pop()
        first = next((tensor for tensor in tensors_of(output) if tensor.is_floating_point()), None)
        if first is None or not first.numel():
            return
        self.record.calls.append(_call_record(self.name, module, first.detach(), self.size))


def _call_record(name: str, module: nn.Module, output: Tensor, size: int | None) -> CallRecord:
    rms = float(widened(output).square().mean().sqrt())
    return CallRecord(name, module, rms, bool(output.isfinite().all()), share_between_samples(output, size))


def _check_indices(name: str, embedding: Any, indices: Any) -> None:
    """Raise before the kernel does: on a GPU it would end every later use of the device."""
    if isinstance(indices, Tensor) and indices.numel() and not indices.is_floating_point():
        low, high, size = int(indices.min()), int(indices.max()), embedding.num_embeddings
        if low < 0 or high >= size:
            raise IndexOutsideError(name, low, high, size)


class _RectifierMode(TorchFunctionMode):
    def __init__(self, record: ForwardRecord) -> None:
        self.record = record

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_rectifier = func in _RECTIFIERS and _is_rectifier(func, args, kwargs or {})
        # the input is 0 everywhere behind a branch that begins at zero, which the first update changes
        is_off = is_rectifier and not _has_signal(args[0] if args else (kwargs or {}).get("input"))
        result = func(*args, **(kwargs or {}))
        if is_rectifier and not is_off and isinstance(result, Tensor):
            counters = unit_counters(result)
            dead = float(dead_share(counters, inactivity=0.0))
            name = self.record.running[-1] if self.record.running else ""
            self.record.rectifiers.append(RectifierRecord(name, counters.shape[1], dead))
        return result


def _has_signal(value: Any) -> bool:
    """Return whether a tensor has an element that is not 0; call it before a rectifier changes the tensor in place."""
    return isinstance(value, Tensor) and bool(value.detach().any())


def _is_rectifier(func: Any, args: Any, kwargs: Any) -> bool:
    if func is not functional.hardtanh:
        return True
    return bool((args[1] if len(args) > 1 else kwargs.get("min_val", -1.0)) == 0)
