"""Records the tensor operations of a step, and finds the first operation that differs between two recordings."""

import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ikkuna.numerics.elements import has_numbers
from ikkuna.printable import printable
from ikkuna.support.torch_internals import DISPATCH_MODE, current_node, pytree, sequence_number

_UNINITIALIZED = ("empty", "new_empty")
_OUTSIDE = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")


class Operation(NamedTuple):
    """One operation of torch's dispatcher.

    Parameters
    ----------
    name : str
        The name of the operator, such as ``aten.gelu.default``.
    module : str
        The name of the module in whose forward the operation ran, or whose backward it belongs to.
    line : str
        File and line of the user's code; for an operation of the backward, those of its forward operation.
    is_backward : bool
        Whether autograd ran the operation.
    is_view : bool
        Whether the operation only returns views of its inputs.
    arguments : str
        The arguments that are no tensors.
    inputs, outputs : tuple of str
        Fingerprints of the values before and after the operation, see `fingerprint`.
    """

    name: str
    module: str
    line: str
    is_backward: bool
    is_view: bool
    arguments: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def __str__(self) -> str:
        place = f" in module {self.module!r}" if self.module else ""
        backward = "the backward of " if self.is_backward else ""
        line = f", {backward}{self.line}" if self.line else ""
        return printable(f"{self.name}({self.arguments}){place}{line}")


@dataclass(frozen=True)
class Recording:
    """The operations of a step.

    Parameters
    ----------
    operations : list of Operation
        The operations, in their order.
    before, after : dict
        Fingerprint of each parameter and buffer before the step; of each parameter, buffer and gradient after it.
    rates : list of float
        The learning rates that the program gives its parameter groups.  The step runs with those of the dump, if it has them.
    """

    operations: list[Operation]
    before: dict[str, str]
    after: dict[str, str]
    rates: list[float] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Write the recording as JSON."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> "Recording":
        """Read a recording that `write` has written."""
        found = json.loads(path.read_text())
        rows = [Operation._make([*row[:6], tuple(row[6]), tuple(row[7])]) for row in found["operations"]]
        return cls(rows, found["before"], found["after"], found["rates"])


def fingerprint(value: object) -> str | None:
    """Return a fingerprint of the bits of a tensor or of a Python float, regardless of the tensor's shape.

    Two tensors of one dtype have the same fingerprint if their elements, in row-major order, have the same bits
    (64 bits of BLAKE2b).  Tensors without elements, sparse and nested tensors, and other objects, have none.

    Examples
    --------
    >>> fingerprint(torch.ones(2, 3)) == fingerprint(torch.ones(6))
    True
    >>> fingerprint(torch.zeros(2)) == fingerprint(-torch.zeros(2))
    False
    """
    if isinstance(value, float):
        return f"float {value.hex()}"
    if not isinstance(value, Tensor) or value.layout != torch.strided or not has_numbers(value) or not value.numel():
        return None
    value = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    data = value.view(torch.uint8).numpy().data
    return f"{str(value.dtype).removeprefix('torch.')} {hashlib.blake2b(data, digest_size=8).hexdigest()}"


def _fingerprints(values: object) -> tuple[str, ...]:
    return tuple(found for value in pytree.tree_leaves(values) if (found := fingerprint(value)) is not None)


def _of_state(model: nn.Module, gradients: bool) -> dict[str, str]:
    """Return the fingerprint of each parameter and buffer of a model, and of each gradient."""
    named: list[tuple[str, Tensor | None]] = [*model.named_parameters(), *model.named_buffers()]
    if gradients:
        named += [(f"gradient of {name}", parameter.grad) for name, parameter in model.named_parameters()]
    return {name: found for name, value in named if (found := fingerprint(value)) is not None}


def _users_line() -> str:
    """Return file and line of the innermost frame that belongs neither to torch nor to ikkuna."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_OUTSIDE):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


class OperationRecorder(DISPATCH_MODE):  # type: ignore[misc]  # torch does not document it
    """Records the operations that run while it is active.

    Operations of uninitialized memory are left out.  An operation that draws random numbers has the state of its
    generator among its inputs and outputs.

    Parameters
    ----------
    model : nn.Module
        The model whose step runs.
    keep : int, optional
        The number of the operation whose outputs are kept in ``kept``.
    """

    def __init__(self, model: nn.Module, keep: int | None = None) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self._keep = keep
        self._model = model
        self._operations: list[Operation] = []
        self._running: list[str] = []
        self._forward: dict[int, tuple[str, str]] = {}  # module and line by the sequence number of the autograd node

    @contextmanager
    def record(self) -> Iterator[Recording]:
        """Record the operations of a `with` block; the recording is complete when the block ends."""
        found = Recording(self._operations, _of_state(self._model, gradients=False), {})
        handles = []
        for name, module in self._model.named_modules():
            handles.append(module.register_forward_pre_hook(lambda *_, name=name: self._running.append(name)))
            handles.append(module.register_forward_hook(self._ended, always_call=True))
        try:
            with self:
                yield found
        finally:
            for handle in handles:
                handle.remove()
        found.after.update(_of_state(self._model, gradients=True))

    def _ended(self, *_: object) -> None:
        self._running.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record it."""
        named = kwargs or {}
        schema = func._schema
        if func.namespace == "profiler" or schema.name.removeprefix("aten::").startswith(_UNINITIALIZED):
            return func(*args, **named)
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        inputs = _fingerprints((args, named)) + (self._random_state() if is_random else ())
        node = current_node()
        module, line = self._place(None if node is None else node._sequence_nr())
        result = func(*args, **named)
        written = [
            args[i] if i < len(args) else named.get(argument.name)
            for i, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        is_view = not written and any(argument.alias_info is not None for argument in schema.arguments)
        if len(self._operations) == self._keep:
            self.kept = [
                value.detach().clone() for value in pytree.tree_leaves((result, written)) if isinstance(value, Tensor)
            ]
        outputs = _fingerprints((result, written)) + (self._random_state() if is_random else ())
        rest = [*args, *(f"{name}={value!r}" for name, value in named.items() if not _has_tensor(value))]
        arguments = ", ".join(str(value) for value in rest if not _has_tensor(value))
        self._operations.append(
            Operation(str(func), module, line, node is not None, is_view, arguments, inputs, outputs)
        )
        return result

    @staticmethod
    def _random_state() -> tuple[str, ...]:
        return _fingerprints(torch.get_rng_state())

    def _place(self, backward_of: int | None) -> tuple[str, str]:
        if backward_of is not None:
            return self._forward.get(backward_of, ("", ""))
        place = self._running[-1] if self._running else "", _users_line()
        self._forward.setdefault(sequence_number() - 1, place)  # autograd makes the node before it runs the operation
        return place


def _has_tensor(value: object) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))


@dataclass(frozen=True)
class OperationDifference:
    """The first operation that differs between two recordings; ``print()`` shows it.

    Parameters
    ----------
    numbers : tuple of int or None
        The number of the operation in each recording; None if there is no counterpart.
    operations : tuple of Operation or None
        The operation of each recording.
    compared : tuple of int
        The number of operations of each recording.
    """

    numbers: tuple[int | None, int | None]
    operations: tuple[Operation | None, Operation | None]
    compared: tuple[int, int]

    def __str__(self) -> str:
        if self.operations == (None, None):
            return f"the step has the same result, after {self.compared[0]} and {self.compared[1]} operations"
        sides = zip("AB", self.numbers, self.operations, strict=True)
        return "\n".join(f"{side}: operation {number}, {operation}" for side, number, operation in sides if operation)


def first_difference(first: Recording, second: Recording) -> OperationDifference:
    """Find the first operation whose inputs agree, whose outputs differ, and on which a result of the step depends.

    The operations of one recording are compared with the *values* of the other, not with its operations: an operation
    differs if an output of it has a fingerprint that no value of the other recording has.  Of these operations those
    count from which a way of differing values leads to the loss, or to a parameter, buffer or gradient that differs after the step.
    The first that counts has inputs that agree, because an input that an earlier operation has made different would
    make that operation the first.  So operations may have another order, other views, and other steps on the way
    to equal bits.

    Parameters
    ----------
    first, second : Recording
        The recordings.
    """
    found = [_first_differing(one, other) for one, other in ((first, second), (second, first))]
    numbers = found[0], found[1]
    operations = tuple(
        None if i is None else one.operations[i] for i, one in zip(numbers, (first, second), strict=True)
    )
    lengths = len(first.operations), len(second.operations)
    return OperationDifference(numbers, (operations[0], operations[1]), lengths)


def _first_differing(one: Recording, other: Recording) -> int | None:
    """Return the number of the first operation of `one` that differs from `other` and counts."""
    known = {value for operation in other.operations for value in (*operation.inputs, *operation.outputs)}
    known.update(other.before.values(), other.after.values())
    differing = set[int]()
    for i, operation in enumerate(one.operations):
        if operation.is_view and known.issuperset(operation.inputs):
            known.update(operation.outputs)  # another view of a value that both have
        elif not known.issuperset(operation.outputs):
            differing.add(i)
    wanted = set(one.after.values()) - known
    for before, after in pairwise(one.operations):
        if after.is_backward and before.name == "aten.ones_like.default":  # of the loss, the root of the backward
            wanted.update(value for value in before.inputs if value not in known)
    first = None
    for i in sorted(differing, reverse=True):
        operation = one.operations[i]
        if not wanted.isdisjoint(operation.outputs):
            wanted.update(value for value in operation.inputs if value not in known)
            first = None if operation.is_view else i
    return first
