"""Interrupts at any moment of a step: training is unharmed, at most that step is lost, and the monitor records again."""

import random
import threading
from functools import partial

import pytest
import torch

from ikkuna.backends.run import Run
from ikkuna.flight_recorder.capture import copy_state
from ikkuna.observation.hooks.optimizers import AFTER_STEP, BEFORE_STEP
from ikkuna.store.names import Series
from ikkuna.support.failures import switched
from ikkuna.support.undisturbed import gradients
from ikkuna.testing import RecordingBackend
from tests.export.storm import Signals, Storm, Training, interrupt

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def started(**options):
    """Return a training whose first steps are over, so that all that is created once exists."""
    training = Training(**options)
    for _ in range(3):
        training.step()
        training.batch += 1
    training.hooks = training.count_hooks()
    return training


def storm_over(start, everywhere, choose, function=lambda training: training.step):
    """Interrupt a step at the chosen boundaries; return the first fault."""
    training, storm = start(), Storm(everywhere)
    training.backend.values = []
    count = storm.run(function(training))
    training.take()
    training.batch += 1
    try:
        for at in choose(count):
            if found := interrupt(training, storm, at, function(training)):
                return f"interrupted at {storm.where}: {found}"
    finally:
        training.exporter.close()
    return None


def every(count):
    return range(count)


def sample(stride, first=0):
    return lambda count: range(first, count, stride)


@pytest.mark.fault(302)
@pytest.mark.parametrize("first", range(3))
def test_an_interrupt_in_a_step_costs_at_most_this_step(first):
    assert storm_over(started, False, sample(307, 100 * first)) is None


@pytest.mark.fault(302)
def test_an_interrupt_in_torch_or_in_the_loop_costs_at_most_this_step():
    assert storm_over(started, True, sample(211)) is None


@pytest.mark.fault(302)
def test_after_sixty_real_interrupts_the_monitor_records_again():
    training, times = started(), random.Random(1)
    training.take()
    for trial in range(60):
        assert interrupt(training, Signals(), times.uniform(0, 0.004)) == [], trial
    training.exporter.close()


@pytest.mark.slow
@pytest.mark.fault(302)
def test_an_interrupt_at_any_boundary_costs_at_most_this_step():
    assert storm_over(started, False, every) is None


def evaluating(training):
    def step():
        training.step()
        training.exporter.evaluate([torch.ones(2, 2)])
        training.exporter.epoch_finished()

    return step


@pytest.mark.fault(302)
@pytest.mark.parametrize("first", range(3))
def test_an_interrupt_in_an_evaluation_costs_at_most_this_step(first):
    """The model trains again, with its gradients, and its random states are those of before."""
    assert storm_over(started, False, sample(307, 100 * first), evaluating) is None


@pytest.mark.slow
@pytest.mark.fault(302)
def test_an_interrupt_at_any_boundary_of_an_evaluation_costs_at_most_this_step():
    assert storm_over(started, False, sample(3), evaluating) is None


@pytest.mark.fault(302)
def test_an_interrupt_in_the_first_step_costs_at_most_this_step():
    """Hooks, backends and threads are created in the first step."""

    def fresh():
        training = Training()
        training.exporter._session.context.parameters._has_searched = True  # which looks at all objects of the process
        return training

    storm, training = Storm(repeats=1), fresh()
    count = storm.run(training.step)
    training.exporter.close()
    for at in range(0, count, 397):
        training = fresh()
        found = interrupt(training, storm, at)
        training.exporter.close()
        assert not found, f"interrupted at {storm.where}"


def left_by(training, before):
    """Return what an exporter has not released, beside the threads of `before`."""
    names = [each.name for each in threading.enumerate() if each not in before]
    threads = [name for name in names if name.startswith("ikkuna-writer")]
    return [
        *training.model[0]._forward_hooks,
        *BEFORE_STEP.hooks,
        *AFTER_STEP.hooks,
        *training.bus.registered,
        *threads,
    ]


@pytest.mark.fault(302)
def test_a_second_close_does_what_an_interrupt_has_left_undone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = threading.enumerate()
    training, storm = started(backend="jsonl"), Storm(repeats=1)
    count = storm.run(training.exporter.close)
    assert left_by(training, before) == []
    for at in range(0, count, 97):
        training = started(backend="jsonl")
        with pytest.raises(KeyboardInterrupt):
            storm.run(training.exporter.close, at)
        training.exporter.close()
        assert (left_by(training, before), training.bus.run) == ([], None), storm.where
        assert training.count_hooks() == [0, 0, 0], storm.where
        assert training.exporter.run_directory.is_dir(), storm.where


@pytest.mark.fault(317)
def test_values_of_an_interrupted_delivery_are_committed_under_their_own_step():
    backend = RecordingBackend()
    run = Run()
    run.show(Series("loss"), 0.5, 5, [backend])  # an interrupt has prevented commit(5)
    run.show(Series("loss"), 0.4, 6, [backend])
    run.commit(6)
    assert backend.commits == [5, 6]


@pytest.mark.fault(302)
@pytest.mark.parametrize("before", [False, True])
def test_an_interrupt_leaves_no_switch_of_torch_changed(before):
    def call():
        switched([gradients(not before), autocast], copy_state, model, [])

    model, set_autocast = torch.nn.Linear(2, 1), partial(torch.set_autocast_enabled, "cpu")
    autocast, storm = (set_autocast, False, True), Storm()
    call()
    for at in range(storm.run(call)):
        torch.set_grad_enabled(before)
        with pytest.raises(KeyboardInterrupt):
            storm.run(call, at)
        state = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        torch.set_grad_enabled(True)
        assert state == (before, False), storm.where
