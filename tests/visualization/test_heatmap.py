import io
import math
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from ikkuna.backends import mpl, tensorboard
from ikkuna.backends.pictures import cells as cell_pictures
from ikkuna.backends.pictures.cells import draw_heatmap, encode_png, grouped
from ikkuna.backends.pictures.drawing import draw_chart
from ikkuna.backends.pictures.heatmap import CAPACITY, Heatmap, HeatmapView, with_missing_rows
from ikkuna.backends.run import Run
from ikkuna.backends.tensorboard import HeatmapImage, TensorBoardBackend
from ikkuna.store.names import Series
from ikkuna.store.quantity import NEUTRAL, Quantity
from ikkuna.store.run_directory import RunSettings
from ikkuna.store.values import ModuleEntry, ModuleOrder, module_table, read_module_table
from tests.plugins.children import answer_of

LOG = Quantity(scale="log")


def add(heatmap, step, values):
    heatmap.add(step, tuple(values), np.array(list(values.values())))


def cells(values, known=None, names=None):
    values = np.asarray(values, np.float32)
    rows, columns = values.shape
    names = names or tuple(f"features.{i}" for i in range(rows))
    known = np.ones_like(values, bool) if known is None else np.asarray(known)
    return HeatmapView(names, tuple(range(columns)), values, known)


def test_a_long_run_is_thinned_out_evenly_and_keeps_its_last_step():
    heatmap = Heatmap()
    for step in range(0, 30_000, 3):
        add(heatmap, step, {"a": float(step), "b": 1.0})
        held = heatmap.view()
        assert len(held.steps) <= CAPACITY + 1
        assert held.steps[-1] == step
    assert len(held.steps) > CAPACITY // 2
    assert held.steps[0] == 0
    *strides, last = np.diff(held.steps)
    [stride] = set(strides)
    assert last <= 2 * stride
    assert held.values[0].tolist() == list(map(float, held.steps))
    assert held.known.all()


class CountingName(str):
    """A name that counts how often it is compared with one that is not the same object."""

    __slots__ = ()
    comparisons = 0

    def __eq__(self, other):
        CountingName.comparisons += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


@pytest.mark.parametrize("missing", [0, 1, 300])
def test_a_row_is_found_without_a_search_through_all_names(missing):
    number = 1000
    modules = [ModuleEntry(f"layers.{i}", "Linear", (("weight", (2, 2)),)) for i in range(number)]
    names = tuple(CountingName(entry.name) for entry in modules[missing:])
    values, CountingName.comparisons = np.arange(len(names), dtype=np.float64).reshape(-1, 1), 0
    quantity = Quantity(sources=("weights",))
    every, filled, known = with_missing_rows(modules, quantity, names[::-1], values, np.ones_like(values, bool))
    assert CountingName.comparisons <= 10 * number
    assert set(every) == {entry.name for entry in modules}
    assert np.flatnonzero(~known[:, 0]).tolist() == list(range(missing))
    expected = dict(zip(names[::-1], values[:, 0], strict=True))
    assert [float(x) for x in filled[:, 0] if x == x] == [expected[name] for name in every if name in expected]


def test_modules_may_come_late_leave_and_change_their_order():
    heatmap = Heatmap()
    add(heatmap, 0, {"a": 1.0})
    add(heatmap, 1, {"b": 2.0, "a": 3.0})
    add(heatmap, 2, {"c": math.nan, "b": 1e300})
    held = heatmap.view()
    assert held.names == ("a", "b", "c")
    assert held.known.tolist() == [[True, True, False], [False, True, True], [False, False, True]]
    assert held.values[held.known].tolist() == pytest.approx([1, 3, 2, math.inf, math.nan], nan_ok=True)


def test_what_was_thinned_out_does_not_show_through():
    heatmap = Heatmap()
    for step in range(CAPACITY + 1):
        add(heatmap, step, {"a": 1.0, "b": 1.0} if step < CAPACITY else {"a": 1.0})
    assert heatmap.view().known[:, -1].tolist() == [True, False]


def test_cells_are_a_copy():
    heatmap = Heatmap()
    add(heatmap, 0, {"a": 1.0})
    held = heatmap.view()
    add(heatmap, 1, {"a": 2.0})
    assert held.values.tolist() == [[1.0]]


@pytest.mark.parametrize("rows", [2, 10, 100, 1000])
@pytest.mark.parametrize("columns", [2, 40, CAPACITY])
def test_pictures_show_each_cell_and_mark_what_is_broken_or_missing(rows, columns):
    values = np.random.default_rng(0).random((rows, columns)) + 1
    values[0, 0], values[1, 0] = math.nan, math.inf
    known = np.ones((rows, columns), bool)
    known[-1, -1] = False
    picture = np.asarray(Image.open(io.BytesIO(encode_png(draw_heatmap(cells(values, known))))).convert("RGB"))
    height, width, _ = picture.shape
    assert width < 1000
    assert height < 560
    broken, missing = (np.argwhere((picture == colour).all(-1)) for colour in ((227, 0, 43), (168, 168, 168)))
    above = [found[found[:, 0] < height - 70] for found in (broken, missing)]  # without steps and legend
    body = [found[found[:, 1] >= above[0][:, 1].min()] for found in above]  # without names
    if rows > 105:  # neighbours share a row, which is not finite if one of them is not
        assert len(body[0]) > 0
        assert not len(body[1])
        return
    assert len(body[0]) == 2 * len(body[1]) > 0
    assert body[0][:, 1].max() < body[1][:, 1].min()
    assert all(len(found) > len(inside) for found, inside in zip((broken, missing), body, strict=True))  # in the legend


def pixels(view):
    return np.asarray(Image.open(io.BytesIO(encode_png(draw_heatmap(view)))).convert("RGB"))


def test_exact_zeros_have_a_colour_of_their_own():
    zero, least = (
        (pixels(HeatmapView(("a", "b"), (0, 1), np.array([[first, 1], [1, 1]], np.float32), np.ones((2, 2), bool), LOG))
         == (255, 154, 213)).all(-1).sum()
        for first in (0.0, 1e-6)
    )  # fmt: skip
    assert zero > 24 * 200
    assert least == 0


def test_the_declaration_decides_the_scale_of_a_picture():
    values = np.array([[0.2, 0.4], [0.3, 0.4]])

    def drawn(values, quantity):
        known = np.ones(values.shape, bool)
        picture = pixels(HeatmapView(("a", "b"), (0, 1), values.astype(np.float32), known, quantity))
        return picture[12, 150].tolist()

    share = Quantity(scale="share")
    assert drawn(values, share) == drawn(values * [[1, 2], [1, 2]], share)
    assert drawn(values, LOG) != drawn(values * [[2, 1], [1, 1]], LOG)
    assert drawn(values, NEUTRAL) == drawn(values * 4.0, NEUTRAL)


def test_neighbours_share_rows_in_which_the_worst_is_visible():
    values = np.ones((1000, 3), np.float32)
    values[5, 0], values[5, 1], values[6, 1] = np.nan, 0.0, 7.0
    known = np.ones(values.shape, bool)
    known[:10, 2] = False
    view = HeatmapView(tuple(map(str, range(1000))), (0, 1, 2), values, known, LOG)
    names, merged, there = grouped(view, 100)
    assert len(names) == len(merged) == 100
    assert names[0] == "0 … +9"
    assert np.isnan(merged[0, 0])
    assert merged[0, 1] == 0
    assert merged[1:].tolist() == [[1.0] * 3] * 99
    assert there[0].tolist() == [True, True, False]
    assert grouped(replace(view, quantity=Quantity(scale="signed")), 100)[1][0, 1] == 7


def test_modules_without_a_value_have_a_row():
    modules = [ModuleEntry(name, "Linear", (("weight", (2, 2)),)) for name in ("a", "b", "c")]
    made = HeatmapImage("x", ModuleOrder(modules), lambda *arguments: 0, quantity=Quantity(sources=("weights",)))
    add(made, 0, {"c": 1.0, "a": 2.0})
    view = made._sorted(made._heatmap.view())
    assert view.names == ("a", "b", "c")
    assert view.known[:, 0].tolist() == [True, False, True]
    assert view.quantity.sources == ("weights",)


def test_a_picture_without_a_finite_value():
    png = encode_png(draw_heatmap(cells([[math.nan, math.inf]] * 3, names=("a" * 300, "b", "ä"))))
    assert Image.open(io.BytesIO(png)).width < 1000


def image(order=None, interval=0.0):
    drawn = []
    return HeatmapImage(
        "Heatmaps/x", order or ModuleOrder(), lambda *arguments: drawn.append(arguments) or 0, interval
    ), drawn


def test_a_heat_map_is_drawn_if_it_is_due_and_has_new_values():
    made, drawn = image(interval=1000.0)
    for step in range(3):
        add(made, step, {"a": 1.0, "b": 2.0})
    assert not made.changed
    made._due = 0.0
    assert made.changed
    made.draw()
    assert [(tag, step) for tag, _, step in drawn] == [("Heatmaps/x", 2)]
    add(made, 3, {"a": 1.0, "b": 2.0})
    assert not made.changed
    made.finish()
    assert made.changed
    made.draw()
    made.finish()
    assert not made.changed
    assert [step for *_, step in drawn] == [2, 3]


def test_intervals_grow(monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    made, _ = image(interval=10.0)
    for step in range(2):
        add(made, step, {"a": 1.0, "b": 2.0})
    for seconds in (15.0, 22.5):
        made.draw()
        assert made._due == pytest.approx(seconds)


def test_one_module_or_one_step_is_no_heatmap():
    made, _ = image()
    add(made, 0, {"a": 1.0})
    add(made, 1, {"a": 1.0})
    assert not made.changed
    made, _ = image()
    add(made, 1, {"a": 1.0, "b": 1.0})
    assert not made.changed


def training(backend, steps):
    for step in range(steps):
        for name in ("a", "b"):
            backend.add_scalar(Series("weights_norm2", name), float(step), step)
        backend.commit(step)


def test_heat_maps_are_drawn_in_a_daemon_thread_while_training_goes_on(tmp_path, monkeypatch):
    threads, gate = [], threading.Event()

    def draw(view):
        threads.append(threading.current_thread())
        gate.wait(60)
        return draw_heatmap(view)

    monkeypatch.setattr(cell_pictures, "draw_heatmap", draw)
    monkeypatch.setattr(tensorboard, "_DRAWING_INTERVAL", 0.01)
    backend = TensorBoardBackend()
    backend.open(tmp_path)
    training(backend, 2)
    [group] = backend._groups.values()
    group.heatmap.finish()
    while not threads:
        time.sleep(0.001)
    training(backend, 100)
    assert backend.flush(30)
    assert backend.acked_step == 99
    gate.set()
    assert backend.close(60)
    assert all(thread.daemon and thread is not threading.main_thread() for thread in threads)
    assert not [thread for thread in threading.enumerate() if thread in threads]


@pytest.mark.parametrize("backend", ["tb", "mpl"])
def test_closing_a_run_draws_every_picture_with_its_last_values(tmp_path, monkeypatch, caplog, backend):
    """Also if drawing takes longer than the time in which the values have to be stored."""
    drawn = {}

    def draw(view, *arguments):
        time.sleep(0.05)
        if backend == "tb":
            drawn[view.quantity.unit] = view.steps[-1]
            return draw_heatmap(view)
        drawn[view.quantity.unit] = view.lines[0].steps[-1]
        return draw_chart(view, *arguments)

    monkeypatch.setattr(cell_pictures, "draw_heatmap", draw)
    monkeypatch.setattr(mpl, "draw_chart", draw)
    run = Run(tmp_path)
    for step in range(3):
        for kind in ("weights_norm2", "weights_mean"):
            for name in ("a", "b"):
                run.show(Series(kind, name, quantity=Quantity(kind)), float(step), step, [backend])
        run.commit(step)
    assert run.close(timeout=0.05, drawing=60)
    assert not caplog.records
    assert drawn == {"weights_norm2": 2, "weights_mean": 2}
    assert run.drawing_seconds == 0  # what is drawn after the last step slows none


@pytest.mark.parametrize("verbosity", [0, 1])
def test_a_quiet_run_does_not_warn_of_drawings(verbosity, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", "ikkuna")
    gate = threading.Event()
    monkeypatch.setattr(cell_pictures, "draw_heatmap", lambda view: gate.wait(60) and draw_heatmap(view))
    run = Run(tmp_path, settings=RunSettings(verbosity=verbosity))
    for step in range(2):
        for name in ("a", "b"):
            run.show(Series("weights_norm2", name), float(step), step, ["tb"])
        run.commit(step)
    run.close(timeout=1.0, drawing=0.1)
    gate.set()
    levels = [record.levelname for record in caplog.records if "not finished drawing" in record.message]
    assert levels == (["WARNING"] if verbosity else ["INFO"])


def test_closing_does_not_wait_for_a_drawing(tmp_path, monkeypatch, caplog):
    gate = threading.Event()
    monkeypatch.setattr(cell_pictures, "draw_heatmap", lambda view: gate.wait(60) and draw_heatmap(view))
    backend = TensorBoardBackend()
    backend.open(tmp_path)
    training(backend, 2)
    assert backend.close(1.0)
    assert [record.message for record in caplog.records] == [
        "not finished drawing: Heatmaps/weights_norm2. The event file lacks the latest of these images."
    ]
    gate.set()


def test_a_failing_picture_is_logged_once_and_costs_no_values(tmp_path, monkeypatch, caplog):
    def fail(view):
        raise OSError("no font")

    monkeypatch.setattr(cell_pictures, "draw_heatmap", fail)
    backend = TensorBoardBackend()
    backend.open(tmp_path)
    training(backend, 2)
    [group] = backend._groups.values()
    group.heatmap.finish()
    for _ in range(12):
        backend._thread.flush(20)
    assert backend.close(30)
    assert [record.message for record in caplog.records] == [
        "the picture Heatmaps/weights_norm2 cannot be drawn",
        "the picture Heatmaps/weights_norm2 failed 10 times in a row and is no longer drawn",
    ]


def test_rows_are_in_the_order_of_the_network(monkeypatch):
    views = []
    monkeypatch.setattr(cell_pictures, "draw_heatmap", lambda view: views.append(view) or draw_heatmap(view))
    made, _ = image(ModuleOrder([ModuleEntry(name, "Linear") for name in ("stem", "body.2", "body.10", "a")]))
    for step in range(2):
        add(made, step, dict.fromkeys(("a", "new", "body.10", "body.2:1", "body.2", "stem"), 1.0))
    made.draw()
    assert views[0].names == ("stem", "body.2", "body.2:1", "body.10", "a", "new")


def test_what_is_no_module_is_in_no_overview(tmp_path):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    backend = TensorBoardBackend()
    backend.open(tmp_path)
    backend.describe([ModuleEntry("a|b", "Linear", (("weight", (2, 3)), ("bias", None))), ModuleEntry("c", "ReLU")])
    for step in range(4):
        for name in ("a|b", "c"):
            backend.add_scalar(Series("weights_norm2", name), float(step), step)
        for name in ("group 0", "group 1"):
            backend.add_scalar(Series("learning_rate", name), 0.1, step)
        backend.commit(step)
    assert backend.close(60)
    found = accumulators.EventAccumulator(str(tmp_path)).Reload()
    assert found.Tags()["images"] == ["Heatmaps/weights_norm2"]
    [image] = found.Images("Heatmaps/weights_norm2")
    assert image.step == 3
    assert Image.open(io.BytesIO(image.encoded_image_string)).size == (image.width, image.height)
    assert not [tag for tag in found.Tags()["scalars"] if tag.startswith("Overview/learning_rate")]
    [text] = found.Tensors("Text/Modules")
    assert b"| 0 | `a%7Cb` | Linear | 6 | weight 2\xc3\x973, bias not known yet |" in text.tensor_proto.string_val[0]


def test_a_table_of_scalars_and_nothing():
    assert "weight scalar" in module_table([ModuleEntry("a", "X", (("weight", ()),))])
    assert module_table([]).endswith("0 modules, 0 parameters.")


@pytest.mark.parametrize(
    "name", ["", "a.0", "a|b", "a\nb", "`a`", "a\\", "100%", "\x1b[2J", " ", "ä/β", "| 1 | `b` | Linear | 6 | |"]
)
def test_names_of_modules_are_read_as_they_are(name):
    entries = ModuleEntry(name, "Linear", (("weight", (2, 3)),)), ModuleEntry("last", "ReLU")
    assert read_module_table(module_table(entries)) == entries


def test_heat_maps_are_drawn_without_matplotlib(tmp_path):
    code = """
        import json, sys
        from pathlib import Path
        from ikkuna.visualization import get_backend
        from ikkuna.store.names import Series
        backend = get_backend("tb")
        backend.open(Path("run"))
        for step in range(2):
            for name in "ab":
                backend.add_scalar(Series("x", name), 1.0, step)
            backend.commit(step)
        print(json.dumps([backend.close(60), backend.drawing_seconds > 0, "matplotlib" in sys.modules]))
    """
    assert answer_of(code, cwd=tmp_path) == [True, True, False]
