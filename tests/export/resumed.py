"""Trainings that are interrupted and continued from a checkpoint, and the values that their subscribers show."""

import io
import math

import numpy as np
import torch
from torch import nn

import ikkuna
from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.store.values import Matrix
from ikkuna.testing import RecordingBackend

K = 5
"""The step of the checkpoint: windows of two and of three steps are open then."""


class Net(nn.Module):
    """Layers of the kinds that the installed metrics need; some units of the first one are seldom active."""

    def __init__(self, width):
        super().__init__()
        self.first, self.relu, self.lstm, self.last = (
            nn.Linear(width, 6),
            nn.Tanh(),
            nn.LSTM(6, 5, batch_first=True),
            nn.Linear(5, 3),
        )
        self.norm, self.router = nn.BatchNorm1d(6), nn.Linear(5, 4)
        with torch.no_grad():
            self.first.bias.copy_(torch.linspace(-2.0, 0.0, 6))

    def forward(self, x):
        hidden = self.relu(self.norm(self.first(x))).unsqueeze(1)
        output = self.lstm(hidden)[0][:, 0]
        ikkuna.observe("scores", output.reshape(-1, 1, 1, 5))
        return self.last(output) * self.router(output).amax()


class Training:
    """A model that trains on other data at each step, with two micro-batches, and its exporter.

    In some steps gradients are clipped and labels are missing.
    """

    loss_class = nn.CrossEntropyLoss
    rows, width = 8, 4
    steps = K
    """Of each half."""

    def __init__(self, make, checkpoint=None, **options):
        torch.manual_seed(0)
        self.model, self.loss = Net(self.width), self.loss_class()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.step = 0
        self.exporter = Exporter(message_bus=MessageBus("resumed"), on_error="raise", **options)
        if checkpoint is not None:
            self.model.load_state_dict(checkpoint["model"])
        self.exporter.add_modules(self.model)
        self.exporter.set_loss(self.loss)
        for subscriber in make(self):
            self.exporter.message_bus.register_subscriber(subscriber)
        if checkpoint is not None:
            self.optimizer.load_state_dict(checkpoint["optimizer"])
            self.step = checkpoint["step"]
            self.exporter.load_state_dict(checkpoint["exporter"])

    def inputs(self, generator):
        return torch.randn(self.rows, self.width, generator=generator)

    def labels(self, generator):
        y = torch.randint(0, 3, (self.rows,), generator=generator)
        if self.step % 3 == 0:
            y[::3] = -100
        return y

    def train(self, steps):
        for _ in range(steps):
            generator = torch.Generator().manual_seed(self.step)
            for _ in range(2):
                x, y = self.inputs(generator), self.labels(generator)
                (self.loss(self.model(x), y) / 2).backward()
            if self.step % 2 == 0:
                nn.utils.clip_grad_norm_(self.model.parameters(), 1e-3)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1

    def checkpoint(self):
        """Return what ``torch.load`` reads from the bytes of a checkpoint."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "exporter": self.exporter.state_dict(),
        }
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        return torch.load(file, weights_only=True)


class LargeTraining(Training):
    """With tensors that are measured by a random sample of their elements."""

    rows = 20_000


class LongTraining(Training):
    """With enough steps for a median of earlier ones."""

    steps = 20


class Regression(Training):
    """With numbers as labels."""

    loss_class = nn.MSELoss

    def labels(self, generator):
        return torch.randn(self.rows, 3, generator=generator)


class RepeatedTraining(Training):
    """With the same rows in each step, each of them twice, with another label."""

    width = 16

    def inputs(self, generator):
        return torch.randn(self.rows // 2, self.width, generator=torch.Generator().manual_seed(0)).repeat(2, 1)

    def labels(self, generator):
        return torch.arange(self.rows) % 3


class BrokenTraining(Training):
    """With weights that are NaN from the step before the checkpoint on."""

    def inputs(self, generator):
        return super().inputs(generator) + (math.nan if self.step == K - 1 else 0.0)


def run_of(make, resumed, training_class=Training):
    """Return series, values, texts and final weights of a training, in one go or with a checkpoint after the first half.

    Parameters
    ----------
    make : callable
        Returns the subscribers for a training.
    resumed : bool
        Whether the training is interrupted.
    training_class : type
        The class of the training.
    """
    backend = RecordingBackend()

    def subscribers(training):
        made = make(training)
        for subscriber in made:
            subscriber.backends = (backend,)
        return made

    training = training_class(subscribers)
    training.train(half := training.steps)
    if resumed:
        checkpoint = training.checkpoint()
        training.train(2)  # the steps that are lost
        training.exporter.close()
        backend.values = [entry for entry in backend.values if entry[2] < half]
        backend.texts = [entry for entry in backend.texts if entry[2] < half]
        training = training_class(subscribers, checkpoint)
    training.train(2 * half - training.step)
    training.exporter.close()
    series = {series for series, _, _ in backend.values}
    values = [(series, step, plain(value)) for series, value, step in backend.values if not is_time(series)]
    return series, values, backend.texts, repr([p.tolist() for p in training.model.parameters()])


def plain(value):
    """Return the numbers of a shown value, rounded so far that the alignment of tensors in memory does not change them."""
    if isinstance(value, Matrix):
        return value.rows, value.columns, [rounded(x) for x in value.values.ravel()]
    if isinstance(value, float):
        return rounded(value)
    return [
        *map(rounded, (value.num, value.sum)),
        *map(rounded, value.bucket_limits),
        *map(rounded, value.bucket_counts),
    ]


def rounded(number):
    number = float(np.float64(number))
    return number if math.isinf(number) else "NaN" if math.isnan(number) else float(f"{number:.10g}")


def is_time(series):
    return series.kind in ("step_seconds", "samples_per_second", "monitor_share", "peak_memory")
