"""The identity of a curve, and of curves that get their values together."""

from dataclasses import dataclass, field
from functools import cached_property

__all__ = ["Series", "SeriesGroup"]


@dataclass(frozen=True, slots=True)
class Series:
    """The identity of a curve: a kind, a module and a pass.

    Parameters
    ----------
    kind : str
        The kind of message shown, such as ``"weights_norm2"``.
    name : str, optional
        The module, if needed with the name of its parameter or output (``lstm.weight_ih_l0``, ``lstm:1.0``);
        ``None`` for a value of the whole network.
    pass_name : str
        ``"training"``, or another pass such as ``"testing"``.
    title : str, optional
        Shown instead of `kind`.
    ylims : (float, float), optional
        Limits of the value axis, for backends that draw axes.
    is_internal : bool
        Whether only rules need the value, so that a backend may show it apart from others; it does not distinguish series.
    """

    kind: str
    name: str | None = None
    pass_name: str = "training"
    title: str | None = None
    ylims: tuple[float, float] | None = None
    is_internal: bool = field(default=False, compare=False, repr=False)


@dataclass(frozen=True, eq=False)
class SeriesGroup:
    """Curves of one kind and pass that get their values together, such as those of all modules.

    A group equals only itself, and the same one comes with the values of many steps, so that backends can keep what they
    have computed for it.

    Parameters
    ----------
    kind, pass_name, title, ylims, is_internal
        See `Series`.
    names : tuple of str or None
        The name of each series.

    Examples
    --------
    >>> [series.name for series in SeriesGroup("weights_norm2", ("conv", "fc")).series]
    ['conv', 'fc']
    """

    kind: str
    names: tuple[str | None, ...]
    pass_name: str = "training"
    title: str | None = None
    ylims: tuple[float, float] | None = None
    is_internal: bool = False

    @cached_property
    def series(self) -> tuple[Series, ...]:
        """The series in order."""
        rest = self.pass_name, self.title, self.ylims, self.is_internal
        return tuple(Series(self.kind, name, *rest) for name in self.names)
