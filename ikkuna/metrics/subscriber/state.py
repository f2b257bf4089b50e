"""The state of a subscriber as plain values for a checkpoint; its rows, how they are copied, merged and computed later."""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ikkuna.errors import ConfigError, ConfigTypeError
from ikkuna.metrics.messages.stamp import Stamp
from ikkuna.numerics.elements import widest_float
from ikkuna.support.failures import raise_users_exception

_CHUNK = 1 << 26  # bytes of the matrices that are stacked


class DeferredRow(NamedTuple):
    """Result of ``measure`` if its row comes from an operation that waits for a device, such as a decomposition.

    A copy of the tensor is kept, and after the step the rows of all copies of one shape and `compute` are computed in few calls,
    beside training.  On the host the row is computed at once.
    While the rows of four steps, or 1 GiB of copies, wait to be computed, further ones are dropped and counted.
    The rows of a subscriber that returns this are not merged; it sets ``merge = "last"``.

    Parameters
    ----------
    tensor : Tensor
        The borrowed tensor, or a new one.
    compute : callable
        Maps a stack of tensors ``(n, ...)`` to their rows ``(n, size)``.

    Examples
    --------
    >>> DeferredRow(torch.ones(2, 3), lambda stack: stack.flatten(1).sum(1, keepdim=True)).row()
    tensor([6.])
    """

    tensor: Tensor
    compute: Callable[[Tensor], Tensor]

    def row(self) -> Tensor:
        """Return the row."""
        return self.compute(self.tensor.detach().unsqueeze(0))[0]

    def copied(self) -> "DeferredRow":
        """Return this row with a copy of the tensor."""
        return DeferredRow(self.tensor.detach().clone(), self.compute)

    @staticmethod
    def rows(deferred: "list[DeferredRow]") -> list[Tensor]:
        """Return the rows of several, in float64 on the host; this waits for the device."""
        groups: dict[object, list[int]] = {}
        for i, (x, compute) in enumerate(deferred):
            groups.setdefault((x.shape, x.dtype, x.device, compute), []).append(i)
        found: dict[int, Tensor] = {}
        for group in groups.values():
            x, compute = deferred[group[0]]
            size = max(1, _CHUNK // max(1, 8 * x.numel()))
            for part in (group[i : i + size] for i in range(0, len(group), size)):
                rows = compute(torch.stack([deferred[i].tensor for i in part])).cpu().double()
                found |= zip(part, rows, strict=True)
        return [found[i] for i in range(len(deferred))]


def copied_row(value: Tensor | DeferredRow, device: torch.device) -> Tensor | DeferredRow:
    """Return a copy in float64, or in float32 on a device without that; raise `TypeError` if it cannot be copied to the host."""
    if isinstance(value, DeferredRow):
        if not value.tensor.is_cpu:
            return value.copied()
        value = value.row()
    value = value.detach()
    if value.is_complex():
        raise TypeError(f"measure must return real numbers, got {value.dtype}")
    copy = value.to(widest_float(value), copy=True)
    if copy.is_cpu:
        copy.numpy()  # raises for sparse tensors, and for subclasses without data
    elif type(copy) is not Tensor or copy.device != device:
        raise TypeError(
            f"measure must return a Tensor on the host or on {device}, got {type(copy).__name__} on {copy.device}"
        )
    return copy


MERGES: dict[str, Callable[[Any, Any], Any]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "last": lambda known, value: value,
    "ranks": lambda known, value: value,
}
"""How the rows of one module and path are merged over calls, micro-batches and ranks.

``ranks``: the last row of each rank is kept.  On several ranks ``message.data`` is then a table ``(ranks, 1 + row)``, whose first column
is equal on ranks that hold replicas of the tensor; it is -1 if it is unknown whether ranks do, and -2 if they do not.
A rank without the tensor has NaN.
"""


_TAG = "ikkuna"
_PLAIN = (str, int, float, bool, type(None))


def pack(value: Any) -> Any:
    """Return `value` as numbers, strings, lists, dicts and tensors in host memory, which share no memory with it.

    ``torch.load`` with ``weights_only=True`` reads the result.
    Objects become dicts with the name of their class and their attributes.

    Raises
    ------
    ConfigTypeError
        If an object contains something that is neither data nor has attributes.

    Examples
    --------
    >>> pack({"fc": deque([1.0, 2.0], maxlen=3)})
    {'ikkuna': 'dict', 'items': [['fc', {'ikkuna': 'deque', 'items': [1.0, 2.0], 'maxlen': 3}]]}
    >>> unpack(pack({("fc", None): (1, 2.5)}))
    {('fc', None): (1, 2.5)}
    """
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) in _PLAIN:
        return value
    if type(value) is list:
        return [pack(item) for item in value]
    if isinstance(value, Tensor | np.ndarray | torch.Generator | torch.dtype | torch.device):
        return _packed_array(value)
    for name, kind in (("dict", dict), ("deque", deque), ("set", set | frozenset), ("size", torch.Size)):
        if isinstance(value, kind):
            return _packed_collection(name, value)
    if type(value) is tuple:
        return {_TAG: "tuple", "items": [pack(item) for item in value]}
    return {_TAG: "object", "class": type(value).__name__, "attributes": pack(dict(_attributes(value)))}


def _packed_array(value: Any) -> dict[str, Any]:
    if isinstance(value, Tensor):
        return {_TAG: "tensor", "value": value.detach().cpu().clone(), "device": str(value.device)}
    if isinstance(value, np.ndarray):
        return {_TAG: "array", "value": torch.from_numpy(np.array(value))}
    if isinstance(value, torch.Generator):
        return {_TAG: "generator", "value": value.get_state(), "device": str(value.device)}
    return {_TAG: type(value).__name__, "value": str(value).removeprefix("torch.")}


def _packed_collection(name: str, value: Any) -> dict[str, Any]:
    if name == "dict":
        return {_TAG: name, "items": [[pack(key), pack(item)] for key, item in value.items()]}
    packed = {_TAG: name, "items": [pack(item) for item in value]}
    return {**packed, "maxlen": value.maxlen} if name == "deque" else packed


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield names and values of the attributes of an object, with or without slots."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip(value._fields, value, strict=True)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield field.name, getattr(value, field.name)
    elif hasattr(value, "__dict__") and not callable(value) and not isinstance(value, type):
        yield from vars(value).items()
    else:
        raise ConfigTypeError(f"a {type(value).__name__} cannot be stored in a checkpoint")


def types_in(value: Any) -> dict[str, type]:
    """Return the classes of the objects in `value` by their names; `unpack` creates objects of these classes alone."""
    found: dict[str, type] = {}
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, (list, set, frozenset, deque)) or type(item) is tuple:
            waiting += item
        elif not isinstance(
            item, (*_PLAIN, Tensor, np.generic, np.ndarray, torch.Generator, torch.dtype, torch.device, torch.Size)
        ):
            found[type(item).__name__] = type(item)
            waiting += [attribute for _, attribute in _attributes(item)]
    return found


def unpack(packed: Any, types: Mapping[str, type] | Iterable[type] = ()) -> Any:
    """Return what `pack` has packed; tensors return to their devices if these exist.

    Parameters
    ----------
    packed : Any
        A result of `pack`.
    types : mapping of str to type, or iterable of type
        The classes of which objects may be created.

    Raises
    ------
    ConfigError
        If `packed` is not a result of `pack`, or if it contains an object of another class.
    """
    known = dict(types) if isinstance(types, Mapping) else {kind.__name__: kind for kind in types}
    return _Unpacker({Stamp.__name__: Stamp, **known}).unpack(packed)


class _Unpacker:
    def __init__(self, types: Mapping[str, type]) -> None:
        self._types = types

    def unpack(self, packed: Any) -> Any:
        if type(packed) in _PLAIN or isinstance(packed, Tensor):
            return packed
        if isinstance(packed, list):
            return [self.unpack(item) for item in packed]
        try:
            return self._tagged(packed)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise_users_exception(error)
            raise ConfigError(f"a state cannot be read: {type(error).__name__}: {error}") from error

    def _tagged(self, packed: dict[str, Any]) -> Any:
        tag = packed[_TAG]
        if tag == "dict":
            return {self.unpack(key): self.unpack(item) for key, item in packed["items"]}
        if tag in ("tuple", "deque", "set", "size"):
            items = [self.unpack(item) for item in packed["items"]]
            if tag == "deque":
                return deque(items, packed["maxlen"])
            return {"tuple": tuple, "set": set, "size": torch.Size}[tag](items)
        if tag == "tensor":
            return packed["value"].clone().to(_device(packed["device"]))
        if tag == "array":
            return packed["value"].cpu().numpy().copy()
        if tag == "generator":
            generator = torch.Generator(_device(packed["device"]))
            generator.set_state(packed["value"].cpu())
            return generator
        if tag in ("dtype", "device"):
            return getattr(torch, packed["value"]) if tag == "dtype" else _device(packed["value"])
        return self._object(packed["class"], self.unpack(packed["attributes"]))

    def _object(self, name: str, attributes: dict[str, Any]) -> Any:
        kind: Any = self._types.get(name)
        if kind is None:
            raise ConfigError(f"a state contains an object of the unknown class {name!r}")
        if issubclass(kind, tuple):
            return kind(**attributes)
        made = object.__new__(kind)
        for attribute, value in attributes.items():
            object.__setattr__(made, attribute, value)
        return made


def _device(text: str) -> torch.device:
    """Return a device by its name; that of the host if this machine has no such device."""
    device = torch.device(text)
    if device.type in ("cpu", "meta"):
        return device
    try:
        module = torch.get_device_module(device)
        exists = module.is_available() and (device.index or 0) < module.device_count()
    except (RuntimeError, AttributeError) as error:
        raise_users_exception(error)
        exists = False
    return device if exists else torch.device("cpu")
