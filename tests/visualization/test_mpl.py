"""The backend that draws pictures: their content, their files, and that training does not wait for them."""

import gc
import logging
import math
import threading
import time

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

from ikkuna.backends import mpl
from ikkuna.backends.mpl import MPLBackend
from ikkuna.backends.pictures.chart import CAPACITY, Chart, Curve, HistogramChart, QuantileBands
from ikkuna.backends.pictures.drawing import draw_chart, draw_histograms, encode_figure
from ikkuna.errors import ConfigError
from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import HistogramSubscriber, NormSubscriber
from ikkuna.numerics.statistics.histogram import Histogram
from ikkuna.store.names import Series
from ikkuna.store.quantity import Quantity
from ikkuna.store.values import Matrix, ModuleEntry, ModuleOrder
from tests.plugins.children import answer_of

FC, OUT = Series("weights_norm2", "fc"), Series("weights_norm2", "out")


def chart(series, *steps, most=16):
    """A chart of some steps: each a dict of values by module."""
    made = Chart(series, most)
    for step, values in enumerate(steps):
        made.add(step, values)
    return made


def opened(tmp_path, **options):
    backend = MPLBackend(**{"interval": 1000.0, **options})
    backend.open(tmp_path)
    return backend


def fill(backend, steps=3, *series):
    for step in range(steps):
        for one in series or (FC, OUT):
            backend.add_scalar(one, float(step), step)
        backend.commit(step)


# -- kept values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 7, 511, 512, 5000])
def test_a_curve_keeps_its_extremes_and_its_ends_whatever_its_length(steps):
    values = np.random.default_rng(0).normal(size=steps)
    curve = Curve()
    for step, value in enumerate(values):
        curve.add(step, value)
    kept, shown = curve.points()
    assert (shown.min(), shown.max()) == (values.min(), values.max())
    assert np.array_equal(values[kept], shown)
    assert (np.diff(kept) > 0).all()
    assert len(kept) == steps if steps < CAPACITY else len(kept) < 2 * CAPACITY
    assert kept[-1] == steps - 1


def test_a_nan_is_never_thinned_out():
    curve = Curve()
    for step in range(10_000):
        curve.add(step, math.nan if step == 4321 else 1.0)
    steps, values = curve.points()
    assert steps[np.isnan(values)].tolist() == [4321]


def test_margins_are_the_quantiles_of_numpy():
    values = np.random.default_rng(1).normal(size=(5, 9))
    margins = QuantileBands()
    for step, row in enumerate(values):
        margins.add(step, row.tolist())
    expected = np.quantile(values, [0, 0.25, 0.5, 0.75, 1], axis=1)
    np.testing.assert_allclose(margins.view().values, expected, rtol=1e-12)


def test_margins_of_many_steps_have_the_extremes_of_all():
    margins = QuantileBands()
    for step in range(3000):
        margins.add(step, [0.0, 1.0, 5.0 if step == 1234 else 2.0])
    band = margins.view()
    assert len(band.steps) < 257
    assert (band.values[0].min(), band.values[-1].max()) == (0.0, 5.0)
    margins.add(3000, [0.0, math.nan])
    assert np.isnan(margins.view().values[:, -1]).all()


# -- content of pictures ----------------------------------------------------------------------------------------------


def test_a_picture_has_a_line_for_each_module_in_the_order_of_the_network():
    order = ModuleOrder([ModuleEntry("stem", "Linear"), ModuleEntry("head", "Linear")])
    steps = [{"head": 1.0, "stem": 2.0}, {"head": 3.0, "stem": math.nan}, {"head": 5.0, "stem": 6.0}]
    made = chart(Series("weights_norm2", "head", "testing", title="Norm", ylims=(-1.0, 7.0)), *steps)
    picture = draw_chart(made.view(), order.key)
    [ax] = picture.axes
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["stem", "head"]
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), [2.0, math.nan, 6.0])
    np.testing.assert_array_equal(ax.lines[1].get_xydata(), [[0, 1], [1, 3], [2, 5]])
    assert (ax.get_ylim(), ax.get_yscale()) == ((-1.0, 7.0), "linear")
    assert (picture.get_suptitle(), ax.get_xlabel(), ax.get_ylabel()) == ("Norm (testing)", "step", "weights_norm2")
    assert [text.get_text() for text in ax.texts] == ["16.7% NaN"]


def test_a_value_of_the_network_needs_no_legend():
    [ax] = draw_chart(chart(Series("loss"), {None: 1.0}, {None: 0.5}).view()).axes
    assert ax.get_legend() is None
    assert ax.lines[0].get_ydata().tolist() == [1.0, 0.5]


def test_a_logarithmic_quantity_is_drawn_so_where_values_differ_in_magnitude():
    log = Series("norm", "fc", quantity=Quantity(scale="log"))
    far, near = chart(log, {"fc": 1e-6, "out": 1.0}), chart(log, {"fc": 0.0, "out": 1.0})
    assert draw_chart(chart(FC, {"fc": 1e-6, "out": 1.0}).view()).axes[0].get_yscale() == "linear"
    assert draw_chart(far.view()).axes[0].get_yscale() == "log"
    assert draw_chart(near.view()).axes[0].get_yscale() == "linear"


def test_many_modules_are_drawn_as_a_band():
    steps = [{f"layers.{i}": float(i + step) for i in range(21)} for step in range(4)]
    [ax] = draw_chart(chart(Series("a", "layers.0", ylims=(-5.0, 50.0)), *steps).view()).axes
    assert ax.lines[0].get_ydata().tolist() == [10.0, 11.0, 12.0, 13.0]
    assert [band.get_paths()[0].get_extents().extents[[1, 3]].tolist() for band in ax.collections] == [[0, 23], [5, 18]]
    assert ax.get_legend().get_title().get_text() == "21 modules"
    assert ax.get_ylim() == (-5.0, 50.0)


def buckets(shift):
    return Histogram.of(torch.arange(100.0) + shift).tensorboard_buckets(10)


def test_histograms_stand_behind_one_another_in_a_panel_for_each_module():
    made = HistogramChart(Series("weights", "fc", title="Weights", ylims=(-3.0, 200.0)))
    for step in (0, 10, 20):
        made.add(step, {"out": buckets(step), "fc": buckets(50)})
    picture = draw_histograms(made.view(), ModuleOrder([ModuleEntry("fc", "L"), ModuleEntry("out", "L")]).key)
    assert [ax.get_title() for ax in picture.axes] == ["fc", "out"]
    assert {ax.get_xlim() for ax in picture.axes} == {(-3.0, 200.0)}
    assert [label.get_text() for label in picture.axes[1].get_yticklabels()] == ["20", "10", "0"]  # upwards
    last = picture.axes[1].patches[4].get_data()
    np.testing.assert_allclose(last.edges[[0, -1]], [20.0, 119.0])
    np.testing.assert_allclose(
        last.values / np.max(last.values), np.divide(buckets(0).bucket_counts, max(buckets(0).bucket_counts))
    )


def test_histograms_of_more_modules_than_panels_are_counted():
    made = HistogramChart(Series("weights", "0"))
    made.add(0, {str(i): buckets(i) for i in range(30)})
    picture = draw_histograms(made.view())
    assert len(picture.axes) == 12
    assert picture.get_suptitle() == "weights, 12 of 30 modules"


def test_histograms_without_a_finite_value_are_an_empty_picture():
    made = HistogramChart(Series("weights", "fc"))
    made.add(0, {"fc": Histogram.of(torch.full((9,), math.nan)).tensorboard_buckets(10)})
    picture = draw_histograms(made.view())
    assert not any(ax.has_data() for ax in picture.axes)
    assert picture.get_suptitle() == "weights, 0 of 1 modules"
    assert encode_figure(picture, 80)


# -- files and displays -----------------------------------------------------------------------------------------------


def trained(tmp_path, backend, steps=3):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Exporter(message_bus=MessageBus("pictures"), log_dir=tmp_path) as exporter:
        exporter.add_modules(model)
        bus = exporter.message_bus
        bus.register_subscriber(NormSubscriber("weights", backend=backend, title="Norm", ylims=(0, 9)))
        bus.register_subscriber(HistogramSubscriber("biases", backend=backend))
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
        bus.run.flush(60)
        assert not exporter.health().errors


def test_a_run_has_a_picture_of_each_kind_and_pyplot_knows_of_none(tmp_path):
    before = plt.get_fignums()
    trained(tmp_path, "mpl")
    files = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
    assert files[:1] + files[-1:] == ["run0001/.writer", "run0001/run.json"]
    files = files[1:-1]
    assert files == [f"run0001/pictures/{name}.png" for name in ("biases_histograms", "weights_norm2")]
    image = plt.imread(tmp_path / files[1])
    assert image.shape[:2] == (450, 800)
    assert len(np.unique(image.reshape(-1, image.shape[2]), axis=0)) > 10
    assert plt.get_fignums() == before


def test_no_display_is_needed_and_pyplot_is_never_imported(tmp_path, monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "MPLBACKEND"):
        monkeypatch.delenv(name, raising=False)
    code = """
        import json, sys
        from pathlib import Path
        from ikkuna.visualization import get_backend
        from ikkuna.store.names import Series
        backend = get_backend("mpl")
        backend.open(Path("run"))
        backend.add_scalar(Series("loss"), 0.5, 0)
        backend.commit(0)
        print(json.dumps([backend.close(60), Path("run/pictures/loss.png").stat().st_size > 5000, "matplotlib.pyplot" in sys.modules]))
    """
    assert answer_of(code, cwd=tmp_path) == [True, True, False]


def test_a_notebook_shows_what_is_in_pictures(tmp_path):
    backend = opened(tmp_path)
    fill(backend)
    assert repr(backend.pictures) == "{'weights_norm2': <picture of weights_norm2, not drawn yet>}"
    assert backend.pictures["weights_norm2"]._repr_png_() is None
    assert backend.close(60)
    assert backend.pictures["weights_norm2"]._repr_png_() == (tmp_path / "pictures/weights_norm2.png").read_bytes()


def test_pictures_of_names_nobody_expects(tmp_path):
    names = ("", "../up", "a/b", "$x$", "x\0y", "_under", "漢字" * 200, "." * 300)
    backend = opened(tmp_path)
    fill(backend, 2, *(Series(kind, name) for kind in names for name in (*names, None)))
    assert backend.close(120)
    assert len(list((tmp_path / "pictures").iterdir())) == len(names)


@pytest.mark.fault(325)
def test_kinds_that_are_named_like_other_pictures_have_files_of_their_own(tmp_path):
    matrix = Matrix(("a",), ("b",), np.eye(1))
    backend = opened(tmp_path)
    for step in range(2):
        for kind in ("a", "a_histograms", "a_matrix"):
            for pass_name in ("training", "b", "b_matrix"):
                series = Series(kind, "fc", pass_name)
                backend.add_scalar(series, 1.0, step)
                backend.add_histogram(series, buckets(step), step)
                backend.add_matrix(series, matrix, step)
        backend.commit(step)
    assert backend.close(120)
    names = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert len(names) == 27
    assert {"a.png", "a_histograms.png", "a_matrix.png", "a.b_matrix.png"} <= names


def test_invalid_numbers_are_refused():
    for options in ({"interval": 0}, {"lines": -1}, {"dpi": math.nan}, {"interval": "5"}):
        with pytest.raises(ConfigError, match="MPLBackend needs"):
            MPLBackend(**options)


# -- training does not wait -------------------------------------------------------------------------------------------


def test_pictures_are_redrawn_on_a_timer(tmp_path):
    """The picture is drawn without a further commit."""
    backend = opened(tmp_path, interval=0.05)
    fill(backend)
    deadline = time.monotonic() + 30
    while not (tmp_path / "pictures/weights_norm2.png").exists():
        assert time.monotonic() < deadline
    backend.close(60)


@pytest.fixture
def slow(monkeypatch):
    """Block every drawing until `set()`, and record the drawing threads."""
    gate, drawn = threading.Event(), []

    def draw(view, order):
        drawn.append(threading.current_thread())
        gate.wait(60)
        return draw_chart(view, order)

    monkeypatch.setattr(mpl, "draw_chart", draw)
    yield gate, drawn
    gate.set()


def test_neither_training_nor_closing_waits_for_a_drawing(tmp_path, slow, caplog):
    gate, drawn = slow
    backend = opened(tmp_path)
    fill(backend, 100)
    assert not backend.flush(0.2)
    fill(backend, 100)
    assert not caplog.records
    assert not backend.close(0.2)
    assert [record.message for record in caplog.records] == [
        "not finished drawing: weights_norm2. The PNGs on disk lack the last values unless the process keeps running."
    ]
    [thread] = set(drawn)
    assert thread.daemon
    assert thread is not threading.main_thread()
    gate.set()
    thread.join(60)
    assert backend.close()  # it was drawn in the background
    assert len(caplog.records) == 1


def test_many_drawings_do_not_grow_memory(tmp_path):
    backend = opened(tmp_path, dpi=20)
    counts = []
    for step in range(31):
        fill(backend, 1 + step, FC)
        assert backend.flush(60)
        if step in (10, 30):
            gc.collect()
            counts.append(len(gc.get_objects()))
    backend.close(60)
    assert counts[1] - counts[0] < 1000  # a figure consists of more than a thousand
    assert not [thing for thing in gc.get_objects() if issubclass(type(thing), Figure)]
    assert not plt.get_fignums()


def test_its_thread_ends_with_it(tmp_path):
    def threads():
        return {thread for thread in threading.enumerate() if thread.name == "ikkuna-pictures"}

    before = threads()
    closed, forgotten = opened(tmp_path / "a"), opened(tmp_path / "b")
    fill(closed)
    fill(forgotten)
    workers = [backend._thread._worker for backend in (closed, forgotten)]
    assert all(worker.wait_for(lambda worker=worker: worker.is_served, 30) for worker in workers)
    ours = threads() - before
    assert len(ours) == 2
    assert closed.close(60)
    assert forgotten.flush(60)
    del forgotten
    gc.collect()
    for thread in ours:
        thread.join(30)
    assert threads() == before


def test_a_picture_that_fails_is_given_up_and_the_others_are_drawn(tmp_path, monkeypatch, caplog):
    def draw(view, order):
        if view.label == "bad":
            raise ZeroDivisionError("no")
        return draw_chart(view, order)

    monkeypatch.setattr(mpl, "draw_chart", draw)
    backend = opened(tmp_path)
    with caplog.at_level(logging.ERROR, "ikkuna"):
        for _ in range(12):
            fill(backend, 1, Series("bad"), Series("good"))
            assert not backend.flush(60)
    backend.close(60)
    assert [record.message for record in caplog.records] == [
        "the picture bad cannot be drawn",
        "the picture bad failed 10 times in a row and is no longer drawn",
    ]
    assert [path.name for path in (tmp_path / "pictures").iterdir()] == ["good.png"]


def test_a_directory_that_is_deleted_is_made_again(tmp_path):
    backend = opened(tmp_path / "run")
    fill(backend)
    assert backend.flush(60)
    (tmp_path / "run/pictures/weights_norm2.png").unlink()
    (tmp_path / "run/pictures").rmdir()
    fill(backend)
    assert backend.close(60)
    assert (tmp_path / "run/pictures/weights_norm2.png").exists()
