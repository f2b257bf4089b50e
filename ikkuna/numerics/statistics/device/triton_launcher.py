"""Launches the Triton kernels on CUDA and ROCm devices."""

import math
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from ikkuna.logger import log
from ikkuna.numerics.elements import in_memory_order
from ikkuna.numerics.statistics.device.code_counts import CODES, CountBuffer, CountOwner
from ikkuna.numerics.statistics.float_code import SAMPLE
from ikkuna.numerics.statistics.record import HISTOGRAMS
from ikkuna.numerics.statistics.table import COLUMNS, merge_rows

__all__ = ["TensorList", "TritonKernels", "Written", "histograms_of", "launch", "triton_kernels", "warm_up"]

_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_BLOCK = 2048  # with twice as many elements, kernels for sm_90 do not fit into the registers
_CHUNK = 16 * _BLOCK  # elements that a program reads at least
_PROGRAMS = 396  # three for each multiprocessor of an H100
_PER_HISTOGRAM = 16  # programs that add to one histogram
_HISTOGRAMS = 16  # of a tensor, at most
_DRAWN = 1024  # elements that a program draws
_BATCH = 128
_BINS = 512  # of a histogram that a program merges
_LIMIT = (1 << 31) - 1  # of a count
_MOST_TABLES = 16
_DROPPED = -1  # stands for a histogram that was cleared
_NUMBER = frozenset(("n",))
T = TypeVar("T")


class Written(NamedTuple):
    """Rows that a kernel writes.

    Parameters
    ----------
    owners : tuple of int
        The row of the step to which each of them belongs.
    values : Tensor
        ``(rows, columns)``, float64, on the device.
    """

    owners: tuple[int, ...]
    values: Tensor


class TensorList(NamedTuple):
    """Tensors of one dtype that a kernel measures together.

    Parameters
    ----------
    xs : sequence of Tensors
        The tensors.
    others : sequence of Tensors or None
        As many others, or none: what is subtracted, or with `copies`, where to copy each tensor to.
    copies : bool
        Whether `xs` are copied to `others`.
    counts : Tensor, optional
        Histograms ``(histograms, codes)``: `histograms_of` each tensor that has at most `most_counted` elements, in their order.
    most_counted : int
        See `counts`.
    """

    xs: Sequence[Tensor]
    others: Sequence[Tensor | None] = ()
    copies: bool = False
    counts: Tensor | None = None
    most_counted: float = -1


class TritonKernels:
    """The kernels on one device; a tensor takes one launch, and so does a list of tensors.

    Parameters
    ----------
    device : torch.device
        A CUDA or ROCm device.

    Attributes
    ----------
    works : bool
        Whether no launch has failed so far.  Nothing is launched after a failure.
    """

    def __init__(self, device: torch.device) -> None:
        self._kernels, self._language = self.import_kernels()
        self._device = device
        self._chunks: dict[tuple[tuple[int, ...], float], _Chunks] = {}
        self._drawn: dict[tuple[int, ...], Tensor] = {}
        self._addresses: dict[tuple[int, ...], Tensor] = {}
        self._no_counts = torch.zeros(1, dtype=torch.int32, device=device)
        self._orders: dict[tuple[Any, ...], _Order[Any]] = {}
        self._scales: dict[tuple[float, ...], Tensor] = {}
        self.works = True
        self._warm: set[tuple[torch.dtype, int, bool, bool, bool]] = set()

    @staticmethod
    def import_kernels() -> tuple[Any, Any]:
        """Return the module of the kernels, and Triton's language; raise an error if there is no Triton."""
        import triton.language

        from ikkuna.numerics.statistics.device import triton_kernels

        return triton_kernels, triton.language

    def accepts(self, x: Tensor, fields: frozenset[str]) -> bool:
        """Return whether a kernel can read the elements of `x` from memory, and there is something to measure."""
        return (
            self.works
            and x.dtype in _DTYPES
            and x.layout is torch.strided
            and not fields <= _NUMBER
            and not x.is_neg()
            and (x.is_contiguous() or in_memory_order(x).is_contiguous())
            and x.numel() <= _LIMIT
        )

    def accepts_one(self, x: Tensor, fields: frozenset[str]) -> bool:
        """Return whether `measure` can measure a tensor; the kernel for one tensor is compiled for aligned ones alone."""
        return self.accepts(x, fields) and x.data_ptr() % 16 == 0

    def measure(self, row: int, x: Tensor, fields: frozenset[str], counts: Tensor | None = None) -> Written | None:
        """Measure one tensor, and add its float codes to the histograms `counts`; ``None`` if the launch fails."""
        share, programs = _shares(x.numel())
        values = self._rows(programs)
        done = self._launch(
            self._kernels.measure_one,
            programs,
            *(in_memory_order(x), x.numel(), values, share),
            *((self._no_counts, 1) if counts is None else (counts, len(counts))),
            COUNT=counts is not None,
            LEVEL=_level(fields),
            BLOCK=_BLOCK,
        )
        return Written((row,) * programs, values) if done else None

    def sample(self, x: Tensor, counts: Tensor, seed: int) -> bool:
        """Add the float codes of a sample to a histogram; return whether the launch succeeds."""
        arguments = in_memory_order(x), x.numel(), counts, seed
        return self._launch(self._kernels.sample_one, SAMPLE // _DRAWN, *arguments, BLOCK=_DRAWN)

    def measure_list(self, rows: Sequence[int], tensors: TensorList, fields: frozenset[str]) -> Written | None:
        """Measure several tensors of one dtype; ``None`` if the launch fails."""
        xs, others, chunks = tensors.xs, tensors.others, self._chunks_of(tensors)
        addresses, are_aligned = self._addresses_of(tensors)
        values = self._rows(len(chunks.tensors))
        has_counts = tensors.counts is not None
        done = self._launch(
            self._kernels.measure_list,
            len(chunks.tensors),
            *(addresses, len(xs), chunks.values, values, tensors.counts if has_counts else self._no_counts),
            DTYPE=getattr(self._language, _DTYPES[xs[0].dtype]),
            OTHER=0 if not others else 2 if tensors.copies else 1,
            ALIGNED=are_aligned,
            COUNT=has_counts,
            LEVEL=_level(fields),
            BLOCK=_BLOCK,
        )
        return Written(tuple(rows[i] for i in chunks.tensors), values) if done else None

    def sample_list(self, tensors: TensorList, drawn: Sequence[int], counts: Tensor, seed: int) -> bool:
        """Add the float codes of samples of the tensors numbered `drawn` to a histogram each; return whether it succeeds."""
        sizes = [tensors.xs[i].numel() for i in drawn]
        table = tuple(x for entry in zip(drawn, sizes, range(len(drawn)), strict=True) for x in entry)
        if table not in self._drawn:
            self._drawn[table] = self._send(table)
        return self._launch(
            self._kernels.sample_list,
            len(drawn) * (SAMPLE // _DRAWN),
            *(self._addresses_of(tensors)[0], len(tensors.xs), self._drawn[table], counts, seed),
            DTYPE=getattr(self._language, _DTYPES[tensors.xs[0].dtype]),
            DIFFERENCE=bool(tensors.others) and not tensors.copies,
            BLOCK=_DRAWN,
        )

    def _addresses_of(self, tensors: TensorList) -> tuple[Tensor, bool]:
        """Return the addresses of tensors on the device, and whether loads of 16 bytes can read them."""
        addresses = tuple(0 if x is None else x.data_ptr() for x in (*tensors.xs, *tensors.others))
        if addresses not in self._addresses:
            if len(self._addresses) > len(_DTYPES) * 8:  # gradients may have new addresses at every step
                self._addresses.clear()
            self._addresses[addresses] = self._send(addresses)
        return self._addresses[addresses], all(address % 16 == 0 for address in addresses)

    def merge(self, written: Sequence[Written]) -> tuple[tuple[int, ...], Tensor]:
        """Return the numbers of the rows of the step, each once, and their values ``(rows, columns)`` on the device."""
        owners = tuple(owner for rows in written for owner in rows.owners)
        names, order, begin = self._order_of(owners)
        values = torch.cat([rows.values for rows in written]) if len(written) > 1 else written[0].values
        merged = self._rows(len(names))
        if not self._launch(self._kernels.merge_rows, len(names), values, order, begin, merged, BATCH=_BATCH):
            parts = [torch.stack([x for x, o in zip(values, owners, strict=True) if o == name]) for name in names]
            merged = torch.stack([merge_rows(part) for part in parts])
        return names, merged

    def merge_counts(self, buffers: Sequence[CountBuffer]) -> tuple[tuple[tuple[int, tuple[str, ...]], ...], Tensor]:
        """Return whose histograms there are, as row and fields, and their counts ``(histograms, codes)``, int64."""
        owners = [owner for buffer in buffers for owner in buffer.owners]
        several = [buffer.counts[: len(buffer.owners)] for buffer in buffers] if len(buffers) > 1 else []
        counts = torch.cat(several) if several else buffers[0].counts
        keys = tuple((_DROPPED, ()) if owner is None else owner[:2] for owner in owners)
        scales = tuple(0.0 if owner is None else owner.scale for owner in owners)
        names, order, begin = self._order_of(keys)
        if scales not in self._scales:
            if len(self._scales) > _MOST_TABLES:
                self._scales.clear()
            self._scales[scales] = self._send(scales, torch.float64)
        merged = torch.empty(len(names), CODES, dtype=torch.int64, device=self._device)
        arguments = counts, order, begin, self._scales[scales], merged
        if not self._launch(self._kernels.merge_codes, len(names) * (CODES // _BINS), *arguments, BLOCK=_BINS):
            scaled = [(x * scale).round().long() for x, scale in zip(counts.double(), scales, strict=False)]
            groups = [[x for x, key in zip(scaled, keys, strict=True) if key == name] for name in names]
            merged = torch.stack([torch.stack(group).sum(0) for group in groups])
        return names, merged

    def _order_of(self, owners: tuple[T, ...]) -> "_Order[T]":
        """Return the owners, each once, and the numbers of those that belong to each."""
        if owners not in self._orders:
            if len(self._orders) > _MOST_TABLES:
                self._orders.clear()
            names = tuple(dict.fromkeys(owners))
            number = {name: i for i, name in enumerate(names)}
            order = sorted(range(len(owners)), key=lambda i: number[owners[i]])
            ends = [i for i, (a, b) in enumerate(pairwise(order), 1) if owners[a] != owners[b]]
            self._orders[owners] = _Order(names, self._send(order), self._send((0, *ends, len(order))))
        return self._orders[owners]

    def warm_up(self, fields: Iterable[frozenset[str]], dtypes: Iterable[torch.dtype]) -> None:
        """Compile the kernels that measure any of these sets of fields, or several together, unless they are compiled already.

        A kernel takes seconds; Triton keeps it on disk.  Parameters have the given `dtypes`, outputs of layers any.
        """
        wanted = [one | other for one in fields for other in fields]
        listed = {dtype for dtype in dtypes if dtype in _DTYPES}
        for dtype in _DTYPES:
            for level, count, is_sampled in {
                (_level(f), not f.isdisjoint(HISTOGRAMS), "sampled_codes" in f) for f in wanted
            }:
                for is_counting in {False, count}:
                    variant = dtype, level, is_counting, is_sampled, dtype in listed
                    if self.works and variant not in self._warm:
                        self._warm.add(variant)
                        self._compile(*variant)

    def _compile(self, dtype: torch.dtype, level: int, is_counting: bool, is_sampled: bool, is_listed: bool) -> None:
        """Launch the kernels of a dtype once."""
        fields = frozenset((("sumsq",), ("m2",), ("m4",))[level])
        x = torch.zeros(32, dtype=dtype, device=self._device)
        counts = torch.zeros(1, CODES, dtype=torch.int32, device=self._device) if is_counting or is_sampled else None
        counted = counts if is_counting else None
        written = self.measure(0, x[:16], fields, counted)
        if is_sampled and counts is not None:
            self.sample(x, counts, 0)
        most = math.inf if is_counting else -1
        if is_listed:
            for xs, others, copies in (((x[:16],), (), False), ((x[1:16],), (), False)):
                self.measure_list((0,), TensorList(xs, others, copies, counted, most), fields)
            for copies in (False, True):
                tensors = TensorList((x[:16],), (x[16:],), copies, counted, most)
                self.measure_list((0,), tensors, fields)
                if is_sampled and counts is not None:
                    self.sample_list(tensors, (0,), counts, 0)
        if written is not None:
            self.merge([written])
        if counts is not None:
            buffer = CountBuffer(counts, None)
            buffer.owners = [CountOwner(0, ("codes",))]
            self.merge_counts([buffer])

    def _launch(self, kernel: Any, programs: int, *arguments: Any, **constants: Any) -> bool:
        module = torch.get_device_module(self._device)
        try:
            if self._device.index in (None, module.current_device()):
                launch(kernel, programs, *arguments, **constants)
            else:
                with module.device(self._device):
                    launch(kernel, programs, *arguments, **constants)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.works = False
            log.warning(
                "a Triton kernel failed, so torch's operators measure the tensors of %s: %s", self._device, error
            )
            return False
        return True

    def _rows(self, count: int) -> Tensor:
        return torch.empty(count, len(COLUMNS), dtype=torch.float64, device=self._device)

    def _chunks_of(self, tensors: TensorList) -> "_Chunks":
        key = tuple(x.numel() for x in tensors.xs), tensors.most_counted
        if key not in self._chunks:
            if len(self._chunks) > _MOST_TABLES:
                self._chunks.clear()
            chunks, first = [], 0
            for tensor, size in enumerate(key[0]):
                starts = range(0, size, _CHUNK)
                histograms = _histograms(len(starts)) if size <= tensors.most_counted else 0
                for i, start in enumerate(starts):
                    counted = first + i % histograms if histograms else -1
                    chunks.append((tensor, start // _BLOCK, min(start + _CHUNK, size), counted))
                first += histograms
            self._chunks[key] = _Chunks(self._send([x for chunk in chunks for x in chunk]), tuple(c[0] for c in chunks))
        return self._chunks[key]

    def _send(self, numbers: Sequence[float], dtype: torch.dtype = torch.int64) -> Tensor:
        host = torch.tensor(numbers, dtype=dtype, device="cpu").pin_memory()
        return host.to(self._device, non_blocking=True)


class _Chunks(NamedTuple):
    """The chunks of a list of tensors on the device, see `triton_kernels.measure_list`, and the tensor of each."""

    values: Tensor
    tensors: tuple[int, ...]


class _Order(NamedTuple, Generic[T]):
    """Which rows or histograms belong together."""

    names: tuple[T, ...]
    order: Tensor
    begin: Tensor


def histograms_of(n: int, in_list: bool = False) -> int:
    """Return how many histograms a kernel uses for a tensor of `n` elements, so that few programs add to the same counts."""
    return _histograms(-(-n // _CHUNK) if in_list else _shares(n)[1])


def _histograms(programs: int) -> int:
    return min(max(programs // _PER_HISTOGRAM, 1), _HISTOGRAMS) if programs else 0


def _shares(n: int) -> tuple[int, int]:
    """Return how many elements of a tensor each program reads, and the number of programs."""
    share = max(_CHUNK, -(-n // _PROGRAMS // _BLOCK) * _BLOCK)
    return share, -(-n // share)


def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Launch a kernel; `enable_fp_fusion` has a default that depends on the version of Triton, and a warning."""
    kernel[(programs,)](*arguments, num_warps=8, enable_fp_fusion=True, **constants)


@cache
def triton_kernels(device: torch.device) -> TritonKernels | None:
    """Return the kernels for a device; ``None`` if Triton is missing, or does not support the device."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    try:
        return TritonKernels(device)
    except Exception as error:
        log.info("Triton cannot be used: %s", error)
        return None


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
            kernels.warm_up(wanted, dtypes)


def _level(fields: frozenset[str]) -> int:
    """Return which moments the kernels compute."""
    if fields.isdisjoint(("mean", "m2", "m3", "m4")):
        return 0
    return 1 if fields.isdisjoint(("m3", "m4")) else 2
