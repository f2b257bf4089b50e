"""Generates the page on the life of an activation from a trace of the real functions.

``.. ikkuna-life:: rooms`` draws the folders, ``files`` lists the files, ``counts`` counts files and calls;
``hook``, ``delivery``, ``writer`` and ``step`` show trees of calls.
"""

import ast
import html
import itertools
import sys
import textwrap
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from docutils import nodes
from ikkuna_tables import ROOT, table
from sphinx.util.docutils import SphinxDirective

sys.path.append(str(ROOT))  # the tests are not installed
from tests.documentation.tracing import Call, files, trace, tree, way

FOLDER = "generated/life"  # below the pages, not under version control
WIDTH, LINE, GAP = 720, 17, 26
COLOURS = {"training": "#e8f0fb", "writer": "#fdf0dd"}

traced = cache(trace)


def summary(path: str) -> str:
    """Return the first paragraph of the docstring of a module, or of a folder's ``__init__``, or the first comment in C++."""
    source = ROOT / ("subscribers" if path.startswith("ikkuna_subscribers") else "") / path
    if source.suffix == ".cpp":
        lines = source.read_text(encoding="utf-8").strip().splitlines()
        return " ".join(line.strip("/ ") for line in itertools.takewhile(lambda line: line.strip("/ "), lines))
    text = (source / "__init__.py" if source.is_dir() else source).read_text(encoding="utf-8")
    return " ".join((ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0].split())


def rooms(calls: list[Call]) -> dict[tuple[str, str], list[str]]:
    """Return the names of the files of each (thread, folder), in the order of their first call."""
    found: dict[tuple[str, str], list[str]] = {}
    for thread, file in dict.fromkeys((call.thread, call.file) for call in calls):
        found.setdefault((thread, Path(file).parent.as_posix()), []).append(Path(file).stem)
    return found


def draw(calls: list[Call]) -> str:
    """Return an SVG with a box for each folder, in the order of the first call."""
    parts, y, before = [], 10, ""
    for (thread, folder), names in rooms(calls).items():
        lines = [*textwrap.wrap(summary(folder), 100), *textwrap.wrap(", ".join(names), 100)]
        height = LINE * (len(lines) + 1) + 12
        if before:
            parts.append(arrow(y, "queue" if thread != before else ""))
            y += GAP
        parts.append(
            f'<rect x="10" y="{y}" width="{WIDTH - 20}" height="{height}" rx="6" fill="{COLOURS[thread]}" stroke="#667"/>'
        )
        parts.append(line(y + LINE, f"{folder} · {thread} thread", "bold"))
        parts += [line(y + LINE * (i + 2), words, "normal") for i, words in enumerate(lines)]
        y, before = y + height, thread
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 10}" font-family="sans-serif" font-size="13">',
            f'<rect width="{WIDTH}" height="{y + 10}" fill="white"/>',
            *parts,
            "</svg>",
        ]
    )


def line(y: int, content: str, weight: str) -> str:
    """Return a line of text."""
    return f'<text x="22" y="{y}" font-weight="{weight}">{html.escape(content)}</text>'


def arrow(y: int, label: str) -> str:
    """Return an arrow downward from `y`."""
    x, end = WIDTH // 2, y + GAP - 2
    return (
        f'<path d="M{x} {y + 2}V{end}m-5 -7l5 7l5 -7" stroke="#667" fill="none"/>'
        f'<text x="{x + 12}" y="{y + 17}" fill="#667">{label}</text>'
    )


def file_table(calls: list[Call]) -> str:
    """Return the table of files in the order of their first call, with their functions."""
    rows = []
    for number, file in enumerate(files(calls), 1):
        functions = dict.fromkeys(call.function for call in calls if call.file == file)
        rows.append((str(number), f"``{file}``", summary(file), ", ".join(f"``{name}``" for name in functions)))
    return table(("", "file", "content", "functions"), rows, widths="4 28 34 34")


def counts(parts: dict[str, list[Call]]) -> str:
    """Return the table of the number of files and calls of each part."""
    rows = ((name, str(len(files(calls))), str(len(calls))) for name, calls in parts.items())
    return table(("part", "files", "calls"), rows)


def call_tree(calls: list[Call]) -> str:
    """Return the tree of calls as a literal block."""
    return ".. code-block:: text\n\n" + textwrap.indent("\n".join(tree(calls)), "   ")


class IkkunaLife(SphinxDirective):
    """Inserts a part of the trace."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        [name] = self.arguments
        parts = way(traced())
        whole = list(chain(*parts.values()))
        if name == "rooms":
            folder = Path(self.env.srcdir) / FOLDER
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "rooms.svg").write_text(draw(whole), encoding="utf-8")
            text = f".. image:: /{FOLDER}/rooms.svg\n   :alt: the folders in order\n"
        elif name == "files":
            text = file_table(whole)
        elif name == "counts":
            text = counts({**parts, "all three": whole, "the whole step": traced()})
        else:
            text = call_tree({**parts, "step": traced()}[name])
        return self.parse_text_to_nodes(text)


def setup(app: Any) -> dict[str, bool]:
    """Add the directive."""
    app.add_directive("ikkuna-life", IkkunaLife)
    return {"parallel_read_safe": True}
