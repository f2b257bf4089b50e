"""The cost of a logger whose network does not answer for a minute: time of a training step with it over one without.

A function is the logger; its first call returns after 60 seconds.  Steps with it, with a logger that answers at once,
and without a logger are interleaved in one run, with one thread; the result is the median of the ratios, of the
process CPU time and of the time on the clock.

    python benchmarks/stalled_logger.py [--rounds 41] [--steps 100]
"""

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable

import torch
from torch import nn

from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import NormSubscriber

SECONDS = 60.0


class Training:
    """A small network whose weight norms a backend shows in every step."""

    def __init__(self, backend: object, directory: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(8)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.x = torch.randn(128, 256)
        self.exporter = Exporter(message_bus=MessageBus("stalled"), log_dir=directory, verbosity=0)
        self.exporter.add_modules(self.model)
        self.exporter.message_bus.register_subscriber(NormSubscriber("weights", backend=backend))  # type: ignore[arg-type]

    def seconds(self, steps: int) -> tuple[float, float]:
        """Return the CPU time and the time on the clock of some steps."""
        cpu, clock = time.process_time(), time.perf_counter()
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(self.x).square().mean().backward()
            self.optimizer.step()
        return time.process_time() - cpu, time.perf_counter() - clock


def stalled() -> Callable[[str, float, int], None]:
    """Return a logger whose first call takes a minute."""
    network = threading.Event()

    def log(tag: str, value: float, step: int) -> None:
        network.wait(SECONDS)
        network.set()

    return log


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        loggers = {"none": "null", "answers": lambda tag, value, step: None, "stalls": stalled()}
        trainings = {name: Training(logger, directory) for name, logger in loggers.items()}
        begin = time.perf_counter()
        rounds = [
            {name: training.seconds(arguments.steps) for name, training in trainings.items()}
            for _ in range(arguments.rounds)
        ]
        total = time.perf_counter() - begin
        for name, training in trainings.items():
            ratios = [[each[name][i] / each["none"][i] for each in rounds] for i in (0, 1)]
            cpu, clock = map(statistics.median, ratios)
            health = training.exporter.health()
            print(f"{name:8} CPU {cpu:.3f}  clock {clock:.3f}  steps {health.steps}  dropped {health.dropped}")
            training.exporter.close()
        print(f"{total:.0f} s in all")


if __name__ == "__main__":
    main()
