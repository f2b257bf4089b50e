"""The processes of a training, and their agreement to share measurements."""

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any

import torch.distributed

from ikkuna.distributed.dtensor import same_names
from ikkuna.errors import LogDirError
from ikkuna.support.failures import log
from ikkuna.support.torch_internals import default_store


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


PATIENCE = 10.0
"""Seconds to wait for the other ranks."""

_OPERATION = timedelta(minutes=30)
_numbers = count()
_torch: Any = torch.distributed  # some builds of torch lack parts of it


@dataclass(frozen=True, slots=True)
class Agreement:
    """The result of a rendezvous, equal on all ranks.

    Parameters
    ----------
    reason : str
        Why measurements are not shared; empty if they are.
    present : tuple of int
        The ranks that took part.
    store : Store
        The store that the ranks used.
    """

    reason: str
    present: tuple[int, ...]
    store: Any


def agree(
    world: World,
    signature: Sequence[str],
    stages: Mapping[str, Sequence[str]],
    step: int,
    patience: float = PATIENCE,
) -> tuple[Agreement, Any]:
    """Compare the measurements that each rank requests, and create a process group for them.

    Every rank writes its signature to the store.  The last one compares them and writes the decision; a rank that has waited for `patience`
    seconds writes another decision under the same key.  Only the first one counts, so no rank uses a group that others have given up.
    The group is created without ``torch.distributed.new_group``, which numbers groups and would put those of the user out of step.

    Rendezvous are numbered.  A rank that finds one already decided without it goes on to the next number,
    so an exporter that exists on one rank only does not disturb later ones.

    Parameters
    ----------
    world : World
        The ranks to wait for.
    signature : sequence of str
        The measurements that this rank requests, a line for each subscriber.
    stages : mapping
        The names of the modules of each stage that this rank runs, by the stage's number; empty if there is no pipeline.
    step : int
        The first step of this rank, which is above 0 if the training was resumed.
    patience : float
        Seconds to wait.

    Returns
    -------
    agreement : Agreement
        The decision.
    group : ProcessGroup or None
        ``None`` if nothing is shared.  The caller must hold the only reference, because its destruction can block.
    """
    while True:
        store = _torch.PrefixStore(f"ikkuna/{next(_numbers)}", world.store)
        if not store.check(["decision"]):
            break
    store.set(f"signature/{world.rank}", json.dumps({"requests": list(signature), "stages": stages, "step": step}))
    if store.add("arrived", 1) == world.size:
        decision = _decide(store, *_compare(store, world))
    else:
        decision = _await(store, world, patience)
    reason, present = decision["reason"], tuple(decision["present"])
    if reason or world.rank not in present:
        return Agreement(reason or "the other ranks did not wait for this one", present, store), None
    group = _torch.ProcessGroupGloo(
        _torch.PrefixStore("group", store), world.rank, world.size, timedelta(seconds=patience)
    )
    group.set_timeout(_OPERATION)
    return Agreement("", present, store), group


def _compare(store: Any, world: World) -> tuple[str, list[int]]:
    texts = store.multi_get([f"signature/{rank}" for rank in range(world.size)])
    signatures = [json.loads(text) for text in texts]
    first = signatures[0]["requests"]
    others = (rank for rank in range(1, world.size) if texts[rank] != texts[0])
    differing = [text for rank in others if (text := _difference(first, signatures[rank]["requests"], rank))]
    shown = "; ".join(differing[:3]) + (f"; and {len(differing) - 3} more" if len(differing) > 3 else "")
    reason = f"the ranks request different measurements: {shown}" if differing else ""
    reason = reason or _same_step([signature["step"] for signature in signatures])
    return reason or same_names(signature["stages"] for signature in signatures), list(range(world.size))


def _same_step(steps: list[int]) -> str:
    """Return why ranks cannot share measurements whose first steps are `steps`; empty if these are equal."""
    other = next((rank for rank, step in enumerate(steps) if step != steps[0]), None)
    if other is None:
        return ""
    return (
        f"rank 0 begins at step {steps[0]}, rank {other} at step {steps[other]}; "
        "call load_state_dict() on every rank, with states of the same checkpoint"
    )


def _difference(first: list[str], other: list[str], rank: int) -> str:
    lacks, adds = Counter(first) - Counter(other), Counter(other) - Counter(first)
    parts = [f"lacks {', '.join(lacks)}" if lacks else "", f"has {', '.join(adds)}" if adds else ""]
    return f"rank {rank}, compared with rank 0, {' and '.join(filter(None, parts))}" if lacks or adds else ""


def _await(store: Any, world: World, patience: float) -> dict[str, Any]:
    if poll(lambda: store.check(["decision"]), patience):
        decision: dict[str, Any] = json.loads(store.get("decision"))
        return decision
    missing = [rank for rank in range(world.size) if not store.check([f"signature/{rank}"])]
    present = [rank for rank in range(world.size) if rank not in missing]
    ranks = ", ".join(map(str, missing))
    return _decide(store, f"rank {ranks} of {world.size} did not come within {patience:g} s", present)


def _decide(store: Any, reason: str, present: list[int]) -> dict[str, Any]:
    """Write a decision, unless the store has one, and return that of the store."""
    text = json.dumps({"reason": reason, "present": present})
    decision: dict[str, Any] = json.loads(store.compare_set("decision", "", text))
    return decision


def poll(is_done: Callable[[], bool], patience: float) -> bool:
    """Poll until `is_done` returns true, for at most `patience` seconds; a blocking wait would occupy the user's store."""
    deadline, pause = time.monotonic() + patience, 0.002
    while not is_done():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    return True


def missing_ranks(store: Any, world: World) -> list[int]:
    """Return the ranks that do not answer within a second; all ranks that are left call this."""
    store.set(f"alive/{world.rank}", "")
    others = [rank for rank in range(world.size) if rank != world.rank]
    poll(lambda: store.check([f"alive/{rank}" for rank in others]), 1.0)
    return [rank for rank in others if not store.check([f"alive/{rank}"])]


_calls: Counter[str] = Counter()


def from_first_rank(world: World, name: str, find: Callable[[], Any]) -> Any:
    """Return the result of `find` on rank 0, on every rank.

    Rank 0 does not wait.  A rank that waits for `PATIENCE` in vain, because rank 0 does not call this function,
    logs a warning and uses its own result.

    Parameters
    ----------
    world : World
        The ranks.
    name : str
        Distinguishes the value from others; the n-th calls of all ranks with one name belong together.
    find : callable
        Returns data that JSON can represent.

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
    if not poll(lambda: store.check([key]), PATIENCE):
        log.warning("rank 0 has not named its %s within %g s; rank %d uses its own", name, PATIENCE, world.rank)
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


def on_all_ranks(world: World, name: str, value: bool) -> bool:
    """Return whether `value` is true on every rank; a rank that does not call this within `PATIENCE` counts as false.

    The n-th calls of all ranks with one name belong together.

    Examples
    --------
    >>> on_all_ranks(World.here(), "answer", True)
    True
    """
    if world.size == 1:
        return value
    _calls[name] += 1
    store = _torch.PrefixStore(f"ikkuna/all ranks/{name}/{_calls[name]}", world.store)
    store.set(str(world.rank), json.dumps(value))
    keys = [str(rank) for rank in range(world.size)]
    return poll(lambda: store.check(keys), PATIENCE) and all(map(json.loads, store.multi_get(keys)))
