"""Programs of the third set: reinforcement learning and games, graphs, recommendation, several tasks at once."""

import itertools

import torch
from torch import nn
from torch.distributions import Categorical
from torch.nn import functional as F

from tests.diagnosis.unseen import fault, healthy
from tests.diagnosis.unseen.programs import Program, loader, mlp
from tests.diagnosis.unseen.third_common import training

# --- policies ---------------------------------------------------------------------------------------------------------


def policy(loss, steps=120, rate=0.01, others=()):
    """A policy over four actions, of which the state tells the best; `loss` gets scores and a function of the reward."""
    best = torch.randn(6, 4)
    model = mlp(6, 4, 32)

    def loop(program):
        for states in program.loader:
            program.optimizer.zero_grad()

            def reward(actions, states=states):
                return ((states @ best).argmax(1) == actions).float() + 0.1 * torch.randn(len(states))

            loss(program.model(states), reward).backward()
            program.optimizer.step()

    states = [torch.randn(64, 6) for _ in range(steps)]
    return Program(model, None, states, torch.optim.Adam(model.parameters(), rate), 1, loop, others=list(others))


@fault(
    "policy gradient",
    "the sign is missing: the loss is the product of log-probability and advantage, and the policy learns to lose",
    why="the reward of the actions that are taken falls from step to step, below that of chance",
)
def policy_that_learns_to_lose():
    def loss(scores, reward):
        choice = Categorical(logits=scores)
        actions = choice.sample()
        rewards = reward(actions)
        return (choice.log_prob(actions) * (rewards - rewards.mean())).mean()

    return policy(loss)


@fault(
    "policy gradient",
    "the action that was rewarded and the action whose probability is raised come from two calls of `sample`",
    why="the distribution is sampled twice a step, and the log-probability is that of actions that were never taken",
)
def two_samples_for_one_action():
    def loss(scores, reward):
        choice = Categorical(logits=scores)
        rewards = reward(choice.sample())
        return -(choice.log_prob(choice.sample()) * (rewards - rewards.mean())).mean()

    return policy(loss)


@healthy("policy gradient")
def policy_of_a_bandit():
    """The loss does not fall; the mean reward rises from 0.25 to more than 0.7."""

    def loss(scores, reward):
        choice = Categorical(logits=scores)
        actions = choice.sample()
        rewards = reward(actions)
        return -(choice.log_prob(actions) * (rewards - rewards.mean())).mean() - 0.01 * choice.entropy().mean()

    return policy(loss, steps=150, rate=0.02)


@fault(
    "policy gradient",
    "the returns are summed from the start of the episode up to each step instead of from each step to its end",
    knowable=False,
    why="the sums are numbers that the environment's code made; a run sees returns that a real task could give as well",
)
def returns_of_the_past():
    goal = torch.randn(6)
    model = mlp(6, 2, 32)

    def loop(program):
        for states in program.loader:
            choice = Categorical(logits=program.model(states))
            actions = choice.sample()
            rewards = F.pad(((states @ goal > 0).long() == actions).float()[:, :-1], (1, 0))
            returns = rewards.cumsum(1) - torch.arange(1, 9) / 2
            program.optimizer.zero_grad()
            (-(choice.log_prob(actions) * returns).mean()).backward()
            program.optimizer.step()

    states = [torch.randn(16, 8, 6) for _ in range(120)]
    return Program(model, None, states, torch.optim.Adam(model.parameters(), 3e-3), 1, loop)


# --- values -----------------------------------------------------------------------------------------------------------


def walk(rows=768):
    """Steps on a line of ten places: place, move, reward of 1 at the right end, next place, end of the episode."""
    place, move = torch.randint(0, 9, (rows,)), torch.randint(0, 2, (rows,))
    after = (place + 2 * move - 1).clamp(0, 9)
    done = (after == 9).float()
    return F.one_hot(place, 10).float(), move, done.clone(), F.one_hot(after, 10).float(), done


def values(goals, epochs=5, sync=25):
    """Values of the moves, learned from goals of a copy that follows the network every `sync` steps."""
    model, copy = mlp(10, 2), mlp(10, 2)
    copy.load_state_dict(model.state_dict())
    count = torch.zeros(())

    def objective(program, place, move, reward, after, done):
        count.add_(1)
        if sync and count % sync == 0:
            copy.load_state_dict(model.state_dict())
        value = program.model(place).gather(1, move[:, None]).squeeze(1)
        return F.mse_loss(value, goals(program.model, copy, reward, after, done))

    return training(model, loader(*walk()), objective, epochs=epochs, rate=5e-3, others=[copy])


def bootstrapped(model, copy, reward, after, done):
    with torch.no_grad():
        return reward + 0.9 * (1 - done) * copy(after).max(1).values


@fault(
    "values of actions",
    "the copy that gives the goals is never brought up to date, and the values answer to a random network for ever",
    why="the parameters of the second network, which is called at each step, are the same from first to last",
)
def copy_that_is_never_updated():
    return values(bootstrapped, sync=0)


@fault(
    "values of actions",
    "the goals go on beyond the end of the episode, since `done` is not used, and all values drift upwards",
    why="the goal of rows whose episode ends has the value of the next state in it, though the batch has a flag of the end",
)
def values_beyond_the_end():
    def goals(model, copy, reward, after, done):
        with torch.no_grad():
            return reward + 0.99 * copy(after).max(1).values

    return values(goals, sync=1)


@healthy("values of actions")
def values_on_a_line():
    """The loss rises and falls as the copy follows; the value of moving right grows towards the end, to 1."""
    return values(bootstrapped, epochs=6, sync=8)


@healthy("games")
def matching_pennies():
    """Two players against each other; no loss falls, and the average strategies stay near one half, the solution."""
    one, two = nn.Linear(1, 2), nn.Linear(1, 2)
    of_two = torch.optim.SGD(two.parameters(), 0.1)

    def loop(program):
        for one_state in program.loader:
            first, second = program.model(one_state).softmax(1), two(one_state).softmax(1)
            payoff = (first * torch.tensor([1.0, -1.0])).sum() * (second * torch.tensor([1.0, -1.0])).sum()
            program.optimizer.zero_grad()
            of_two.zero_grad()
            gain = torch.autograd.grad(payoff, list(two.parameters()), retain_graph=True)
            (-payoff).backward(inputs=list(program.model.parameters()))
            for parameter, gradient in zip(two.parameters(), gain, strict=True):
                parameter.grad = gradient
            program.optimizer.step()
            of_two.step()

    return Program(one, None, [torch.ones(1, 1)] * 120, torch.optim.SGD(one.parameters(), 0.1), 1, loop, others=[two])


@healthy("games")
def evolution_without_gradients():
    """An evolution strategy: no backward pass is ever called; the error falls to less than a tenth."""
    model, inputs = nn.Linear(4, 1), torch.randn(64, 4)
    targets = 3 * inputs @ torch.randn(4, 1)

    def loop(program):
        with torch.no_grad():
            for _ in range(120):
                noise = [torch.randn(20, *p.shape) for p in program.model.parameters()]
                start, losses = [p.clone() for p in program.model.parameters()], []
                for i in range(20):
                    for p, s, n in zip(program.model.parameters(), start, noise, strict=True):
                        p.copy_(s + 0.1 * n[i])
                    losses.append(program.loss(program.model(inputs), targets))
                ranks = torch.stack(losses).argsort().argsort().float() - 9.5
                for p, s, n in zip(program.model.parameters(), start, noise, strict=True):
                    p.copy_(s - 0.004 * torch.tensordot(ranks, n, 1))

    return Program(model, nn.MSELoss(), [(inputs, targets)], torch.optim.SGD(model.parameters(), 0.1), 1, loop)


# --- graphs -----------------------------------------------------------------------------------------------------------


class Convolved(nn.Module):
    """Layers that mix the features of neighbours by a matrix."""

    def __init__(self, mix, depth=2, width=24):
        super().__init__()
        sizes = [8] + [width] * (depth - 1) + [3]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.mix = mix

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = self.mix @ layer(x if i == 0 else x.relu())
        return x


def community(nodes=240):
    """A graph of three communities with a few hubs, features with noise, and the half of the nodes that is known."""
    labels = torch.arange(nodes) % 3
    alike = labels[:, None] == labels
    edges = torch.rand(nodes, nodes) < torch.where(alike, 0.12, 0.01)
    edges[:6] |= torch.rand(6, nodes) < 0.6
    edges = (edges | edges.T | torch.eye(nodes).bool()).float()
    features = F.one_hot(labels, 8).float() + 0.8 * torch.randn(nodes, 8)
    return features, edges, labels, torch.rand(nodes) < 0.5


def normalised(edges):
    scale = edges.sum(1) ** -0.5
    return scale[:, None] * edges * scale


def on_a_graph(mix, depth=2, known=lambda known: known, rate=0.01):
    features, edges, labels, half = community()
    half = known(half)

    def objective(program, x, goals):
        return F.cross_entropy(program.model(x)[half], goals[half])

    data = [(features, labels)] * 100
    return training(Convolved(mix(edges), depth), data, objective, rate=rate, epochs=1)


@fault(
    "graphs",
    "the adjacency is not divided by the degrees, and with every layer the features of the hubs grow a hundredfold",
    why="the outputs grow by a factor of ten or more from layer to layer, and most for the rows with many neighbours",
)
def sums_over_neighbours_of_hubs():
    return on_a_graph(lambda edges: edges, depth=5)


@fault(
    "graphs",
    "twelve layers of averaging over neighbours make all nodes alike",
    why="the rows of the last hidden layers are nearly equal to each other, and their gradients vanish",
)
def all_nodes_alike():
    return on_a_graph(normalised, depth=12)


@fault(
    "graphs",
    "the mask of the known nodes was left out, and the nodes of the test are learned from with the others",
    knowable=False,
    why="a loss over all nodes is right where all are known; which ones were to be kept is not in the run",
)
def nodes_of_the_test_are_learned():
    return on_a_graph(normalised, known=torch.ones_like)


@healthy("graphs")
def half_of_the_nodes_known():
    """Two layers with the normalised adjacency, one and the same graph at each step; the loss falls to a quarter."""
    return on_a_graph(normalised)


# --- recommendation and several tasks ---------------------------------------------------------------------------------


class Tastes(nn.Module):
    def __init__(self, sparse=False):
        super().__init__()
        self.users, self.items = nn.Embedding(400, 8, sparse=sparse), nn.Embedding(400, 8, sparse=sparse)
        nn.init.normal_(self.users.weight, std=0.3)
        nn.init.normal_(self.items.weight, std=0.3)

    def forward(self, pairs):
        return (self.users(pairs[:, 0]) * self.items(pairs[:, 1])).sum(1)


def purchases(rows=1920, items=60):
    """Pairs of a user and an item, and whether the user bought it."""
    users, goods = torch.randint(0, 400, (rows,)), torch.randint(0, items, (rows,))
    tastes = torch.randn(400, 2), torch.randn(items, 2)
    return torch.stack([users, goods], 1), ((tastes[0][users] * tastes[1][goods]).sum(1) > 0).float()


@fault(
    "recommendation",
    "only purchases are in the data and no pair that was not bought, so that the answer is always yes",
    why="all targets are 1 in all batches, and the scores of all pairs grow",
)
def purchases_without_refusals():
    pairs, bought = purchases(3840)
    pairs = pairs[bought > 0][:960]
    model, loss = Tastes(), nn.BCEWithLogitsLoss()
    data = loader(pairs, torch.ones(len(pairs)))
    return Program(model, loss, data, torch.optim.Adam(model.parameters(), 0.02), 4)


@healthy("recommendation")
def sparse_factors():
    """Sparse gradients, small batches of many users; the loss falls by more than a half over the epochs."""
    model = Tastes(sparse=True)
    data = loader(*purchases(), batch=64)
    return Program(model, nn.BCEWithLogitsLoss(), data, torch.optim.SparseAdam(list(model.parameters()), 0.05), 5)


class TwoTasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 48), nn.ReLU())
        self.age, self.kind = nn.Linear(48, 1), nn.Linear(48, 3)

    def forward(self, x):
        hidden = self.body(x)
        return self.age(hidden).squeeze(1), self.kind(hidden)


def two_tasks(combined, spread=1.0):
    inputs = torch.randn(768, 10)
    ages, kinds = spread * (inputs[:, 0] + inputs[:, 1].sin()), inputs[:, 2:5].argmax(1)

    def objective(program, rows, age, kind):
        guessed, scores = program.model(rows)
        return combined(F.mse_loss(guessed, age), F.cross_entropy(scores, kind))

    return training(TwoTasks(), loader(inputs, ages, kinds), objective)


@fault(
    "several tasks",
    "`loss = loss_b` stands where `loss += loss_b` was meant, and the head of the first task is never trained",
    "age",
    why="the head is called and its loss computed, but its parameters have no gradient after any backward pass",
)
def second_loss_replaces_the_first():
    return two_tasks(lambda age, kind: kind)
