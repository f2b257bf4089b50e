"""Which of two methods that do the same in two ways is the current one."""

__all__ = ["overrides_both"]


def overrides_both(cls: type, fast: str, plain: str, base: type) -> bool:
    """Return whether a class has a method `fast` that is as new as the method `plain`, which does the same.

    A subclass that overrides `plain` alone, for example to change a result, makes the inherited `fast` obsolete.

    Parameters
    ----------
    cls : type
        A subclass of `base`.
    fast, plain : str
        The names of the methods.
    base : type
        The class whose own `fast` does not count.

    Examples
    --------
    >>> class Base:
    ...     def one(self): ...
    ...     def all(self): ...
    >>> class Quick(Base):
    ...     def one(self): ...
    ...     def all(self): ...
    >>> class Changed(Quick):
    ...     def one(self): ...
    >>> [overrides_both(cls, "all", "one", Base) for cls in (Base, Quick, Changed)]
    [False, True, False]
    """
    owners = [owner for owner in cls.__mro__ if fast in vars(owner)]
    if not owners or owners[0] is base:
        return False
    plain_owner = next((owner for owner in cls.__mro__ if plain in vars(owner)), base)
    return cls.__mro__.index(owners[0]) <= cls.__mro__.index(plain_owner)
