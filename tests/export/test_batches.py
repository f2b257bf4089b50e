"""The messages of a kind are delivered at once where a subscriber takes them so, and nothing else changes."""

import itertools
import math
from dataclasses import astuple, is_dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ikkuna.errors import ConfigError
from ikkuna.export import Exporter, subscriber
from ikkuna.export.messages import MessageBatch, ModuleMessage, NetworkMessage, Stamp
from ikkuna.export.subscriber import (
    CallbackSubscriber,
    MeanSubscriber,
    NormSubscriber,
    RatioSubscriber,
    SharedStatisticSubscriber,
    Subscriber,
)
from ikkuna.metrics.bus.bus import MessageBus
from ikkuna.metrics.bus.delivery import Finished
from ikkuna.metrics.messages.batch import BatchNames
from ikkuna.metrics.subscriber.registered import Registered
from ikkuna.testing import RecordingBackend
from tests.zoo import CASES, Loop

STAMP = Stamp(0, 0, 0)


def run(*subscribers, steps=3, case="mlp", on_error="raise", before=None):
    """Return the values of each backend of `subscribers`, and the health of the exporter."""
    bus, loop = MessageBus(), Loop(CASES[case])
    with Exporter(message_bus=bus, on_error=on_error) as exporter:
        exporter.add_modules(loop.model)
        exporter.set_loss(loop.loss)
        for one in subscribers:
            bus.register_subscriber(one)
        if before is not None:
            before(loop)
        loop.run(steps)
    return exporter.health()


def one_by_one(cls):
    """Return a subclass that overrides ``compute``, so that its messages are delivered one by one."""
    return type(f"Single{cls.__name__}", (cls,), {"compute": lambda self, message: super(cls, self).compute(message)})


MAKES = {
    **{f"norm{p:g}": lambda make, p=p, **o: make("NormSubscriber")("weights", p, **o) for p in (0, 1, 2, math.inf)},
    "mean": lambda make, **o: make("MeanSubscriber")("activations", **o),
    "sum": lambda make, **o: make("SumSubscriber")("layer_gradients", finite_only=True, **o),
    "variance": lambda make, **o: make("VarianceSubscriber")("weights", correction=1, **o),
    "min and max": lambda make, **o: make("MinMaxSubscriber")("activations", **o),
    "sparsity": lambda make, **o: make("SparsitySubscriber")("activations", **o),
    "moments": lambda make, **o: make("MomentsSubscriber")("weights", **o),
    "non-finite": lambda make, **o: make("NonFiniteSubscriber")("activations", **o),
    "percentiles": lambda make, **o: make("PercentileSubscriber")("activations", **o),
    "percentiles of finite elements": lambda make, **o: make("PercentileSubscriber")(
        "activations", exact=True, finite_only=True, **o
    ),
    "histogram": lambda make, **o: make("HistogramSubscriber")("weights", subsample=1, **o),
    "ratio": lambda make, **o: make("RatioSubscriber")(["weight_updates", "weights"], **o),
    "global norm": lambda make, **o: make("GlobalNormSubscriber")(**o),
    "message mean": lambda make, **o: make("MessageMeanSubscriber")("weights", **o),
    "optimizer state": lambda make, **o: make("OptimizerStateSubscriber")("exp_avg", **o),
}


@pytest.mark.parametrize("name", MAKES)
def test_batches_with_a_nan_give_the_same_values_as_single_messages(name):
    def before(loop):
        with torch.no_grad():
            next(loop.model.parameters())[0, 0] = math.nan

    found = []
    for take in (lambda name: getattr(subscriber, name), lambda name: one_by_one(getattr(subscriber, name))):
        backend = RecordingBackend()
        made = MAKES[name](take, backend=backend)
        run(made, before=before, case="mlp-accumulated")
        found.append((Registered(made).takes_batches, backend.values))
    (takes, values), (takes_single, singles) = found
    assert takes
    assert not takes_single
    assert len(values) >= 3
    if len(made.publishes) > 1:  # of single messages the results of one module come together
        values, singles = (sorted(found, key=lambda item: (item[2], str(item[0]))) for found in (values, singles))
    assert [(series, step) for series, _, step in values] == [(series, step) for series, _, step in singles]
    values, singles = (
        [astuple(v) if is_dataclass(v) else float(v) for _, v, _ in found] for found in (values, singles)
    )
    np.testing.assert_equal(values, singles)


def test_a_tensor_without_counts_has_no_percentile_and_stops_no_other_metric(monkeypatch):
    for name in ("add_codes", "add_counts"):
        monkeypatch.setattr(f"ikkuna.numerics.statistics.host.{name}", lambda *arguments, **options: None)
    percentiles, norms, histograms = RecordingBackend(), RecordingBackend(), RecordingBackend()
    health = run(
        subscriber.PercentileSubscriber("weights", percentiles=50, backend=percentiles),
        subscriber.HistogramSubscriber("weights", subsample=1, backend=histograms),
        NormSubscriber("weights", backend=norms),
        on_error="log",
    )
    assert health.errors == 0
    assert [math.isnan(value) for _, value, _ in percentiles.values] == [True] * 9
    assert histograms.values == []
    assert len(norms.values) == 9


class Failing(SharedStatisticSubscriber):
    """Has values of which the last is wrong."""

    fields = ("sumsq",)
    results = ("a", "b")

    def values(self, record):
        return record.l2_norm, np.ones(7)


def test_a_wrong_number_of_values_is_an_error_and_disables():
    backend = RecordingBackend()
    health = run(Failing("weights", backend=backend), steps=12, on_error="disable")
    assert (health.errors, health.disabled) == (10, ("Failing",))
    assert [(series.kind, step) for series, _, step in backend.values] == [
        ("weights_a", step) for step in range(10) for _ in range(3)
    ], "what was emitted before the error"


def test_a_class_without_a_compute_is_refused():
    with pytest.raises(ConfigError, match="Nothing needs a method compute or compute_batch"):
        MessageBus().register_subscriber(type("Nothing", (Subscriber,), {"fields": ("sumsq",)})("weights"))


def test_an_error_in_one_message_loses_no_other():
    class Picky(Subscriber):
        fields = ("sumsq",)

        def compute(self, message):
            if message.module == "0":
                raise ValueError("on purpose")
            self.emit(message, message.record.l2_norm)

    backend = RecordingBackend()
    health = run(Picky("weights", publishes="picky", backend=backend), steps=2, on_error="log")
    assert health.errors == 2
    assert len(backend.values) == 4


@pytest.mark.parametrize("shape", [(1,), (2,), (3, 1), (1, 3)])
def test_an_array_that_has_not_one_value_for_each_message_is_refused(shape):
    class Short(Subscriber):
        fields = ("sumsq",)

        def compute_batch(self, batch):
            self.emit_batch(batch, np.resize(batch.records.l2_norm, shape))

    backend = RecordingBackend()
    with pytest.raises(ValueError, match="one value for each of 3 messages is needed, got shape"):
        run(Short("weights", publishes="short", backend=backend), steps=1)
    assert not backend.values


def test_no_later_step_changes_what_a_subscriber_has_received():
    class Keeping(Subscriber):
        fields = ("sumsq",)

        def compute_batch(self, batch):
            norms = batch.records.l2_norm
            self.emit_batch(batch, norms)
            kept.append((batch, norms.copy(), batch.records.table.copy()))
            norms[:] = 0.0

    kept, backend, after = [], RecordingBackend(), []
    run(
        Keeping("weights", publishes="kept", backend=backend),
        CallbackSubscriber("kept", lambda message: after.append(message.data), backend="null"),
        steps=3,
    )
    for batch, norms, table in kept:
        np.testing.assert_array_equal(batch.records.table, table)
        np.testing.assert_array_equal(batch.records.l2_norm, norms)
        with pytest.raises(ValueError, match="read-only"):
            batch.records.table[0] = 0.0
    assert (
        [value for _, value, _ in backend.values] == after == [norm for _, norms, _ in kept for norm in norms.tolist()]
    )


def test_emitted_numbers_travel_together():
    """Numbers that are emitted one by one reach a backend and other subscribers as one array for each kind and step."""
    calls, sizes = [], []

    class Grouping(RecordingBackend):
        def add_group(self, group, values, step):
            calls.append((group, values.tolist(), step))

    class Single(Subscriber):
        fields = ("sumsq", "mean")

        def compute(self, message):
            for kind, value in zip(self.publishes, (message.record.l2_norm, message.record.mean), strict=True):
                self.emit(message, value, kind)

    class Counting(Subscriber):
        derived = True

        def compute_batch(self, batch):
            sizes.append((batch.kind, len(batch)))

    run(Single("weights", publishes=("a", "b"), backend=Grouping()), Counting("b", backend="null"), steps=2)
    assert [(group.kind, len(values), step) for group, values, step in calls] == [
        (kind, 3, step) for step in range(2) for kind in "ab"
    ]
    assert calls[0][0] is calls[2][0], "the same group comes at each step"
    assert sizes == [("b", 3)] * 2


def test_results_outside_of_the_delivery_are_passed_on_too():
    """Results of ``measure`` are passed on at the end of the step, and those that the user emits by hand at once."""

    class Early(Subscriber):
        def measure(self, message):
            self.emit(message, float(message.data.numel()))

        def compute(self, message):
            raise AssertionError

    backend, early = RecordingBackend(), Early("weights", publishes="early", backend=(recorded := RecordingBackend()))
    bus, loop = MessageBus(), Loop(CASES["mlp"])
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(loop.model)
        exporter.set_loss(loop.loss)
        bus.register_subscriber(early)
        bus.register_subscriber(NormSubscriber("early", backend=backend))
        loop.run(2)
        assert [(series.name, step) for series, _, step in recorded.values] == [
            (name, step) for step in range(2) for name in ("0", "2", "4")
        ]
        early.emit(ModuleMessage(Stamp(1, 1, 0), "weights", module="2"), -7.0)
        assert backend.values[-1][1:] == (7.0, 1)
    assert [value for _, value, _ in backend.values] == [abs(value) for _, value, _ in recorded.values]


def test_a_failing_pattern_of_modules_is_an_error_of_its_own_subscriber():
    def fails(name):
        if is_broken:
            raise ValueError("on purpose")
        return True

    is_broken, backend = False, RecordingBackend()
    registered = NormSubscriber("weights_norm2", modules=fails, backend="null")
    after = MeanSubscriber("weights_norm2", backend=backend)
    is_broken = True
    health = run(NormSubscriber("weights", backend="null"), registered, after, steps=1, on_error="log")
    assert health.errors == 1
    assert len(backend.values) == 3


def test_a_disabled_subscriber_gets_no_more_messages_of_the_step():
    class Bad(Subscriber):
        derived = True

        def compute(self, message):
            calls.append(message.module)
            raise ValueError("on purpose")

    calls, bus = [], MessageBus()
    registered = Registered(Bad("a"))
    bus.deliver(registered, batch("a", "abcdefghijklmno", [1.0] * 15))
    assert "".join(calls) == "abcdefghij"
    assert registered.disabled


@pytest.mark.parametrize("skipped", [False, True])
def test_results_of_an_early_evaluation_are_discarded_if_the_step_is_skipped(skipped):
    class Evaluating(Subscriber):
        needs_model = True

        def compute(self, message):
            if not message.skipped:
                self.emit(message, 1.0)

    bus, backend = MessageBus(), RecordingBackend()
    bus.register_subscriber(Evaluating("batch_finished", publishes="evaluated", backend=backend))
    step = finished(bus, skipped=skipped)
    step.evaluate(bus)  # the scaler has not decided yet
    assert backend.values == []
    step.deliver(bus)
    assert [step for _, _, step in backend.values] == ([] if skipped else [3])


def finished(bus, skipped=False, observer=None):
    """Return a finished step without measurements."""
    stamp = Stamp(3, 3, 0)
    rows = SimpleNamespace(
        stamp=stamp,
        subscriptions=(),
        sampled=set(bus.registered),
        skipped=skipped,
        rates={},
        arrived=bool,
        complete=list,
        taken=list,
    )
    return Finished(rows, NetworkMessage(stamp, "batch_finished", {}), observer)


def test_a_subscriber_that_takes_measurements_too_gets_the_event_after_them():
    class Evaluating(Subscriber):
        needs_model, fields = True, ("sumsq",)

        def compute(self, message):
            seen.append(message.kind)

    seen, bus = [], MessageBus()
    bus.register_subscriber(Evaluating(["weights", "batch_finished"], backend="null"))
    step = finished(bus)
    step.evaluate(bus)
    assert seen == []
    step.deliver(bus)
    assert seen == ["batch_finished"]


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_the_observer_of_a_step_is_called_once_after_its_last_result(device):
    class Late(Subscriber):
        def compute(self, message):
            self.later(message, [torch.device(device)], lambda: 2.0, lambda result: self.emit(message, result()))

    bus, backend, seen = MessageBus(), RecordingBackend(), []
    bus.register_subscriber(Late("batch_finished", publishes="late", backend=backend))
    observer = SimpleNamespace(
        rows_complete=lambda rows, event: seen.append(event.kind),
        step_delivered=lambda stamp: seen.append((stamp, len(backend.values))),
    )
    bus.queue.append(finished(bus, observer=observer))
    bus.drain(wait=True)
    assert seen == ["batch_finished", (Stamp(3, 3, 0), 1)]


def test_an_abandoned_step_leaves_no_results_and_is_named(caplog):
    class Emitting(Subscriber):
        fields = ("sumsq",)

        def compute(self, message):
            self.emit(message, message.record.l2_norm)
            if message.module == "2" and message.global_step == 1:
                raise KeyboardInterrupt

    backend = RecordingBackend()
    bus, loop = MessageBus(), Loop(CASES["mlp"])
    with Exporter(message_bus=bus) as exporter:
        exporter.add_modules(loop.model)
        exporter.set_loss(loop.loss)
        bus.register_subscriber(Emitting("weights", publishes="emitted", backend=backend))
        loop.run(1)
        with pytest.raises(KeyboardInterrupt):
            loop.run(1)
        loop.run(1)
    assert [step for _, _, step in backend.values] == [0, 0, 0, 2, 2, 2]
    (line,) = [record.message for record in caplog.records if "interrupted" in record.message]
    assert line == "an exception has interrupted the delivery of step 1; some of its values are missing"


def test_results_travel_to_those_that_take_batches_and_to_those_that_do_not():
    seen, backend = [], RecordingBackend()
    run(
        NormSubscriber("weights", backend="null"),
        NormSubscriber("weights_norm2", 1, backend=backend, modules=["0", "2"]),
        CallbackSubscriber("weights_norm2", lambda m: seen.append((m.module, m.data, m.record.mean)), backend="null"),
        NormSubscriber("weights_norm2", 3, backend=backend),
        case="mlp",
        steps=1,
    )
    names = [name for name, _, _ in seen]
    assert len(names) == 3
    assert all(isinstance(data, float) and data == mean for _, data, mean in seen)
    by_kind = {
        kind: [(s.name, v) for s, v, _ in backend.values if s.kind == kind]
        for kind in ("weights_norm2_norm1", "weights_norm2_norm3")
    }
    assert by_kind["weights_norm2_norm3"] == [(name, data) for name, data, _ in seen]
    assert by_kind["weights_norm2_norm1"] == [(name, data) for name, data, _ in seen if name in ("0", "2")]


def test_a_ratio_of_results_is_the_ratio_of_the_kinds():
    direct, derived = RecordingBackend(), RecordingBackend()
    kinds = ["weight_updates", "weights"]
    run(
        RatioSubscriber(kinds, backend=direct),
        *(NormSubscriber(kind, backend="null") for kind in kinds),
        RatioSubscriber([f"{kind}_norm2" for kind in kinds], backend=derived),
    )
    assert [value for _, value, _ in direct.values] == [value for _, value, _ in derived.values]
    assert len(direct.values) == 9


# -- joined batches ---------------------------------------------------------------------------------------------------


class Joining(Subscriber):
    """Keeps the modules and numbers of each batch of bundles."""

    derived = True

    def __init__(self):
        super().__init__(["a", "b"], join=True)
        self.batches = []

    def compute_batch(self, bundle):
        self.batches.append(
            list(zip(bundle.names.modules, bundle["a"].data.tolist(), bundle["b"].data.tolist(), strict=True))
        )


def batch(kind, modules, values, stamp=STAMP):
    return MessageBatch(
        stamp, kind, BatchNames(tuple(modules), ("",) * len(modules), tuple(modules)), data=np.array(values)
    )


@pytest.fixture
def joining():
    registered = Registered(Joining())
    return MessageBus(), registered, registered.subscriber


def test_batches_of_the_same_modules_are_joined(joining):
    bus, registered, found = joining
    for step in range(2):
        stamp = Stamp(step, 0, 0)
        bus.deliver(registered, batch("a", "xy", [1.0, 2.0], stamp))
        bus.deliver(registered, batch("b", "yx", [3.0, 4.0], stamp))
        registered.drop_incomplete(stamp)
    assert found.batches == [[("x", 1.0, 4.0), ("y", 2.0, 3.0)]] * 2
    assert registered.dropped == 0


def test_modules_without_a_partner_are_dropped_and_counted(joining):
    bus, registered, found = joining
    bus.deliver(registered, batch("a", "wxy", [0.0, 1.0, 2.0]))
    bus.deliver(registered, batch("b", "yzx", [3.0, 5.0, 4.0]))
    assert found.batches == [[("x", 1.0, 4.0), ("y", 2.0, 3.0)]]
    registered.drop_incomplete(STAMP)
    assert registered.dropped == 2
    bus.deliver(registered, batch("a", "x", [1.0], Stamp(1, 0, 0)))
    registered.drop_incomplete(Stamp(1, 0, 0))
    assert registered.dropped == 3


def test_a_kind_may_come_from_two_publishers(joining):
    bus, registered, found = joining
    bus.deliver(registered, batch("a", "x", [1.0]))
    bus.deliver(registered, batch("a", "y", [2.0]))
    bus.deliver(registered, batch("b", "xyz", [3.0, 4.0, 5.0]))
    assert found.batches == [[("x", 1.0, 3.0), ("y", 2.0, 4.0)]]
    registered.drop_incomplete(STAMP)
    assert registered.dropped == 1


def test_a_second_publisher_completes_what_the_first_has_left(joining):
    bus, registered, found = joining
    bus.deliver(registered, batch("b", "xyz", [3.0, 4.0, 5.0]))
    bus.deliver(registered, batch("a", "x", [1.0]))
    bus.deliver(registered, batch("a", "y", [2.0]))
    registered.drop_incomplete(STAMP)
    assert found.batches == [[("x", 1.0, 3.0)], [("y", 2.0, 4.0)]]
    assert registered.dropped == 1


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_joined_kinds_equal_a_dictionary_of_messages(data):
    """However the messages of two steps are divided into batches, and in whatever order these arrive."""
    seen, arriving = {}, []
    for step, kind in itertools.product(range(2), "ab"):
        modules = data.draw(st.lists(st.sampled_from("uvwxyz"), unique=True))
        at = sorted(data.draw(st.sets(st.integers(0, len(modules)))))
        for part in np.split(np.array(modules, object), at):
            values = [data.draw(st.integers(0, 9)) / 1.0 for _ in part]
            seen |= {(step, kind, module): value for module, value in zip(part, values, strict=True)}
            if len(part):
                arriving.append(batch(kind, part, values, Stamp(step, 0, 0)))
    bus, registered = MessageBus(), Registered(Joining())
    for each in data.draw(st.permutations(arriving)):
        bus.deliver(registered, each)
    places = {(step, module) for step, _, module in seen}
    whole = sorted(place for place in places if all((place[0], kind, place[1]) in seen for kind in "ab"))
    found = [pair for pairs in registered.subscriber.batches for pair in pairs]
    assert sorted(found) == sorted((m, seen[step, "a", m], seen[step, "b", m]) for step, m in whole)
    for step, left in ((0, 0), (1, len(places) - len(whole))):
        registered.drop_incomplete(Stamp(step, 0, 0))
        assert registered.dropped == left if step else registered.dropped <= len(places) - len(whole)


@pytest.mark.parametrize("batch_first", [True, False])
def test_batches_join_with_single_messages(joining, batch_first):
    bus, registered, found = joining
    messages = [ModuleMessage(STAMP, "b", value, None, name, "", name) for name, value in (("x", 3.0), ("y", 4.0))]
    if batch_first:
        bus.deliver(registered, batch("a", "xy", [1.0, 2.0]))
    for message in messages:
        bus.deliver(registered, MessageBatch.of(message))
    if not batch_first:
        bus.deliver(registered, batch("a", "xy", [1.0, 2.0]))
    assert [pair for pairs in found.batches for pair in pairs] == [("x", 1.0, 3.0), ("y", 2.0, 4.0)]


# -- backends ---------------------------------------------------------------------------------------------------------


def test_a_backend_that_fails_at_one_series_loses_only_that():
    class Picky(RecordingBackend):
        def add_scalar(self, series, value, step):
            if series.name == "0":
                raise OSError("on purpose")
            super().add_scalar(series, value, step)

    backend = Picky()
    run(MeanSubscriber("weights", backend=backend), steps=2)
    assert [step for _, _, step in backend.values] == [0, 0, 1, 1]


def test_a_backend_gets_groups_unless_a_subclass_changes_single_values():
    groups = []

    class Grouping(RecordingBackend):
        def add_scalar(self, series, value, step):
            raise AssertionError

        def add_group(self, group, values, step):
            groups.append((group, values.tolist(), step))

    class Rounding(Grouping):
        def add_scalar(self, series, value, step):
            RecordingBackend.add_scalar(self, series, round(value), step)

    rounding = Rounding()
    health = run(MeanSubscriber("weights", backend=[Grouping(), rounding]), steps=2)
    assert [(len(group.names), step) for group, _, step in groups] == [(3, 0), (3, 1)]
    assert groups[0][0] is groups[1][0], "the same group comes at each step"
    assert len(rounding.values) == 6
    assert health.dropped == 0


def test_modules_that_change_from_step_to_step_do_not_accumulate():
    registered = Registered(Joining())
    bus = MessageBus()
    for step in range(100):
        stamp = Stamp(step, 0, 0)
        for kind in "ab":
            bus.deliver(registered, batch(kind, [f"m{step}", "x"], [1.0, 2.0], stamp))
        registered.drop_incomplete(stamp)
    assert len(registered.subscriber.batches) == 100
    assert len(registered._common) < 20


class WholeSteps(Subscriber):
    """Receives the measurements of whole steps, and events one by one."""

    fields = ("mean",)

    def __init__(self, **options):
        super().__init__(["weights", "weight_gradients", "batch_finished"], backend="null", **options)
        self.steps, self.kinds_of_batches = [], []

    def compute_step(self, step):
        self.steps.append(([rows.kind for rows in step.rows], step.rows, step.is_plain))
        if not step.is_plain:
            super().compute_step(step)

    def compute_batch(self, batch):
        self.kinds_of_batches.append(batch.kind)


def test_a_subscriber_takes_a_whole_step_and_makes_batches_only_if_it_reads_them():
    whole = WholeSteps()
    run(whole, steps=3)
    assert [kinds for kinds, *_ in whole.steps] == [["weights", "weight_gradients"]] * 3
    assert len({id(rows) for _, rows, _ in whole.steps}) == 1
    assert all(is_plain for *_, is_plain in whole.steps)
    assert whole.kinds_of_batches == ["batch_finished"] * 3


def test_a_step_with_nan_is_not_plain():
    def break_weights(loop):
        next(loop.model.parameters()).data[0] = math.nan

    whole = WholeSteps()
    run(whole, steps=1, before=break_weights)
    assert [is_plain for *_, is_plain in whole.steps] == [False]
    assert whole.kinds_of_batches == ["weights", "weight_gradients", "batch_finished"]


def test_a_method_that_a_subclass_overrides_is_called_in_place_of_an_inherited_compute_step():
    class Single(WholeSteps):
        def compute(self, message):
            self.kinds_of_batches.append(message.kind)

    single = Single()
    run(single, steps=1)
    assert single.steps == []
    assert set(single.kinds_of_batches) == {"weights", "weight_gradients", "batch_finished"}


def test_an_error_in_a_whole_step_is_counted_and_loses_no_event():
    class Failing(WholeSteps):
        def compute_step(self, step):
            raise ValueError("no")

    failing = Failing()
    assert run(failing, steps=3, on_error="disable").errors == 3
    assert failing.kinds_of_batches == ["batch_finished"] * 3


def test_a_subscriber_of_whole_steps_takes_no_single_batch():
    class Whole(Subscriber):
        def compute_step(self, step):
            pass

    message = NetworkMessage(Stamp(0, 0, 0), "loss", torch.tensor(1.0))
    for call in (Whole("loss").compute, lambda single: Whole("loss").compute_batch([single])):
        with pytest.raises(TypeError, match="Whole takes whole steps"):
            call(message)
