"""Values that the user logs by name join the run, the step and the file of the metrics."""

import copy
import logging
import math
import pickle
import threading
from multiprocessing.context import set_spawning_popen

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader, Dataset

import ikkuna
from ikkuna.errors import ClosedError, ConfigError, ConfigTypeError
from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import CallbackSubscriber, HistogramSubscriber, NormSubscriber
from ikkuna.numerics.statistics.histogram import Histogram
from ikkuna.store.values import Matrix
from ikkuna.testing import RecordingBackend

pytestmark = pytest.mark.devices


def train(model, steps, each):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().mean().backward()
        optimizer.step()
        each(step)


@pytest.fixture
def watched():
    model, backend = nn.Sequential(nn.Linear(3, 2)), RecordingBackend()
    exporter = Exporter(message_bus=MessageBus("log"), on_error="raise")
    exporter.add_modules(model)
    exporter.message_bus.register_subscriber(NormSubscriber("weights", backend=backend))
    yield exporter, model, backend
    exporter.close()


def logged(backend, name):
    return [(step, value) for series, value, step in backend.values if (series.kind, series.name) == ("logged", name)]


def test_numbers_of_every_type_belong_to_the_last_step(watched):
    exporter, model, backend = watched
    exporter.log("before", 1)

    def each(step):
        for name, value in {"float": step + 0.5, "tensor": torch.tensor(step + 0.5), "numpy": np.float32(step + 0.5),
                            "array": np.array([step + 0.5]), "half": torch.tensor([step + 0.5], dtype=torch.bfloat16),
                            "gradient": torch.tensor(step + 0.5, requires_grad=True), "nan": math.nan}.items():  # fmt: skip
            exporter.log(name, value)

    train(model, 3, each)
    exporter.close()
    assert logged(backend, "before") == [(0, 1.0)]
    for name in ("float", "tensor", "numpy", "array", "half", "gradient"):
        assert logged(backend, name) == [(0, 0.5), (1, 1.5), (2, 2.5)]
    assert [(step, math.isnan(value)) for step, value in logged(backend, "nan")] == [(0, True), (1, True), (2, True)]
    assert exporter.health().dropped == 0


def test_a_tensor_that_changes_after_it_was_logged_keeps_its_value(watched):
    exporter, model, backend = watched
    value = torch.zeros(())
    train(model, 3, lambda step: (exporter.log("x", value), value.add_(1)))
    exporter.close()
    assert logged(backend, "x") == [(0, 0.0), (1, 1.0), (2, 2.0)]


def test_the_last_value_of_a_step_counts(watched):
    exporter, model, backend = watched
    train(model, 2, lambda step: [exporter.log("x", i) for i in range(3)])
    exporter.close()
    assert logged(backend, "x") == [(0, 2.0), (1, 2.0)]


PLACES = {"head": 100, "early": 200, "inside": 300, "end": 400}


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        (("head",), [(0, 100), (1, 101), (2, 102)]),
        (("head", "inside"), [(0, 300), (1, 301), (2, 302)]),
        (("inside",), [(0, 300), (1, 301), (2, 302)]),
        (("inside", "end"), [(0, 300), (1, 301), (2, 302), (3, 402)]),
        (("end",), [(0, 400), (1, 401), (2, 402)]),
        (("early",), [(0, 200), (1, 201), (2, 202)]),
        (("early", "inside", "end"), [(0, 300), (1, 301), (2, 302), (3, 402)]),
    ],
)
@pytest.mark.parametrize("epochs", [1, 3])
def test_a_step_has_one_value_of_a_name_wherever_it_is_logged(watched, places, expected, epochs):
    """A value for a step that has one already belongs to the next step."""
    exporter, model, backend = watched
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def log(place, step):
        if place in places:
            exporter.log("x", PLACES[place] + step, step=step if place == "early" else None)

    for step in range(3):
        log("head", step)
        optimizer.zero_grad()
        log("early", step)
        outputs = model(torch.ones(2, 3))
        log("inside", step)
        outputs.square().mean().backward()
        optimizer.step()
        if epochs == 3:
            exporter.epoch_finished()
        log("end", step)
    exporter.close()
    assert logged(backend, "x") == expected
    assert exporter.health().dropped == 0


def test_a_second_value_for_a_given_step_is_dropped_and_logged_once(watched, caplog):
    exporter, model, backend = watched
    train(model, 3, lambda step: None)
    exporter.log("x", 1.0, step=2)
    train(model, 1, lambda step: exporter.log("x", 2.0, step=3))
    exporter.epoch_finished()
    for value in (3.0, 4.0):
        exporter.log("x", value, step=3)
    exporter.close()
    assert logged(backend, "x") == [(2, 1.0), (3, 2.0)]
    assert exporter.health().dropped == 2
    [line] = caplog.messages
    assert line == "log('x'): a value of step 3 is dropped: the step has one that is stored"


def test_a_training_that_continues_adds_no_second_value_to_the_last_step_before(watched):
    exporter, model, backend = watched
    for step in range(2):
        exporter.log("x", step)
        train(model, 1, lambda step: None)
    exporter.load_state_dict(exporter.state_dict())
    for step in range(2, 4):
        exporter.log("x", step)
        train(model, 1, lambda step: None)
    exporter.close()
    assert logged(backend, "x") == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)]


def test_histograms_pictures_matrices_and_texts_are_read_by_tensorboard(tmp_path):
    model = nn.Sequential(nn.Linear(3, 2))
    picture = np.zeros((4, 5, 3), np.uint8)
    with Exporter(message_bus=MessageBus("files"), log_dir=tmp_path) as exporter:
        exporter.add_modules(model)

        def each(step):
            exporter.log("train/reward", torch.tensor(float(step)))
            exporter.log("weights", torch.arange(10.0))
            exporter.log("own", Histogram.of(torch.arange(4.0)))
            exporter.log("pixels", picture)
            exporter.log("channels first", torch.zeros(3, 6, 7, dtype=torch.uint8))
            exporter.log("matrix", Matrix(("a",), ("b",), np.ones((1, 1))))
            exporter.log("note", f"step **{step}**")

        train(model, 2, each)
    [directory] = tmp_path.iterdir()
    events = EventAccumulator(str(directory), {"histograms": 0, "images": 0}).Reload()
    assert [(e.step, e.value) for e in events.Scalars("logged/train/reward")] == [(0, 0.0), (1, 1.0)]
    assert [e.histogram_value.num for e in events.Histograms("logged/weights")] == [10, 10]
    assert [e.histogram_value.num for e in events.Histograms("logged/own")] == [4, 4]
    assert [(e.width, e.height) for e in events.Images("logged/pixels")] == [(5, 4), (5, 4)]
    assert [(e.width, e.height) for e in events.Images("logged/channels first")] == [(7, 6), (7, 6)]
    assert any("Text/logged/note" in tag for tag in events.Tags()["tensors"])


def test_numbers_are_a_kind_that_subscribers_take(watched):
    exporter, model, _ = watched
    seen = []
    note = CallbackSubscriber("logged", lambda m: seen.append((m.path, m.global_step, m.data)), every=2, backend="null")
    exporter.message_bus.register_subscriber(note)
    train(model, 4, lambda step: (exporter.log("a", step), exporter.log("text", "no number")))
    exporter.close()
    assert seen == [("a", 0, 0.0), ("a", 2, 2.0)]


def test_a_subscriber_that_measures_tensors_cannot_take_numbers(watched):
    with pytest.raises(ConfigError, match="'logged' is a result and carries a float"):
        watched[0].message_bus.register_subscriber(HistogramSubscriber("logged"))


def test_no_name_collides_with_a_kind(watched):
    exporter, model, backend = watched
    train(model, 1, lambda step: exporter.log("weights_norm2", 7.0))
    exporter.close()
    assert logged(backend, "weights_norm2") == [(0, 7.0)]
    assert [value for series, value, _ in backend.values if series.kind == "weights_norm2"] != [7.0]


def test_steps_of_the_user(watched, caplog):
    """A later step waits for its turn; a step that is over is dropped, counted, and said once."""
    exporter, model, backend = watched

    def each(step):
        if step == 1:
            exporter.log("x", 30.0, step=3)
        if step == 4:
            exporter.log("x", 1.0, step=1)
            exporter.log("x", 2.0, step=1)
            exporter.log("x", 90.0, step=9)

    train(model, 5, each)
    exporter.close()
    assert logged(backend, "x") == [(3, 30.0), (9, 90.0)]
    assert exporter.health().dropped == 2
    assert caplog.text.count("is dropped: step 4 has ended") == 1


@pytest.mark.parametrize("step", [-1, 1.5, True, "1"])
def test_steps_that_are_no_numbers_are_refused(watched, step):
    with pytest.raises(ConfigError, match="step=None or an int"):
        watched[0].log("x", 1.0, step)


@pytest.mark.parametrize(
    "value",
    [
        None,
        object(),
        [1.0, 2.0],
        {"a": 1.0},
        1j,
        torch.tensor(1j, device="cpu"),
        np.array(["a"]),
        torch.ones(2, device="cpu").to_sparse(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_of_other_types_are_refused_at_once(watched, value):
    with pytest.raises(ConfigTypeError):
        watched[0].log("x", value)


@pytest.mark.parametrize(("name", "error"), [("", ConfigError), (" ", ConfigError), (3, ConfigTypeError)])
def test_names_that_are_none_are_refused(watched, name, error):
    with pytest.raises(error, match="needs a name"):
        watched[0].log(name, 1.0)


def test_before_modules_and_after_close():
    backend = RecordingBackend()
    exporter = Exporter(message_bus=MessageBus("early"))
    exporter.message_bus.register_subscriber(CallbackSubscriber("logged", print, backend=backend))
    exporter.log("x", 1.0)
    exporter.close()
    assert logged(backend, "x") == [(0, 1.0)]
    with pytest.raises(ClosedError):
        exporter.log("x", 1.0)


def test_other_threads_may_log(watched):
    exporter, model, backend = watched

    def work(number):
        for i in range(50):
            exporter.log(f"thread{number}", i)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    train(model, 1, lambda step: [t.start() for t in threads])
    for thread in threads:
        thread.join()
    train(model, 1, lambda step: None)
    exporter.close()
    assert {logged(backend, f"thread{n}")[-1][1] for n in range(4)} == {49.0}


class Augmented(Dataset):
    """Logs in the worker; returns the value, too."""

    def __init__(self, exporter):
        self.exporter = exporter

    def __len__(self):
        return 6

    def __getitem__(self, index):
        self.exporter.log("in_worker", index)
        return torch.ones(2), float(index)


@pytest.mark.host("a forked worker cannot use a device")
def test_a_worker_of_a_data_loader_shows_nothing_and_says_so_once(watched, tmp_path):
    exporter, model, backend = watched
    handler = logging.FileHandler(tmp_path / "log")
    logging.getLogger("ikkuna").addHandler(handler)
    for _, values in DataLoader(Augmented(exporter), 2, num_workers=1, multiprocessing_context="fork"):
        exporter.log("in_loop", values.sum())
        train(model, 1, lambda step: None)
    logging.getLogger("ikkuna").removeHandler(handler)
    handler.close()
    exporter.close()
    assert logged(backend, "in_worker") == []
    assert [value for _, value in logged(backend, "in_loop")] == [1.0, 5.0, 9.0]
    [line] = (tmp_path / "log").read_text().splitlines()
    assert "exporter.log('in_worker') in a worker process shows nothing, and so do further calls there; return" in line


@pytest.fixture
def starting_a_process():
    """Pretend that a process is being started with ``spawn``."""
    set_spawning_popen(object())
    yield
    set_spawning_popen(None)


def test_a_process_that_is_spawned_gets_an_exporter_that_shows_nothing(watched, starting_a_process, caplog):
    child = pickle.loads(pickle.dumps({"exporter": watched[0]}))["exporter"]
    for number in range(3):
        child.log("in_worker", number, step=number)
        child.observe("tensor", torch.ones(1))
    [line] = caplog.messages
    assert line.startswith("exporter.log('in_worker') in a worker process shows nothing")


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_an_exporter_is_neither_copied_nor_pickled_elsewhere(watched, copied):
    with pytest.raises(ConfigTypeError, match=r"cannot be copied or pickled; store exporter.state_dict\(\) instead"):
        copied(watched[0])


@pytest.mark.slow
@pytest.mark.host("a worker has no simulated device")
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_data_loader_with_spawned_workers_trains(watched, method):
    exporter, model, backend = watched
    for _, values in DataLoader(Augmented(exporter), 2, num_workers=1, multiprocessing_context=method):
        exporter.log("in_loop", values.sum())
        train(model, 1, lambda step: None)
    exporter.close()
    assert logged(backend, "in_worker") == []
    assert [value for _, value in logged(backend, "in_loop")] == [1.0, 5.0, 9.0]


def test_passes_have_their_own_series(watched):
    exporter, model, backend = watched
    train(model, 1, lambda step: None)
    exporter.test()
    exporter.log("x", 5.0)
    exporter.train()
    train(model, 1, lambda step: exporter.log("x", 6.0))
    exporter.close()
    shown = [(series.pass_name, value, step) for series, value, step in backend.values if series.name == "x"]
    assert shown == [("testing", 5.0, 0), ("training", 6.0, 1)]


def test_a_step_is_acknowledged_with_the_values_that_are_logged_after_it(tmp_path):
    model = nn.Linear(3, 2)
    with ikkuna.watch(model, NormSubscriber("weights", backend="jsonl"), log_dir=tmp_path, rules=None) as exporter:
        train(model, 3, lambda step: None)
        exporter.message_bus.drain(wait=True)  # what a device has measured arrives later
        assert exporter.message_bus.run.flush(30)
        assert exporter.health().acked_step == 2
        exporter.log("x", 1.0)
        assert exporter.health().acked_step == 1
        train(model, 1, lambda step: None)
        exporter.message_bus.drain(wait=True)
        assert exporter.message_bus.run.flush(30)
        assert exporter.health().acked_step == 3
