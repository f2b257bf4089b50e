"""Inserts the results of the trial: ``.. ikkuna-trial::`` makes a table of ``tests/trial/results.json``."""

import json
from pathlib import Path

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

RESULTS = Path(__file__).parents[3] / "tests" / "trial" / "results.json"


def rows(results: dict) -> list[tuple[str, ...]]:
    """Return a row for each program."""
    found = []
    for result in results.values():
        findings = [
            f"{severity} ``{rule}``: {result['judged'][rule]}" for rule, (severity, _) in result["findings"].items()
        ]
        steps = " and ".join(str(count) for count in result["steps"])
        found.append(
            (
                result["title"],
                steps,
                f"{result['values']:,}",
                f"{result['cost']:.1f}" if result["cost"] else "–",
                "; ".join(findings) or "none",
            )
        )
    return found


class IkkunaTrial(SphinxDirective):
    """Inserts the table of programs and a sentence that counts."""

    def run(self) -> list[nodes.Node]:
        results = json.loads(RESULTS.read_text(encoding="utf-8"))
        self.env.note_dependency(str(RESULTS))
        values = sum(result["values"] for result in results.values())
        wrong = sum(bool(result["wrong"]) for result in results.values())
        lines = [
            f"{len(results)} programs, {values:,} compared values; something was wrong in {wrong} programs.",
            "",
            ".. list-table::",
            "   :header-rows: 1",
            "   :widths: 50 10 10 10 40",
            "",
        ]
        header = ("program", "steps", "values", "ms", "findings")
        for row in (header, *rows(results)):
            lines += [f"   {'* -' if number == 0 else '  -'} {cell}" for number, cell in enumerate(row)]
        return self.parse_text_to_nodes("\n".join(lines))


def setup(app) -> dict[str, bool]:
    app.add_directive("ikkuna-trial", IkkunaTrial)
    return {"parallel_read_safe": True}
