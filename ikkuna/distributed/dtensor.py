"""Distributed tensors: the shard of a DTensor on this rank, and what a model shares with other ranks.

The names of the modules in the stages of a pipeline.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ikkuna.numerics.elements import has_numbers
from ikkuna.support.modules import is_flattened

_ORIGIN = 1 << 32


@dataclass(frozen=True, slots=True)
class ShardPosition:
    """Which elements of a DTensor this rank has.

    Parameters
    ----------
    number : int
        Equal on ranks that have the same elements of the tensor, and different on others.
    is_shard : bool
        Whether other ranks have other elements.
    first_rank : int
        The lowest rank of the tensor's mesh.
    """

    number: int
    is_shard: bool
    first_rank: int

    @property
    def data_number(self) -> int:
        """`number`, made different on other meshes, because each data-parallel replica has its own data."""
        return self.first_rank * _ORIGIN + self.number


def is_distributed(x: Tensor) -> bool:
    """Return whether a tensor is a DTensor, or the result of a running collective."""
    return type(x).__name__ in ("DTensor", "AsyncCollectiveTensor")


def local_tensor(x: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor; other tensors are returned as they are."""
    return completed(cast(Tensor, cast(Any, x).to_local()) if type(x).__name__ == "DTensor" else x)


def local_shard(x: Tensor, may_communicate: Callable[[], bool]) -> tuple[Tensor, ShardPosition | None] | None:
    """Return this rank's shard of a distributed tensor, and its position (``None`` for the result of a collective).

    A tensor that is still to be summed over ranks (``Partial``) is summed if `may_communicate` returns true;
    all ranks of its mesh must call this then.  Otherwise the result is ``None``.
    """
    if type(x).__name__ != "DTensor":
        return completed(x), None
    dtensor = cast(Any, x)
    if any(placement.is_partial() for placement in dtensor.placements):
        if not may_communicate():
            return None
        from torch.distributed.tensor import Replicate

        known = [Replicate() if placement.is_partial() else placement for placement in dtensor.placements]
        dtensor = dtensor.redistribute(placements=known)
    mesh = dtensor.device_mesh
    number, is_shard = 0, False
    coordinate = mesh.get_coordinate()
    for dimension, placement in enumerate(dtensor.placements):
        if not placement.is_replicate():
            number = number * mesh.size(dimension) + (coordinate[dimension] if coordinate else 0)
            is_shard = is_shard or mesh.size(dimension) > 1
    return local_tensor(dtensor), ShardPosition(number, is_shard, int(mesh.mesh.min()))


def completed(x: Tensor) -> Tensor:
    """Return a tensor after waiting for the collective that computes it."""
    return cast(Tensor, cast(Any, x).wait()) if type(x).__name__ == "AsyncCollectiveTensor" else x


def full_tensor(x: Tensor) -> Tensor:
    """Return all elements of a distributed tensor; every rank of its mesh must call this."""
    return completed(cast(Any, x).full_tensor() if type(x).__name__ == "DTensor" else x)


def distribute_like(local: Tensor, x: Tensor) -> Tensor:
    """Return the DTensor with this local shard and the placements of `x`; `local` itself if `x` is not a DTensor."""
    if type(x).__name__ != "DTensor":
        return local
    like = cast(Any, x)
    made = type(like).from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return cast(Tensor, made)


def divided(x: Tensor, divisor: Tensor | int) -> Tensor:
    """Return ``x / divisor``, distributed like `x`; a tensor without numbers is returned as it is.

    The quotient by a tensor has at least float32, because gradients are scaled where half precision cannot represent them.
    """
    local = local_tensor(x)
    if not has_numbers(local):
        return x
    if isinstance(divisor, Tensor):
        local = local.to(torch.promote_types(local.dtype, torch.float32))
    return distribute_like(local / divisor, x)


def data_parallel_size(root: nn.Module) -> int:
    """Return the number of ranks that average the gradients of a model; call it while a data-parallel wrapper calls the model.

    It is 1 if the script averages gradients itself.
    """
    wrapper = torch.nn.parallel.DistributedDataParallel
    if (active := getattr(wrapper, "_active_ddp_module", None)) is not None:
        return int(active.process_group.size())
    mesh = _fsdp_mesh(root)
    return int(mesh.size()) if mesh is not None else 1


def holds_gradients(root: nn.Module) -> bool:
    """Return whether FSDP holds gradients of earlier micro-batches that are not reduced over ranks yet."""
    return any(
        getattr(parameter, "unsharded_accumulated_grad", None) is not None
        or getattr(getattr(parameter, "_unsharded_param", None), "grad", None) is not None
        for group in _fsdp_groups(root)
        for parameter in group.fsdp_params
    )


def sharded_parameters(roots: Iterable[nn.Module]) -> dict[int, nn.Parameter]:
    """Return the shards of the parameters that FSDP has gathered, by the ids of the gathered parameters.

    FSDP puts a gathered parameter into its module for a forward or backward, and frees its storage afterwards.
    """
    gathered = ("_unsharded_param", "_sharded_post_forward_param")
    return {
        id(whole): parameter.sharded_param
        for root in roots
        for group in _fsdp_groups(root)
        for parameter in group.fsdp_params
        for name in gathered
        if (whole := getattr(parameter, name, None)) is not None
    }


def is_run_together(root: nn.Module) -> bool:
    """Return whether the forward of a model communicates with other ranks, because its parameters are distributed."""
    return next(_fsdp_groups(root), None) is not None or any(
        is_distributed(p) or is_flattened(p) for p in root.parameters()
    )


def _fsdp_mesh(root: nn.Module) -> Any:
    """Return the data-parallel mesh of the first module of `root` that FSDP shards."""
    return next((group.mesh_info.mesh for group in _fsdp_groups(root)), None)


def _fsdp_groups(root: nn.Module) -> Iterator[Any]:
    for module in root.modules():
        if (state_of := cast(Any, getattr(module, "_get_fsdp_state", None))) is not None:
            state = state_of()
            groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
            yield from (group for group in groups if group is not None)


def model_parallel_group(root: nn.Module, rank: int) -> int:
    """Return the lowest of the ranks that process the same data as this one because they share the model's tensors.

    They are the ranks along the dimensions of the parameters' meshes that FSDP does not shard over.
    """
    mesh = _fsdp_mesh(root)
    data = frozenset(mesh.mesh.flatten().tolist()) if mesh is not None else frozenset[int]()
    group = {rank}
    for parameter in root.parameters():
        if is_distributed(parameter):
            group.update(_others_in_model(cast(Any, parameter).device_mesh, rank, data))
    return min(group)


def _others_in_model(mesh: Any, rank: int, data: frozenset[int]) -> set[int]:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return set()
    line: list[Any] = list(coordinate)
    for dimension in range(mesh.ndim):
        along = [*coordinate[:dimension], slice(None), *coordinate[dimension + 1 :]]
        ranks = mesh.mesh[tuple(along)].flatten().tolist()
        if len(ranks) > 1 and not data.issuperset(ranks):
            line[dimension] = slice(None)
    return set(mesh.mesh[tuple(line)].flatten().tolist())


_SHOWN = 3


def same_names(ranks: Iterable[Mapping[str, Collection[str]]]) -> str:
    """Return why stages cannot be told apart; an empty string if they can.

    Parameters
    ----------
    ranks : iterable of mapping
        For each rank the names of the modules of each of its stages, by the stage's number.

    Examples
    --------
    >>> same_names([{"0": ["embedding", "blocks.0"]}, {"1": ["blocks.1"]}, {"0": ["embedding", "blocks.0"]}])
    ''
    >>> same_names([{"0": ["0", "1"]}, {"1": ["0"]}])
    "stages 0 and 1 of the pipeline both have modules named '0'; add each under a name of its own: add_modules(('a name', stage_module))"
    """
    stage_of: dict[str, str] = {}
    for stages in ranks:
        for stage, names in stages.items():
            shared = [name for name in names if stage_of.setdefault(name, stage) != stage]
            if shared:
                shown = ", ".join(map(repr, shared[:_SHOWN]))
                return (
                    f"stages {stage_of[shared[0]]} and {stage} of the pipeline both have modules named {shown}; "
                    "add each under a name of its own: add_modules(('a name', stage_module))"
                )
    return ""
