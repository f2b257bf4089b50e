"""Whether memory grows with steps: a small model under norms of five kinds, shown in TensorBoard and as lines.

    python benchmarks/memory.py [steps]

Once the resident memory of the process is noted along the way, and once, in a process of its own since noting costs memory,
what Python has allocated (``tracemalloc``).  The first seconds and the first half are warm-up.
The exit status is 1 if the slope of the rest, a least-squares line, is more than `LIMITS` allow.
"""

import gc
import os
import subprocess
import sys
import tempfile
import time
import tracemalloc

import numpy as np
import torch
from torch import nn

from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import NormSubscriber

KINDS = ("activations", "layer_gradients", "weights", "weight_gradients", "weight_updates")
NOTES = 200
WARM_UP = 20.0
"""Seconds before the first step that counts: the first picture of a heatmap is drawn after 15, and takes 7 MiB for good."""
LIMITS = {"resident": 50.0, "tracemalloc": 1.0}
"""Bytes a step.  What the system grants comes in pieces of up to 100 KiB, which a run of 20,000 steps does not average out."""


def resident():
    """Return the resident memory of this process, in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def allocated():
    """Return what Python has allocated, in bytes."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def noted(steps, look):
    """Train for `steps` under norms of five kinds; return (step, bytes) along the way."""
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(8, 4)
    notes = np.zeros((NOTES, 2))  # made before, and of a fixed size
    with tempfile.TemporaryDirectory() as directory, Exporter(message_bus=MessageBus(), log_dir=directory) as exporter:
        exporter.add_modules(model)
        for kind in KINDS:
            exporter.message_bus.register_subscriber(NormSubscriber(kind, backend=["tb", "jsonl"]))

        def train():
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
            optimizer.step()

        begin = time.monotonic()
        while time.monotonic() < begin + WARM_UP:
            train()
        before = exporter.health().steps
        for step in range(steps):
            train()
            if (step + 1) % (steps // NOTES) == 0:
                exporter.message_bus.run.flush(30)
                notes[(step + 1) // (steps // NOTES) - 1] = step + 1, look()
        assert exporter.health().steps == before + steps
        assert not exporter.health().errors
    return notes


def slope(notes):
    """Return growth after the warm-up, in bytes a step, of the line through all notes of the second half."""
    steps, memory = notes[len(notes) // 2 :].T
    return np.polyfit(steps, memory, 1)[0]


def report(name, steps, look):
    """Train, print what was seen, and say whether memory grows."""
    notes = noted(steps, look)
    memory = notes[:, 1] / 2**20
    warm = memory[len(memory) // 2 :]
    grown = slope(notes)
    print(
        f"{name:12} {steps:,} steps: {memory[0]:.2f} MiB at first, {warm[0]:.3f} after the warm-up, {warm[-1]:.3f} at the end "
        f"(between {warm.min():.3f} and {warm.max():.3f}); {grown:+.3f} bytes a step"
    )
    return grown <= LIMITS[name]


def main(steps=100_000, *way):
    if way == ("resident",):
        return not report("resident", steps, resident)
    if way == ("tracemalloc",):
        tracemalloc.start()
        return not report("tracemalloc", steps, allocated)
    runs = [
        subprocess.run([sys.executable, __file__, str(steps), name], check=False)
        for name in ("resident", "tracemalloc")
    ]
    return int(any(run.returncode for run in runs))


if __name__ == "__main__":
    sys.exit(main(*(int(sys.argv[1]) if i == 1 else sys.argv[i] for i in range(1, len(sys.argv)))))
