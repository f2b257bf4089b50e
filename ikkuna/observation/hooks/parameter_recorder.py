"""Records weights, gradients, updates and optimizer states around the steps of optimizers."""

import weakref
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from ikkuna.distributed.dtensor import distribute_like, divided, is_distributed, local_tensor
from ikkuna.numerics.elements import has_numbers
from ikkuna.observation.hooks.context import HookContext
from ikkuna.observation.rows.host_list import CopyMemory, ParameterList
from ikkuna.observation.rows.plan import Plan, Site
from ikkuna.observation.steps.forwards import UNCLIPPED_PART
from ikkuna.support.failures import raise_users_exception
from ikkuna.support.modules import NamedParameter

__all__ = ["ParameterRecorder"]


_WEIGHTS = "weights", "biases"
_UPDATES = "weight_updates", "bias_updates"
_GRADIENTS = "weight_gradients", "bias_gradients"
_UNCLIPPED = "weight_gradients_unclipped", "bias_gradients_unclipped"
_CACHED = 16
_KEPT_STEPS = 100


class _OfPlan:
    """Lists and sites of the parameters of which a plan wants something."""

    def __init__(self) -> None:
        self.sites: dict[str, dict[int, Site]] = {}
        self.lists: dict[
            tuple[str, int, int], tuple[object, object, ParameterList]
        ] = {}  # by kind and ids of sequences


class ParameterRecorder:
    """Records each kind of tensor of each parameter once in a step.

    Parameters of the host are listed once for each plan, and measured with one native call for each kind; it checks each tensor.
    The others, and those that the call cannot read, are measured one by one, or together with those of their accelerator.

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
        self._before: dict[int, Tensor] = {}  # copies of weights, by the id of the parameter
        self._copied: list[ParameterList] = []
        self._recorded: dict[str, set[int]] = {}
        self._everything: object = None
        self._of_plan: weakref.WeakKeyDictionary[Plan, _OfPlan] = weakref.WeakKeyDictionary()

    def step_ended(self) -> None:
        """Forget everything about the step; free the memory for copies if the last steps recorded nothing."""
        if self.is_used:
            self._unused_steps = 0
            self._forget()
            return
        self._unused_steps += 1
        if self._unused_steps == _KEPT_STEPS:
            self.memory.release()

    def _forget(self) -> None:
        self._before = {}
        self._recorded.clear()
        for copied in self._copied:
            copied.rows.drop()
        self._copied.clear()
        self.is_used = False  # at last, because an exception such as `KeyboardInterrupt` may come before

    # -- weights and updates --------------------------------------------------------------------------------------

    def weights(
        self, parameters: Sequence[NamedParameter], changing: Sequence[NamedParameter], shared: bool = False
    ) -> None:
        """Record weights, and copy those that change now and whose updates are wanted; on an accelerator with few launches.

        Parameters
        ----------
        parameters : sequence of NamedParameter
            Those whose weights are recorded.
        changing : sequence of NamedParameter
            Those that change now.
        shared : bool
            Whether several optimizers change some of these parameters.
        """
        self.is_used = True
        if not shared:
            parameters, changing = self._record_listed(parameters, changing)
        wanted, copies = self._wanted(*_WEIGHTS, parameters), self._memory(changing)
        self.context.recorder.receive_all(((site, named.parameter, named.path) for site, named in wanted), copies)
        by_device: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
        for weights, copy in copies.values():  # those that were not copied by the kernel that measures them
            by_device.setdefault((weights.device, weights.dtype), []).append((copy, weights))
        for pairs in by_device.values():
            torch._foreach_copy_([copy for copy, _ in pairs], [weights for _, weights in pairs])

    def _record_listed(
        self, parameters: Sequence[NamedParameter], changing: Sequence[NamedParameter]
    ) -> tuple[Sequence[NamedParameter], Sequence[NamedParameter]]:
        """Measure and copy weights on the host; return those that remain to be measured, and to be copied."""
        recorded, copied = (self._recorded.setdefault(kinds[0], set()) for kinds in (_WEIGHTS, _UPDATES))
        if (host := self.context.recorder.host_lists()) is None:
            return parameters, changing
        listed = self._list(_WEIGHTS, parameters, changing)
        if recorded and listed.measured <= recorded:
            listed = self._list(_WEIGHTS, (), changing)
        if not (listed.listed and recorded.isdisjoint(listed.measured) and copied.isdisjoint(listed.updated)):
            return parameters, changing
        try:
            left, uncopied = listed.rows.begin(*host, self.memory)
        except MemoryError as error:
            raise_users_exception(error)
            return parameters, changing
        self._copied.append(listed)
        recorded |= listed.measured - {id(listed.listed[i].parameter) for i in left}
        copied |= listed.updated - {id(listed.listed[i].parameter) for i in uncopied}
        return (
            [*listed.others, *(listed.listed[i] for i in left)],
            [*listed.changing_others, *(listed.listed[i] for i in uncopied)],
        )

    def _list(
        self,
        kinds: tuple[str, str],
        parameters: Sequence[NamedParameter],
        changing: Sequence[NamedParameter] = (),
    ) -> ParameterList:
        recorder, known = self.context.recorder, self._known().lists
        key = kinds[0], id(parameters), id(changing)
        if key not in known:
            if len(known) >= _CACHED:
                known.clear()
            sites, updates = self._wanted_sites(*kinds), self._wanted_sites(*_UPDATES)
            listed = ParameterList(recorder.index, recorder.plan, parameters, sites, changing, updates)
            known[key] = parameters, changing, listed
        return known[key][2]

    def _known(self) -> _OfPlan:
        if self._everything is not self.context.parameters.all:  # the lists would keep replaced parameters alive
            self._everything = self.context.parameters.all
            self._of_plan.clear()
        return self._of_plan.setdefault(self.context.recorder.plan, _OfPlan())

    def updates(self, parameters: Iterable[NamedParameter]) -> None:
        """Record the updates of parameters whose weights were copied."""
        if self._copied and (host := self.context.recorder.host_lists()) is not None:
            for copied in self._copied:
                self.skipped_updates += copied.rows.end(*host)
            self._copied.clear()
        if self._before:
            self.context.recorder.receive_differences(self._changes(parameters))

    # -- gradients ------------------------------------------------------------------------------------------------

    def gradients(self, parameters: Sequence[NamedParameter], scale: Tensor | None = None) -> None:
        """Record gradients, divided by `scale`."""
        self.is_used = True
        self._record_gradients(_GRADIENTS, parameters, scale)

    def unowned_gradients(self) -> None:
        """Record the gradients of parameters that no optimizer has, which no gradient scaler has unscaled."""
        self._record_gradients(
            _GRADIENTS, self.context.parameters.known_owners().unowned, self.context.loss_scale.factor
        )

    def unclipped_gradients(self) -> None:
        """Record gradients at the end of a backward, in place of those that an earlier backward of the step has left.

        They are not clipped yet; they are reduced over ranks, and without the factor of a gradient scaler.
        """
        context = self.context
        if context.recorder.plan.unclipped_gradients:
            context.recorder.drop_part(UNCLIPPED_PART)
            self._recorded.pop(_UNCLIPPED[0], None)
            context.parameters.refresh()
            self._record_gradients(_UNCLIPPED, context.parameters.all, context.loss_scale.factor, UNCLIPPED_PART)

    def _record_gradients(
        self, kinds: tuple[str, str], parameters: Sequence[NamedParameter], scale: Tensor | None, part: int = 0
    ) -> None:
        """Record the gradients that parameters have now as two kinds, divided by `scale`."""
        if scale is None:
            parameters = self._record_listed_gradients(kinds, parameters, part)
        self.context.recorder.receive_all(
            (
                (site, grad if scale is None else divided(grad, scale.to(grad.device, non_blocking=True)), named.path)
                for site, named in self._wanted(*kinds, parameters)
                if (grad := named.parameter.grad) is not None
            ),
            part=part,
        )

    def _record_listed_gradients(
        self, kinds: tuple[str, str], parameters: Sequence[NamedParameter], part: int
    ) -> Sequence[NamedParameter]:
        """Measure gradients on the host; return the parameters that remain."""
        recorder, recorded = self.context.recorder, self._recorded.setdefault(kinds[0], set())
        if (host := recorder.host_lists(part)) is None:
            return parameters
        listed = self._list(kinds, parameters)
        if not (listed.listed and recorded.isdisjoint(listed.measured)):
            return parameters
        gradients = [named.parameter.grad for named in listed.listed]
        left = [listed.listed[i] for i in listed.rows.measure(*host, gradients)]
        recorded |= listed.measured - {id(named.parameter) for named in left}
        return [*listed.others, *left]

    def _changes(self, parameters: Iterable[NamedParameter]) -> Iterator[tuple[Site, Tensor, Tensor, str]]:
        """Yield site, weights after and before the step, and name; record the updates of distributed parameters."""
        sites = self._wanted_sites(*_UPDATES)
        for named in parameters:
            key = id(named.parameter)
            if (before := self._before.pop(key, None)) is None or (site := sites.get(key)) is None:
                continue
            if is_distributed(named.parameter) and has_numbers(after := local_tensor(named.parameter.detach())):
                wide = torch.promote_types(after.dtype, torch.float32)
                difference = distribute_like(after.to(wide) - before.to(wide), named.parameter)
                self.context.recorder.receive(site, difference, named.path)
            else:
                yield site, named.parameter, before, named.path

    # -- others ----------------------------------------------------------------------------------------------------

    def states(self, optimizer: Optimizer, parameters: Iterable[NamedParameter]) -> None:
        """Record the state of an optimizer for some parameters."""
        wanted: dict[bool, list[tuple[str, str]]] = {False: [], True: []}
        for kind in self.context.recorder.plan.states:
            wanted[kind.startswith("bias")].append((kind, kind.split("_state_", 1)[1]))
        for named in parameters if any(wanted.values()) else ():
            state = optimizer.state.get(named.parameter, {})
            for kind, field in wanted[named.is_bias] if state else ():
                if isinstance(value := state.get(field), Tensor):
                    self.context.recorder.receive(self.context.sites(kind, named.module), value, named.path)

    def _memory(self, parameters: Iterable[NamedParameter]) -> dict[int, tuple[Tensor, Tensor]]:
        """Clone the weights of the host of which updates are wanted, and return those of devices with memory for copies."""
        copies: dict[int, tuple[Tensor, Tensor]] = {}
        for _, named in self._wanted(*_UPDATES, parameters):
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

    def _wanted(
        self, weights: str, biases: str, parameters: Iterable[NamedParameter]
    ) -> Iterator[tuple[Site, NamedParameter]]:
        """Yield the parameters of which a kind is wanted and was not recorded in this step."""
        recorded = self._recorded.setdefault(weights, set())
        wanted = self._wanted_sites(weights, biases)
        for named in parameters if wanted else ():
            key = id(named.parameter)
            if key not in recorded and (site := wanted.get(key)) is not None:
                recorded.add(key)
                yield site, named

    def _wanted_sites(self, weights: str, biases: str) -> dict[int, Site]:
        """Return the sites of the parameters of which a kind is wanted, by the parameter's id."""
        context, sites = self.context, self._known().sites
        if weights not in sites:
            plan = context.recorder.plan
            found = (
                (named, context.sites(biases if named.is_bias else weights, named.module))
                for named in context.parameters.all
            )
            sites[weights] = {
                id(named.parameter): site for named, site in found if plan.task(site.kind, site.module) is not None
            }
        return sites[weights]


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
