"""Matrices in every backend."""

import io
import math
import threading

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ikkuna.backends import tensorboard
from ikkuna.backends.backend import get_backend
from ikkuna.backends.pictures import cells as matrix_picture
from ikkuna.backends.pictures.cells import NONFINITE, ZERO, Labels, draw_matrix, encode_png, palette
from ikkuna.backends.run import Run
from ikkuna.backends.tensorboard import MatrixImage, MatrixQueue, TensorBoardBackend
from ikkuna.store.json_lines import read
from ikkuna.store.names import Series
from ikkuna.store.quantity import NEUTRAL
from ikkuna.store.values import Matrix

MATRIX = Matrix(("a", "b"), ("a", "b", "c"), np.array([[1.0, 0.5, math.nan], [0.5, 1.0, 0.0]]), (0.0, 1.0))


def shown(tmp_path, backend, matrix=MATRIX):
    run = Run(tmp_path)
    for step in (0, 3):
        run.show(Series("likeness"), matrix, step, [backend])
        run.commit(step)
    assert run.close(None)
    return run.directory


def pixels(matrix):
    picture = draw_matrix(matrix.values, matrix.rows, matrix.columns, limits=matrix.limits)
    return np.asarray(Image.open(io.BytesIO(encode_png(picture))).convert("RGB")).reshape(-1, 3)


def test_tensorboard_reads_a_picture_for_each_step(tmp_path):
    events = EventAccumulator(str(shown(tmp_path, "tb"))).Reload()
    images = events.Images("Matrices/likeness")
    assert [image.step for image in images] == [0, 3]
    assert images[0].width > images[0].height > 50


def test_lines_hold_names_and_values(tmp_path):
    entries = read(shown(tmp_path, "jsonl"))
    assert [entry["step"] for entry in entries] == [0, 3]
    matrix = entries[0]["matrix"]
    assert (matrix["rows"], matrix["columns"]) == (["a", "b"], ["a", "b", "c"])
    assert np.array_equal(matrix["values"], MATRIX.values, equal_nan=True)


def test_matplotlib_draws_the_latest(tmp_path):
    directory = shown(tmp_path, get_backend("mpl", live=False))
    assert [path.name for path in (directory / "pictures").iterdir()] == ["likeness_matrix.png"]


def test_colours_are_those_of_the_scale_and_others_for_zero_and_what_is_not_finite():
    colours = {tuple(c) for c in pixels(MATRIX)}
    assert {(227, 0, 43), (255, 154, 213), (253, 231, 37)} <= colours


@pytest.mark.parametrize(
    ("values", "limits", "colours"),
    [
        ([[1.0, 2.0, 3.0]], None, [0, 120, 239]),
        ([[-1.0, 499.5, 1000.0]], None, [0, 120, 239]),
        ([[0.01, 1.0, 100.0]], None, [0, 120, 239]),
        ([[0.0, 0.01, 100.0]], None, [ZERO, 0, 239]),
        ([[0.01, 1.0, 100.0]], (0.0, 100.0), [0, 2, 239]),
        ([[1.0, 1.0, 1.0]], None, [120] * 3),
        ([[5.0, 5.0, 5.0]], (5.0, 5.0), [0] * 3),
        ([[0.0, 0.0, 0.0]], None, [ZERO] * 3),
        ([[math.nan, math.inf, 1e300]], None, [NONFINITE, NONFINITE, 239]),
    ],
)
def test_each_cell_has_the_colour_of_its_value(values, limits, colours):
    picture = draw_matrix(np.array(values), ("a",), ("b", "c", "d"), limits=limits)
    drawn = np.asarray(Image.open(io.BytesIO(encode_png(picture))).convert("RGB"))[20]
    left = int((drawn != drawn[0]).any(-1).nonzero()[0][-1]) - 512  # the cells end the line
    assert [tuple(drawn[left + 85 + 170 * i].tolist()) for i in range(3)] == [
        tuple(c) for c in palette(NEUTRAL)[colours].tolist()
    ]


def test_an_empty_matrix_is_passed_over(tmp_path):
    empty = Matrix((), (), np.zeros((0, 0)))
    for backend in ("tb", get_backend("mpl", live=False), "jsonl"):
        shown(tmp_path, backend, empty)


def opened(tmp_path, monkeypatch, interval=1000.0):
    monkeypatch.setattr(tensorboard, "_DRAWING_INTERVAL", interval)
    backend = TensorBoardBackend()
    backend.open(tmp_path)
    return backend


def add(backend, steps, matrix=MATRIX):
    for step in steps:
        backend.add_matrix(Series("likeness"), matrix, step)
        backend.add_scalar(Series("loss"), 1.0, step)
        backend.commit(step)


@pytest.fixture
def drawing(monkeypatch):
    """Block every drawing until `gate.set()`, and record the drawing threads."""
    gate, threads = threading.Event(), []

    def draw(*arguments, **options):
        threads.append(threading.current_thread())
        gate.wait(60)
        return draw_matrix(*arguments, **options)

    monkeypatch.setattr(matrix_picture, "draw_matrix", draw)
    yield gate, threads
    gate.set()


def test_training_does_not_wait_for_a_drawing_and_a_matrix_is_acknowledged_when_it_is_written(
    tmp_path, monkeypatch, drawing
):
    gate, threads = drawing
    backend = opened(tmp_path, monkeypatch)
    add(backend, range(5, 8))
    assert not backend.flush(0.5)
    assert backend.acked_step == 4
    gate.set()
    assert backend.flush(60)
    assert backend.acked_step == 7
    assert backend.close(60)
    assert len(threads) == 3
    [thread] = set(threads)
    assert thread.daemon
    assert thread is not threading.current_thread()


def test_matrices_that_were_not_drawn_before_the_end_are_counted(tmp_path, monkeypatch, drawing, caplog):
    backend = opened(tmp_path, monkeypatch)
    add(backend, range(3))
    assert not backend.close(1.0)
    assert backend.dropped == 3
    assert [record.message for record in caplog.records] == [
        "not finished drawing: "
        + ", ".join(3 * ["Matrices/likeness"])
        + ". The event file lacks the latest of these images."
    ]
    assert not backend.close(1.0)


def test_matrices_that_are_added_faster_than_drawn_are_dropped_and_counted(tmp_path, monkeypatch, drawing, caplog):
    gate, _ = drawing
    backend = opened(tmp_path, monkeypatch)
    add(backend, range(100))
    assert backend.dropped in (35, 36)  # one of the 100 may be in the drawing thread
    assert [record.message for record in caplog.records] == [
        "matrices are added faster than they are drawn; from step 64 on the oldest are dropped"
    ]
    gate.set()
    assert not backend.close(60)
    images = EventAccumulator(str(tmp_path), size_guidance={"images": 0}).Reload().Images("Matrices/likeness")
    assert len(images) + backend.dropped == 100
    assert images[-1].step == 99


def test_matrices_that_cannot_be_drawn_are_counted_and_do_not_hold_up_the_others(tmp_path, monkeypatch, caplog):
    def fail(*arguments, **options):
        raise ZeroDivisionError("no")

    monkeypatch.setattr(matrix_picture, "draw_matrix", fail)
    backend = opened(tmp_path, monkeypatch)
    add(backend, range(2))
    assert not backend.flush(30)
    for _ in range(5):
        backend.flush(30)
    add(backend, [2])
    assert backend.flush(30)
    assert (backend.acked_step, backend.dropped) == (2, 3)
    assert not backend.close(30)
    assert [record.message for record in caplog.records] == [
        "the picture Matrices/likeness cannot be drawn",
        "the picture Matrices/likeness failed 10 times in a row and is no longer drawn",
    ]


def test_large_matrices_are_bounded_by_their_values():
    queue = MatrixQueue()
    large = Matrix(("a",), ("b",) * 2**21, np.zeros((1, 2**21)))
    for step in range(5):
        queue.add(MatrixImage("x", large, step, lambda *_: 0))
    assert [image.step for image in queue.images()] == [3, 4]
    assert queue.dropped == 3


def test_a_large_matrix_is_drawn_with_some_of_its_names():
    names = tuple(f"layers.{i}" for i in range(1000))
    shown = [len(list(Labels(names, 1, is_horizontal).shown())) for is_horizontal in (False, True)]
    assert all(10 < count < 75 for count in shown)
    assert max(draw_matrix(np.eye(1000), names, names, limits=(0.0, 1.0)).size) < 1600


def test_a_picture_of_twice_the_resolution_has_the_same_cells():
    values, names = np.random.default_rng(0).random((20, 30)), [f"layers.{i}.attention" for i in range(30)]
    small, large = (draw_matrix(values, names[:20], names, title="likeness", dpi=dpi) for dpi in (100.0, 200.0))
    assert large.size == (2 * small.width, 2 * small.height)
    box = small.width - 24 - 17 * 30, 34, small.width - 24, 34 + 20 * 21  # without the labels
    enlarged = large.resize(small.size, Image.Resampling.NEAREST)
    assert np.array_equal(small.crop(box), enlarged.crop(box))


def test_long_names_of_columns_are_written_from_below():
    names = ("a name of more than fifteen letters", "another one of more than fifteen")
    picture = np.asarray(draw_matrix(np.eye(2), ("a", "b"), names))
    legend, cells = picture.shape[0] - 52, 10 + 2 * 24
    dark = (picture[cells:legend] < 100).all(-1)
    rows, columns = np.nonzero(dark)
    assert rows.max() - rows.min() > 200  # as long as the names
    groups = np.split(np.unique(columns), np.nonzero(np.diff(np.unique(columns)) > 100)[0] + 1)
    assert [group.max() - group.min() < 18 for group in groups] == [True, True]


def test_names_are_not_read_as_formulas():
    draw = Matrix(("$\\frac{", "_x"), ("a$", "b\n"), np.eye(2))
    assert len(pixels(draw))
