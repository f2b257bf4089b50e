"""Checks of arguments that several metrics have in common."""

from ikkuna.errors import ConfigError

__all__ = ["require_integers"]


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
