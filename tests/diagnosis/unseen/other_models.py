"""Faults in graphs, contrastive learning, reinforcement learning and fine-tuning."""

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

from tests.diagnosis.unseen import fault
from tests.diagnosis.unseen.programs import (
    Classifier,
    Program,
    blobs,
    classifier,
    graph,
    image_classifier,
    images,
    loader,
    mlp,
)

# --- graphs -----------------------------------------------------------------------------------------------------------


class GraphNetwork(nn.Module):
    def __init__(self, adjacency, layers: int = 2, normalized: bool = True):
        super().__init__()
        self.register_buffer("adjacency", adjacency)
        if normalized:
            own = adjacency + torch.eye(len(adjacency))
            self.adjacency = own / own.sum(1, keepdim=True)
        widths = [16] + [24] * (layers - 1) + [3]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = layer(self.adjacency @ x).relu()
        return self.layers[-1](self.adjacency @ x)


def nodes(rate=1e-2, epochs=120, mask=None, dense=1.0, **options) -> Program:
    features, adjacency, labels = graph()
    model = GraphNetwork(dense * adjacency, **options)
    train = torch.rand(len(labels)) < 0.5

    def loss(outputs, labels):
        return F.cross_entropy(outputs[train], labels[train]) if mask is None else F.cross_entropy(outputs, labels)

    return Program(model, loss, [(features, labels)], torch.optim.Adam(model.parameters(), lr=rate), epochs=epochs)


@fault("graphs", "sums over neighbours without normalization: activations grow from layer to layer", module="layers.0")
def sums_over_neighbours():
    return nodes(layers=5, normalized=False)


@fault("graphs", "sixteen layers of averages: all nodes become equal", module="layers.15")
def over_smoothed():
    return nodes(layers=16)


@fault("graphs", "the loss also counts the nodes of the test set", knowable=False)
def test_nodes_in_the_loss():
    return nodes(mask="none")


@fault("graphs", "the adjacency is all zeros, so that no node sees a neighbour", knowable=False)
def no_edges():
    return nodes(dense=0.0)


# --- contrastive learning ---------------------------------------------------------------------------------------------


def contrastive(loss, model=None, steps=150, rate=2e-3, norm=1) -> Program:
    """Return a program whose loop calls *loss* with the embeddings of two views of the same rows."""
    model = model or mlp(20, 8)
    inputs, _ = blobs()

    def loop(program):
        for _ in range(steps):
            rows = inputs[torch.randint(len(inputs), (48,))]
            views = [F.normalize(program.model(rows + 0.2 * torch.randn_like(rows)), dim=norm) for _ in range(2)]
            program.optimizer.zero_grad()
            loss(*views).backward()
            program.optimizer.step()

    return Program(model, None, [(inputs[:48], None)], torch.optim.Adam(model.parameters(), lr=rate), loop=loop)


def info_nce(first, second, temperature=0.2):
    return F.cross_entropy(first @ second.T / temperature, torch.arange(len(first)))


@fault("contrastive learning", "a row is its own candidate: similarity with itself is not masked", knowable=False)
def own_row_as_candidate():
    def loss(first, second):
        both = torch.cat([first, second])
        return F.cross_entropy(both @ both.T / 0.2, (torch.arange(len(both)) + len(first)) % len(both))

    return contrastive(loss)


@fault("contrastive learning", "a temperature of 100 makes all candidates alike: the loss stays at a guess")
def temperature_of_a_hundred():
    return contrastive(lambda a, b: info_nce(a, b, 100.0))


@fault("contrastive learning", "positives alone, without negatives: all embeddings become equal")
def collapsed_embeddings():
    return contrastive(lambda a, b: 1 - (a * b).sum(1).mean(), rate=5e-3)


class NormalizedBatch(nn.Sequential):
    def forward(self, x):
        return F.normalize(super().forward(x), dim=0)


@fault("contrastive learning", "embeddings are normalized along the batch instead of the features")
def normalized_along_the_batch():
    return contrastive(info_nce, NormalizedBatch(*mlp(20, 8)))


@fault("contrastive learning", "the second view is a copy of the first, so that the task is trivial", knowable=False)
def equal_views():
    return contrastive(lambda a, b: info_nce(a, a))


# --- reinforcement learning -------------------------------------------------------------------------------------------


def bandit(loss, steps=200, rate=3e-3, clip=None, outputs=4) -> Program:
    """Return a program that learns which of four actions is right for an input."""
    model, solution = mlp(6, outputs), torch.randn(6, 4)

    def loop(program):
        for _ in range(steps):
            states = torch.randn(32, 6)
            logits = program.model(states)
            actions = torch.distributions.Categorical(logits=logits[:, :4]).sample()
            rewards = (actions == (states @ solution).argmax(1)).float()
            program.optimizer.zero_grad()
            loss(logits, actions, rewards).backward()
            if clip:
                nn.utils.clip_grad_norm_(program.model.parameters(), clip)
            program.optimizer.step()

    return Program(model, None, [(torch.randn(32, 6), None)], torch.optim.Adam(model.parameters(), lr=rate), loop=loop)


def policy_gradient(logits, actions, rewards):
    chosen = logits[:, :4].log_softmax(1).gather(1, actions[:, None])[:, 0]
    return -(chosen * (rewards - rewards.mean())).mean()


@fault("reinforcement learning", "the sign of the advantage is wrong: rewarded actions become rare", knowable=False)
def negative_advantage():
    return bandit(lambda o, a, r: -policy_gradient(o, a, r))


@fault(
    "reinforcement learning",
    "the value loss is ten thousand times larger, and clipping leaves nothing of the policy's gradient",
)
def value_loss_outweighs():
    def loss(logits, actions, rewards):
        return policy_gradient(logits, actions, rewards) + F.mse_loss(logits[:, 4], 1000 * rewards)

    return bandit(loss, clip=0.5, outputs=5)


@fault(
    "reinforcement learning", "the logarithm of a probability that underflowed is infinite, its product with zero NaN"
)
def logarithm_of_zero():
    def loss(logits, actions, rewards):
        probabilities = (200 * logits).softmax(1)
        return -(probabilities * probabilities.log()).sum(1).mean()

    return bandit(loss)


@fault("reinforcement learning", "the bootstrapped target is not detached", knowable=False)
def target_with_gradient():
    def loss(values, actions, rewards):
        target = rewards + 0.9 * values.roll(-1, 0).max(1).values
        return F.mse_loss(values.gather(1, actions[:, None])[:, 0], target)

    return bandit(loss)


# --- fine-tuning ------------------------------------------------------------------------------------------------------


class LowRank(nn.Module):
    """A frozen linear layer with a trained correction of rank 4."""

    def __init__(self, base: nn.Linear, scale: float = 1.0):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(4, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(base.out_features, 4))
        self.scale = scale

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.down.T @ self.up.T)


def pretrained(steps: int = 60) -> nn.Sequential:
    model, (inputs, labels) = mlp(20, 5), blobs()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return model


def low_rank(**options) -> nn.Sequential:
    model = pretrained().requires_grad_(False)
    for index in (0, 2, 4):
        model[index] = LowRank(model[index], **options)
    return model


@fault("fine-tuning", "both factors of the low-rank correction start at zero and never move", module="0")
def both_factors_zero():
    model = low_rank()
    for index in (0, 2, 4):
        nn.init.zeros_(model[index].down)
    return classifier(model)


@fault("fine-tuning", "an integer division makes the scale of the low-rank correction zero", module="0")
def scale_divided_to_zero():
    return classifier(low_rank(scale=8 // 16))


@fault("fine-tuning", "the backbone is unfrozen after the optimizer was built and is not in it", module="0")
def unfrozen_too_late():
    model = pretrained()
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    program = classifier(model)
    program.optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    model.requires_grad_(True)
    return program


@fault(
    "fine-tuning",
    "batch norms of a frozen backbone stay in training mode, and their statistics drift",
    module="features.1",
)
def frozen_but_in_training_mode():
    model = Classifier()
    model.features.requires_grad_(False)
    pixels, labels = images()
    return image_classifier(model, loader(2 * pixels + 1, labels))


@fault("fine-tuning", "the learning rate destroys the pretrained weights: the loss is soon far above where it began")
def pretrained_weights_destroyed():
    return classifier(pretrained(200), rate=1.0)


@fault("fine-tuning", "strict=False hides that no name of the checkpoint fits: the start is random", knowable=False)
def checkpoint_of_other_names():
    model = mlp(20, 5)
    model.load_state_dict({f"module.{name}": value for name, value in pretrained().state_dict().items()}, strict=False)
    return classifier(model)


@fault("fine-tuning", "the new head is frozen together with the backbone, only batch norms train", module="head")
def head_frozen_too():
    model = Classifier()
    model.requires_grad_(False)
    model.features[1].requires_grad_(True)
    model.features[5].requires_grad_(True)
    return image_classifier(model)
