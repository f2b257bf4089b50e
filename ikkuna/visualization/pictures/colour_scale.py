"""The colours of heat maps: one scale for each kind, which depends on the name of the kind alone."""

import re
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["COLOURS", "MISSING", "NONFINITE", "ZERO", "ColourScale", "palette", "scale_type"]

COLOURS = 240
"""The number of colours of values; the numbers of the special colours follow."""
ZERO, NONFINITE, MISSING = COLOURS, COLOURS + 1, COLOURS + 2
_SPECIAL = ((255, 154, 213), (227, 0, 43), (168, 168, 168))
_SEQUENTIAL = (
    *((68, 1, 84), (72, 40, 120), (62, 74, 137), (49, 104, 142), (38, 130, 142)),
    *((31, 158, 137), (53, 183, 121), (109, 205, 89), (180, 222, 44), (253, 231, 37)),
)
_DIVERGING = ((64, 0, 110), (153, 112, 171), (235, 230, 238), (120, 190, 130), (0, 88, 40))
_SHARE = re.compile("sparsity|accuracy|dead|saturat|share|near_zero|(?<!un)clipped$")
_SIGNED = re.compile("_mean$|_sum$|_min$|_max$|_skewness$|_kurtosis$|cosine|_percentile_")
_DECADES = 12
_LEAST, _LARGEST = 1e-100, 1e100  # quotients of these are no overflow


def scale_type(kind: str) -> str:
    """Return ``"share"``, ``"signed"`` or ``"log"``.

    Examples
    --------
    >>> scale_type("activations_sparsity"), scale_type("weights_mean"), scale_type("weights_norm2")
    ('share', 'signed', 'log')
    >>> scale_type("weights_int8_clipped"), scale_type("gradient_norm_unclipped")
    ('share', 'log')
    """
    if _SHARE.search(kind):
        return "share"
    return "signed" if _SIGNED.search(kind) else "log"


def palette(kind: str) -> NDArray[np.uint8]:
    """Return the colours of a kind: those of values, and those of zero, of numbers that are not finite, and of missing values."""
    anchors = np.array(_DIVERGING if scale_type(kind) == "signed" else _SEQUENTIAL, float)
    places = np.linspace(0, len(anchors) - 1, COLOURS)
    values = np.stack([np.interp(places, np.arange(len(anchors)), channel) for channel in anchors.T], axis=1)
    return np.concatenate([values.round(), np.array(_SPECIAL)]).astype(np.uint8)


class ColourScale(NamedTuple):
    """The scale of a kind in a run.

    Parameters
    ----------
    type : {'share', 'signed', 'log'}
        Shares are drawn on [0, 1], signed numbers symmetrically to 0, and all others by their logarithm.
    low, high : float
        The values of the first and of the last colour.
    is_cut : bool
        Whether there are smaller values, which have the first colour: a logarithmic scale has at most twelve decades.
    """

    type: str
    low: float
    high: float
    is_cut: bool = False

    @classmethod
    def of(cls, kind: str, values: NDArray[np.float64]) -> "ColourScale":
        """Return the scale for some values.

        Examples
        --------
        >>> ColourScale.of("weights_norm2", np.array([0.0, 0.1, 10.0, np.nan]))
        ColourScale(type='log', low=0.1, high=10.0, is_cut=False)
        """
        kind_type, size = scale_type(kind), np.abs(values[np.isfinite(values)])
        if kind_type == "share":
            return cls(kind_type, 0.0, 1.0)
        size = np.clip(size[size > 0], _LEAST, _LARGEST)
        high = float(size.max(initial=0.0)) or 1.0
        if kind_type == "signed":
            return cls(kind_type, -high, high)
        least = float(size.min(initial=high))
        low = max(least, high * 10.0**-_DECADES)
        return cls(kind_type, low if low < high else high / 10, high, least < low)

    def indices(self, values: NDArray[np.float64]) -> NDArray[np.uint8]:
        """Return the colour of each value; NaN and infinities get the colour of numbers that are not finite."""
        with np.errstate(all="ignore"):
            if self.type == "log":
                place = np.log(np.abs(values) / self.low) / np.log(self.high / self.low)
            else:
                place = (values - self.low) / (self.high - self.low)
            found: NDArray[np.uint8] = (np.clip(np.nan_to_num(place), 0, 1) * (COLOURS - 1)).round().astype(np.uint8)
        found[values == 0] = ZERO
        found[~np.isfinite(values)] = NONFINITE
        return found
