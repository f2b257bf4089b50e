"""Measures the cost of the flight recorder while nothing goes wrong, as a share of the CPU time of a training step.

One thread is used, and all variants are interleaved.  ``watch`` is ``ikkuna.watch`` without the flight recorder,
``recorder`` is ``ikkuna.watch`` as it is; both show their values with the backend ``null``.
With ``--every 1`` each step is sampled.

    python benchmarks/recorder.py [--models mlp conv transformer] [--steps 400] [--every 10]
"""

import statistics
import time

from interleaved import main
from overhead import MODELS, Workload

from ikkuna.diagnosis import RecorderOptions
from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import LossSubscriber, NormSubscriber, VarianceSubscriber


def observe(workload: Workload, every: int, recorder: bool) -> None:
    exporter = Exporter(message_bus=MessageBus("benchmark"))
    exporter.add_modules(workload.model)
    exporter.set_loss(workload.loss)
    options = {"subsample": every, "backend": "null"}
    for subscriber in (
        NormSubscriber("weights", **options),
        NormSubscriber("layer_gradients", **options),
        VarianceSubscriber("activations", **options),
        LossSubscriber(backend="null"),
    ):
        exporter.message_bus.register_subscriber(subscriber)
    exporter.apply_rules(every=every, backend="null")
    if recorder:
        exporter.record_steps(RecorderOptions(every=every, max_dumps=0))
    workload.close = exporter.close


def measure(make, steps: int, every: int) -> dict[str, float]:
    """Return the mean CPU seconds of a step of each variant, over rounds of ten steps."""
    variants = {name: make() for name in ("none", "watch", "recorder")}
    observe(variants["watch"], every, recorder=False)
    observe(variants["recorder"], every, recorder=True)
    rounds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(steps // 10):
        order = list(variants.items())
        for name, workload in order[turn % 3 :] + order[: turn % 3]:
            began = time.process_time()
            for _ in range(10):
                workload.step()
            rounds[name].append((time.process_time() - began) / 10)
    for workload in variants.values():
        workload.close()
    return {name: statistics.median(values[2:]) for name, values in rounds.items()}


if __name__ == "__main__":
    options = {"steps": (400, "measured steps"), "every": (10, "steps between two samples")}
    main(measure, MODELS, ("watch", "recorder"), options)
