"""Trains small healthy networks, and counts the alarms of the spike scores of their losses and gradient norms.

The rate of alarms is printed with its 95 % interval (Garwood's, of a Poisson number).  Each training is made from its number, and its two
series are a file, so that a collection can be continued, and scored again after a change of the score without training.
``findings`` repeats the trainings with an alarm of the loss while they are watched, and prints what the user is told of each.

    python benchmarks/healthy_losses.py train --cases 500 --directory /tmp/healthy_losses
    python benchmarks/healthy_losses.py table --directory /tmp/healthy_losses
    python benchmarks/healthy_losses.py findings --directory /tmp/healthy_losses
    python benchmarks/healthy_losses.py train --held-out --first 80000 --cases 480 --directory /tmp/held_out
"""

import argparse
import logging
import math
import tempfile
import time
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from pydoc_data import topics

import numpy as np
import torch
from scipy.stats import chi2
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import ikkuna
from ikkuna.numerics.spike_score import LIMIT, spike_scores

STEPS = 400
SIZES = (1, 2, 8, 32, 64)
VOCABULARY, LENGTH = 128, 16


@cache
def images():
    data = load_digits()
    return torch.tensor(data.images / 8 - 1, dtype=torch.float32), torch.tensor(data.target)


@cache
def characters():
    return torch.tensor(list("".join(topics.topics.values()).encode("ascii", "ignore")))


def image_batch(size):
    x, y = images()
    rows = torch.randint(len(x), (size,))
    return x[rows], y[rows]


def text_batch(size):
    ids = characters()
    window = ids[torch.randint(len(ids) - LENGTH - 1, (size, 1)) + torch.arange(LENGTH + 1)]
    return window[:, :-1], window[:, 1:]


class Last(nn.Module):
    """The logits of each position of a recurrent network."""

    def __init__(self, width=32):
        super().__init__()
        self.embed, self.lstm = nn.Embedding(VOCABULARY, width), nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids):
        return self.head(self.lstm(self.embed(ids))[0])


class Attention(nn.Module):
    """A causal language model with one block."""

    def __init__(self, dropout, width=32):
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, width), nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.block = nn.TransformerEncoderLayer(width, 2, 64, dropout, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, VOCABULARY)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, ids):
        return self.head(self.block(self.embed(ids) + self.place, src_mask=self.mask, is_causal=True))


def classifier(model, batch, smoothing=0.0, flipped=0.0):
    """Return a function of a loss; a share of the labels may be wrong."""

    def loss():
        x, y = batch()
        wrong = torch.rand(y.shape) < flipped
        y = torch.where(wrong, torch.randint_like(y, 10), y)
        return functional.cross_entropy(model(x).flatten(0, -2), y.flatten(), label_smoothing=smoothing)

    return [(list(model.parameters()), loss)]


def mlp(random, size):
    depth, layers = int(random.integers(1, 4)), [nn.Flatten(), nn.Linear(64, 48), nn.ReLU()]
    for _ in range(depth - 1):
        layers += [nn.Linear(48, 48), random.choice([nn.ReLU, nn.Tanh])(), nn.Dropout(float(random.choice([0.0, 0.2])))]
    return classifier(
        nn.Sequential(*layers, nn.Linear(48, 10)),
        lambda: image_batch(size),
        flipped=float(random.choice([0, 0.1, 0.3])),
    )


def conv(random, size):
    norm = nn.BatchNorm2d(8) if size > 2 else nn.GroupNorm(2, 8)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 8)), nn.Conv2d(1, 8, 3, padding=1), norm, nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3),
        nn.ReLU(), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
    return classifier(model, lambda: image_batch(size), smoothing=float(random.choice([0.0, 0.1])))


def rnn(random, size):
    return classifier(Last(), lambda: text_batch(size))


def transformer(random, size):
    return classifier(Attention(float(random.choice([0.0, 0.1]))), lambda: text_batch(size))


def regression(random, size):
    """The squared error of a target with noise that is normal, or has a heavy tail."""
    model, degrees = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)), float(random.choice([3, 5, 50]))
    direction = torch.randn(16)

    def loss():
        x = torch.randn(size, 16)
        noise = torch.from_numpy(random.standard_t(degrees, size)).float()
        return functional.mse_loss(model(x)[:, 0], torch.sin(x @ direction) + 0.3 * noise)

    return [(list(model.parameters()), loss)]


def rare(random, size):
    """A class that one sample in a hundred has."""
    model, direction = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)), torch.randn(16) / 4

    def batch():
        x = torch.randn(size, 16)
        return x, (x @ direction + 0.5 * torch.randn(size) > 2.6).long()

    return classifier(model, batch)


def autoencoder(random, size):
    """The bound of a variational autoencoder."""
    encode, decode = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)), nn.Linear(4, 64)

    def loss():
        x, _ = image_batch(size)
        mean, scale = encode(x).chunk(2, 1)
        out = decode(mean + torch.randn_like(mean) * scale.exp())
        kl = 0.5 * (mean.square() + (2 * scale).exp() - 2 * scale - 1).sum(1).mean()
        return functional.mse_loss(out, x.flatten(1), reduction="none").sum(1).mean() + kl

    return [([*encode.parameters(), *decode.parameters()], loss)]


def gan(random, size):
    """The losses of a generator and a discriminator, which take turns."""
    size = max(size, 8)
    make = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    judge = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def of_judge():
        angle = 2 * math.pi * torch.randint(8, (size,)) / 8
        real = torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(size, 2)
        false = make(torch.randn(size, 8)).detach()
        return functional.softplus(-judge(real)).mean() + functional.softplus(judge(false)).mean()

    def of_generator():
        return functional.softplus(-judge(make(torch.randn(size, 8)))).mean()

    return [(list(judge.parameters()), of_judge), (list(make.parameters()), of_generator)]


def cart_pole(state, action):
    """Return the next states of poles on carts ``(carts, 4)``, and which have fallen (Barto, Sutton and Anderson, 1983)."""
    x, v, angle, turn = state.unbind(1)
    pull = (action * 2 - 1) * 10 + 0.05 * turn.square() * angle.sin()
    turned = (9.8 * angle.sin() - angle.cos() * pull / 1.1) / (0.5 * (4 / 3 - 0.1 * angle.cos().square() / 1.1))
    moved = pull / 1.1 - 0.05 * turned * angle.cos() / 1.1
    state = torch.stack([x + 0.02 * v, v + 0.02 * moved, angle + 0.02 * turn, turn + 0.02 * turned], 1)
    return state, (state[:, 0].abs() > 2.4) | (state[:, 2].abs() > 0.21)


def policy(random, size):
    """The policy gradient of episodes of a pole on a cart."""
    model, discount = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2)), 0.99
    size = min(size, 8)

    def loss():
        state, alive, logs, rewards = 0.1 * torch.rand(size, 4) - 0.05, torch.ones(size), [], []
        for _ in range(60):
            chosen = torch.distributions.Categorical(logits=model(state))
            action = chosen.sample()
            logs.append(chosen.log_prob(action) * alive)
            rewards.append(alive)
            state, has_fallen = cart_pole(state, action)
            alive = alive * ~has_fallen
            if not alive.any():
                break
        returns, total = [], torch.zeros(size)
        for reward in reversed(rewards):
            returns.insert(0, total := reward + discount * total)
        return -(torch.stack(logs) * torch.stack(returns)).sum(0).mean()

    return [(list(model.parameters()), loss)]


def q_learning(random, size):
    """The error of a temporal difference, with a memory of transitions and a target network."""
    model, target = (nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2)) for _ in range(2))
    memory, count = [], [0]
    state = [0.1 * torch.rand(1, 4) - 0.05]

    def loss():
        for _ in range(1 if memory else 64):
            greedy = model(state[0]).argmax(1)
            action = greedy if torch.rand(()) > 0.1 else torch.randint(2, (1,))
            after, has_fallen = cart_pole(state[0], action)
            memory.append((state[0], action, after, has_fallen.float()))
            state[0] = 0.1 * torch.rand(1, 4) - 0.05 if has_fallen else after
        if not count[0] % 100:
            target.load_state_dict(model.state_dict())
        count[0] += 1
        before, action, after, has_fallen = map(
            torch.cat, zip(*[memory[int(i)] for i in torch.randint(len(memory), (size,))], strict=True)
        )
        with torch.no_grad():
            wanted = 1 + 0.95 * (1 - has_fallen) * target(after).amax(1)
        return functional.smooth_l1_loss(model(before).gather(1, action[:, None])[:, 0], wanted)

    return [(list(model.parameters()), loss)]


def triplet(random, size):
    """The margin between another view of an image and another image."""
    model, size = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)), max(size, 2)
    x, _ = images()

    def loss():
        rows, others = torch.randint(len(x), (size,)), torch.randint(len(x), (size,))
        view = x[rows] + 0.5 * torch.randn(size, 8, 8)
        return functional.triplet_margin_loss(model(x[rows]), model(view), model(x[others]))

    return [(list(model.parameters()), loss)]


def distillation(random, size):
    """The divergence from the probabilities of a network that is not trained."""
    teacher = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    for weight in teacher.parameters():
        weight.data.mul_(3)
        weight.requires_grad_(False)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))

    def loss():
        x, _ = image_batch(size)
        logits = model(x).log_softmax(1), teacher(x).log_softmax(1)
        return functional.kl_div(*logits, log_target=True, reduction="batchmean")

    return [(list(model.parameters()), loss)]


def quantile(random, size):
    """The 90 % quantile of a target with skewed noise."""
    model, direction = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 1)), torch.randn(8)

    def loss():
        x = torch.randn(size, 8)
        error = torch.sin(x @ direction) + torch.from_numpy(random.gamma(0.5, 1.0, size)).float() - model(x)[:, 0]
        return torch.maximum(0.9 * error, -0.1 * error).mean()

    return [(list(model.parameters()), loss)]


def rare_labels(random, size):
    """Twenty labels, each of which few samples have."""
    model = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 20))
    weights = torch.randn(16, 20) / 2

    def loss():
        x = torch.randn(size, 16)
        y = (x @ weights - 2.5 + 0.5 * torch.randn(size, 20) > 0).float()
        return functional.binary_cross_entropy_with_logits(model(x), y)

    return [(list(model.parameters()), loss)]


def variance(random, size):
    """The likelihood of a target whose noise differs between samples."""
    model, direction = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2)), torch.randn(8)

    def loss():
        x = torch.randn(size, 8)
        out = model(x)
        target = torch.sin(x @ direction) + (0.1 + 0.2 * x[:, 0].abs()) * torch.randn(size)
        return functional.gaussian_nll_loss(out[:, 0], target, out[:, 1].exp().clamp(max=100))

    return [(list(model.parameters()), loss)]


def log_normal(random, size):
    """The squared error of a target whose noise is log-normal."""
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 1))
    direction, scale = torch.randn(8) / 3, float(random.choice([0.3, 0.6]))

    def loss():
        x = torch.randn(size, 8)
        return functional.mse_loss(model(x)[:, 0], (x @ direction + scale * torch.randn(size)).exp())

    return [(list(model.parameters()), loss)]


def actor_critic(random, size):
    """An actor and a critic, whose errors grow as the poles stand longer."""
    actor, critic = (nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, count)) for count in (2, 1))
    size = min(max(size, 4), 16)
    states = [0.1 * torch.rand(size, 4) - 0.05]

    def loss():
        total, state = 0, states[0]
        for _ in range(5):
            chosen = torch.distributions.Categorical(logits=actor(state))
            action = chosen.sample()
            after, has_fallen = cart_pole(state, action)
            advantage = 1 + 0.95 * (~has_fallen).float() * critic(after)[:, 0].detach() - critic(state)[:, 0]
            of_actor = -(chosen.log_prob(action) * advantage.detach()).mean()
            total = total + of_actor + 0.5 * advantage.square().mean() - 0.01 * chosen.entropy().mean()
            state = torch.where(has_fallen[:, None], 0.1 * torch.rand(size, 4) - 0.05, after)
        states[0] = state
        return total / 5

    return [([*actor.parameters(), *critic.parameters()], loss)]


def huber(random, size):
    """The Huber loss of a target whose noise has a heavy tail."""
    model, direction = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 1)), torch.randn(8)

    def loss():
        x = torch.randn(size, 8)
        target = torch.sin(x @ direction) + 0.2 * torch.from_numpy(random.standard_t(3, size)).float()
        return functional.smooth_l1_loss(model(x)[:, 0], target)

    return [(list(model.parameters()), loss)]


JUMPS = (rare, q_learning)
"""The loss of these jumps: at a row of a class that the batches before had not, and at a new target network."""
FAMILIES = (mlp, conv, rnn, transformer, regression, rare, autoencoder, gan, policy, q_learning)
HELD_OUT = (triplet, distillation, quantile, rare_labels, variance, log_normal, actor_critic, huber)
"""Families that were not looked at while the score was chosen."""


def schedule(kind, step):
    """Return the factor of the rate."""
    if kind == "cosine":
        return min(1, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * step / STEPS))
    return 0.1 ** (step // 200) if kind == "steps" else 1.0


def train(number, steps, families=FAMILIES, watch=None):
    """Return the losses and the gradient norms of a training; optimizers that take turns have a loss for both together.

    `watch` is called with the trained model, or several in a ``ModuleDict``, and returns its exporter.
    """
    torch.manual_seed(number)
    random = np.random.default_rng(number)
    size, rate = SIZES[number // len(families) % len(SIZES)], float(random.choice([1.0, 0.3]))
    parts = families[number % len(families)](random, size)
    kind, is_adam = str(random.choice(["constant", "cosine", "steps"])), random.random() < 0.7
    optimizers = [
        torch.optim.Adam(weights, 3e-3 * rate)
        if is_adam
        else torch.optim.SGD(weights, 0.02 * rate * min(size, 8) / 8, momentum=0.9)
        for weights, _ in parts
    ]
    losses, norms = [], []
    exporter = None if watch is None else watch(trained_model(parts))
    for step in range(steps):
        i = step % len(parts)
        weights, loss = parts[i]
        optimizers[i].param_groups[0]["lr"] = optimizers[i].defaults["lr"] * schedule(kind, step)
        optimizers[i].zero_grad()
        value = loss()
        value.backward()
        norm = nn.utils.get_total_norm([w.grad for w in weights if w.grad is not None])
        if not is_adam:
            nn.utils.clip_grads_with_norm_(weights, 5.0, norm)
        optimizers[i].step()
        losses.append(value.item())
        norms.append(norm.item())
    if exporter is not None:
        exporter.close()
    return np.array(losses), np.array(norms)


def trained_model(parts):
    """Return the modules in the closures of the losses whose weights are trained."""
    trained = {id(weight) for weights, _ in parts for weight in weights}
    cells = {id(cell.cell_contents): cell.cell_contents for _, loss in parts for cell in loss.__closure__ or ()}
    models = [x for x in cells.values() if isinstance(x, nn.Module) and trained.intersection(map(id, x.parameters()))]
    return models[0] if len(models) == 1 else nn.ModuleDict({f"model{i}": model for i, model in enumerate(models)})


def told(number, steps, families, expected):
    """Return the severities of what a user is told of the loss in a training."""
    found = []

    def watch(model):
        return ikkuna.watch(model, log_dir=directory, verbosity=0, on_finding=found.append)

    with tempfile.TemporaryDirectory() as directory:
        losses, _ = train(number, steps, families, watch)
    assert losses.tolist() == expected.tolist()
    return [f"{finding.severity} at {finding.step}" for finding in found if finding.rule == "loss_spike"]


def findings(directory, families):
    """Print what is told of the alarms of each training that has any."""
    total, alarms = Counter(), 0
    for file in sorted(directory.glob("*.npz")):
        with np.load(file) as stored:
            losses = stored["losses"]
        steps = np.flatnonzero(spike_scores(losses) > LIMIT)
        if len(steps):
            number = int(file.stem)
            said = told(number, len(losses), families, losses)
            alarms += len(steps)
            total.update(each.partition(" ")[0] for each in said)
            print(
                f"{number} {families[number % len(families)].__name__}: alarms at {steps.tolist()}; told: {', '.join(said) or 'nothing'}",
                flush=True,
            )
    print(f"{alarms} alarms; told: {dict(total)}")


def interval(count, steps):
    """Return the 95 % interval of the number of alarms in 100,000 steps."""
    low = chi2.ppf(0.025, 2 * count) / 2 if count else 0.0
    return 1e5 * low / steps, 1e5 * float(chi2.ppf(0.975, 2 * count + 2)) / 2 / steps


def table(directory, families=FAMILIES):
    """Print the alarms by family."""
    counts = defaultdict(lambda: np.zeros(4, int))
    for file in sorted(directory.glob("*.npz")):
        with np.load(file) as found:
            alarms = [int((spike_scores(found[name]) > LIMIT).sum()) for name in ("losses", "norms")]
            row = np.array([1, len(found["losses"]), *alarms])
        family = families[int(file.stem) % len(families)]
        for name in (
            family.__name__,
            "all",
            *(() if family in JUMPS or families is HELD_OUT else ("all that do not jump",)),
        ):
            counts[name] += row
    print(f"{'family':22}{'runs':>6}{'steps':>10}{'loss':>8}{'gradient':>10}")
    for name, row in sorted(counts.items(), key=lambda item: item[0].startswith("all")):
        print(f"{name:22}{row[0]:>6}{row[1]:>10,}{row[2]:>8}{row[3]:>10}")
    print("alarms in 100,000 steps, and their 95 % interval")
    for name, (_, steps, *alarms) in counts.items():
        for score, count in zip(("loss", "gradient"), map(int, alarms), strict=True) if name.startswith("all") else ():
            low, high = interval(count, int(steps))
            print(f"  {score}_spike_score, {name}: {1e5 * count / steps:.1f}, {low:.1f} to {high:.1f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "table", "findings"))
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--held-out", action="store_true", help="train the families that were held out")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no training after this CPU time")
    parser.add_argument("--directory", type=Path, default=Path("healthy_losses"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    options.directory.mkdir(parents=True, exist_ok=True)
    families = HELD_OUT if options.held_out else FAMILIES
    for number in range(options.first, options.first + options.cases) if options.what == "train" else ():
        file = options.directory / f"{number:05d}.npz"
        if not file.exists() and time.process_time() < options.seconds:
            losses, norms = train(number, options.steps, families)
            np.savez(file, losses=losses, norms=norms)
    (findings if options.what == "findings" else table)(options.directory, families)


if __name__ == "__main__":
    main()
