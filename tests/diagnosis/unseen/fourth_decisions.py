"""Programs of the fourth set: policies, values, graphs and experts."""

import copy
import itertools

import torch
from torch import nn
from torch.distributions import Categorical
from torch.nn import functional as F

from tests.diagnosis.unseen import fault, healthy
from tests.diagnosis.unseen.programs import Program, blobs, graph, loader, mlp, program
from tests.diagnosis.unseen.third_common import training

# --- values -----------------------------------------------------------------------------------------------------------


def walks(rows=2048):
    """Return place, action, reward, next place and end of steps on a row of ten places, with a reward at the last.

    One step in four goes the other way than wanted.
    """
    place, action = torch.randint(1, 9, (rows,)), torch.randint(2, (rows,))
    slipped = torch.rand(rows) < 0.25
    following = place + torch.where(slipped, 1 - 2 * action, 2 * action - 1)
    ended = (following == 9) | (following == 0)
    reward = (following == 9).float()
    return F.one_hot(place, 10).float(), action, reward, F.one_hot(following, 10).float(), ended.float()


def value_learning(use_end=True, detached=True):
    """Return a program of Q-learning from stored steps, with a target network."""
    model = mlp(10, 2, 64)
    target = copy.deepcopy(model).requires_grad_(False)

    def loop(program):
        program.model.train()
        steps = 0
        for _ in range(program.epochs):
            for place, action, reward, following, ended in program.loader:
                values = program.model(place).gather(1, action[:, None]).squeeze(1)
                best = (target if detached else program.model)(following).max(1).values
                wanted = reward + 0.95 * best * ((1 - ended) if use_end else 1)
                program.optimizer.zero_grad()
                program.loss(values, wanted).backward()
                program.optimizer.step()
                steps += 1
                if steps % 20 == 0:
                    target.load_state_dict(program.model.state_dict())

    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    others = [target] if detached else []
    return Program(model, nn.SmoothL1Loss(), loader(*walks(), batch=64), optimizer, 12, loop, others=others)


@fault(
    "reinforcement",
    "the values of the next state are computed with gradients, so that the target is pulled towards the value",
    why="the target of the loss comes from the same network and needs a gradient",
)
def value_target_with_a_gradient():
    return value_learning(detached=False)


@fault(
    "reinforcement",
    "the value of the next state is added at the end of an episode too, where there is none",
    knowable=False,
    why="where an episode ends is known to the environment; the targets look like others",
)
def value_after_the_end():
    return value_learning(use_end=False)


# --- policies ---------------------------------------------------------------------------------------------------------


def states(rows=1536):
    """Return states and the action that is rewarded in each."""
    inputs = torch.randn(rows, 6)
    return inputs, (inputs @ torch.randn(6, 4)).argmax(1)


def policy_gradient(sign):
    def objective(program, inputs, best):
        policy = Categorical(logits=program.model(inputs))
        action = policy.sample()
        reward = (action == best).float()
        advantage = reward - reward.mean()
        return sign * (policy.log_prob(action) * advantage).mean() - 0.01 * policy.entropy().mean()

    return training(mlp(6, 4, 64, nn.Tanh), loader(*states(), batch=64), objective, 3e-3, epochs=12)


@fault(
    "reinforcement",
    "the minus before the logarithm of the probability is missing, so that the policy avoids what is rewarded",
    knowable=False,
    why="a loss of the user's own is lowered as it should be; the rewards, which fall, are in the script only",
)
def policy_without_the_minus():
    return policy_gradient(1.0)


@fault(
    "reinforcement",
    "the old probabilities are computed anew by the network, in its graph, so that they cancel the new ones",
    why="the ratio is 1 for each row, and the gradients of all weights are 0 up to rounding",
)
def ratio_of_equal_probabilities():
    def loop(program):
        program.model.train()
        for _ in range(program.epochs):
            for inputs, best in program.loader:
                with torch.no_grad():
                    action = Categorical(logits=program.model(inputs)).sample()
                advantage = (action == best).float() - 0.25
                for _ in range(3):
                    new = Categorical(logits=program.model(inputs)).log_prob(action)
                    old = Categorical(logits=program.model(inputs)).log_prob(action)
                    ratio = (new - old).exp()
                    program.optimizer.zero_grad()
                    (-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()).backward()
                    program.optimizer.step()

    model = mlp(6, 4, 64, nn.Tanh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Program(model, None, loader(*states(), batch=64), optimizer, 3, loop)


# --- graphs -----------------------------------------------------------------------------------------------------------


class GraphNet(nn.Module):
    """Layers that pass on what `matrix` gathers from the neighbours."""

    def __init__(self, matrix, layers=2, width=32):
        super().__init__()
        widths = [16] + [width] * (layers - 1) + [3]
        self.layers = nn.ModuleList(nn.Linear(wide, out) for wide, out in itertools.pairwise(widths))
        self.register_buffer("matrix", matrix)

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = (self.matrix @ layer(x)).relu()
        return self.matrix @ self.layers[-1](x)


def normalised(adjacency):
    with_self = adjacency + torch.eye(len(adjacency))
    degrees = with_self.sum(1).rsqrt()
    return degrees[:, None] * with_self * degrees[None, :]


@fault(
    "graph network",
    "the adjacency matrix is not normalised, so that each of the four layers multiplies the values by the degree",
    why="the values grow by an order of magnitude from layer to layer, and the first loss is in the thousands",
)
def neighbours_added_up_in_four_layers():
    features, adjacency, labels = graph(300)
    model = GraphNet(adjacency + torch.eye(300), layers=4)
    return program(model, nn.CrossEntropyLoss(), [(features, labels)], 0.01, epochs=120)


@fault(
    "data",
    "the mask of the nodes for training is not used in the loss, so that the network learns the labels of the test",
    knowable=False,
    why="which nodes were meant for the test is known to the script only",
)
def loss_over_all_nodes_of_the_graph():
    features, adjacency, labels = graph(300)
    model = GraphNet(normalised(adjacency))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    return Program(model, nn.CrossEntropyLoss(), [(features, labels)], optimizer, epochs=120)


# --- healthy ----------------------------------------------------------------------------------------------------------


@healthy("reinforcement")
def values_of_a_walk():
    return value_learning()


@healthy("reinforcement")
def policy_that_follows_rewards():
    return policy_gradient(-1.0)


@healthy("graph network")
def whole_graph_in_each_step():
    features, adjacency, labels = graph(300)
    known = torch.rand(300) < 0.5

    def loop(program):
        for _ in range(program.epochs):
            for features, labels in program.loader:
                program.model.train()
                program.optimizer.zero_grad()
                program.loss(program.model(features)[known], labels[known]).backward()
                program.optimizer.step()
                program.model.eval()
                with torch.no_grad():
                    program.loss(program.model(features)[~known], labels[~known])

    model = GraphNet(normalised(adjacency), width=16)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-3)
    return Program(model, nn.CrossEntropyLoss(), [(features, labels)], optimizer, 100, loop)


class Experts(nn.Module):
    """Four small networks, of which a gate chooses two for each row."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(20, 4), nn.ModuleList(mlp(20, 5, 24) for _ in range(4))
        self.balance = torch.zeros(())

    def forward(self, x):
        shares = self.gate(x).softmax(1)
        top, chosen = shares.topk(2, dim=1)
        used = torch.zeros_like(shares).scatter(1, chosen, top / top.sum(1, keepdim=True))
        self.balance = 4 * ((used > 0).float().mean(0) * shares.mean(0)).sum() / 2
        outputs = torch.zeros(len(x), 5)
        for number, expert in enumerate(self.experts):
            rows = used[:, number].nonzero().squeeze(1)
            outputs = outputs.index_add(0, rows, used[rows, number, None] * expert(x[rows]))
        return outputs


@healthy("experts")
def two_of_four_experts():
    def loop(program):
        program.model.train()
        for _ in range(program.epochs):
            for inputs, labels in program.loader:
                program.optimizer.zero_grad()
                loss = program.loss(program.model(inputs), labels) + 0.02 * program.model.balance
                loss.backward()
                program.optimizer.step()

    return program(Experts(), nn.CrossEntropyLoss(), loader(*blobs(1024), batch=64), 3e-3, epochs=12, loop=loop)
