"""The file ``run.json`` in the directory of a run: its identity, its model, its hyper-parameters and its environment."""

import contextlib
import json
import os
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ikkuna.atomic_file import atomic_file
from ikkuna.visualization.environment import environment

__all__ = ["RUN_FILE", "RunFile", "find_run", "read_run_file", "write_run_file"]

RUN_FILE = "run.json"


@dataclass(frozen=True, slots=True)
class RunFile:
    """Contents of ``run.json``.

    Parameters
    ----------
    id : str
        Identifies the run, also if its directory is moved.
    config : dict
        The hyper-parameters.
    model : dict, optional
        The signature of the model, see `ikkuna.export.model.signature`.
    created : str
        The time of its creation, in the form of ISO 8601.
    environment : dict
        The versions of the packages, see `ikkuna.visualization.environment`.
    """

    id: str
    config: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] | None = None
    created: str = ""
    environment: dict[str, str] = field(default_factory=dict)


def write_run_file(directory: Path, content: RunFile) -> None:
    """Write ``run.json`` into a directory that has none; an error of the disk is ignored, because values matter more."""
    path = directory / RUN_FILE
    created = content.created or datetime.now(UTC).isoformat(timespec="seconds")
    data = {"id": content.id, "created": created, "config": content.config, "model": content.model}
    data["environment"] = content.environment or environment()
    with contextlib.suppress(OSError):
        if not path.exists():
            with atomic_file(path) as file:
                file.write(json.dumps(data, indent=1).encode())


def read_run_file(directory: str | os.PathLike[str]) -> RunFile | None:
    """Return the content of ``run.json`` in a directory; ``None`` if there is none or if it cannot be read.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     write_run_file(Path(directory), RunFile("1a2b", {"lr": 0.1}))
    ...     read_run_file(directory).config
    {'lr': 0.1}
    """
    try:
        data = json.loads((Path(directory) / RUN_FILE).read_bytes())
        config, model = data.get("config") or {}, data.get("model")
        if not isinstance(config, dict) or not isinstance(model, dict | None):
            return None
        stored = data.get("environment") or {}
        versions = {str(name): str(value) for name, value in stored.items()}
        return RunFile(str(data["id"]), config, model, str(data.get("created", "")), versions)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def find_run(identity: str, *candidates: Path) -> Path | None:
    """Return the first of some directories that holds the run `identity`; ``None`` if none does."""
    for directory in candidates:
        found = read_run_file(directory)
        if found is not None and found.id == identity:
            return directory
    return None
