"""Why and when the flight recorder writes a dump, and what a burst keeps: each decision against a simple model."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ikkuna
from ikkuna.diagnosis import Finding, RecorderOptions
from ikkuna.export.messages import Stamp
from ikkuna.flight_recorder.recorder import (
    AT_END,
    NOT_FINITE,
    OF_JUMP,
    OF_RULE,
    Burst,
    BurstSubscriber,
    CoolDown,
    NonFiniteTrigger,
)
from ikkuna.metrics.messages.batch import StepLosses
from ikkuna.metrics.messages.kinds import FORWARD_KINDS
from ikkuna.numerics.spike_score import SpikeScore
from ikkuna.numerics.statistics import FIELDS, HISTOGRAMS
from ikkuna.numerics.statistics.table import COLUMN, COLUMNS, row_of
from ikkuna.store.finding import SEVERITIES
from tests.diagnosis.test_flight_recorder import FromStepRule, Loop

# -- numbers that are not finite

UNMEASURED = np.zeros(len(COLUMNS))
ROWS = {"good": row_of(1.0), "nan": row_of(math.nan), "inf": row_of(-math.inf), "none": UNMEASURED}


@given(st.lists(st.lists(st.sampled_from(["good", "good", "nan", "inf", "none"]), max_size=4), max_size=12))
def test_a_row_triggers_when_it_becomes_non_finite_after_it_was_finite(tables):
    trigger, last = NonFiniteTrigger(), {}
    for table in tables:
        values = np.array([ROWS[name] for name in table]).reshape(-1, len(COLUMNS))
        measured = {i: name != "good" for i, name in enumerate(table) if name != "none"}
        expected = [i for i, is_bad in measured.items() if is_bad and last.get(i) is False]
        last |= measured
        found = trigger.update(values)
        assert (found.dtype, found.tolist()) == (np.int64, expected)


# -- how many dumps

EVENTS = st.tuples(st.integers(0, 45), st.integers(0, 3), st.booleans(), st.booleans())


@given(events=st.lists(EVENTS, max_size=15), steps=st.sampled_from([0, 1, 20]), limit=st.integers(0, 3))
def test_a_dump_is_written_if_no_rule_of_the_pause_and_of_the_number_forbids_it(events, steps, limit):
    """Events have a step, an importance, whether the dump fails, and whether that is known before the next event."""
    cool_down, dumps, retry = CoolDown(steps, limit), [], 0
    for step, importance, fails, is_known in events:
        for dump in [dump for dump in dumps if dump["failed"]]:
            dumps.remove(dump)
            retry = dump["step"] + steps // 10
        is_allowed = len(dumps) < limit or (importance == AT_END and 0 < limit == len(dumps))
        is_allowed &= importance == AT_END or step >= retry
        preventing = {importance, *range(max(importance, OF_JUMP) + 1, AT_END + 1)}
        for dump in dumps:
            is_allowed &= dump["importance"] not in preventing or step - dump["step"] not in range(steps)
        assert cool_down.allows(step, {importance}) is is_allowed
        if is_allowed:
            dumps.append(dump := {"step": step, "importance": importance, "failed": False})
            cool_down.add(step, {importance}, lambda dump=dump: dump["failed"])
            for each in dumps if is_known else ():
                each["failed"] |= fails
        assert cool_down.is_used_up is (len(dumps) >= limit)


def test_a_dump_counts_as_an_unimportant_one_that_was_written_by_default():
    cool_down = CoolDown(10, 5)
    cool_down.add(20)
    assert [cool_down.allows(step) for step in (19, 20, 29, 30)] == [True, False, False, True]
    assert cool_down.allows(20, {OF_JUMP})
    assert not cool_down.allows(20, {OF_RULE})


# -- what a burst keeps


class Bus:
    """Registers subscribers, or refuses the second one."""

    def __init__(self, refuses=False):
        self.registered, self.refuses = [], refuses

    def register_subscriber(self, subscriber):
        if self.refuses and self.registered:
            raise RuntimeError("refused")
        self.registered.append(subscriber)
        return SimpleNamespace(remove=lambda: self.registered.remove(subscriber))


def burst_of(steps, max_bytes, subscribers: Sequence[object] = ("first", "second"), bus=None):
    found = []
    return Burst(bus or Bus(), subscribers, steps, max_bytes, found.append), found


EVERYTHING = SimpleNamespace(task=lambda kind, module: SimpleNamespace(fields=frozenset(COLUMN)))


def rows_of(step, count, codes=None, subscriber="first"):
    """Return the rows of a step: `count` numbers, the first of which is `step`."""
    values = np.array([row_of(step + i) for i in range(count)])
    plan = SimpleNamespace(subscriptions=[SimpleNamespace(subscriber=subscriber)], task=EVERYTHING.task)
    keys = [(SimpleNamespace(kind="weights", module=f"m{i}" if i else None), "p") for i in range(count)]
    return SimpleNamespace(
        plan=plan, codes=codes or {}, values=values, stamp=Stamp(step, step, 0), index=SimpleNamespace(keys=keys)
    )


SIZE = len(COLUMNS) * 8


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("max_bytes", [1, SIZE, 2 * SIZE, 2 * SIZE + 1, 3 * SIZE, 3 * SIZE + 1, 100 * SIZE])
def test_a_burst_ends_after_its_steps_or_before_it_is_larger_than_allowed(steps, max_bytes):
    bus = Bus()
    burst, found = burst_of(steps, max_bytes, bus=bus)
    assert bus.registered == ["first", "second"]
    kept = min(steps, max(1, -(-max_bytes // SIZE) - 1))
    for step in range(10):
        assert burst.is_over is (step >= kept)
        assert burst.is_over is (not bus.registered)
        burst.add(rows_of(100 + step, 1))
    burst.end()
    assert [arrays["steps"].tolist() for arrays in found] == [[*range(100, 100 + kept)]]


@pytest.mark.parametrize(
    ("max_bytes", "kept"), [(SIZE, []), (8 + SIZE, [0]), (8 + 2 * SIZE + 1, [0]), (9 * SIZE, [0, 1, 2])]
)
def test_histograms_are_kept_as_long_as_there_is_room(max_bytes, kept):
    codes = np.zeros(50, np.int64)
    codes[[3, 7]] = 5, 6  # 8 bytes of places, 8 of counts
    burst, found = burst_of(3, max_bytes)
    for step in range(3):
        burst.add(rows_of(step, 1, {0: {"codes": codes}}))
    burst.end()
    histograms = found[0]["histograms"]
    if max_bytes <= SIZE:
        kept = [0]
    assert histograms.tolist() == [[step, 0, place, count] for step in kept for place, count in ((3, 5), (7, 6))]


@pytest.mark.parametrize("sees_loss", [False, True])
@pytest.mark.parametrize("in_modules", [False, True])
def test_a_burst_measures_all_kinds_of_parameters_and_those_inside_modules_if_that_is_possible(in_modules, sees_loss):
    parameters = {f"{of}{what}" for of in ("weight", "bias") for what in ("_gradients", "_updates")} | {
        *("weights", "biases")
    }
    subscriber = BurstSubscriber(in_modules, sees_loss)
    expected = parameters | {*(FORWARD_KINDS if in_modules else ()), *(["loss"] if sees_loss else [])}
    assert set(subscriber.subscription.kinds) == expected
    assert set(subscriber.fields) == set(FIELDS) - HISTOGRAMS
    chosen = BurstSubscriber(in_modules, histograms_of=["a", "b"])
    assert (chosen.fields, [chosen.subscription.matches(name) for name in ("a", "b", "c")]) == (
        ("codes",),
        [True, True, False],
    )


def test_a_burst_follows_a_finding(tmp_path):
    loop = Loop(tmp_path, burst=1, every=1).run(2)
    recorder_of(loop).found(Finding("mine", "error", "It is wrong."))
    loop.run(2)
    [dump] = loop.close()
    assert dump.arrays("burst.npz")["steps"].tolist() == [3]


def test_a_burst_without_steps_passes_on_nothing_and_steps_of_others_do_not_count():
    burst, found = burst_of(2, 1 << 20)
    burst.add(rows_of(5, 1, subscriber="second"))
    burst.end()
    burst.end()
    burst.add(rows_of(6, 1))
    assert (found, burst.is_over) == ([], True)


def test_a_burst_that_cannot_be_registered_leaves_nothing():
    bus = Bus(refuses=True)
    with pytest.raises(RuntimeError, match="refused"):
        burst_of(2, 1 << 20, bus=bus)
    assert bus.registered == []


@pytest.mark.parametrize("largest", [1, (1 << 31) - 1, 1 << 31, (1 << 40) + 1])
def test_the_arrays_of_a_burst_have_all_rows_and_counts(largest):
    """A second step with more rows, one of which was not measured, and a histogram that another way of counting names."""
    burst, found = burst_of(2, 1 << 20)
    burst.add(rows_of(4, 1, {0: {"codes": np.array([0, largest, 0, 2])}}))
    second = rows_of(5, 3, {0: {"sampled_codes": np.ones(3, np.int64)}, 2: {"codes": np.zeros(9, np.int64)}})
    second.values[1] = 0.0
    burst.add(second)
    (arrays,) = found
    assert arrays["steps"].tolist() == [4, 5]
    assert arrays["histograms"].tolist() == [[0, 0, 1, largest], [0, 0, 3, 2]]
    means = arrays["values"][..., COLUMN["mean"]]
    np.testing.assert_equal(means, [[4.0, math.nan, math.nan], [5.0, math.nan, 7.0]])
    assert np.isnan(arrays["values"][1, 1]).all()
    assert [arrays[name].tolist() for name in ("kinds", "modules", "paths")] == [
        ["weights"] * 3,
        ["", "m1", "m2"],
        ["p"] * 3,
    ]
    assert arrays["values"].shape == (2, 3, len(COLUMNS))


def test_a_burst_without_histograms_has_an_empty_table_of_them():
    burst, found = burst_of(1, 1 << 20)
    burst.add(rows_of(0, 1))
    assert (found[0]["histograms"].shape, found[0]["histograms"].dtype) == ((0, 4), np.int64)


# -- triggers


def recorder_of(loop):
    return loop.exporter._attachment.recorder


def training(step):
    return Stamp(step, step, 0)


@pytest.mark.parametrize("least", SEVERITIES)
@pytest.mark.parametrize("severity", SEVERITIES)
def test_a_finding_triggers_if_it_is_severe_enough(tmp_path, least, severity):
    loop = Loop(tmp_path, severity=least, burst=0).run(2)
    recorder = recorder_of(loop)
    recorder.action()(Finding("mine", severity, "It is wrong.", "first", step=1))
    recorder.step_delivered(training(1))
    recorder.step_delivered(training(1))
    dumps = loop.close()
    is_severe = SEVERITIES.index(severity) >= SEVERITIES.index(least)
    assert [dump.reasons for dump in dumps] == [[f"{severity}: mine in first at step 1: It is wrong."]] * is_severe
    assert [[finding.rule for finding in dump.findings] for dump in dumps] == [["mine"]] * is_severe


def test_a_dump_is_written_at_the_end_of_a_training_step_and_names_its_findings_alone(tmp_path):
    loop = Loop(tmp_path, cool_down=0, burst=0).run(2)
    recorder = recorder_of(loop)
    for number in range(2):
        recorder.found(Finding(f"rule{number}", "error", "It is wrong."))
        recorder.step_delivered(Stamp(1, 1, 0, "testing"))
        assert loop.exporter.health().dumps == number
        recorder.step_delivered(training(1))
        assert recorder._writer._worker.wait_for(lambda: not recorder._writer._jobs, 10.0)
    dumps = loop.close()
    assert [[finding.rule for finding in dump.findings] for dump in dumps] == [["rule0"], ["rule1"]]
    assert [dump.reasons for dump in dumps] == [["error: rule0: It is wrong."], ["error: rule1: It is wrong."]]


@pytest.mark.parametrize("is_spike", [False, True])
def test_a_loss_that_jumps_in_steps_that_no_subscriber_samples_triggers_once(tmp_path, monkeypatch, is_spike):
    """Losses up to a score of the limit are no spikes."""
    score, losses = SpikeScore(), [2.0 + 0.01 * (step % 3) for step in range(48)]
    for loss in losses:
        score.add(loss)
    monkeypatch.setattr("ikkuna.flight_recorder.recorder.LIMIT", score.of(3.0))
    loop = Loop(tmp_path, burst=0)
    losses += [3.01 if is_spike else 3.0] * 2
    recorder_of(loop).steps_passed(
        StepLosses(training(0), losses=losses, rates=[[]] * len(losses), ends=[1.0] * len(losses))
    )
    recorder_of(loop).step_delivered(training(49))
    dumps = loop.close()
    assert [(dump.step, dump.reasons) for dump in dumps] == [(49, ["the loss jumped to 3.01"])] * is_spike


@pytest.mark.parametrize("first", [48, 10])
def test_a_training_that_is_resumed_earlier_is_compared_with_its_own_losses(tmp_path, first):
    loop = Loop(tmp_path, burst=0)
    for start, level in ((0, 2.0), (first, 4.0)):
        losses = [level + 0.01 * (step % 3) for step in range(48)]
        block = StepLosses(training(start), losses=losses, rates=[[]] * len(losses), ends=[1.0] * len(losses))
        recorder_of(loop).steps_passed(block)
    recorder_of(loop).step_delivered(training(first + 48))
    assert [dump.reasons for dump in loop.close()] == [["the loss jumped to 4"]] * (first == 48)


def test_the_writer_has_two_seconds_at_the_end(tmp_path, monkeypatch):
    loop, waited = Loop(tmp_path).run(1), []
    monkeypatch.setattr(recorder_of(loop)._writer, "close", waited.append)
    loop.exporter.close()
    assert waited == [2.0]


def test_a_dump_has_the_importance_of_its_gravest_reason(tmp_path):
    """In the pause after a finding: a loss that jumps, a finding, both a finding and NaN, and a finding."""
    loop = Loop(tmp_path, cool_down=1000, max_dumps=9, burst=0).run(40)
    recorder, written = recorder_of(loop), []
    for factor, is_found in ((1.0, True), (1e4, False), (1.0, True), (math.nan, True), (1.0, True)):
        if is_found:
            recorder.found(Finding("mine", "error", "It is wrong."))
        loop.run(1, factor=factor)
        recorder._writer._worker.wait_for(lambda: not recorder._writer._jobs, 10.0)
        written.append(loop.exporter.health().dumps)
    assert [len(dump.reasons) for dump in loop.close()] == [1, 1, 2]
    assert written == [1, 2, 2, 3, 3]


@pytest.mark.parametrize(("is_end", "count"), [(False, 0), (True, 1)])
@pytest.mark.parametrize("used", [0, 1])
def test_a_signal_that_ends_the_process_may_use_the_dump_that_is_kept(tmp_path, is_end, count, used):
    loop = Loop(tmp_path, max_dumps=1, cool_down=0).run(2)
    recorder = recorder_of(loop)
    if used:
        recorder.signal_arrived("SIGUSR1", is_end=False)
    recorder.signal_arrived("SIGTERM", is_end)
    dumps = loop.close()
    names = ["signal SIGUSR1"] * used + ["signal SIGTERM"] * (count if used else 1)
    assert [dump.reasons for dump in dumps] == [[name] for name in names]
    assert not any(dump.has("burst.npz") for dump in dumps)


@pytest.mark.parametrize(("max_dumps", "cool_down", "count", "said"), [(0, 0, 0, 0), (1, 0, 1, 1), (2, 9, 1, 0)])
def test_a_used_up_budget_is_said_once_and_never_if_no_dump_is_wanted(
    tmp_path, caplog, max_dumps, cool_down, count, said
):
    loop = Loop(tmp_path, max_dumps=max_dumps, cool_down=cool_down).run(2)
    for _ in range(3):
        recorder_of(loop).signal_arrived("SIGUSR1", is_end=False)
    assert len(loop.close()) == count
    assert caplog.text.count("1 dumps of this run are written (RecorderOptions(max_dumps=…))") == said
    assert caplog.text.count("dumps of this run") == said


@pytest.mark.parametrize("burst", [0, 2])
def test_one_burst_follows_a_dump_and_a_dump_within_it_has_none(tmp_path, burst):
    loop = Loop(tmp_path, burst=burst, every=1).run(2)
    before = len(loop.exporter.message_bus.registered)
    first = loop.exporter.dump()
    assert len(loop.exporter.message_bus.registered) > before or not burst
    second = loop.exporter.dump()
    loop.run(4)
    third = loop.exporter.dump()
    loop.run(1)
    loop.close()
    assert len(loop.exporter.message_bus.registered) <= before
    facts = [json.loads((path / "dump.json").read_text()) for path in (first, second, third)]
    assert [each.get("burst_steps") for each in facts] == ([[2, 3], None, [6]] if burst else [None] * 3)


# -- what a dump says


def test_a_dump_says_where_the_training_was_and_with_which_settings(tmp_path):
    loop = Loop(tmp_path, rules=FromStepRule(), length=7, burst=0)
    empty = loop.exporter.dump("at once")
    path = loop.run(5).exporter.dump("by hand")
    network = loop.exporter.message_bus.network
    loop.close()
    for dump, step in ((empty, 0), (path, 4)):
        facts = json.loads((dump / "dump.json").read_text())
        assert dump.name == f"step_{step:06d}"
        assert (facts["step"], facts["train_step"], facts["epoch"]) == (step, step, 0)
        assert (facts["rank"], facts["ranks"], facts["left_out"], facts["findings"]) == (0, 1, {}, [])
        assert facts["reasons"] == ["at once" if dump == empty else "by hand"]
        assert facts["rules"] == [{"name": "from_step_30", "patience": 1}]
        assert facts["options"] == json.loads(json.dumps(asdict(RecorderOptions(every=5, length=7, burst=0))))
        assert facts["modules"] == [
            [entry.name, entry.class_name, json.loads(json.dumps(entry.parameters))] for entry in network
        ]
        versions = facts["versions"]
        assert (versions["ikkuna"], versions["torch"]) == (ikkuna.__version__, torch.__version__)
        assert versions["threads"] == torch.get_num_threads()


def test_the_state_is_from_before_the_earliest_of_the_findings(tmp_path):
    loop = Loop(tmp_path, every=1, state_every=3, burst=0).run(8)
    recorder = recorder_of(loop)
    for step in (7, None, 5, 6):
        recorder.found(Finding(f"rule{step}", "error", "It is wrong.", step=step))
    recorder.step_delivered(training(7))
    [dump] = loop.close()
    assert dump.tensors("state.pt")["step"] == 3


@pytest.mark.parametrize("text", ["", "row 3 of the batch has 90 % of its loss"])
def test_the_worst_row_of_a_batch_is_named_after_the_first_reason(tmp_path, monkeypatch, text):
    monkeypatch.setattr("ikkuna.flight_recorder.recorder.worst_row", lambda arrays, step: text * (step == 2))
    loop = Loop(tmp_path, every=1, burst=0).run(3)
    for name in ("first", "second", "third"):
        recorder_of(loop).found(Finding(name, "error", "It is wrong."))
    recorder_of(loop).step_delivered(training(2))
    [dump] = loop.close()
    first, *others = (f"error: {name}: It is wrong." for name in ("first", "second", "third"))
    assert dump.reasons == [first, *[text] * bool(text), *others]


# -- errors

CALLS = {
    "open": lambda r: r.step_opened(training(0), None),
    "add_model_call": lambda r: r.model_called((), {}),
    "add_loss_call": lambda r: r.loss_called((), {}),
    "add_losses": lambda r: r.steps_passed(StepLosses()),
    "add": lambda r: r.rows_complete(SimpleNamespace(skipped=False), None),
    "arrays": lambda r: (r._add_reason("it fails", NOT_FINITE), r.step_delivered(training(0))),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_error_of_the_recorder_is_reported_and_raises_nothing(tmp_path, monkeypatch, name):
    loop = Loop(tmp_path)
    loop.exporter.message_bus.error_guard.set_policy("log")
    recorder, error = recorder_of(loop), RuntimeError("broken")

    def fail(*arguments, **others):
        raise error

    monkeypatch.setattr(recorder._steps, name, fail)
    CALLS[name](recorder)
    assert loop.exporter.health().errors == 1
    recorder.process_fails(RuntimeError("the end"))
    assert loop.exporter.health().errors == 1
    monkeypatch.setattr(recorder._writer, "close", fail)
    loop.exporter.close()
    assert loop.exporter.health().errors == 2


@pytest.mark.parametrize("state_every", [0, 1])
@pytest.mark.parametrize("batches", [None, True, False])
def test_every_step_is_needed_if_states_or_batches_are_requested(tmp_path, state_every, batches):
    if batches is False and state_every:
        return
    loop = Loop(tmp_path, state_every=state_every, record_batches=batches)
    assert recorder_of(loop).needs_every_step is bool(state_every or batches)
    loop.close()
