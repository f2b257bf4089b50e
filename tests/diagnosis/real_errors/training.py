"""A training run that rebuilds an error from a public tracker."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import ikkuna
from tests.diagnosis.training import watch


@dataclass
class Training:
    """Everything that one run consists of.

    ``batch`` returns the inputs and labels of a step.
    """

    model: nn.Module
    batch: Callable[[int], tuple[Any, Any]]
    optimizer: torch.optim.Optimizer
    loss: nn.Module = field(default_factory=nn.CrossEntropyLoss)
    steps: int = 120
    micro_batches: int = 1
    clears: bool = True
    before_step: Callable[[int], None] | None = None
    after_step: Callable[[int], None] | None = None

    def check_before(self):
        """Return the rules of the warnings and errors that the preflight checks find."""
        with torch.random.fork_rng():
            found = ikkuna.preflight(self.model, self.batch(0), self.loss, self.optimizer)
        return {finding.rule for finding in found if finding.severity != "info"}

    def train(self):
        """Train with the default rules, and return the rules of the warnings and errors that they find."""
        exporter = watch(self.model, self.loss)
        try:
            for step in range(self.steps):
                self.make_step(step)
        finally:
            exporter.close()
        return {finding.rule for finding in exporter.findings if finding.severity != "info"}

    def make_step(self, step):
        if self.before_step:
            self.before_step(step)
        if self.clears:
            self.optimizer.zero_grad()
        for _ in range(self.micro_batches):
            inputs, labels = self.batch(step)
            self.loss(self.model(inputs), labels).backward()
        self.optimizer.step()
        if self.after_step:
            self.after_step(step)
