"""Compiles the Triton kernels before the first step."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from ikkuna.numerics.statistics.device.code_counts import CODES, CountBuffer, CountOwner
from ikkuna.numerics.statistics.device.kernel_tables import TensorList
from ikkuna.numerics.statistics.device.triton_launcher import DTYPES, TritonKernels, level_of, triton_kernels
from ikkuna.numerics.statistics.record import HISTOGRAMS

__all__ = ["warm_up"]


def warm_up(parameters: Iterable[tuple[torch.device, torch.dtype]], fields: Iterable[frozenset[str]]) -> None:
    """Compile the kernels before the first step.

    Parameters
    ----------
    parameters : iterable of (torch.device, torch.dtype)
        Devices and dtypes of parameters.
    fields : iterable of frozenset of str
        What subscribers want to measure.
    """
    by_device: dict[torch.device, list[torch.dtype]] = {}
    for device, dtype in parameters:
        by_device.setdefault(device, []).append(dtype)
    wanted = list(fields)
    for device, dtypes in by_device.items():
        if device.type != "cpu" and wanted and (kernels := triton_kernels(device)) is not None:
            _compile_all(kernels, wanted, dtypes)


def _compile_all(kernels: TritonKernels, fields: Iterable[frozenset[str]], dtypes: Iterable[torch.dtype]) -> None:
    """Compile the kernels that measure any of these sets of fields, or several together, unless they are compiled already.

    A kernel takes seconds; Triton keeps it on disk.  Parameters have the given `dtypes`, outputs of layers any.
    """
    wanted = [one | other for one in fields for other in fields]
    listed = {dtype for dtype in dtypes if dtype in DTYPES}
    variants = {(level_of(f), not f.isdisjoint(HISTOGRAMS), "sampled_codes" in f) for f in wanted}
    for dtype in DTYPES:
        for level, count, is_sampled in variants:
            for is_counting in {False, count}:
                variant = _Variant(dtype, level, is_counting, is_sampled, dtype in listed)
                if kernels.works and variant not in kernels.warm:
                    kernels.warm.add(variant)
                    _compile(kernels, variant)


class _Variant(NamedTuple):
    """A dtype, the moments, and whether all elements are counted, a sample is, and there are parameters of this dtype."""

    dtype: torch.dtype
    level: int
    is_counting: bool
    is_sampled: bool
    is_listed: bool


def _compile(kernels: TritonKernels, variant: _Variant) -> None:
    """Launch the kernels of a variant once."""
    fields = frozenset((("sumsq",), ("m2",), ("m4",))[variant.level])
    x = torch.zeros(32, dtype=variant.dtype, device=kernels.device)
    counts = None
    if variant.is_counting or variant.is_sampled:
        counts = torch.zeros(1, CODES, dtype=torch.int32, device=kernels.device)
    counted = counts if variant.is_counting else None
    written = kernels.measure(0, x[:16], fields, counted)
    if variant.is_sampled and counts is not None:
        kernels.sample(x, counts, 0)
    if variant.is_listed:
        most = math.inf if variant.is_counting else -1
        for part in (x[:16], x[1:16]):
            kernels.measure_list((0,), TensorList((part,), (), False, counted, most), fields)
        for copies in (False, True):
            tensors = TensorList((x[:16],), (x[16:],), copies, counted, most)
            kernels.measure_list((0,), tensors, fields)
            if variant.is_sampled and counts is not None:
                kernels.sample_list(tensors, (0,), counts, 0)
    if written is not None:
        kernels.merge([written])
    if counts is not None:
        buffer = CountBuffer(counts, None)
        buffer.owners = [CountOwner(0, ("codes",))]
        kernels.merge_counts([buffer])
