"""Runs Python in a child process, like the script of a user."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def environment(*paths: Path) -> dict[str, str]:
    """Return this process's environment with `paths`, and the packages of this repository, importable."""
    path = os.pathsep.join(map(str, (*paths, ROOT, ROOT / "subscribers")))
    return {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONWARNINGS": "error"}


def run_python(*arguments: str, paths: tuple[Path, ...] = (), cwd: Path) -> str:
    """Run the interpreter and return its standard output; fail with its output if it fails."""
    done = subprocess.run(
        [sys.executable, *arguments], env=environment(*paths), cwd=cwd, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def answer_of(code: str, *paths: Path, cwd: Path) -> Any:
    """Run code whose last line of output is JSON, and return its value."""
    return json.loads(run_python("-c", textwrap.dedent(code), paths=paths, cwd=cwd).splitlines()[-1])
