"""Lists the plugins of a group without importing them."""

import argparse
import ast
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path

from ikkuna.cli.terminal import Command, Terminal

__all__ = ["GROUPS", "describe_plugin", "list_command"]

GROUPS = {
    "subscriber": "ikkuna.export.subscriber",
    "preset": "ikkuna.presets",
    "backend": "ikkuna.backends",
    "rule": "ikkuna.rules",
}
"""The entry-point group of each type of plugin."""


def describe_plugin(point: EntryPoint) -> str:
    """Return the first line of the docstring of a plugin's class, which is read from its source; empty if there is none.

    Examples
    --------
    >>> describe_plugin(EntryPoint("null", "ikkuna.backends.backend:NullBackend", "ikkuna.backends"))
    'Discard every value; for subscribers that only publish.'
    """
    try:
        spec = find_spec(point.module)
        source = Path(spec.origin).read_text(encoding="utf-8") if spec and spec.origin else ""
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and node.name == point.attr:
                return (ast.get_docstring(node) or "").partition("\n")[0]
    except Exception:  # the package of a plugin may be broken in any way; `ikkuna plugins --load` shows how
        return ""
    return ""


def list_command(type_name: str, plural: str) -> Command:
    """Return the command that lists the plugins of one type."""

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("name", nargs="?", help=f"show this {type_name} only")
        parser.add_argument("--json", action="store_true", help="write JSON instead of a table")

    def run(options: argparse.Namespace, terminal: Terminal) -> int:
        from ikkuna.errors import PluginError, unknown_name
        from ikkuna.support.plugins import plugins

        found = plugins(GROUPS[type_name])
        if options.name is not None and options.name not in found:
            raise PluginError(unknown_name(type_name, options.name, sorted(found)))
        names = [options.name] if options.name is not None else sorted(found)
        rows = [(name, _distribution(point), describe_plugin(point)) for name in names for point in found[name]]
        _write(terminal, rows, options.json)
        return 0

    return Command(help=f"list the installed {plural}", add_arguments=add_arguments, run=run)


def _distribution(point: EntryPoint) -> str:
    try:
        return f"{point.dist.name} {point.dist.version}" if point.dist else ""
    except Exception:  # the metadata of a distribution may be damaged
        return "unknown"


_Rows = list[tuple[str, str, str]]


def _write(terminal: Terminal, rows: _Rows, as_json: bool) -> None:
    header = "name", "distribution", "description"
    if as_json:
        terminal.write_json([dict(zip(header, row, strict=True)) for row in rows])
    else:
        terminal.write_table(header, rows)
