"""A command of the program: its arguments and its code."""

import argparse
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

from ikkuna.cli import commands
from ikkuna.cli.terminal import Terminal

__all__ = ["Command", "command_names", "load_command"]


@dataclass(frozen=True, slots=True)
class Command:
    """A command such as ``ikkuna check``.

    Parameters
    ----------
    help : str
        What the command does, in a few words, for ``ikkuna --help``.
    run : callable
        Runs the command with the parsed arguments and a terminal.
        It returns the exit status: 0, or 1 if the command has found something.
        It raises `ikkuna.errors.IkkunaError` or `OSError` for bad input; the exit status is then 2.
    add_arguments : callable, optional
        Adds the arguments to an `argparse.ArgumentParser`.
    description : str
        What the command does, in sentences, for ``ikkuna COMMAND --help``.
    """

    help: str
    run: Callable[[argparse.Namespace, Terminal], int]
    add_arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    description: str = ""


def command_names() -> tuple[str, ...]:
    """Return the names of all commands.

    Examples
    --------
    >>> "check" in command_names()
    True
    """
    return tuple(sorted(module.name for module in pkgutil.iter_modules(commands.__path__)))


def load_command(name: str) -> Command:
    """Return a command by its name.

    Examples
    --------
    >>> load_command("check").help
    'apply rules to a finished run'
    """
    found = importlib.import_module(f"{commands.__name__}.{name}").command
    assert isinstance(found, Command)
    return found
