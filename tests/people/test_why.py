"""`ikkuna why` names what changed first: the band of a series, the order of changes, and their findings."""

import json
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ikkuna import cli
from ikkuna.backends.tensorboard import TensorBoardBackend
from ikkuna.diagnosis import Finding, Findings
from ikkuna.errors import ConfigError
from ikkuna.numerics.bands import running_band, unusual_rows
from ikkuna.report.first_changes import first_changes
from ikkuna.store import read_run
from ikkuna.store.names import Series
from ikkuna.store.values import ModuleEntry

NOISE = np.random.default_rng(0).normal(size=(5, 80))
KINDS = [("input_data_variance", None), ("activations_variance", "a"), ("activations_variance", "b"), ("loss", None)]


def write_run(directory, jumps, steps=80):
    """Write a run of noisy series, of which those in `jumps` are 100 times as large from a step to before another."""
    backend = TensorBoardBackend()
    backend.open(directory)
    backend.describe([ModuleEntry("a", "Linear"), ModuleEntry("b", "Linear")])
    for step in range(steps):
        for i, (kind, name) in enumerate(KINDS):
            first, last = jumps.get((kind, name), (steps, steps))
            value = (1 + 0.05 * NOISE[i, step]) * (100 if first <= step < last else 1)
            backend.add_scalar(Series(kind, name), value, step)
        backend.commit(step)
    backend.close()
    return directory


LOSS, INPUT, A, B = KINDS[3], KINDS[0], KINDS[1], KINDS[2]


@pytest.mark.parametrize(
    ("jumps", "step", "expected"),
    [
        ({INPUT: (60, 61), A: (60, 61), B: (60, 61), LOSS: (60, 61)}, 60, [(60, INPUT), (60, A), (60, B), (60, LOSS)]),
        ({B: (57, 80), A: (58, 80), LOSS: (60, 62)}, 60, [(57, B), (58, A), (60, LOSS)]),
        ({LOSS: (60, 61), A: (59, 60)}, 60, [(59, A), (60, LOSS)]),
        ({LOSS: (60, 61), A: (40, 45)}, 60, [(60, LOSS)]),  # it was over long before
        ({}, None, []),
    ],
)
def test_changes_are_in_the_order_in_which_they_happened(jumps, step, expected, tmp_path):
    found = first_changes(read_run(write_run(tmp_path, jumps)))
    assert found.step == step
    assert [(c.step, (c.kind, c.module)) for c in found.changes] == expected
    for change in found.changes:
        assert change.value == pytest.approx(100, rel=0.2)
        assert change.usual == pytest.approx(1, rel=0.1)


def test_a_change_belongs_to_the_finding_of_its_kind_and_module(tmp_path):
    run = read_run(write_run(tmp_path, {A: (60, 61), B: (60, 61), LOSS: (60, 61)}))
    findings = Findings([
        Finding("signal_scale", "warning", "It is large.", "b", kind="activations_variance"),
        Finding("loss_spike", "warning", "It jumped.", kind="loss"),
    ])  # fmt: skip
    assert [c.finding for c in first_changes(run, None, findings).changes] == ["", "signal_scale", "loss_spike"]


def test_a_spike_between_two_stored_losses_is_the_step_in_question(tmp_path):
    run = read_run(write_run(tmp_path, {A: (60, 61)}))
    findings = Findings([Finding("loss_spike", "info", "It jumped.", kind="loss", step=60)])
    assert first_changes(run).step is None
    assert [(found := first_changes(run, None, findings)).step, found.changes[0].kind] == [60, "activations_variance"]


def test_a_number_of_all_tensors_of_a_step_names_no_cause(tmp_path):
    backend = TensorBoardBackend()
    backend.open(tmp_path)
    for step in range(80):
        backend.add_scalar(Series("nonfinite_tensors"), 27.0 if step >= 60 else 0.0, step)
        backend.add_scalar(Series("loss"), math.nan if step >= 60 else 1 + 0.05 * NOISE[0, step], step)
        backend.commit(step)
    backend.close()
    found = first_changes(read_run(tmp_path))
    assert [(change.kind, change.step) for change in found.changes] == [("nonfinite_tensors", 60), ("loss", 60)]
    assert found.cause is None


def test_the_command_shows_the_table_the_cause_and_json(tmp_path, capsys):
    run = write_run(tmp_path, {INPUT: (60, 61), A: (60, 61), LOSS: (60, 61)})
    assert cli.main(["why", str(run)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("Step 60: input_data_variance changed first, at step 60.\nProbably the batch is unlike")
    assert cli.main(["why", str(run), "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert shown.keys() == {"run", "step", "changes", "cause", "remedy"}
    assert [entry["kind"] for entry in shown["changes"]] == ["input_data_variance", "activations_variance", "loss"]
    assert cli.main(["why", str(run), "--step", "30"]) == 0
    assert capsys.readouterr().out == "No quantity that is stored left its band around step 30.\n"
    with pytest.raises(ConfigError, match="has the steps 0 to 79, got --step 80"):
        first_changes(read_run(run), 80)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.floats(0.9, 1.1), min_size=30, max_size=60),
    st.floats(0.01, 100),
    st.integers(20, 29),
)
def test_the_band_does_not_depend_on_the_unit_and_finds_what_is_far_away(values, unit, place):
    values = np.array(values)
    calm = running_band(values)
    assume(not np.isclose(calm.distance, 1, atol=1e-6).any())  # rounding decides on which side of the border it is
    np.testing.assert_allclose(running_band(unit * values).distance, calm.distance, rtol=1e-6, atol=1e-9)
    values[place] = 1e4
    assert running_band(values).distance[place] > 1
    np.testing.assert_array_equal(running_band(values).distance[:place], calm.distance[:place])


@pytest.mark.parametrize(
    ("values", "outside"),
    [
        ([1.0] * 10, []),
        ([1.0] * 10 + [1.04], []),
        ([1.0] * 10 + [1.2], [10]),
        ([0.0] * 10 + [1.0], [10]),
        ([2.0] * 10 + [np.nan, 2.0], [10]),
        ([1.0, 50.0, 1.0, 50.0], []),  # too few for a band
        ([1.0] * 10 + [9.0] * 30, list(range(10, 30))),  # after 20 values they are usual
        (list(range(1, 40)), []),
    ],
)
def test_values_outside_of_their_band(values, outside):
    assert np.flatnonzero(running_band(np.array(values, float)).distance > 1).tolist() == outside


@pytest.mark.parametrize(
    ("row", "position"), [([0.0, 0.0], 3), ([np.inf, 1.0], 3), ([1.0, 300.0], 3), ([1e-6, 1e-6], 3)]
)
def test_the_row_that_differs_is_the_most_unusual(row, position):
    values = np.array([[1.0, 1.1], [1.2, 1.0], [0.9, 1.0], row, [1.1, 0.8], [np.nan, np.nan]])
    assert unusual_rows(values).argmax() == position
    assert unusual_rows(np.ones((3, 2))).tolist() == [0, 0, 0]


def test_rows_are_compared_with_those_of_their_class_and_only_worse_ones_count():
    values = np.array([[1.0], [1.1], [0.9], [1.0], [7.0], [100.0], [110.0], [90.0], [100.0], [95.0], [1e5]])
    classes = [*["Linear"] * 5, *["ReLU"] * 5, "Tanh"]
    assert unusual_rows(values, classes).argmax() == 4
    assert unusual_rows(values, classes)[10] == 0  # alone
    assert unusual_rows(values, classes, worse=-1)[4] == 0
    assert unusual_rows(values)[10] > unusual_rows(values)[4]


def test_zeros_are_usual_where_most_rows_are_zero():
    assert unusual_rows(np.array([[0.0], [0.0], [0.0], [2.0]])).tolist() == [0, 0, 0, 0]
