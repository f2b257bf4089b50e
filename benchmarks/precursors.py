"""Induces divergences in five ways, and measures how many steps before the loss each signal of the optimizer shows them.

Each training has a healthy twin with the same seed; the seeds are 0, 1, …

    python benchmarks/precursors.py --seeds 4 --file precursors.jsonl
"""

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path
from pydoc_data import topics

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from ikkuna.numerics.spike_score import LIMIT, spike_scores

WAYS = ("rate", "beta2", "warm-up", "bf16 attention", "data")
STEPS, BEGIN = 300, 120  # the number of steps, and the step at which the rate begins to grow and the data to change
BEFORE = 32  # values that a doubled value is compared with
USED = 50  # an alarm earlier than this before the divergence is not about it


class Block(nn.Module):
    """A causal transformer block, normalised after each sum, whose attention may be computed in bfloat16."""

    def __init__(self, width, heads, dtype):
        super().__init__()
        self.heads, self.dtype = heads, dtype
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        samples, length, width = x.shape
        q, k, v = self.qkv(x).to(self.dtype).view(samples, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
        heads = (scores.softmax(-1) @ v).transpose(1, 2).reshape(samples, length, width)
        x = self.norm1(x + self.out(heads.to(x.dtype)))
        return self.norm2(x + self.down(functional.gelu(self.up(x))))


class Transformer(nn.Module):
    """A language model of bytes with four blocks."""

    def __init__(self, dtype=torch.float32, width=32, length=32):
        super().__init__()
        self.embed, self.place = nn.Embedding(128, width), nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*[Block(width, 2, dtype) for _ in range(4)])
        self.head = nn.Linear(width, 128)

    def forward(self, ids):
        return self.head(self.blocks(self.embed(ids) + self.place)).flatten(0, 1)


TEXT = torch.tensor(list("".join(topics.topics.values()).encode("ascii", "ignore")))


def text_batch(random, share):
    """Return windows of the text; a share of them is one byte again and again, with random bytes as labels."""
    begin = torch.randint(0, len(TEXT) - 33, (8,), generator=random)
    window = TEXT[begin[:, None] + torch.arange(33)]
    x, y = window[:, :-1].clone(), window[:, 1:].clone()
    bad = round(8 * share)
    x[:bad], y[:bad] = x[:bad, :1], torch.randint(0, 128, y[:bad].shape, generator=random)
    return x, y.flatten()


CENTERS = torch.randn(10, 40, generator=torch.Generator().manual_seed(0))


def cluster_batch(random, share):
    """Return points of 10 overlapping clusters; a share of them is 30 times as large."""
    y = torch.randint(0, 10, (128,), generator=random)
    x = CENTERS[y] + 3 * torch.randn(128, 40, generator=random)
    x[: round(128 * share)] *= 30
    return x, y


def perceptron():
    return nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def train(family, way, is_bad, seed):
    """Train; return the losses and, by signal, an array of (steps, tensors)."""
    torch.manual_seed(seed)
    random = torch.Generator().manual_seed(seed)
    is_text = family == "transformer"
    model = (
        Transformer(torch.bfloat16 if way == "bf16 attention" and is_bad else torch.float32)
        if is_text
        else perceptron()
    )
    usual = {"beta2": 1e-2, "warm-up": 0.7, "bf16 attention": 1e-2}.get(way, 3e-3)
    betas = (0.9, (0.5 if is_bad else 0.999) if way == "beta2" else 0.999)
    weights = list(model.parameters())
    is_adam = way != "warm-up"  # Adam without a warm-up learned less here, but did not diverge
    optimizer = (
        torch.optim.Adam(weights, usual, betas=betas) if is_adam else torch.optim.SGD(weights, usual, momentum=0.9)
    )
    losses, signals = [], defaultdict(list)
    for step in range(STEPS):
        warm = 1.0 if way == "warm-up" and is_bad else min(1.0, (step + 1) / 100)
        late = max(step - BEGIN, 0) if is_bad else 0
        rate = usual * warm * (1.04**late if way == "rate" else 1.0)
        optimizer.param_groups[0]["lr"] = rate
        x, y = (text_batch if is_text else cluster_batch)(random, min(late / 100, 1.0) if way == "data" else 0.0)
        loss = functional.cross_entropy(model(x), y)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        before = [weight.detach().clone() for weight in weights]
        optimizer.step()
        corrected = 1 - betas[1] ** (step + 1)
        for name in ("update", "update per rate", "g2/v", "weight"):
            signals[name].append([])
        for weight, old in zip(weights, before, strict=True):
            update = (weight.detach() - old).square().mean().sqrt().item()
            moment = optimizer.state[weight]["exp_avg_sq"] / corrected if is_adam else torch.tensor(math.inf)
            stale = weight.grad.square() / moment.clamp_min(1e-16)
            for name, value in {
                "update": update, "update per rate": update / rate, "g2/v": stale.mean().sqrt().item(),
                "weight": weight.detach().square().mean().sqrt().item(),
            }.items():  # fmt: skip
                signals[name][-1].append(value)
        signals["gradient"].append([math.sqrt(sum(weight.grad.square().sum().item() for weight in weights))])
        if not math.isfinite(losses[-1]):
            break
    return losses, {name: np.array(values) for name, values in signals.items()}


def divergence(losses):
    """Return the first step with a spike of the loss, or of ten whose median is 1.3 times the least such median before."""
    x = np.array(losses)
    found = [int(step) for step in np.flatnonzero((spike_scores(x) > LIMIT) | ~np.isfinite(x))[:1]]
    middles = [float(np.median(x[i : i + 10])) for i in range(len(x) - 9)]
    least = np.minimum.accumulate(middles)
    risen = [i for i in range(10, len(middles)) if middles[i] > 1.3 * least[i - 10]][:1]
    found += [i + int(np.argmax(x[i : i + 10] > 1.3 * least[i - 10])) for i in risen]
    return min(found, default=None)


def exceeds(values, factor):
    """Return whether each value is `factor` times the median of the values before it, for (steps, tensors)."""
    found = np.zeros(values.shape, bool)
    for step in range(8, len(values)):
        found[step] = ~(values[step] <= factor * np.median(values[max(step - BEFORE, 0) : step], axis=0))
    return found


def alarms(signals):
    """Return the steps at which each signal gives an alarm."""
    found = {}
    for name, series, factors in (
        ("update RMS", signals["update"], (2, 4)),
        ("update RMS over rate", signals["update per rate"], (2, 4)),
        ("weight RMS", signals["weight"], (1.25, 2)),
    ):
        for factor in factors:
            above = exceeds(series, factor)
            found[f"{name} {factor} times, one tensor"] = above.any(1)
            found[f"{name} {factor} times, half of the tensors"] = above.mean(1) >= 0.5
    for limit in (2.3, 5):
        stale = signals["g2/v"] > limit
        stale[:8] = False  # the moments have just begun
        found[f"RMS of g²/v above {limit}, one tensor"] = stale.any(1)
        found[f"RMS of g²/v above {limit}, half of the tensors"] = stale.mean(1) >= 0.5
        found[f"RMS of g²/v above {limit}, first tensor"] = stale[:, 0]
    return found | {"spike score of the gradient norm above 10": spike_scores(signals["gradient"][:, 0]) > LIMIT}


def case(family, way, is_bad, seed):
    """Return the step of the divergence, and for each signal its first alarm before it, and the number of other alarms."""
    losses, signals = train(family, way, is_bad, seed)
    at = divergence(losses)
    end = len(losses) if at is None else at
    begin = max(end - USED, BEGIN if way in ("rate", "data") else 0)  # an alarm before the cause is not about it
    result = {"family": family, "way": way, "bad": is_bad, "seed": seed, "steps": len(losses), "at": at, "signals": {}}
    for name, found in alarms(signals).items():
        steps = np.flatnonzero(found[:end])
        near = steps[steps >= begin] if at is not None else steps[:0]
        bouts = np.flatnonzero(np.diff(steps[: len(steps) - len(near)], prepend=-100) > 10)  # alarms in a row are one
        result["signals"][name] = {"lead": int(end - near[0]) if len(near) else None, "others": len(bouts)}
    return result


def table(results):
    """Print the lead of each signal for each way, and its false alarms in 1,000 steps of the twins."""
    bad = [each for each in results if each["bad"] and each["at"] is not None]
    healthy = [each for each in results if not each["bad"] and each["at"] is None]
    for way in WAYS:
        runs = [each for each in results if each["bad"] and each["way"] == way]
        print(f"{way}: {sum(each['at'] is not None for each in runs)} of {len(runs)} diverged")
    print(f"twins that diverged: {sum(not each['bad'] and each['at'] is not None for each in results)}")
    print(
        f"{'signal':52}{'leads':>10}{'median lead':>13}" + "".join(f"{way:>16}" for way in WAYS) + f"{'false/1000':>12}"
    )
    for name in results[0]["signals"]:
        leads = [each["signals"][name]["lead"] for each in bad]
        known = [lead for lead in leads if lead]
        by_way = []
        for way in WAYS:
            of_way = [each["signals"][name]["lead"] for each in bad if each["way"] == way]
            ahead = [lead for lead in of_way if lead]
            by_way.append(f"{len(ahead)}/{len(of_way)}" + (f" ({np.median(ahead):.0f})" if ahead else ""))
        false = sum(each["signals"][name]["others"] for each in healthy) / max(
            sum(each["steps"] for each in healthy), 1
        )
        print(
            f"{name:52}{len(known):>5}/{len(leads):<4}{np.median(known) if known else math.nan:>13.0f}"
            + "".join(f"{each:>16}" for each in by_way) + f"{1000 * false:>12.1f}"
        )  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--file", type=Path, default=Path(__file__).with_suffix(".jsonl"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    known = [json.loads(line) for line in options.file.read_text().splitlines()] if options.file.exists() else []
    done = {(each["family"], each["way"], each["bad"], each["seed"]) for each in known}
    for seed in range(options.seeds):
        for family in ("mlp", "transformer"):
            for way in WAYS:
                for is_bad in (True, False):
                    if (family, way, is_bad, seed) not in done and (family, way) != ("mlp", "bf16 attention"):
                        known.append(case(family, way, is_bad, seed))
                        with options.file.open("a") as file:
                            file.write(json.dumps(known[-1]) + "\n")
    table(known)


if __name__ == "__main__":
    main()
