"""List subscribers, backends, presets, rules, plugins or kinds.

List what is installed, or with 'kinds RUN' the kinds that a run has stored.
"""

import argparse
import ast
import re
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from ikkuna.cli.terminal import Terminal


class PluginType(NamedTuple):
    """A type of plugin: its entry-point group, and the class that its plugins derive from, as an entry point names it."""

    group: str
    base: str


TYPES = {
    "subscribers": PluginType("ikkuna.export.subscriber", "ikkuna.export.subscriber:Subscriber"),
    "presets": PluginType("ikkuna.presets", "ikkuna.metrics.subscriber.bases:Preset"),
    "backends": PluginType("ikkuna.backends", "ikkuna.visualization:Backend"),
    "rules": PluginType("ikkuna.rules", "ikkuna.diagnosis:Rule"),
}
"""The types of plugins, by the name of their list."""

_TOPICS = (*TYPES, "plugins", "kinds")


def plain_text(text: str) -> str:
    """Return the first paragraph of a docstring in one line, without its markup and formulas.

    Examples
    --------
    >>> plain_text("The p-norm of ``x``, :math:`|x|_p`, see `Subscriber`.  More.")
    'The p-norm of x, see Subscriber.'
    """
    text = " ".join(text.partition("\n\n")[0].split())
    text = re.sub(r",? (?:the mean of |and )?:math:`[^`]*`(,)?", r"\1", text)
    text = re.sub(r":\w+:`~?([^`<]*)(?:<[^`]*>)?`", r"\1", text)
    text = re.sub(r"`+", "", text)
    return re.sub(r"(\.) .*", r"\1", re.sub(r" ([.,])|,(,)", r"\1\2", text))


def describe_plugin(point: EntryPoint) -> str:
    """Return what the docstring of a plugin's class says first, which is read from its source; empty if there is none.

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
                return plain_text(ast.get_docstring(node) or "")
    except Exception:  # the package of a plugin may be broken in any way; `ikkuna list plugins --load` shows how
        return ""
    return ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topic", metavar="WHAT", help=", ".join(_TOPICS))
    parser.add_argument(
        "name", metavar="NAME", nargs="?", help="show this one only; with kinds, list those of this run"
    )
    parser.add_argument("--load", action="store_true", help="import each plugin; the exit status is 1 if one is broken")


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    from ikkuna.errors import ConfigError, unknown_name

    if options.topic not in _TOPICS:
        raise ConfigError(unknown_name("list", options.topic, _TOPICS))
    if options.topic == "kinds":
        header, rows = _kinds(options.name, terminal)
    else:
        header, rows = _plugins(options, terminal)
    facts = [dict(zip(header, row, strict=True)) for row in rows]
    terminal.answer(facts, lambda: terminal.write_table(header, rows))
    return int(options.load and any(row[-1] not in ("", "works") for row in rows))


def _plugins(options: argparse.Namespace, terminal: Terminal) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    from ikkuna.errors import PluginError, unknown_name
    from ikkuna.support.plugins import plugins

    found = [
        (topic, name, point)
        for topic in (TYPES if options.topic == "plugins" else (options.topic,))
        for name, points in sorted(plugins(TYPES[topic].group).items())
        for point in points
    ]
    if options.name is not None:
        names = {name for _, name, _ in found}
        if options.name not in names:
            raise PluginError(unknown_name(options.topic.removesuffix("s"), options.name, sorted(names)))
        found = [entry for entry in found if entry[1] == options.name]
    header = ("type", "name", "distribution", *(("state",) if options.load else ("description",)))
    rows: list[tuple[str, ...]] = []
    for topic, name, point in found:
        terminal.progress(f"{topic} {name}")
        last = plugin_state(topic, name) if options.load else describe_plugin(point)
        rows.append((topic.removesuffix("s"), name, _distribution(point), last))
    terminal.progress("")
    return header, rows


def _distribution(point: EntryPoint) -> str:
    try:
        return f"{point.dist.name} {point.dist.version}" if point.dist else ""
    except Exception:  # the metadata of a distribution may be damaged
        return "unknown"


def plugin_state(topic: str, name: str) -> str:
    """Return "works", or why a plugin of this name is refused."""
    from ikkuna.errors import PluginError
    from ikkuna.support.plugins import load_plugin

    try:
        load_plugin(TYPES[topic].group, name, EntryPoint("", TYPES[topic].base, "").load())
    except PluginError as error:
        return str(error)
    return "works"


def _kinds(path: str | None, terminal: Terminal) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    if path is None:
        from ikkuna.metrics.messages.kinds import BUILT_IN, is_of_module

        return ("kind", "of"), [(kind, "each module" if is_of_module(kind) else "the network") for kind in BUILT_IN]
    from ikkuna.cli.terminal import chosen_run
    from ikkuna.store import read_run

    run = read_run(chosen_run(path, terminal))
    rows: list[tuple[str, ...]] = []
    for pass_name in run.passes():
        for kind in run.kinds(pass_name):
            names = run.names(kind, pass_name)
            count = sum(len(run.series(kind, name, pass_name).steps) for name in names)
            rows.append((kind, pass_name, str(len(names)), str(count)))
    return ("kind", "pass", "series", "values"), rows
