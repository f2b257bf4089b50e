"""Launches the Triton kernels on CUDA and ROCm devices, and compiles them before the first step."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from importlib.util import find_spec
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ikkuna.numerics.elements import in_memory_order, on_device
from ikkuna.numerics.statistics.device.buffers import CODES, CountBuffer, CountOwner, KernelRows, RowBuffers
from ikkuna.numerics.statistics.float_code import SAMPLE
from ikkuna.numerics.statistics.record import HISTOGRAMS
from ikkuna.numerics.statistics.table import COLUMNS, merge_rows
from ikkuna.support.failures import log
from ikkuna.support.torch_internals import is_transformed

BLOCK = 2048
"""Elements of a tile; with twice as many, kernels for sm_90 do not fit into the registers."""

_CHUNK = 16 * BLOCK  # elements that a program reads at least
_PROGRAMS = 264  # two for each multiprocessor of an H100, as many as its registers hold
_PER_HISTOGRAM = 16  # programs that add to one histogram
_HISTOGRAMS = 16  # of a tensor, at most
_MOST_TABLES = 16
_MOST_ADDRESSES = 24  # gradients may have new addresses at every step


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


class Chunks(NamedTuple):
    """The chunks of a list of tensors on the device, their number, and that of each tensor; see the kernel ``measure_list``."""

    values: Tensor
    number: int
    counts: tuple[int, ...]


class Order(NamedTuple):
    """Which rows or histograms belong together: the owners, each once, and on the device the numbers of those of each."""

    names: tuple[Any, ...]
    order: Tensor
    begin: Tensor


class KernelTables:
    """Tables on one device; those of the last steps are kept, because a step is like the one before.

    Parameters
    ----------
    device : torch.device
        The device.

    Examples
    --------
    >>> tables = KernelTables(torch.device("cpu"))
    >>> names, order, begin = tables.order_of((7, 8, 7), (1, 2, 1))
    >>> names, order.tolist(), begin.tolist()
    ((7, 8), [0, 3, 1, 2], [0, 2, 4])
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        keep = lru_cache(_MOST_TABLES)
        self.order_of, self._chunks_of = keep(self._order), keep(self._chunks)
        self.numbers, self._addresses_of = keep(self._send), lru_cache(_MOST_ADDRESSES)(self._send)

    def addresses_of(self, tensors: TensorList) -> tuple[Tensor, bool]:
        """Return the addresses of tensors, and whether loads of 16 bytes can read them."""
        addresses = tuple(0 if x is None else x.data_ptr() for x in (*tensors.xs, *tensors.others))
        return self._addresses_of(addresses), all(address % 16 == 0 for address in addresses)

    def chunks_of(self, tensors: TensorList) -> Chunks:
        """Return the chunks ``(tensor, start / BLOCK, stop, histogram)`` that the programs read; -1 for no histogram."""
        return self._chunks_of(tuple(x.numel() for x in tensors.xs), tensors.most_counted)

    def _chunks(self, sizes: tuple[int, ...], most_counted: float) -> Chunks:
        chunks, first = [], 0
        for tensor, size in enumerate(sizes):
            starts = range(0, size, _CHUNK)
            histograms = _histograms(len(starts)) if size <= most_counted else 0
            for i, start in enumerate(starts):
                counted = first + i % histograms if histograms else -1
                chunks.append((tensor, start // BLOCK, min(start + _CHUNK, size), counted))
            first += histograms
        counts = tuple(-(-size // _CHUNK) for size in sizes)
        return Chunks(self._send([x for chunk in chunks for x in chunk]), len(chunks), counts)

    def _order(self, owners: tuple[Any, ...], counts: tuple[int, ...]) -> Order:
        """Return the owners, each once, and the numbers of those that belong to each; each owner has as many as its count says."""
        numbers: dict[Any, list[int]] = {owner: [] for owner in owners}
        for owner, count, end in zip(owners, counts, accumulate(counts), strict=True):
            numbers[owner] += range(end - count, end)
        begin = (0, *accumulate(map(len, numbers.values())))
        return Order(tuple(numbers), self._send([i for own in numbers.values() for i in own]), self._send(begin))

    def drawn_of(self, tensors: TensorList, drawn: Sequence[int]) -> Tensor:
        """Return the table ``(number of the tensor, size, histogram)`` of the tensors that are sampled."""
        sizes = [tensors.xs[i].numel() for i in drawn]
        return self.numbers(tuple(x for entry in zip(drawn, sizes, range(len(drawn)), strict=True) for x in entry))

    def _send(self, numbers: Sequence[float], dtype: torch.dtype = torch.int64) -> Tensor:
        return on_device(torch.tensor(numbers, dtype=dtype, device="cpu"), self._device)


def histograms_of(n: int, in_list: bool = False) -> int:
    """Return how many histograms a kernel uses for a tensor of `n` elements, so that few programs add to the same counts."""
    return _histograms(-(-n // _CHUNK) if in_list else shares_of(n)[1])


def _histograms(programs: int) -> int:
    return min(max(programs // _PER_HISTOGRAM, 1), _HISTOGRAMS) if programs else 0


def shares_of(n: int) -> tuple[int, int]:
    """Return how many elements of a tensor each program reads, and the number of programs."""
    if n <= _CHUNK:
        return _CHUNK, 1
    share = max(_CHUNK, -(-n // _PROGRAMS // BLOCK) * BLOCK)
    return share, -(-n // share)


DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
"""The dtypes that the kernels read, and their names in Triton."""

_DRAWN = 1024  # elements that a program draws
_BATCH = 128
_BINS = 512  # of a histogram that a program merges
_LIMIT = (1 << 31) - 1  # of a count
_DROPPED = -1  # stands for a histogram that was cleared
_NUMBER = frozenset(("n",))
_PLAIN = (Tensor, torch.nn.Parameter)


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
    warm : set
        The variants that are compiled, see `warm_up`.
    """

    def __init__(self, device: torch.device) -> None:
        self._kernels, self._language = self.import_kernels()
        self.device = device
        self._module = torch.get_device_module(device)
        self._index = (
            device.index if self._module.device_count() > 1 else None
        )  # of a device that may not be the current one
        self._tables = KernelTables(device)
        self._no_counts = torch.zeros(1, dtype=torch.int32, device=device)
        self.works = True
        self.warm: set[Any] = set()

    @staticmethod
    def import_kernels() -> tuple[Any, Any]:
        """Return the module of the kernels, and Triton's language; raise an error if there is no Triton."""
        import triton.language

        from ikkuna.numerics.statistics.device import kernels

        return kernels, triton.language

    def accepts(self, x: Tensor, fields: frozenset[str]) -> bool:
        """Return whether a kernel can read the elements of `x` from memory, and there is something to measure."""
        return (
            self.works
            and x.dtype in DTYPES
            and x.layout is torch.strided
            and not fields <= _NUMBER
            and not x.is_neg()
            and (x.is_contiguous() or in_memory_order(x).is_contiguous())
            and x.numel() <= _LIMIT
        )

    def takes(self, x: Tensor) -> bool:
        """Return whether `measure` can measure a tensor that nothing is known of.

        The answer is ``False`` for some tensors that it can measure, such as transposed ones.
        """
        return (
            self.works
            and type(x) in _PLAIN
            and x.dtype in DTYPES
            and x.layout is torch.strided
            and (x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last))
            and not is_transformed(x)
            and 0 < (n := x.numel()) <= _LIMIT
            and x.data_ptr() % 16 == 0
            and (x.storage_offset() + n) * x.itemsize <= x.untyped_storage().nbytes()
            and not x.is_neg()
        )

    def accepts_one(self, x: Tensor, fields: frozenset[str]) -> bool:
        """Return whether `measure` can measure a tensor; the kernel for one tensor is compiled for aligned ones alone."""
        return self.accepts(x, fields) and x.data_ptr() % 16 == 0

    def measure(
        self,
        row: int,
        x: Tensor,
        fields: frozenset[str],
        counts: Tensor | None = None,
        reserve: Callable[[int], Tensor] | None = None,
    ) -> KernelRows | None:
        """Measure one tensor, and add its float codes to the histograms `counts`; ``None`` if the launch fails.

        The rows are written to the memory that `reserve` returns, by default to new memory.
        """
        share, programs = shares_of(n := x.numel())
        values = (reserve or self._rows)(programs)
        done = self._launch(
            self._kernels.measure_one,
            programs,
            *(x, n, values, share // BLOCK),  # of x, the kernel takes the address
            *((self._no_counts, 1) if counts is None else (counts, len(counts))),
            COUNT=counts is not None,
            LEVEL=level_of(fields),
            BLOCK=BLOCK,
        )
        return KernelRows((row,), (programs,), values) if done else None

    def sample(self, x: Tensor, counts: Tensor, seed: int) -> bool:
        """Add the float codes of a sample to a histogram; return whether the launch succeeds."""
        arguments = x, x.numel(), counts, seed
        return self._launch(self._kernels.sample_one, SAMPLE // _DRAWN, *arguments, BLOCK=_DRAWN)

    def measure_list(
        self,
        rows: Sequence[int],
        tensors: TensorList,
        fields: frozenset[str],
        reserve: Callable[[int], Tensor] | None = None,
    ) -> KernelRows | None:
        """Measure several tensors of one dtype as `measure` does."""
        xs, others, chunks = tensors.xs, tensors.others, self._tables.chunks_of(tensors)
        addresses, are_aligned = self._tables.addresses_of(tensors)
        values = (reserve or self._rows)(chunks.number)
        has_counts = tensors.counts is not None
        done = self._launch(
            self._kernels.measure_list,
            chunks.number,
            *(addresses, len(xs), chunks.values, values, tensors.counts if has_counts else self._no_counts),
            DTYPE=getattr(self._language, DTYPES[xs[0].dtype]),
            OTHER=0 if not others else 2 if tensors.copies else 1,
            ALIGNED=are_aligned,
            COUNT=has_counts,
            LEVEL=level_of(fields),
            BLOCK=BLOCK,
        )
        return KernelRows(tuple(rows), chunks.counts, values) if done else None

    def sample_list(self, tensors: TensorList, drawn: Sequence[int], counts: Tensor, seed: int) -> bool:
        """Add the float codes of samples of the tensors numbered `drawn` to a histogram each; return whether it succeeds."""
        table = self._tables.drawn_of(tensors, drawn)
        return self._launch(
            self._kernels.sample_list,
            len(drawn) * (SAMPLE // _DRAWN),
            *(self._tables.addresses_of(tensors)[0], len(tensors.xs), table, counts, seed),
            DTYPE=getattr(self._language, DTYPES[tensors.xs[0].dtype]),
            DIFFERENCE=bool(tensors.others) and not tensors.copies,
            BLOCK=_DRAWN,
        )

    def merge(self, written: Sequence[KernelRows]) -> tuple[tuple[int, ...], Tensor]:
        """Return the numbers of the rows of the step, each once, and their values ``(rows, columns)`` on the device."""
        owners = tuple(owner for rows in written for owner in rows.owners)
        counts = tuple(count for rows in written for count in rows.counts)
        names, order, begin = self._tables.order_of(owners, counts)
        values = RowBuffers.together(written)
        merged = self._rows(len(names))
        if not self._launch(self._kernels.merge_rows, len(names), values, order, begin, merged, BATCH=_BATCH):
            merged = torch.stack([merge_rows(values[order[a:b]]) for a, b in pairwise(begin.tolist())])
        return names, merged

    def merge_counts(self, buffers: Sequence[CountBuffer]) -> tuple[tuple[tuple[int, tuple[str, ...]], ...], Tensor]:
        """Return whose histograms there are, as row and fields, and their counts ``(histograms, codes)``, int64."""
        owners = [owner for buffer in buffers for owner in buffer.owners]
        several = [buffer.counts[: len(buffer.owners)] for buffer in buffers] if len(buffers) > 1 else []
        counts = torch.cat(several) if several else buffers[0].counts
        keys = tuple((_DROPPED, ()) if owner is None else owner[:2] for owner in owners)
        scales = tuple(0.0 if owner is None else owner.scale for owner in owners)
        names, order, begin = self._tables.order_of(keys, (1,) * len(keys))
        merged = torch.empty(len(names), CODES, dtype=torch.int64, device=self.device)
        arguments = counts, order, begin, self._tables.numbers(scales, torch.float64), merged
        if not self._launch(self._kernels.merge_codes, len(names) * (CODES // _BINS), *arguments, BLOCK=_BINS):
            scaled = [(x * scale).round().long() for x, scale in zip(counts.double(), scales, strict=False)]
            groups = [[x for x, key in zip(scaled, keys, strict=True) if key == name] for name in names]
            merged = torch.stack([torch.stack(group).sum(0) for group in groups])
        return names, merged

    def _launch(self, kernel: Any, programs: int, *arguments: Any, **constants: Any) -> bool:
        try:
            if self._index is None or self._module.current_device() == self._index:
                launch(kernel, programs, *arguments, **constants)
            else:
                with self._module.device(self.device):
                    launch(kernel, programs, *arguments, **constants)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.works = False
            log.warning(
                "a Triton kernel failed, so torch's operators measure the tensors of %s: %s", self.device, error
            )
            return False
        return True

    def _rows(self, count: int) -> Tensor:
        return torch.empty(count, len(COLUMNS), dtype=torch.float64, device=self.device)


_compiled: dict[Any, Any] = {}


def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Launch a kernel; `enable_fp_fusion` has a default that depends on the version of Triton, and a warning.

    From the second launch of a variant on, the compiled kernel is called without Triton's search for it, which takes several times as
    long as the launch.  Nothing else than the key decides what is compiled: addresses are multiples of 16, but for those of a list.
    """
    first = arguments[0]
    key = kernel, first.dtype, first.device, *constants.values()
    if (compiled := _compiled.get(key)) is not None:
        compiled[programs, 1, 1](*arguments, *constants.values())
    else:  # the interpreter compiles nothing
        _compiled[key] = kernel[(programs,)](*arguments, num_warps=8, enable_fp_fusion=True, **constants)


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


@cache
def level_of(fields: frozenset[str]) -> int:
    """Return which moments the kernels compute."""
    if fields.isdisjoint(("mean", "m2", "m3", "m4")):
        return 0
    return 1 if fields.isdisjoint(("m3", "m4")) else 2


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
