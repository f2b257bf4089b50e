"""Files of named arrays (``.npz``), which may be damaged, or be made to harm their reader."""

import math
import zipfile
from collections.abc import Mapping, Sequence
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

_INFLATED = 1 << 26
"""The largest size of the arrays of a compressed file; larger ones are stored without compression, so no file becomes larger in memory."""


def write_arrays(file: IO[bytes], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write arrays as a ``.npz`` file, piece by piece; compressed unless they are so large that a reader refuses them."""
    small = sum(array.nbytes + 1024 for array in arrays.values()) <= _INFLATED
    method = zipfile.ZIP_DEFLATED if small else zipfile.ZIP_STORED
    with zipfile.ZipFile(file, "w", method, compresslevel=4) as archive:
        for key, array in arrays.items():
            with archive.open(f"{key.replace('/', '|')}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def arrays_of(file: IO[bytes], size: int) -> dict[str, NDArray[Any]]:
    """Return the arrays of a ``.npz`` file of `size` bytes.

    Raises
    ------
    ValueError or another exception
        If it is damaged, or if its arrays are larger than the file and than 64 MiB.
    """
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        check_size(members, max(size, _INFLATED))
        return {member.filename.removesuffix(".npy"): _array(archive, member) for member in members}


def check_size(members: Sequence[zipfile.ZipInfo], limit: int) -> None:
    """Raise `ValueError` if the files of an archive are larger together than `limit` bytes."""
    if (inflated := sum(member.file_size for member in members)) > limit:
        raise ValueError(f"its content has {inflated} bytes, more than {limit}")


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    with archive.open(member) as stream:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read(stream)
        if dtype.hasobject or dtype.kind not in "biufU":
            raise ValueError(f"{member.filename} has the type {dtype}")
        expected = math.prod(shape) * dtype.itemsize  # Python's integers do not overflow
        if expected > member.file_size or min(shape, default=0) < 0 or len(shape) > 8:
            raise ValueError(f"{member.filename} has no {shape} elements")
        data = stream.read(expected)
        if len(data) != expected or stream.read(1):
            raise ValueError(f"{member.filename} has no {shape} elements")
    return np.frombuffer(data, dtype).reshape(shape, order="F" if is_fortran else "C")


def check_axes(arrays: Mapping[str, NDArray[Any]], axes: Mapping[str, tuple[str, str]], place: str) -> None:
    """Check types and shapes of arrays.

    Parameters
    ----------
    arrays : mapping of str to array
        The arrays.
    axes : mapping of str to tuple
        For each array the letters of the types, as in ``numpy.dtype.kind``, and the names of its axes; equal names mean equal lengths,
        and a number is a length.  An array whose types end with ``?`` may be missing.
    place : str
        The name of the file.

    Raises
    ------
    ValueError
        If an array is missing, or has another type or shape.

    Examples
    --------
    >>> check_axes({"steps": np.arange(3), "loss": np.zeros(2)}, {"steps": ("i", "S"), "loss": ("f", "S")}, "rows.npz")
    Traceback (most recent call last):
    ValueError: 'loss' of rows.npz has 2 elements along the axis S, expected 3
    """
    lengths: dict[str, int] = {}
    for name, (kinds, letters) in axes.items():
        if name not in arrays:
            if kinds.endswith("?"):
                continue
            raise ValueError(f"{place} has no array {name!r}")
        found, names = arrays[name], letters.split()
        if found.dtype.kind not in kinds or found.ndim != len(names):
            raise ValueError(f"{name!r} of {place} must have the axes ({letters}), got {found.dtype} {found.shape}")
        for axis, length in zip(names, found.shape, strict=True):
            expected = int(axis) if axis.isdigit() else lengths.setdefault(axis, length)
            if length != expected:
                raise ValueError(
                    f"{name!r} of {place} has {length} elements along the axis {axis}, expected {expected}"
                )
