"""The cost of the rules: process CPU time of a training step with them over a step without.

One thread is used, and all variants are interleaved step by step.
The figure of a variant is the mean over a period of samples, with the median of the steps of which the same is measured.
The first 3,000 steps, in which more steps are sampled, are excluded; ``--warm-up 0`` measures the first ones.
``default`` is ``ikkuna.watch`` without rules, ``rules`` is ``ikkuna.watch`` as it is; both show their values with the backend ``null``.

    python benchmarks/rules.py [--models mlp conv transformer gru] [--steps 240] [--warm-up 3040]
"""

import math
import statistics
import time
from collections import defaultdict

import overhead
import torch
from interleaved import main
from overhead import Workload
from torch import nn

from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.metrics.subscriber.bases import GROUP, Preset
from ikkuna.support.plugins import load_plugin

PERIOD = 80
"""The number of steps after which the same statistics are measured again."""


def observe(workload: Workload, rules: bool) -> None:
    exporter = Exporter(message_bus=MessageBus("benchmark"))
    exporter.add_modules(workload.model)
    exporter.set_loss(workload.loss)
    for subscriber in load_plugin(GROUP, "default", Preset)().subscribers(True):
        subscriber.backends = ("null",)
        exporter.message_bus.register_subscriber(subscriber)
    if rules:
        exporter.apply_rules(backend="null")
    workload.close = exporter.close


def gru() -> Workload:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.rnn = nn.Embedding(1000, 128), nn.GRU(128, 256, batch_first=True)
            self.fc, self.act, self.head = nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 100)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.act(self.fc(self.rnn(self.embedding(x))[0])))

    return Workload(Tagger(), torch.randint(0, 1000, (16, 32)), torch.randint(0, 100, (16, 32)))


MODELS = {**overhead.MODELS, "gru": gru}


def measure(make, steps: int, warm_up: int) -> dict[str, float]:
    """Return the mean CPU seconds of a step of each variant: the medians of the steps of a period, averaged."""
    variants = {name: make() for name in ("none", "default", "rules")}
    observe(variants["default"], rules=False)
    observe(variants["rules"], rules=True)
    for workload in variants.values():
        warm(workload, warm_up)
    seconds = {name: defaultdict[int, list[float]](list) for name in variants}
    for step in range(warm_up, warm_up + steps):
        for name, workload in variants.items():
            began = time.process_time()
            workload.step()
            seconds[name][kind_of(step)].append(time.process_time() - began)
    for workload in variants.values():
        workload.close()
    kinds = [kind_of(step) for step in range(PERIOD)]
    return {
        name: statistics.mean(statistics.median(of_kind[kind]) for kind in kinds) for name, of_kind in seconds.items()
    }


def warm(workload: Workload, steps: int) -> None:
    """Run steps with batches of one sample."""
    whole = workload.inputs, workload.labels
    workload.inputs, workload.labels = (part[:1] for part in whole)
    for _ in range(steps):
        workload.step()
    workload.inputs, workload.labels = whole


def kind_of(step: int) -> int:
    """Return a number that is equal for steps of which the same is measured: 2 for the loss alone, 1 for nothing."""
    return 2 - step % 2 if step % 10 else math.gcd(step, PERIOD)


if __name__ == "__main__":
    options = {"steps": (240, "measured steps"), "warm_up": (3040, "steps before the measurement")}
    main(measure, MODELS, ("default", "rules"), options)
