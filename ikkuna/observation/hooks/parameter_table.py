"""The table of parameters: records weights, gradients, updates and optimizer states around the steps of optimizers."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from ikkuna.distributed.dtensor import distribute_like, divided, is_distributed, local_tensor
from ikkuna.metrics.messages.kinds import UNCLIPPED_KINDS
from ikkuna.numerics.elements import has_numbers
from ikkuna.numerics.statistics import HISTOGRAMS
from ikkuna.numerics.statistics.host import HostStatistics, ListCounts, counted_field
from ikkuna.numerics.statistics.native.kernels import NOTHING, PYTHON, READABLE, Library, ListMemory, flags_of
from ikkuna.observation.hooks.context import HookContext
from ikkuna.observation.rows.plan import Key, Plan, RowIndex, Site, Task
from ikkuna.observation.steps.forwards import UNCLIPPED_PART
from ikkuna.support.failures import raise_users_exception
from ikkuna.support.modules import NamedParameter

_WEIGHTS = "weights", "biases"
_UPDATES = "weight_updates", "bias_updates"
_GRADIENTS = "weight_gradients", "bias_gradients"
_GRADIENT = attrgetter("grad")
_ALIGNED = 64
_CACHED = 16
_KEPT_STEPS = 100

Wanted = Mapping[int, Key]
"""By the id of a parameter, the site and path of one of its tensors, if that is wanted."""

_Host = tuple[Library, HostStatistics, torch.Generator]
T = TypeVar("T")


class CopyMemory:
    """Memory for copies, which is kept between steps.

    The first write to new memory costs at least as much as the copy itself.  numpy asks for huge pages for 4 MiB and more.
    """

    def __init__(self) -> None:
        self.buffers: dict[int, NDArray[np.uint8]] = {}

    @property
    def nbytes(self) -> int:
        """Number of bytes that are kept; buffers that are used are not counted."""
        return sum(buffer.nbytes for buffer in [*self.buffers.values()])

    def take(self, size: int) -> NDArray[np.uint8]:
        """Return the smallest kept buffer of at least `size` bytes; if there is none, free the others and return a new one.

        Raises
        ------
        MemoryError
            If there is no memory.
        """
        large = sorted([(buffer.nbytes, key) for key, buffer in [*self.buffers.items()] if buffer.nbytes >= size])
        for _, key in large:
            if (found := self.buffers.pop(key, None)) is not None:  # else another thread has taken it
                return found
        self.buffers.clear()
        return np.empty(size, np.uint8)

    def give_back(self, buffer: NDArray[np.uint8]) -> None:
        """Keep a buffer for the next list."""
        self.buffers[id(buffer)] = buffer

    def release(self) -> None:
        """Free the buffers that are not used."""
        self.buffers.clear()


class _RowAddresses:
    """The rows of a list of tensors.

    Parameters
    ----------
    numbers : array of int64
        Their numbers.
    """

    def __init__(self, numbers: NDArray[np.int64]) -> None:
        self.numbers = numbers
        self._table: object = None  # the last one, which is kept, so that no other table gets its memory
        self._addresses = numbers

    def addresses(self, statistics: HostStatistics) -> NDArray[np.int64]:
        """Return the addresses of the rows in the table of `statistics`, which a step mostly shares with the one before."""
        if statistics.values is not self._table:
            self._addresses = statistics.addresses(self.numbers)
            self._table = statistics.values
        return self._addresses


class ParameterList:
    """Some parameters of which a plan wants one tensor each, or the update.

    Tensors of the host that the kernels can read are measured in one native call, which checks each of them, and copied in the same
    pass.  The copies lie in one buffer, until the differences from them are measured.

    Parameters
    ----------
    index : RowIndex
        The recorder's rows.
    plan : Plan
        What is measured.
    parameters : sequence of NamedParameter
        Those whose tensors are measured.
    wanted : mapping
        The sites and paths of these tensors.
    changing : sequence of NamedParameter
        Those whose weights change now.
    updates : mapping
        The sites and paths of updates.

    Attributes
    ----------
    named, parameters : list
        The parameters of which something is wanted.
    keys : list of Key or None
        The site and path of the tensor of each; ``None`` if it is not measured.
    measured, updated : frozenset of int
        The ids of the parameters of which the tensor, or the update, is wanted.
    with_measurers : list of int
        The positions of those of which subscribers measure the tensor themselves.
    """

    def __init__(
        self,
        index: RowIndex,
        plan: Plan,
        parameters: Sequence[NamedParameter],
        wanted: Wanted,
        changing: Sequence[NamedParameter],
        updates: Wanted,
    ) -> None:
        found = {id(each.parameter): each for each in (*parameters, *changing)}
        self.measured = frozenset(id(each.parameter) for each in parameters).intersection(wanted)
        self.updated = frozenset(id(each.parameter) for each in changing).intersection(updates)
        ids = [key for key in found if key in self.measured or key in self.updated]
        self.named = [found[key] for key in ids]
        self.parameters = [named.parameter for named in self.named]
        self.keys = [wanted[key] if key in self.measured else None for key in ids]
        is_native = np.array([_is_native(x) for x in self.parameters], np.bool_)
        self._is_native = bool(is_native.any())
        tasks = [None if key is None else plan.task(key[0].kind, key[0].module) for key in self.keys]
        self.with_measurers = [i for i, task in enumerate(tasks) if task is not None and task.measurers]
        counts = [x.numel() if native else 0 for x, native in zip(self.parameters, is_native, strict=True)]
        self._rows, self._flags = _of_keys(index, self.keys, map(_flags_of_tensor, tasks))
        self._counts = ListCounts([*map(_counted, tasks, self._flags)], counts, self._rows.numbers)
        after = [updates[key] if key in self.updated else None for key in ids]
        self._is_updated = np.array([key is not None for key in after], np.bool_)
        tasks = [None if key is None else plan.task(key[0].kind, key[0].module) for key in after]
        self._update_rows, self._update_flags = _of_keys(index, after, map(_flags_of_update, tasks))
        self._update_counts = ListCounts([*map(_counted, tasks, self._update_flags)], counts, self._update_rows.numbers)
        is_copied = self._is_updated & is_native & (self._update_flags >= 0)
        sizes = [x.nbytes if copied else 0 for x, copied in zip(self.parameters, is_copied, strict=True)]
        self._memory = ListMemory(len(ids), sizes if self.updated else None)
        padded = np.array([-(-size // _ALIGNED) * _ALIGNED for size in sizes], np.int64)
        self._is_copied, self._ends = is_copied, np.cumsum(padded)
        self._offsets = self._ends - padded
        self._begin, self._places = 0, self._offsets  # where the copies were in the last step, and the address of each
        self._buffer: tuple[CopyMemory, NDArray[np.uint8]] | None = None

    def measure(self, host: _Host | None, tensors: Sequence[Tensor | None]) -> list[int]:
        """Measure the tensors, and copy them if `take` has found memory; return the positions of those that are left."""
        if host is None or not self._is_native:
            return [i for i, key in enumerate(self.keys) if key is not None and tensors[i] is not None]
        kernels, statistics, generator = host
        assert kernels.reader is not None
        addresses, given = self._rows.addresses(statistics), list(tensors)
        table = self._counts.begin(given, generator)
        left: list[int] = kernels.reader.add_all(given, self._flags, addresses, self._memory, table).tolist()
        if table is not None:
            self._counts.end(statistics.codes, left)
        return left

    def take(self, memory: CopyMemory) -> None:
        """Reserve memory for the copies of tensors; without memory nothing is copied."""
        if self._memory.copies is not None and self._ends[-1]:
            try:
                buffer = memory.take(int(self._ends[-1]) + _ALIGNED)
            except MemoryError as error:
                raise_users_exception(error)
                return
            self._buffer = memory, buffer
            begin = -(-buffer.ctypes.data // _ALIGNED) * _ALIGNED
            if begin != self._begin:
                self._begin, self._places = begin, np.where(self._is_copied, begin + self._offsets, 0)
            self._memory.copy_to(self._places)

    @property
    def uncopied(self) -> list[NamedParameter]:
        """The parameters whose updates are wanted and which were not copied."""
        left = self._is_updated if self._buffer is None else self._is_updated & ~self._memory.is_copied
        return [self.named[i] for i in left.nonzero()[0]] if np.count_nonzero(left) else []

    def measure_updates(self, host: _Host) -> int:
        """Measure the differences of the parameters and their copies, and drop the copies.

        Returns the number of parameters that have another memory format, dtype or shape now.
        """
        if self._buffer is None:
            return 0
        kernels, statistics, generator = host
        assert kernels.reader is not None
        addresses, is_copied = self._update_rows.addresses(statistics), self._memory.is_copied.tolist()
        table = self._update_counts.begin([copied or None for copied in is_copied], generator)
        left = kernels.reader.add_differences(self.parameters, self._update_flags, addresses, self._memory, table)
        if table is not None:
            self._update_counts.end(statistics.codes, left.tolist())
        self.drop()
        return len(left)

    def drop(self) -> None:
        """Drop the copies, and give their memory back."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._memory.copy_to(0)
            self._memory.done[:] = 0
            buffer[0].give_back(buffer[1])


def _is_native(x: nn.Parameter) -> bool:
    """Whether the kernels may be able to read a parameter; one without a shape has no size."""
    return type(x) is nn.Parameter and x.is_cpu and x.layout is torch.strided


def _of_keys(
    index: RowIndex, keys: Sequence[Key | None], flags: Iterable[int]
) -> tuple[_RowAddresses, NDArray[np.int32]]:
    """Return the rows of some tensors, and what the kernels measure of each."""
    rows = [0 if key is None else index.row(*key) for key in keys]
    return _RowAddresses(np.array(rows, np.int64)), np.array([*flags], np.int32)


def _flags_of_tensor(task: Task | None) -> int:
    """Return what the kernels measure of a tensor, which subscribers may measure as well."""
    if task is None:
        return NOTHING
    if not task.fields:
        return READABLE
    return _flags_of(task.fields)


def _flags_of_update(task: Task | None) -> int:
    """Return what the kernels measure of a difference, of which there is no tensor that subscribers could measure."""
    if task is None:
        return NOTHING
    return PYTHON if task.measurers else _flags_of(task.fields)


def _flags_of(fields: frozenset[str]) -> int:
    """Return what the kernels measure, beside at most one histogram."""
    histograms = fields & HISTOGRAMS
    is_counted = not histograms or (len(histograms) == 1 and counted_field(fields) is not None)
    return flags_of(fields) if is_counted else PYTHON


def _counted(task: Task | None, flags: int) -> str | None:
    """Return the histogram that the kernels count of a tensor."""
    return None if task is None or flags < 0 else counted_field(task.fields)


class _OfPlan:
    """Lists and sites of the parameters of which a plan wants something."""

    def __init__(self) -> None:
        self.prepared: dict[str, Any] = {}
        self.wanted: dict[str, dict[int, Key]] = {}
        self.lists: dict[
            tuple[str, int, int], tuple[object, object, ParameterList]
        ] = {}  # by kind and ids of sequences


class ParameterTable:
    """Records each kind of tensor of each parameter once in a step.

    Every kind goes the same way: a `ParameterList` measures what lies on the host in one native call, and what is left goes to the
    recorder, which measures the tensors of an accelerator together and others one by one.

    Parameters
    ----------
    context : HookContext

    Attributes
    ----------
    is_used : bool
        Whether anything was recorded in this step.
    skipped_updates : int
        Number of updates that were not recorded because the weights were freed, or there was no memory for a copy.
    memory : CopyMemory
        The memory for copies of weights of the host.
    """

    def __init__(self, context: HookContext) -> None:
        self.context = context
        self.is_used = False
        self.skipped_updates = 0
        self.memory = CopyMemory()
        self._unused_steps = 0
        self._copied: list[ParameterList] = []  # the lists with copies of weights before the step
        self._before: dict[int, Tensor] = {}  # copies outside of lists, by the id of the parameter
        self._recorded: dict[str, set[int]] = {}
        self._everything: object = None
        self._of_plan: weakref.WeakKeyDictionary[Plan, _OfPlan] = weakref.WeakKeyDictionary()

    def step_ended(self, steps: int = 1) -> None:
        """Forget everything about a step, or several at once; free the memory for copies if the last ones recorded nothing."""
        if self.is_used:
            self._unused_steps = 0
            self._forget()
            return
        before, self._unused_steps = self._unused_steps, self._unused_steps + steps
        if before < _KEPT_STEPS <= self._unused_steps:
            self.memory.release()

    def _forget(self) -> None:
        self._before = {}
        self._recorded.clear()
        for copied in self._copied:
            copied.drop()
        self._copied.clear()
        self.is_used = False  # at last, because an exception such as `KeyboardInterrupt` may come before

    # -- weights and updates --------------------------------------------------------------------------------------

    def weights(
        self, parameters: Sequence[NamedParameter], changing: Sequence[NamedParameter], shared: bool = False
    ) -> None:
        """Record weights, and copy those that change now and whose updates are wanted.

        Parameters
        ----------
        parameters : sequence of NamedParameter
            Those whose weights are recorded.
        changing : sequence of NamedParameter
            Those that change now.
        shared : bool
            Whether several optimizers change some of these parameters, so that the end of one does not complete their updates.
        """
        self.is_used = True
        host, copied = self.context.recorder.host_lists(), self._recorded.setdefault(_UPDATES[0], set())
        listed = self._list(_WEIGHTS, parameters, _without(changing, copied))
        if host is not None and not shared:
            self._copied.append(listed)  # at first, because an exception such as `KeyboardInterrupt` may come after
            listed.take(self.memory)
        left = listed.measure(host, listed.parameters)
        copied |= listed.updated
        uncopied = listed.uncopied
        copies = self._copies(uncopied) if uncopied else {}
        if left or copies or listed.with_measurers:
            self._receive(listed, left, listed.parameters, copies=copies)
        if copies:  # those that were not copied by the kernel that measures them
            torch._foreach_copy_([copy for _, copy in copies.values()], [weights for weights, _ in copies.values()])

    def updates(self, parameters: Iterable[NamedParameter]) -> None:
        """Record the updates of parameters whose weights were copied."""
        if self._copied and (host := self.context.recorder.host_lists()) is not None:
            for copied in self._copied:
                self.skipped_updates += copied.measure_updates(host)
            self._copied.clear()
        if self._before:
            self.context.recorder.receive_all(self._changes(parameters))

    def _copies(self, parameters: Iterable[NamedParameter]) -> dict[int, tuple[Tensor, Tensor]]:
        """Clone weights of the host, and return those of devices with memory for copies, by the id of the parameter."""
        copies: dict[int, tuple[Tensor, Tensor]] = {}
        for named in parameters:
            if not named.parameter.requires_grad:
                continue
            weights = local_tensor(named.parameter.detach())
            if (copy := _clone_or_memory(weights)) is None:
                self.skipped_updates += 1
                continue
            self._before[id(named.parameter)] = copy
            if not weights.is_cpu:
                copies[id(named.parameter)] = weights, copy
        return copies

    def _changes(self, parameters: Iterable[NamedParameter]) -> Iterator[tuple[Site, Tensor, str, Tensor]]:
        """Yield site, weights after the step, name, and weights before; record the updates of distributed parameters."""
        wanted = self._wanted(_UPDATES)
        for named in parameters:
            key = id(named.parameter)
            if (before := self._before.pop(key, None)) is None or key not in wanted:
                continue
            site, path = wanted[key]
            if is_distributed(named.parameter) and has_numbers(after := local_tensor(named.parameter.detach())):
                wide = torch.promote_types(after.dtype, torch.float32)
                difference = distribute_like(after.to(wide) - before.to(wide), named.parameter)
                self.context.recorder.receive(site, difference, path)
            else:
                yield site, named.parameter, path, before

    # -- gradients ------------------------------------------------------------------------------------------------

    def gradients(self, parameters: Sequence[NamedParameter], scale: Tensor | None = None) -> None:
        """Record gradients, divided by `scale`."""
        self.is_used = True
        self._record_gradients(_GRADIENTS, parameters, scale)

    def unowned_gradients(self) -> None:
        """Record the gradients of parameters that no optimizer has, which no gradient scaler has unscaled.

        A frozen one may have kept a gradient of an earlier step, which is none of this step.
        """
        self._record_gradients(_GRADIENTS, self.context.parameters.unowned(), self.context.loss_scale.factor)

    def unclipped_gradients(self) -> None:
        """Record gradients at the end of a backward, in place of those that an earlier backward of the step has left.

        They are not clipped yet; they are reduced over ranks, and without the factor of a gradient scaler.
        """
        context = self.context
        if context.recorder.plan.unclipped_gradients:
            context.recorder.drop_part(UNCLIPPED_PART)
            self._recorded.pop(UNCLIPPED_KINDS[0], None)
            if context.parameters.held.have_changed():
                context.parameters.refresh()
            self._record_gradients(UNCLIPPED_KINDS, context.parameters.all, context.loss_scale.factor, UNCLIPPED_PART)

    def drop_unclipped(self, parameters: Iterable[NamedParameter]) -> None:
        """Forget the gradients before clipping of some parameters."""
        wanted, recorder = self._wanted(UNCLIPPED_KINDS), self.context.recorder
        keys = [wanted[id(named.parameter)] for named in parameters if id(named.parameter) in wanted]
        if keys:
            recorder.drop_part(UNCLIPPED_PART, [recorder.index.row(*key) for key in keys])

    def _record_gradients(
        self, kinds: tuple[str, str], parameters: Sequence[NamedParameter], scale: Tensor | None, part: int = 0
    ) -> None:
        """Record the gradients that parameters have now as two kinds, divided by `scale`."""
        listed = self._list(kinds, parameters)
        gradients = [*map(_GRADIENT, listed.parameters)]
        if scale is not None:
            gradients = [g if g is None else divided(g, scale.to(g.device, non_blocking=True)) for g in gradients]
        left = listed.measure(self.context.recorder.host_lists(part), gradients)
        if left or listed.with_measurers:
            self._receive(listed, left, gradients, part)

    # -- others ----------------------------------------------------------------------------------------------------

    def states(self, optimizer: Optimizer, parameters: Iterable[NamedParameter]) -> None:
        """Record the state of an optimizer for some parameters."""
        wanted: dict[bool, list[tuple[str, str]]] = {False: [], True: []}
        for kind in self.context.recorder.plan.states:
            wanted[kind.startswith("bias")].append((kind, kind.split("_state_", 1)[1]))
        inner = getattr(optimizer, "optim", None)  # of a ``ZeroRedundancyOptimizer``, for this rank's part
        kept = inner.state if isinstance(inner, Optimizer) else {}
        for named in parameters if any(wanted.values()) else ():
            state = optimizer.state.get(named.parameter) or kept.get(named.parameter, {})
            for kind, field in wanted[named.is_bias] if state else ():
                if isinstance(value := state.get(field), Tensor):
                    self.context.recorder.receive(self.context.sites(kind, named.module), value, named.path)

    # -- lists ----------------------------------------------------------------------------------------------------

    def _receive(
        self,
        listed: ParameterList,
        left: Iterable[int],
        tensors: Sequence[Tensor | None],
        part: int = 0,
        copies: dict[int, tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        """Measure what a list has left, and let subscribers measure what the kernels have read."""
        recorder, keys = self.context.recorder, listed.keys
        found = ((key[0], x, key[1], None) for i in left if (key := keys[i]) and (x := tensors[i]) is not None)
        recorder.receive_all(found, copies or {}, part)
        if listed.with_measurers:
            others = set(listed.with_measurers).difference(left)
            recorder.measure_each(
                [(key, x) for i in sorted(others) if (key := keys[i]) and (x := tensors[i]) is not None], part
            )

    def _list(
        self, kinds: tuple[str, str], parameters: Sequence[NamedParameter], changing: Sequence[NamedParameter] = ()
    ) -> ParameterList:
        """Return the list of the parameters of which two kinds were not recorded in this step, and note that they are now."""
        recorder, known = self.context.recorder, self._known().lists
        recorded = self._recorded.setdefault(kinds[0], set())
        parameters = _without(parameters, recorded)
        key = kinds[0], id(parameters), id(changing)
        if key not in known:
            if len(known) >= _CACHED:
                known.clear()
            wanted = self._wanted(kinds), self._wanted(_UPDATES)
            listed = ParameterList(recorder.index, recorder.plan, parameters, wanted[0], changing, wanted[1])
            known[key] = parameters, changing, listed
        listed = known[key][2]
        recorded |= listed.measured
        return listed

    def prepared(self, kinds: tuple[str, str], prepare: Callable[[Wanted], T]) -> T:
        """Return what `prepare` makes of the parameters of which a kind is wanted; it is called once for each plan."""
        known = self._known().prepared
        if kinds[0] not in known:
            known[kinds[0]] = prepare(self._wanted(kinds))
        found: T = known[kinds[0]]
        return found

    def _known(self) -> _OfPlan:
        if self._everything is not self.context.parameters.all:  # the lists would keep replaced parameters alive
            self._everything = self.context.parameters.all
            self._of_plan.clear()
        if (known := self._of_plan.get(self.context.recorder.plan)) is None:
            known = self._of_plan[self.context.recorder.plan] = _OfPlan()
        return known

    def _wanted(self, kinds: tuple[str, str]) -> dict[int, Key]:
        """Return the sites and paths of the parameters of which a kind is wanted."""
        context, known = self.context, self._known().wanted
        if kinds[0] not in known:
            plan = context.recorder.plan
            found = ((each, context.sites(kinds[each.is_bias], each.module)) for each in context.parameters.all)
            known[kinds[0]] = {
                id(each.parameter): (site, each.path)
                for each, site in found
                if plan.task(site.kind, site.module) is not None
            }
        return known[kinds[0]]


def _without(parameters: Sequence[NamedParameter], recorded: set[int]) -> Sequence[NamedParameter]:
    """Return the parameters that are not recorded; the same object if these are all of them."""
    if not recorded:
        return parameters
    left = [named for named in parameters if id(named.parameter) not in recorded]
    return parameters if len(left) == len(parameters) else left or ()


def _clone_or_memory(x: Tensor) -> Tensor | None:
    """Return a clone of a tensor of the host, and memory for a copy of a tensor of a device.

    ``None`` if it has no numbers, or there is no memory; training goes on.
    """
    try:
        if has_numbers(x):
            return x.clone() if x.is_cpu else torch.empty_like(x)
    except RuntimeError as error:
        raise_users_exception(error)
    return None
