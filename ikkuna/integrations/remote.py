"""The base of the backends that create a run of a tracking service."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ikkuna.backends.loggers import LoggerBackend
from ikkuna.errors import PluginError
from ikkuna.store.run_directory import read_run_file


class RemoteBackend(LoggerBackend):
    """A logger that creates a run of its own, named after the directory of the run.

    Parameters
    ----------
    **options : Any
        See `LoggerBackend`.
    """

    def open(self, directory: Path) -> None:
        """Use `directory` for the files of the logger."""
        self._make_directory = lambda: directory

    def open_later(self, make_directory: Callable[[], Path]) -> None:
        """Create the directory in the thread of the logger."""
        self._make_directory = make_directory

    def identity(self) -> str | None:
        """Return the identity of the run, which stays the same if it is resumed."""
        content = read_run_file(self.directory())
        return None if content is None else content.id


def import_extra(name: str, extra: str | None = None) -> Any:
    """Import a module of an optional dependency.

    Raises
    ------
    PluginError
        If it is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        extra = extra or name.partition(".")[0]
        raise PluginError(f'{name} cannot be imported ({error}); pip install "ikkuna[{extra}]"') from error
