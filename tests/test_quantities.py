"""A metric declares what it is once, and everything that shows or compares it reads that."""

import ast
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ikkuna
from ikkuna.backends.pictures.chart import Chart
from ikkuna.backends.pictures.drawing import draw_chart
from ikkuna.errors import ConfigError, ConfigTypeError, IkkunaError
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import Quantity, Subscriber
from ikkuna.reading import read_run
from ikkuna.report import write_report
from ikkuna.report.content import RunContent, network_charts
from ikkuna.report.difference import compare_runs
from ikkuna.report.modules import module_kinds
from ikkuna.store.names import Series
from ikkuna.store.quantity import NEUTRAL, SCALES
from ikkuna.store.run_directory import read_run_file
from ikkuna.testing import small_model
from tests.subscribers import EVERY_SUBSCRIBER

ROOT = Path(__file__).parents[1]


class LoudnessSubscriber(Subscriber):
    """A plugin with two results: a level in decibels, and a share that depends on the machine."""

    fields = ("sumsq",)
    quantity = (
        Quantity("dB", low=-200.0, high=0.0, scale="signed", larger="good"),
        Quantity(low=0.0, high=1.0, scale="share", is_comparable=False),
    )

    def __init__(self, noise=0.0, **options):
        super().__init__("weights", publishes=("weights_loudness", "weights_jitter"), **options)
        self.noise = noise

    def compute(self, message):
        self.emit(message, -10 * abs(np.log10(message.record.l2_norm)), "weights_loudness")
        self.emit(message, 0.25 + self.noise, "weights_jitter")


class NetworkLoudness(LoudnessSubscriber):
    """A value of the network that is declared as the first one to look at."""

    quantity = Quantity("lm", scale="log", larger="bad", is_headline=True)

    def __init__(self, **options):
        Subscriber.__init__(self, "batch_finished", publishes="brightness", **options)

    def compute(self, message):
        self.emit(message, 10.0 ** (message.global_step + 1))


def train(directory, noise=0.0):
    torch.manual_seed(0)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    subscribers = [LoudnessSubscriber(noise), NetworkLoudness()]
    with ikkuna.watch(model, *subscribers, log_dir=directory, verbosity=0, rules=None) as watched:
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(4, 4)).sum().backward()
            optimizer.step()
    return watched.run_directory


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    return [train(directory), train(directory, noise=0.5)]


def test_the_run_stores_what_its_kinds_are(runs):
    run = read_run(runs[0])
    loudness = run.quantity("weights_loudness")
    assert (loudness.unit, loudness.low, loudness.high, loudness.scale) == ("dB", -200.0, 0.0, "signed")
    assert (loudness.sources, loudness.statistics) == (("weights",), ("sumsq",))
    assert not run.quantity("weights_jitter").is_comparable
    assert run.network_series()[0] == Series("brightness")
    assert run.quantity("nothing") is NEUTRAL


def test_a_plugin_is_drawn_as_it_declares(runs, tmp_path):
    run = read_run(runs[0])
    page = write_report(runs[0], tmp_path / "report.html").read_text()
    assert "weights_loudness [dB]" in page
    assert "brightness [lm]" in page
    assert '"type":"signed"' in page.replace("&#34;", '"')
    assert '"type":"share","low":0.0,"high":1.0' in page.replace("&#34;", '"')
    [first, *_] = network_charts([RunContent("a", run)])
    assert first.title == "brightness [lm]"
    assert set(module_kinds(run)) == {"weights_loudness", "weights_jitter"}
    assert "weights_loudness [dB]" in {ax.get_ylabel() for ax in figure(run, "weights_loudness").axes}
    assert figure(run, "weights_jitter").axes[0].get_ylim() == (-0.02, 1.02)
    assert figure(run, "brightness").axes[0].get_yscale() == "log"


def figure(run, kind):
    from ikkuna.export.handle import draw_kind

    return draw_kind(run, kind)


def test_a_kind_that_is_not_comparable_is_not_compared(runs):
    first, second = map(read_run, runs)
    assert (first.series("weights_jitter", "first").values != second.series("weights_jitter", "first").values).all()
    found = compare_runs(first, second)
    assert found.compared > 1
    assert not found.partings


@pytest.mark.parametrize("scale", SCALES)
def test_the_axis_of_a_figure_follows_the_declaration(scale):
    chart = Chart(Series("x", quantity=Quantity("m", scale=scale)))
    for step, value in enumerate((0.001, 0.01, 0.9)):
        chart.add(step, {None: value})
    ax = draw_chart(chart.view()).axes[0]
    assert ax.get_ylabel() == "x [m]"
    assert ax.get_yscale() == ("log" if scale == "log" else "linear")
    assert (ax.get_ylim() == (-0.02, 1.02)) == (scale == "share")


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"scale": "logarithmic"}, ConfigError),
        ({"zero": "fine"}, ConfigError),
        ({"larger": "worse"}, ConfigError),
        ({"low": 1.0, "high": 1.0}, ConfigError),
        ({"unit": 3}, ConfigTypeError),
    ],
)
def test_an_invalid_declaration_is_refused(fields, error):
    with pytest.raises(error):
        Quantity(**fields)


@pytest.mark.parametrize("quantity", [(Quantity(),), ("share", "log"), "share"])
def test_a_declaration_that_does_not_fit_is_refused_at_registration(quantity):
    made = LoudnessSubscriber()
    made.quantity = quantity
    with pytest.raises(IkkunaError, match=r"LoudnessSubscriber\.quantity needs"):
        MessageBus("quantities").register_subscriber(made)


QUANTITIES = st.builds(
    Quantity,
    unit=st.text(max_size=3),
    low=st.floats(max_value=0, allow_nan=False),
    high=st.floats(min_value=0, exclude_min=True),
    scale=st.sampled_from(SCALES),
    zero=st.sampled_from(["", "good", "bad"]),
    is_comparable=st.booleans(),
    level=st.none() | st.floats(0, 100),
    sources=st.lists(st.text(max_size=3)).map(tuple),
)


@settings(suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
@given(QUANTITIES)
def test_a_declaration_survives_json(quantity):
    assert Quantity.from_dict(json.loads(json.dumps(quantity.as_dict()))) == quantity


@pytest.mark.parametrize("stored", [{"scale": "polar"}, {"low": "x"}, {"unit": 3}, {"other": 1}, {"sources": 5}])
def test_a_declaration_of_a_later_version_is_neutral(stored):
    assert Quantity.from_dict(stored) == NEUTRAL


def test_kinds_of_a_run_without_declarations_are_those_of_installed_subscribers(tmp_path):
    entries = [
        {"kind": kind, "module": module, "pass": "training", "step": step, "value": 0.5}
        for step in range(2)
        for kind, module in [("activations_sparsity", "a"), ("loss", None), ("step_seconds", None), ("unknown", "a")]
    ]
    (tmp_path / "values.1.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    run = read_run(tmp_path)
    assert read_run_file(tmp_path) is None
    assert run.quantity("activations_sparsity").scale == "share"
    assert run.quantity("loss").is_headline
    assert run.quantity("step_seconds").unit == "s"
    assert run.quantity("unknown") is NEUTRAL


@pytest.mark.parametrize("name", EVERY_SUBSCRIBER)
def test_every_installed_metric_declares_what_it_publishes(name):
    made = EVERY_SUBSCRIBER[name](backend="null")
    made.check()
    if made.publishes:
        assert all(
            made.quantity_of(kind) != Quantity(sources=made.kinds, statistics=tuple(made.fields))
            for kind in made.publishes
        )


# Parts that show, compare or store metrics: none of them knows the name of one.
PARTS = ("visualization", "report", "reading", "cli", "watching", "integrations")
ENDINGS = r"_(norm2?|mean|variance|sparsity|ratio|accuracy|percentile|cosine|skewness|kurtosis|sum|dead)\b"


def texts(path):
    """Yield the strings of a file that are no documentation, with their lines."""
    tree = ast.parse(path.read_text())
    documents = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents:
            yield node.lineno, node.value


def names_of_metrics():
    """Return the kinds that installed metrics publish, with their endings alone."""
    found = {kind for make in EVERY_SUBSCRIBER.values() for kind in make(backend="null").publishes}
    return found - {"loss"}


def test_no_part_decides_by_the_name_of_a_metric():
    names, wrong = names_of_metrics(), []
    assert {"train_accuracy", "weights_norm2"} & names
    for part in PARTS:
        root = ROOT / "ikkuna" / part
        for path in [root] if root.is_file() else sorted(root.rglob("*.py")):
            for line, text in texts(path):
                if (text in names and len(text) > 3) or (
                    re.fullmatch(r"[a-z_|$()?<!\\^]+", text) and re.search(ENDINGS, text)
                ):
                    wrong.append(f"{path.relative_to(ROOT)}:{line}: {text}")
    assert wrong == []
