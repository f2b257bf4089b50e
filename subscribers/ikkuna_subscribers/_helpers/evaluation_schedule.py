"""The schedule of metrics that evaluate the model: once an epoch, or every so many steps."""

from typing import Any

from ikkuna_subscribers._helpers.arguments import require_integers

__all__ = ["scheduled_kind"]


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
