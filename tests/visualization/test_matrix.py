"""Matrices in every backend."""

import io
import math

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ikkuna.visualization.backend import Series, get_backend
from ikkuna.visualization.jsonl import read
from ikkuna.visualization.matrix import Matrix
from ikkuna.visualization.pictures.matrix_picture import draw_matrix
from ikkuna.visualization.pictures.png import encode_png
from ikkuna.visualization.run import Run

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


def test_colours_are_those_of_the_scale_and_red_for_what_is_not_finite():
    colours = {tuple(c) for c in pixels(MATRIX)}
    assert {(230, 0, 60), (253, 231, 36), (68, 1, 84)} <= colours


@pytest.mark.parametrize("values", [np.full((2, 2), math.nan), np.ones((2, 2)), np.zeros((2, 2))])
def test_matrices_without_a_range_are_drawn(values):
    colours = {tuple(c) for c in pixels(Matrix(("a", "b"), ("a", "b"), values))}
    assert ((230, 0, 60) if np.isnan(values).any() else (68, 1, 84)) in colours


def test_an_empty_matrix_is_passed_over(tmp_path):
    empty = Matrix((), (), np.zeros((0, 0)))
    for backend in ("tb", get_backend("mpl", live=False), "jsonl"):
        shown(tmp_path, backend, empty)
