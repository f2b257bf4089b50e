"""Values that all ranks take from rank 0, such as the run to continue."""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch.distributed

from ikkuna.distributed.rendezvous import PATIENCE, poll
from ikkuna.distributed.world import World
from ikkuna.errors import LogDirError
from ikkuna.logger import log

__all__ = ["from_first_rank"]

_torch: Any = torch.distributed  # some builds of torch lack parts of it
_calls: Counter[str] = Counter()


def from_first_rank(world: World, name: str, find: Callable[[], Any], patience: float = PATIENCE) -> Any:
    """Return the result of `find` on rank 0, on every rank.

    Rank 0 does not wait.  A rank that waits for `patience` seconds in vain, because rank 0 does not call this function,
    logs a warning and uses its own result.

    Parameters
    ----------
    world : World
        The ranks.
    name : str
        Distinguishes the value from others; the n-th calls of all ranks with one name belong together.
    find : callable
        Returns data that JSON can represent.
    patience : float
        Seconds to wait.

    Raises
    ------
    LogDirError
        If `find` raises it on rank 0, on every rank.

    Examples
    --------
    >>> from_first_rank(World.here(), "answer", lambda: 42)
    42
    """
    if world.size == 1:
        return find()
    _calls[name] += 1
    store, key = _torch.PrefixStore("ikkuna/first rank", world.store), f"{name}/{_calls[name]}"
    if world.rank == 0:
        return _publish(store, key, find)
    if not poll(lambda: store.check([key]), patience):
        log.warning("rank 0 has not named its %s within %g s; rank %d uses its own", name, patience, world.rank)
        return find()
    found = json.loads(store.get(key))
    if "error" in found:
        raise LogDirError(f"rank 0: {found['error']}")
    return found["value"]


def _publish(store: Any, key: str, find: Callable[[], Any]) -> Any:
    try:
        value = find()
    except LogDirError as error:
        store.set(key, json.dumps({"error": str(error)}))
        raise
    store.set(key, json.dumps({"value": value}))
    return value
