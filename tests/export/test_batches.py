"""The messages of a kind are delivered at once where a subscriber takes them so, and nothing else changes."""

import math
from dataclasses import astuple, is_dataclass

import numpy as np
import pytest
import torch

from ikkuna.export import Exporter, subscriber
from ikkuna.export.messages import MessageBatch, ModuleMessage, Stamp
from ikkuna.export.subscriber import (
    CallbackSubscriber,
    MeanSubscriber,
    NormSubscriber,
    RatioSubscriber,
    SharedStatisticSubscriber,
    Subscriber,
)
from ikkuna.metrics.bus.bus import MessageBus
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
    return type(f"Single{cls.__name__}", (cls,), {"compute": lambda self, message: cls.compute(self, message)})


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
    "clipping": lambda make, **o: make("ClippingSubscriber")(**o),
    "optimizer state": lambda make, **o: make("OptimizerStateSubscriber")("exp_avg", **o),
}


@pytest.mark.parametrize("poison", [False, True], ids=["finite", "with a NaN"])
@pytest.mark.parametrize("name", MAKES)
def test_batches_give_the_same_values_as_single_messages(name, poison):
    def before(loop):
        if poison:
            with torch.no_grad():
                next(loop.model.parameters())[0, 0] = math.nan

    found = []
    for take in (lambda name: getattr(subscriber, name), lambda name: one_by_one(getattr(subscriber, name))):
        backend = RecordingBackend()
        made = MAKES[name](take, backend=backend)
        run(made, before=before, case="mlp-accumulated")
        found.append((made.takes_batches, backend.values))
    (takes, values), (takes_single, singles) = found
    assert takes
    assert not takes_single
    assert len(values) >= (0 if poison and name == "clipping" else 3)
    if len(made.publishes) > 1:  # of single messages the results of one module come together
        values, singles = (sorted(found, key=lambda item: (item[2], str(item[0]))) for found in (values, singles))
    assert [(series, step) for series, _, step in values] == [(series, step) for series, _, step in singles]
    values, singles = (
        [astuple(v) if is_dataclass(v) else float(v) for _, v, _ in found] for found in (values, singles)
    )
    np.testing.assert_equal(values, singles)


def test_a_tensor_without_counts_has_no_percentile_and_stops_no_other_metric(monkeypatch):
    monkeypatch.setattr("ikkuna.numerics.statistics.host.add_codes", lambda *arguments, **options: None)
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


class Branching(SharedStatisticSubscriber):
    """Has values that cannot be computed for several modules at once."""

    fields = ("sumsq", "min", "max")
    results = ("branching",)

    def values(self, record):
        return (max(-record.min, record.max) if record.l2_norm > 0 else 0.0,)


def test_values_that_fail_with_arrays_are_computed_one_by_one_from_then_on():
    backend, plain = RecordingBackend(), RecordingBackend()
    health = run(Branching("weights", backend=backend), NormSubscriber("weights", math.inf, backend=plain))
    assert health.errors == 0
    assert len(backend.values) == 9
    assert [value for _, value, _ in backend.values] == [value for _, value, _ in plain.values]


def test_errors_of_values_are_counted_for_each_module_and_disable(caplog):
    class Failing(Branching):
        def values(self, record):
            raise ValueError("on purpose")

    health = run(Failing("weights", backend="null"), steps=6, on_error="disable")
    assert health.errors == 10
    assert health.disabled == ("Failing",)


def test_a_wrong_number_of_values_emits_nothing_twice():
    class Wrong(Branching):
        results = ("a", "b")

        def values(self, record):
            return record.l2_norm, np.ones(7)

    backend = RecordingBackend()
    health = run(Wrong("weights", backend=backend), steps=1, on_error="log")
    assert health.errors == 3
    assert [series.kind for series, _, _ in backend.values] == ["weights_a"] * 3  # one by one, until the second fails


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
    """Keeps the modules of each bundle, whether they come at once or one by one."""

    derived = True

    def __init__(self):
        super().__init__(["a", "b"], join=True)
        self.batches, self.singles = [], []

    def compute(self, bundle):
        self.singles.append((bundle.first.module, bundle["a"].data, bundle["b"].data))

    def compute_batch(self, bundle):
        self.batches.append(
            list(zip(bundle.names.modules, bundle["a"].data.tolist(), bundle["b"].data.tolist(), strict=True))
        )


def batch(kind, modules, values, stamp=STAMP):
    return MessageBatch.of_results(
        stamp, kind, BatchNames(tuple(modules), ("",) * len(modules), tuple(modules)), values
    )


@pytest.fixture
def joining():
    registered = Registered(Joining())
    return MessageBus(), registered, registered.subscriber


def test_batches_of_the_same_modules_are_joined(joining):
    bus, registered, found = joining
    for step in range(2):
        stamp = Stamp(step, 0, 0)
        bus.deliver_batch(registered, batch("a", "xy", [1.0, 2.0], stamp))
        bus.deliver_batch(registered, batch("b", "yx", [3.0, 4.0], stamp))
        registered.drop_incomplete(stamp)
    assert found.batches == [[("x", 1.0, 4.0), ("y", 2.0, 3.0)]] * 2
    assert (found.singles, registered.dropped) == ([], 0)


def test_modules_without_a_partner_are_dropped_and_counted(joining):
    bus, registered, found = joining
    bus.deliver_batch(registered, batch("a", "wxy", [0.0, 1.0, 2.0]))
    bus.deliver_batch(registered, batch("b", "yzx", [3.0, 5.0, 4.0]))
    assert found.batches == [[("x", 1.0, 4.0), ("y", 2.0, 3.0)]]
    registered.drop_incomplete(STAMP)
    assert registered.dropped == 2
    bus.deliver_batch(registered, batch("a", "x", [1.0], Stamp(1, 0, 0)))
    registered.drop_incomplete(Stamp(1, 0, 0))
    assert registered.dropped == 3


def test_a_kind_may_come_from_two_publishers(joining):
    bus, registered, found = joining
    bus.deliver_batch(registered, batch("a", "x", [1.0]))
    bus.deliver_batch(registered, batch("a", "y", [2.0]))
    bus.deliver_batch(registered, batch("b", "xyz", [3.0, 4.0, 5.0]))
    assert found.singles == [("x", 1.0, 3.0), ("y", 2.0, 4.0)]
    registered.drop_incomplete(STAMP)
    assert (found.batches, registered.dropped) == ([], 1)


def test_a_second_publisher_completes_what_the_first_has_left(joining):
    bus, registered, found = joining
    bus.deliver_batch(registered, batch("b", "xyz", [3.0, 4.0, 5.0]))
    bus.deliver_batch(registered, batch("a", "x", [1.0]))
    bus.deliver_batch(registered, batch("a", "y", [2.0]))
    registered.drop_incomplete(STAMP)
    assert (found.batches, found.singles) == ([[("x", 1.0, 3.0)]], [("y", 2.0, 4.0)])
    assert registered.dropped == 1


@pytest.mark.parametrize("batch_first", [True, False])
def test_batches_join_with_single_messages(joining, batch_first):
    bus, registered, found = joining
    messages = [ModuleMessage(STAMP, "b", value, None, name, "", name) for name, value in (("x", 3.0), ("y", 4.0))]
    if batch_first:
        bus.deliver_batch(registered, batch("a", "xy", [1.0, 2.0]))
    for message in messages:
        registered.deliver(message)
    if not batch_first:
        bus.deliver_batch(registered, batch("a", "xy", [1.0, 2.0]))
    assert (found.batches, found.singles) == ([], [("x", 1.0, 3.0), ("y", 2.0, 4.0)])


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
            bus.deliver_batch(registered, batch(kind, [f"m{step}", "x"], [1.0, 2.0], stamp))
        registered.drop_incomplete(stamp)
    assert len(registered.subscriber.batches) == 100
    assert len(registered._common) < 20
