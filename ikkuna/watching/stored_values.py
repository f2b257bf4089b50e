"""Reads the values that a watched run has stored."""

from pathlib import Path

from ikkuna.errors import ConfigError
from ikkuna.reading import StoredRun

__all__ = ["StoredValues"]

_NOT_YET = "no value is stored yet; values are there after the first sampled step"
_UNREADABLE = "the run stores no file that can be read back; use the backend 'tb' or 'jsonl'"


class StoredValues:
    """The values of one run, of which each reading reads only what has been added.

    Examples
    --------
    >>> StoredValues().read(None)
    Traceback (most recent call last):
        ...
    ikkuna.errors.ConfigError: no value is stored yet; values are there after the first sampled step
    """

    def __init__(self) -> None:
        self._run: StoredRun | None = None

    def read(self, directory: Path | None) -> StoredRun:
        """Return the values in the directory of a run.

        Raises
        ------
        ConfigError
            If there is no directory, no file that can be read, or no value.
        """
        if directory is None:
            raise ConfigError(_NOT_YET)
        if self._run is None or self._run.path != directory:
            self.close()
            try:
                self._run = StoredRun(directory)
            except ConfigError as error:
                raise ConfigError(f"'{directory}': {_UNREADABLE}") from error
        else:
            self._run.update()
        if not self._run.kinds(None) and not self._run.histogram_kinds():
            raise ConfigError(_NOT_YET)
        return self._run

    def close(self) -> None:
        """Free the memory of the scanners."""
        if self._run is not None:
            self._run.close()
            self._run = None
