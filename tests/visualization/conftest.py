import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


class Plain:
    """A file of lines, one per block."""

    replaces_bytes = False

    def name(self, stem):
        return f"plain.{stem}"

    def header(self, replaced=None):
        return b"header\n"

    def loss(self, values, first, last):
        return f"lost {values} {first}-{last}\n".encode()


@pytest.fixture
def plain():
    return Plain()


@pytest.fixture
def gate(monkeypatch):
    """Block every `os.write` until `gate.set()`."""
    event, write = threading.Event(), os.write

    def silent(descriptor, data):
        event.wait()
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", silent)
    yield event
    event.set()


@pytest.fixture
def child(tmp_path):
    """Run a script in another process; its output goes to a file, so that no grandchild can keep a pipe open."""
    started = []

    def start(script, *arguments):
        path, output = tmp_path / "script.py", tmp_path / "output.txt"
        path.write_text(script)
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, str(path), *map(str, arguments)],
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
        started.append(process)
        process.output = output
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, 9)
        process.wait()
