"""Generates tables of the documentation from the code, so that they agree with it.

``.. ikkuna-table:: NAME`` inserts one of `TABLES`.
"""

import ast
import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from functools import cache, partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from ikkuna.backends.backend import GROUP as BACKENDS
from ikkuna.backends.backend import Backend
from ikkuna.export import subscriber
from ikkuna.metrics.messages.kinds import BUILT_IN
from ikkuna.metrics.subscriber.bases import GROUP as PRESETS
from ikkuna.metrics.subscriber.bases import Preset
from ikkuna.support.plugins import load_plugin, plugins

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT))  # the tests are not installed
from tests.diagnosis import remedies  # noqa: E402
from tests.diagnosis.real_errors import distributed  # noqa: E402
from tests.diagnosis.real_errors.errors import ERRORS  # noqa: E402
from tests.diagnosis.unseen import SETS, cases, judge  # noqa: E402
from tests.faults import FAULTS, LEFT_OUT, SECTIONS  # noqa: E402

KINDS = {  # kind → description, and when it is recorded
    "layer_inputs": ("the module's inputs, except inputs that it modified in place", "when the module is called"),
    "activations": ("the module's outputs", "when the module is called"),
    "layer_gradients": ("gradients of the loss with respect to the module's outputs", "during the backward pass"),
    "weights": ("weights before the step", "before the optimizer's step"),
    "weight_gradients": ("gradients of the weights, as the optimizer uses them", "before the optimizer's step"),
    "weight_updates": ("weights after the step minus weights before it", "after the optimizer's step"),
    "biases": ("biases before the step", "before the optimizer's step"),
    "bias_gradients": ("gradients of the biases, as the optimizer uses them", "before the optimizer's step"),
    "bias_updates": ("biases after the step minus biases before it", "after the optimizer's step"),
    "weight_gradients_unclipped": ("gradients of the weights before clipping, unscaled", "after the backward pass"),
    "bias_gradients_unclipped": ("gradients of the biases before clipping, unscaled", "after the backward pass"),
    "weight_micro_gradients": ("gradients of the weights from a single backward pass", "during the backward pass"),
    "bias_micro_gradients": ("gradients of the biases from a single backward pass", "during the backward pass"),
    "input_data": ("the inputs of the network", "when the network is called"),
    "network_output": (
        "the outputs of the network; joined with labels, the outputs that the loss received",
        "when the network or the loss is called",
    ),
    "input_labels": (
        "the labels that the loss module received, or a model that returns its loss",
        "when the loss module or the model is called",
    ),
    "loss": (
        "the output of the loss module, or the scalar of ``backward()``",
        "when the loss module is called, or during the backward pass",
    ),
    "batch_started": ("start of a step; no data", "when the network is called in training"),
    "batch_finished": (
        "end of a step; no data; states whether the step was skipped",
        "after the optimizers have stepped",
    ),
    "epoch_started": ("start of an epoch; no data", "at its first step"),
    "epoch_finished": ("end of an epoch; no data", "at ``epoch_finished()``, or after ``steps_per_epoch`` steps"),
    "observed": ("a tensor that the model passes to ``ikkuna.observe``, under a name", "when ``observe`` is called"),
    "logged": ("a number that the user logs; its name is the path", "at the end of the step"),
}


_WITH_UNIT = re.compile(r"(.*``[^`,]*), ([^`]*)")


def table(head: Iterable[str], rows: Iterable[Iterable[str]], widths: str = "auto") -> str:
    """Return a list-table in reStructuredText, or the word "None." if there are no rows."""
    rows = list(rows)
    if not rows:
        return "None.\n"
    lines = [".. list-table::", "   :header-rows: 1", f"   :widths: {widths}", ""]
    for row in (head, *rows):
        for i, cell in enumerate(row):
            lines.append(f"   {'  ' if i else '* '}- {cell or '—'}")
    return "\n".join(lines) + "\n"


def kinds() -> str:
    """Return the table of built-in kinds.  A kind without a description is an error."""
    if missing := set(BUILT_IN) ^ set(KINDS):
        raise ValueError(f"kinds without a description, or descriptions without a kind: {sorted(missing)}")
    return table(("kind", "description", "recorded"), ((f"``{kind}``", *KINDS[kind]) for kind in BUILT_IN))


def paragraphs(thing: Any) -> list[str]:
    """Return the paragraphs of a docstring, each on one line."""
    text = inspect.cleandoc(thing.__doc__ or "")
    return [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text)]


def exchange(metric: type) -> tuple[str, str, str]:
    """Return what a subscriber takes, what it publishes, and the unit, as its docstring states.

    The docstring contains a paragraph such as: Takes x; publishes ``y``, in the unit of x.
    """
    text = " ".join(paragraphs(metric))
    takes = re.search(r"\bTakes (.+?)(?:[;.](?= |$)| and publishes )", text)
    publishes = takes and re.search(r"[Pp]ublishes (.+?)(?:[;:.](?= |$))", text[takes.start() :])
    if not takes or not publishes:
        raise ValueError(f"the docstring of {metric.__name__} does not say 'Takes …; publishes …, in …'")
    split = _WITH_UNIT.fullmatch(publishes[1])
    return takes[1], *(split.groups() if split else (publishes[1], ""))


def metrics() -> str:
    """Return the table of installed subscribers."""
    rows = []
    for name in sorted(plugins(subscriber.GROUP)):
        metric = load_plugin(subscriber.GROUP, name, subscriber.Subscriber)
        what = re.sub(
            r",? :math:`[^`]*`(?: and :math:`[^`]*`)*", "", paragraphs(metric)[0]
        )  # the formula is on the metric's own page
        takes, publishes, unit = exchange(metric)
        shown = declared(metric.quantity)
        rows.append((f":class:`~{metric.__module__}.{name}`", what, takes, f"{publishes}, {unit}".rstrip(", "), shown))
    return table(("metric", "description", "takes", "publishes, unit", "is shown"), rows, widths="18 30 20 20 12")


def declared(quantity: Any) -> str:
    """Return the scales of the kinds that a metric publishes, with their units, as its class declares them."""
    each = [quantity] if isinstance(quantity, subscriber.Quantity) else quantity
    return ", ".join(dict.fromkeys(f"{one.scale} [{one.unit}]" if one.unit else one.scale for one in each))


def backends() -> str:
    """Return the table of installed backends."""
    loaded = {name: load_plugin(BACKENDS, name, Backend) for name in sorted(plugins(BACKENDS))}
    rows = ((f"``'{n}'``", f":class:`~{b.__module__}.{b.__name__}`", paragraphs(b)[0]) for n, b in loaded.items())
    return table(("name", "class", "description"), rows)


def presets() -> str:
    """Return the table of installed presets: name, description, and metrics with the kinds that they publish."""
    rows = []
    for name in sorted(plugins(PRESETS)):
        preset = load_plugin(PRESETS, name, Preset)
        metrics = preset().subscribers(True)
        shown = (f"``{type(m).__name__}``" + (f" ({', '.join(m.publishes)})" if m.publishes else "") for m in metrics)
        rows.append((f"``'{name}'``", paragraphs(preset)[0], ", ".join(shown)))
    return table(("name", "description", "metrics"), rows, widths="12 38 50")


def metric_pages() -> str:
    """Return the documentation of every installed subscriber."""
    loaded = (load_plugin(subscriber.GROUP, name, subscriber.Subscriber) for name in sorted(plugins(subscriber.GROUP)))
    return "\n".join(f".. autoclass:: {metric.__module__}.{metric.__name__}\n" for metric in loaded)


def backend_pages() -> str:
    """Return the documentation of every installed backend."""
    loaded = (load_plugin(BACKENDS, name, Backend) for name in sorted(plugins(BACKENDS)))
    return "\n".join(f".. autoclass:: {backend.__module__}.{backend.__name__}\n" for backend in loaded)


def loops() -> str:
    """Return the table of training loops: the loop, the published values, and the test."""
    return _tests_table("test_loops.py", "loop", "published values")


def trainers() -> str:
    """Return the table of trainers: the trainer, the published values, and the test."""
    return _tests_table("test_trainers.py", "trainer", "observed model and published values")


def _tests_table(name: str, situation_head: str, text_head: str) -> str:
    rows = []
    for node in ast.parse((ROOT / "tests" / "export" / name).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and (text := ast.get_docstring(node)):
            situation = node.name.removeprefix("test_").replace("_", " ")
            rows.append((situation, text.partition("\n\n")[0].replace("\n", " "), f"``{node.name}``"))
    return table((situation_head, text_head, "test"), rows)


@cache
def marked_tests() -> dict[int, list[str]]:
    """Return the tests that are marked with each fault, sorted by file."""
    found: dict[int, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            for mark in getattr(node, "decorator_list", ()):
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.fault":
                    for number in mark.args:
                        found.setdefault(ast.literal_eval(number), []).append(f"{path.stem}::{node.name}")
    return found


def faults(section: str) -> str:
    """Return the table of faults, their consequences and their tests.  A fault without a test is an error."""
    tests = marked_tests()
    if missing := FAULTS.keys() ^ tests.keys():
        raise ValueError(f"faults without a test, or tests of no fault: {sorted(missing)}")
    rows = [
        (
            fault.what,
            f"{fault.then}. {_sentence(fault.aside)}".strip(),
            " ".join(f"``{name}``" for name in tests[number]),
        )
        for number, fault in SECTIONS[section].items()
    ]
    return table(("fault", "consequence", "tests"), rows, widths="28 42 30")


def _sentence(aside: str) -> str:
    return f"*{aside[0].upper()}{aside[1:]}.*" if aside else ""


def left_out() -> str:
    """Return the list of faults that ikkuna does not handle."""
    return "\n".join(f"* {why}" for why in LEFT_OUT.values())


def cells(name: str, start: str) -> list[list[str]]:
    """Return the rows of the table in a file of ``benchmarks`` whose first line begins with `start`, without the rule."""
    lines = (ROOT / "benchmarks" / name).read_text(encoding="utf-8").splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(start))
    head, _, *rows = takewhile(lambda line: line.startswith("|"), lines[first:])
    return [[re.sub("`+", "``", cell.strip()) for cell in line.strip("|").split("|")] for line in (head, *rows)]


def gather() -> str:
    """Return the table of measured costs of the exchange between ranks."""
    head, *rows = cells("RESULTS.md", "| ranks ")
    return table(head, rows)


def costs() -> str:
    """Return the table of measured costs of metrics.  A metric that was not measured is an error."""
    head, *rows = cells("metrics.md", "| metric")
    measured = {row[0].strip("`") for row in rows}
    if missing := set(plugins(subscriber.GROUP)) - measured:
        raise ValueError(f"metrics whose cost was not measured: {sorted(missing)}")
    return table(head, rows)


def real_errors() -> str:
    """Return the table of errors of public trackers: the mistake, and which checks and rules find it."""
    head = ("mistake", "check before the first step", "rule", "why nothing else finds it")
    rows = [
        (
            f"{error.mistake} (`{error.source.partition('//')[2]} <{error.source}>`__)",
            ", ".join(f"``{name}``" for name in sorted(error.checks)),
            ", ".join(f"``{name}``" for name in sorted(error.rules)),
            error.reason,
        )
        for error in ERRORS.values()
    ]
    return table(head, rows, widths="40 15 15 30")


def distributed_errors() -> str:
    """Return the table of errors on several ranks: the mistake, and which rules find it."""
    rows = [
        (
            f"{error.mistake} (`{error.source.partition('//')[2]} <{error.source}>`__)",
            ", ".join(f"``{name}``" for name in sorted(error.rules)),
            error.reason,
        )
        for error in distributed.ERRORS.values()
    ]
    return table(("mistake", "rule", "what it does not see"), rows, widths="50 15 35")


def errors_not_rebuilt() -> str:
    """Return the list of errors of public lists that cannot be rebuilt on processors."""
    return "\n".join(f"* {name}: {why}" for name, why in distributed.NOT_REBUILT.items())


def unseen() -> str:
    """Return the verdicts on mistakes by an author who had not read the rules, before and after that."""
    head, *before = judge.table(judge.load("results_before.json"), judge.load("judgements.json"))
    _, *after = judge.table(judge.load("results.json"), judge.load("judgements.json"))
    both = [
        (*b[:2], *(x if x == y else f"{x} → {y}" for x, y in zip(b[2:], a[2:], strict=True)))
        for b, a in zip(before, after, strict=True)
    ]
    return table(head, both)


def unseen_reports() -> str:
    """Return the table of the published reports that were rebuilt, with the verdicts before and after."""
    before, after = (
        judge.verdicts(judge.load(name), judge.load("judgements.json"))
        for name in ("results_before.json", "results.json")
    )
    rows = [
        (f"{case.cause} (`{case.report.partition('//')[2]} <{case.report}>`__)", before[name], after[name])
        for name, case in cases().items()
        if case.report
    ]
    return table(("mistake", "before", "after"), rows, widths="70 15 15")


def unseen_accused() -> str:
    """Return the table of warnings and errors on healthy programs, with the judgement of each."""
    why, head = judge.load("judgements.json"), ("program", "finding", "by", "judgement")
    rows = [
        (
            f"{name} ({cases()[name].family})",
            f"``{f['rule']}`` ({f['severity']})",
            column,
            why[name]["false"][f["rule"]],
        )
        for name, found in judge.accused(judge.load("results.json")).items()
        for column, f in found
    ]
    return table(head, rows, widths="20 20 10 50")


def missed(results: str, judgements: str) -> str:
    """Return the table of knowable mistakes whose cause is not named at *warning* or above."""
    known = cases(*SETS)
    verdicts = judge.verdicts(judge.load(results), judge.load(judgements))
    rows = [(known[name], verdict) for name, verdict in verdicts.items() if judge.ORDER.index(verdict) > 1]
    return table(
        ("family", "mistake", "verdict"), [(c.family, c.cause, v) for c, v in rows if c.knowable], widths="20 65 15"
    )


def verdicts_of(results: str, judgements: str) -> str:
    """Return the counts of verdicts on the mistakes of a set, by family."""
    head, *rows = judge.table(judge.load(results), judge.load(judgements))
    return table(head, rows)


def useless_remedies() -> str:
    """Return the number of findings whose remedy does not remove the mistake, for planted mistakes and for each set."""
    head, *rows = remedies.table()
    return table(head, rows)


def peers() -> str:
    """Return the counts of alarms and of named causes of other tools, and those of ikkuna."""
    known, named, texts = cases("later"), judge.load("peers_named.json"), judge.load("peers.json")
    results = judge.load("later_results.json")
    verdicts = judge.verdicts(results, judge.load("later_judgements.json"))

    def row(tool: str, alarmed: set[str], causes: Collection[str]) -> tuple[str, ...]:
        healthy = {name for name in alarmed if known[name].healthy}
        faults = {name for name in alarmed if known[name].knowable} - healthy
        return tool, str(len(causes)), str(len(faults)), str(len(healthy))

    rows = [
        row(
            tool,
            {name for name, by in texts.items() if by[tool] and not by[tool][0].startswith("stopped")},
            named[tool],
        )
        for tool in named
    ]
    loud = {
        name for name, by in results.items() if any(f["severity"] in judge.LOUD for c in judge.COLUMNS for f in by[c])
    }
    own = [name for name, verdict in verdicts.items() if judge.ORDER.index(verdict) < 2]
    healthy = sum(case.healthy for case in known.values())
    knowable = sum(case.knowable for case in known.values()) - healthy
    head = ("tool", "cause named", f"alarm on one of {knowable} faults", f"alarm on one of {healthy} healthy programs")
    return table(head, [row("ikkuna", loud, own), *rows])


def configurations() -> str:
    """Return the counts of healthy configurations by family, and of those with a warning or an error."""
    runs = judge.load("configurations.json").values()
    counts = Counter(run["family"] for run in runs)
    accused = Counter(run["family"] for run in runs if run["found"])
    rows = [(family, str(counts[family]), str(accused[family])) for family in sorted(counts)]
    return table(
        ("family", "configurations", "with a warning or an error"),
        [*rows, ("all", str(counts.total()), str(accused.total()))],
    )


def configurations_accused() -> str:
    """Return the table of warnings and errors on healthy configurations, with the judgement of each."""
    why = judge.load("configurations_judgements.json")
    rows = [
        (name, f"``{rule}``", why[name][rule])
        for name, run in judge.load("configurations.json").items()
        for rule in sorted({found["rule"] for found in run["found"]})
    ]
    return table(("configuration", "finding", "judgement"), rows, widths="25 20 55")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


TABLES: dict[str, Callable[[], str]] = {
    "kinds": kinds,
    "metrics": metrics,
    "backends": backends,
    "presets": presets,
    "loops": loops,
    "trainers": trainers,
    **{f"faults-{section}": partial(faults, section) for section in SECTIONS},
    "faults-left-out": left_out,
    "costs": costs,
    "real-errors": real_errors,
    "distributed-errors": distributed_errors,
    "errors-not-rebuilt": errors_not_rebuilt,
    "unseen": unseen,
    "unseen-reports": unseen_reports,
    "unseen-missed": partial(missed, "results.json", "judgements.json"),
    "later": partial(verdicts_of, "later_results.json", "later_judgements.json"),
    "later-missed": partial(missed, "later_results.json", "later_judgements.json"),
    "third": partial(verdicts_of, "third_results.json", "third_judgements.json"),
    "third-missed": partial(missed, "third_results.json", "third_judgements.json"),
    "fourth": partial(verdicts_of, "fourth_results.json", "fourth_judgements.json"),
    "fourth-missed": partial(missed, "fourth_results.json", "fourth_judgements.json"),
    "remedies": useless_remedies,
    "peers": peers,
    "configurations": configurations,
    "configurations-accused": configurations_accused,
    "unseen-accused": unseen_accused,
    "gather": gather,
    "metric-pages": metric_pages,
    "backend-pages": backend_pages,
}


class IkkunaTable(SphinxDirective):
    """Inserts a generated table."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        text = TABLES[self.arguments[0]]()
        return self.parse_text_to_nodes(text)


def setup(app: Any) -> dict[str, bool]:
    """Add the directive."""
    app.add_directive("ikkuna-table", IkkunaTable)
    return {"parallel_read_safe": True}
