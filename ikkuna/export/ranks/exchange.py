"""Lets every rank know what all ranks measured."""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import nn

from ikkuna.distributed import rendezvous as meeting
from ikkuna.distributed.alignment import Alignments
from ikkuna.distributed.block import Block, build
from ikkuna.distributed.dtensor import data_parallel_size, is_run_together, model_parallel_group
from ikkuna.distributed.gather import Gather
from ikkuna.distributed.layout import Layouts
from ikkuna.distributed.merge import merge_blocks
from ikkuna.distributed.world import World
from ikkuna.export.bus.bus import MessageBus
from ikkuna.export.messages.stamp import Stamp
from ikkuna.export.ranks.translation import Translation, signature_of
from ikkuna.export.rows.plan import Plan
from ikkuna.export.rows.rows import Rows

__all__ = ["Exchange"]

log = logging.getLogger("ikkuna")

WAITING = 64
"""Steps that may wait for other ranks; what is measured while so many do is lost."""

_CLOSING = 2.0
_LONG = 3600.0


class Exchange:
    """Gathers the rows of each sampled step from all ranks, one gather at a time.

    All ranks meet when the first step begins; after that every rank issues the same sequence of gathers, and none waits for another:
    at each boundary it asks whether the oldest gather is over, delivers it and begins the next.
    Ranks whose oldest steps differ (one evaluates by itself, say) see that from what was gathered: those that are behind go first,
    and the others send theirs again.

    Whatever fails, this rank goes on with what it measured itself, after one ERROR.

    Parameters
    ----------
    bus : whose subscribers there are
    place : returns the place of a kind and module
    roots : returns the modules whose calls are forwards of the whole

    Attributes
    ----------
    replicas : over how many ranks gradients are averaged
    dropped : entries that were lost since ranks could not keep up
    """

    def __init__(
        self, bus: MessageBus, place: Callable[[str, str | None], Any], roots: Callable[[], tuple[nn.Module, ...]]
    ) -> None:
        self._bus = bus
        self._roots = roots
        self._translation = Translation(bus, place)
        self._world: World | None = None
        self._verdict: meeting.Agreement | None = None
        self._gather: Gather | None = None
        self._layouts = Layouts()
        self._alignments = Alignments()
        self._group = 0
        self._waiting: list[_Share] = []
        self._deadline: float | None = None
        self.replicas = 1
        self.dropped = 0

    @property
    def is_shared(self) -> bool:
        """Whether other ranks take part."""
        return self._gather is not None

    # -- when a step begins and ends ------------------------------------------------------------------------------

    def step_opened(self) -> None:
        """Meet the other ranks, once; look over how many ranks the gradients of this step are averaged."""
        self._meet_once()
        if World.here().size > 1:
            self.replicas = max((data_parallel_size(root) for root in self._roots()), default=1)

    def take(self, rows: Rows, plan: Plan) -> None:
        """Have the rows of a step made one of all ranks before they are delivered, if there are others."""
        if self._gather is None or not plan.takes_data:
            return
        share = _Share(self, rows.stamp)
        if len(self._waiting) >= WAITING:
            self._lose(rows)
            share.lost = True
        rows.sharing = share
        self._waiting.append(share)

    def _lose(self, rows: Rows) -> None:
        if not self.dropped:
            log.error(
                "other ranks are %d steps behind; from step %d on what is measured is lost until they have come up",
                *(WAITING, rows.stamp.global_step),
            )
        self.dropped += len(rows.entries)
        rows.entries = {}

    def _meet_once(self) -> None:
        if self._world is None:
            self._world = World.here()
            if self._world.size > 1:
                self._meet(self._world)

    def _meet(self, world: World) -> None:
        self._bus.is_silent = world.rank != 0
        try:
            self._verdict, group = meeting.hold(world, signature_of(self._bus.registered))
            self._group = min((model_parallel_group(root, world.rank) for root in self._roots()), default=world.rank)
        except Exception as error:
            self._go_alone(f"they could not meet: {error}")
            return
        if group is None:
            self._bus.is_silent = world.rank != min(self._verdict.present)
            self._go_alone(self._verdict.reason)
        else:
            self._gather = Gather(group, world.size)

    def must_wait(self, stamp: Stamp | None) -> bool:
        """Whether what was measured has to be delivered now: a subscriber calls the model, which ranks may have to do together.

        Parameters
        ----------
        stamp : of the step that is over, or ``None`` for an epoch
        """
        if not self.is_shared:
            return False
        calling = (s for s in self._bus.registered if s.subscriber.needs_model and not s.disabled)
        if stamp is None:
            return any("epoch_finished" in s.kinds for s in calling)
        return any(s.samples(stamp) and any(not kind.startswith("epoch") for kind in s.kinds) for s in calling)

    # -- while a step waits ---------------------------------------------------------------------------------------

    def poll(self, share: "_Share", rows: Rows, patience: float = 0.0) -> bool:
        """Whether the rows of all ranks are here, or none will come any more."""
        try:
            while share.blocks is None and self._gather is not None:
                if self._gather.is_idle:
                    self._gather.begin(share.payload(rows))
                if (payloads := self._gather.poll(self._patience(patience))) is None:
                    if not patience:
                        return False
                    raise TimeoutError("the other ranks did not send theirs in time")
                self._understand(share, payloads)
        except Exception as error:
            self._lose_touch(error)
        return True

    def _patience(self, patience: float) -> float:
        return patience if self._deadline is None else max(0.01, min(patience, self._deadline - time.monotonic()))

    def _understand(self, share: "_Share", payloads: list[memoryview]) -> None:
        blocks = [Block.unpack(rank, payload, self._layouts) for rank, payload in enumerate(payloads)]
        turn = min(_turn(block.stamp) for block in blocks)
        if _turn(share.stamp) == turn:
            share.blocks = [block for block in blocks if _turn(block.stamp) == turn]

    def merge_into(self, share: "_Share", rows: Rows) -> None:
        """Put what all ranks have in the place of what this one has."""
        rows.land()
        self.poll(share, rows, _LONG)
        self._waiting.remove(share)
        if share.blocks is None:
            return
        try:
            if any(block.lost for block in share.blocks):
                self.dropped += len(rows.entries)
                rows.entries = {}
                return
            apart = self._translation.keys_apart(rows)
            merged = merge_blocks(share.blocks, self._alignments, apart)
            rows.entries = self._translation.entries(rows, merged)
            rows.skipped = any(block.skipped for block in share.blocks)
        except Exception as error:
            self._bus.error_guard.report_internal("merging what the ranks have measured", error)

    def block(self, rows: Rows, is_lost: bool) -> Block:
        """Return what this rank measured."""
        # Another pass may run over the same data on every rank, or over other data on each: what was seen will tell.
        group = self._group if rows.stamp.pass_name == "training" else 0
        written = [] if is_lost else self._translation.rows(rows)
        return build(_stamp(rows.stamp), written, group, self._layouts, rows.skipped, is_lost)

    def pack(self, block: Block) -> bytes:
        """Return a block as bytes."""
        return block.pack(self._layouts)

    # -- when the others are gone ---------------------------------------------------------------------------------

    def _lose_touch(self, error: Exception) -> None:
        self._end_gather()
        missing: list[int] = []
        if self._verdict is not None and self._world is not None and self._deadline is None:
            with suppress(Exception):  # the store may be on the rank that died
                missing = meeting.roll_call(self._verdict.store, self._world)
        who = f"rank {', '.join(map(str, missing))} does not answer; " if missing else ""
        self._go_alone(f"{who}{error}")

    def _go_alone(self, reason: str) -> None:
        rank = self._world.rank if self._world is not None else 0
        with suppress(Exception):  # of a handler that is not ours
            log.error("training on several ranks: %s. From here on values are those of rank %d alone", reason, rank)
        if any(map(is_run_together, self._roots())):
            for subscription in self._bus.registered:
                if subscription.subscriber.needs_model:
                    self._bus.error_guard.disable(
                        subscription, "the loss of other ranks, without which the model cannot run"
                    )

    def _end_gather(self) -> None:
        gather, self._gather = self._gather, None
        if gather is not None:
            gather.close()

    def prepare_close(self) -> None:
        """Let what still waits for other ranks wait for 2 seconds more, all in all."""
        self._deadline = time.monotonic() + _CLOSING

    def close(self) -> None:
        """Leave the other ranks."""
        self._end_gather()


class _Share:
    """One step's way through the exchange."""

    def __init__(self, exchange: Exchange, stamp: Stamp) -> None:
        self._exchange = exchange
        self._payload: bytes | None = None
        self.stamp = _stamp(stamp)
        self.lost = False
        self.blocks: list[Block] | None = None

    def payload(self, rows: Rows) -> bytes:
        if self._payload is None:
            rows.land()
            self._payload = self._exchange.pack(self._exchange.block(rows, self.lost))
        return self._payload

    def arrived(self, rows: Rows) -> bool:
        return self._exchange.poll(self, rows)

    def merge_into(self, rows: Rows) -> None:
        self._exchange.merge_into(self, rows)


def _stamp(stamp: Stamp) -> tuple[int, int, int, str]:
    return stamp.global_step, stamp.train_step, stamp.epoch, stamp.pass_name


def _turn(stamp: tuple[int, int, int, str]) -> tuple[bool, int, str]:
    """Return what puts steps in order.

    Other passes go first, since a rank that has none waits with a training step, which the others still have to make.
    Epochs do not matter: it is a habit to tell of their end on rank 0 only.
    """
    return stamp[3] == "training", stamp[0], stamp[3]
