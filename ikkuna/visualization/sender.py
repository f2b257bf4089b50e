"""Senders of values: failures of backends are counted separately for each sender."""

from dataclasses import dataclass

__all__ = ["Sender"]


@dataclass(frozen=True, eq=False, slots=True)
class Sender:
    """A subscriber, as backends see it; two senders are never equal.

    Parameters
    ----------
    label : str
        Its name in the log, such as ``NormSubscriber(weights)``.
    """

    label: str
