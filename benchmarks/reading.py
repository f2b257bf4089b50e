"""Time to read event files with `ikkuna.reading`, with and without its native library, and with ``EventAccumulator``.

All read the same files in one interleaved run; times are process CPU time on one thread.
``packed`` has one event for each step, as ikkuna writes; ``single`` has one event for each value, as most other writers do.

    python benchmarks/reading.py [--values 10000000] [--accumulator-values 500000]
"""

import argparse
import tempfile
import time
from pathlib import Path

from synthetic_run import values_of_step, write_run

from ikkuna.reading import StoredRun
from ikkuna.store.event_format import float32, scalar_prefix
from ikkuna.store.event_records import step_record


def write_single(directory, values: int) -> Path:
    directory.mkdir(parents=True)
    prefixes = [scalar_prefix(f"weights_norm2/features.{i}") for i in range(100)]
    with open(directory / "events.out.tfevents.1", "wb") as file:
        for i in range(values):
            file.write(step_record(prefixes[i % 100] + float32(i), i // 100, 1e9))
    return directory


def accumulate(directory) -> int:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()
    return sum(len(accumulator.Scalars(tag)) for tag in accumulator.Tags()["scalars"])


READERS = {
    "native": lambda directory: StoredRun(directory).count,
    "Python": lambda directory: StoredRun(directory, is_native=False).count,
    "EventAccumulator": accumulate,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--values", type=int, default=10_000_000)
    parser.add_argument("--accumulator-values", type=int, default=500_000)
    parser.add_argument("--single-values", type=int, default=500_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        files = {
            "packed": write_run(root / "a", 100, options.values // values_of_step(100), histograms=0),
            "packed, small": write_run(
                root / "b", 100, options.accumulator_values // values_of_step(100), histograms=0
            ),
            "single": write_single(root / "c", options.single_values),
        }
        print("| file | values | MB | reader | CPU s | values per s |\n|---|---|---|---|---|---|")
        for name, directory in files.items():
            size = sum(file.stat().st_size for file in directory.iterdir()) / 1e6
            for reader, read in READERS.items():
                if reader == "EventAccumulator" and name == "packed":
                    continue
                began = time.process_time()
                count = read(directory)
                seconds = time.process_time() - began
                print(
                    f"| {name} | {count:,} | {size:.0f} | {reader} | {seconds:.2f} | {count / seconds:,.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
