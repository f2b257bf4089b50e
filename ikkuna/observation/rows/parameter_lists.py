"""Parameters of the host whose weights, gradients and updates are measured with one native call each."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ikkuna.observation.rows.host_list import CopiedList, HostList
from ikkuna.observation.rows.plan import Plan
from ikkuna.observation.rows.row_index import Key, RowIndex
from ikkuna.observation.rows.site import Site
from ikkuna.support.modules import NamedParameter

__all__ = ["GradientList", "WeightList"]


Wanted = Mapping[int, Site]
"""By the id of a parameter, the site of one of its tensors, if that is wanted."""


class _Parameters:
    """Some parameters, and those among them that are measured together.

    Parameters
    ----------
    parameters : sequence of NamedParameter
        The parameters.
    plan : Plan
        What is measured.
    wanted : sequence of mapping
        The sites of tensors of the parameters.

    Attributes
    ----------
    listed : list of NamedParameter
        Those that are measured together.
    others : list of NamedParameter
        Those of which something is wanted, and that are measured one by one.
    """

    def __init__(self, parameters: Sequence[NamedParameter], plan: Plan, wanted: Sequence[Wanted]) -> None:
        self.listed: list[NamedParameter] = []
        self.others: list[NamedParameter] = []
        for named in parameters:
            sites = [of[id(named.parameter)] for of in wanted if id(named.parameter) in of]
            if sites:
                tasks = [plan.task(site.kind, site.module) for site in sites]
                is_plain = all(task is not None and task.is_plain for task in tasks)
                x = named.parameter
                is_listed = is_plain and type(x) is nn.Parameter and x.is_cpu and x.layout is torch.strided
                (self.listed if is_listed else self.others).append(named)

    def keys(self, of: Wanted) -> list[Key | None]:
        """Return the key of a tensor of each of the listed parameters."""
        sites = ((named, of.get(id(named.parameter))) for named in self.listed)
        return [None if site is None else (site, named.path) for named, site in sites]


class WeightList(_Parameters):
    """Parameters whose weights are measured before the step of an optimizer, and whose updates afterwards.

    Parameters
    ----------
    index : RowIndex
        The recorder's rows.
    plan : Plan
        What is measured.
    parameters : sequence of NamedParameter
        Those whose weights are measured.
    changing : sequence of NamedParameter
        Those that change now.
    weights, updates : mapping
        The sites of weights and of updates.

    Attributes
    ----------
    weights, updates : frozenset of int
        The ids of the listed parameters of which each is measured.
    changing_others : list of NamedParameter
        Those of the others that change now.
    rows : CopiedList
        Measures the listed parameters.
    """

    def __init__(
        self,
        index: RowIndex,
        plan: Plan,
        parameters: Sequence[NamedParameter],
        changing: Sequence[NamedParameter],
        weights: Wanted,
        updates: Wanted,
    ) -> None:
        measured, changed = ({id(n.parameter) for n in some} for some in (parameters, changing))
        weights = {key: site for key, site in weights.items() if key in measured}
        updates = {key: site for key, site in updates.items() if key in changed}
        everything = {id(named.parameter): named for named in (*parameters, *changing)}
        super().__init__(list(everything.values()), plan, (weights, updates))
        self.weights = frozenset(id(n.parameter) for n in self.listed if id(n.parameter) in weights)
        self.updates = frozenset(id(n.parameter) for n in self.listed if id(n.parameter) in updates)
        self.changing_others = [named for named in self.others if id(named.parameter) in updates]
        tensors = [named.parameter for named in self.listed]
        self.rows = CopiedList(index, plan, self.keys(weights), self.keys(updates), tensors)


class GradientList(_Parameters):
    """Parameters whose gradients are measured together.

    Parameters
    ----------
    index, plan, parameters
        See `WeightList`.
    gradients : mapping
        The sites of gradients.

    Attributes
    ----------
    gradients : frozenset of int
        The ids of the listed parameters.
    rows : HostList
        Measures them.
    """

    def __init__(self, index: RowIndex, plan: Plan, parameters: Sequence[NamedParameter], gradients: Wanted) -> None:
        super().__init__(parameters, plan, (gradients,))
        self.gradients = frozenset(id(named.parameter) for named in self.listed)
        self.rows = HostList(index, plan, self.keys(gradients))

    def tensors(self) -> list[Tensor | None]:
        """Return the gradients that the listed parameters have now."""
        return [named.parameter.grad for named in self.listed]
