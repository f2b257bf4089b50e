"""The cost of inspection functions, as a multiple of one sum over the same numbers: CPU time of one thread, interleaved.

    python benchmarks/inspection.py [million elements]

Each line shows the median and the range over the repetitions, and the limit that the median is held to.
The exit status is 1 if one is exceeded.
"""

import statistics
import sys
import time

import torch
from torch import nn

from ikkuna.netdict import get_weight
from ikkuna.numerics.statistics.histogram import percentiles

REPETITIONS = 7


def seconds(work):
    start = time.process_time()
    work()
    return time.process_time() - start


def ratios(work, yardstick, repetitions=REPETITIONS):
    """Measure both in turn, so that a busy machine slows both."""
    pairs = [(seconds(work), seconds(yardstick)) for _ in range(repetitions)]
    return [a / b for a, b in pairs]


def model_of(million):
    """Ten matrices and their biases: `million` parameters in all."""
    side = int((million * 1e5) ** 0.5)
    return nn.Sequential(*(nn.Linear(side, side) for _ in range(10)))


def main(million=100):
    torch.set_num_threads(1)
    model = model_of(million)
    weights = get_weight(model)
    tensors = list(weights.values())
    x = torch.randn(int(million * 5e5))
    print(f"{weights.numel():,} parameters, {x.numel():,} elements for percentiles")
    lines = [
        ("describe(layerwise=True)", 8.0, lambda: weights.describe(layerwise=True), lambda: [t.sum() for t in tensors]),
        ("describe()", 8.0, weights.describe, lambda: [t.sum() for t in tensors]),
        ("norm(2)", 2.5, lambda: weights.norm(2), lambda: [t.sum() for t in tensors]),
        ("snapshot / clone", 1.3, lambda: get_weight(model), lambda: [p.detach().clone() for p in model.parameters()]),
        ("percentiles, 7 of them", 60.0, lambda: percentiles(x), x.sum),
    ]
    exceeded = False
    for name, limit, work, yardstick in lines:
        work()
        found = ratios(work, yardstick, 3 if "percentiles" in name else REPETITIONS)
        median = statistics.median(found)
        exceeded |= median > limit
        print(f"{name:26} {median:6.2f}  ({min(found):.2f} … {max(found):.2f})  limit {limit}")
    return int(exceeded)


if __name__ == "__main__":
    sys.exit(main(*(float(argument) for argument in sys.argv[1:])))
