"""A rule about ranks that must hold the same bits."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from torch import distributed

from ikkuna.diagnosis import History, Network, Rule, Score
from ikkuna_subscribers.fingerprint import REPLICATED, BufferReplicaSubscriber, ReplicaSubscriber
from ikkuna_subscribers.rules.figures import sources

_UNEQUAL = {f"{kind}_ranks_unequal": kind for kind in ("buffers", *REPLICATED)}


class RanksDifferRule(Rule):
    """Replicas of a parameter, a buffer, a reduced gradient or an optimizer state differ between ranks, by one bit or more.

    Threshold: a fact, at one sample.  The finding names the tensor, the ranks, and the samples between which it happened.
    Of three or more replicas the minority is named; of two both, because nothing shows which of them is wrong.
    A field of the optimizer's state of which no tensor was ever equal, such as the error that a compression keeps, may differ.
    Cannot see: tensors of which the program does not say that they are replicas (see `ReplicaSubscriber`);
    buffers that were not equal while they changed (see `BufferReplicaSubscriber`);
    a difference that is gone before the tensor is read; a run with one process.
    """

    name = "ranks_differ"
    version = 3
    needs = sources("weights_ranks_unequal")
    uses = sources(*(f"{kind}{end}" for kind in _UNEQUAL for end in ("", "_first", "_last")))
    judged_on = frozenset(_UNEQUAL)
    patience = 1
    severity = "error"
    severity_while_falling = "error"
    meaning = "Ranks that must hold the same bits differ."
    advice = (
        "search for parameters and gradients that change on one rank only (clipping, a seed, a module that bypasses the wrapper), "
        "for gradients that are not reduced over all ranks, and check the memory of the named device"
    )

    def subscribers(self, network: Network, every: int) -> Sequence[Any]:
        """Return a subscriber if there are several ranks."""
        if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
            return ()
        return ReplicaSubscriber(subsample=every), BufferReplicaSubscriber(subsample=every)

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score for each module of which a tensor was compared.

        A step reads weights, then gradients, then states; what differs in the later ones follows from what differs in the earlier ones.
        """
        compared, odd = dict[str, None](), defaultdict[int, dict[str, list[tuple[str, str]]]](dict)
        for kind, tensor in _UNEQUAL.items():
            for name in self._differing(history, kind, tensor, compared):
                equal = history.memory[self.name].get((kind, name))
                text = f"{_what(tensor)}: {_ranks(history, kind, name)}; {_since(equal, history.step)}."
                odd[_order(tensor)].setdefault(name, []).append((kind, text))
        first = odd[min(odd)] if odd else {}
        for name in compared:
            kinds, texts = zip(*first.get(name, [(None, "")]), strict=True)
            figure = max((history.curves(kind)[name].last for kind in kinds if kind is not None), default=0.0)
            yield Score(float(figure > 0), figure, name, kinds[0], detail=" ".join(texts))

    def _differing(self, history: History, kind: str, tensor: str, compared: dict[str, None]) -> list[str]:
        """Return the names of the tensors of a kind that differ now, and note all that were compared, and those that are equal."""
        memory, fresh = history.memory[self.name], list(history.fresh(kind))
        compared.update(dict.fromkeys(name for name, _ in fresh))
        equal = [name for name, curve in fresh if curve.last == 0]
        memory.update({(kind, name): history.step for name in equal})
        if equal:
            memory[kind] = True
        is_local = "_state_" in tensor and kind not in memory
        return [] if is_local else [name for name, curve in fresh if name and 0 < curve.last < math.inf]


def _order(tensor: str) -> int:
    """Return the place of a tensor in a step: that of parameters, gradients, or states."""
    return 0 if tensor in ("weights", "biases", "buffers") else 1 if tensor.endswith("_gradients") else 2


def _what(tensor: str) -> str:
    """Return the words for a kind of tensor.

    Examples
    --------
    >>> _what("weights"), _what("bias_gradients"), _what("weight_state_exp_avg")
    ('The weight', 'The gradient of the bias', 'exp_avg of the weight')
    """
    if tensor == "buffers":
        return "The buffer"
    owner = "bias" if tensor.startswith("bias") else "weight"
    if tensor in ("weights", "biases"):
        return f"The {owner}"
    of = "The gradient" if tensor.endswith("_gradients") else tensor.partition("_state_")[2]
    return f"{of} of the {owner}"


def _ranks(history: History, kind: str, name: str) -> str:
    ends = (history.curves(f"{kind}_{end}").get(name) for end in ("first", "last"))
    low, high = (f"{curve.last:.0f}" if curve is not None else "0" for curve in ends)
    count = history.curves(kind)[name].last
    if low == high:
        return f"rank {low} differs from the others"
    return f"ranks {low} and {high} differ" if count == 1 else f"{count:.0f} ranks between {low} and {high} differ"


def _since(equal: int | None, step: int) -> str:
    return f"equal at step {equal}, different at step {step}" if equal is not None else f"never equal up to step {step}"
