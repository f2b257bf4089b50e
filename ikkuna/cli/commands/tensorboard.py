"""Start TensorBoard for a run or a log directory."""

import argparse
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from ikkuna.cli.terminal import Terminal, check_port
from ikkuna.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="RUN", nargs="?", default="run", help="a run or a log directory (default: run)")
    parser.add_argument("--port", type=int, default=6006, help="the port of the server (default: 6006)")
    parser.add_argument("--dry-run", action="store_true", help="write the command without running it")


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    if not Path(options.path).is_dir():
        raise ConfigError(f"'{options.path}' is not a directory")
    check_port(options.port)
    arguments = ["-m", "tensorboard.main", "--logdir", options.path, "--port", str(options.port)]
    if options.dry_run:
        terminal.answer({"command": [sys.executable, *arguments]}, " ".join([sys.executable, *arguments]))
        return 0
    if find_spec("tensorboard") is None:
        raise ConfigError("TensorBoard is not installed; run 'pip install tensorboard'")
    return 2 if subprocess.run([sys.executable, *arguments], check=False).returncode else 0
