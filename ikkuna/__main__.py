"""Runs the command: ``python -m ikkuna``."""

import sys

from ikkuna.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
