"""Bandwidths of the C++ kernels on one thread, in turn with ``torch.sum``, for tensors in and out of the caches.

With ``--before FILE`` also those of another version of ``kernels.cpp``, which is compiled for this processor alone, as it was
before the kernels chose their instructions at run time.  Of each operation the fastest of some repetitions counts, in CPU time.
The bytes of a difference are those of both tensors.
"""

import argparse
import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from ikkuna.numerics.statistics.native import library
from ikkuna.numerics.statistics.native.kernels import VARIANTS

FLAGS = "-std=c++17 -O3 -fopenmp-simd -fno-math-errno -fno-trapping-math -march=native -mprefer-vector-width=512 -shared -fPIC"
WANTED = {"norm": 0, "full": 1, "skewness and kurtosis": 3}
Operation = Callable[[], object]


def compiled(source: Path) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as directory:
        made = Path(directory) / "kernels.so"
        subprocess.run(["g++", *FLAGS.split(), "-o", made, source], check=True)
        return ctypes.CDLL(str(made))


def operations(n: int, before: ctypes.CDLL | None) -> dict[tuple[str, str], tuple[int, Operation]]:
    """Return by operation and kernel the bytes that are read, and the call."""
    kernels, row = library(), np.zeros(14)
    assert kernels is not None
    x, y = torch.randn(n), torch.randn(n)
    result: dict[tuple[str, str], tuple[int, Operation]] = {("sum", "torch"): (4 * n, x.sum)}

    def call(function: Callable[..., None], *arguments: object) -> Operation:
        def run(_kept: object = (x, y)) -> None:
            row.fill(0)
            function(*arguments, row.ctypes.data)

        return run

    for name, wanted in WANTED.items():
        for title, size, addresses, function, new in (
            (name, 4 * n, [x.data_ptr()], "measure_float32", kernels._measure),
            (
                f"{name} of a difference",
                8 * n,
                [x.data_ptr(), y.data_ptr()],
                "measure_difference_float32",
                kernels._difference,
            ),
        ):
            if before is not None:
                old = getattr(before, function)
                old.argtypes = [*[ctypes.c_void_p] * len(addresses), ctypes.c_int64, ctypes.c_int, ctypes.c_void_p]
                result[title, "before"] = size, call(old, *addresses, n, wanted)
            for variant in filter(kernels.use, VARIANTS):
                result[title, variant] = size, call(new[torch.float32], *addresses, n, wanted)
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--before", type=Path, help="another version of kernels.cpp")
    parser.add_argument("--elements", type=int, nargs="+", default=[1 << 16, 1 << 20, 1 << 26])
    parser.add_argument("--repetitions", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    before = None if arguments.before is None else compiled(arguments.before)
    print(
        f"| GB/s | {' | '.join(f'{n:,} elements' for n in arguments.elements)} |\n|---|{'---|' * len(arguments.elements)}"
    )
    table: dict[tuple[str, str], list[str]] = {}
    for n in arguments.elements:
        calls = operations(n, before)
        best = dict.fromkeys(calls, float("inf"))
        times = max(1, (1 << 20) // n)
        for _ in range(arguments.repetitions):
            for key, (_size, run) in calls.items():
                if key[1] in VARIANTS:
                    library().use(key[1])
                run()
                began = time.thread_time_ns()
                for _ in range(times):
                    run()
                best[key] = min(best[key], (time.thread_time_ns() - began) / times)
        for key, (size, _) in calls.items():
            table.setdefault(key, []).append(f"{size / best[key]:.1f}")
    for (name, kernel), row in table.items():
        print(f"| {name}, {kernel} | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
