"""Draws a matrix for a logger that stores images."""

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ikkuna.visualization.matrix import Matrix

__all__ = ["matrix_array", "matrix_picture"]


def matrix_picture(matrix: Matrix, title: str = "") -> Any:
    """Return the picture of a matrix as an image of Pillow, which matplotlib requires."""
    from PIL import Image

    from ikkuna.visualization.pictures.matrix_picture import draw_matrix
    from ikkuna.visualization.pictures.png import encode_png

    figure = draw_matrix(matrix.values, matrix.rows, matrix.columns, limits=matrix.limits, title=title)
    return Image.open(io.BytesIO(encode_png(figure, 100.0))).convert("RGB")


def matrix_array(matrix: Matrix) -> NDArray[np.uint8]:
    """Return the picture of a matrix as an array (height, width, colour)."""
    return np.asarray(matrix_picture(matrix))
