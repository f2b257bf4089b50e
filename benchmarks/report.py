"""The time and the size of a report.

Times are those of one thread of a new process for each report, which imports everything: CPU time, and wall time.
The findings are stored, as those of a run that was trained with rules; without them, the rules judge every step again.
A training of 10,000 steps with the default preset has 1,000 sampled steps.

    python benchmarks/report.py [--sizes 10x10000 100x10000 1000x1000 1000x10000]
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from synthetic_run import values_of_step, write_run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", nargs="+", default=["10x10000", "100x10000", "1000x1000"])
    print("| modules | sampled steps | values | CPU s | s | MB |\n|---|---|---|---|---|---|")
    for size in parser.parse_args().sizes:
        modules, steps = map(int, size.split("x"))
        with tempfile.TemporaryDirectory() as folder:
            run, page = write_run(Path(folder) / "run", modules, steps), Path(folder) / "report.html"
            began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
            command = [sys.executable, "-m", "ikkuna", "report", str(run), "-o", str(page)]
            subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
            wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            values = values_of_step(modules) * steps
            print(
                f"| {modules} | {steps:,} | {values:,} | {seconds:.1f} | {wall:.1f} | {page.stat().st_size / 1e6:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
