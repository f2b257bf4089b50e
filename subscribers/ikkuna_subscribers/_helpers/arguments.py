"""Arguments, schedules and copies that several metrics have in common."""

import math
from typing import Any

import torch
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.export.messages import ModuleMessage, NetworkMessage
from ikkuna.metrics.messages.kinds import PARAMETER_KINDS, STATE_PREFIXES


def require_integers(owner: str, least: int = 1, **numbers: object) -> None:
    """Raise an error if one of `numbers` is not an integer of at least `least`.

    Parameters
    ----------
    owner : str
        The class that the error text names.
    least : int
        The smallest allowed value.
    **numbers : object
        The values to check, by the names of the arguments.

    Raises
    ------
    ConfigError
        Names the argument and its value.

    Examples
    --------
    >>> require_integers("SomeSubscriber", window=0)
    Traceback (most recent call last):
    ikkuna.errors.ConfigError: SomeSubscriber needs window >= 1, got 0
    """
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise ConfigError(f"{owner} needs {name} >= {least}, got {number!r}")


def scheduled_kind(owner: str, every: int | None, options: dict[str, Any]) -> str:
    """Return the kind whose messages trigger an evaluation, and set ``options["subsample"]`` if it is a step.

    Parameters
    ----------
    owner : str
        The class that error texts name.
    every : int or None
        The number of optimizer steps from one evaluation to the next, the first step included; ``None`` for once an epoch.
    options : dict of str to Any
        Keyword arguments for the constructor of `Subscriber`; changed in place.

    Raises
    ------
    ConfigError
        If `every` is not a positive integer.

    Examples
    --------
    >>> options = {}
    >>> scheduled_kind("Some", 100, options), options
    ('batch_finished', {'subsample': 100})
    """
    if every is None:
        return "epoch_finished"
    require_integers(owner, every=every)
    options["subsample"] = every
    return "batch_finished"


class SampleCount:
    """Counts the samples of ``input_data``: the length of the first axis of the first tensor among the network's arguments.

    Examples
    --------
    >>> from ikkuna.export.messages import Stamp
    >>> count, stamp = SampleCount(), Stamp(0, 0, 0)
    >>> row = count.measure(NetworkMessage(stamp, "input_data", torch.ones(8, 3)))
    >>> count.add(NetworkMessage(stamp, "input_data", row.numpy()))
    >>> count.take(), count.take()
    ((8.0, 1.0), (nan, 0.0))
    """

    def __init__(self) -> None:
        self._found: tuple[float, float] | None = None

    def measure(self, message: NetworkMessage) -> Tensor | None:
        """Return the row of one call: the number of samples, and 1."""
        x: Tensor = message.data
        return torch.tensor([x.shape[0], 1], dtype=torch.float64, device="cpu") if x.ndim else None

    def add(self, message: NetworkMessage) -> None:
        """Store the merged row of the first tensor of a step; rows of further tensors are ignored."""
        if self._found is None:
            samples, calls = message.data
            self._found = float(samples), float(calls)

    def take(self) -> tuple[float, float]:
        """Return and clear the numbers of samples and of calls; without a call, NaN and 0."""
        found, self._found = self._found, None
        return found or (math.nan, 0.0)


class TensorCopies:
    """One copy of a tensor for each series.

    Examples
    --------
    >>> import torch
    >>> from ikkuna.export.messages import Stamp
    >>> copies, message = TensorCopies(), ModuleMessage(Stamp(0, 0, 0), "weights", torch.ones(2), module="fc")
    >>> copies.store(message); copies.find(message)
    tensor([1., 1.])
    """

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, str | None], Tensor] = {}

    def store(self, message: ModuleMessage) -> None:
        """Copy the tensor of `message`, and drop the previous copy of the same series."""
        self._tensors[message.kind, message.series_name] = message.data.clone()

    def find(self, message: ModuleMessage) -> Tensor | None:
        """Return the copy of the same series, or ``None`` if there is none of the same shape, dtype and device."""
        known, x = self._tensors.get((message.kind, message.series_name)), message.data
        fits = known is not None and (known.shape, known.dtype, known.device) == (x.shape, x.dtype, x.device)
        return known if fits else None


def require_parameter_kind(name: str, kind: str) -> None:
    """Raise `ConfigError`, in the name of the subscriber `name`, if a module can have several tensors of `kind` in a step."""
    if kind not in PARAMETER_KINDS and not kind.startswith(STATE_PREFIXES):
        raise ConfigError(
            f"{name} needs a kind with one tensor per parameter and step: "
            f"{', '.join(PARAMETER_KINDS)} or a state of the optimizer; got {kind!r}"
        )
