"""Values reach loggers of other libraries in a thread, and training waits for none of them."""

import math
import os
import threading
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboardX import SummaryWriter as XWriter
from torch import nn
from torch.utils.tensorboard import SummaryWriter as TorchWriter

from ikkuna.backends.loggers import FunctionBackend, LightningLoggerBackend, LoggerBackend, SummaryWriterBackend
from ikkuna.errors import ConfigError, PluginError
from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import HistogramSubscriber, NormSubscriber
from ikkuna.store.names import Series
from ikkuna.store.values import Matrix
from ikkuna.support.plugins import import_extra
from ikkuna.testing import check_backend


class Recording(LoggerBackend):
    """Records the steps; the gate holds the logger as a slow network does."""

    def __init__(self, fails=(), starts_at=0, **options):
        super().__init__(**options)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.steps, self.calls, self.starts_at, self.fails = [], [], starts_at, fails

    def start(self):
        self.calls.append("start")
        if len(self.calls) <= self.starts_at:
            raise ConnectionError("no network")

    def log_step(self, values):
        self.entered.set()
        self.gate.wait()
        if values.step in self.fails:
            raise ConnectionError("no answer")
        self.steps.append((values.step, values.scalars))

    def finish(self):
        self.calls.append("finish")


def add(backend, steps, values=1):
    for step in steps:
        for number in range(values):
            backend.add_scalar(Series("weights_norm2", f"layer.{number}"), float(step), step)
        backend.commit(step)


def watch_and_train(backend, tmp_path, steps=3, subscriber=NormSubscriber, **options):
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Exporter(message_bus=MessageBus("logged"), log_dir=tmp_path, **options) as exporter:
        exporter.add_modules(model)
        exporter.message_bus.register_subscriber(subscriber("weights", subsample=1, backend=backend))
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(3, 2)).square().sum().backward()
            optimizer.step()
        exporter.message_bus.run.flush(30)
    return exporter.health()


def test_every_adapter_keeps_the_contract(tmp_path):
    for number, make in enumerate(
        (
            lambda: Recording(),
            lambda: FunctionBackend(lambda *arguments: None),
            lambda: LightningLoggerBackend(CSVLogger(tmp_path / "logs")),
        )
    ):
        (tmp_path / str(number)).mkdir()
        check_backend(make, tmp_path / str(number))


def test_a_step_is_one_call_in_order_in_another_thread():
    backend, threads = Recording(), []
    backend.log_step = lambda values: threads.append(threading.get_ident()) or Recording.log_step(backend, values)
    add(backend, range(5), values=1000)
    assert backend.close(30)
    assert [step for step, _ in backend.steps] == [0, 1, 2, 3, 4]
    assert all(len(scalars) == 1000 for _, scalars in backend.steps)
    assert backend.calls == ["start", "finish"]
    assert threading.get_ident() not in threads


def test_training_does_not_wait_for_a_logger_that_does_not_answer(tmp_path, caplog):
    """The logger stalls for all of the training; everything that fits is passed on afterwards, the rest is counted."""
    backend = Recording(capacity=20)
    backend.gate.clear()
    add(backend, [0])
    assert backend.entered.wait(30)
    add(backend, range(1, 101))  # returns although the logger does not
    assert backend.dropped == 100 - 20
    assert not backend.flush(0.01)
    assert not backend.close(0.01)
    assert backend.dropped == 100
    backend.gate.set()
    assert [record.getMessage() for record in caplog.records] == [
        "Recording is too slow, 20 values wait; from step 21 on values are dropped",
        "Recording: closed before 20 values could be passed on; they are lost",
    ]


def test_a_training_makes_all_of_its_steps_while_a_logger_stalls(tmp_path):
    """Each step returns although no value has left; values, drops and weights are counted, not times."""
    gate, entered, passed = threading.Event(), threading.Event(), []

    def stalled(tag, value, step):
        entered.set()
        gate.wait()
        passed.append((step, value))

    def trained(backend):
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        exporter = Exporter(message_bus=MessageBus("stalled"), log_dir=tmp_path)
        exporter.add_modules(model)
        exporter.message_bus.register_subscriber(NormSubscriber("weights", backend=backend))
        for step in range(300):
            optimizer.zero_grad()
            model(torch.ones(3, 2)).square().sum().backward()
            optimizer.step()
            if step == 0 and backend != "null":
                assert entered.wait(30)
        return exporter, model.weight.detach()

    exporter, weight = trained(FunctionBackend(stalled, capacity=50))
    health = exporter.health()
    assert (health.steps, health.dropped, passed) == (300, 300 - 1 - 50, [])
    gate.set()
    exporter.message_bus.run.flush(30)
    exporter.close()
    assert [step for step, _ in passed] == list(range(51))
    assert exporter.health().dropped == 300 - 51
    plain, expected = trained("null")
    plain.close()
    assert torch.equal(weight, expected)


def test_what_waits_is_passed_on_when_the_logger_answers_again():
    backend = Recording(capacity=20)
    backend.gate.clear()
    add(backend, [0])
    assert backend.entered.wait(30)
    add(backend, range(1, 41))
    backend.gate.set()
    assert backend.flush(30)
    add(backend, [41])
    assert not backend.close(30)  # values were dropped
    assert [step for step, _ in backend.steps] == [*range(21), 41]
    assert backend.dropped == 20


def test_the_values_of_a_call_that_fails_are_counted_and_the_others_arrive(caplog):
    backend = Recording(fails={1, 2})
    add(backend, range(5), values=3)
    assert not backend.close(30)
    assert [step for step, _ in backend.steps] == [0, 3, 4]
    assert backend.dropped == 6
    assert caplog.text.count("Recording failed in log() (training is not affected)") == 1


def test_a_logger_that_always_fails_is_given_up(caplog):
    backend = Recording(fails=set(range(100)))
    add(backend, range(30))
    backend.close(30)
    assert backend.dropped == 30
    assert "Recording failed 10 times in a row and gets no more values" in caplog.text
    assert backend.is_unwritable


def test_a_start_that_fails_is_tried_again_while_values_wait(caplog):
    backend = Recording(starts_at=2, retry_seconds=0.01)
    add(backend, range(3))
    assert backend.close(30) or backend.calls  # close() may come before the last attempt
    backend = Recording(starts_at=2, retry_seconds=0.01)
    add(backend, range(3))
    deadline = threading.Event()
    while len(backend.steps) < 3 and not deadline.wait(0.01):
        pass
    assert backend.close(30)
    assert backend.calls == ["start", "start", "start", "finish"]
    assert [step for step, _ in backend.steps] == [0, 1, 2]
    assert "Recording failed in start()" in caplog.text


def test_a_logger_that_cannot_be_started_loses_everything_and_says_so(caplog):
    backend = Recording(starts_at=10**9, retry_seconds=1000)
    add(backend, range(3))
    assert not backend.close(30)
    assert backend.dropped == 3
    assert "closed before 3 values could be passed on" in caplog.text
    assert "finish" not in backend.calls


def test_a_forked_child_does_nothing():
    backend = Recording()
    add(backend, [0])
    assert backend.flush(30)
    pid = os.fork()
    if not pid:
        add(backend, [1])
        os._exit(0 if not backend.close(0.1) and backend.dropped == 1 else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert backend.close(30)
    assert [step for step, _ in backend.steps] == [0]


def test_a_function_gets_tag_value_and_step_and_health_counts_its_failures(tmp_path):
    calls = []

    def log(tag, value, step):
        calls.append((tag, value, step))

    health = watch_and_train(log, tmp_path)
    assert [(tag, step) for tag, _, step in calls] == [("weights_norm2/linear", step) for step in range(3)]
    assert health.dropped == 0
    assert not (tmp_path / "run0001").exists()  # a function needs no directory

    def failing(tag, value, step):
        raise OSError("no space")

    health = watch_and_train(failing, tmp_path)
    assert health.dropped == 3
    assert health.unwritable


def test_one_function_of_two_subscribers_is_one_backend(tmp_path):
    """Also a method, of which each access creates another object."""

    class Sink:
        def __init__(self):
            self.values = []

        def log(self, tag, value, step):
            self.values.append((tag, threading.get_ident()))

    sink, model = Sink(), nn.Linear(2, 2)
    with Exporter(message_bus=MessageBus("two"), log_dir=tmp_path) as exporter:
        exporter.add_modules(model)
        for kind in ("weights", "biases"):
            exporter.message_bus.register_subscriber(NormSubscriber(kind, backend=sink.log))
        model(torch.ones(1, 2)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert {tag for tag, _ in sink.values} == {"weights_norm2/linear", "biases_norm2/linear"}
    assert len({thread for _, thread in sink.values}) == 1


@pytest.mark.parametrize("writer_class", [TorchWriter, XWriter])
def test_an_existing_summary_writer_gets_everything(tmp_path, writer_class):
    writer = writer_class(str(tmp_path / "mine"))
    writer.add_scalar("own", 1.0, 0)
    watch_and_train(writer, tmp_path, subscriber=HistogramSubscriber, config={"lr": 0.1})
    watch_and_train([writer, lambda *arguments: None], tmp_path)
    backend = SummaryWriterBackend(writer)
    for value in (math.nan, math.inf, 1e300):
        backend.add_scalar(Series("loss"), value, 0)
        backend.commit(0)
    backend.add_matrix(Series("similarity"), Matrix(("a",), ("b",), np.ones((1, 1))), 0)
    backend.commit(0)
    assert backend.close(30)
    writer.add_scalar("own", 2.0, 1)  # it is still open
    writer.close()
    reader = EventAccumulator(str(tmp_path / "mine"), {"histograms": 0}).Reload()
    assert [event.step for event in reader.Scalars("weights_norm2/linear")] == [0, 1, 2]
    assert [event.value for event in reader.Scalars("own")] == [1.0, 2.0]
    assert len(reader.Histograms("weights/linear")) == 3
    assert reader.Tags()["images"] == ["Matrices/similarity"]
    assert "nan" in str(reader.Scalars("Network/loss")[0].value)
    assert any("Config" in tag for tag in reader.Tags()["tensors"])


def test_a_logger_of_lightning_gets_one_call_for_each_step(tmp_path):
    logger = CSVLogger(tmp_path)
    watch_and_train(logger, tmp_path, config={"lr": 0.1})
    logger.save()
    rows = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    assert len(rows) == 4
    assert "weights_norm2/linear" in rows[0]
    assert "lr: 0.1" in (tmp_path / "lightning_logs" / "version_0" / "hparams.yaml").read_text()


def test_a_logger_of_lightning_that_refuses_hyper_parameters_gets_the_numbers(tmp_path, caplog):
    """MLflow refuses a second text of a hyper-parameter, such as an object of which the trainer has logged another one."""
    shown = []
    logger = Mock(log_hyperparams=Mock(side_effect=ValueError("it has another value")))
    logger.log_metrics = lambda values, step: shown.append((step, *values))
    backend = LightningLoggerBackend(logger)
    backend.add_config({"device": "device(type='cpu')"}, 0)
    backend.add_scalar(Series("loss"), 0.5, 0)
    backend.commit(0)
    assert backend.close(30)
    assert shown == [(0, "Network/loss")]
    assert backend.dropped == 0
    assert "Mock keeps its hyper-parameters: it has another value" in caplog.text


@pytest.mark.parametrize(
    ("name", "tag"), [("MLFlowLogger", "Network/loss objective"), ("CometLogger", "loss/objective")]
)
def test_only_the_logger_of_mlflow_gets_other_names(name, tag):
    """Its store in files cannot have ``loss``, which the script logs, beside a metric in ``loss/``."""
    shown = []
    logger = type(name, (), {"log_metrics": lambda self, metrics, step: shown.append((metrics, step))})()
    backend = LightningLoggerBackend(logger)
    backend.add_scalar(Series("loss", "objective"), 0.5, 3)
    backend.commit(3)
    assert backend.close(30)
    assert shown == [({tag: 0.5}, 3)]


@pytest.mark.parametrize("backend", [3, NormSubscriber, None])
def test_what_is_no_backend_is_refused(backend):
    with pytest.raises(ConfigError, match="backend needs a name, a Backend, a logger or a function, got"):
        NormSubscriber("weights", backend=[backend])


def test_a_missing_extra_is_named():
    with pytest.raises(PluginError, match=r'pip install "ikkuna\[no_such_logger\]"'):
        import_extra("no_such_logger")
