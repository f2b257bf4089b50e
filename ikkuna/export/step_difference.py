"""Runs the step of a dump with the code of two programs, and names the first operation that differs."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ikkuna.errors import DumpError
from ikkuna.export.replay import prepare
from ikkuna.flight_recorder.dump_reading import Dump, read_dump
from ikkuna.flight_recorder.operations import (
    OperationDifference,
    OperationRecorder,
    Recording,
    fingerprint,
    first_difference,
)
from ikkuna.printable import listed, printable
from ikkuna.support.failures import raise_users_exception

_CONTENT = (("the state", "state.pt"), ("the batches", "batches.pt"))


@dataclass(frozen=True)
class StepDifference:
    """Where two programs differ in one step; ``print()`` shows it.

    Parameters
    ----------
    step : int
        The step.
    unequal : tuple of str
        Whether the dumps of the two runs differ before the step: in the state, in the batches.
    difference : OperationDifference
        The first operation that differs if both programs run the step of the first dump.
    size : tuple of float, optional
        The largest absolute difference between the outputs of this operation in the two programs, and the largest absolute
        value; None if the outputs have different shapes.
    rates : tuple of list
        The learning rates that each program gives its parameter groups.
    """

    step: int
    unequal: tuple[str, ...]
    difference: OperationDifference
    size: tuple[float, float] | None = None
    rates: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))

    @property
    def is_equal(self) -> bool:
        """Whether the programs and the dumps agree."""
        return not self.unequal and self.difference.operations == (None, None) and self.rates[0] == self.rates[1]

    def as_dict(self) -> dict[str, Any]:
        """Return the content for JSON."""
        return asdict(self) | {
            "equal": self.is_equal,
            "operations": [None if one is None else one._asdict() for one in self.difference.operations],
        }

    def __str__(self) -> str:
        lines = [f"step {self.step}"]
        lines += [f"  {what} before the step differ between the dumps" for what in self.unequal]
        if self.rates[0] != self.rates[1]:
            one, other = (listed([f"{rate:.4g}" for rate in rates]) for rates in self.rates)
            lines.append(
                f"  the learning rates of the programs differ, {one} and {other}; both run with those of the dump, if it has them"
            )
        lines += [f"  {line}" for line in str(self.difference).splitlines()]
        if self.size is not None:
            lines.append(f"  its outputs differ by up to {self.size[0]:.3g}, among values up to {self.size[1]:.3g}")
        return "\n".join(map(printable, lines))


def record_operations(
    dump: str | os.PathLike[str] | Dump, arguments: Mapping[str, Any], keep: int | None = None
) -> tuple[Recording, list[torch.Tensor]]:
    """Run the step of a dump, and record its operations.

    Parameters
    ----------
    dump : path or Dump
        The dump; its state is restored, and the steps before it run unrecorded.
    arguments : dict
        ``model``, and optionally ``loss``, ``optimizer``, ``step`` and ``names``, see `ikkuna.export.replay.prepare`.
    keep : int, optional
        The number of the operation whose outputs are returned.

    Raises
    ------
    DumpError, ConfigTypeError
        As for `ikkuna.export.replay.replay`.
    """
    given = {name: value for name, value in arguments.items() if name != "rules"}
    run, steps = prepare(dump, **{"names": {}, **given})
    rates = [float(group["lr"]) for optimizer in run.optimizers for group in optimizer.param_groups if "lr" in group]
    for batch in steps[:-1]:
        run.run(batch)
    recorder = OperationRecorder(given["model"], keep)
    with recorder.record() as found:
        run.run(steps[-1])
    return replace(found, rates=rates), recorder.kept


def compare_codes(dumps: tuple[Path, Path | None], scripts: tuple[str, str]) -> StepDifference:
    """Run the step of a dump with the functions of two scripts, each in a process of its own, and compare the operations.

    Parameters
    ----------
    dumps : tuple of Path
        The dump whose step runs, and the dump of the other run at this step, which is compared with it, or None.
    scripts : tuple of str
        ``script.py:function`` of each program, as for ``ikkuna replay --script``.

    Raises
    ------
    DumpError
        If a dump is damaged or lacks the state, or a program cannot run the step.
    """
    first = read_dump(dumps[0])
    unequal = () if dumps[1] is None else _unequal(first, read_dump(dumps[1]))
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("first.json", "second.json")]
        for script, path in zip(scripts, paths, strict=True):
            _record(dumps[0], script, path)
        first_recording, second_recording = map(Recording.read, paths)
        found = first_difference(first_recording, second_recording)
        size = None
        if None not in found.numbers:
            for script, path, number in zip(scripts, paths, found.numbers, strict=True):
                _record(dumps[0], script, path, "--keep", str(number))
            size = _size(*(torch.load(path.with_suffix(".pt"), weights_only=True) for path in paths))
    return StepDifference(first.step, unequal, found, size, (first_recording.rates, second_recording.rates))


def _record(dump: Path, script: str, path: Path, *options: str) -> None:
    """Record the operations of a program in another process, because two programs can have modules of the same names."""
    command = [sys.executable, "-m", "ikkuna", "replay", str(dump), "--script", script, "--operations", str(path)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    if not path.is_file():
        raise DumpError(f"{script} cannot run the step: {done.stderr.strip()[-2000:]}")


def _unequal(first: Dump, second: Dump) -> tuple[str, ...]:
    if first.step != second.step:
        raise DumpError(f"'{second.path}' is a dump of step {second.step}, not of step {first.step}")
    content = {what: [_fingerprints(dump.tensors(name)) for dump in (first, second)] for what, name in _CONTENT}
    return tuple(what for what, (one, other) in content.items() if one != other)


def _fingerprints(content: object) -> list[object]:
    """Return the fingerprints of the tensors in nested lists and dicts, and the other values, without their names."""
    if isinstance(content, Mapping):
        return [found for value in content.values() for found in _fingerprints(value)]
    if isinstance(content, list | tuple):
        return [found for value in content for found in _fingerprints(value)]
    return [fingerprint(content) or content]


def _size(first: list[torch.Tensor], second: list[torch.Tensor]) -> tuple[float, float] | None:
    """Return the largest absolute difference and value of outputs, or ``None`` if they cannot be subtracted."""
    pairs = list(zip(first, second, strict=False))
    try:
        if not pairs or any(one.shape != other.shape or not one.numel() for one, other in pairs):
            return None
        arrays = [(_wide(one), _wide(other)) for one, other in pairs]
    except (RuntimeError, TypeError) as error:  # of sparse, nested and quantized tensors, and of types of few bits
        raise_users_exception(error)
        return None
    largest = max(float(np.max(np.abs(one - other))) for one, other in arrays)
    return largest, max(float(np.max(np.abs(one))) for one, _ in arrays)


def _wide(value: torch.Tensor) -> NDArray[Any]:
    wide = value.to(torch.complex128 if value.is_complex() else torch.float64)
    return np.asarray(wide.resolve_conj().resolve_neg().numpy())
