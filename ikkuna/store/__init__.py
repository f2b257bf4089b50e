"""The stored run: its directory, the formats of its files, writing and reading."""

from ikkuna.store.run_contents import find_runs
from ikkuna.store.stored_run import Point, SeriesValues, StoredRun, read_run
from ikkuna.store.stored_value import StoredHistogram

__all__ = ["Point", "SeriesValues", "StoredHistogram", "StoredRun", "find_runs", "read_run"]
