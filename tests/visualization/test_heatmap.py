import io
import math
import time

import numpy as np
import pytest
from PIL import Image

from ikkuna.visualization.backend import Series
from ikkuna.visualization.module_order import ModuleOrder
from ikkuna.visualization.module_table import ModuleEntry, module_table
from ikkuna.visualization.pictures import heatmap_schedule as gallery_module
from ikkuna.visualization.pictures.heatmap import CAPACITY, Heatmap, HeatmapView
from ikkuna.visualization.pictures.heatmap_picture import draw, scaled
from ikkuna.visualization.pictures.heatmap_schedule import HeatmapSchedule
from ikkuna.visualization.tensorboard import TensorBoardBackend


def cells(values, known=None, names=None):
    values = np.asarray(values, np.float32)
    rows, columns = values.shape
    names = names or tuple(f"features.{i}" for i in range(rows))
    known = np.ones_like(values, bool) if known is None else np.asarray(known)
    return HeatmapView(names, tuple(range(columns)), values, known)


def test_a_long_run_is_thinned_out_evenly():
    heatmap = Heatmap()
    for step in range(0, 30_000, 3):
        heatmap.add(step, {"a": float(step), "b": 1.0})
        held = heatmap.view()
        assert len(held.steps) <= CAPACITY
    assert len(held.steps) > CAPACITY // 2
    assert held.steps[0] == 0
    [stride] = set(np.diff(held.steps))
    assert 30_000 - held.steps[-1] <= 2 * stride
    assert held.values[0].tolist() == list(map(float, held.steps))
    assert held.known.all()


def test_modules_may_come_late_leave_and_change_their_order():
    heatmap = Heatmap()
    heatmap.add(0, {"a": 1.0})
    heatmap.add(1, {"b": 2.0, "a": 3.0})
    heatmap.add(2, {"c": math.nan, "b": 1e300})
    held = heatmap.view()
    assert held.names == ("a", "b", "c")
    assert held.known.tolist() == [[True, True, False], [False, True, True], [False, False, True]]
    assert held.values[held.known].tolist() == pytest.approx([1, 3, 2, math.inf, math.nan], nan_ok=True)


def test_what_was_thinned_out_does_not_show_through():
    heatmap = Heatmap()
    for step in range(CAPACITY + 1):
        heatmap.add(step, {"a": 1.0, "b": 1.0} if step < CAPACITY else {"a": 1.0})
    assert heatmap.view().known[:, -1].tolist() == [True, False]


def test_cells_are_a_copy():
    heatmap = Heatmap()
    heatmap.add(0, {"a": 1.0})
    held = heatmap.view()
    heatmap.add(1, {"a": 2.0})
    assert held.values.tolist() == [[1.0]]


@pytest.mark.parametrize(
    ("values", "shares", "ends"),
    [
        ([[1.0, 2.0], [3.0, math.nan]], [[0, 0.5], [1, math.nan]], (1, 3)),
        ([[-1.0, 1000.0]], [[0, 1]], (-1, 1000)),
        ([[1.0, 10.0, 100.0]], [[0, 0.5, 1]], (1, 100)),
        ([[0.0, 1.0, 100.0]], [[0, 0, 1]], (1, 100)),
        ([[0.0, 0.0]], [[0, 0]], (0, 0)),
        ([[0.0, 4.0]], [[0, 1]], (0, 4)),
        ([[math.inf, math.nan]], [[math.nan, math.nan]], None),
    ],
)
def test_scales(values, shares, ends):
    found, found_ends = scaled(cells(values))
    assert found.tolist() == [pytest.approx(row, nan_ok=True) for row in shares]
    assert found_ends == (pytest.approx(ends) if ends else None)


@pytest.mark.parametrize("rows", [2, 10, 100, 1000])
@pytest.mark.parametrize("columns", [2, 40, CAPACITY])
def test_pictures_show_each_cell_and_mark_what_is_broken_or_missing(rows, columns):
    values = np.random.default_rng(0).random((rows, columns)) + 1
    values[0, 0], values[1, 0] = math.nan, math.inf
    known = np.ones((rows, columns), bool)
    known[-1, -1] = False
    png, height, width = draw(cells(values, known))
    picture = np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
    assert picture.shape == (height, width, 3)
    assert width < 1500
    assert height < rows + 400
    broken, missing = (np.argwhere((picture == colour).all(-1)) for colour in ((230, 0, 60), (226, 230, 238)))
    assert len(broken) == 2 * len(missing) >= 2
    assert broken[:, 0].max() < missing[:, 0].min() or rows == 2
    assert broken[:, 1].max() < missing[:, 1].min()


def test_a_picture_without_a_finite_value():
    png, height, width = draw(cells([[math.nan, math.inf]] * 3, names=("a" * 300, "b", "ä")))
    assert png.startswith(b"\x89PNG")
    assert width < 1000
    assert height > 0


def gallery(interval=0.0):
    hung = []
    made = HeatmapSchedule(lambda pictures, step: hung.append((step, [title for title, *_ in pictures])), interval)
    return made, hung


def test_drawing_is_done_elsewhere_and_not_at_every_step():
    made, hung = gallery()
    for step in range(3):
        made.add("weights_norm2", step, {"a": 1.0, "b": 2.0})
    made.tick()
    made._thread.join(20)
    assert hung == [(2, ["weights_norm2"])]
    made._due = time.monotonic() + 100
    made.add("weights_norm2", 3, {"a": 1.0, "b": 2.0})
    made.tick()
    assert len(hung) == 1
    made.finish(20)
    made.finish(20)
    assert hung[1:] == [(3, ["weights_norm2"])]


def test_intervals_grow():
    made, _ = gallery(10.0)
    made._due = 0.0
    made.tick()
    assert made._due - time.monotonic() == pytest.approx(15, abs=1)


def test_one_module_or_one_step_is_no_heatmap():
    made, hung = gallery()
    made.add("one module", 0, {"a": 1.0})
    made.add("one module", 1, {"a": 1.0})
    made.add("one step", 1, {"a": 1.0, "b": 1.0})
    made.finish(20)
    assert not hung


def test_a_failing_picture_is_said_once_and_costs_no_more(monkeypatch, caplog):
    def fail(cells):
        raise OSError("no font")

    monkeypatch.setattr(gallery_module, "draw", fail)
    made, hung = gallery()
    for step in range(5):
        made.add("a", step, {"a": 1.0, "b": 2.0})
        made.finish(20)
    assert not hung
    assert [record.message for record in caplog.records] == ["heatmaps cannot be drawn; there will be none"]


def test_rows_are_in_the_order_of_the_network():
    made, _ = gallery()
    made.arrange(ModuleOrder([ModuleEntry(name, "Linear") for name in ("stem", "body.2", "body.10", "a")]))
    made.add("x", 0, dict.fromkeys(("a", "new", "body.10", "body.2:1", "body.2", "stem"), 1.0))
    ordered = made._arranged(made._heatmaps["x"].view())
    assert ordered.names == ("stem", "body.2", "body.2:1", "body.10", "a", "new")


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
    assert b"| 0 | `a\\|b` | Linear | 6 | weight 2\xc3\x973, bias not known yet |" in text.tensor_proto.string_val[0]


def test_a_table_of_scalars_and_nothing():
    assert "weight scalar" in module_table([ModuleEntry("a", "X", (("weight", ()),))])
    assert module_table([]).endswith("0 modules, 0 parameters.")
