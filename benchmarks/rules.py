"""The cost of the rules: process CPU time of a training step with them over a step without.

One thread is used, and all variants are interleaved.
``default`` is ``ikkuna.watch`` without rules, ``rules`` is ``ikkuna.watch`` as it is; both show their values with the backend ``null``.

    python benchmarks/rules.py [--models mlp conv transformer] [--steps 400]
"""

import argparse
import statistics
import time

import torch
from overhead import MODELS, Workload

from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.preset import GROUP, Preset
from ikkuna.plugins import load_plugin


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


def measure(make, steps: int) -> dict[str, float]:
    """Return the mean CPU seconds of a step of each variant, over rounds of ten steps, of which one is sampled."""
    variants = {name: make() for name in ("none", "default", "rules")}
    observe(variants["default"], rules=False)
    observe(variants["rules"], rules=True)
    rounds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(steps // 10):
        for name, workload in variants.items():
            began = time.process_time()
            for _ in range(10):
                workload.step()
            rounds[name].append((time.process_time() - began) / 10)
    for workload in variants.values():
        workload.close()
    return {name: statistics.median(values[2:]) for name, values in rounds.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| model | step, ms | default metrics | default metrics and rules | rules alone |\n|---|---|---|---|---|")
    for name in arguments.models:
        torch.manual_seed(0)
        cost = measure(MODELS[name], arguments.steps)
        none, default, rules = cost["none"], cost["default"], cost["rules"]
        shares = f"{default / none - 1:.2%} | {rules / none - 1:.2%} | {(rules - default) / none:.2%}"
        print(f"| {name} | {none * 1e3:.1f} | {shares} |", flush=True)


if __name__ == "__main__":
    main()
