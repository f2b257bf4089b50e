"""Pipelines: each rank trains a stage with the schedules of torch.distributed.pipelining."""

import contextlib

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

import ikkuna
from ikkuna.errors import ConfigError
from ikkuna.export import Exporter
from ikkuna.export import subscriber as installed
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import CallbackSubscriber
from tests.distributed import loops

MICRO_BATCHES = 4
STEPS = 3


class Blocks(nn.Module):
    """Layers that are called in turn, of which a stage holds some under their own names."""

    def __init__(self, names):
        super().__init__()
        for name, layer in _layers():
            if name in names:
                self.add_module(name, layer)

    def forward(self, x):
        for layer in self.children():
            x = layer(x)
        return x


ALL = ("first", "relu", "block", "norm", "middle", "tanh", "last")
HALVES = (ALL[:3], ALL[3:])
QUARTERS = (ALL[:2], ALL[2:4], ALL[4:5], ALL[5:])


def _layers():
    torch.manual_seed(1)
    made = (
        *(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))),
        *(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)),
    )
    return zip(ALL, made, strict=True)


def subscribers():
    """Return subscribers of every kind, and of the activations of a test."""
    tested = installed.NormSubscriber("activations", tag="testing", publishes="tested", backend="null")
    network = [installed.NormSubscriber(kind, backend="null") for kind in ("input_data", "network_output")]
    return [*loops.every_metric(), *network, tested, installed.GlobalNormSubscriber(backend="null")]


def one_process(steps=STEPS):
    """Train without a pipeline: the same micro-batches, of which the gradients are averaged."""
    model, loss = Blocks(ALL), nn.CrossEntropyLoss()
    inputs, labels = loops.data(steps)
    with loops.watching(model, loss, subscribers()) as (exporter, published):
        optimizer = loops.sgd(model)
        for x, y in zip(inputs, labels, strict=True):
            optimizer.zero_grad()
            for part, target in zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES), strict=True):
                loss(model(part), target).backward()
            for parameter in model.parameters():
                parameter.grad /= MICRO_BATCHES
            optimizer.step()
        exporter.test()
        with torch.no_grad():
            model(inputs[0])
        exporter.train()
    return published


def _trained(make_schedule, parts, rank, size, watch):
    """Train the stages of this rank; return what `watch` has collected, and the weights."""
    models = [Blocks(names) for names in parts[rank::size]]
    stages = [PipelineStage(model, rank + i * size, len(parts), torch.device("cpu")) for i, model in enumerate(models)]
    loss = nn.CrossEntropyLoss()
    schedule = make_schedule(stages, MICRO_BATCHES, loss)
    inputs, labels = loops.data(STEPS)
    is_last = any(stage.is_last for stage in stages)
    with watch(models, loss if is_last else None) as (exporter, published):
        optimizer = loops.sgd(nn.ModuleList(models))
        for x, y in zip(inputs, labels, strict=True):
            optimizer.zero_grad()
            schedule.step(*((x,) if rank == 0 else ()), target=y if is_last else None)
            optimizer.step()
        if exporter is not None:
            exporter.test()
            schedule.eval(*((inputs[0],) if rank == 0 else ()), target=labels[0] if is_last else None)
            exporter.train()
    health = exporter.health() if exporter is not None else None
    return published, [p.detach() for model in models for p in model.parameters()], health


@contextlib.contextmanager
def _watch(models, loss):
    with loops.watching(models[0], loss, subscribers()) as (exporter, published):
        for model in models[1:]:
            exporter.add_modules(model)
        yield exporter, published


def _alone(models, loss):
    return contextlib.nullcontext((None, {}))


def _both(make_schedule, parts, rank, size):
    _, weights, _ = _trained(make_schedule, parts, rank, size, _alone)
    published, watched, health = _trained(make_schedule, parts, rank, size, _watch)
    is_bit_identical = all(torch.equal(a, b) for a, b in zip(weights, watched, strict=True))
    return published, is_bit_identical, health


def gpipe(rank, size):
    return _both(lambda stages, n, loss: ScheduleGPipe(stages[0], n, loss_fn=loss), HALVES, rank, size)


def one_forward_one_backward(rank, size):
    return _both(lambda stages, n, loss: Schedule1F1B(stages[0], n, loss_fn=loss), HALVES, rank, size)


@contextlib.contextmanager
def _watch_rules(models, loss):
    """The rules choose modules of the stages by name; the values are those of a metric of all modules and of the loss."""
    published, losses = {}, [] if loss is None else [loss]
    model = models[0] if len(models) == 1 else nn.ModuleDict({str(i): each for i, each in enumerate(models)})
    monitor = ikkuna.watch(model, *losses, every=1, backend="null", on_error="raise")

    def note(message):
        published[message.kind, message.series_name, message.global_step] = message.data

    with monitor:
        monitor.message_bus.register_subscriber(CallbackSubscriber(["weights_norm2", "gradients_global_norm"], note))
        yield monitor, published


def watched(rank, size):
    return _trained(lambda stages, n, loss: Schedule1F1B(stages[0], n, loss_fn=loss), HALVES, rank, size, _watch_rules)[
        0
    ]


def watched_interleaved(rank, size):
    """Each rank passes its stages as one ``ModuleDict``."""
    made = ScheduleInterleaved1F1B
    return _trained(lambda stages, n, loss: made(stages, n, loss_fn=loss), QUARTERS, rank, size, _watch_rules)[0]


def interleaved(rank, size):
    return _both(lambda stages, n, loss: ScheduleInterleaved1F1B(stages, n, loss_fn=loss), QUARTERS, rank, size)


def equal_names(rank, size):
    """Both stages have a layer named ``0``."""
    model = nn.Sequential(nn.Linear(6, 6) if rank == 0 else nn.Linear(6, 3))
    stage = PipelineStage(model, rank, size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=nn.CrossEntropyLoss())
    inputs, labels = loops.data(STEPS)
    with loops.watching(model, nn.CrossEntropyLoss(), subscribers()) as (_, published):
        optimizer = loops.sgd(model)
        for x, y in zip(inputs, labels, strict=True):
            optimizer.zero_grad()
            schedule.step(*((x,) if rank == 0 else ()), target=y if rank else None)
            optimizer.step()
    return published


def whole_model(rank, size):
    """The whole model is added where a process runs only a part of it."""
    model = nn.ModuleDict({"first": nn.Linear(6, 8), "last": nn.Linear(8, 3)})
    stage = PipelineStage(model["last" if rank else "first"], rank, size, torch.device("cpu"))
    with Exporter(message_bus=MessageBus("whole")) as exporter, pytest.raises(ConfigError) as raised:
        exporter.add_modules(model)
    assert stage.stage_index == rank
    return str(raised.value), exporter.modules
