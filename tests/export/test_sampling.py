"""Which steps are sampled: ranges, schedules, and changes while training runs."""

import logging

import pytest
import torch
from torch import nn

import ikkuna
from ikkuna import schedules
from ikkuna.errors import ConfigError, ConfigTypeError
from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus, Stamp
from ikkuna.export.subscriber import (
    CallbackSubscriber,
    HistogramSubscriber,
    LossSubscriber,
    NormSubscriber,
    RatioSubscriber,
    SpectralNormSubscriber,
)
from ikkuna.metrics.subscriber.registered import Registered
from ikkuna.observation.rows.plan import Demand
from ikkuna.testing import RecordingBackend


def train(exporter, model, steps, each=lambda step: None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().mean().backward()
        optimizer.step()
        each(step)
    exporter.close()


def watched(*makes, on_error="raise"):
    model, backend = nn.Sequential(nn.Linear(3, 2)), RecordingBackend()
    exporter = Exporter(message_bus=MessageBus("sampling"), on_error=on_error)
    exporter.add_modules(model)
    for make in makes:
        exporter.message_bus.register_subscriber(make(backend))
    return exporter, model, backend


def steps_of(backend, kind="weights_norm2"):
    return [step for series, _, step in backend.values if series.kind == kind]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"every": 3}, [0, 3, 6, 9, 12]),
        ({"start": 4, "stop": 7}, [4, 5, 6]),
        ({"every": 4, "start": 5}, [8, 12]),
        ({"schedule": schedules.logarithmic(2)}, [0, 1, 4, 10]),
        ({"schedule": schedules.at(3, 5, 40)}, [3, 5]),
        ({"schedule": lambda step: step % 2, "start": 8}, [9, 11, 13]),
    ],
)
def test_ranges_and_schedules(options, expected):
    exporter, model, backend = watched(lambda backend: NormSubscriber("weights", backend=backend, **options))
    train(exporter, model, 14)
    assert steps_of(backend) == expected


def test_every_replaces_the_default_of_a_subscriber():
    assert SpectralNormSubscriber("weights", every=7).subscription.subsample == 7
    assert HistogramSubscriber("weights").subscription.subsample == 100
    with pytest.raises(ConfigError, match="every= or subsample="):
        NormSubscriber("weights", every=2, subsample=2)


@pytest.mark.parametrize(
    "options",
    [{"start": -1}, {"start": None}, {"stop": 1.5}, {"start": 5, "stop": 5}, {"every": 0}, {"stop": True}],
    ids=repr,
)
def test_wrong_ranges_are_refused(options):
    with pytest.raises(ConfigError):
        NormSubscriber("weights", **options)


def test_a_schedule_that_is_no_function_is_refused():
    with pytest.raises(ConfigTypeError, match="schedule needs a function of the step"):
        NormSubscriber("weights", schedule=10)
    with pytest.raises(ConfigError, match="per_decade"):
        schedules.logarithmic(0)


def test_results_and_joined_kinds_follow_the_schedule():
    chosen = schedules.at(1, 4)
    exporter, model, backend = watched(
        lambda backend: NormSubscriber("weights", backend=backend),
        lambda backend: RatioSubscriber(["weight_updates", "weights"], schedule=chosen, backend=backend),
        lambda backend: CallbackSubscriber("weights_norm2", lambda m: derived.append(m.global_step), schedule=chosen),
    )
    derived = []
    train(exporter, model, 6)
    assert steps_of(backend, "weight_updates_weights_ratio") == derived == [1, 4]


def test_a_schedule_is_called_once_for_each_step():
    calls = []
    exporter, model, _ = watched(
        lambda backend: NormSubscriber("weights", backend=backend, schedule=lambda step: calls.append(step) or True),
        lambda backend: CallbackSubscriber("weights_norm2", print, schedule=lambda step: False, backend=backend),
    )
    train(exporter, model, 5)
    assert calls == [*range(6)]


def test_a_schedule_that_raises_disables_its_subscriber_and_nothing_else(caplog):
    def broken(step):
        raise ZeroDivisionError("of the schedule")

    exporter, model, backend = watched(
        lambda backend: NormSubscriber("weights", schedule=broken, backend=backend),
        lambda backend: NormSubscriber("biases", backend=backend),
        on_error="disable",
    )
    alone = nn.Sequential(nn.Linear(3, 2))
    alone.load_state_dict(model.state_dict())
    train(exporter, model, 20)
    with Exporter(message_bus=MessageBus()) as other:
        train(other, alone, 20)
    assert all(map(torch.equal, model.parameters(), alone.parameters()))
    assert steps_of(backend, "biases_norm2") == [*range(20)]
    assert steps_of(backend) == []
    assert exporter.health().disabled == ("NormSubscriber",)
    failures = [r for r in caplog.records if "failed in schedule" in r.getMessage()]
    assert 1 <= len(failures) < 10
    assert failures[0].levelno == logging.ERROR


# -- while training runs ------------------------------------------------------------------------------------------------


def test_pause_and_resume_apply_from_the_next_step_on_and_steps_are_counted():
    exporter, model, backend = watched(lambda backend: NormSubscriber("activations", backend=backend))

    def each(step):
        if step == 2:
            exporter.pause()
        if step == 5:
            exporter.resume()

    hooks = []
    handle = model[0].register_forward_hook(lambda module, *_: hooks.append(len(module._forward_hooks)))
    train(exporter, model, 9, each)
    handle.remove()
    assert steps_of(backend, "activations_norm2") == [0, 1, 2, 6, 7, 8]
    assert hooks == [2, 2, 2, 1, 1, 1, 2, 2, 2]


def test_every_step_after_a_spike():
    exporter, model, backend = watched(
        lambda backend: NormSubscriber("weights", every=5, backend=backend),
        lambda backend: LossSubscriber(every=4, backend=backend),
        lambda backend: NormSubscriber("weights", p=1, tag="testing", backend=backend),
    )
    train(exporter, model, 12, lambda step: exporter.sample_every({6: 1, 8: None}[step]) if step in (6, 8) else None)
    assert steps_of(backend) == [0, 5, 7, 8, 10]
    assert steps_of(backend, "loss") == [0, 4, 7, 8]
    assert steps_of(backend, "weights_norm1") == []
    with pytest.raises(ConfigError, match="sample_every"):
        Exporter(message_bus=MessageBus()).sample_every(0)


def test_a_later_exporter_of_the_bus_is_not_paused():
    exporter, model, _ = watched(lambda backend: NormSubscriber("weights", backend=backend))
    exporter.pause()
    train(exporter, model, 2)
    backend = RecordingBackend()
    exporter = Exporter(message_bus=exporter.message_bus)
    exporter.add_modules(model)
    exporter.message_bus.register_subscriber(NormSubscriber("weights", backend=backend))
    train(exporter, model, 2)
    assert steps_of(backend) == [0, 1]


def test_a_plan_has_the_subscribers_that_sample_its_step():
    asked = [
        *(NormSubscriber("weights", every=n) for n in (1, 2, 6)),
        NormSubscriber("weights", every=3, start=8),
        NormSubscriber("weights", every=2, stop=30),
        NormSubscriber("weights", tag="testing"),
        NormSubscriber("weights", schedule=lambda step: step % 5 == 2),
    ]
    asked[1].subscription = asked[1].subscription.thinned((20, 4), (60, 8))
    registered, demand = tuple(map(Registered, asked)), Demand(bus := MessageBus())
    bus.registered = registered
    for step in range(120):
        registered[0].disabled = 40 <= step < 50
        for stamp in (Stamp(step, step, 0), Stamp(step, step, 0, "testing")):
            expected = tuple(each for each in registered if each.samples(stamp))
            assert demand.of(stamp).subscriptions == expected


def test_watch_replaces_the_steps_of_its_metrics(tmp_path):
    model = nn.Sequential(nn.Linear(3, 2))
    exporter = ikkuna.watch(model, every=3, start=2, stop=9, log_dir=tmp_path, rules=None, recorder=False)
    found = {
        (r.subscription.subsample, r.subscription.start, r.subscription.stop) for r in exporter.message_bus.registered
    }
    exporter.close()
    assert found == {(3, 2, 9)}
    with pytest.raises(ConfigError, match="'error'"):
        ikkuna.watch(model, stop="soon", log_dir=tmp_path)
