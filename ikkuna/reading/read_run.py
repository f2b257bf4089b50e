"""Reads a run that must have values."""

import os

from ikkuna.reading.run import StoredRun

__all__ = ["read_run"]


def read_run(path: str | os.PathLike[str]) -> StoredRun:
    """Return the run of a directory, or of one event file or file of JSON lines; a damaged run is logged.

    Raises
    ------
    ConfigError
        If there is no such path, if it has no file of a run, or if the files hold no value.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> from ikkuna.visualization.series import Series
    >>> from ikkuna.visualization.tensorboard import TensorBoardBackend
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     backend = TensorBoardBackend()
    ...     backend.open(Path(directory))
    ...     backend.add_scalar(Series("weights_norm2", "fc"), 0.5, 10)
    ...     backend.commit(10)
    ...     backend.close()
    ...     run = read_run(directory)
    True
    >>> run.series("weights_norm2", "fc").steps.tolist()
    [10]
    """
    run = StoredRun(path)
    run.close()
    return run.require_values()
