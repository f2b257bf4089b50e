"""Which ranks must hold the same bits of a parameter, because the program says that they are replicas."""

import gc
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch.distributed
from torch import nn

from ikkuna.distributed.block import OWN
from ikkuna.distributed.dtensor import is_distributed
from ikkuna.support.modules import NamedParameter, is_flattened
from ikkuna.support.torch_internals import flat_parameters

ParameterKey = tuple[str, str, bool]
"""Module, path, and whether the parameter is a bias."""

NOT_REPLICATED = -2
"""The number of a tensor that may differ between ranks; :data:`OWN` is that of a tensor of which nothing is known."""

_OF_TORCH = "torch.distributed.algorithms.ddp_comm_hooks."


class Replicas:
    """The replicas of the parameters of a model.

    A program says that ranks are replicas in two ways:

    * ``DistributedDataParallel`` broadcasts the parameters of its module when it is created, and averages their gradients.
      Parameters that it ignores are no replicas, and none are if a hook of the user, or of local SGD, replaces the averaging.
    * A DTensor, as those of FSDP2, is equal on the ranks along the dimensions of its mesh whose placement is ``Replicate``.

    Other shards, and what a wrapper leaves out, may differ.  The ranks of a wrapper compute the same function of other data, so that
    frozen parameters outside of it, which no step makes equal, must be equal as well, if one wrapper has the others.
    Of trainable parameters without a wrapper nothing is known here.

    Parameters
    ----------
    parameters : iterable of NamedParameter
        The parameters.

    Attributes
    ----------
    numbers : mapping
        For each parameter the lowest of the ranks that must hold the same as this one, or one of the numbers below 0.
    """

    def __init__(self, parameters: Iterable[NamedParameter]) -> None:
        self._wrappers: dict[int, tuple[Any, int]] = {}
        parameters = list(parameters)
        observed = {id(named.parameter) for named in parameters}
        for wrapper in _living(nn.parallel.DistributedDataParallel):
            if not hasattr(wrapper, "process_group") or observed.isdisjoint(map(id, wrapper.parameters())):
                continue  # it is not set up, or of another model, whose process group may have been destroyed
            number = NOT_REPLICATED
            if _averages(wrapper):
                number = min(torch.distributed.get_process_group_ranks(wrapper.process_group))
            for name, parameter in wrapper.module.named_parameters():
                is_left_out = name in wrapper.parameters_to_ignore
                self._wrappers[id(parameter)] = wrapper, NOT_REPLICATED if is_left_out else number
        known = {
            self._wrappers[id(named.parameter)][1] for named in parameters if id(named.parameter) in self._wrappers
        }
        of_frozen = known.pop() if len(known) == 1 else OWN
        self.numbers: dict[ParameterKey, int] = {}
        self._wrapper_of: dict[ParameterKey, Any] = {}
        for named in parameters:
            key, parameter = (named.module, named.path, named.is_bias), named.parameter
            if is_distributed(parameter):
                self.numbers[key] = replica_number(parameter)
            else:
                unwrapped = None, OWN if parameter.requires_grad else of_frozen
                self._wrapper_of[key], self.numbers[key] = self._wrappers.get(id(parameter), unwrapped)

    def of_gradients(self) -> Mapping[ParameterKey, int]:
        """Return the numbers for gradients, which may differ if the last forward was in ``no_sync()``."""
        wrapped = ((key, wrapper) for key, wrapper in self._wrapper_of.items() if wrapper is not None)
        waiting = {key for key, wrapper in wrapped if not getattr(wrapper, "require_forward_param_sync", True)}
        return self.numbers | dict.fromkeys(waiting, NOT_REPLICATED) if waiting else self.numbers


class FlatUnits:
    """The wrappers of FSDP1 that have made parameters of a model flat, and which shards this rank has.

    Parameters
    ----------
    parameters : iterable of NamedParameter
        The parameters.

    Attributes
    ----------
    positions : mapping
        For each parameter of which other ranks have other elements the number of its shard.
    data_parallel_size : int
        The number of ranks that average the gradients; 1 without wrappers.
    """

    def __init__(self, parameters: Iterable[NamedParameter]) -> None:
        named = {id(each.parameter): each for each in parameters if is_flattened(each.parameter)}
        self.positions: dict[ParameterKey, int] = {}
        self.data_parallel_size = 1
        if not named:
            return
        from torch.distributed.fsdp import FullyShardedDataParallel

        for flattened, position, size in map(flat_parameters, _living(FullyShardedDataParallel)):
            if own := [named[id(p)] for p in flattened if id(p) in named]:
                self.data_parallel_size = size
                if position is not None:
                    self.positions |= {(each.module, each.path, each.is_bias): position for each in own}


def _living(base: type[nn.Module]) -> list[Any]:
    """Return the living wrappers of a class; an ordinary search through modules does not find that of the whole model."""
    return [each for each in gc.get_objects() if issubclass(type(each), base)]


def _averages(wrapper: Any) -> bool:
    """Return whether a wrapper averages gradients over all its ranks."""
    hooks = [hook for hook, _ in getattr(wrapper, "_comm_hooks", ())]
    sources = [f"{getattr(hook, '__module__', '')}.{getattr(hook, '__qualname__', '')}" for hook in hooks]
    return all(source.startswith(_OF_TORCH) and "post_localSGD" not in source for source in sources)


def replica_number(parameter: nn.Parameter) -> int:
    """Return the lowest of the ranks that have the same shard of a DTensor; :data:`NOT_REPLICATED` if no other rank has it."""
    dtensor = cast(Any, parameter)
    coordinate, mesh = dtensor.device_mesh.get_coordinate(), dtensor.device_mesh.mesh
    if coordinate is None:
        return NOT_REPLICATED
    line = [
        slice(None) if placement.is_replicate() else place
        for place, placement in zip(coordinate, dtensor.placements, strict=True)
    ]
    ranks = mesh[tuple(line)].flatten().tolist()
    return int(min(ranks)) if len(ranks) > 1 else NOT_REPLICATED
