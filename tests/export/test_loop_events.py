"""Counters of the loop against plain definitions: steps, epochs, evaluation passes, cleared gradients and seconds."""

import math
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.swa_utils import update_bn

import ikkuna
from ikkuna.errors import ConfigError
from ikkuna.metrics.messages.stamp import Stamp
from ikkuna.observation.hooks import hook as module
from ikkuna.observation.hooks.hook import Stopwatch
from ikkuna.observation.steps.forwards import LoopEvents
from ikkuna.observation.steps.step_tracker import StepCounters


def events_of(loop):
    """Return both counts after a loop: "t" is a step, "n" a forward without gradients, "e" one in evaluation mode."""
    events, step = LoopEvents(), 0
    for letter in loop:
        events.forward(step, training=letter != "e", is_of_training=letter == "t")
        step += letter == "t"
    events.forward(step, training=True, is_of_training=True)
    return events.in_training_mode, events.in_evaluation_mode


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        ("t" * 30, (0, 0)),
        (("t" * 20 + "nnn") * 3, (3, 0)),
        ("nnn" + "t" * 20, (0, 0)),  # before the first step: it may initialise lazy modules
        (("t" * 20 + "n") * 3, (0, 0)),  # a single forward, as of a figure
        (("t" * 9 + "nnn") * 3, (0, 0)),  # too often
        ("tnn" * 30, (0, 0)),
        (("t" * 20 + "eee") * 3, (0, 3)),
        (("t" * 20 + "ene") * 3, (0, 3)),
        ("te" * 3, (0, 3)),
        (("t" * 20 + "nn" + "t" * 20 + "ee") * 2, (2, 2)),
    ],
)
def test_passes_are_counted_by_their_mode(loop, expected):
    assert events_of(loop) == expected


BLOCKS = st.one_of(
    st.integers(1, 60).map(lambda n: "t" * n),  # plain steps, several optimizers, closures, accumulation
    st.integers(2, 40).map(
        lambda n: "nt" * n
    ),  # a target network, a teacher, a generator, a checkpoint around the root
    st.integers(2, 20).map(lambda n: "nnnt" * n),
    st.integers(1, 20).map(lambda n: "e" * n),  # a right evaluation
    st.just("t" * 12 + "n" + "t" * 12),
)


@given(st.lists(BLOCKS, max_size=8))
@settings(max_examples=200, deadline=None)
def test_right_loops_have_no_evaluation_in_training_mode(blocks):
    """A block may begin behind a single forward without gradients of another one, so that a step stands between them."""
    assert events_of("t".join(blocks))[0] <= sum(block[:2] == "nn" for block in blocks)


@given(st.lists(st.sampled_from("tne"), max_size=200))
def test_facts_only_grow(loop):
    counts = [events_of(loop[:i]) for i in range(0, len(loop), 10)]
    assert counts == sorted(counts, key=sum)


def precise_statistics(batches, model):
    """Let a batch norm have the mean of the statistics of some batches, each of which it takes as it is."""
    norm = model[1]
    momentum, norm.momentum = norm.momentum, 1.0
    with torch.no_grad():
        means = [(model(batch), norm.running_mean.clone())[1] for batch in batches]
    norm.momentum = momentum
    norm.running_mean.copy_(torch.stack(means).mean(0))


@pytest.mark.parametrize("is_right", [True, False])
@pytest.mark.parametrize("no_gradients", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_of_the_loop_is_seen_at_any_step(is_right, no_gradients, tmp_path):
    """Steps 11 to 13 are between two samples; the finding comes with the next sampled step."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with ikkuna.watch(model, log_dir=tmp_path, backend="null", verbosity=0) as exporter:
        for step in range(60):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            if step % 17 == 12:
                model.train(not is_right)
                with no_gradients():
                    for _ in range(4):
                        model(torch.randn(4, 8))
                model.train()
    found = [finding.step for finding in exporter.findings if finding.rule == "evaluation_in_training_mode"]
    assert found == ([] if is_right else [30])


@pytest.mark.parametrize("estimates", [update_bn, precise_statistics])
def test_a_new_estimate_of_the_statistics_of_batch_norms_is_no_evaluation(estimates, tmp_path):
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    batches = torch.randn(4, 4, 8)
    with ikkuna.watch(model, log_dir=tmp_path, backend="null", verbosity=0) as exporter:
        for step in range(60):
            optimizer.zero_grad()
            model(batches[step % 4]).square().mean().backward()
            optimizer.step()
            if step % 17 == 12:
                estimates(batches, model)
    assert "evaluation_in_training_mode" not in [finding.rule for finding in exporter.findings]


def state_of(loop, step=0):
    """Return every fact of `LoopEvents` after each letter of a loop as above, which begins at a step."""
    events = LoopEvents()
    facts = []
    for letter in loop:
        events.forward(step, training=letter != "e", is_of_training=letter == "t")
        step += letter == "t"
        facts.append((events.is_evaluating, events.is_apart))
    counts = events.in_training_mode, events.in_evaluation_mode, events.repeated, events.thrown_away
    return counts, events.has_forwards, facts


@pytest.mark.parametrize(
    ("loop", "step", "counts", "last"),
    [
        ("", 0, (0, 0, 0, 0), None),
        ("t", 0, (0, 0, 0, 0), (False, False)),
        ("n", 9, (0, 0, 0, 0), (False, False)),  # 9 steps after the first are too few
        ("n", 10, (0, 0, 0, 0), (True, True)),
        ("nnt", 10, (1, 0, 0, 0), (False, False)),
        ("nnt", 9, (0, 0, 0, 0), (False, False)),
        ("nt", 10, (0, 0, 0, 0), (False, False)),
        ("e", 9, (0, 0, 0, 0), (True, False)),
        ("e", 10, (0, 0, 0, 0), (True, True)),
        ("et", 10, (0, 1, 0, 0), (False, False)),
        ("eet", 10, (0, 1, 1, 0), (False, False)),
        ("net", 10, (0, 1, 1, 0), (False, False)),
        ("et", 0, (0, 1, 0, 0), (False, False)),
        ("tetet", 0, (0, 2, 0, 0), (False, False)),
        ("eetnnt", 10, (0, 1, 1, 0), (False, False)),  # the modes of a pass are forgotten with it
        ("nn" + "t" * 10 + "nnt", 10, (2, 0, 0, 0), (False, False)),
        ("nn" + "t" * 9 + "nnt", 10, (1, 0, 0, 0), (False, False)),
        ("n" + "t" * 10 + "nt", 10, (0, 0, 0, 0), (False, False)),  # forwards of two passes are not added
    ],
)
def test_each_fact_about_passes_is_that_of_its_definition(loop, step, counts, last):
    found, has_forwards, facts = state_of(loop, step)
    assert found == counts
    assert has_forwards is bool(loop)
    assert (facts[-1] if facts else None) == last


def test_a_step_without_a_forward_ends_a_pass_and_one_at_the_same_step_does_not():
    events = LoopEvents()
    for step in (20, 20, 21, 21, 40, 40):
        events.forward(step, training=True, is_of_training=False)
    assert (events.in_training_mode, events.is_evaluating) == (1, True)  # that of step 21 is not apart
    events.forward(41, training=True, is_of_training=True)
    assert (events.in_training_mode, events.is_evaluating) == (2, False)


@pytest.mark.parametrize(
    ("cleared", "count"),
    [
        ([], 0),
        ([(0, 0)], 0),
        ([(0, 0)] * 2, 1),
        ([(0, 0)] * 3, 2),
        ([(0, 0), (0, 1), (1, 1), (0, 0)], 0),
        ([(-1, 0)], 1),
    ],
)
def test_gradients_are_thrown_away_if_neither_step_nor_weights_have_changed(cleared, count):
    events = LoopEvents()
    for step, version in cleared:
        events.gradients_cleared(step, version)
    assert events.thrown_away == count


@given(
    st.lists(st.sampled_from(["step", "epoch", "open", "open?", "load"]), max_size=40), st.integers(1, 5) | st.none()
)
def test_steps_and_epochs_are_counted_as_in_a_list(calls, per_epoch):
    counters, epochs, announced, opened = StepCounters(), [0], False, False  # the steps of each epoch
    counters.set_steps_per_epoch(per_epoch)
    for call in calls:
        if call == "step":
            assert counters.step_closed() == sum(epochs)
            epochs[-1] += 1
        elif call == "epoch":
            counters.epoch_closed()
            epochs.append(0)
            announced = opened = False
        elif call == "load":
            loaded = StepCounters()
            loaded.load_state_dict(counters.state_dict())
            assert loaded.state_dict() == counters.state_dict()
            assert loaded.stamp() == counters.stamp()
        else:
            assert counters.step_opened(call == "open") is not announced
            announced, opened = True, opened or call == "open"
        total, here, number = sum(epochs), epochs[-1], len(epochs) - 1
        assert (counters.next.global_step, counters.next.train_step, counters.next.epoch) == (total, here, number)
        assert counters.state_dict() == {"global_step": total, "train_step": here, "epoch": number}
        assert counters.epoch_has_begun is (opened or here > 0)
        assert counters.steps_left == (math.inf if per_epoch is None else per_epoch - here)
        assert (counters.steps_left <= 0) is (per_epoch is not None and here >= per_epoch)
        for back in (-1, 0, 1, 3):
            assert counters.stamp(back, "a") == Stamp(max(total - back, 0), max(here - back, 0), number, "a")
        assert counters.stamp() == Stamp(total, here, number, "training")


def test_wrong_numbers_are_refused_and_change_nothing():
    counters = StepCounters()
    assert not counters.epoch_has_begun
    assert counters.step_opened()
    assert counters.epoch_has_begun
    counters.step_closed()
    for steps in (0, -1, True, 1.0, "1"):
        with pytest.raises(ConfigError, match="steps_per_epoch must be an int >= 1 or None, got"):
            counters.set_steps_per_epoch(steps)
    assert counters.steps_per_epoch is None
    right = {"global_step": 0, "train_step": 0, "epoch": 0}
    for state in ({}, {**right, "more": 0}, [], None, {**right, "epoch": -1}, {**right, "epoch": 1.0}):
        with pytest.raises(ConfigError, match="needs what state_dict"):
            counters.load_state_dict(state)
    assert counters.next.global_step == 1
    counters.load_state_dict(right)
    assert counters.next.global_step == 0


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until its attribute `now` is set; it does not begin at 0."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def test_nested_pairs_are_counted_once_and_exceptions_leave_nothing_open(clock):
    watch = Stopwatch()
    assert (watch.spent, watch.spent_later, watch.overhead()) == (0, 0, 0)
    for call, now in (("start", 1), ("start", 2), ("stop", 4), ("stop", 8), ("start", 16), ("stop", 32)):
        clock.now = now
        getattr(watch, call)()
    assert watch.spent == 7 + 16
    watch.start()  # without its stop
    clock.now = 64
    watch.restart()
    clock.now = 65
    watch.stop()
    assert watch.spent == 7 + 16 + 1


def test_pairs_of_other_threads_are_added(clock):
    watch = Stopwatch()
    clock.now = 1.0
    watch.start()
    clock.now = 3.0

    def other():
        watch.start()
        clock.now = 7.0
        watch.stop()

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert watch.spent == 4
    watch.stop()
    assert watch.spent == 4 + 6


def test_laps_contain_open_pairs_and_what_was_measured_elsewhere(clock):
    elsewhere = [0.0]
    watch = Stopwatch(lambda: elsewhere[0])
    clock.now = 10.0
    assert watch.lap() is None
    watch.start()
    clock.now = 13.0
    assert watch.lap() == (3, 3)
    clock.now, elsewhere[0] = 15.0, 1.0
    watch.stop()
    clock.now = 20.0
    assert watch.lap() == (7, 3)
    watch.spent = 50.25
    watch.steps_passed(ended=30.0, later=0.25)
    clock.now = 31.0
    assert watch.lap() == (1, 0.25)


def test_the_overhead_is_a_share_of_the_remaining_time_without_the_first_step(clock):
    elsewhere = [4.0]
    watch = Stopwatch(lambda: elsewhere[0])
    watch.spent = 1.0
    watch.step_ended()
    assert (watch.overhead(), watch.spent_later) == (0, 0)
    clock.now, watch.spent = 110.0, 2.0
    watch.step_ended()
    assert watch.spent_later == 1
    assert watch.overhead(1.0) == 2 / (10 - 2)
    elsewhere[0] = 4.5
    watch.spent = 3.0
    watch.steps_passed(ended=120.0, later=0.0)
    assert watch.spent_later == 2.5
    assert watch.overhead(1.5) == 4 / (20 - 4)
    watch.spent = 18.75
    watch.steps_passed(ended=120.0, later=0.25)
    assert watch.overhead(1.5) == 19.5 / (20 - 19.5)
    watch.spent = 20.5
    watch.steps_passed(ended=120.0, later=0.0)
    assert (watch.spent_later, watch.overhead()) == (20, 0)  # no remaining time
