"""Choices of the user for a run: its name, its hyper-parameters, and whether it continues another one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ikkuna.errors import ConfigError
from ikkuna.visualization.files.run_directory import check_log_dir, check_run_name
from ikkuna.visualization.run_config import ConfigValue, plain_config

__all__ = ["Continued", "RunSettings"]


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Choices of the user for a run.

    Parameters
    ----------
    log_dir : path, optional
        The directory of the runs; by default ``run``.
    name : str, optional
        The name of the run's directory; by default the next of ``run0001``, ``run0002``, ….
    config : mapping
        The hyper-parameters, see `plain_config`.
    resume : bool or 'auto'
        Whether a stored run is continued, see `ikkuna.export.Exporter`.
    verbosity : int
        0 to write no line about the run's directory.
    subject : str
        What this line says is written.
    """

    log_dir: str | Path | None = None
    name: str | None = None
    config: Mapping[str, ConfigValue] = field(default_factory=dict)
    resume: bool | str = False
    verbosity: int = 0
    subject: str = "the run"

    @classmethod
    def checked(
        cls, log_dir: Any = None, name: Any = None, config: Any = None, resume: Any = False, verbosity: Any = 1
    ) -> "RunSettings":
        """Return settings after a check of all arguments.

        Raises
        ------
        ConfigError, ConfigTypeError
            If an argument is invalid.
        LogDirError
            If `log_dir` cannot be written.
        """
        if log_dir is not None:
            check_log_dir(log_dir)
        if resume not in (True, False, "auto"):
            raise ConfigError(f"resume must be True, False or 'auto', got {resume!r}")
        if isinstance(verbosity, bool) or not isinstance(verbosity, int) or verbosity < 0:
            raise ConfigError(f"verbosity must be an int >= 0, got {verbosity!r}")
        plain = {} if config is None else plain_config(config)
        return cls(log_dir, check_run_name(name), plain, resume, verbosity)


@dataclass(frozen=True, slots=True)
class Continued:
    """A stored run that is continued.

    Parameters
    ----------
    directory : Path
        Its directory.
    step : int
        Values of this step and later ones are replaced.
    identity : str
        The ``id`` in its ``run.json``; empty if it has none.
    """

    directory: Path
    step: int
    identity: str = ""
