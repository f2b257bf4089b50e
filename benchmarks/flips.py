"""Bits flipped on one rank of a training: how often the rule about ranks names tensor and rank, and what that costs.

    python benchmarks/flips.py [--count 100] [--out benchmarks/flips.md]

A bit of a weight, a gradient (after reduction) or a state of AdamW is flipped on one rank, in trainings of 12 steps on gloo with DDP and
with FSDP2 on a mesh with two replicas, on 2 and 4 ranks; tensor, element, bit and rank are drawn from a seed.
A flipped state that is not named counts as gone if all weights and states are equal in the end: the optimizer has rounded the
difference away.
The cost is the process CPU time of one thread, interleaved with a sum of the same tensor.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ikkuna.numerics import bits
from tests.distributed import replicas
from tests.distributed.launch import launch

COUNT = "IKKUNA_FLIPS"
"""The environment variable by which the processes learn the number of flips."""
STRATEGIES = {"ddp": "DDP", "hsdp": "FSDP2 with replicas"}


def verdict(case: Any, findings: list[Any], holders: list[int], are_equal: bool) -> str:
    """Return how a flip was found: at the next sample of its tensor, earlier by what it changed, or not."""
    what, module, name, _, _, rank = case
    if not holders:
        return "empty shard"
    if not findings:
        return "gone" if are_equal and what.startswith("exp_avg") else "missed"
    found, step, message, _ = findings[0]
    odd = f"rank {rank} differs" if len(holders) > 2 else "ranks {} and {} differ".format(*holders)
    is_right = found == module and f"{name}: {odd}" in message
    limit = replicas.FLIPPED + (0 if what == "gradients" else 1 if what == "weights" else 8)
    return "named" if is_right and replicas.FLIPPED <= step <= limit else "wrong"


def flips() -> list[str]:
    """Return the rows of the table."""
    rows = []
    for strategy, title in STRATEGIES.items():
        for size in (2, 4):
            with tempfile.TemporaryDirectory() as directory:
                outcomes = launch([f"benchmarks.flips:many_{strategy}"], size, Path(directory), deadline=3600.0)
            by_kind: dict[str, Counter[str]] = {}
            for case, *found in outcomes[0][f"many_{strategy}"]:
                by_kind.setdefault(case[0], Counter())[verdict(case, *found)] += 1
            for kind, counts in sorted(by_kind.items()):
                shown = " | ".join(str(counts[each]) for each in ("named", "wrong", "missed", "gone", "empty shard"))
                rows.append(f"| {title}, {size} ranks | {kind} | {shown} |")
                print(rows[-1], flush=True)
    return rows


def many_ddp(rank: int, size: int) -> list[Any]:
    return replicas.flips_of("ddp", size, int(os.environ[COUNT]), seed=1)


def many_hsdp(rank: int, size: int) -> list[Any]:
    return replicas.flips_of("hsdp", size, int(os.environ[COUNT]), seed=1)


def milliseconds(function: Callable[[torch.Tensor], Any], x: torch.Tensor) -> float:
    function(x)
    taken = []
    for _ in range(5):
        begin = time.process_time()
        function(x)
        taken.append(time.process_time() - begin)
    return 1e3 * statistics.median(taken)


def costs() -> list[str]:
    """Return the rows of the table of costs for 10^8 elements."""
    torch.set_num_threads(1)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(10**8).to(dtype)
        words = bits.words_of(x)
        functions = {"native": bits.bit_sum, "operators": lambda x, words=words: bits._sum_by_torch(words)}
        functions |= {"torch.sum": torch.sum, "torch.hash_tensor": torch.hash_tensor}
        taken = " | ".join(f"{milliseconds(function, x):.0f}" for function in functions.values())
        rows.append(f"| {dtype} | {taken} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=100, help="flips for each strategy and number of ranks")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    options = parser.parse_args()
    os.environ[COUNT] = str(options.count)
    lines = [
        "# Flipped bits",
        "",
        "`python benchmarks/flips.py`, torch on gloo. `named`: tensor and rank (of two replicas: both) are right, at the next sample of "
        "the tensor, or before it by the weights that a flipped state has changed. `gone`: the optimizer has rounded the difference away, "
        "so that no rank differs at the next sample.",
        "",
        "| training | tensor | named | wrong | missed | gone | empty shard |",
        "|---|---|---|---|---|---|---|",
        *flips(),
        "",
        "Milliseconds for 10^8 elements, process CPU time of one thread.",
        "",
        "| dtype | native | operators | torch.sum | torch.hash_tensor |",
        "|---|---|---|---|---|",
        *costs(),
    ]
    options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
