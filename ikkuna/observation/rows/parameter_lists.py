"""Parameters of the host whose weights, gradients and updates are measured with one native call each."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from ikkuna.observation.rows.host_list import CopiedList
from ikkuna.observation.rows.plan import Plan
from ikkuna.observation.rows.row_index import RowIndex
from ikkuna.observation.rows.site import Site
from ikkuna.support.modules import NamedParameter

__all__ = ["ParameterList"]


Wanted = Mapping[int, Site]
"""By the id of a parameter, the site of one of its tensors, if that is wanted."""


class ParameterList:
    """Some parameters, and those among them that are measured together.

    Parameters
    ----------
    index : RowIndex
        The recorder's rows.
    plan : Plan
        What is measured.
    parameters : sequence of NamedParameter
        Those whose weights, or gradients, are measured.
    sites : mapping
        The sites of these tensors.
    changing : sequence of NamedParameter
        Those whose weights change now.
    updates : mapping
        The sites of updates.

    Attributes
    ----------
    listed : list of NamedParameter
        Those that are measured together.
    others, changing_others : list of NamedParameter
        Those of which something, or the update, is wanted, and that are measured one by one.
    measured, updated : frozenset of int
        The ids of the listed parameters of which the tensor, or the update, is measured.
    rows : CopiedList
        Measures the listed parameters.
    """

    def __init__(
        self,
        index: RowIndex,
        plan: Plan,
        parameters: Sequence[NamedParameter],
        sites: Wanted,
        changing: Sequence[NamedParameter],
        updates: Wanted,
    ) -> None:
        named = {id(each.parameter): each for each in (*parameters, *changing)}
        of_tensor = {key: sites[key] for key in (id(each.parameter) for each in parameters) if key in sites}
        of_update = {key: updates[key] for key in (id(each.parameter) for each in changing) if key in updates}
        listed = {key: _is_listed(each, plan, of_tensor.get(key), of_update.get(key)) for key, each in named.items()}
        wanted = [key for key in named if key in of_tensor or key in of_update]
        keys = [key for key in wanted if listed[key]]
        self.listed = [named[key] for key in keys]
        self.others = [named[key] for key in wanted if not listed[key]]
        self.changing_others = [named[key] for key in wanted if not listed[key] and key in of_update]
        self.measured, self.updated = (frozenset(of.keys() & set(keys)) for of in (of_tensor, of_update))
        measured, differences = (
            [(of[key], named[key].path) if key in of else None for key in keys] for of in (of_tensor, of_update)
        )
        self.rows = CopiedList(index, plan, measured, differences, [each.parameter for each in self.listed])


def _is_listed(named: NamedParameter, plan: Plan, *sites: Site | None) -> bool:
    tasks = [plan.task(site.kind, site.module) for site in sites if site is not None]
    is_plain = all(task is not None and task.is_plain for task in tasks)
    x = named.parameter
    return is_plain and type(x) is nn.Parameter and x.is_cpu and x.layout is torch.strided
