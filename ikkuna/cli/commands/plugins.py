"""``ikkuna plugins``: lists every installed plugin, and finds broken ones."""

import argparse

from ikkuna.cli.plugin_table import GROUPS
from ikkuna.cli.terminal import Command, Terminal

__all__ = ["command"]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--load", action="store_true", help="import each plugin; the exit status is 1 if one is broken")
    parser.add_argument("--json", action="store_true", help="write JSON instead of a table")


def _run(options: argparse.Namespace, terminal: Terminal) -> int:
    from ikkuna.support.plugins import plugins

    rows = []
    for type_name, group in GROUPS.items():
        for name, points in sorted(plugins(group).items()):
            terminal.progress(f"{type_name} {name}")
            distributions = ", ".join(sorted({point.dist.name for point in points if point.dist}))
            rows.append((type_name, name, distributions, _state(group, name) if options.load else ""))
    terminal.progress("")
    header = "type", "name", "distribution", "state"
    if options.json:
        terminal.write_json([dict(zip(header, row, strict=True)) for row in rows])
    else:
        terminal.write_table(header, rows)
    return int(any(state not in ("", "works") for *_, state in rows))


def _state(group: str, name: str) -> str:
    from ikkuna.errors import PluginError
    from ikkuna.support.plugins import load_plugin

    try:
        load_plugin(group, name, object)
    except PluginError as error:
        return str(error)
    return "works"


command = Command(help="list every installed plugin", add_arguments=_add_arguments, run=_run)
