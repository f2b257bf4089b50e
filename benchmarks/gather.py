"""The cost of merging measurements of many ranks: bytes, and the time to pack, gather and merge the rows of a step.

Packing and merging are measured by merging the blocks of that many ranks in one process.
Gathering is measured on loopback with 2 and 4 processes and extrapolated: gloo sends blocks around a ring, so that
a gather of blocks of M bytes on W ranks takes W - 1 turns of a + b * M seconds; a and b are fitted to what was measured.

    python benchmarks/gather.py [--ranks 8 64 1024] [--rows 100 1000 10000]
"""

import argparse
import socket
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ikkuna.distributed.block import OWN, Gather, Layouts, RankBlock, RankRows, build
from ikkuna.distributed.merge import Alignments, merge_blocks
from ikkuna.numerics.statistics import needed_fields
from ikkuna.numerics.statistics.table import COLUMN, empty_rows

FIELDS = needed_fields(("m2", "min", "max"))
SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 23)
LINK = 10e9 / 8
"""Bytes per second of the assumed link."""


def rows(count: int, rank: int) -> RankRows:
    """Return the mean, variance, minimum and maximum of so many tensors on one rank."""
    numbers = np.abs(np.random.default_rng(rank).standard_normal((4, count)))
    values = empty_rows(count)
    measured = dict(zip(("mean", "m2", "min", "max"), numbers * [[1], [1000], [-1], [1]], strict=True))
    for name, column in (measured | {"n": np.full(count, 1000.0)}).items():
        values[:, COLUMN[name]] = column
    keys = [("activations", f"layers.{i}.block", "") for i in range(count)]
    return RankRows(keys, [OWN] * count, [FIELDS] * count, values)


def seconds(function: Callable[[], Any], times: int = 3, clock: Callable[[], float] = time.process_time) -> float:
    """Return the median time of a call; by default the CPU time of this process."""
    taken = []
    for _ in range(times):
        began = clock()
        function()
        taken.append(clock() - began)
    return statistics.median(taken)


def pack_and_merge(ranks: int, count: int) -> tuple[int, float, float, float, float]:
    """Return the bytes of a block, and the seconds to pack one, to read all, to merge them, and to align them once."""
    stamp, layouts, alignments = (0, 0, 0, "training"), Layouts(), Alignments()
    written = rows(count, 0)
    first = build(stamp, written, 0, layouts).pack(layouts)
    packed = build(stamp, written, 0, layouts).pack(layouts)
    packing = seconds(lambda: build(stamp, written, 0, layouts).pack(layouts))
    for rank in range(ranks):
        RankBlock.unpack(rank, first, layouts)

    def read() -> list[RankBlock]:
        return [RankBlock.unpack(rank, packed, layouts) for rank in range(ranks)]

    blocks = read()
    finding = seconds(lambda: alignments.of([block.layout for block in blocks]), 1)
    return len(packed), packing, seconds(read), seconds(lambda: merge_blocks(blocks, alignments)), finding


def gathering(rank: int, size: int, port: int, results: Any) -> None:
    """Measure gathers of every size in one of several processes."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0)
    group = dist.ProcessGroupGloo(dist.PrefixStore("benchmark", store), rank, size, timedelta(seconds=60))
    for block in SIZES:
        gather = Gather(group, size)
        payload = bytes(block - 64)

        def once(gather: Gather = gather, payload: bytes = payload) -> None:
            gather.begin(payload)
            gather.poll(60.0)

        once()  # grows the block
        taken = seconds(once, 15, time.perf_counter)
        if rank == 0:
            results.put((size, block, taken))


def measured_gathers(sizes: tuple[int, ...] = (2, 4)) -> list[tuple[int, int, float]]:
    """Return ranks, bytes and seconds of gathers on loopback."""
    context = mp.get_context("spawn")
    found = []
    for size in sizes:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        results = context.Queue()
        processes = [context.Process(target=gathering, args=(r, size, port, results)) for r in range(size)]
        for process in processes:
            process.start()
        found += [results.get(timeout=120) for _ in SIZES]
        for process in processes:
            process.join()
    return found


def fit(measured: list[tuple[int, int, float]]) -> tuple[float, float]:
    """Return a and b of the model, fitted to relative errors."""
    turns = np.array([[size - 1, (size - 1) * block] for size, block, _ in measured], float)
    taken = np.array([t for *_, t in measured])
    (a, b), *_ = np.linalg.lstsq(turns / taken[:, None], np.ones(len(taken)), rcond=None)
    return float(a), float(b)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 64, 1024])
    parser.add_argument("--rows", type=int, nargs="*", default=[100, 1000, 10_000])
    arguments = parser.parse_args()
    measured = measured_gathers()
    a, b = fit(measured)
    print("measured on loopback:")
    for size, block, taken in measured:
        print(
            f"  {size} ranks, blocks of {block:>8} bytes: {1e3 * taken:8.2f} ms, model {1e3 * (size - 1) * (a + b * block):8.2f}"
        )
    print(f"model: (W - 1) * ({1e3 * a:.2f} ms + {1e9 * b:.2f} ns * M)\n")
    print(
        "| ranks | rows | bytes per row | block | received | pack | read | merge | gather, loopback | gather, 10 Gbit/s | align, once |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for ranks in arguments.ranks:
        for count in arguments.rows:
            size, packing, reading, merging, finding = pack_and_merge(ranks, count)
            block = 1 << (size + 7).bit_length()
            sent = (ranks - 1) * (a + b * block), (ranks - 1) * (50e-6 + block / LINK)
            times = (packing, reading, merging, *sent, finding)
            shown = " | ".join(f"{1e3 * t:.1f} ms" for t in times)
            print(
                f"| {ranks} | {count} | {size / count:.0f} | {block >> 10} KiB | {ranks * block / 2**20:.1f} MiB | {shown} |"
            )


if __name__ == "__main__":
    main()
