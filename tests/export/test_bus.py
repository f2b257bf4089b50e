"""Registration is checked as a whole, delivery is in order, and errors of a subscriber affect nothing else."""

import logging
import math
import re
from dataclasses import FrozenInstanceError
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ikkuna.errors import ClosedError, ConfigError, ConfigTypeError, LogDirError, PluginError, UnknownKindError
from ikkuna.export import Exporter, subscriber
from ikkuna.export.messages import MessageBatch, MessageBus, ModuleMessage, NetworkMessage, Stamp, get_default_bus
from ikkuna.export.subscriber import (
    CallbackSubscriber,
    LossSubscriber,
    MeanSubscriber,
    NormSubscriber,
    RatioSubscriber,
    Subscriber,
    Subscription,
    TrainAccuracySubscriber,
    VarianceSubscriber,
)
from ikkuna.metrics.bus.delivery import Event, Item
from ikkuna.metrics.messages.kinds import BUILT_IN
from ikkuna.metrics.subscriber.registered import Registered
from ikkuna.testing import RecordingBackend
from tests.zoo import CASES, Loop, mlp


class Minimal(Subscriber):
    def compute(self, message):
        pass


class Doubling(Subscriber):
    """Publishes the double of each value."""

    derived = True
    fields = ("mean",)

    def compute(self, message):
        self.emit(message, 2 * message.record.mean)


def run(bus, *subscribers, steps=3, case="mlp", on_error="disable"):
    loop = Loop(CASES[case])
    with Exporter(message_bus=bus, on_error=on_error) as exporter:
        exporter.add_modules(loop.model)
        exporter.set_loss(loop.loss)
        for s in subscribers:
            bus.register_subscriber(s)
        losses = loop.run(steps)
        health = exporter.health()
    return losses, health


SETUP_ERRORS = {
    "unknown kind": (
        lambda bus: NormSubscriber("weigths", message_bus=bus),
        UnknownKindError,
        "unknown kind 'weigths'; did you mean 'weights'",
    ),
    "subsample 0": (
        lambda bus: NormSubscriber("weights", subsample=0),
        ConfigError,
        "subsample must be an int >= 1, got 0",
    ),
    "subsample -1": (
        lambda bus: NormSubscriber("weights", subsample=-1),
        ConfigError,
        "subsample must be an int >= 1, got -1",
    ),
    "subsample bool": (
        lambda bus: NormSubscriber("weights", subsample=True),
        ConfigError,
        "subsample must be an int >= 1, got True",
    ),
    "subsample float": (
        lambda bus: NormSubscriber("weights", subsample=1.5),
        ConfigError,
        "subsample must be an int >= 1, got 1.5",
    ),
    "subsample text": (
        lambda bus: NormSubscriber("weights", subsample="10"),
        ConfigError,
        "subsample must be an int >= 1, got '10'",
    ),
    "no kind": (lambda bus: CallbackSubscriber([], print), ConfigError, "at least one kind"),
    "twice a kind": (lambda bus: CallbackSubscriber(["weights", "weights"], print), ConfigError, "must differ"),
    "kind of wrong type": (lambda bus: CallbackSubscriber([3], print), ConfigTypeError, "kinds are strings, got int 3"),
    "tag": (
        lambda bus: NormSubscriber("weights", tag=3),
        ConfigTypeError,
        "tag must be the name of a pass or None, got 3",
    ),
    "modules": (lambda bus: NormSubscriber("weights", modules=3), ConfigTypeError, "modules needs a glob"),
    "no function": (
        lambda bus: CallbackSubscriber("weights", 3),
        ConfigTypeError,
        "needs a function of a message, got int",
    ),
    "one kind to a ratio": (
        lambda bus: RatioSubscriber(["weights"]),
        ConfigError,
        r"needs 2 kinds \(dividend, divisor\), got 1: 'weights'",
    ),
    "three kinds to a ratio": (
        lambda bus: RatioSubscriber(["weights", "biases", "loss"]),
        ConfigError,
        "got 3: 'weights', 'biases', 'loss'",
    ),
    "one kind twice": (lambda bus: RatioSubscriber(["weights", "weights"]), ConfigError, "needs two different kinds"),
    "ratio of module and network": (
        lambda bus: RatioSubscriber(["weights", "loss"], message_bus=bus),
        ConfigError,
        "joins kinds of modules with kinds of the network",
    ),
    "order": (lambda bus: NormSubscriber("weights", p=-1), ConfigError, "order p >= 0, got -1"),
    "order text": (lambda bus: NormSubscriber("weights", p="2"), ConfigError, "order p >= 0, got '2'"),
    "backend name": (
        lambda bus: NormSubscriber("weights", backend="tensorbaord", message_bus=bus),
        ConfigError,
        "unknown backend 'tensorbaord'",
    ),
    "backend type": (
        lambda bus: NormSubscriber("weights", backend=3),
        ConfigTypeError,
        "backend needs a name, a Backend, a logger or a function, got int 3",
    ),
    "subscriber's bus": (
        lambda bus: NormSubscriber("weights", message_bus=3),
        ConfigTypeError,
        "message_bus needs a MessageBus, got int 3",
    ),
    "join of one kind": (
        lambda bus: Minimal("weights", join=True),
        ConfigError,
        "join=True needs at least 2 kinds, got 1: 'weights'",
    ),
    "no subscriber": (lambda bus: bus.register_subscriber(3), ConfigTypeError, "needs a Subscriber, got int"),
    "class instead of subscriber": (
        lambda bus: bus.register_subscriber(NormSubscriber),
        ConfigTypeError,
        "needs a Subscriber, got the class NormSubscriber; pass an instance",
    ),
    "neither measure nor fields": (
        lambda bus: bus.register_subscriber(Minimal("weights")),
        ConfigError,
        "needs a `measure` or `fields`",
    ),
    "built-in as result": (
        lambda bus: Doubling("weights", publishes="loss", message_bus=bus),
        ConfigError,
        "'loss', which is a built-in kind",
    ),
    "bad field": (
        lambda bus: bus.register_subscriber(_with(fields=("sumq",))),
        ConfigError,
        "unknown statistics field 'sumq'",
    ),
    "fields as text": (
        lambda bus: bus.register_subscriber(_with(fields="sumsq")),
        ConfigTypeError,
        "must be a collection of names",
    ),
    "bad merge": (
        lambda bus: bus.register_subscriber(_with(fields=("n",), merge="mean")),
        ConfigError,
        "merge must be one of",
    ),
    "exporter depth": (lambda bus: Exporter(depth=-2), ConfigError, "depth must be -1"),
    "exporter depth type": (lambda bus: Exporter(depth=1.5), ConfigError, "depth must be -1"),
    "exporter bus": (lambda bus: Exporter(message_bus=3), ConfigTypeError, "message_bus needs a MessageBus, got int"),
    "exporter policy": (
        lambda bus: Exporter(message_bus=bus, on_error="ignore"),
        ConfigError,
        "on_error must be one of",
    ),
    "module": (
        lambda bus: Exporter(message_bus=bus).add_modules(3),
        ConfigTypeError,
        r"needs a torch.nn.Module or a \(name, module\) pair, got int",
    ),
    "module none": (lambda bus: Exporter(message_bus=bus).add_modules(None), ConfigTypeError, "got NoneType"),
    "pair": (
        lambda bus: Exporter(message_bus=bus).add_modules((nn.ReLU(), "a")),
        ConfigTypeError,
        r"pair \(name, module\), got \(ReLU, str\)",
    ),
    "pair with a number": (
        lambda bus: Exporter(message_bus=bus).add_modules((3, nn.ReLU())),
        ConfigTypeError,
        r"pair \(name, module\), got \(int, ReLU\)",
    ),
    "pair of three": (
        lambda bus: Exporter(message_bus=bus).add_modules(("a", nn.ReLU(), "b")),
        ConfigTypeError,
        r"pair \(name, module\), got \(str, ReLU, str\)",
    ),
    "filter": (
        lambda bus: Exporter(module_filter=[nn.Conv2d], message_bus=bus).add_modules(mlp()),
        ConfigError,
        r"matches none of the 5 modules \(types present: Linear, ReLU, Tanh\)",
    ),
    "filter type": (
        lambda bus: Exporter(module_filter=[3], message_bus=bus).add_modules(mlp()),
        ConfigTypeError,
        "module_filter needs",
    ),
    "model": (
        lambda bus: Exporter(message_bus=bus).set_model(None),
        ConfigTypeError,
        "set_model.. needs a torch.nn.Module, got NoneType",
    ),
    "loss": (
        lambda bus: Exporter(message_bus=bus).set_loss("cross_entropy"),
        ConfigTypeError,
        "set_loss.. needs a module such as nn.CrossEntropyLoss.. or a function",
    ),
}


def _with(**attributes):
    return type("Made", (Minimal,), attributes)("weights", backend="null")


@pytest.mark.fault(1, 2, 3, 4, 5, 7, 8, 11, 12, 13, 20)
@pytest.mark.parametrize("name", SETUP_ERRORS)
def test_invalid_arguments_raise_at_once_and_change_nothing(name, bus):
    act, error, text = SETUP_ERRORS[name]
    with pytest.raises(error, match=text):
        act(bus)
    assert bus.registered == ()
    assert bus.kinds == BUILT_IN
    for source in bus.sources:
        source.close()


def test_every_error_is_also_the_python_one():
    assert issubclass(ConfigTypeError, TypeError)
    assert issubclass(ConfigTypeError, ValueError)
    assert issubclass(UnknownKindError, ValueError)


@pytest.mark.fault(20)
def test_two_models_are_refused(bus):
    with Exporter(message_bus=bus) as exporter:
        exporter.set_model(nn.Linear(2, 2))
        with pytest.raises(ConfigError, match="the model is a Linear already"):
            exporter.set_model(nn.ReLU())


@pytest.mark.fault(19)
def test_a_closed_exporter_says_so(bus):
    exporter = Exporter(message_bus=bus)
    exporter.close()
    exporter.close()
    with pytest.raises(ClosedError, match="this exporter is closed"):
        exporter.add_modules(nn.Linear(2, 2))


def test_a_pattern_that_matches_no_module_is_refused(bus):
    with Exporter(message_bus=bus) as exporter:
        exporter.add_modules(mlp())
        with pytest.raises(ConfigError, match=r"modules='features.\*' matches none of the 5 modules"):
            bus.register_subscriber(NormSubscriber("weights", modules="features.*"))
        assert bus.registered == ()


def test_a_result_can_be_subscribed_to_once_it_is_announced(bus):
    recording = RecordingBackend()
    with pytest.raises(UnknownKindError):
        bus.register_subscriber(MeanSubscriber("weights_norm2"))
    chain = (
        NormSubscriber("weights", backend=recording),
        Doubling("weights_norm2", publishes="doubled", backend=recording),
    )
    run(bus, *chain, steps=1)
    norms = {s.name: v for s, v, _ in recording.values if s.kind == "weights_norm2"}
    doubled = {s.name: v for s, v, _ in recording.values if s.kind == "doubled"}
    assert doubled == {name: 2 * value for name, value in norms.items()}
    assert len(norms) == 3


def test_a_subscriber_of_tensors_is_refused_a_result(bus):
    bus.register_subscriber(NormSubscriber("weights", backend="null"))
    with pytest.raises(ConfigError, match="is a result and carries a float"):
        bus.register_subscriber(LossLike("weights_norm2"))


class LossLike(Minimal):
    fields = ("mean",)


@pytest.mark.fault(33)
def test_a_cycle_of_results_is_refused(bus):
    bus.register_subscriber(Doubling("weights", publishes="a", backend="null"))
    bus.register_subscriber(Doubling("a", publishes="b", backend="null"))
    with pytest.raises(ConfigError, match="cycle of results"):
        bus.register_subscriber(Doubling("b", publishes="a", modules="x", backend="null"))
    assert len(bus.registered) == 2


def test_a_result_has_one_publisher_for_a_pass_and_module(bus):
    bus.register_subscriber(NormSubscriber("weights", modules="0", backend="null"))
    bus.register_subscriber(NormSubscriber("weights", modules="1", backend="null"))
    bus.register_subscriber(NormSubscriber("weights", tag="testing", modules="0", backend="null"))
    with pytest.raises(ConfigError, match=r"'weights_norm2' is published already.*publishes="):
        bus.register_subscriber(NormSubscriber("weights", backend="null"))
    bus.register_subscriber(NormSubscriber("weights", publishes="another", backend="null"))


@pytest.mark.parametrize("tags", [(None, "testing"), ("testing", None), (None, None), (None, "training")])
def test_a_subscriber_of_every_pass_overlaps_with_that_of_one_pass(bus, tags):
    first, second = (NormSubscriber("weights", tag=tag, backend="null") for tag in tags)
    bus.register_subscriber(first)
    with pytest.raises(ConfigError, match="'weights_norm2' is published already, by .*, for the same pass and modules"):
        bus.register_subscriber(second)
    assert [registered.subscriber for registered in bus.registered] == [first]


def test_patterns_overlap_if_they_match_a_common_module(bus):
    with Exporter(message_bus=bus) as exporter:
        exporter.add_modules(mlp())  # the modules 0 to 4
        bus.register_subscriber(NormSubscriber("weights", modules="[0-2]", backend="null"))
        with pytest.raises(ConfigError, match="is published already"):
            bus.register_subscriber(NormSubscriber("weights", modules=["2", "4"], backend="null"))
        bus.register_subscriber(NormSubscriber("weights", modules=["3", "4"], backend="null"))
    bus.register_subscriber(NormSubscriber("weights", modules="0", backend="null"))
    with pytest.raises(ConfigError, match="is published already"):  # the same pattern, before there are modules
        bus.register_subscriber(NormSubscriber("weights", modules="0", backend="null"))


def test_a_removed_subscriber_gets_nothing_more_and_can_come_back(bus):
    got = []
    s = CallbackSubscriber("batch_finished", got.append, backend="null")
    loop = Loop(CASES["mlp"])
    with Exporter(message_bus=bus) as exporter:
        exporter.add_modules(loop.model)
        handle = bus.register_subscriber(s)
        loop.run(1)
        handle.remove()
        handle.remove()
        loop.run(1)
        bus.register_subscriber(s)
        loop.run(1)
    assert [m.global_step for m in got] == [0, 2]


def test_a_subscriber_registers_once(bus):
    s = NormSubscriber("weights", backend="null", message_bus=bus)
    with pytest.raises(ConfigError, match="is registered already"):
        bus.register_subscriber(s)


def test_registrations_together_prepare_the_exporters_once_also_after_an_error(bus, monkeypatch):
    calls = []
    with Exporter(message_bus=bus) as exporter:
        exporter.add_modules(mlp())
        changed = exporter._session.plans.demand_changed
        monkeypatch.setattr(
            exporter._session.plans, "demand_changed", lambda: (calls.append(bus.registered), changed())
        )
        with bus.registering(), bus.registering():
            handles = [bus.register_subscriber(NormSubscriber(kind, backend="null")) for kind in ("weights", "biases")]
            assert calls == []
        assert calls == [bus.registered]
        calls.clear()
        with pytest.raises(ConfigError, match="is registered already"), bus.registering():
            bus.register_subscriber(bus.registered[0].subscriber)
        assert calls == [bus.registered]
        assert len(handles) == 2


def test_constructing_without_a_bus_touches_nothing(bus):
    NormSubscriber("weights")
    assert get_default_bus().registered == ()


@pytest.mark.fault(28)
def test_a_constructor_that_raises_after_the_base_leaves_nothing_on_the_bus(bus):
    class Raising(Minimal):
        def __init__(self):
            super().__init__("batch_finished", message_bus=bus, backend="null")
            raise RuntimeError("late")

    with pytest.raises(RuntimeError, match="late"):
        Raising()
    assert bus.registered == ()


@pytest.mark.fault(36)
def test_delivery_is_in_order_of_registration(bus):
    order = []
    run(
        bus,
        *(CallbackSubscriber("batch_finished", lambda m, i=i: order.append(i), backend="null") for i in range(5)),
        steps=2,
    )
    assert order == [0, 1, 2, 3, 4] * 2


class Failing(Subscriber):
    def __init__(self, where, exception=ValueError, **options):
        super().__init__("weights", modules="0", backend="null", **options)
        self.where = where
        self.exception = exception
        self.calls = 0

    def measure(self, message):
        self.calls += self.where == "measure"
        if self.where == "measure":
            raise self.exception("on purpose")
        return message.data.sum().reshape(1)

    def compute(self, message):
        self.calls += self.where == "compute"
        raise self.exception("on purpose")


@pytest.mark.fault(29)
@pytest.mark.parametrize("where", ["measure", "compute"])
def test_a_failing_subscriber_is_logged_then_disabled_and_training_is_untouched(where, bus, caplog):
    recording = RecordingBackend()
    bad = Failing(where)
    reference = Loop(CASES["mlp"]).run(15)
    losses, health = run(bus, bad, NormSubscriber("weights", backend=recording), steps=15)
    assert all(torch.equal(a, b) for a, b in zip(losses, reference, strict=True))
    assert bad.calls == 10
    assert health.errors == 10
    assert health.disabled == ("Failing",)
    assert "disabled after 10 consecutive failures; last: ValueError: on purpose" in caplog.text
    assert sum(f"failed in {where}" in record.message for record in caplog.records) == 2
    assert len(recording.values) == 15 * 3


def test_a_disabled_subscriber_is_no_longer_called_with_events(bus):
    calls = []

    def fail(message):
        calls.append(message.global_step)
        raise ValueError("on purpose")

    run(bus, CallbackSubscriber("batch_finished", fail, backend="null"), steps=15)
    assert calls == list(range(10))


def test_a_disabled_subscriber_samples_and_takes_nothing():
    registered = Registered(NormSubscriber("weights"))
    batch = MessageBatch.of(ModuleMessage(Stamp(0, 0, 0), "weights", module="0"))
    assert registered.samples(batch.stamp)
    assert registered.select(batch) is batch
    assert (registered.seconds, registered.dropped) == (0.0, 0)
    registered.disabled = True
    assert not registered.samples(batch.stamp)
    assert registered.select(batch) is None


def test_with_on_error_log_a_failing_subscriber_is_never_disabled(bus):
    bad = Failing("compute")
    _, health = run(bus, bad, steps=15, on_error="log")
    assert (bad.calls, health.errors, health.disabled) == (15, 15, ())


def test_with_on_error_raise_errors_are_raised(bus):
    with pytest.raises(ValueError, match="on purpose"):
        run(bus, Failing("compute"), on_error="raise")


def test_the_first_tenth_and_hundredth_failure_are_logged(bus, caplog):
    run(bus, Failing("compute"), steps=101, on_error="log")
    assert caplog.text.count("subscriber Failing(weights) failed in compute") == 3


def test_errors_of_a_log_handler_are_suppressed_by_the_error_guard(bus):
    class Broken(logging.Handler):
        def emit(self, record):
            raise OSError("the log is full")

    logger, broken = logging.getLogger("ikkuna"), Broken()
    logger.addHandler(broken)
    try:
        bus.error_guard.report_internal("a hook", ValueError("on purpose"))
        bus.error_guard.disable(Registered(Failing("compute")), "a test")
    finally:
        logger.removeHandler(broken)
    assert bus.error_guard.errors == 2
    assert bus.error_guard.disabled == ["Failing"]


def test_a_subscriber_that_is_registered_again_has_no_failures(bus):
    bad = Failing("compute")
    run(bus, bad, steps=10)
    with Exporter(message_bus=bus):
        bus.register_subscriber(bad)
        [registered] = bus.registered
        assert not registered.disabled
        assert registered.failures.add("compute") == 1


def test_seconds_of_subscribers_with_the_same_class_and_kinds_are_summed(bus):
    with Exporter(message_bus=bus) as exporter:
        for p in (1, 2):
            bus.register_subscriber(NormSubscriber("weights", p=p, backend="null"))
        for registered in bus.registered:
            registered.seconds = 1.5
        assert exporter.health().seconds == {"NormSubscriber(weights)": 3.0}


@pytest.mark.fault(32)
def test_running_out_of_memory_disables_at_once(bus):
    bad = Failing("measure", torch.OutOfMemoryError)
    run(bus, bad)
    assert bad.calls == 1


@pytest.mark.fault(31)
def test_keyboard_interrupt_is_not_caught(bus):
    with pytest.raises(KeyboardInterrupt):
        run(bus, Failing("measure", KeyboardInterrupt))


@pytest.mark.fault(43)
def test_a_subscriber_whose_repr_raises_is_logged(bus, caplog):
    class Mute(Failing):
        def __repr__(self):
            raise RuntimeError("no name")

    run(bus, Mute("compute"), steps=1)
    assert "subscriber Mute(weights) failed in compute" in caplog.text


@pytest.mark.fault(34)
def test_the_emission_of_a_kind_that_is_not_published_is_a_failure(bus, caplog):
    class Wrong(Doubling):
        def compute(self, message):
            self.emit(message, 1.0, kind="other")

    run(bus, Wrong("weights", publishes="right", backend="null"), steps=1)
    assert "emits 'other' but publishes ['right']" in caplog.text


def test_an_emission_without_publishes_is_a_failure(bus, caplog):
    run(bus, Doubling("weights", backend="null"), steps=1)
    assert "Doubling emits a value but publishes no kind; pass publishes=, or call show()" in caplog.text


@pytest.mark.fault(46)
def test_a_frozen_weight_is_no_loss(bus):
    """It has no update, so that its bundle stays incomplete, in every step."""
    recording = RecordingBackend()
    _, health = run(bus, RatioSubscriber(["weight_updates", "weights"], backend=recording), case="frozen", steps=2)
    assert [(s.name, step) for s, _, step in recording.values] == [("head", 0), ("head", 1)]
    assert health.dropped == 0


@pytest.mark.fault(46)
def test_an_incomplete_bundle_is_dropped_and_counted():
    registered = Registered(CallbackSubscriber(["activations", "layer_gradients"], lambda _: None, join=True))
    assert registered.join([MessageBatch.of(ModuleMessage(Stamp(0, 0, 0), "activations", module="a"))]) == []
    registered.drop_incomplete(Stamp(0, 0, 0))
    assert registered.dropped == 1


def test_bundles_join_messages_of_the_same_step_module_and_path():
    class Joining(Minimal):
        def compute(self, message):
            got.append([(m.stamp.global_step, m.module, m.path, m.kind) for m in message.messages.values()])

    got = []
    registered, bus = Registered(Joining(["weights", "weight_updates"], join=True)), MessageBus()
    places = [(step, module, path) for step in (0, 1) for module in "ab" for path in ("", "weight_ih_l0")]
    for kind in ("weight_updates", "weights"):
        for step, module, path in places:
            bus.deliver(registered, MessageBatch.of(ModuleMessage(Stamp(step, 0, 0), kind, module=module, path=path)))
    assert got == [[(*place, "weights"), (*place, "weight_updates")] for place in places]


def test_a_ratio_is_the_quotient_of_the_norms(bus):
    recording = RecordingBackend()
    parts = RecordingBackend()
    run(
        bus,
        RatioSubscriber(["weight_updates", "weights"], backend=recording),
        NormSubscriber("weight_updates", backend=parts),
        NormSubscriber("weights", backend=parts),
    )
    norm = {(s.kind, s.name, step): v for s, v, step in parts.values}
    for series, value, step in recording.values:
        assert value == norm["weight_updates_norm2", series.name, step] / norm["weights_norm2", series.name, step]
    assert len(recording.values) == 9


@pytest.mark.fault(52)
def test_a_ratio_to_nothing_is_nan(bus):
    """The ratio is 0/0 for a layer that does not change, and x/0 for a layer whose weights were 0."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    nn.init.zeros_(model[0].weight)
    nn.init.zeros_(model[1].weight)
    nn.init.ones_(model[0].bias)
    recording = RecordingBackend()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(model)
        bus.register_subscriber(RatioSubscriber(["weight_updates", "weights"], backend=recording))
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert model[0].weight.eq(0).all()
    assert model[1].weight.ne(0).all()
    assert [(series.name, math.isnan(value)) for series, value, _ in recording.values] == [("0", True), ("1", True)]


def test_accuracy_counts_right_answers(bus):
    recording = RecordingBackend()
    loop = Loop(CASES["mlp-accumulated"])
    seen = []
    loop.loss.register_forward_hook(lambda module, args, output: seen.append((args[0].argmax(1) == args[1]).float()))
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(loop.model)
        exporter.set_loss(loop.loss)
        bus.register_subscriber(TrainAccuracySubscriber(backend=recording))
        bus.register_subscriber(LossSubscriber(backend=recording))
        loop.run(1)
    values = {s.kind: v for s, v, _ in recording.values}
    assert values["train_accuracy"] == pytest.approx(torch.cat(seen).mean().item())
    assert set(values) == {"train_accuracy", "nonfinite_rows", "loss"}


def test_without_set_loss_the_missing_labels_are_logged_once(bus, caplog):
    loop = Loop(CASES["mlp"])
    loop.loss = lambda output, labels: -output.log_softmax(1)[range(len(labels)), labels].mean()  # no loss of torch
    with Exporter(message_bus=bus) as exporter:
        exporter.add_modules(loop.model)
        bus.register_subscriber(TrainAccuracySubscriber(backend="null"))
        loop.run(3)
    assert caplog.text.count("loss = monitor.set_loss(loss)") == 1


def test_two_exporters_share_a_bus_if_their_names_differ(bus):
    one, other = Exporter(message_bus=bus), Exporter(message_bus=bus)
    one.add_modules(("generator", mlp()))
    with pytest.raises(ConfigError, match="observes a module 'generator.0' already"):
        other.add_modules(("generator", mlp()))
    other.add_modules(("discriminator", mlp()))
    one.close()
    assert [source.module_names for source in bus.sources] == [other.module_names]
    other.close()


def test_another_log_dir_on_one_bus_is_refused(bus, tmp_path):
    one = Exporter(message_bus=bus, log_dir=tmp_path / "a")
    with pytest.raises(ConfigError, match="writes to .* already"):
        Exporter(message_bus=bus, log_dir=tmp_path / "b")
    one.close()
    Exporter(message_bus=bus, log_dir=tmp_path / "b").close()


@pytest.mark.fault(9)
def test_a_module_that_is_added_twice_is_observed_once(bus, caplog):
    model = mlp()
    got = []
    with caplog.at_level(logging.INFO), Exporter(message_bus=bus) as exporter:
        exporter.add_modules(model)
        exporter.add_modules(model)
        bus.register_subscriber(CallbackSubscriber("activations", got.append, modules="0", backend="null"))
        model(torch.ones(1, 8))
    assert len(got) == 1
    assert "observed already" in caplog.text


def test_a_subscriber_that_drains_the_bus_receives_one_message_after_the_other(bus):
    got = []

    def drain(message):
        got.append(("begin", message.global_step))
        bus.drain()
        got.append(("end", message.global_step))

    with Exporter(message_bus=bus, on_error="raise"):
        bus.register_subscriber(CallbackSubscriber("batch_finished", drain, backend="null"))
        for step in range(2):
            bus.queue.append(Event(NetworkMessage(Stamp(step, 0, 0), "batch_finished")))
        bus.drain()
    assert got == [("begin", 0), ("end", 0), ("begin", 1), ("end", 1)]


class Pending:
    """Measurements that have not been copied to the host yet."""

    def __init__(self, got):
        self.got = got
        self.is_here = False

    def arrived(self):
        return self.is_here

    def deliver(self, bus):
        self.got.append(self)


def test_delivery_stops_at_measurements_that_have_not_arrived(bus):
    got = []
    first, second = Pending(got), Pending(got)
    second.is_here = True
    bus.queue.append(first)
    bus.queue.append(second)
    bus.drain()
    assert got == []
    first.is_here = True
    bus.drain()
    assert got == [first, second]
    last = Pending(got)
    bus.queue.append(last)
    bus.drain(wait=True)
    assert got == [first, second, last]


@pytest.mark.parametrize("where", ["arrived", "deliver"])
def test_measurements_that_cannot_be_delivered_are_lost_alone(bus, monkeypatch, where):
    got = []
    bad, good = Pending(got), Pending(got)
    good.is_here = bad.is_here = True

    def fail(*_):
        raise OverflowError("on purpose")

    monkeypatch.setattr(bad, where, fail)
    bus.queue.append(bad)
    bus.queue.append(good)
    bus.drain()
    assert got == [good]
    assert bus.error_guard.errors == 1


def test_a_second_run_of_a_bus_counts_its_own_errors(bus):
    assert run(bus, Failing("compute"), steps=12)[1].disabled == ("Failing",)
    _, health = run(bus, NormSubscriber("weights", backend="null"), steps=1)
    assert (health.errors, health.disabled) == (0, ())


def test_a_subscriber_cannot_evaluate_after_it_was_removed(bus):
    class Evaluating(LossLike):
        needs_model = True

    first, second = Evaluating("weights", backend="null"), Evaluating("biases", backend="null")
    with Exporter(message_bus=bus) as exporter:
        exporter.add_modules(mlp())
        handle = bus.register_subscriber(first)
        bus.register_subscriber(second)
        assert first.evaluate is not None
        handle.remove()
        assert first.evaluate is None
        assert second.evaluate is not None
    assert second.evaluate is None


def epoch(kind, number):
    return NetworkMessage(Stamp(7, 0, number), kind)


@pytest.mark.parametrize("kind", ["epoch_started", "epoch_finished"])
def test_events_of_epochs_are_sampled_by_epochs_and_not_by_steps(kind):
    subscription = Subscription([kind, "batch_finished"], subsample=3)
    assert [number for number in range(7) if subscription.takes(epoch(kind, number))] == [0, 3, 6]
    batches = [NetworkMessage(Stamp(step, 0, 1), "batch_finished") for step in range(7)]
    assert [message.global_step for message in batches if subscription.takes(message)] == [0, 3, 6]


def test_events_of_epochs_arrive_at_every_subsampled_epoch(bus):
    got = []
    loop = Loop(CASES["mlp"])
    with Exporter(message_bus=bus) as exporter:
        exporter.add_modules(loop.model)
        bus.register_subscriber(CallbackSubscriber("epoch_finished", got.append, subsample=2, backend="null"))
        for _ in range(5):
            loop.run(3)
            exporter.epoch_finished()
    assert [(message.epoch, message.global_step) for message in got] == [(0, 2), (2, 8), (4, 14)]


def test_other_passes_are_always_sampled():
    subscription = Subscription("weights", tag=None, subsample=4)
    assert [step for step in range(9) if subscription.samples(Stamp(step, step, 0))] == [0, 4, 8]
    assert all(subscription.samples(Stamp(step, step, 0, "testing")) for step in range(9))
    assert not Subscription("weights").samples(Stamp(0, 0, 0, "testing"))
    assert not Subscription("weights", tag="testing").samples(Stamp(0, 0, 0))


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        (None, ["a", "a.b", "b"]),
        ("a*", ["a", "a.b"]),
        (re.compile("a"), ["a"]),
        (["b", re.compile(r"a\..")], ["a.b", "b"]),
        (lambda name: name.endswith("b"), ["a.b", "b"]),
    ],
)
def test_a_pattern_selects_modules(pattern, names):
    subscription = Subscription("weights", modules=pattern)
    messages = [ModuleMessage(Stamp(0, 0, 0), "weights", module=name) for name in ("a", "a.b", "b")]
    assert [message.module for message in messages if subscription.takes(message)] == names
    assert not subscription.takes(ModuleMessage(Stamp(0, 0, 0), "biases", module="b"))


def test_a_subscription_cannot_be_changed():
    subscription = Subscription("weights")
    with pytest.raises(FrozenInstanceError):
        subscription.subsample = 2


@pytest.mark.fault(223)
def test_a_star_import_offers_the_installed_metrics():
    names = {}
    exec("from ikkuna.export.subscriber import *", names)
    assert {"NormSubscriber", "LossSubscriber", "Subscriber", "name_results"} <= names.keys()
    assert issubclass(names["NormSubscriber"], names["Subscriber"])


def test_importing_the_package_loads_no_plugin():
    import subprocess
    import sys

    code = "import sys, ikkuna.export.subscriber; print(any('ikkuna_subscribers' in m for m in sys.modules))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        == "False"
    )


def test_the_error_about_an_unknown_subscriber_lists_the_known_ones():
    with pytest.raises(
        PluginError,
        match=r"unknown subscriber 'NromSubscriber'; did you mean 'NormSubscriber'\? available: .*'NormSubscriber'",
    ):
        _ = subscriber.NromSubscriber
    with pytest.raises(AttributeError, match="'something'"):
        _ = subscriber.something


def test_the_default_bus_is_one():
    assert get_default_bus() is get_default_bus()
    assert isinstance(get_default_bus(), MessageBus)


def test_results_of_an_optimizers_state_are_results(bus):
    """Their names begin with the prefix of the built-in kinds of states, of which there is no complete list."""
    recording = RecordingBackend()
    loop = Loop(CASES["mlp"])
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(loop.model)
        bus.register_subscriber(NormSubscriber("weight_state_exp_avg", backend="null"))
        bus.register_subscriber(MeanSubscriber("weight_state_exp_avg_norm2", backend=recording))
        with pytest.raises(ConfigError, match="needs|measures"):
            bus.register_subscriber(VarianceSubscriber("weight_state_exp_avg_norm2", backend="null"))
        with pytest.raises(ConfigError, match="cannot publish 'weight_state_exp_avg'"):
            bus.register_subscriber(NormSubscriber("weights", publishes="weight_state_exp_avg", backend="null"))
        loop.run(1)
    state = loop.optimizer.state[loop.model[0].weight]["exp_avg"]
    assert next(v for s, v, _ in recording.values if s.name == "0") == pytest.approx(state.norm().item(), rel=1e-6)


@pytest.mark.fault(16)
def test_a_scripted_module_is_refused(bus):
    scripted = torch.jit.script(nn.Linear(2, 2))
    with Exporter(message_bus=bus) as exporter:
        with pytest.raises(
            ConfigError, match="hooks cannot be attached to a scripted module; add the module before scripting"
        ):
            exporter.add_modules(scripted)
        assert exporter.modules == ()


@pytest.mark.fault(14)
@pytest.mark.parametrize(
    ("log_dir", "text"),
    [("", "is a path, got ''"), (5, "int"), ("a\0b", "is a path, got"), (b"run", "bytes")],
    ids=["empty", "int", "nul", "bytes"],
)
def test_an_invalid_log_dir_is_refused(log_dir, text, bus):
    with pytest.raises(ConfigError, match=text):
        Exporter(message_bus=bus, log_dir=log_dir)
    assert bus.sources == ()
    assert bus.log_dir is None


@pytest.mark.fault(67)
def test_a_log_dir_that_is_a_file_is_refused(bus, tmp_path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(LogDirError, match="file"):
        Exporter(message_bus=bus, log_dir=file)
    assert bus.sources == ()


@pytest.mark.fault(67)
def test_the_default_log_dir_is_checked_when_a_subscriber_is_registered(bus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").touch()
    with Exporter(message_bus=bus) as exporter:
        exporter.add_modules(nn.Linear(2, 2))
        bus.register_subscriber(NormSubscriber("weights", backend="null"))
        with pytest.raises(LogDirError, match="run"):
            bus.register_subscriber(NormSubscriber("weight_gradients", backend="jsonl"))
        assert len(bus.registered) == 1


@pytest.mark.fault(30)
def test_a_success_resets_the_count_of_failures(bus):
    class Moody(Minimal):
        calls = 0
        fields = ("n",)

        def compute(self, message):
            self.calls += 1
            if self.calls % 5:
                raise ValueError("four times in five")

    moody = Moody("weights", modules="0", backend="null")
    _, health = run(bus, moody, steps=30)
    assert moody.calls == 30
    assert health.disabled == ()
    assert health.errors == 24


@pytest.mark.fault(35)
def test_registrations_during_delivery_take_effect_with_the_next_message(bus):
    got = []
    handles = []
    late = CallbackSubscriber("batch_finished", lambda m: got.append(("late", m.global_step)), backend="null")

    def first(message):
        got.append(("first", message.global_step))
        if message.global_step == 0:
            bus.register_subscriber(late)
        if message.global_step == 1:
            handles[0].remove()

    loop = Loop(CASES["mlp"])
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(loop.model)
        bus.register_subscriber(CallbackSubscriber("batch_finished", first, backend="null"))
        leaving = CallbackSubscriber("batch_finished", lambda m: got.append(("leaving", m.global_step)), backend="null")
        handles.append(bus.register_subscriber(leaving))
        loop.run(3)
    assert [g for g in got if g[0] == "first"] == [("first", 0), ("first", 1), ("first", 2)]
    assert ("leaving", 0) in got
    assert ("leaving", 2) not in got
    assert [g for g in got if g[0] == "late"] == [("late", 1), ("late", 2)]


@pytest.mark.fault(54, 55)
def test_inference_mode_is_ignored(bus):
    loop = Loop(CASES["mlp"])
    recording = RecordingBackend()
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(loop.model)
        bus.register_subscriber(NormSubscriber("activations", backend=recording))
        bus.register_subscriber(NormSubscriber("activations", tag="testing", publishes="held_out", backend=recording))
        bus.register_subscriber(
            NormSubscriber("activations", p=3, tag="testing", publishes="held_out_3", backend=recording)
        )
        loop.run(1)
        with torch.inference_mode():
            loop.model(loop.batch()[0])
        exporter.test()
        with torch.inference_mode():
            loop.model(loop.batch()[0])
        exporter.train()
        loop.run(1)
    assert {(s.kind, step) for s, _, step in recording.values} == {
        *(("activations_norm2", 0), ("activations_norm2", 1), ("held_out", 0), ("held_out_3", 0))
    }


class Recorded(Item):
    """An item that notes what happens to it, and is interrupted."""

    def __init__(self, number, calls, error=None):
        self.stamp, self.calls, self.error = Stamp(number, number, 0), calls, error

    def deliver(self, bus):
        self.calls.append(("delivered", self.stamp.global_step))
        bus.expected = {None: []} if self.error else {}
        if self.error is not None:
            raise self.error

    def abandon(self, bus):
        self.calls.append(("abandoned", self.stamp.global_step, dict(bus.expected)))


def test_an_interrupted_item_is_abandoned_and_those_behind_it_are_delivered(bus, caplog):
    calls = []
    bus.queue.extend([Recorded(1, calls, KeyboardInterrupt()), Recorded(2, calls), Recorded(3, calls)])
    with pytest.raises(KeyboardInterrupt):
        bus.drain()
    assert calls == [("delivered", 1)]
    bus.drain()
    assert calls == [("delivered", 1), ("abandoned", 1, {}), ("delivered", 2), ("delivered", 3)]
    assert not bus.queue
    assert caplog.messages == ["an exception has interrupted the delivery of step 1; some of its values are missing"]


def test_an_item_with_an_error_is_lost_alone(bus):
    calls = []
    bus.queue.extend([Recorded(1, calls, ValueError("wrong")), Recorded(2, calls)])
    bus.drain()
    assert calls == [("delivered", 1), ("delivered", 2)]
    assert bus.error_guard.errors == 1
    assert not bus.queue


def test_values_that_an_item_leaves_reach_the_run(bus, monkeypatch):
    added = []
    monkeypatch.setattr(bus, "run", SimpleNamespace(add_all=lambda *arguments: added.append(arguments)))

    class Adding(Recorded):
        def deliver(self, bus):
            bus.added["targets", 7] = (("tb",), ["value"])
            bus.added["others", 8] = (("csv",), [])

    bus.queue.append(Adding(1, []))
    bus.drain()
    assert added == [(["value"], 7, ("tb",))]
    assert bus.added == {}


def test_a_subscriber_that_has_handled_an_event_early_does_not_get_it_again(bus):
    handled = []
    subscribers = [CallbackSubscriber("epoch_finished", lambda message, i=i: handled.append(i)) for i in range(2)]
    for each in subscribers:
        bus.register_subscriber(each)
    early = next(each for each in bus.registered if each.subscriber is subscribers[0])
    bus.publish(NetworkMessage(Stamp(0, 0, 0), "epoch_finished"), {early: ()})
    assert handled == [1]
