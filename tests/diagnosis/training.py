"""A training run that is drawn at random, and that a fault or a healthy variation changes."""

import math
import random

import torch
from torch import nn

from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from tests.diagnosis import networks

FAMILIES = ("mlp", "conv", "conv_norm", "transformer", "recurrent")


class Case:
    """Everything that one training run consists of.

    A variation changes attributes before the run; ``prepare`` is called with the case when the model exists,
    ``on_batch``, ``on_loss`` and ``on_step`` while it trains.
    """

    def __init__(self, family, seed, steps=240):
        self.family, self.seed, self.steps = family, seed, steps
        self.draw = draw = random.Random(f"{family} {seed}")
        self.generator = torch.Generator().manual_seed(seed + 17)
        self.batch_size = draw.choice([24, 32, 48, 64])
        self.norm = "batch" if family == "conv_norm" else None
        self.dropout, self.activation, self.depth, self.cell = 0.0, nn.ReLU, None, nn.GRU
        is_picture = family in ("mlp", "conv", "conv_norm")
        self.optimizer_kind = draw.choice(["adam", "momentum"]) if is_picture else "adam"
        rates = [5e-4, 1e-3, 2e-3] if self.optimizer_kind == "adam" else [0.02, 0.05]
        self.rate = draw.choice(rates if is_picture else [1e-3, 2e-3, 3e-3])
        self.decay, self.clip, self.micro_batches = 0.0, None, 1
        self.clears, self.schedule, self.warmup, self.shuffles = True, None, 0, True
        self.evaluates, self.stays_in_evaluation, self.subset, self.relabel = False, False, None, None
        self.on_epoch, self.optimizer_settings = [], {}
        self.loss, self.wrap, self.select = nn.CrossEntropyLoss(), None, None
        self.prepare, self.on_batch, self.on_loss, self.on_step = [], [], [], []
        self.backward, self.before_step, self.make_step = torch.Tensor.backward, [], lambda optimizer: optimizer.step()
        self.hit = None  # name of the module that has the fault

    # -- the model and its data -----------------------------------------------------------------------------------

    def build(self):
        torch.manual_seed(self.seed * 1000 + len(self.family))
        draw, depth = self.draw, self.depth
        if self.family == "mlp":
            widths = [draw.choice([48, 64, 96, 128])] * (depth or draw.choice([2, 3]))
            self.model = networks.mlp(widths, self.activation, self.norm, self.dropout)
        elif self.family in ("conv", "conv_norm"):
            widths = [draw.choice([8, 12]), *[draw.choice([16, 20])] * (depth - 1 if depth else draw.choice([1, 2]))]
            self.model = networks.convnet(widths, self.activation, self.norm, self.dropout)
        elif self.family == "transformer":
            self.model = networks.Transformer(60, draw.choice([24, 32]), depth or draw.choice([1, 2]))
        else:
            self.model = networks.Recurrent(120, 8, draw.choice([32, 48]), self.cell)
        if self.family != "transformer":
            data = networks.topics() if self.family == "recurrent" else networks.digits()
            (self.x, self.y), self.held_out = data
            self.x, self.y = self.x[: self.subset], self.y[: self.subset]
            if self.relabel is not None:
                self.y = self.relabel(self.y)
        self.order, self.position = None, 0
        for prepare in self.prepare:
            prepare(self)

    def hidden_layers(self):
        """Return the names of the layers with weights that a fault may hit."""
        found = [n for n, m in self.model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
        return [n for n in found if n.split(".")[-1] not in ("head", "q", "k", "v", "o")]

    def pick(self):
        self.hit = self.draw.choice(self.hidden_layers())
        return self.model.get_submodule(self.hit)

    def batch(self, step):
        x, y = self._text_batch() if self.family == "transformer" else self._labelled_batch()
        for change in self.on_batch:
            x, y = change(self, step, x, y)
        return x, y

    def _text_batch(self):
        ids = networks.text()
        begin = torch.randint(0, len(ids) - 33, (max(4, self.batch_size // 4),), generator=self.generator)
        window = ids[begin[:, None] + torch.arange(33)]
        y = window[:, 1:].flatten()
        return window[:, :-1], y if self.relabel is None else self.relabel(y)

    def _labelled_batch(self):
        number = len(self.x)
        if self.order is None or self.position + self.batch_size > number:
            self.epoch_is_over = self.order is not None
            self.order = torch.randperm(number, generator=self.generator) if self.shuffles else torch.arange(number)
            self.position = 0
        chosen = self.order[self.position : self.position + self.batch_size]
        self.position += self.batch_size
        return self.x[chosen], self.y[chosen]

    def optimizer(self):
        parameters = self.select(self.model) if self.select else list(self.model.parameters())
        if self.optimizer_kind == "adam":
            kind = torch.optim.AdamW if self.decay else torch.optim.Adam
            return kind(parameters, self.rate, weight_decay=self.decay, **self.optimizer_settings)
        momentum = 0.9 if self.optimizer_kind == "momentum" else 0.0
        return torch.optim.SGD(parameters, self.rate, momentum=momentum, weight_decay=self.decay)

    # -- the run --------------------------------------------------------------------------------------------------

    def train(self, watch):
        """Train; ``watch(model, loss)`` returns the exporter."""
        self.build()
        model = self.model = self.wrap(self.model) if self.wrap else self.model
        optimizer, self.epoch_is_over = self.optimizer(), False
        exporter = watch(model, self.loss)
        try:
            for step in range(self.steps):
                optimizer = self._step(step, model, optimizer)
                if self.epoch_is_over:
                    self._end_epoch(model, exporter)
        finally:
            exporter.close()
        return exporter

    def _step(self, step, model, optimizer):
        self._set_rate(step, optimizer)
        for change in self.on_step:
            optimizer = change(self, step, optimizer) or optimizer
        if self.clears:
            optimizer.zero_grad()
        for _ in range(self.micro_batches):
            x, y = self.batch(step)
            loss = self.loss(model(x), y) / self.micro_batches
            for change in self.on_loss:
                loss = change(loss)
            self.backward(loss)
        for change in self.before_step:
            change(self, optimizer)
        if self.clip:
            nn.utils.clip_grad_norm_(model.parameters(), self.clip)
        self.make_step(optimizer)
        return optimizer

    def _set_rate(self, step, optimizer):
        if not (self.warmup or self.schedule):
            return
        factor = 1.0
        if step < self.warmup:
            factor = (step + 1) / self.warmup
        elif self.schedule == "cosine":
            factor = 0.5 * (1 + math.cos(math.pi * (step - self.warmup) / (self.steps - self.warmup)))
        elif self.schedule == "restarts":
            factor = 0.5 * (1 + math.cos(math.pi * (step % 80) / 80))
        elif self.schedule == "steps":
            factor = 0.1 ** (3 * step // self.steps)
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("base", group["lr"]) * factor

    def _end_epoch(self, model, exporter):
        self.epoch_is_over = False
        exporter.epoch_finished()
        for change in self.on_epoch:
            change(self)
        if self.evaluates and self.family != "transformer":
            model.eval()
            exporter.evaluate(list(zip(*(part.split(200) for part in self.held_out), strict=True)), "testing")
            if not self.stays_in_evaluation:
                model.train()


def watch(model, loss, rules="default", every=10, log_dir=None, backend="null", **options):
    """Return an exporter with rules; its errors are raised."""
    exporter = Exporter(message_bus=MessageBus("diagnosis"), log_dir=log_dir, on_error="raise")
    exporter.add_modules(model)
    if loss is not None:
        exporter.set_loss(loss)
    exporter.apply_rules(rules, every=every, backend=backend, **options)
    return exporter
