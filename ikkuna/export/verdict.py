"""Names the cause of a loss that jumped: a row, the state, the rate, the device, or software that is not deterministic."""

import copy
import os
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ikkuna.errors import DumpError
from ikkuna.export.replay import Replay, ReplayRun, Step, check_fits, prepare, restore_state
from ikkuna.export.row_ranking import RankedRow, rank_batch, without_rows
from ikkuna.flight_recorder.capture import copy_state
from ikkuna.flight_recorder.dump_reading import Dump
from ikkuna.flight_recorder.operations import fingerprint
from ikkuna.flight_recorder.recorder import software
from ikkuna.numerics.spike_score import LIMIT, SpikeScore
from ikkuna.printable import listed, printable
from ikkuna.support.torch_internals import pytree

_REPEATS = 3
_PAST = 64  # losses
_LESS = 0.6  # of the excess of the loss, with smaller updates
_RISEN = 4.0  # the rate, over its median before
_RECENT, _OTHERS = 16, 4  # losses, batches
_LOW = 0.1  # of the excess of the loss, in other batches
_FEW = 1 / 8  # of the rows of the batch
_MOST = 0.75  # of the parameters
_NAMED = 5

_SENTENCES = {
    "row": "the batch made the loss jump",
    "state": "the state of the training made the loss jump: it is not the one that the steps before compute",
    "rate": "the updates of the steps before were too large",
    "device": "the machine computed other numbers than the recorded step gives",
    "software": "the program is not deterministic, and the loss jumps in some of its runs",
    None: "the evidence does not decide",
}
_UNCERTAIN = _SENTENCES | {
    "state": f"{_SENTENCES['state']}, or the loop's step is not the one of the replay",
    "rate": f"{_SENTENCES['rate']}: their learning rate is too high, or the state of the optimizer is damaged",
    "device": f"a setting that is not in the dump was changed in Python, such as a dropout rate, or {_SENTENCES['device']}",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The cause of a loss that jumped; ``print()`` shows it with its evidence.

    Parameters
    ----------
    step : int
        The step.
    cause : {'row', 'state', 'rate', 'device', 'software'} or None
        ``None`` if the evidence does not decide.
    is_certain : bool
        Whether the evidence excludes the other causes.
    evidence : tuple of str
        What was run, and what came out.
    settings : tuple of str
        What keeps a replay from computing the same bits.
    rows : tuple of RankedRow
        At most five rows that stand out, if the cause is the batch.
    """

    step: int
    cause: str | None
    is_certain: bool
    evidence: tuple[str, ...]
    settings: tuple[str, ...] = ()
    rows: tuple[RankedRow, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the content for JSON."""
        return asdict(self) | {"sentence": self.sentence}

    @property
    def sentence(self) -> str:
        """The verdict in one sentence."""
        rows = ", ".join(f"row {row.number} ({row.name})" for row in self.rows)
        is_open = self.is_certain or self.cause is None
        text = _SENTENCES[self.cause] if is_open else f"probably {_UNCERTAIN[self.cause]}"
        return printable(f"step {self.step}: {text}{f': {rows}' if rows else ''}")

    def __str__(self) -> str:
        lines = [*(f"  setting: {text}" for text in self.settings), *(f"  {text}" for text in self.evidence)]
        return "\n".join([self.sentence, *map(printable, lines)])


def verdict(
    dump: str | os.PathLike[str] | Dump,
    model: nn.Module,
    loss: nn.Module | None = None,
    optimizer: Optimizer | Iterable[Optimizer] = (),
    *,
    step: Step | None = None,
) -> Verdict:
    """Run the step of a dump again in several ways, and name the cause of its loss.

    ========================================  ==========================================================
    the batch runs                            what it shows
    ========================================  ==========================================================
    3 times on the recorded state             no jump: a setting, or the device; jumps sometimes: software
    on the state before it                    jumps: the batch, if the state is not damaged
    other batches on the recorded state       at most a tenth of the excess: the state is not damaged
    without the rows that stand out           no jump: these rows
    after the steps from the state before     no jump: the recorded state is not what the steps compute
    the same with smaller updates             the excess falls to 60 % or less: the updates
    ========================================  ==========================================================

    A loss jumps if it is not finite, or if its spike score after the losses before is above 10, see
    `ikkuna.numerics.spike_score.SpikeScore`.  If the recorded state differs from the computed one in a single bit, the cause is the device.
    A batch is certain only if at most an eighth of its rows explain the jump, and the losses of the last 16 steps were low as well;
    a rate only if it was above 4 times its median of the steps before; a state only if less than 3/4 of the parameters differ.

    Parameters
    ----------
    dump : path or Dump
        A dump with the state of the training; ``RecorderOptions(state_every=1)`` gives the most evidence.
    model, loss, optimizer, step
        See `ikkuna.export.replay.replay`.

    Raises
    ------
    DumpError, ConfigTypeError
        As for `ikkuna.export.replay.replay`.
    """
    return _Trial(*prepare(dump, model, loss, optimizer, step)).judge()


def _differing_settings(dump: Dump) -> list[str]:
    """Return the versions and the machine of the dump that are not those of this process."""
    known = dump.facts.get("versions")
    there = known if isinstance(known, dict) else {}
    return [
        f"{name} is {own} here, and was {there[name]}"
        for name, own in software().items()
        if there.get(name, own) != own
    ]


def _open_settings(run: ReplayRun) -> list[str]:
    """Return the settings of torch that permit other bits in each run on a device."""
    if run.device.type != "cuda":
        return []
    found = []
    if torch.backends.cudnn.benchmark:
        found.append("torch.backends.cudnn.benchmark is True")
    if not torch.are_deterministic_algorithms_enabled():
        found.append("torch.use_deterministic_algorithms is off")
    if "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        found.append("CUBLAS_WORKSPACE_CONFIG is not set")
    return found


class _Trial:
    """The replays of one dump, and what follows from them."""

    def __init__(self, run: ReplayRun, steps: list[dict[str, Any]]) -> None:
        dump = run.dump
        self._dump, self._run, self._steps, self._optimizers = dump, run, steps, run.optimizers
        self._state = dump.tensors("state.pt")
        self._before, self._steps_before = self._read_before()
        losses = dump.losses
        self._loss = losses.get(dump.step, float("nan"))
        self._past = [value for step, value in losses.items() if step < dump.step]
        self._score = SpikeScore()
        for value in self._past:
            self._score.add(value)
        self._center = float(np.nanmedian(self._past[-_PAST:])) if np.isfinite(self._past).any() else float("nan")
        self._rise = self._risen_by()
        self._evidence: list[str] = []
        self._differing = _differing_settings(dump)
        self._settings = self._differing + _open_settings(run)

    def _read_before(self) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
        if not self._dump.has("state_before.pt"):
            return None, []
        before = self._dump.tensors("state_before.pt")
        steps = [
            batch for batch in self._dump.tensors("batches.pt") if before["step"] <= batch["step"] <= self._dump.step
        ]
        if [batch["step"] for batch in steps] != list(range(before["step"], self._dump.step + 1)):
            return None, []
        check_fits(self._dump, self._run.model, before, self._optimizers)
        return before, steps

    def _risen_by(self) -> float:
        """Return how many times its median before the learning rate was since the state before, in the group where it rose most."""
        steps, rates = (self._dump.rows[name] for name in ("log_steps", "learning_rates"))
        first = (self._before or self._state)["step"]
        since, before = rates[(first <= steps) & (steps < self._dump.step)], rates[steps < first]
        if not len(since) or not len(before):
            return 1.0
        with np.errstate(all="ignore"):
            rises = since.max(axis=0) / np.median(before, axis=0)
        return float(np.nan_to_num(rises, nan=1.0, posinf=np.inf).max(initial=1.0))

    # -- replays --------------------------------------------------------------------------------------------------

    def _again(self, state: dict[str, Any], steps: list[dict[str, Any]], factor: float = 1.0) -> Replay:
        restore_state(self._run.model, pytree.tree_map_only(Tensor, torch.clone, state), self._optimizers)
        return self._run.compare(steps, (), factor)

    def _jumps(self, loss: float) -> bool:
        return not np.isfinite(loss) or copy.deepcopy(self._score).add(loss) > LIMIT

    def _say(self, what: str, loss: float) -> None:
        self._evidence.append(f"{what}: loss {loss:.6g}, which {'jumps' if self._jumps(loss) else 'does not jump'}")

    def _result(self, cause: str | None, is_certain: bool, rows: tuple[RankedRow, ...] = ()) -> Verdict:
        is_certain = is_certain and not self._settings
        return Verdict(self._dump.step, cause, is_certain, tuple(self._evidence), tuple(self._settings), rows[:_NAMED])

    def judge(self) -> Verdict:
        """Run the step again in several ways, and return the verdict."""
        self._evidence.append(f"recorded: loss {self._loss:.6g}; the losses before have the median {self._center:.6g}")
        if not self._jumps(self._loss):
            self._evidence.append(
                f"the recorded loss has no spike score above {LIMIT:g} after {self._score.count} losses, so that it does not jump"
            )
            return self._result(None, False)
        replays, ends = list[Replay](), set[tuple[str | None, ...]]()
        for _ in range(_REPEATS):
            replays.append(self._again(self._state, self._steps))
            ends.add(tuple(fingerprint(parameter) for parameter in self._run.model.parameters()))
        losses = [replay.loss[1] for replay in replays]
        self._say(f"on the recorded state, {_REPEATS} times", losses[0])
        if len({repr((replay.loss[1], replay.equal, replay.differences)) for replay in replays}) > 1 or len(ends) > 1:
            self._evidence.append(
                f"the replays differ: losses {min(losses):.9g} to {max(losses):.9g}, and {len(ends)} different weights after them"
            )
            self._settings += self._nondeterministic_operators()
            if not all(map(self._jumps, losses)):
                is_certain = any(map(self._jumps, losses)) and not self._differing
                return Verdict(self._dump.step, "software", is_certain, tuple(self._evidence), tuple(self._settings))
        elif not self._jumps(losses[0]):
            return self._result("device", False)  # a program that rarely computes something else is not excluded
        elif losses[0] == self._loss or (np.isnan(losses[0]) and np.isnan(self._loss)):
            self._evidence.append("the recorded loss is reproduced bit for bit")
        return self._of_inputs()

    def _nondeterministic_operators(self) -> list[str]:
        """Return what torch warns of in a replay with deterministic algorithms."""
        before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        try:
            torch.use_deterministic_algorithms(True, warn_only=True)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                self._again(self._state, self._steps)
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        texts = [str(each.message).split(". ")[0] for each in caught if "deterministic" in str(each.message)]
        return list(dict.fromkeys(texts))

    # -- the loss is reproduced -----------------------------------------------------------------------------------

    def _of_inputs(self) -> Verdict:
        if self._before is None:
            self._evidence.append("the dump has no state before the recorded one")
            return self._of_batch(False)
        alone = self._again(self._before, self._steps[-1:]).loss[1]
        self._say(f"on the state before step {self._before['step']}", alone)
        if self._jumps(alone):
            return self._of_batch(self._others_are_low(alone))
        computed = self._again(self._before, self._steps_before).loss[1]
        self._say(f"after the steps from {self._before['step']} on", computed)
        if not self._jumps(computed):
            return self._result(*self._of_changed_state())
        return self._of_updates(computed)

    def _of_batch(self, are_others_low: bool) -> Verdict:
        """Return the verdict of a batch with a high loss: certain if other batches have a low one, and few rows have all of it."""
        if not are_others_low and self._has_risen():
            return self._result("rate", False)
        rows, count = self._rows()
        is_few = 0 < len(rows) <= max(_FEW * count, 1)
        if not (are_others_low or is_few):
            return self._result(None, False)
        return self._result("row", are_others_low and is_few, rows)

    def _others_are_low(self, alone: float) -> bool:
        """Return whether other batches have a low loss on the recorded state, and had one in the steps before."""
        others = self._steps_before[:-1][-_OTHERS:]
        losses = [self._again(self._state, [*self._steps[:-1], batch]).loss[1] for batch in others]
        recent = self._past[-_RECENT:]
        highest = max(map(_or_infinite, recent + losses))
        jump = min(_or_infinite(self._loss), _or_infinite(alone))
        is_low = highest - self._center < _LOW * (jump - self._center)
        self._evidence.append(
            f"other batches, {len(losses)} on the recorded state and {len(recent)} in the steps before: loss at most {highest:.6g}, "
            f"which is {'low' if is_low else 'not low, so that the state may be damaged'}"
        )
        return is_low

    def _of_updates(self, computed: float) -> Verdict:
        """Return the verdict of a loss that the steps before compute: whether it is lower after smaller updates."""
        assert self._before is not None
        factor = min(0.5, 1 / self._rise)
        smaller = self._again(self._before, self._steps_before, factor).loss[1]
        self._say(f"the same with {factor:.3g} times the learning rate", smaller)
        is_higher = np.isfinite(computed) and smaller - self._center > _LESS * (computed - self._center)
        is_lower, has_risen = bool(np.isfinite(smaller) and not is_higher), self._has_risen()
        return self._result("rate" if is_lower or has_risen else None, is_lower and has_risen)

    def _has_risen(self) -> bool:
        self._evidence.append(f"the learning rate is {self._rise:.3g} times its median in the steps before")
        return self._rise > _RISEN

    def _of_changed_state(self) -> tuple[str, bool]:
        """Compare the recorded state with the one that the steps before compute."""
        assert self._before is not None
        restore_state(self._run.model, pytree.tree_map_only(Tensor, torch.clone, self._before), self._optimizers)
        for batch in self._steps_before:
            if batch["step"] >= self._state["step"]:
                break
            self._run.run(batch)
        recorded, computed = _named(self._state), _named(copy_state(self._run.model, self._optimizers))
        differing = {name: _bits(value, computed[name]) for name, value in recorded.items() if name in computed}
        differing = {name: bits for name, bits in differing.items() if bits}
        shown = listed([f"{name} in {bits} bits" for name, bits in differing.items()], 3)
        self._evidence.append(f"the recorded state differs from the computed one: {shown}")
        if sum(differing.values()) == 1:
            return "device", True
        if is_other := self._before.get("frozen") != self._state.get("frozen"):
            self._evidence.append("other parameters are frozen than in the state before")
        trained = sum(parameter.requires_grad for parameter in self._run.model.parameters())
        changed = len(differing.keys() & self._state["parameters"].keys())
        return "state", bool(differing) and not is_other and changed < _MOST * trained

    def _rows(self) -> tuple[tuple[RankedRow, ...], int]:
        """Return the rows that stand out, if the loss does not jump without them, and the number of all."""
        restore_state(self._run.model, pytree.tree_map_only(Tensor, torch.clone, self._state), self._optimizers)
        for batch in self._steps[:-1]:
            self._run.run(batch)
        batch = self._steps[-1]
        try:
            ranking = rank_batch(self._run, batch)
        except DumpError as error:
            self._evidence.append(str(error))
            return (), 0
        rows, count = ranking.outliers, len(ranking.rows)
        if not 0 < len(rows) < count:
            self._evidence.append("no row of the batch stands out")
            return (), count
        rest = self._again(self._state, [*self._steps[:-1], without_rows(self._run, batch, rows)]).loss[1]
        self._say("without the rows that stand out", rest)
        return (() if self._jumps(rest) else rows), count


def _or_infinite(loss: float) -> float:
    return loss if np.isfinite(loss) else np.inf


def _named(state: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a state: parameters, buffers, and those of the optimizers."""
    found = dict(state["parameters"]) | dict(state["buffers"])
    for number, optimizer in enumerate(state["optimizers"]):
        for parameter, values in optimizer["state"].items():
            found |= {
                f"{name} of parameter {parameter} in optimizer {number}": value
                for name, value in values.items()
                if isinstance(value, Tensor)
            }
    return found


def _bits(one: Tensor, other: Tensor) -> int:
    """Return the number of bits in which two tensors differ."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return max(one.numel(), other.numel()) * one.itemsize * 8
    first, second = (x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy() for x in (one, other))
    return int(np.bitwise_count(first ^ second).sum())
