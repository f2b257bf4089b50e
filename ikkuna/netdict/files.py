"""Read and write snapshots as safetensors files, or as torch files that cannot contain code."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ikkuna.atomic_file import atomic_file, atomic_path
from ikkuna.errors import SnapshotError

__all__ = ["load", "save"]

_TORCH = (".pt", ".pth")


def save(values: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write tensors and numbers by name to `path`; a failed write leaves no file.

    The suffixes ``.pt`` and ``.pth`` select the format of torch, every other suffix safetensors
    (``pip install ikkuna[snapshots]``).

    Raises
    ------
    SnapshotError
        If safetensors is needed and not installed, or if a value cannot be stored.
    """
    target = Path(path)
    tensors = {name: _plain(value) for name, value in values.items()}
    numbers = [name for name, value in values.items() if not isinstance(value, Tensor)]
    try:
        if target.suffix in _TORCH:
            with atomic_file(target) as file:
                torch.save({name: value if name in numbers else tensors[name] for name, value in values.items()}, file)
        else:
            order = {"names": json.dumps(list(values)), "numbers": json.dumps(numbers)}
            safetensors = _safetensors()
            with atomic_path(target) as partial:
                safetensors.save_file(tensors, partial, metadata=order)
    except (RuntimeError, TypeError, ValueError) as error:
        raise SnapshotError(f"cannot store the snapshot in {str(target)!r}: {error}") from error


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of a file written by :func:`save`, with the names in their order.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    SnapshotError
        If the file is damaged, or if loading it would run code.
    """
    source = Path(path)
    if not source.is_file():
        raise FileNotFoundError(f"no snapshot file {str(source)!r}")
    try:
        return _load_torch(source) if source.suffix in _TORCH else _load_safetensors(source)
    except SnapshotError:
        raise
    except Exception as error:  # any error of a parser means that the file is not a snapshot
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SnapshotError(f"{str(source)!r} is damaged or not a snapshot: {reason}") from error


def _load_torch(source: Path) -> dict[str, Any]:
    values = torch.load(source, weights_only=True, map_location="cpu")
    good = isinstance(values, dict) and all(isinstance(key, str) for key in values)
    if not good or not all(isinstance(value, Tensor | int | float) for value in values.values()):
        raise SnapshotError(f"{str(source)!r} does not hold tensors by name")
    return dict(values)


def _load_safetensors(source: Path) -> dict[str, Any]:
    _safetensors()
    from safetensors import safe_open

    with safe_open(source, framework="pt") as file:
        order = file.metadata() or {}
        numbers = set(json.loads(order.get("numbers", "[]")))
        names = json.loads(order["names"]) if "names" in order else list(file.keys())
        tensors = {name: file.get_tensor(name) for name in names}
    return {name: tensor.item() if name in numbers else tensor for name, tensor in tensors.items()}


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise SnapshotError(
            "safetensors is not installed: run pip install ikkuna[snapshots], or use the suffix .pt"
        ) from error
    return safetensors.torch


def _plain(value: Any) -> Tensor:
    """Return a contiguous tensor that shares no memory with another one, as the format requires."""
    if not isinstance(value, Tensor):
        dtype = torch.int64 if isinstance(value, int) else torch.float64
        return torch.tensor(value, dtype=dtype, device="cpu")
    return value.detach().clone(memory_format=torch.contiguous_format)
