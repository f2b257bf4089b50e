"""The command ``ikkuna``: one module of `ikkuna.cli.commands` for each of its commands."""

from ikkuna.cli.program import main

__all__ = ["main"]
