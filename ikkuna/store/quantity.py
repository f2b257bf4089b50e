"""The declaration of a metric: its unit, range and scale, and the meaning of its values."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ikkuna.errors import ConfigError, ConfigTypeError, unknown_name
from ikkuna.support.failures import raise_users_exception
from ikkuna.support.plugins import load_plugin, plugin_names

SCALES = ("linear", "log", "share", "signed")
"""``log``: compared by its logarithm; ``share``: lies on [0, 1]; ``signed``: shown symmetrically to 0."""
_SUBSCRIBERS = "ikkuna.export.subscriber"
_JUDGEMENTS = ("", "good", "bad")

LOGGED = "logged"
"""Values that the user logs by name (see ``Exporter.log``), which are of no module, whatever they are called."""

_STEP = (
    *("batch_started", "batch_finished", "input_data", "layer_inputs", "activations", "observed"),
    *("network_output", "input_labels", "loss", "layer_gradients", "weight_micro_gradients", "bias_micro_gradients"),
    *("weight_gradients_unclipped", "bias_gradients_unclipped", "weight_gradients", "bias_gradients"),
    *("weight_updates", "bias_updates", "weights", "biases", LOGGED, "epoch_started", "epoch_finished"),
)
"""The built-in kinds in the order in which a step computes them; learning rates are those of ``batch_finished``."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """The declaration of a kind that a subscriber publishes.

    The run stores it, and everything that shows or compares values of the kind reads it.

    The default is neutral: a number without unit and limits, on a linear scale.

    Parameters
    ----------
    unit : str
        The unit, as it stands beside an axis; empty for a pure number, and for the unit of the measured tensor.
    low, high : float
        The range of possible values.
    scale : {'linear', 'log', 'share', 'signed'}
        See `SCALES`.
    zero, larger : {'', 'good', 'bad'}
        What a value of 0, and what a larger value means; empty for neither.
    is_comparable : bool
        Whether two runs can be compared by it; values that measure time or the machine differ between any two runs.
    is_exact : bool
        Whether two values are as different as they can be if they differ at all, as those of a fingerprint.
    is_headline : bool
        Whether a value of the network belongs to the first ones to look at, as the loss.
    family : str
        The name of several kinds that are levels of one thing, such as percentiles; they are drawn together.
    level : float, optional
        The level within the family.
    sources : tuple of str
        The kinds that it is computed from; set by the subscriber.
    statistics : tuple of str
        The shared statistics of tensors that it reads; set by the subscriber.

    Raises
    ------
    ConfigError, ConfigTypeError
        If a field is invalid.

    Examples
    --------
    >>> Quantity("nats", low=0.0, larger="bad").unit
    'nats'
    >>> Quantity(scale="logarithmic")
    Traceback (most recent call last):
    ikkuna.errors.ConfigError: unknown scale 'logarithmic'; available: 'linear', 'log', 'share', 'signed'
    """

    unit: str = ""
    low: float = -math.inf
    high: float = math.inf
    scale: str = "linear"
    zero: str = ""
    larger: str = ""
    is_comparable: bool = True
    is_exact: bool = False
    is_headline: bool = False
    family: str = ""
    level: float | None = None
    sources: tuple[str, ...] = ()
    statistics: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise ConfigError(unknown_name("scale", self.scale, SCALES))
        for name in ("zero", "larger"):
            if (value := getattr(self, name)) not in _JUDGEMENTS:
                raise ConfigError(f"{name} needs 'good', 'bad' or '', got {value!r}")
        for name in ("unit", "family"):
            if not isinstance(value := getattr(self, name), str):
                raise ConfigTypeError(f"{name} needs a string, got {type(value).__name__} {value!r}")
        if not self.low < self.high:
            raise ConfigError(f"a range needs low < high, got {self.low!r} and {self.high!r}")

    @property
    def worse(self) -> int:
        """1 if larger values are worse, -1 if smaller ones are, 0 if neither is; 0 as a good value makes larger ones worse."""
        larger = self.larger or ("bad" if self.zero == "good" else "")
        return {"bad": 1, "good": -1, "": 0}[larger]

    def label(self, kind: str) -> str:
        """Return the name of a kind with the unit, for an axis or a column.

        Examples
        --------
        >>> Quantity("s").label("step_seconds"), Quantity().label("loss")
        ('step_seconds [s]', 'loss')
        """
        return f"{kind} [{self.unit}]" if self.unit else kind

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that differ from the default, as plain values of JSON."""
        return {name: value for name, value in asdict(self).items() if value != getattr(NEUTRAL, name)}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> "Quantity":
        """Return the quantity of stored fields; neutral if a later version has written fields that are invalid here."""
        known = {field.name: stored[field.name] for field in fields(cls) if field.name in stored}
        try:
            for name in ("sources", "statistics"):
                known[name] = tuple(known.get(name, ()))
            return cls(**known)
        except (ConfigError, TypeError):
            return NEUTRAL


NEUTRAL = Quantity()


def installed_quantities(kinds: Iterable[str]) -> dict[str, Quantity]:
    """Return what installed subscribers, made with their default arguments, declare of kinds that a run does not declare.

    A subscriber of one kind is made for each built-in kind whose name a wanted kind begins with.
    """
    missing, found = set(kinds), dict[str, Quantity]()
    sources = [source for source in _STEP if any(kind.startswith(f"{source}_") for kind in missing)]
    for name in sorted(plugin_names(_SUBSCRIBERS)) if missing else ():
        for arguments in ((), *((source,) for source in sources)):
            try:
                made: Any = load_plugin(_SUBSCRIBERS, name, object)(*arguments)
                declared = {kind: made.quantity_of(kind) for kind in missing.intersection(made.publishes or made.kinds)}
            except Exception as error:  # it needs other arguments, or is broken
                raise_users_exception(error)
                continue
            found.update((kind, each) for kind, each in declared.items() if kind not in found)
    return found


def built_in_sources(kind: str, quantities: Mapping[str, Quantity]) -> frozenset[str]:
    """Return the built-in kinds that a kind is computed from, directly or through other kinds.

    Examples
    --------
    >>> known = {"weights_norm2": Quantity(sources=("weights",)), "weights_norm2_mean": Quantity(sources=("weights_norm2",))}
    >>> sorted(built_in_sources("weights_norm2_mean", known))
    ['weights']
    """
    found, waiting, seen = set[str](), [kind], set[str]()
    while waiting:
        each = waiting.pop()
        if each in seen:
            continue
        seen.add(each)
        if each in _STEP:
            found.add(each)
        else:
            waiting += quantities.get(each, NEUTRAL).sources
    return frozenset(found)


def step_order(kind: str, quantities: Mapping[str, Quantity]) -> tuple[int, bool]:
    """Return the place of a kind in the order in which a step computes its values, and whether that is in the backward pass."""
    places = [_STEP.index(source) for source in built_in_sources(kind, quantities)]
    first = min(places, default=len(_STEP))
    return first, _STEP.index("layer_gradients") <= first < _STEP.index("weight_updates")


def network_order(kind: str, quantity: Quantity) -> tuple[bool, bool, bool, str]:
    """Return a sorting key of kinds of the network: headlines first, of these what should fall; what cannot be compared last.

    Examples
    --------
    >>> kinds = {"loss": Quantity(larger="bad", is_headline=True), "norm": NEUTRAL, "memory": Quantity(larger="bad", is_comparable=False)}
    >>> sorted(kinds, key=lambda kind: network_order(kind, kinds[kind]))
    ['loss', 'norm', 'memory']
    """
    return not quantity.is_headline, not quantity.is_comparable, quantity.larger != "bad", kind
