"""The entry point of the command ``ikkuna``."""

import argparse
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import cleandoc
from typing import NoReturn

from ikkuna.cli.terminal import Terminal, command_names, load_command
from ikkuna.errors import ConfigError, IkkunaError, unknown_name
from ikkuna.support.failures import error_text
from ikkuna.version import __version__

_DESCRIPTION = "A window into the training of PyTorch models."
_EPILOG = (
    "Exit status: 0; 1 if a command has found something, such as a mistake or a difference; 2 for bad input. "
    "NO_COLOR=1 turns colours off."
)
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status: 0, 1 if something was found, or 2 for bad input.

    No exception leaves this function, unless the environment variable ``IKKUNA_TRACEBACK`` is set.

    Parameters
    ----------
    arguments : sequence of str, optional
        By default those of the process.
    """
    terminal = Terminal()
    with _logging_to(terminal):
        try:
            status = _run(sys.argv[1:] if arguments is None else list(arguments), terminal)
            terminal.flush()
            return status
        except BrokenPipeError:  # the reader of a pipe, such as `head`, has ended
            terminal.abandon()
            return 0
        except KeyboardInterrupt:
            return _INTERRUPTED
        except (IkkunaError, OSError) as error:
            terminal.warn(str(error))
        except Exception as error:
            if os.environ.get("IKKUNA_TRACEBACK"):
                raise
            terminal.warn(f"internal error: {error_text(error)} (IKKUNA_TRACEBACK=1 shows the traceback)")
        return 2


def _run(arguments: list[str], terminal: Terminal) -> int:
    if not arguments:
        arguments = ["--help"]
    try:
        options = _parsed(arguments)
    except SystemExit:  # of --help or --version; errors are raised as `ConfigError`
        return 0
    terminal.as_json = options.json
    status: int = options.run(options, terminal)
    return status


class _Formatter(argparse.HelpFormatter):
    """Writes the name of each command and its help in one line."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog)
        self._action_max_length = 16  # argparse does not count the indentation of commands


class _Parser(argparse.ArgumentParser):
    """Raises `ConfigError` instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see '{self.prog} --help'")


def _parsed(arguments: list[str]) -> argparse.Namespace:
    """Return the options of the command that is named first, which may stand between its other arguments."""
    first, names = arguments[0], command_names()
    if first in names:
        return _command_parser(first).parse_intermixed_args(arguments[1:])
    if not first.startswith("-"):
        raise ConfigError(unknown_name("command", first, names))
    parser = _Parser("ikkuna", description=_DESCRIPTION, epilog=_EPILOG, allow_abbrev=False, formatter_class=_Formatter)
    parser.add_argument("--version", action="version", version=f"ikkuna {__version__}")
    group = parser.add_subparsers(required=True, metavar="COMMAND")
    for name in names:
        summary, _ = _texts(name)
        group.add_parser(name, help=f"{summary[:1].lower()}{summary[1:]}".removesuffix("."))
    return parser.parse_args(arguments)


def _command_parser(name: str) -> _Parser:
    summary, description = _texts(name)
    command = load_command(name)
    parser = _Parser(f"ikkuna {name}", description=description or summary, allow_abbrev=False)
    if hasattr(command, "add_arguments"):
        command.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="write JSON")
    parser.set_defaults(run=command.run)
    return parser


def _texts(name: str) -> tuple[str, str]:
    """Return what a command says of itself: a sentence, and a longer text."""
    summary, _, description = cleandoc(load_command(name).__doc__ or "").partition("\n\n")
    return summary, description


class _LogHandler(logging.Handler):
    """Writes warnings of the library to the terminal, as lines."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__(logging.WARNING)
        self._terminal = terminal

    def emit(self, record: logging.LogRecord) -> None:
        self._terminal.warn(record.getMessage())


@contextmanager
def _logging_to(terminal: Terminal) -> Iterator[None]:
    logger, handler = logging.getLogger("ikkuna"), _LogHandler(terminal)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
