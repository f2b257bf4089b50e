"""Runs the command: ``python -m ikkuna``."""

import sys

from ikkuna.cli import main

if __name__ == "__main__":
    sys.exit(main())
