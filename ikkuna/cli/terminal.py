"""The modules of commands, the arguments that several commands have, and the output: text, tables and JSON."""

import argparse
import importlib
import json
import os
import pkgutil
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from ikkuna.cli import commands
from ikkuna.printable import finite, printable, text_table
from ikkuna.support.console import CODES, has_colour, is_terminal

_LEAST_WIDTH = 20
_MARK = f"\ufdd0{os.urandom(8).hex()}"  # precedes a style, so that no text from a file looks like one
_STYLE = re.compile(f"{_MARK}([0-9;]*);")


class Terminal:
    """The standard output and the standard error of a command.

    Characters that the encoding of a stream does not have are replaced by ``?``.

    Parameters
    ----------
    out, err : TextIO, optional
        The streams; by default those of the process.

    Attributes
    ----------
    as_json : bool
        Whether the option ``--json`` is set.

    Examples
    --------
    >>> terminal = Terminal()
    >>> terminal.write_table(("module", "value"), [("fc1", "0.5"), ("features.0", "12")])
    module      value
    ----------  -----
    fc1         0.5
    features.0  12
    """

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self.as_json = False
        self._out = sys.stdout if out is None else out
        self._err = sys.stderr if err is None else err

    @property
    def has_colour(self) -> bool:
        """Whether colours are shown: not in a file or a pipe, and not with ``NO_COLOR`` or ``TERM=dumb``."""
        return has_colour(self._out)

    @property
    def width(self) -> int:
        """The number of characters of a line, at least 20."""
        return max(shutil.get_terminal_size((100, 24)).columns, _LEAST_WIDTH)

    def can_write(self, text: str) -> bool:
        """Return whether the encoding of the standard output has all characters of `text`."""
        try:
            text.encode(getattr(self._out, "encoding", None) or "ascii")
        except UnicodeEncodeError:
            return False
        return True

    def styled(self, text: str, *styles: str) -> str:
        """Return `text` with styles such as ``"bold"`` and ``"red"`` for :meth:`write`; without colours, `text` itself."""
        if not styles or not text or not self.has_colour:
            return text
        return f"{_MARK}{';'.join(CODES[style] for style in styles)};{text}{_MARK}0;"

    def write(self, value: object = "") -> None:
        """Write a text as one line, or an object, such as findings, as all lines of its text."""
        text = printable(str(value), multiline=not isinstance(value, str))
        _write(self._out, _STYLE.sub(lambda style: f"\x1b[{style[1]}m", text) + "\n")

    def write_lines(self, lines: Iterable[str]) -> None:
        """Write several lines."""
        for line in lines:
            self.write(line)

    def write_json(self, value: Any) -> None:
        """Write a value as JSON, with NaN and infinities as texts."""
        _write(self._out, f"{json.dumps(finite(value), indent=1)}\n")  # JSON has escape sequences of its own

    def answer(self, facts: Any, text: object) -> None:
        """Write the result of a command: `facts` with the option ``--json``, otherwise `text`, or what the function `text` writes."""
        if self.as_json:
            self.write_json(facts)
        elif callable(text):
            text()
        else:
            self.write(text)

    def write_table(self, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Write a table; cells are aligned to the left, and the last column is not padded."""
        self.write_lines(text_table(header, [[printable(str(cell)) for cell in row] for row in rows]))

    def warn(self, text: str) -> None:
        """Write a warning or an error to the standard error."""
        _write(self._err, f"ikkuna: {printable(text)}\n")

    def clear(self) -> None:
        """Clear the screen if a person sees the standard output."""
        if is_terminal(self._out):
            _write(self._out, "\x1b[2J\x1b[H")

    def progress(self, text: str) -> None:
        """Replace the line of progress on the standard error; an empty text removes it.  Without a person to see it, do nothing."""
        if is_terminal(self._err) and os.environ.get("TERM") != "dumb":
            _write(self._err, f"\r{printable(text)[: self.width - 1]}\x1b[K")

    def flush(self) -> None:
        """Pass everything on to the operating system."""
        if self._out is not None:
            self._out.flush()

    def abandon(self) -> None:
        """Write nothing more, because the reader has ended; the end of the process then reports no error either."""
        sink = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - it replaces the stream until the process ends
        if self._out is sys.stdout:
            sys.stdout = sink
        self._out = sink


def _write(stream: TextIO | None, text: str) -> None:
    if stream is None:  # a process without standard streams
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "replace").decode(encoding))


def command_names() -> tuple[str, ...]:
    """Return the names of all commands.

    Examples
    --------
    >>> "check" in command_names()
    True
    """
    return tuple(sorted(module.name for module in pkgutil.iter_modules(commands.__path__)))


def load_command(name: str) -> ModuleType:
    """Return the module of a command by its name.

    Examples
    --------
    >>> load_command("check").__doc__.partition(".")[0]
    'Show the findings of a finished run'
    """
    return importlib.import_module(f"{commands.__name__}.{name}")


_DEFAULT = "run"


def add_run_argument(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """Add the argument RUN, which may be left out."""
    parser.add_argument(
        "runs" if several else "path",
        metavar="RUN",
        nargs="*" if several else "?",
        default=[_DEFAULT] if several else _DEFAULT,
        help="a run: its directory, an event file, or a file of JSON lines; "
        f"a directory of runs means the newest one (default: {_DEFAULT})",
    )


def check_port(port: int) -> None:
    """Raise `ConfigError` if this is not the number of a port."""
    from ikkuna.errors import ConfigError

    if not 0 <= port < 1 << 16:
        raise ConfigError(f"--port needs a number from 0 to {(1 << 16) - 1}, got {port}")


def add_muted_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option that shows muted findings."""
    parser.add_argument("--muted", action="store_true", help="show muted findings too")


def runs_by_age(directory: Path) -> list[Path]:
    """Return the runs of a directory that have values, the newest last.

    Runs without a date, which other programs have written, come first.
    """
    from ikkuna.errors import ConfigError
    from ikkuna.store import find_runs
    from ikkuna.store.run_contents import find_files
    from ikkuna.store.run_directory import read_run_file

    found = []
    for number, run in enumerate(find_runs(directory) if directory.is_dir() else ()):
        try:
            find_files(run)
        except ConfigError:  # it ended before its first value
            continue
        found.append((getattr(read_run_file(run), "created", ""), number, run))
    return [run for *_, run in sorted(found)]


def _run_without_values(path: Path) -> str | None:
    """Return what is known of a run whose first sampled step is not complete, or of the last such run of a directory."""
    from ikkuna.errors import DumpError
    from ikkuna.flight_recorder.dump_reading import read_dump
    from ikkuna.store import find_runs
    from ikkuna.store.run_directory import RUN_FILE

    runs = [path] if (path / RUN_FILE).is_file() else find_runs(path) if path.is_dir() else []
    if not runs:
        return None
    text = f"'{runs[-1]}' has no value: its training is in its first step, or ended there"
    for dump in sorted((runs[-1] / "dumps").glob("*/dump.json"))[-1:]:
        with suppress(DumpError):  # a dump that cannot be read says nothing of the run
            text += f", with {', '.join(read_dump(dump.parent).reasons[:1])}"
        text += f"; 'ikkuna replay {dump.parent}' shows the batch; "
        text += "ikkuna.preflight(model, batch, loss, optimizer) names the cause of many errors of a first step"
    return text


def chosen_run(path: str, terminal: Terminal, needs_values: bool = True) -> str:
    """Return the newest run of a directory of runs, and say so; any other path is returned itself.

    Parameters
    ----------
    path : str
        A run or a directory of runs.
    terminal : Terminal
        Shows the choice.
    needs_values : bool
        Whether a run without values is an error, and not only one without anything.

    Raises
    ------
    ConfigError
        If there is no such run.
    """
    from ikkuna.errors import ConfigError
    from ikkuna.store.run_contents import find_files

    try:
        find_files(path)
    except ConfigError:
        if not (runs := runs_by_age(Path(path))):
            if path == _DEFAULT and not Path(path).exists():
                raise ConfigError(f"there is no directory '{_DEFAULT}' here; pass the path of a run") from None
            if needs_values and (empty := _run_without_values(Path(path))) is not None:
                raise ConfigError(empty) from None
            return path  # the reader raises the error
        count = f"{len(runs)} runs, of which the newest is" if len(runs) > 1 else "the run"
        terminal.warn(f"'{path}' contains {count} '{runs[-1]}'")
        return str(runs[-1])
    return path
