"""Reads a dump of the flight recorder."""

import json
import os
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ikkuna.errors import DumpError
from ikkuna.flight_recorder.checks import checked_tensors, open_checked, tensor
from ikkuna.flight_recorder.dump_writing import FORMAT, INDEX, INDEX_BYTES
from ikkuna.printable import printable
from ikkuna.store import checks
from ikkuna.store.finding import Finding, finding_of
from ikkuna.support.arrays import arrays_of, check_axes
from ikkuna.support.failures import raise_users_exception

_Found = TypeVar("_Found")


def _file_name(value: Any, place: str) -> str:
    if not re.fullmatch(r"[a-z_]{1,40}\.(npz|pt)", checks.text(value, place)):
        raise ValueError(f"{place} must be the name of a file, such as 'rows.npz', got {value!r:.60}")
    return str(value)


_TEXTS, _STEP = checks.list_of(checks.text), checks.integer()
_INDEX = checks.record(
    {
        "format": checks.integer(1, FORMAT),
        "step": _STEP,
        "reasons": _TEXTS,
        "findings": checks.list_of(finding_of),
        "rules": checks.list_of(checks.record({"name": checks.text, "patience": checks.integer()}, checks.number)),
        "files": checks.map_of(checks.record({"bytes": _STEP, "crc32": checks.integer(0, 2**32 - 1)}), _file_name),
        "left_out": checks.map_of(checks.text),
        "options": checks.record({"every": checks.integer(1)}),
    }
)
_OF_ROWS = {
    "steps": ("i", "S"),
    "values": ("f", "S R C"),
    **dict.fromkeys(("kinds", "modules", "paths"), ("U", "R")),
}
_AXES = {
    "rows.npz": {
        **_OF_ROWS,
        "columns": ("U", "C"),
        "log_steps": ("i", "L"),
        "loss": ("f", "L"),
        "learning_rates": ("f", "L G"),
        "seconds": ("fi?", "L"),
        "skipped": ("biu?", "L"),
        "groups": ("U?", "N"),
    },
    "burst.npz": {**_OF_ROWS, "histograms": ("i", "H 4")},
    "batch_rows.npz": {
        **dict.fromkeys(("steps", "parts", "numbers"), ("i", "R")),
        "hashes": ("u", "R"),
        "ids": ("U", "R"),
        "losses": ("f", "R"),
    },
    "history.npz": {
        **dict.fromkeys(("kinds", "names", "passes"), ("U", "K")),
        **dict.fromkeys(("series", "steps"), ("i", "P")),
        "values": ("f", "P"),
    },
}
_CALL = checks.pair_of(checks.list_of(checks.plain), checks.map_of(checks.plain))
_OPTIMIZER = checks.record(
    {
        "state": checks.map_of(checks.map_of(checks.plain), checks.integer()),
        "param_groups": checks.list_of(checks.record({"params": checks.list_of(checks.integer())})),
    },
    {"class": checks.text},
)
_TENSORS = {name: checks.map_of(tensor) for name in ("parameters", "buffers", "gradients")}
_STATE = checks.record(
    {"step": _STEP, **_TENSORS, "evaluated": _TEXTS, "optimizers": checks.list_of(_OPTIMIZER)}, {"frozen": _TEXTS}
)
_CONTENT = {
    "state.pt": _STATE,
    "state_before.pt": _STATE,
    "batches.pt": checks.list_of(
        checks.record(
            {
                **dict.fromkeys(("step", "train_step", "epoch"), _STEP),
                **{name: checks.list_of(_CALL) for name in ("model_calls", "loss_calls")},
            }
        )
    ),
}


class DumpRow(NamedTuple):
    """Origin of a row of a dump.

    Parameters
    ----------
    kind : str
        The kind.
    module : str
        Name of the module; empty for the network.
    path : str
        Name of the parameter or path of the output.
    """

    kind: str
    module: str
    path: str

    def __str__(self) -> str:
        place = f" of {self.module}" if self.module else ""
        return printable(f"{self.kind}{place}" + (f" ({self.path})" if self.path else ""))


class Dump:
    """A dump of the flight recorder; files are read when they are needed.

    Parameters
    ----------
    path : Path
        Its directory.
    facts : mapping
        The content of ``dump.json``.

    Attributes
    ----------
    step : int
        The step at which it was written.
    reasons : list of str
        Why it was written.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        self.path, self.facts = path, facts
        self.step: int = facts["step"]
        self.reasons: list[str] = facts["reasons"]

    @property
    def findings(self) -> list[Finding]:
        """The findings of the rules at this step."""
        return list(self.facts["findings"])

    @cached_property
    def rows(self) -> dict[str, NDArray[Any]]:
        """The arrays of ``rows.npz``."""
        return self.arrays("rows.npz")

    @property
    def steps(self) -> NDArray[np.int64]:
        """The sampled steps that it holds, in the order of time."""
        return self.rows["steps"]

    @cached_property
    def names(self) -> list[DumpRow]:
        """Origin of each row."""
        columns = (self.rows[name].tolist() for name in ("kinds", "modules", "paths"))
        return [DumpRow(*row) for row in zip(*columns, strict=True)]

    def series(self, kind: str, column: str, module: str = "", path: str = "") -> dict[int, float]:
        """Return a column of a row by steps, without the steps at which it was not measured.

        Raises
        ------
        DumpError
            If there is no such row.
        """
        try:
            row = self.names.index(DumpRow(kind, module, path))
            values = self.rows["values"][:, row, self.rows["columns"].tolist().index(column)]
        except ValueError as error:
            if isinstance(error, DumpError):
                raise
            raise DumpError(f"the dump has no {column} of {DumpRow(kind, module, path)}") from error
        found = zip(self.steps.tolist(), values.tolist(), strict=True)
        return {step: value for step, value in found if not np.isnan(value)}

    @property
    def losses(self) -> dict[int, float]:
        """The loss of up to 512 steps."""
        return dict(zip(self.rows["log_steps"].tolist(), self.rows["loss"].tolist(), strict=True))

    def has(self, name: str) -> bool:
        """Return whether it has a file of this name."""
        return name in self.facts["files"]

    def arrays(self, name: str) -> dict[str, NDArray[Any]]:
        """Return the arrays of a ``.npz`` file.

        Raises
        ------
        DumpError
            If the file is missing or damaged.
        """
        found = {key.replace("|", "/"): each for key, each in self._read(name, arrays_of).items()}
        try:
            check_axes(found, _AXES.get(name, {}), f"'{self.path / name}'")
        except ValueError as error:
            raise DumpError(str(error)) from error
        return found

    def tensors(self, name: str) -> Any:
        """Return the content of a ``.pt`` file, on the host.

        Raises
        ------
        DumpError
            If the file is missing or damaged.
        """
        found = self._read(name, checked_tensors)
        return _checked(_CONTENT.get(name, checks.plain), found, f"'{self.path / name}'")

    def _read(self, name: str, parse: Callable[[IO[bytes], int], _Found]) -> _Found:
        """Return the content of a file if it is the one that was written."""
        if (known := self.facts["files"].get(name)) is None:
            why = self.facts["left_out"].get(name)
            raise DumpError(f"the dump '{self.path}' has no {name}" + (f": {why}" if why else ""))
        with open_checked(self.path / name, known["bytes"], known["crc32"]) as file:
            try:
                return parse(file, known["bytes"])
            except Exception as error:  # any error of a parser means that the file is damaged
                raise_users_exception(error)
                raise DumpError(f"'{self.path / name}' is damaged: {error}") from error

    def __str__(self) -> str:
        steps = self.steps
        kept = f"{len(steps)} sampled steps ({steps[0]} to {steps[-1]})" if len(steps) else "no sampled step"
        lines = [f"dump of step {self.step}: {'; '.join(self.reasons)}", f"  {kept}, {len(self.names)} rows each"]
        lines += [f"  {name}: {facts['bytes']} bytes" for name, facts in self.facts["files"].items()]
        lines += [f"  without {name}: {why}" for name, why in self.facts["left_out"].items()]
        return "\n".join(map(printable, lines))


def _checked(check: checks.Check, value: Any, place: str) -> Any:
    try:
        return check(value, place)
    except ValueError as error:
        raise DumpError(str(error)) from error


def read_dump(path: str | os.PathLike[str]) -> Dump:
    """Return the dump in a directory.

    Raises
    ------
    DumpError
        If there is no dump, if it is damaged, or if a newer version of ikkuna has written it.
    """
    root = Path(path)
    index = root / INDEX
    if not index.exists():
        found = sorted(child.parent.name for child in root.glob(f"*/{INDEX}")) if root.is_dir() else []
        hint = f"; it contains {', '.join(found[:5])}" if found else ""
        raise DumpError(f"'{root}' is not a dump: it has no {INDEX}{hint}")
    try:
        with open_checked(index, limit=INDEX_BYTES) as file:
            facts = json.loads(file.read(INDEX_BYTES + 1))
    except DumpError:
        raise
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise_users_exception(error)
        raise DumpError(f"'{index}' is damaged: {error}") from error
    written = facts.get("format") if isinstance(facts, dict) else None
    if type(written) is int and written > FORMAT:
        raise DumpError(f"'{root}' was written by a newer ikkuna: format {written}, known are those up to {FORMAT}")
    return Dump(root, _checked(_INDEX, facts, f"'{index}'"))
