"""Default names of the kinds that a subscriber publishes."""

from typing import Any

from ikkuna.errors import ConfigError

__all__ = ["name_results"]


def name_results(options: dict[str, Any], *defaults: str) -> None:
    """Set ``options["publishes"]`` to `defaults`, unless it already holds the same number of other names.

    Parameters
    ----------
    options : dict of str to Any
        Keyword arguments for the constructor of `Subscriber`; changed in place.
    *defaults : str
        One name for each kind that the subscriber publishes.

    Raises
    ------
    ConfigError
        If ``options["publishes"]`` holds fewer or more names than `defaults`.

    Examples
    --------
    >>> options = {}
    >>> name_results(options, "weights_min", "weights_max")
    >>> options["publishes"]
    ('weights_min', 'weights_max')
    """
    given = options.setdefault("publishes", defaults)
    names = (given,) if isinstance(given, str) else tuple(given)
    if len(names) != len(defaults):
        wanted = ", ".join(defaults)
        raise ConfigError(f"publishes= needs {len(defaults)} names, for {wanted}; got {len(names)}: {list(names)}")
