"""A plugin of pytest that records which tests run which lines of the files in `LOGIC`, and how long each test takes."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.mutation.mutants import LOGIC

_INTERRUPTED = 303  # in `tests/faults.py`: exceptions of signal handlers at any moment


class _Recording:
    def __init__(self, folder: Path, worker: str) -> None:
        self._folder, self._worker = folder, worker
        import coverage  # needed for this alone

        self._durations: dict[str, dict[str, float]] = {}
        self._coverage = coverage.Coverage(
            data_file=str(folder / f"coverage.{worker}"), include=[f"*/{file}" for file in LOGIC], config_file=False
        )
        self._coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        if any(_INTERRUPTED in marker.args for marker in item.iter_markers("fault")):  # coverage may hold a lock then
            self._coverage.stop()
            return (yield)
        if sys.gettrace() is None:  # the test before has traced, or was not recorded
            self._coverage.stop()
            self._coverage.start()
        self._coverage.switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            self._coverage.switch_context("")

    def pytest_runtest_logreport(self, report):
        self._durations.setdefault(report.nodeid, {})[report.when] = report.duration

    def pytest_sessionfinish(self):
        self._coverage.stop()
        self._coverage.save()
        (self._folder / f"durations.{self._worker}.json").write_text(json.dumps(self._durations))


def pytest_configure(config):
    """Record in each process that runs tests, which is not the one that distributes them."""
    if not hasattr(config, "workerinput") and getattr(config.option, "numprocesses", None):
        return
    worker = getattr(config, "workerinput", {"workerid": "main"})["workerid"]
    config.pluginmanager.register(_Recording(Path(os.environ["MUTATION_FOLDER"]), worker))
