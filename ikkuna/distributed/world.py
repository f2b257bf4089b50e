"""Which process of how many this is."""

from dataclasses import dataclass
from typing import Any

import torch.distributed

__all__ = ["World"]


@dataclass(frozen=True, slots=True)
class World:
    """The processes that train together.

    Parameters
    ----------
    rank : which of them this is
    size : how many there are
    """

    rank: int
    size: int

    @classmethod
    def here(cls) -> "World":
        """Return the world of the default process group; without one this process is alone.

        Examples
        --------
        >>> World.here()
        World(rank=0, size=1)
        """
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return cls(torch.distributed.get_rank(), torch.distributed.get_world_size())
        return _ALONE

    @property
    def store(self) -> Any:
        """The store in which the processes found each other."""
        return torch.distributed.distributed_c10d._get_default_store()


_ALONE = World(0, 1)
