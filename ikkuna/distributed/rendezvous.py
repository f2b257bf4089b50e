"""The one time at which all ranks agree to share what they measure, or not to."""

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any

import torch.distributed

from ikkuna.distributed.world import World

__all__ = ["PATIENCE", "Agreement", "hold", "roll_call"]

PATIENCE = 10.0
"""Seconds to wait for the other ranks, once."""

_OPERATION = timedelta(minutes=30)
_numbers = count()
_torch: Any = torch.distributed  # a build of torch may lack what is in it


@dataclass(frozen=True, slots=True)
class Agreement:
    """What the ranks agreed on: all of them read the same words.

    Parameters
    ----------
    reason : why nothing is shared; empty if it is
    present : the ranks that came
    store : where they met
    """

    reason: str
    present: tuple[int, ...]
    store: Any


def hold(world: World, signature: Sequence[str], patience: float = PATIENCE) -> tuple[Agreement, Any]:
    """Meet all ranks: compare what each wants to measure, and make a group of our own.

    Every rank announces itself in the store.  The last one to come compares, and writes the verdict; one that has waited too long
    writes another, in the same place, and only the first writing counts: so nobody believes in a group that others have given up.
    The group is made without ``torch.distributed.new_group``, which counts groups and would put a user's own out of step.

    Meetings are numbered.  A rank that finds one over to which it was not waited for goes on to the next number,
    so an exporter that only one rank had leaves no trace in the meetings after it.

    The group is returned beside the verdict (``None`` if nothing is shared) and not kept in it: its end can take long,
    so there must be one place that lets it go.

    Parameters
    ----------
    world : who should come
    signature : what this rank wants to measure, a line for each subscriber
    patience : seconds to wait
    """
    while True:
        store = _torch.PrefixStore(f"ikkuna/{next(_numbers)}", world.store)
        if not store.check(["verdict"]):
            break
    store.set(f"signature/{world.rank}", json.dumps(list(signature)))
    if store.add("arrived", 1) == world.size:
        told = _decide(store, *_compare(store, world))
    else:
        told = _await(store, world, patience)
    reason, present = told["reason"], tuple(told["present"])
    if reason or world.rank not in present:
        return Agreement(reason or "the other ranks did not wait for this one", present, store), None
    group = _torch.ProcessGroupGloo(
        _torch.PrefixStore("group", store), world.rank, world.size, timedelta(seconds=patience)
    )
    group.set_timeout(_OPERATION)
    return Agreement("", present, store), group


def _compare(store: Any, world: World) -> tuple[str, list[int]]:
    texts = store.multi_get([f"signature/{rank}" for rank in range(world.size)])
    first = texts[0]
    others = (rank for rank in range(1, world.size) if texts[rank] != first)
    differing = [text for rank in others if (text := _difference(json.loads(first), json.loads(texts[rank]), rank))]
    shown = "; ".join(differing[:3]) + (f"; and {len(differing) - 3} more" if len(differing) > 3 else "")
    return (f"the ranks want to measure different things: {shown}" if differing else ""), list(range(world.size))


def _difference(first: list[str], other: list[str], rank: int) -> str:
    lacks, adds = Counter(first) - Counter(other), Counter(other) - Counter(first)
    parts = [f"lacks {', '.join(lacks)}" if lacks else "", f"has {', '.join(adds)}" if adds else ""]
    return f"rank {rank}, beside rank 0, {' and '.join(filter(None, parts))}" if lacks or adds else ""


def _await(store: Any, world: World, patience: float) -> dict[str, Any]:
    if _poll(lambda: store.check(["verdict"]), patience):
        told: dict[str, Any] = json.loads(store.get("verdict"))
        return told
    missing = [rank for rank in range(world.size) if not store.check([f"signature/{rank}"])]
    present = [rank for rank in range(world.size) if rank not in missing]
    ranks = ", ".join(map(str, missing))
    return _decide(store, f"rank {ranks} of {world.size} did not come within {patience:g} s", present)


def _decide(store: Any, reason: str, present: list[int]) -> dict[str, Any]:
    """Write the verdict unless there is one, and return the one there is."""
    verdict = json.dumps({"reason": reason, "present": present})
    told: dict[str, Any] = json.loads(store.compare_set("verdict", "", verdict))
    return told


def _poll(is_done: Callable[[], bool], patience: float) -> bool:
    """Ask until it is so, at most for `patience` seconds; the store is another's, so it is asked and not waited on."""
    deadline, pause = time.monotonic() + patience, 0.002
    while not is_done():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    return True


def roll_call(store: Any, world: World, patience: float = 1.0) -> list[int]:
    """Return the ranks that do not answer, for a rank that has lost touch with the others; they lose it too, and call as well."""
    store.set(f"alive/{world.rank}", "")
    asked = [rank for rank in range(world.size) if rank != world.rank]
    _poll(lambda: store.check([f"alive/{rank}" for rank in asked]), patience)
    return [rank for rank in asked if not store.check([f"alive/{rank}"])]
