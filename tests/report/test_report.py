"""A report is one page that needs nothing else, and shows what is in a run, whatever that is."""

import base64
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
from ikkuna.backends.pictures.canvas import COLOURS, MISSING, NONFINITE, ZERO, ColourScale
from ikkuna.errors import ConfigError
from ikkuna.reading import read_run
from ikkuna.report import write_report
from ikkuna.report.content import RunContent
from ikkuna.report.curves import ReportCurve, draw_chart, reduced_curve, reduced_matrix, ticks
from ikkuna.report.heatmaps import draw_heatmap
from ikkuna.store.quantity import NEUTRAL, Quantity
from ikkuna.testing import small_model

DRAW = torch.Generator().manual_seed(5)


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
    assert not re.findall(r"https?://|@import|url\(", text)
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
    assert ticks(1.1, 2.1, is_log=True) == [1.25, 1.5, 1.75, 2.0]


def test_a_curve_with_gaps_is_drawn_in_parts():
    values = np.array([1.0, 2.0, np.nan, 3.0, 4.0])
    drawn = draw_chart("loss", [ReportCurve("", np.arange(5), values)])
    (path,) = re.findall(r'd="([^"]*)"', drawn.svg)
    assert path.count("M") == 2
    assert drawn.svg.count('class="bad"') == 1
    assert drawn.data["curves"][0]["values"] == [1.0, 2.0, "nan", 3.0, 4.0]


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


def test_values_that_are_not_finite_have_a_legend_and_single_points_a_dot():
    steps = np.arange(4)
    lost = draw_chart("loss", [ReportCurve("a", steps, np.full(4, np.nan))])
    assert lost.nonfinite
    assert "no finite value" in lost.svg
    assert "<circle" not in lost.svg
    alone = draw_chart("loss", [ReportCurve("a", steps, np.array([np.nan, 2.0, np.nan, np.inf]))])
    assert alone.nonfinite
    assert alone.svg.count("<circle") == 1
    whole = draw_chart("loss", [ReportCurve("a", steps, np.arange(1.0, 5.0))])
    assert not whole.nonfinite
    assert "<circle" not in whole.svg
    assert (
        "no positive value"
        in draw_chart("loss", [ReportCurve("a", steps, np.zeros(4))], quantity=Quantity(scale="log")).svg
    )


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
