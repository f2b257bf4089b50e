"""Pictures of the user's own, encoded as PNG."""

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ikkuna.errors import ConfigError

__all__ = ["Image", "is_pixels"]

_CHANNELS = (1, 3, 4)


@dataclass(frozen=True, eq=False, slots=True)
class Image:
    """A picture.

    Parameters
    ----------
    png : bytes
        The picture as a PNG file.

    Examples
    --------
    >>> Image.of(np.zeros((2, 3), np.uint8)).png[1:4]
    b'PNG'
    """

    png: bytes

    @classmethod
    def of(cls, value: Any) -> "Image":
        """Encode an array of pixels, an image of Pillow, or a figure of matplotlib.

        Raises
        ------
        ConfigError
            If an array has no shape of a picture.
        """
        from PIL.Image import fromarray  # matplotlib brings it; importing it takes a tenth of a second

        buffer = io.BytesIO()
        if hasattr(value, "savefig"):
            value.savefig(buffer, format="png")
        else:
            picture = fromarray(_pixels(value)) if isinstance(value, np.ndarray) else value
            picture.save(buffer, format="PNG")
        return cls(buffer.getvalue())


def is_pixels(shape: tuple[int, ...], dtype: str) -> bool:
    """Return whether an array is a picture.

    It has 8-bit numbers and the shape (height, width), (height, width, channel) or (channel, height, width).

    Examples
    --------
    >>> is_pixels((32, 32, 3), "uint8"), is_pixels((32, 32), "float32")
    (True, False)
    """
    has_channels = len(shape) == 3 and (shape[2] in _CHANNELS or shape[0] in _CHANNELS)
    return dtype.endswith("uint8") and 0 not in shape and (len(shape) == 2 or has_channels)


def _pixels(array: NDArray[Any]) -> NDArray[np.uint8]:
    if not is_pixels(array.shape, str(array.dtype)):
        raise ConfigError(
            f"a picture needs 8-bit pixels of shape (height, width, channel), got {array.dtype} {array.shape}"
        )
    if array.ndim == 3 and array.shape[2] not in _CHANNELS:
        array = np.moveaxis(array, 0, 2)
    return np.ascontiguousarray(array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array)
