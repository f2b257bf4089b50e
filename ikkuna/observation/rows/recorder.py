"""Measures the tensors that hooks receive, and adds the results to the rows of the open step."""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ikkuna.distributed.dtensor import full_tensor, is_distributed, local_shard
from ikkuna.metrics.bus.error_guard import ErrorGuard
from ikkuna.metrics.messages.message import Message, MessageBundle, NetworkMessage
from ikkuna.metrics.messages.stamp import Stamp
from ikkuna.metrics.subscriber.base import Subscriber
from ikkuna.metrics.subscriber.registered import Registered
from ikkuna.metrics.subscriber.state import DeferredRow, copied_row
from ikkuna.numerics.elements import dequantized, has_float64, has_numbers, is_special
from ikkuna.numerics.statistics.host import HostStatistics
from ikkuna.numerics.statistics.native import Library, library
from ikkuna.observation.rows.plan import NOTHING, Key, Plan, RowIndex, Selections, Site, Task
from ikkuna.observation.rows.rows import Part, PartPool, Rows
from ikkuna.support.failures import log, raise_users_exception, switched
from ikkuna.support.undisturbed import gradients

_LISTED = frozenset((torch.float64, torch.float32, torch.float16, torch.bfloat16))
_PLAIN = (Tensor, torch.nn.Parameter)
_HOST = torch.device("cpu")
_NO_COPIES: dict[int, tuple[Tensor, Tensor]] = {}
T = TypeVar("T")
_Weight = float | Tensor | str | None
_NO_MEMORY = "the device has no memory to measure it"
_ListKey = tuple[torch.device, torch.dtype, frozenset[str]]


class Recorder:
    """Measures tensors while a step is open.

    Parameters
    ----------
    error_guard : ErrorGuard
        Handles errors.
    native : bool
        Whether to use the C++ kernels if they are available.
    may_communicate : callable
        Returns whether the other ranks take the same steps, so that collectives are safe.
        It may wait for them, and is called only where a tensor needs a collective.

    Attributes
    ----------
    kernels : Library or None
        The C++ kernels.
    plan : Plan
        What is measured in the open step.
    rows : Rows or None
        The measurements of the open step; ``None`` if no subscriber samples it.
    index : RowIndex
        The row of each site and path.
    unreadable : set of Key
        The site and path of tensors that have no numbers to read.
    generator : Generator
        Our own source of randomness, for samples.
    """

    def __init__(
        self, error_guard: ErrorGuard, native: bool = True, may_communicate: Callable[[], bool] = lambda: False
    ) -> None:
        self.error_guard = error_guard
        self.kernels = library() if native else None
        self.plan = NOTHING
        self.rows: Rows | None = None
        self.unreadable: set[Key] = set()
        self._may_communicate = may_communicate
        self.index = RowIndex()
        self._selections = Selections(self.index)
        self._pool = PartPool(error_guard, native)
        self.generator = torch.Generator("cpu").manual_seed(0)
        self._warned: set[Registered] = set()

    def open(self, stamp: Stamp, plan: Plan) -> None:
        """Begin the rows of a step; there are none if no subscriber samples the step."""
        self.plan, self.rows = plan, None
        if plan.subscriptions:
            self.rows = Rows(stamp, plan, self.index, self._pool, self._selections)

    def close(self, parts: Iterable[int] = (), carried: Collection[int] = ()) -> Rows | None:
        """Return the rows of the step, on their way to the host; ``None`` if it has none.

        Parameters
        ----------
        parts : iterable of int
            The parts that belong to the step; they are merged into part 0, and all others are dropped.
        carried : collection of int
            The parts that belong to the step that opens next.  If there are any, their rows stay open.
        """
        rows = self.rows
        if rows is None:
            self.plan = self.plan if carried else NOTHING
            return None
        if carried:
            self.rows = rows.split(carried)
        else:
            self.rows, self.plan = None, NOTHING
        rows.close(parts)
        return rows

    def drop_part(self, part: int, rows: Iterable[int] | None = None) -> None:
        """Forget the measurements of a part of the open step, or some rows of it."""
        if self.rows is not None:
            self.rows.drop_part(part, rows)

    def wants(self, site: Site) -> bool:
        """Return whether a tensor of this site would be measured now."""
        return self.rows is not None and self.plan.task(site.kind, site.module) is not None

    def receive(self, site: Site, tensor: Tensor, path: str, weight: _Weight = None, part: int = 0) -> None:
        """Measure a tensor; errors are handled by `error_guard`.

        Parameters
        ----------
        site : Site
            Kind and module of the tensor.
        tensor : Tensor
            Borrowed; it may be attached to a graph.
        path : str
            Name of the parameter or path of the output.
        weight : float, Tensor, "sum" or "total", optional
            The number of elements that the tensor is the mean of; the step's value is then the weighted mean of all calls.
            ``"sum"`` for a sum over data; the step's value is then the sum of all calls of all ranks.
            ``"total"`` for a part of the rank's value; the step's value is then the mean over ranks of the sums of their calls.
        part : int
            The part of the step, see `Rows`; nothing is measured for a negative number.
        """
        if part < 0 or (rows := self.rows) is None or (task := self.plan.task(site.kind, site.module)) is None:
            return
        try:
            if weight is None and not task.measurers and self._receive_plain(rows, part, site, tensor, path, task):
                return
            if (numbers := _numbers(tensor)) is not None:
                target = _Target(rows, rows.part(part), self.index.row(site, path), task)
                if not self._receive_any(target, numbers, weight):
                    self._leave_out(site, path)
            else:
                self._leave_out(site, path)
        except Exception as error:
            self.error_guard.report_internal(f"measuring {site}", error)

    def _receive_plain(self, rows: Rows, part: int, site: Site, tensor: Tensor, path: str, task: Task) -> bool:
        """Measure a tensor by shared statistics with few checks; return whether that was done."""
        if tensor.is_cpu:
            host, row = rows.part(part).host, self.index.row(site, path)
            return host.try_add(row, tensor, task.fields, self.generator)
        return not tensor.is_meta and self._receive_on_device(rows.part(part), site, tensor, path, task)

    def _receive_on_device(self, part: Part, site: Site, tensor: Tensor, path: str, task: Task) -> bool:
        """Measure a tensor of a device by kernels with few checks; return whether that was done."""
        statistics, row = part.on_device(tensor.device), self.index.row(site, path)
        return statistics.try_add(row, tensor, task.fields, self._source(task.fields))

    def receive_all(
        self,
        tensors: Iterable[tuple[Site, Tensor, str, Tensor | None]],
        copies: dict[int, tuple[Tensor, Tensor]] = _NO_COPIES,
        part: int = 0,
    ) -> None:
        """Measure several tensors, or their differences from others; those of an accelerator together.

        Parameters
        ----------
        tensors : iterable
            Site, tensor, the name of the parameter, and ``None`` or what is subtracted, which may be overwritten; all are of one sort.
        copies : dict
            By the id of a tensor, what to copy, and where to.  Copies that were made with the measurement are removed.
        part : int
            The part of the step.
        """
        lists: dict[_ListKey, list[tuple[int, Tensor, Tensor | None]]] = {}
        for site, tensor, path, before in tensors:
            key = self._list_key(site, tensor) if before is None or before.device == tensor.device else None
            if key is not None:
                lists.setdefault(key, []).append((self.index.row(site, path), tensor, before))
            elif before is None:
                self.receive(site, tensor, path, part=part)
            else:
                self.receive_difference(site, tensor, before, path, part=part)
        for key, group in lists.items():
            try:
                self._measure_list(key, group, copies, part)
            except torch.OutOfMemoryError:
                for row, *_ in group:
                    self._leave_out(*self.index.keys[row], _NO_MEMORY)
            except Exception as error:
                self.error_guard.report_internal(f"measuring parameters on {key[0]}", error)

    def measure_each(self, tensors: Iterable[tuple[Key, Tensor]], part: int = 0) -> None:
        """Let subscribers measure tensors of the host whose shared statistics are known, and which have numbers.

        Each subscriber is called with all of its tensors before the next one.
        """
        if (rows := self.rows) is None:
            return
        given: dict[Registered, list[tuple[int, Message]]] = {}
        for (site, path), tensor in tensors:
            if (task := self.plan.task(site.kind, site.module)) is not None:
                row, message = self.index.row(site, path), site.message(rows.stamp, path, tensor.detach())
                for registered in task.measurers:
                    given.setdefault(registered, []).append((row, message))
        for registered, messages in given.items():
            if not registered.disabled:
                results = _without_autograd("cpu", self._call_measure_each, registered, messages)
                for row, result in results:
                    rows.part(part).add_measured(row, registered, result)

    def _call_measure_each(
        self, registered: Registered, messages: list[tuple[int, Message]]
    ) -> list[tuple[int, Tensor | DeferredRow]]:
        """Return the rows that a subscriber has measured, with their numbers."""
        results: list[tuple[int, Tensor | DeferredRow]] = []
        changed: list[int] = []

        def measure(given: tuple[int, Message]) -> None:
            row, message = given
            tensor = message.data
            version = None if tensor.is_inference() else tensor._version
            try:
                if (result := _measure(registered.subscriber, message)) is not None:
                    results.append((row, copied_row(result, _HOST)))
            finally:
                if version is not None and tensor._version != version:
                    changed.append(row)

        self.error_guard.call_each(registered, "measure", measure, messages)
        if changed:
            self._disable_changing(registered, self.index.keys[changed[0]][0])
        return results

    def _disable_changing(self, registered: Registered, site: Site) -> None:
        """Disable a subscriber that has changed a tensor."""
        self.error_guard.disable(registered, f"it changed {site.kind!r} of {site.module or 'the network'} in place")

    def _measure_list(
        self,
        key: "_ListKey",
        group: list[tuple[int, Tensor, Tensor | None]],
        copies: dict[int, tuple[Tensor, Tensor]],
        part: int,
    ) -> None:
        """Measure tensors of one device and dtype, or their differences from others."""
        assert self.rows is not None
        (device, _, fields), numbers = key, [row for row, *_ in group]
        statistics, source, xs = self.rows.part(part).on_device(device), self._source(fields), [x for _, x, _ in group]
        if befores := [before for *_, before in group if before is not None]:
            statistics.add_differences(numbers, [x.detach() for x in xs], befores, fields, source)
            return
        targets = [copies[id(x)][1] if id(x) in copies else None for x in xs]
        has_copies = any(copy is not None for copy in targets)
        statistics.add_all(numbers, [x.detach() for x in xs], fields, source, targets if has_copies else ())
        for x in xs if has_copies else ():
            copies.pop(id(x), None)

    def host_lists(self, part: int = 0) -> "tuple[Library, HostStatistics, torch.Generator] | None":
        """Return what lists of tensors of the host are measured with and into, and the source of samples, if possible."""
        if self.rows is None or self.kernels is None or self.kernels.reader is None:
            return None
        return self.kernels, self.rows.part(part).host, self.generator

    def _list_key(self, site: Site, tensor: Tensor) -> "_ListKey | None":
        """Return what the tensors of a list have in common; ``None`` for a tensor that is measured alone."""
        if tensor.is_cpu or self.rows is None or (task := self.plan.task(site.kind, site.module)) is None:
            return None
        is_listed = (
            not task.measurers
            and tensor.dtype in _LISTED
            and type(tensor) in _PLAIN
            and not is_distributed(tensor)
            and has_numbers(tensor)
        )
        return (tensor.device, tensor.dtype, task.fields) if is_listed else None

    def receive_difference(self, site: Site, after: Tensor, before: Tensor, path: str, part: int = 0) -> None:
        """Measure ``after - before``, computed in at least float32; `before` may be overwritten."""
        if self.rows is None or (task := self.plan.task(site.kind, site.module)) is None:
            return
        kernels = self.kernels
        try:
            if task.is_plain and kernels is not None and kernels.accepts_difference(after, before):
                address = self.rows.part(part).host.address(self.index.row(site, path))
                kernels.add_difference(after, before, task.fields, address)
            elif not has_numbers(after):
                self._leave_out(site, path)
            elif (wide := torch.promote_types(before.dtype, torch.float32)) is before.dtype:
                self.receive(site, torch.sub(after.detach(), before, out=before), path, part=part)
            else:
                self.receive(site, after.detach().to(wide) - before, path, part=part)
        except Exception as error:
            self.error_guard.report_internal(f"measuring {site}", error)

    def _leave_out(self, site: Site, path: str, why: str = "its tensors have no numbers to read") -> None:
        """Count a series that was not measured, and log the first one."""
        if not self.unreadable:
            log.warning("%s is left out: %s; health().skipped counts such series", site, why)
        self.unreadable.add((site, path))

    def _receive_any(self, target: "_Target", tensor: Tensor, weight: _Weight) -> bool:
        """Measure a tensor; return whether it has numbers."""
        task = target.task
        if weight is not None:
            target.part.reductions[target.row] = weight if isinstance(weight, str) else "mean"
        if type(tensor) is not Tensor and is_distributed(tensor):
            return self._receive_shard(target, tensor, weight)
        if task.fields and not self._measure_fields(target, tensor, weight):
            return False
        if task.measurers:
            self._measure_all(target, task.measurers, tensor)
        return True

    def _receive_shard(self, target: "_Target", tensor: Tensor, weight: _Weight) -> bool:
        """Measure this rank's shard of a distributed tensor."""
        if (found := local_shard(tensor, self._may_communicate)) is None or not has_numbers(found[0]):
            return False
        local, position = found
        if position is not None:
            target.part.shards[target.row] = position
        if target.task.fields and not self._measure_fields(target, local, weight):
            return False
        is_shard = position is not None and position.is_shard
        for registered in target.task.measurers:
            if is_shard and registered.subscriber.needs_whole:
                self._measure_full(target, registered, tensor)
            else:
                self._measure_all(target, (registered,), local)
        return True

    def _measure_full(self, target: "_Target", registered: Registered, tensor: Tensor) -> None:
        """Measure a tensor of which a shard is not enough: NaN, unless its shards may be gathered."""
        subscriber = registered.subscriber
        if subscriber.gather and self._may_communicate():
            self._measure_all(target, (registered,), full_tensor(tensor))
            return
        message = target.rows.message(target.row)
        if registered not in self._warned:
            self._warned.add(registered)
            log.warning(
                "%r needs full tensors, but %s of %s is sharded over ranks: it publishes NaN; "
                "with gather=True it gathers the shards at the steps that it samples",
                *(subscriber, message.kind, message.series_name),
            )
        result = self.error_guard.call(registered, "measure", subscriber.unknown, message)
        if result is not None:
            target.part.add_measured(target.row, registered, result, tensor.device)

    def _measure_fields(self, target: "_Target", tensor: Tensor, weight: _Weight) -> bool:
        fields = target.task.fields
        repeats = 1 if weight is None or isinstance(weight, str) else weight
        generator = self._source(fields)
        try:
            return target.part.statistics(tensor).add(target.row, tensor, fields, repeats, generator)
        except Exception as error:
            raise_users_exception(error)
            if type(tensor) is Tensor:
                raise
            return False  # a subclass without the operators to read it

    def _source(self, fields: frozenset[str]) -> torch.Generator | None:
        """Return our own source of randomness if `fields` need one."""
        return self.generator if "sampled_codes" in fields else None

    def _measure_all(self, target: "_Target", measurers: Iterable[Registered], tensor: Tensor) -> None:
        if tensor.layout is not torch.strided:
            tensor = tensor.to_dense()  # metrics need no code for sparse gradients
        message = target.rows.message(target.row, tensor)
        on_host: Message | None = None
        for registered in measurers:
            if not registered.subscriber.needs_float64 or has_float64(tensor.device):
                self._measure(target.part, target.row, registered, message, tensor)
                continue
            if on_host is None:
                on_host = target.rows.message(target.row, _on_host(tensor))
            self._measure(target.part, target.row, registered, on_host, on_host.data)

    def _measure(
        self, part: Part, row: int | None, registered: Registered, message: Message | MessageBundle, tensor: Tensor
    ) -> None:
        if registered.disabled:  # since the step began
            return
        version = None if tensor.is_inference() else tensor._version
        call, measure = self.error_guard.call_each, partial(_measure, registered.subscriber)
        result: Tensor | DeferredRow | None = _without_autograd(
            tensor.device.type, call, registered, "measure", measure, (message,)
        )
        if result is not None:
            part.add_measured(row, registered, result, tensor.device)
        if version is not None and tensor._version != version:
            site = Site(registered.kinds[0]) if row is None else self.index.keys[row][0]
            self._disable_changing(registered, site)

    def receive_together(self, tensors: Mapping[str, Tensor], part: int = 0) -> None:
        """Pass the tensors of one call of the loss module to the subscribers that measure them together."""
        together = self.plan.together
        if not together or part < 0 or (rows := self.rows) is None or not all(map(has_numbers, tensors.values())):
            return
        if any(map(is_distributed, tensors.values())) and self._may_communicate():
            tensors = {kind: full_tensor(x) if is_distributed(x) else x for kind, x in tensors.items()}
        for registered in together:
            if not all(map(tensors.__contains__, registered.kinds)):
                continue
            messages, needs_float64 = dict[str, Message](), registered.subscriber.needs_float64
            for kind in registered.kinds:
                x = tensors[kind]
                x = _on_host(x) if needs_float64 and not has_float64(x.device) else x
                messages[kind] = NetworkMessage(rows.stamp, kind, x)
            first = messages[registered.kinds[0]].data
            self._measure(rows.part(part), None, registered, MessageBundle(messages), first)


class _Target(NamedTuple):
    """Where measurements are added."""

    rows: Rows
    part: Part
    row: int
    task: Task


def _without_autograd(device: str, function: Callable[..., T], *arguments: Any) -> T:
    """Call a function without gradients and autocast."""
    switches = [gradients(False)]
    if torch.is_autocast_enabled(device):
        switches.append((partial(torch.set_autocast_enabled, device), True, False))
    return switched(switches, function, *arguments)


def _measure(subscriber: Subscriber, message: Any) -> Tensor | DeferredRow | None:
    result = subscriber.measure(message)
    if result is not None and not isinstance(result, Tensor | DeferredRow):
        raise TypeError(f"measure must return a Tensor, a DeferredRow or None, got {type(result).__name__}")
    return result


def _numbers(tensor: Tensor) -> Tensor | None:
    """Return the numbers of a tensor without a graph; ``None`` if it has none."""
    if not has_numbers(tensor):
        return None
    if tensor.is_quantized or (is_special(tensor) and not is_distributed(tensor)):
        found = dequantized(tensor)
        return None if found is None else _detached(found)
    return _detached(tensor)


def _on_host(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor on the host, which waits for the device."""
    return _like(tensor, tensor.cpu())


def _detached(tensor: Tensor) -> Tensor:
    """Return a tensor without its graph; the data of a packed sequence keeps its attribute ``batch_sizes``."""
    return _like(tensor, tensor.detach())


def _like(tensor: Tensor, plain: Tensor) -> Tensor:
    if (sizes := getattr(tensor, "batch_sizes", None)) is not None:
        plain.batch_sizes = sizes  # type: ignore[attr-defined]
    return plain
