"""The decisions of the routers of a mixture of experts, and their z-loss."""

import math
from collections import deque
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.export.messages import MeasuredStep, Message, ModuleMessage, NetworkMessage, Stamp
from ikkuna.export.subscriber import PlotSubscriber, Quantity, name_results
from ikkuna.numerics.attention import dispatch_row, router_figures, router_row
from ikkuna.numerics.elements import readable
from ikkuna.numerics.prediction import z_loss_row
from ikkuna_subscribers._helpers import require_integers

_KINDS = (
    "router_entropy",
    "router_z_loss",
    "expert_load_max",
    "dead_experts",
    "tokens_dropped",
    "expert_load",
    "window_load_max",
)
_SHARE = Quantity(low=0.0, high=1.0, scale="share", zero="good", larger="bad")
_NAMES = ("gate", "*.gate", "router", "*.router", "*router_logits", "*router.logits")


class RouterSubscriber(PlotSubscriber):
    r"""The entropy of the routers of a mixture of experts, the load of the experts, dead experts and dropped tokens.

    With :math:`n_e` tokens for expert *e* of *E*, the *load* is :math:`E n_e / \sum_i n_i`: 1 if all experts receive the same.
    An expert is *dead* if it received no token in the last `window` samples.
    A router is a module that returns logits (…, experts), such as the gates of Mixtral, Qwen-MoE and OLMoE,
    or the numbers of the chosen experts, such as those of DeepSeek and GPT-OSS, which then count instead of a choice by logits.
    Logits that no module returns are passed to ``ikkuna.observe`` under a name that ends with ``router_logits``.

    Takes ``activations`` and ``observed``.
    Publishes ``router_entropy`` in nats, ``router_z_loss``, the mean squared log-sum-exp of the logits, ``expert_load_max``,
    ``window_load_max``, that of the last `window` samples together, ``dead_experts`` and ``tokens_dropped`` as shares,
    and ``expert_load`` as ``{module}:expert_{e}`` if `per_expert` is set.
    Entropy and z-loss need logits; ``tokens_dropped`` needs `capacity_factor`, or numbers of experts, in which -1 is a dropped token.
    Padding counts as any other token.  A NaN among the logits makes entropy and z-loss NaN, and its token chooses no expert.

    Look for: dead experts, which seldom recover; a load above 2 to 3, which also slows the step;
    an entropy near 0 early in training, because the router has decided too soon.

    Parameters
    ----------
    top_k : int
        The number of experts that a token chooses.
    experts : int, optional
        The number of experts; by default that of the logits, or of the rows of the router's weight.
    capacity_factor : float, optional
        An expert computes at most this number times the mean number of tokens of an expert in a call.
    window : int
        The number of samples without a token after which an expert is dead, and over which ``window_load_max`` is computed.
    per_expert : bool
        Whether the load of each expert is published.
    **options : Any
        See `Subscriber`; ``modules`` is by default ``gate``, ``router`` and names that end with ``router_logits``.

    Raises
    ------
    ConfigError
        If a number is out of range.

    References
    ----------
    W. Fedus, B. Zoph and N. Shazeer, Switch transformers, 2021.

    Examples
    --------
    >>> RouterSubscriber(top_k=2).publishes[:3]
    ('router_entropy', 'router_z_loss', 'expert_load_max')
    """

    quantity = (
        Quantity("nats", low=0.0, larger="good"),
        Quantity(low=0.0, scale="log", larger="bad"),
        Quantity(low=0.0, scale="log", larger="bad"),
        *(_SHARE, _SHARE),
        Quantity(low=0.0, scale="log"),
        Quantity(low=0.0, scale="log", larger="bad"),
    )
    state = ("_windows",)

    def __init__(
        self,
        top_k: int,
        *,
        experts: int | None = None,
        capacity_factor: float | None = None,
        window: int = 10,
        per_expert: bool = False,
        **options: Any,
    ) -> None:
        require_integers("RouterSubscriber", top_k=top_k, window=window)
        if experts is not None:
            require_integers("RouterSubscriber", least=2, experts=experts)
        if capacity_factor is not None and not 0 < capacity_factor < math.inf:
            raise ConfigError(f"RouterSubscriber needs a capacity_factor above 0, got {capacity_factor!r}")
        name_results(options, *_KINDS)
        options.setdefault("modules", _NAMES)
        super().__init__(("activations", "observed"), **options)
        self.top_k = top_k
        self.experts = experts
        self.capacity_factor = capacity_factor
        self.window = window
        self.per_expert = per_expert
        self._sizes: dict[str | None, tuple[Stamp, int]] = {}
        self._windows: dict[str, deque[NDArray[np.float64]]] = {}

    def measure(self, message: ModuleMessage) -> Tensor | None:
        """Return the counts of a call; of an output that is neither logits nor numbers of experts ``None``."""
        row = self._row(message.data, self.experts or self._rows_of_weight(message.module))
        if row is None:
            return None
        stamp, size = self._sizes.get(message.series_name, (None, 0))
        if stamp == message.stamp and size != len(row):
            return None  # counts of another number of experts cannot be added to those of this step
        self._sizes[message.series_name] = message.stamp, len(row)
        return row

    def _row(self, x: Tensor, experts: int | None) -> Tensor | None:
        read = readable(x)
        if read is None or not x.ndim or not x.numel() or x.is_complex():
            return None
        if x.is_floating_point():
            is_logits = x.shape[-1] == experts if experts else x.shape[-1] > 1
            return router_row(read[0], self.top_k, self.capacity_factor) if is_logits and not read[1] else None
        return dispatch_row(read[0].long(), experts) if experts else None

    def _rows_of_weight(self, module: str) -> int | None:
        """Return the number of rows of the matrix that a router has, which is that of its experts."""
        entry = next((entry for entry in self.network if entry.name == module), None)
        shapes = [shape for _, shape in entry.parameters if shape is not None and len(shape) == 2] if entry else []
        return shapes[0][0] if len(shapes) == 1 and shapes[0][0] > 1 else None

    def compute_step(self, step: MeasuredStep) -> None:
        """Emit the figures of each router; chosen experts count instead of logits."""
        rows: dict[str, tuple[bool, ModuleMessage]] = {}
        for message in chain.from_iterable(step):
            is_chosen = not message.data[-3]
            if message.module not in rows or is_chosen > rows[message.module][0]:
                rows[message.module] = is_chosen, message
        for module, (is_chosen, message) in rows.items():
            self._emit_figures(
                ModuleMessage(step.stamp, message.kind, message.data, module=module, name=module), is_chosen
            )

    def _emit_figures(self, message: ModuleMessage, is_chosen: bool) -> None:
        figures = router_figures(message.data)
        load = figures.load
        counts = self._window_counts(message.module, message.data[: len(load)])
        values = [float(load.max()), float((counts == 0).mean())]
        found = dict(zip(self.publishes[2:4], values, strict=True))
        if counts.any():
            found[self.publishes[6]] = float(counts.max() / counts.mean())
        if not is_chosen:
            found |= zip(self.publishes[:2], (figures.entropy, figures.z_loss), strict=True)
        if is_chosen or self.capacity_factor is not None:
            found[self.publishes[4]] = figures.dropped
        for kind, value in found.items():
            self.emit(message, value, kind)
        for expert, value in enumerate(load if self.per_expert else ()):
            path = f"expert_{expert}"
            name = f"{message.module}:{path}"
            source = ModuleMessage(message.stamp, message.kind, module=message.module, path=path, name=name)
            self.emit(source, value, self.publishes[5])

    def _window_counts(self, module: str, counts: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the tokens of each expert in the window, with those of the present step."""
        window = self._windows.setdefault(module, deque(maxlen=self.window))
        if window and len(window[-1]) != len(counts):
            window.clear()
        window.append(counts.copy())
        return np.asarray(np.sum(window, axis=0))


_LOGITS = "logits"


class ZLossSubscriber(PlotSubscriber):
    r"""The z-loss of logits, the mean of :math:`\ln^2 Z` over items.

    The normaliser of an item with the logits *z* is :math:`Z = \sum_c e^{z_c}`.
    Large models are trained with :math:`10^{-4}` times this value in their loss, so that logits do not drift;
    the metric measures it whether or not it is part of the loss, and needs no labels.

    Takes ``network_output`` or another kind with a tensor (…, classes); of a structured output it takes the field ``logits``,
    or the first tensor if that has at least two axes.
    Publishes ``{kind}_z_loss``, without unit, at least 0; over several calls and micro-batches it is the mean over all items together.
    An item with a NaN, plus infinity, or without a class makes it NaN.

    Look for: growth, which precedes spikes of the loss in half precision; about :math:`\ln^2 C` for C classes at the beginning.

    Parameters
    ----------
    kind : str
        The kind to measure.
    **options : Any
        See `Subscriber`.

    References
    ----------
    A. Chowdhery et al., PaLM: scaling language modeling with pathways, 2022, section 5.

    Examples
    --------
    >>> ZLossSubscriber().publishes
    ('network_output_z_loss',)
    """

    quantity = Quantity(low=0.0, scale="log", larger="bad")

    def __init__(self, kind: str = "network_output", **options: Any) -> None:
        options.setdefault("publishes", f"{kind}_z_loss")
        super().__init__(kind, **options)

    def measure(self, message: Any) -> Tensor | None:
        """Return the sum over the items and their number."""
        x: Tensor = message.data
        is_of_network = isinstance(message, NetworkMessage)
        if is_of_network and message.path not in ("", _LOGITS):
            return None
        if x.ndim < 1 + is_of_network or not x.numel() or not x.is_floating_point() or (read := readable(x)) is None:
            return None
        return None if read[1] else z_loss_row(read[0])

    def compute(self, message: Message) -> None:
        """Emit the mean over the items."""
        total, items = message.data
        self.emit(message, total / items if items else math.nan)
