"""Reads a dump of the flight recorder."""

import io
import json
import os
import zlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ikkuna.diagnosis.findings import Finding
from ikkuna.errors import DumpError
from ikkuna.flight_recorder.dump_writing import FORMAT, INDEX
from ikkuna.numerics.statistics.table import COLUMN

__all__ = ["Dump", "DumpRow", "read_dump"]


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
        return f"{self.kind}{place}" + (f" ({self.path})" if self.path else "")


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
        return [_finding(entry) for entry in self.facts["findings"]]

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
            values = self.rows["values"][:, row, COLUMN[column]]
        except (ValueError, KeyError) as error:
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
        try:
            with np.load(io.BytesIO(self._checked(name)), allow_pickle=False) as file:
                return {key.replace("|", "/"): file[key] for key in file.files}
        except DumpError:
            raise
        except (ValueError, OSError, KeyError) as error:
            raise DumpError(f"'{self.path / name}' is damaged: {error}") from error

    def tensors(self, name: str) -> Any:
        """Return the content of a ``.pt`` file, on the host.

        Raises
        ------
        DumpError
            If the file is missing or damaged.
        """
        try:
            return torch.load(io.BytesIO(self._checked(name)), weights_only=True, map_location="cpu")
        except DumpError:
            raise
        except Exception as error:  # any error of the parser means that the file is damaged
            raise DumpError(f"'{self.path / name}' is damaged: {error}") from error

    def _checked(self, name: str) -> bytes:
        """Return the bytes of a file if they are those that were written."""
        if (known := self.facts["files"].get(name)) is None:
            why = self.facts.get("left_out", {}).get(name)
            raise DumpError(f"the dump '{self.path}' has no {name}" + (f": {why}" if why else ""))
        try:
            data = (self.path / name).read_bytes()
        except OSError as error:
            raise DumpError(f"'{self.path / name}' cannot be read: {error.strerror}") from error
        if len(data) != known["bytes"] or zlib.crc32(data) != known["crc32"]:
            raise DumpError(f"'{self.path / name}' is damaged: its content has changed since it was written")
        return data

    def __str__(self) -> str:
        steps = self.steps
        kept = f"{len(steps)} sampled steps ({steps[0]} to {steps[-1]})" if len(steps) else "no sampled step"
        lines = [f"dump of step {self.step}: {'; '.join(self.reasons)}", f"  {kept}, {len(self.names)} rows each"]
        lines += [f"  {name}: {facts['bytes']} bytes" for name, facts in self.facts["files"].items()]
        lines += [f"  without {name}: {why}" for name, why in self.facts.get("left_out", {}).items()]
        return "\n".join(lines)


def _finding(entry: Mapping[str, Any]) -> Finding:
    values = dict(entry)
    for name in ("modules", "consequences"):
        values[name] = tuple(values[name])
    values["evidence"] = tuple((place, float(value)) for place, value in values["evidence"])
    if values["value"] is not None:
        values["value"] = float(values["value"])
    return Finding(**values)


def read_dump(path: str | os.PathLike[str]) -> Dump:
    """Return the dump in a directory.

    Raises
    ------
    DumpError
        If there is no dump, if it is damaged, or if a newer version of ikkuna has written it.
    """
    root = Path(path)
    index = root / INDEX
    if not index.is_file():
        found = sorted(child.parent.name for child in root.glob(f"*/{INDEX}")) if root.is_dir() else []
        hint = f"; it contains {', '.join(found[:5])}" if found else ""
        raise DumpError(f"'{root}' is not a dump: it has no {INDEX}{hint}")
    try:
        facts = json.loads(index.read_text(encoding="utf-8"))
        if facts["format"] > FORMAT:
            raise DumpError(
                f"'{root}' was written by a newer ikkuna: format {facts['format']}, known are those up to {FORMAT}"
            )
        return Dump(root, facts)
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, DumpError):
            raise
        raise DumpError(f"'{index}' is damaged: {error}") from error
