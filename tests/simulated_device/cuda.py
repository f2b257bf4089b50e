"""The work of CUDA for an operator of torch: the number of kernels and bytes, and whether the host waits."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["MIXES_DEVICES", "bytes_of", "converted_bytes", "launches_of", "waits"]

_TAKE_MASKS = {"index_put", "index_put_", "_index_put_impl_"}  # "index" with a mask calls "nonzero"
MIXES_DEVICES = {*_TAKE_MASKS, "index", "_foreach_copy_"}
"""Operators that take tensors of several devices."""

_WAIT = {
    *("nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount"),
    *("repeat_interleave", "equal", "_linalg_svd", "_linalg_eigh"),
}
_CONVERT = {"sum", "nansum", "mean", "prod", "linalg_vector_norm", "norm"}
_TENSORS_PER_LAUNCH = {1: 110, 2: 64, 3: 48, 4: 36}  # of multi_tensor_apply, by the number of lists
_BLOCKS_PER_LAUNCH = 320
_BLOCK = 65_536


def bytes_of(tensors: Tensor | Iterable[Tensor]) -> int:
    """Return the bytes of memory that tensors occupy; an expanded axis occupies one element."""
    total = 0
    for x in (tensors,) if isinstance(tensors, Tensor) else tensors:
        if 0 in x.stride():
            sizes = (n if stride else min(n, 1) for n, stride in zip(x.shape, x.stride(), strict=True))
            total += x.element_size() * math.prod(sizes)
        else:
            total += x.element_size() * x.numel()
    return total


def waits(name: str, args: Any) -> bool:
    """Return whether the host must know data of the device to continue."""
    if name in _TAKE_MASKS:
        return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    return name in _WAIT


def converted_bytes(name: str, read: list[Tensor], written: Any) -> int:
    """Return the bytes of the copy that a reduction makes if its result has another dtype (ReduceOpsUtils.h)."""
    if name not in _CONVERT or not isinstance(written, Tensor) or written.dtype == read[0].dtype:
        return 0
    if read[0].element_size() == 2 and written.dtype is torch.float32:
        return 0
    return read[0].numel() * written.element_size()


def launches_of(name: str, args: Any) -> int:
    """Return the number of kernels of an operator: one, but lists of tensors are split (MultiTensorApply.cuh)."""
    lists = [x for x in args if isinstance(x, list | tuple) and x and isinstance(x[0], Tensor)]
    if not name.startswith(("_foreach_", "_fused_")) or not lists:
        return 1
    count = tensors = blocks = 0
    for x in lists[0]:
        tensors, blocks = tensors + 1, blocks + -(-x.numel() // _BLOCK)
        if tensors == _TENSORS_PER_LAUNCH.get(len(lists), 30) or blocks >= _BLOCKS_PER_LAUNCH:
            count, tensors, blocks = count + max(1, blocks // _BLOCKS_PER_LAUNCH), 0, blocks % _BLOCKS_PER_LAUNCH
    return count + (tensors > 0 or blocks > 0) + 2 * (name == "_foreach_norm")  # which also clears and adds up its sums
