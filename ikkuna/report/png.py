"""Encodes pictures of colour numbers as PNG, without matplotlib."""

import base64
import struct
import zlib

import numpy as np
from numpy.typing import NDArray

__all__ = ["data_uri"]


def data_uri(indices: NDArray[np.uint8], colours: NDArray[np.uint8], clear: int | None = None) -> str:
    """Return a picture with one pixel for each number, as an address that contains it.

    Parameters
    ----------
    indices : ndarray (rows, columns)
        The number of each pixel's colour.
    colours : ndarray (colours, 3)
        Red, green and blue of each colour.
    clear : int, optional
        The number of a colour that is transparent.

    Examples
    --------
    >>> data_uri(np.zeros((1, 1), np.uint8), np.zeros((1, 3), np.uint8))[:32]
    'data:image/png;base64,iVBORw0KGg'
    """
    rows, columns = indices.shape
    lines = np.zeros((rows, columns + 1), np.uint8)  # each line begins with the number of its filter
    lines[:, 1:] = indices
    header = struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0)
    alpha = b"" if clear is None else bytes([255] * clear + [0])
    chunks = (
        (b"IHDR", header),
        (b"PLTE", colours.tobytes()),
        (b"tRNS", alpha),
        (b"IDAT", zlib.compress(lines.tobytes(), 9)),
        (b"IEND", b""),
    )
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        _chunk(name, content) for name, content in chunks if content or name == b"IEND"
    )
    return "data:image/png;base64," + base64.b64encode(data).decode()


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
