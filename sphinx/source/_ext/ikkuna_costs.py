"""Draws the measured costs: ``.. ikkuna-costs::`` inserts the figures."""

import json
from pathlib import Path

from docutils import nodes
from matplotlib.figure import Figure
from sphinx.util.docutils import SphinxDirective

CURVES = Path(__file__).parents[3] / "benchmarks" / "scaling.json"
FOLDER = "generated/costs"  # below the pages, not under version control


def draw_modules(curve: dict[str, float]) -> Figure:
    """Draw the cost per module over the number of modules."""
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.add_subplot()
    axes.semilogx([int(count) for count in curve], [seconds * 1e6 for seconds in curve.values()], "o-")
    axes.set(xlabel="modules", ylabel="µs per module and step", ylim=(0, None))
    axes.grid(alpha=0.3)
    return figure


def draw_sizes(curves: dict[str, dict[str, float]]) -> Figure:
    """Draw the cost of each set of statistics over the size of a tensor: solid for native kernels, dashed for numpy."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    colours: dict[str, str] = {}
    for name, curve in curves.items():
        statistics, kernel = name.rsplit(", ", 1)
        colour = colours.setdefault(statistics, f"C{len(colours)}")
        label = statistics if kernel == "native" else None
        axes.loglog(list(map(int, curve)), list(curve.values()), "-" if label else "--", color=colour, label=label)
    axes.set(xlabel="elements of a float32 tensor", ylabel="cost in multiples of its sum()")
    axes.grid(alpha=0.3)
    axes.legend(title="solid: native, dashed: numpy", fontsize="small")
    return figure


class IkkunaCosts(SphinxDirective):
    """Inserts the figures of ``benchmarks/scaling.json``."""

    def run(self) -> list[nodes.Node]:
        measured = json.loads(CURVES.read_text(encoding="utf-8"))
        directory = Path(self.env.srcdir) / FOLDER
        directory.mkdir(parents=True, exist_ok=True)
        figures = {"modules": draw_modules(measured["modules"]), "sizes": draw_sizes(measured["sizes"])}
        lines = []
        for name, figure in figures.items():
            figure.savefig(directory / f"{name}.svg")
            lines += [f".. image:: /{FOLDER}/{name}.svg", f"   :alt: cost over {name}", ""]
        self.env.note_dependency(str(CURVES))
        return self.parse_text_to_nodes("\n".join(lines))


def setup(app) -> dict[str, bool]:
    app.add_directive("ikkuna-costs", IkkunaCosts)
    return {"parallel_read_safe": True}
