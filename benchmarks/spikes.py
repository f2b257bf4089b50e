"""Plants spikes in trainings, and counts how often the dump holds the batch, the row is first, and the verdict is right.

Each case is made from its number, so that a table can be continued after an interruption: cases that are in the file are left out.

    python benchmarks/spikes.py rows --cases 1000 --file benchmarks/spikes.jsonl
    python benchmarks/spikes.py rows --missed --file benchmarks/spikes.jsonl  # again those that were not noticed
    python benchmarks/spikes.py scores --cases 1000 --file benchmarks/spikes.jsonl  # without a recorder
    python benchmarks/spikes.py causes --cases 400 --file benchmarks/spikes.jsonl
    python benchmarks/spikes.py table --file benchmarks/spikes.jsonl
"""

import argparse
import copy
import json
import tempfile
from collections import defaultdict
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import nn

from ikkuna.diagnosis import RecorderOptions, read_dump
from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.row_ranking import rank_rows
from ikkuna.export.subscriber import LossSubscriber
from ikkuna.export.verdict import verdict
from ikkuna.numerics.spike_score import LIMIT, spike_scores

POISONS = ("scaled", "nan", "label", "shuffled", "outlier")
CAUSES = ("row", "state", "rate", "device", "software")
SIZES = (8, 16, 32, 64, 128, 256, 1024, 4096)
FEATURES, LENGTH, CLASSES = 12, 6, 4
WARM, HEALTHY = 150, 66  # steps without and with the recorder before the spike


class Recurrent(nn.Module):
    """The last state of an LSTM, and a linear layer."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(FEATURES, 24, batch_first=True), nn.Linear(24, CLASSES)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


class Transformer(nn.Module):
    """The mean over one encoder layer, and a linear layer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(FEATURES, 24)
        self.layer = nn.TransformerEncoderLayer(24, 2, 48, dropout=0.0, batch_first=True)
        self.head = nn.Linear(24, CLASSES)

    def forward(self, x):
        return self.head(self.layer(self.embed(x)).mean(1))


MODELS = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(FEATURES * LENGTH, 48), nn.ReLU(), nn.Linear(48, CLASSES)),
    "conv": lambda: nn.Sequential(
        nn.Conv1d(LENGTH, 16, 3, padding=1),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * FEATURES, CLASSES),
    ),
    "transformer": Transformer,
    "rnn": Recurrent,
}


@cache
def data():
    """Return sequences whose label is that of the nearest of four directions, without noise near the borders."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(CLASSES, LENGTH * FEATURES, generator=generator)
    labels = torch.randint(0, CLASSES, (8192,), generator=generator)
    x = 0.5 * torch.randn(8192, LENGTH * FEATURES, generator=generator) + directions[labels]
    return x.reshape(-1, LENGTH, FEATURES), labels


def batch(size, seed):
    x, y = data()
    rows = torch.randint(0, len(x), (size,), generator=torch.Generator().manual_seed(seed))
    return x[rows], y[rows]


@cache
def trained(name, size):
    """Return the state of a model and its optimizer after the first steps."""
    torch.manual_seed(1)
    model = MODELS[name]()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3, betas=(0.9, 0.95))
    for step in range(WARM):
        x, y = batch(min(size, 128), step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())


class Noise(nn.Module):
    """Noise whose generator no recorder knows: small always, large rarely."""

    def __init__(self, model, seed=None, large=False):
        super().__init__()
        self.model, self.random, self.large = model, np.random.default_rng(seed), large

    def forward(self, x):
        out = self.model(x) * (1 + 1e-6 * float(self.random.standard_normal()))
        return out * -60 if self.large else out


class Training:
    """A training that continues from a trained state under a flight recorder."""

    def __init__(self, name, size, directory, first, noise=False, **options):
        self.name, self.size, self.noise = name, size, noise
        self.model, self.loss, self.optimizer = self.build()
        state, optimizer = trained(name, size)
        (self.model.model if noise else self.model).load_state_dict(copy.deepcopy(state))
        self.optimizer.load_state_dict(copy.deepcopy(optimizer))
        self.exporter = Exporter(message_bus=MessageBus("spikes"), log_dir=directory, verbosity=0, on_error="raise")
        self.exporter.add_modules(self.model)
        self.exporter.set_loss(self.loss)
        self.exporter.message_bus.register_subscriber(LossSubscriber(backend="null"))
        self.exporter.apply_rules(["loss_spike", "nonfinite"], every=10, backend="null")
        self.exporter.record_steps(RecorderOptions(burst=0, state_every=1, **options))
        self.exporter.load_state_dict({"global_step": first, "train_step": first, "epoch": 0})
        self.losses = []

    def build(self):
        return self.build_of(self.name, self.noise)

    @staticmethod
    def build_of(name, noise=False):
        model = MODELS[name]()
        model = Noise(model) if noise else model
        return model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), 3e-3, betas=(0.9, 0.95))

    def step(self, x, y):
        self.optimizer.zero_grad()
        loss = self.loss(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())

    def dump(self):
        """Return the dump of the last step, whether a finding names this step, and whether a dump was written by itself."""
        last = self.exporter._session.context.tracker.counters.next.global_step - 1
        path = self.exporter.dump(timeout=300.0)
        self.exporter.close()
        own = [each for each in self.exporter.dumps if each != path and read_dump(each).step == last]
        is_noticed = any(last in (finding.step, *finding.again) for finding in self.exporter.findings)
        return read_dump(path), is_noticed, bool(own)


def poisoned(x, y, kind, row, random):
    x, y = x.clone(), y.clone()
    if kind == "scaled":
        x[row] *= float(random.uniform(20, 200))
    elif kind == "nan":
        x[row, int(random.integers(LENGTH)), int(random.integers(FEATURES))] = float("nan")
    elif kind == "label":
        y[row] = (y[row] + int(random.integers(1, CLASSES))) % CLASSES
    elif kind == "shuffled":
        flat = x[row].reshape(-1)
        x[row] = flat[torch.from_numpy(random.permutation(len(flat)))].reshape(x[row].shape)
    else:
        x[row, int(random.integers(LENGTH)), int(random.integers(FEATURES))] += float(
            random.choice([-1, 1]) * random.uniform(50, 500)
        )
    return x, y


def deviations(losses):
    """Return how many robust deviations the last loss is above the median of those before it."""
    past, last = np.array(losses[:-1]), losses[-1]
    deviation = 1.4826 * np.median(np.abs(past - np.median(past)))
    return float("inf") if not np.isfinite(last) else float((last - np.median(past)) / max(deviation, 1e-12))


def row_case(number):
    """Plant one poisoned row, and return where the ranking has it."""
    random = np.random.default_rng(number)
    kind, name = POISONS[number % 5], list(MODELS)[number // 5 % 4]
    size = SIZES[number // 20 % len(SIZES)]
    first = int(random.integers(0, 40))  # the spike is at every step modulo the sampling
    with tempfile.TemporaryDirectory() as directory:
        training = Training(name, size, directory, first)
        for step in range(HEALTHY):
            training.step(*batch(size, 1_000 * number + step))
        row = int(random.integers(size))
        x, y = poisoned(*batch(size, 1_000 * number + 999), kind, row, random)
        training.step(x, y)
        dump, is_noticed, is_dumped = training.dump()
        kept = (
            [each for each in dump.tensors("batches.pt") if each["step"] == dump.step] if dump.has("batches.pt") else []
        )
        has_batch = bool(kept) and torch.equal(kept[0]["model_calls"][0][0][0].nan_to_num(7.0), x.nan_to_num(7.0))
        ranking = rank_rows(dump, *training.build())
        place = next(i for i, each in enumerate(ranking.rows) if each.number == row)
    return {
        "case": number, "what": "row", "kind": kind, "model": name, "size": size, "step": first + HEALTHY, "noticed": is_noticed,
        "dumped": is_dumped, "deviations": deviations(training.losses), "batch": has_batch, "place": place,
        "out": ranking.rows[place].stands_out,
    }  # fmt: skip


def score_case(number):
    """Plant the row of `row_case` without a recorder, and return the score of its loss."""
    random = np.random.default_rng(number)
    kind, name = POISONS[number % 5], list(MODELS)[number // 5 % 4]
    size = SIZES[number // 20 % len(SIZES)]
    random.integers(0, 40)
    model, loss, optimizer = Training.build_of(name)
    state, of_optimizer = trained(name, size)
    model.load_state_dict(copy.deepcopy(state))
    optimizer.load_state_dict(copy.deepcopy(of_optimizer))
    losses = []
    for step in range(HEALTHY + 1):
        x, y = batch(size, 1_000 * number + (999 if step == HEALTHY else step))
        if step == HEALTHY:
            x, y = poisoned(x, y, kind, int(random.integers(size)), random)
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    far = (losses[-1] - np.median(losses[:-1])) / (max(losses[:-1]) - np.median(losses[:-1]))
    return {
        "case": number, "what": "score", "kind": kind, "model": name, "size": size, "deviations": deviations(losses),
        "score": float(spike_scores(losses)[-1]), "over_largest": float(far),
    }  # fmt: skip


def flip(tensor, random):
    """Set one of the high bits of the exponent of one element that is not set."""
    values = tensor.detach().view(-1)
    bits = values.view(torch.int32)
    place = int(random.integers(len(values)))
    free = [bit for bit in range(27, 31) if not int(bits[place]) >> bit & 1]
    with torch.no_grad():
        bits[place] = bits[place] ^ (1 << int(random.choice(free)))


def planted(cause, training, x, y, random):
    """Plant a cause before the last step; return the batch, what was done, and the handle of a hook."""
    weights = [p for p in training.model.parameters() if p.ndim > 1]
    modules = [m for m in training.model.modules() if isinstance(m, nn.Linear | nn.Conv1d)]
    if cause == "row":
        variant = POISONS[int(random.integers(5))]
        return (*poisoned(x, y, variant, int(random.integers(len(x))), random), variant, None)
    if cause == "rate":
        training.optimizer.param_groups[0]["lr"] = 3e-3
    elif cause == "software":
        training.model.large = True
    elif cause == "state":
        chosen = weights[int(random.integers(len(weights)))]
        variant = str(random.choice(["scaled", "new"]))
        with torch.no_grad():
            chosen.mul_(float(random.uniform(-20, -5))) if variant == "scaled" else chosen.copy_(
                torch.randn(chosen.shape)
            )
        return x, y, variant, None
    elif random.random() < 0.5:
        flip(weights[int(random.integers(len(weights)))], random)
        return x, y, "weight", None
    else:
        module = modules[int(random.integers(len(modules)))]
        return x, y, "activation", module.register_forward_hook(lambda module, args, output: flip(output, random))
    return x, y, "", None


def cause_case(number):
    """Plant one cause, and return the verdict."""
    random = np.random.default_rng(10_000 + number)
    cause, name = CAUSES[number % 5], list(MODELS)[number // 5 % 4]
    size = (8, 16, 32, 64)[number // 20 % 4]
    with tempfile.TemporaryDirectory() as directory:
        training = Training(name, size, directory, int(random.integers(0, 40)), noise=cause == "software")
        for step in range(HEALTHY):
            if cause == "rate" and step == HEALTHY - 1:
                training.optimizer.param_groups[0]["lr"] *= float(10 ** random.uniform(1.5, 3.5))
            training.step(*batch(size, 1_000 * number + step))
        x, y = batch(size, 1_000 * number + 999)
        x, y, variant, handle = planted(cause, training, x, y, random)
        training.step(x, y)
        if handle is not None:
            handle.remove()
        if (far := deviations(training.losses)) < 10:
            training.exporter.close()
            return {
                "case": number,
                "what": "cause",
                "cause": cause,
                "variant": variant,
                "model": name,
                "size": size,
                "deviations": far,
            }
        dump, *_ = training.dump()
        if cause == "software":
            training.model.large = False
        found = verdict(dump, *training.build())
    return {
        "case": number, "what": "cause", "cause": cause, "variant": variant, "model": name, "size": size, "deviations": far,
        "verdict": found.cause, "certain": found.is_certain,
    }  # fmt: skip


def table(results):
    """Print the counts."""
    rows = [each for each in results if each["what"] == "row"]
    spikes = [each for each in rows if each["deviations"] > 10]
    print(f"rows: {len(rows)} cases, {len(spikes)} of them beyond 10 deviations")
    groups = defaultdict(list)
    for each in spikes:
        for key in ("all", f"kind {each['kind']}", f"model {each['model']}", f"size {each['size']}"):
            groups[key].append(each)
    for key, cases in sorted(groups.items()):
        shares = [sum(map(test, cases)) / len(cases) for test in (
            lambda c: c["noticed"], lambda c: c["batch"], lambda c: c["place"] == 0, lambda c: c["place"] < 5)]  # fmt: skip
        print(
            f"  {key:20} {len(cases):5}  noticed {shares[0]:.1%}  batch {shares[1]:.1%}  first {shares[2]:.1%}  in five {shares[3]:.1%}"
        )
    weak = [each for each in rows if each["deviations"] <= 10]
    for low, high in ((0, 2), (2, 5), (5, 10)):
        cases = [each for each in weak if low <= max(each["deviations"], 0) < high]
        if cases:
            print(
                f"  {low} to {high} deviations: {len(cases)}, first {sum(c['place'] == 0 for c in cases) / len(cases):.1%}"
            )
    scored = [each for each in results if each["what"] == "score"]
    spikes = [each for each in scored if each["deviations"] > 10]
    missed = [each for each in spikes if each["score"] <= LIMIT]
    print(
        f"scores after {HEALTHY} steps: {len(scored)} cases, {len(spikes)} of them beyond 10 deviations, {len(missed)} missed"
    )
    for each in missed:
        print(
            f"  case {each['case']}: score {each['score']:.1f}, {each['over_largest']:.1f} times as far as the largest before"
        )
    causes = [each for each in results if each["what"] == "cause" and "verdict" in each]
    print(f"causes: {len(causes)} cases beyond 10 deviations")
    for cause in ("all", *CAUSES):
        cases = [each for each in causes if cause in ("all", each["cause"])]
        if cases:
            right = sum(c["verdict"] == c["cause"] for c in cases)
            wrong = sum(c["verdict"] != c["cause"] and c["certain"] for c in cases)
            open_cases = sum(c["verdict"] is None for c in cases)
            print(
                f"  {cause:10} {len(cases):4}  right {right / len(cases):.1%}  wrong, certain {wrong / len(cases):.1%}  open {open_cases}"
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("rows", "scores", "causes", "table"))
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--missed", action="store_true", help="run those cases of the file again that were not noticed")
    parser.add_argument("--file", type=Path, default=Path(__file__).with_suffix(".jsonl"))
    options = parser.parse_args()
    lines = options.file.read_text().splitlines() if options.file.exists() else []
    known = {(each["what"], each["case"]): each for each in map(json.loads, lines)}  # the last of each
    if options.what == "table":
        table(known.values())
        return
    case, what = {"rows": (row_case, "row"), "scores": (score_case, "score"), "causes": (cause_case, "cause")}[
        options.what
    ]
    numbers = [n for n in range(options.first, options.first + options.cases) if (what, n) not in known]
    if options.missed:
        numbers = [n for (w, n), each in known.items() if w == what and each["deviations"] > 10 and not each["noticed"]]
    for number in numbers:
        result = case(number)
        with options.file.open("a") as file:
            file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
