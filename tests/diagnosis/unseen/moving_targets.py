"""Healthy trainings whose loss may rise: networks, a policy or other data move what is trained towards."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F

from tests.diagnosis.unseen.programs import Program, blobs, loader
from tests.diagnosis.unseen.recipes import ADAPTIVE, RECIPES, Draw, recipe

__all__ = ["RECIPES"]

_CELLS = 8


class Corridor:
    """Several walks along a corridor; the right end gives a reward of 1 and begins anew."""

    def __init__(self, walks: int, slip: float) -> None:
        self.slip, self.cells = slip, torch.randint(_CELLS - 1, (walks,))

    @property
    def states(self) -> torch.Tensor:
        return F.one_hot(self.cells, _CELLS).float()

    def move(self, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rewards, and which walks have ended."""
        slips = torch.rand(len(actions)) < self.slip
        self.cells = (self.cells + 2 * (actions ^ slips.long()) - 1).clamp(0, _CELLS - 1)
        ended = self.cells == _CELLS - 1
        self.cells = torch.where(ended, torch.randint(_CELLS - 1, ended.shape), self.cells)
        return ended.float(), ended


def returns(
    rewards: list[torch.Tensor], ends: list[torch.Tensor], later: torch.Tensor, discount: float
) -> torch.Tensor:
    found = []
    for reward, ended in zip(reversed(rewards), reversed(ends), strict=True):
        later = reward + discount * later * ~ended
        found.append(later)
    return torch.stack(found[::-1])


def played(draw: Draw, model: nn.Module, rate: float, loop) -> Program:
    return Program(model, None, [], draw.optimizer(model.parameters(), rate, ADAPTIVE), loop=loop)


# --- several networks in one model ------------------------------------------------------------------------------------


def rings(rows: int = 768) -> torch.Tensor:
    angles = 6.283 * torch.rand(rows)
    return torch.stack([angles.cos(), angles.sin()], 1) + 0.05 * torch.randn(rows, 2)


def pair(draw: Draw) -> nn.ModuleDict:
    width = draw("width", 24, 48, 96)
    parts = {"generator": (4, 2), "critic": (2, 1)}
    return nn.ModuleDict(
        {
            name: nn.Sequential(
                nn.Linear(i, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, o)
            )
            for name, (i, o) in parts.items()
        }
    )


@recipe("generator and critic")
def both_in_one_model(draw):
    model, rate, epochs = pair(draw), draw("rate", 5e-4, 1e-3, 2e-3), draw("epochs", 8, 12)
    freezes, data = draw("frozen critic", True, False), draw.loader(rings())
    optimizers = {name: torch.optim.Adam(part.parameters(), rate, (0.5, 0.999)) for name, part in model.items()}

    def loop(program):
        for _ in range(epochs):
            for (real,) in data:
                generator, critic = model["generator"], model["critic"]
                ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
                critic.requires_grad_(True)
                optimizers["critic"].zero_grad()
                fake = generator(torch.randn(len(real), 4)).detach()
                loss = F.binary_cross_entropy_with_logits(critic(real), ones)
                (loss + F.binary_cross_entropy_with_logits(critic(fake), zeros)).backward()
                optimizers["critic"].step()
                critic.requires_grad_(not freezes)
                optimizers["generator"].zero_grad()
                fake = critic(generator(torch.randn(len(real), 4)))
                F.binary_cross_entropy_with_logits(fake, ones).backward()
                optimizers["generator"].step()

    return Program(model, None, data, optimizers["generator"], loop=loop)


@recipe("generator and critic")
def critic_with_a_slope_of_one(draw):
    model, rate, weight = pair(draw), draw("rate", 5e-4, 1e-3), draw("penalty", 1.0, 10.0)
    each, data = draw("steps of the critic", 1, 3), draw.loader(rings())
    optimizers = {name: torch.optim.Adam(part.parameters(), rate, (0.5, 0.9)) for name, part in model.items()}

    def loop(program):
        for _ in range(10):
            for number, (real,) in enumerate(data):
                generator, critic = model["generator"], model["critic"]
                fake = generator(torch.randn(len(real), 4)).detach()
                between = torch.lerp(real, fake, torch.rand(len(real), 1)).requires_grad_()
                (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
                optimizers["critic"].zero_grad()
                distance = critic(fake).mean() - critic(real).mean()
                (distance + weight * (slope.norm(dim=1) - 1).square().mean()).backward()
                optimizers["critic"].step()
                if number % each == 0:
                    optimizers["generator"].zero_grad()
                    (-critic(generator(torch.randn(len(real), 4))).mean()).backward()
                    optimizers["generator"].step()

    return Program(model, None, data, optimizers["generator"], loop=loop)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.weight * gradient, None


@recipe("domain adaptation")
def reversed_gradients(draw):
    weight, only_domain = draw("weight", 0.3, 1.0, 3.0), draw("share of classes", 1.0, 0.1)
    inputs, labels = blobs()
    shifted = inputs + torch.randn(20)
    body, classes, domain = (
        draw.mlp(20, 16),
        nn.Linear(16, 5),
        nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)),
    )
    model = nn.ModuleDict({"body": body, "classes": classes, "domain": domain})
    data = draw.loader(inputs, labels, shifted[torch.randperm(len(shifted))])

    def loop(program):
        for _ in range(program.epochs):
            for source, classes_of, target in data:
                features = body(torch.cat([source, target]))
                side = torch.cat([torch.ones(len(source), 1), torch.zeros(len(target), 1)])
                loss = only_domain * F.cross_entropy(classes(features[: len(source)]), classes_of)
                loss = loss + F.binary_cross_entropy_with_logits(domain(Reversed.apply(features, weight)), side)
                program.optimizer.zero_grad()
                loss.backward()
                program.optimizer.step()

    return Program(model, None, data, draw.optimizer(model.parameters(), 2e-3, ADAPTIVE), loop=loop)


# --- targets that a network makes -------------------------------------------------------------------------------------


@recipe("codes")
def codebook(draw):
    class Quantized(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = draw.mlp(12, 4), draw.mlp(4, 12)
            self.codes = nn.Embedding(draw("codes", 8, 16, 32), 4)

        def forward(self, x):
            z = self.encoder(x)
            code = self.codes(torch.cdist(z, self.codes.weight).argmin(1))
            self.distance = 0.25 * F.mse_loss(z, code.detach()) + F.mse_loss(code, z.detach())
            return self.decoder(z + (code - z).detach())

    model, inputs = Quantized(), torch.randn(768, 3) @ torch.randn(3, 12)
    return draw.program(
        model, lambda o, t: F.mse_loss(o, t) + model.distance, draw.loader(inputs, inputs), 2e-3, ADAPTIVE
    )


@recipe("self-distillation")
def averaged_teacher(draw):
    inputs, labels = blobs()
    student, keep, ramp = draw.mlp(20, 5), draw("kept", 0.9, 0.99), draw("ramp", 50, 150)
    average, data = copy.deepcopy(student), draw.loader(inputs, labels)

    def loop(program):
        number = 0
        for _ in range(program.epochs):
            for rows, classes in data:
                with torch.no_grad():
                    soft = average(rows + 0.3 * torch.randn_like(rows)).softmax(1)
                outputs = student(rows)
                known = len(rows) // 4
                agreement = F.mse_loss(outputs.softmax(1), soft)
                loss = F.cross_entropy(outputs[:known], classes[:known]) + 10 * min(1, number / ramp) * agreement
                program.optimizer.zero_grad()
                loss.backward()
                program.optimizer.step()
                with torch.no_grad():
                    for mean, value in zip(average.parameters(), student.parameters(), strict=True):
                        mean.lerp_(value, 1 - keep)
                number += 1

    return Program(student, None, data, draw.optimizer(student.parameters(), 2e-3, ADAPTIVE), loop=loop)


@recipe("self-distillation")
def predicted_views(draw):
    inputs, _ = blobs()
    online = nn.ModuleDict(
        {"body": draw.mlp(20, 16), "head": nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))}
    )
    average, data, keep = copy.deepcopy(online["body"]), draw.loader(inputs), draw("kept", 0.9, 0.99)

    def loop(program):
        for _ in range(program.epochs):
            for (rows,) in data:
                views = [rows + 0.3 * torch.randn_like(rows) for _ in range(2)]
                loss = 0.0
                for view, other in (views, views[::-1]):
                    with torch.no_grad():
                        target = F.normalize(average(other), dim=1)
                    found = F.normalize(online["head"](online["body"](view)), dim=1)
                    loss = loss + (found - target).square().sum(1).mean()
                program.optimizer.zero_grad()
                loss.backward()
                program.optimizer.step()
                with torch.no_grad():
                    for mean, value in zip(average.parameters(), online["body"].parameters(), strict=True):
                        mean.lerp_(value, 1 - keep)

    return Program(online, None, data, draw.optimizer(online.parameters(), 2e-3, ADAPTIVE), loop=loop)


# --- reinforcement learning -------------------------------------------------------------------------------------------


@recipe("values of actions")
def values(draw):
    model, discount, walks = draw.mlp(_CELLS, 2), draw("discount", 0.9, 0.97), draw("walks", 4, 16)
    target, double, every = copy.deepcopy(model), draw("double", True, False), draw("copied every", 20, 60)
    loss_function = {"squared": F.mse_loss, "robust": F.smooth_l1_loss}[draw("loss", "squared", "robust")]

    def loop(program):
        world, memory = Corridor(walks, 0.1), []
        for number in range(400):
            states = world.states
            with torch.no_grad():
                best = model(states).argmax(1)
            actions = torch.where(torch.rand(walks) < max(0.1, 1 - number / 100), torch.randint(2, (walks,)), best)
            rewards, ended = world.move(actions)
            memory += zip(states, actions, rewards, world.states, ended, strict=True)
            if len(memory) < 64:
                continue
            rows = [memory[i] for i in torch.randint(max(0, len(memory) - 2000), len(memory), (32,))]
            states, actions, rewards, following, ended = map(torch.stack, zip(*rows, strict=True))
            with torch.no_grad():
                later = target(following)
                chosen = (model(following) if double else later).argmax(1, keepdim=True)
                wanted = rewards + discount * later.gather(1, chosen)[:, 0] * ~ended
            program.optimizer.zero_grad()
            loss_function(model(states).gather(1, actions[:, None])[:, 0], wanted).backward()
            program.optimizer.step()
            if number % every == 0:
                target.load_state_dict(model.state_dict())

    return played(draw, model, 2e-3, loop)


@recipe("policies")
def policy_gradient(draw):
    model, discount, baseline = draw.mlp(_CELLS, 2), draw("discount", 0.9, 0.97), draw("baseline", True, False)

    def loop(program):
        world = Corridor(16, 0.1)
        for _ in range(250):
            logs, rewards, ends = [], [], []
            for _ in range(12):
                choice = torch.distributions.Categorical(logits=model(world.states))
                action = choice.sample()
                logs.append(choice.log_prob(action))
                reward, ended = world.move(action)
                rewards.append(reward)
                ends.append(ended)
            found = returns(rewards, ends, torch.zeros(16), discount)
            program.optimizer.zero_grad()
            (-(torch.stack(logs) * (found - found.mean() if baseline else found)).mean()).backward()
            program.optimizer.step()

    return played(draw, model, 2e-3, loop)


class ActorCritic(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.body, self.policy, self.value = draw.mlp(_CELLS, 24), nn.Linear(24, 2), nn.Linear(24, 1)

    def forward(self, states):
        features = self.body(states).tanh()
        return self.policy(features), self.value(features)[..., 0]


@recipe("policies")
def actor_and_critic(draw):
    model, discount, weight = ActorCritic(draw), draw("discount", 0.9, 0.97), draw("weight of values", 0.25, 0.5, 1.0)

    def loop(program):
        world = Corridor(16, 0.1)
        for _ in range(250):
            rows = []
            for _ in range(8):
                logits, value = model(world.states)
                choice = torch.distributions.Categorical(logits=logits)
                action = choice.sample()
                rows.append((choice.log_prob(action), value, choice.entropy(), *world.move(action)))
            logs, values, entropies, rewards, ends = zip(*rows, strict=True)
            with torch.no_grad():
                found = returns(rewards, ends, model(world.states)[1], discount)
            values = torch.stack(values)
            loss = -(torch.stack(logs) * (found - values).detach()).mean() + weight * F.mse_loss(values, found)
            program.optimizer.zero_grad()
            (loss - 0.01 * torch.stack(entropies).mean()).backward()
            program.optimizer.step()

    return played(draw, model, 2e-3, loop)


@recipe("policies")
def clipped_ratios(draw):
    model, discount, passes = ActorCritic(draw), draw("discount", 0.9, 0.97), draw("passes", 2, 4)
    entropy, normalised = draw("entropy", 0.0, 0.01), draw("normalised", True, False)

    def loop(program):
        world = Corridor(16, 0.1)
        for _ in range(40):
            rows = []
            with torch.no_grad():
                for _ in range(16):
                    states = world.states
                    choice = torch.distributions.Categorical(logits=model(states)[0])
                    action = choice.sample()
                    rows.append((states, action, choice.log_prob(action), *world.move(action)))
                states, actions, logs, rewards, ends = zip(*rows, strict=True)
                found = returns(rewards, ends, model(world.states)[1], discount).flatten()
                states, actions, logs = torch.cat(states), torch.cat(actions), torch.cat(logs)
                gains = found - model(states)[1]
                gains = (gains - gains.mean()) / (gains.std() + 1e-8) if normalised else gains
            for _ in range(passes):
                for part in torch.randperm(len(states)).split(64):
                    logits, value = model(states[part])
                    choice = torch.distributions.Categorical(logits=logits)
                    ratio = (choice.log_prob(actions[part]) - logs[part]).exp()
                    gain = torch.minimum(ratio * gains[part], ratio.clamp(0.8, 1.2) * gains[part])
                    loss = -gain.mean() + 0.5 * F.mse_loss(value, found[part]) - entropy * choice.entropy().mean()
                    program.optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                    program.optimizer.step()

    return played(draw, model, 2e-3, loop)


# --- data that changes ------------------------------------------------------------------------------------------------


@recipe("curriculum")
def harder_rows_later(draw):
    inputs, labels = blobs()
    centres = torch.stack([inputs[labels == label].mean(0) for label in range(5)])
    order = (inputs - centres[labels]).norm(dim=1).argsort()
    growth, size = draw("growth", 60, 150), draw("batch", 16, 32)

    def loop(program):
        for number in range(220):
            last = max(size, int(len(order) * min(1.0, 0.2 + number / growth)))
            rows = order[torch.randint(max(0, last - 4 * size), last, (size,))]
            program.optimizer.zero_grad()
            program.loss(program.model(inputs[rows]), labels[rows]).backward()
            program.optimizer.step()

    return draw.program(draw.mlp(20, 5), nn.CrossEntropyLoss(), loader(inputs, labels), loop=loop)


@recipe("curriculum")
def longer_horizons_later(draw):
    inputs = torch.randn(512, 12)
    model, growth = draw.mlp(12, 12), draw("growth", 40, 80)
    turn = torch.linalg.qr(torch.randn(12, 12))[0] * 1.1

    def loop(program):
        for number in range(240):
            x = target = inputs[torch.randint(512, (32,))]
            loss = 0.0
            for _ in range(1 + number // growth):
                x, target = x + model(x), target @ turn
                loss = loss + F.mse_loss(x, target)
            program.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            program.optimizer.step()

    return Program(model, None, [], draw.optimizer(model.parameters(), 1e-3, ADAPTIVE), loop=loop)
