"""Which part of a tensor this rank has: tensors that are spread over ranks, as what lies here."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

__all__ = [
    "Part",
    "arrived",
    "data_parallel_size",
    "holds_gradients",
    "is_run_together",
    "is_spread",
    "local_part",
    "local_tensor",
    "model_parallel_group",
    "reshard",
    "spread_like",
    "whole",
]

_ORIGIN = 1 << 32


@dataclass(frozen=True, slots=True)
class Part:
    """Which part of a tensor that is spread over ranks lies here.

    Parameters
    ----------
    number : the same for ranks that have the same elements of the tensor, and different for others
    is_shard : whether others have other elements
    mesh : the lowest rank that has any of it
    """

    number: int
    is_shard: bool
    mesh: int

    @property
    def data_number(self) -> int:
        """`number`, different also from those of tensors on other ranks: each data-parallel replica has data of its own."""
        return self.mesh * _ORIGIN + self.number


def is_spread(x: Tensor) -> bool:
    """Whether a tensor is not, or not yet, simply here: a DTensor, or the result of a collective under way."""
    return type(x).__name__ in ("DTensor", "AsyncCollectiveTensor")


def local_tensor(x: Tensor) -> Tensor:
    """Return what lies here of a tensor; the tensor itself where it is not spread."""
    return arrived(cast(Tensor, cast(Any, x).to_local()) if type(x).__name__ == "DTensor" else x)


def local_part(x: Tensor, may_ask: bool) -> tuple[Tensor, Part | None] | None:
    """Return what lies here of a tensor that is spread over ranks, and which part it is (``None`` for one that was only under way).

    Sums that are still to be made over ranks (``Partial``) are made if the other ranks of the tensor's mesh may be asked,
    which then have to ask as well; otherwise there is nothing to return.
    """
    if type(x).__name__ != "DTensor":
        return arrived(x), None
    spread = cast(Any, x)
    if any(placement.is_partial() for placement in spread.placements):
        if not may_ask:
            return None
        from torch.distributed.tensor import Replicate

        known = [Replicate() if placement.is_partial() else placement for placement in spread.placements]
        spread = spread.redistribute(placements=known)
    mesh = spread.device_mesh
    number, is_shard = 0, False
    coordinate = mesh.get_coordinate()
    for dimension, placement in enumerate(spread.placements):
        if not placement.is_replicate():
            number = number * mesh.size(dimension) + (coordinate[dimension] if coordinate else 0)
            is_shard = is_shard or mesh.size(dimension) > 1
    return local_tensor(spread), Part(number, is_shard, int(mesh.mesh.min()))


def arrived(x: Tensor) -> Tensor:
    """Return a tensor whose collective is over."""
    return cast(Tensor, cast(Any, x).wait()) if type(x).__name__ == "AsyncCollectiveTensor" else x


def whole(x: Tensor) -> Tensor:
    """Return all elements of a tensor that is spread over ranks; every rank of its mesh has to call this."""
    return arrived(cast(Any, x).full_tensor() if type(x).__name__ == "DTensor" else x)


def spread_like(local: Tensor, x: Tensor) -> Tensor:
    """Return what lies here as a part of a tensor that is spread like `x`."""
    if type(x).__name__ != "DTensor":
        return local
    like = cast(Any, x)
    made = type(like).from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return cast(Tensor, made)


def data_parallel_size(root: nn.Module) -> int:
    """Return over how many ranks the gradients of a model are averaged; call it while a data-parallel wrapper calls the model.

    1 where it cannot be seen: gradients that a script averages by hand are its own.
    """
    wrapper = torch.nn.parallel.DistributedDataParallel
    if (active := getattr(wrapper, "_active_ddp_module", None)) is not None:
        return int(active.process_group.size())
    mesh = _fsdp_mesh(root)
    return int(mesh.size()) if mesh is not None else 1


def holds_gradients(root: nn.Module) -> bool:
    """Whether FSDP keeps gradients that wait for the last micro-batch before ranks share them."""
    return any(
        getattr(parameter, "unsharded_accumulated_grad", None) is not None
        or getattr(getattr(parameter, "_unsharded_param", None), "grad", None) is not None
        for group in _fsdp_groups(root)
        for parameter in group.fsdp_params
    )


def is_run_together(root: nn.Module) -> bool:
    """Whether the forward of a model calls other ranks: its parameters are spread over them."""
    return next(_fsdp_groups(root), None) is not None or any(map(is_spread, root.parameters()))


def reshard(root: nn.Module) -> None:
    """Let go of what FSDP keeps together for a backward that will not come."""
    for module in root.modules():
        if hasattr(type(module), "_get_fsdp_state"):  # an instance takes long to say that it has none
            cast(Any, module).reshard()


def _fsdp_mesh(root: nn.Module) -> Any:
    """Return the mesh of ranks that each have other data, of the first module of `root` that is sharded over it."""
    return next((group.mesh_info.mesh for group in _fsdp_groups(root)), None)


def _fsdp_groups(root: nn.Module) -> Iterator[Any]:
    for module in root.modules():
        if (state_of := cast(Any, getattr(module, "_get_fsdp_state", None))) is not None:
            state = state_of()
            groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
            yield from (group for group in groups if group is not None)


def model_parallel_group(root: nn.Module, rank: int) -> int:
    """Return the lowest rank of those that see the same data as this one, since they share the model's tensors.

    These are the dimensions of the parameters' meshes that FSDP does not shard over.
    """
    mesh = _fsdp_mesh(root)
    data = frozenset(mesh.mesh.flatten().tolist()) if mesh is not None else frozenset[int]()
    group = {rank}
    for parameter in root.parameters():
        if is_spread(parameter):
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
