"""The rank of this process and the number of processes."""

from dataclasses import dataclass
from typing import Any

import torch.distributed

from ikkuna.torch_internals import default_store

__all__ = ["World"]


@dataclass(frozen=True, slots=True)
class World:
    """The processes that train together.

    Parameters
    ----------
    rank : int
        Rank of this process.
    size : int
        Number of processes.
    """

    rank: int
    size: int

    @classmethod
    def here(cls) -> "World":
        """Return the world of the default process group; without one, a world of this process.

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
        """The store of the default process group."""
        return default_store()


_ALONE = World(0, 1)
