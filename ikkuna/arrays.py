"""Conversion of data of any kind to numpy arrays."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ikkuna.errors import ConfigTypeError
from ikkuna.numerics.elements import host_array

__all__ = ["to_array"]


def to_array(data: Any) -> NDArray[np.float64]:
    """Return a float64 copy of a tensor (of any device and dtype), an array or nested lists of them.

    Complex numbers are replaced by their magnitudes.

    Raises
    ------
    ConfigTypeError
        If the data contains other objects than numbers, or parts of different shapes.

    Examples
    --------
    >>> to_array([torch.tensor([1, 2]), [3, 4]])
    array([[1., 2.],
           [3., 4.]])
    """
    if isinstance(data, Tensor):
        return _tensor_to_array(data)
    if isinstance(data, list | tuple) and any(isinstance(item, Tensor | list | tuple) for item in data):
        parts = [to_array(item) for item in data]
        if len({part.shape for part in parts}) > 1:
            shapes = sorted({str(part.shape) for part in parts})
            raise ConfigTypeError(f"expected parts of one shape, got {', '.join(shapes)}")
        return np.stack(parts)
    try:
        array = np.asarray(data)
        return np.array(np.abs(array) if np.iscomplexobj(array) else array, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigTypeError(f"expected numbers, got {type(data).__name__}: {error}") from error


def _tensor_to_array(tensor: Tensor) -> NDArray[np.float64]:
    tensor = tensor.detach()
    tensor = tensor.abs() if tensor.is_complex() else tensor
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return host_array(tensor.cpu().double().contiguous()).copy()
