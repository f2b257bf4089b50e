"""The stages of a pipeline that this process runs."""

import gc
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ikkuna.modules import unwrap

__all__ = ["StagePosition", "stage_positions", "stage_within"]


@dataclass(frozen=True, slots=True)
class StagePosition:
    """The place of a stage in its pipeline.

    Parameters
    ----------
    index : int
        The number of the stage, from 0.
    count : int
        The number of stages.
    """

    index: int
    count: int

    @property
    def is_first(self) -> bool:
        """Whether the stage receives the inputs of the model."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage returns the outputs of the model."""
        return self.index == self.count - 1


def stage_positions(modules: Iterable[nn.Module]) -> dict[int, StagePosition]:
    """Return the places of those `modules` that are stages of a pipeline, by their ids.

    Stages are found among all objects of the process, because a module does not know its stage.
    """
    wanted = {id(module) for module in modules}
    return {
        id(module): StagePosition(stage.stage_index, stage.num_stages)
        for stage, module in _stages()
        if id(module) in wanted
    }


def stage_within(root: nn.Module) -> nn.Module | None:
    """Return a stage that is a part of `root`, rather than `root` itself; ``None`` if there is none."""
    stages = [module for _, module in _stages()]
    inside = {id(module) for module in root.modules() if module is not root} if stages else set()
    return next((module for module in stages if id(module) in inside), None)


def _stages() -> Iterator[tuple[Any, nn.Module]]:
    module = sys.modules.get("torch.distributed.pipelining.stage")
    base = getattr(module, "_PipelineStageBase", None)
    if base is None or not torch.distributed.is_initialized():
        return
    for found in gc.get_objects():
        if issubclass(type(found), base) and isinstance(getattr(found, "submod", None), nn.Module):
            yield found, unwrap(found.submod)
