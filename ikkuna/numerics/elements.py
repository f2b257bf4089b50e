"""Access to the numbers of tensors of every dtype and layout, and their conversion to numpy arrays."""

import ctypes
import math
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ikkuna.errors import ConfigTypeError
from ikkuna.support.failures import switched
from ikkuna.support.torch_internals import holds_other_tensors, is_transformed
from ikkuna.support.undisturbed import gradients


@cache
def has_float64(device: torch.device) -> bool:
    """Return whether a device computes in float64; ``mps`` and some GPUs of Intel do not.

    The first call for a device multiplies a number there, without waiting for the result.

    Examples
    --------
    >>> has_float64(torch.device("cpu"))
    True
    """
    if device.type in ("cpu", "cuda", "meta"):
        return True
    try:
        torch.ones((), dtype=torch.float64, device=device).mul_(2)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, RuntimeError):
        return False
    return True


def widest_float(x: Tensor) -> torch.dtype:
    """Return float64, or float32 on a device without float64.

    Examples
    --------
    >>> widest_float(torch.ones(2))
    torch.float64
    """
    return torch.float64 if has_float64(x.device) else torch.float32


def as_float64(values: Any) -> Tensor:
    """Return data as a detached float64 tensor, on its own device if that has float64, else on the host.

    Complex numbers are replaced by their magnitudes; those that are added or multiplied are given as :func:`as_reals`.

    Examples
    --------
    >>> as_float64(torch.ones(2)).dtype, as_float64([1, 3 + 4j]).tolist()
    (torch.float64, [1.0, 5.0])
    """
    if isinstance(values, Tensor):
        x = values.detach()
        x = x if has_float64(x.device) else x.cpu()
        return x.to(torch.complex128).abs() if x.is_complex() else x.double()
    return torch.from_numpy(to_array(values))


def as_reals(x: Tensor) -> Tensor:
    """Return the real and imaginary parts of complex numbers along a new last axis; other tensors as they are.

    Examples
    --------
    >>> as_reals(torch.tensor([1 + 2j])).tolist()
    [[1.0, 2.0]]
    """
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


_PLAIN = (Tensor, nn.Parameter)


def is_special(x: Tensor) -> bool:
    """Return whether the stored elements of `x` may be other numbers than those that it stands for.

    Examples
    --------
    >>> codes = torch.ones(2, dtype=torch.uint8)
    >>> is_special(codes), is_special(nn.Parameter(codes, requires_grad=False))
    (False, True)
    """
    return type(x) is not Tensor and (type(x) is not nn.Parameter or not has_fractions(x))


def has_fractions(x: Tensor) -> bool:
    """Return whether the dtype of `x` is floating or complex, so that it can have a gradient."""
    return x.is_floating_point() or x.is_complex()


def dequantized(x: Tensor) -> Tensor | None:
    """Return the numbers that `x` stands for as a plain tensor; ``None`` if `x` does not offer them.

    A subclass offers them by a method ``dequantize`` of its own, as those of torchao do; weights of bitsandbytes in 4 bits are
    unpacked by bitsandbytes.  Elements of other integer parameters are codes of an unknown format.

    Examples
    --------
    >>> dequantized(torch.ones(2, dtype=torch.uint8))
    tensor([1, 1], dtype=torch.uint8)
    >>> dequantized(nn.Parameter(torch.ones(2, dtype=torch.uint8), requires_grad=False)) is None
    True
    """
    offered = x.dequantize if x.is_quantized or type(x).dequantize is not Tensor.dequantize else _unpacking(x)
    if offered is None:
        return x if has_fractions(x) or type(x) is Tensor else None
    found = switched([gradients(False)], offered)
    return found if type(found) in _PLAIN and has_fractions(found) else None


def _unpacking(x: Tensor) -> Callable[[], Tensor] | None:
    """Return the function that unpacks a weight of bitsandbytes."""
    state = getattr(x, "quant_state", None) if type(x).__name__ == "Params4bit" else None
    functional: Any = sys.modules.get("bitsandbytes.functional")
    if state is None or functional is None:
        return None
    return lambda: cast(Tensor, functional.dequantize_4bit(x.data, state))


CHUNK = 131_072
"""The number of elements that stay in the cache during several reductions."""


def has_numbers(x: Tensor) -> bool:
    """Return whether `x` has numbers that can be read.

    A meta, fake, nested or functorch-wrapped tensor has none, nor has a tensor whose storage was freed (see :func:`has_storage`).

    Examples
    --------
    >>> has_numbers(torch.ones(2)), has_numbers(torch.ones(2, device="meta"))
    (True, False)
    """
    return not (x.is_meta or x.is_nested or type(x).__name__ == "FakeTensor" or is_transformed(x)) and has_storage(x)


def has_storage(x: Tensor) -> bool:
    """Return whether the storage of `x` is large enough for its elements; of a sparse tensor or a wrapper, those of its parts.

    torch reads beyond the end of a storage that was shrunk after the tensor was created, as sharded training does
    to free memory.

    Examples
    --------
    >>> x = torch.ones(4)
    >>> resized = x.untyped_storage().resize_(8)
    >>> has_storage(x), has_storage(x[:2])
    (False, True)
    """
    if x.layout is not torch.strided:
        try:
            return all(map(has_storage, _parts(x)))
        except RuntimeError:  # torch does not return a part that lies beyond its storage
            return False
    if not x.numel():
        return True
    if x.is_contiguous():
        last = x.storage_offset() + x.numel() - 1
    else:
        last = x.storage_offset() + sum([(size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)])
    if (last + 1) * x.element_size() > x.untyped_storage().nbytes() * _PER_BYTE.get(x.dtype, 1):
        return False
    return type(x) is Tensor or all(map(has_storage, _wrapped(x)))


_PER_BYTE = {torch.quint4x2: 2, torch.quint2x4: 4}


def _parts(x: Tensor) -> list[Tensor]:
    """Return the tensors that a sparse tensor consists of."""
    if x.layout is torch.sparse_coo:
        return [x._indices(), x._values()]
    if x.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [x.crow_indices(), x.col_indices(), x.values()]
    if x.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [x.ccol_indices(), x.row_indices(), x.values()]
    return []


def _wrapped(x: Any) -> list[Tensor]:
    """Return the tensors inside a wrapper; other tensors have none."""
    if not holds_other_tensors(x):
        return []
    return [inner for name in x.__tensor_flatten__()[0] if isinstance(inner := getattr(x, name), Tensor)]


def is_plain(*tensors: Tensor | None) -> bool:
    """Return whether all are non-empty dense tensors of one dtype, float32 or float64, without a wrapper.

    Autocast, function transforms and subclasses have their own derivatives, so tensors under these are not plain.

    Examples
    --------
    >>> is_plain(torch.ones(2), None), is_plain(torch.ones(2), torch.ones(2, dtype=torch.float64)), is_plain(torch.ones(0))
    (True, False, False)
    """
    given = [t for t in tensors if t is not None]
    return all(
        type(t) in (Tensor, torch.nn.Parameter)
        and t.dtype == given[0].dtype
        and t.dtype in (torch.float32, torch.float64)
        and t.layout is torch.strided
        and has_numbers(t)
        and t.numel() > 0
        and not torch.is_autocast_enabled(t.device.type)
        for t in given
    )


def readable(x: Tensor, magnitudes: bool = True) -> tuple[Tensor, int] | None:
    """Return the stored numbers of `x` as a strided tensor, and the number of zeros that are not stored.

    The result of a sparse tensor is its coalesced values, of a complex tensor its magnitudes (itself without `magnitudes`).
    Quantised tensors are dequantised; integers and booleans become float64 (float32 on a device without float64), fp8 becomes float32.
    The result is ``None`` if there are no numbers, see :func:`has_numbers`, or if a quantised tensor does not offer them.
    """
    if not has_numbers(x):
        return None
    if x.is_quantized or is_special(x):
        numbers = dequantized(x)
        if numbers is None:
            return None
        x = numbers
    implied = 0
    if x.layout is not torch.strided:
        total = x.numel()
        x = x.coalesce().values() if x.layout is torch.sparse_coo else _values(x)
        implied = total - x.numel()
    if x.is_complex():
        return x.abs() if magnitudes else x, implied
    if not x.is_floating_point():
        x = x.to(widest_float(x))
    elif x.element_size() == 1:
        x = x.float()
    return x, implied


def dense(x: Tensor) -> Tensor:
    """Return `x` without its graph, and with all its elements stored if it is sparse."""
    x = x.detach()
    return x if x.layout is torch.strided else x.to_dense()


def stored(x: Tensor) -> Tensor:
    """Return `x` with its elements in memory; a lazy negative and a lazy zero are copied.

    Examples
    --------
    >>> stored(torch.tensor([1 + 2j]).conj().imag).is_neg()
    False
    """
    return x.clone() if x.is_neg() or x._is_zerotensor() else x


def host_array(x: Tensor) -> NDArray[Any]:
    """Return the elements of a tensor on the host as an array, which shares their memory if they are contiguous.

    ``Tensor.numpy`` marks the storage as not resizable for as long as it lives, which breaks sharded training, for example.

    Examples
    --------
    >>> x = torch.ones(2, 2)
    >>> host_array(x).tolist(), x.untyped_storage().resizable()
    ([[1.0, 1.0], [1.0, 1.0]], True)
    """
    x = stored(x.detach()).contiguous()
    if not x.numel():
        return np.empty(x.shape, _NUMPY[x.dtype])
    memory: Any = (ctypes.c_char * (x.numel() * x.element_size())).from_address(x.data_ptr())
    memory.owner = x  # keeps the memory as long as the array lives
    return np.frombuffer(memory, _NUMPY[x.dtype]).reshape(x.shape)


_NUMPY: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.float64: np.float64, torch.uint8: np.uint8}


def on_device(x: Tensor, device: torch.device | str) -> Tensor:
    """Return a copy of a tensor of the host on a device, without waiting for the device; on the host, the tensor itself.

    A copy from ordinary memory waits until everything that the device has to do is done; one from pinned memory does not.

    Examples
    --------
    >>> x = torch.ones(2)
    >>> on_device(x, "cpu") is x
    True
    """
    device = torch.device(device)
    if device.type in ("cpu", x.device.type):
        return x.to(device)
    if x.layout is not torch.strided or not hasattr(torch.get_device_module(device), "Stream"):
        return x.to(device)
    return (x if x.is_pinned() else x.pin_memory()).to(device, non_blocking=True)


def all_finite(x: Tensor) -> Tensor | None:
    """Return whether all elements are finite, 0-d and on the device of `x`; ``None`` for a tensor without numbers.

    It checks the extrema in one pass without a copy; ``isfinite().all()`` costs as much as twenty sums.
    An empty tensor is finite.

    Examples
    --------
    >>> all_finite(torch.tensor([1.0, 3e38])), all_finite(torch.tensor([1.0, torch.nan]))
    (tensor(True), tensor(False))
    """
    if (read := readable(x.detach())) is None:
        return None
    if not read[0].numel():
        return torch.ones((), dtype=torch.bool, device=read[0].device)
    low, high = torch.aminmax(read[0])
    return low * 0 == high * 0  # NaN differs from itself; `isfinite` is several operations


def is_true_on_host(x: Tensor) -> bool:
    """Return whether a 0-d tensor is true, and on the host, where that is read without waiting.

    Examples
    --------
    >>> is_true_on_host(torch.tensor(True)), is_true_on_host(torch.tensor(True, device="meta"))
    (True, False)
    """
    return x.is_cpu and bool(x)


def _values(x: Tensor) -> Tensor:
    return x.values() if hasattr(x, "values") and not x.is_mkldnn else x.to_dense()


def in_memory_order(x: Tensor) -> Tensor:
    """Return `x` with its axes in memory order, which is contiguous if that is possible without a copy.

    Examples
    --------
    >>> in_memory_order(torch.ones(2, 3).t()).is_contiguous()
    True
    """
    return x.permute(sorted(range(x.ndim), key=x.stride, reverse=True))


def without_repeats(x: Tensor) -> tuple[Tensor, int]:
    """Return `x` without its broadcast axes, and how often each of the remaining elements occurs in `x`.

    Examples
    --------
    >>> few, times = without_repeats(torch.ones(3, 1, 2).expand(3, 5, 2))
    >>> few.shape, times
    (torch.Size([3, 2]), 5)
    """
    if not _is_dense(x) or 0 not in x.stride():
        return x, 1
    axes = [i for i, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)) if size > 1 and not stride]
    times = math.prod(x.shape[i] for i in axes)
    for axis in reversed(axes):
        x = x.select(axis, 0)
    return x, times


def _is_dense(x: Tensor) -> bool:
    return x.layout is torch.strided and not x.is_quantized and not is_special(x)


def pieces(x: Tensor, size: int = 1 << 20) -> Iterator[Tensor]:
    """Yield the elements of a tensor on one axis, in parts of at most `size` elements if they would have to be copied.

    A sparse or quantised tensor is yielded as it is.

    Examples
    --------
    >>> overlapping = torch.arange(4.0).as_strided((3, 2), (1, 1))
    >>> [part.tolist() for part in pieces(overlapping, size=2)]
    [[0.0, 1.0], [1.0, 2.0], [2.0, 3.0]]
    """
    if not _is_dense(x):
        yield x
        return
    is_flat = x.is_contiguous() or in_memory_order(x).is_contiguous()
    if is_flat or x.numel() <= size:
        yield flatten(x).contiguous() if x.numel() <= CHUNK else flatten(x)
        return
    axis = max(range(x.ndim), key=lambda i: x.shape[i])
    rest = x.numel() // x.shape[axis]
    for part in x.split(max(size // rest, 1), axis):
        yield from pieces(part, size)


def flatten(x: Tensor) -> Tensor:
    """Return the elements of `x` as one axis, in an order that needs no copy; expanded tensors are copied."""
    if x.is_contiguous():
        return x.view(-1)
    ordered = in_memory_order(x)
    return ordered.view(-1) if ordered.is_contiguous() else x.reshape(-1)


def to_array(data: Any) -> NDArray[np.float64]:
    """Return a float64 copy of a tensor (of any device and dtype), an array or nested lists of them.

    Complex numbers are replaced by their magnitudes.

    Raises
    ------
    ConfigTypeError
        If the data contains other objects than numbers, or parts of different shapes.

    Examples
    --------
    >>> to_array([torch.tensor([1, 2]), [3, 4]])
    array([[1., 2.],
           [3., 4.]])
    """
    if isinstance(data, Tensor):
        return _tensor_to_array(data)
    if isinstance(data, list | tuple) and any(isinstance(item, Tensor | list | tuple) for item in data):
        parts = [to_array(item) for item in data]
        if len({part.shape for part in parts}) > 1:
            shapes = sorted({str(part.shape) for part in parts})
            raise ConfigTypeError(f"expected parts of one shape, got {', '.join(shapes)}")
        return np.stack(parts)
    try:
        array = np.asarray(data)
        return np.array(np.abs(array) if np.iscomplexobj(array) else array, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigTypeError(f"expected numbers, got {type(data).__name__}: {error}") from error


def _tensor_to_array(tensor: Tensor) -> NDArray[np.float64]:
    tensor = tensor.detach()
    tensor = tensor.abs() if tensor.is_complex() else tensor
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return host_array(tensor.cpu().double().contiguous()).copy()
