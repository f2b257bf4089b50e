"""A report is one page that needs nothing else, and shows what is in a run, whatever that is."""

import base64
import io
import json
import platform
import re
import struct
import zlib
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from torch import nn

import ikkuna
from ikkuna import cli
from ikkuna.backends.pictures.cells import COLOURS, MISSING, NONFINITE, ZERO, ColourScale
from ikkuna.backends.tensorboard import TensorBoardBackend
from ikkuna.cli.run_summary import write_summary
from ikkuna.cli.terminal import Terminal
from ikkuna.diagnosis import Finding, Findings
from ikkuna.errors import ConfigError
from ikkuna.reading import read_run
from ikkuna.report import write_report
from ikkuna.report.charts import ReportCurve, chart_of, folded, ticks
from ikkuna.report.content import RunContent, network_charts
from ikkuna.report.heatmaps import draw_heatmap
from ikkuna.report.modules import abnormal_modules, kind_tables, module_rows, table_heatmaps
from ikkuna.store.names import Series
from ikkuna.store.quantity import NEUTRAL, Quantity
from ikkuna.store.sparkline import reduced_curve, reduced_matrix
from ikkuna.store.values import ModuleEntry
from ikkuna.testing import small_model

DRAW = torch.Generator().manual_seed(5)
LIBRARY = "/*! https://github.com/leeoniya/uPlot (v1.6.32) */"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with a planted mistake, histograms, percentiles and hostile names."""
    from ikkuna.export.subscriber import HistogramSubscriber, LossSubscriber, NormSubscriber, PercentileSubscriber

    directory = tmp_path_factory.mktemp("runs")
    torch.manual_seed(0)
    model, loss = small_model(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.first.parameters(), 0.1)  # the other parameters are forgotten
    subscribers = (
        *(NormSubscriber("weights"), LossSubscriber(), HistogramSubscriber("weights", subsample=10)),
        *(PercentileSubscriber("weights", subsample=5), NormSubscriber("layer_gradients")),
    )
    with ikkuna.watch(model, *subscribers, loss=loss, log_dir=directory):
        for _ in range(61):
            loss(model(torch.randn(8, 4, generator=DRAW)), torch.randint(0, 3, (8,), generator=DRAW)).backward()
            optimizer.step()
    (run,) = directory.iterdir()
    return run


class Page(HTMLParser):
    """Collects the tags of a page, and checks that they are closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text = [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "input", "image", "line", "circle", "polyline", "br") or tag == "image":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    def attributes(self, name):
        return [found[name] for _, found in self.tags if name in found]


def lines(directory, entries):
    text = "\n".join(json.dumps({"module": None, "pass": "training", **entry}) for entry in entries)
    (directory / "values.1.jsonl").write_text(text + "\n")
    return directory


def test_a_report_shows_the_findings_and_every_kind(run, tmp_path):
    text = write_report(run, tmp_path / "report.html").read_text()
    page = Page(text)
    words = " ".join("".join(page.text).split())
    assert "error: not_in_optimizer" in words or "warning: not_in_optimizer" in words
    for title in (
        "The network",
        "Layers over steps",
        "Spread over layers",
        "Percentiles",
        "Distributions over steps",
        "Modules",
    ):
        assert title in words
    maps = [json.loads(data) for data in page.attributes("data-heatmap")]
    stored = read_run(run)
    assert [*stored.names("weights_norm2")] in [found["names"] for found in maps]
    assert "loss" in words.split("The network")[1].split("Layers over steps")[0]


def test_a_report_refers_to_nothing_outside_of_itself(run, tmp_path):
    text = write_report(run, tmp_path / "report.html").read_text()
    page = Page(text)
    assert not re.findall(r"https?://|@import|url\(", text.replace(LIBRARY, ""))
    assert all(
        value.startswith("data:image/png;base64,") for name in ("src", "href") for value in page.attributes(name)
    )


def test_hostile_names_stay_text(tmp_path):
    name = "<script>alert('x')</script>\"&'"
    keys = [(kind, module) for kind in (name, "b") for module in (None, name, "m", "n")]
    entries = [{"kind": k, "module": module, "step": step, "value": 1.0} for step in range(3) for k, module in keys]
    text = write_report(lines(tmp_path, entries), tmp_path / "report.html").read_text()
    assert text.count("<script>") == 1
    assert "alert(" in "".join(Page(text).text)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1e300, 1e300, 5e-324])
def test_any_number_can_be_drawn(value, tmp_path):
    entries = [
        {
            "kind": kind,
            "module": module,
            "step": 10**step,
            "value": str(value) if value != value or abs(value) == float("inf") else value,
        }
        for step in (0, 5, 17)
        for kind, module in [
            ("loss", None),
            *[(kind, name) for kind in ("a_norm2", "a_mean", "a_sparsity") for name in "xyz"],
        ]
    ]
    page = Page(write_report(lines(tmp_path, entries), tmp_path / "report.html").read_text())
    assert len(page.attributes("data-heatmap")) == 3
    assert not [d for d in page.attributes("d") + page.attributes("points") if "nan" in d or "inf" in d]


def indices_of(svg):
    """Return the colour numbers in the picture of a heat map."""
    data = base64.b64decode(re.search(r"base64,([^\"]+)", svg)[1])
    columns, rows = struct.unpack(">II", data[16:24])
    begin = data.index(b"IDAT")
    (size,) = struct.unpack(">I", data[begin - 4 : begin])
    return np.frombuffer(zlib.decompress(data[begin + 4 : begin + 4 + size]), np.uint8).reshape(rows, columns + 1)[
        :, 1:
    ]


def test_zero_nan_and_missing_have_their_own_colours():
    values = np.array([[1.0, 100.0], [0.0, np.nan], [np.nan, np.inf]])
    present = np.array([[True, True], [True, True], [False, True]])
    drawn = draw_heatmap("t", Quantity(scale="log"), "abc", np.arange(2), values, present)
    assert indices_of(drawn.svg).tolist() == [[0, COLOURS - 1], [ZERO, NONFINITE], [MISSING, NONFINITE]]
    assert [text for text, _ in drawn.specials] == ["exactly zero", "NaN or infinite", "no value"]


def test_the_scale_is_the_declared_one():
    values = np.array([0.2, 0.3])
    assert ColourScale.of(Quantity(scale="share"), values) == ("share", 0.0, 1.0, False)
    assert ColourScale.of(Quantity(scale="signed"), values) == ("signed", -0.3, 0.3, False)
    assert ColourScale.of(NEUTRAL, values) == ("linear", 0.2, 0.3, False)
    assert ColourScale.of(Quantity(scale="log"), values) == ("log", 0.2, 0.3, False)
    assert ColourScale.of(Quantity(scale="log"), np.array([1e-20, 1.0])) == ("log", 1e-12, 1.0, True)


def test_reduction_keeps_extremes_and_values_that_are_not_finite():
    steps, values = np.arange(100_000), np.zeros(100_000)
    values[[123, 45_678, 99_999]] = 7.0, np.nan, -3.0
    _, found = reduced_curve(steps, values, 400)
    assert len(found) <= 400
    assert {7.0, -3.0} <= set(found)
    assert np.isnan(found).any()
    _, means, there = reduced_matrix(steps, np.stack([values, values]), np.ones((2, 100_000), bool), 100)
    assert np.isnan(means).sum() == 2
    assert there.all()
    assert means[0, 0] == pytest.approx(7 / 1000)


def test_ticks_are_round_and_within_the_limits():
    for low, high in [(0.13, 0.97), (-5.0, 1234.0), (1e-9, 2e-9)]:
        found = ticks(low, high)
        assert 3 <= len(found) <= 7
        assert all(low <= value <= high for value in found)


def test_values_that_are_not_finite_are_kept_and_not_drawn():
    values = np.array([1.0, 2.0, np.nan, 3.0, np.inf])
    [curve] = chart_of("loss", [ReportCurve("", np.arange(5), values)]).data["curves"]
    assert curve["values"] == [1.0, 2.0, "nan", 3.0, "inf"]


@pytest.mark.parametrize(
    ("values", "scale"), [([0.1, 2.0], "log"), ([0.0, 2.0], "asinh"), ([-1.0, 2.0], "asinh"), ([], "log")]
)
def test_a_logarithmic_scale_has_a_place_for_every_value(values, scale):
    curve = ReportCurve("", np.arange(len(values)), np.array(values, float))
    data = chart_of("x", [curve], quantity=Quantity(scale="log")).data
    assert data["scale"] == scale
    assert data["curves"][0]["values"] == values
    assert data["least"] > 0


def test_charts_that_are_zero_or_equal_fold_away():
    def chart(name, *values):
        return chart_of(name, [ReportCurve("", np.arange(len(values)), np.array(values))])

    charts = [
        chart("a", 1.0, 2.0),
        chart("b", 0.0, 0.0),
        chart("c", 1.0, 2.0),
        chart("d", 0.0, np.nan),
        chart("e", 1.0),
    ]
    shown, others = folded(charts)
    assert [each.title for each in shown] == ["a", "d", "e"]
    assert [(each.title, why) for each, why in others] == [("b", "always 0"), ("c", "equal to a")]


def test_two_constant_charts_are_not_said_to_be_equal():
    charts = [chart_of(name, [ReportCurve("", np.arange(3), np.ones(3))]) for name in ("share", "norm")]
    shown, others = folded(charts)
    assert [chart.title for chart in shown] == ["share", "norm"]
    assert not others


def test_findings_mark_their_steps_and_the_healthy_range_of_their_values(tmp_path):
    found = Finding(
        "x", "error", "y", kind="loss", step=2, value=3.0, limits=(-np.inf, 2.0), evidence=((1, 1.0), (2, 3.0))
    )
    content = RunContent("a", read_run(lines(tmp_path, LOSSES)), findings=Findings([found]))
    loss, other = network_charts([content])
    assert (loss.kind, loss.data["healthy"]) == ("loss", [None, 2.0])
    assert other.data["healthy"] is None
    assert loss.data["marks"] == other.data["marks"] == [[2, "error: x at step 2", "error"]]


LOSSES = [{"kind": kind, "step": step, "value": step + 1} for step in range(5) for kind in ("loss", "rate")]


def test_the_loss_of_a_guess_is_drawn_where_the_loss_is_a_cross_entropy(run):
    [loss, *others] = network_charts([RunContent("a", read_run(run))])
    assert loss.data["lines"] == [[pytest.approx(np.log(3)), "a guess: ln 3 = 1.1"]]
    assert not any(chart.data["lines"] for chart in others)


def write_layers(directory, count, dead, logged=True):
    backend = TensorBoardBackend()
    backend.open(directory)
    names = [f"blocks.{i // 4}.{('norm', 'fc1', 'act', 'fc2')[i % 4]}" for i in range(count)]
    classes = ("LayerNorm", "Linear", "ReLU", "Linear")
    backend.describe([ModuleEntry(name, classes[i % 4]) for i, name in enumerate(names)])
    for step in range(6):
        for i, name in enumerate(names):
            value = 0.0 if name == dead and step > 2 else 1.0 + 0.1 * ((7 * i + step) % 5)
            backend.add_scalar(Series("activations_variance", name), value, step)
        if logged:
            backend.add_scalar(Series("activations_variance", "my value"), 1e9, step)
        backend.commit(step)
    assert backend.close()


def test_a_dead_layer_in_400_is_the_first_and_has_a_label(tmp_path):
    write_layers(tmp_path, 400, "blocks.54.act")
    content = RunContent("a", read_run(tmp_path))
    tables = list(kind_tables(content.run))
    first, *others = abnormal_modules(content, tables)
    assert (first.name, first.class_name) == ("blocks.54.act", "ReLU")
    assert first.text == "activations_variance: 0; the median of the others is 1.2"
    assert others == []
    part, whole = table_heatmaps(content.run, tables[0])
    assert "blocks.54.act" in re.findall(r'<text class="row"[^>]*>([^<]*)<', part.svg)
    assert len(part.data["names"]) == 10
    assert len(whole.data["names"]) == 400
    assert [name.rpartition(".")[2] for name in whole.data["names"]] == [
        *["norm"] * 100,
        *["fc1", "fc2"] * 100,
        *["act"] * 100,
    ]


def test_tables_of_modules_contain_modules_only(tmp_path):
    write_layers(tmp_path, 8, None)
    run = read_run(tmp_path)
    assert [row.name for row in module_rows(run)[1]] == [entry.name for entry in run.modules]
    assert "my value" not in next(kind_tables(run)).names


def test_values_of_no_module_have_charts_and_rows(tmp_path):
    from ikkuna.export.subscriber import LearningRateSubscriber

    model, summary = small_model(), io.StringIO()
    groups = [{"params": [parameter], "lr": 0.1 / (1 + i)} for i, parameter in enumerate(model.parameters())]
    optimizer = torch.optim.SGD(groups)
    with ikkuna.watch(model, LearningRateSubscriber(), log_dir=tmp_path, verbosity=0, rules=None) as watched:
        for step in range(3):
            model(torch.ones(4, 4)).sum().backward()
            optimizer.step()
            watched.log("first", 10.0 * step)  # also the name of a module
            watched.log("val_loss", step)
    run = watched.read()
    charts = {chart.kind: chart.data["curves"] for chart in network_charts([RunContent("a", run)])}
    assert [curve["values"] for curve in charts["logged/first"]] == [[0.0, 10.0, 20.0]]
    assert [curve["values"] for curve in charts["logged/val_loss"]] == [[0.0, 1.0, 2.0]]
    rates = {curve["name"].rpartition("group ")[2]: set(curve["values"]) for curve in charts["learning_rate"]}
    assert rates == {str(i): {round(group["lr"], 6)} for i, group in enumerate(groups)}
    assert [chart.kind for chart in network_charts([RunContent("a", run)], "logged/first")] == ["logged/first"]
    assert not {"logged", "learning_rate"} & set(run.module_kinds())
    assert "logged" not in module_rows(run)[0]
    write_summary(run, Terminal(summary))
    for text in (str(watched.summary()), summary.getvalue()):
        assert re.search(r"^logged/first +(0 +)?20 ", text, re.MULTILINE)
        assert re.search(r"^learning_rate/group 1 .*0\.05", text, re.MULTILINE)


def test_modules_of_findings_are_the_first(tmp_path):
    write_layers(tmp_path, 80, "blocks.2.act")
    found = Findings([Finding("x", "error", "y", "blocks.7.fc1"), Finding("z", "info", "y")])
    content = RunContent("a", read_run(tmp_path), findings=found)
    assert [(each.name, each.rules) for each in abnormal_modules(content, list(kind_tables(content.run)))] == [
        ("blocks.7.fc1", ["x"]), ("blocks.2.act", [])
    ]  # fmt: skip


def test_many_modules_are_a_folded_tree(tmp_path):
    write_layers(tmp_path, 400, None)
    text = write_report(tmp_path, tmp_path / "page.html").read_text()
    assert text.count('<details class="block">') == 101
    assert Page(text)


def test_several_runs_are_on_one_page(run, tmp_path):
    other = lines(tmp_path, [{"kind": "loss", "step": step, "value": step} for step in range(5)])
    page = Page(write_report([run, other], tmp_path / "report.html").read_text())
    charts = [json.loads(data) for data in page.attributes("data-chart")]
    assert [curve["name"] for curve in charts[0]["curves"]] == [run.name, other.name]


def test_configuration_and_environment_are_shown(run, tmp_path):
    directory = lines(tmp_path, [{"kind": "loss", "step": 0, "value": 1}])
    (directory / "run.json").write_text(
        json.dumps({"id": "1", "config": {"lr": 0.125}, "environment": {"torch": "2.99"}})
    )
    words = "".join(Page(write_report(directory, tmp_path / "report.html").read_text()).text)
    assert "0.125" in words
    assert "2.99" in words
    (directory / "run.json").write_text("[1")
    write_report(directory, tmp_path / "report.html")


def test_a_real_run_stores_its_environment(run):
    content = RunContent("run", read_run(run))
    content.read_settings()
    assert content.environment["torch"].startswith("2.")
    assert not [value for value in content.environment.values() if platform.node() in value]


def test_the_command_writes_a_page(run, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert cli.main(["report", str(run), "-o", str(page)]) == 0
    assert capsys.readouterr().out.startswith(f"wrote {page} (")
    assert cli.main(["report", str(run), "-o", str(page), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": str(page), "bytes": page.stat().st_size}


def test_the_steps_of_a_heat_map_are_round_numbers_at_their_columns():
    steps = np.arange(0, 2900, 7)
    values = np.ones((2, len(steps)))
    drawn = draw_heatmap("x", NEUTRAL, ["a", "b"], steps, values, np.ones_like(values, bool))
    found = re.findall(r'<text class="tick" x="([\d.]+)"[^>]*>(\d+)</text>', drawn.svg)
    assert [int(text) for _, text in found] == [0, 500, 1000, 1500, 2000, 2500]
    distances = np.diff([float(x) for x, _ in found])
    assert np.ptp(distances) < 6  # columns hold several steps


def test_a_page_without_a_directory_is_refused_before_the_run_is_read(tmp_path):
    with pytest.raises(ConfigError, match="nowhere' does not exist"):
        write_report(tmp_path / "no run", tmp_path / "nowhere" / "page.html")
    with pytest.raises(ConfigError, match="is a directory"):
        write_report(tmp_path / "no run", tmp_path)
