"""Inserts the examples of a topic: their docstrings, their pictures, and the code that draws them.

``.. ikkuna-gallery:: inspection`` inserts every example of ``examples/inspection``.
"""

import ast
import contextlib
import importlib
import io
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
FOLDER = "generated/gallery"  # below the pages, not under version control


def examples(topic: str) -> list[Path]:
    """Return the files of the examples of a topic, in order."""
    return sorted((EXAMPLES / topic).glob("ex*.py"))


def draw(topic: str, directory: Path) -> dict[str, list[Path]]:
    """Draw the pictures that are out of date, and return the pictures of each example by its name."""
    directory.mkdir(parents=True, exist_ok=True)
    record = directory / "pictures.txt"
    sources = (*(EXAMPLES / topic).glob("*.py"), *(ROOT / "ikkuna" / "plot").glob("*.py"), Path(__file__))
    if not record.exists() or record.stat().st_mtime < max(path.stat().st_mtime for path in sources):
        with _importable(EXAMPLES / topic):
            lines = [" ".join(_draw(path.stem, directory)) for path in examples(topic)]
        record.write_text("\n".join(lines), encoding="utf-8")
    found = (line.split() for line in record.read_text(encoding="utf-8").splitlines())
    return {name: [directory / file for file in files] for name, *files in found}


def _draw(name: str, directory: Path) -> list[str]:
    with contextlib.redirect_stdout(io.StringIO()):
        return [name, *(path.name for path in importlib.import_module(name).main(directory))]


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Make the examples importable, silence their log, and use one thread, which is faster for small networks."""
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    logging.getLogger("ikkuna").setLevel(logging.CRITICAL)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for path in folder.glob("*.py"):
            sys.modules.pop(path.stem, None)
        logging.getLogger("ikkuna").setLevel(logging.NOTSET)
        torch.set_num_threads(threads)
        torch.set_rng_state(state)


def section(path: Path, pictures: list[Path]) -> str:
    """Return the part of the page that shows an example: its docstring, its pictures, its code."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    title = path.stem.split("_", 1)[1].replace("_", " ").capitalize()
    title = title.replace("Lstm", "LSTM").replace("Nan", "NaN")
    lines = [title, "~" * len(title), "", text, ""]
    for picture in pictures:
        alt = re.sub(r"[_\d]+", " ", picture.stem).strip()
        lines += [f".. image:: /{FOLDER}/{path.parent.name}/{picture.name}", f"   :alt: {alt}", "   :width: 90%", ""]
    lines += [f".. literalinclude:: /../../{path.relative_to(ROOT)}", "   :pyobject: main", ""]
    return "\n".join(lines)


class IkkunaGallery(SphinxDirective):
    """Inserts the examples of a topic."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        [topic] = self.arguments
        pictures = draw(topic, Path(self.env.srcdir) / FOLDER / topic)
        text = "\n".join(section(path, pictures[path.stem]) for path in examples(topic))
        return self.parse_text_to_nodes(text, allow_section_headings=True)


def setup(app: Any) -> dict[str, bool]:
    """Add the directive."""
    app.add_directive("ikkuna-gallery", IkkunaGallery)
    return {"parallel_read_safe": True}
