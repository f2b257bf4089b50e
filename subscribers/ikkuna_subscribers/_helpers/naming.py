"""Names of what a metric publishes, where it publishes several kinds."""

from typing import Any

from ikkuna.errors import ConfigError

__all__ = ["name_results"]


def name_results(options: dict[str, Any], *defaults: str) -> None:
    """Set ``options["publishes"]`` to `defaults`, unless it holds as many other names already.

    Raises
    ------
    ConfigError
        If it holds fewer or more.

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
