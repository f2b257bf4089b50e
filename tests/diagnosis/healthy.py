"""Healthy variations of a training run, about which no rule may complain."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.diagnosis import networks
from tests.diagnosis.planted import LABELLED, PICTURES, marked_classes
from tests.diagnosis.training import FAMILIES

HEALTHY = {}
OTHERS = {}


def healthy(*families):
    def register(function):
        HEALTHY[function.__name__] = function, families or FAMILIES
        return function

    return register


def other(function):
    """Register a run that is no classification by the standard loop: a function of a seed and ``watch``."""
    OTHERS[function.__name__] = function
    return function


@healthy()
def plain(case):
    case.evaluates = True


@healthy("mlp", "conv")
def sgd_without_momentum(case):
    case.optimizer_kind, case.rate = "sgd", 0.1


@healthy()
def slower(case):
    case.rate /= 5


@healthy()
def faster(case):
    case.rate *= 2.5


@healthy(*PICTURES)
def binary_labels(case):
    case.on_batch.append(marked_classes)
    case.loss = nn.BCEWithLogitsLoss()


@healthy(*PICTURES)
def sigmoid_and_binary_loss(case):
    case.on_batch.append(marked_classes)
    case.loss = nn.BCELoss()
    case.wrap = lambda model: nn.Sequential(model, nn.Sigmoid())


@healthy("mlp")
def batch_norm(case):
    case.norm, case.evaluates = "batch", True


@healthy("mlp", "conv")
def layer_or_group_norm(case):
    case.norm = "layer"


def pretrain(case, steps):
    optimizer = torch.optim.Adam(case.model.parameters(), 2e-3)
    for step in range(steps):
        x, y = case.batch(step)
        optimizer.zero_grad()
        case.loss(case.model(x), y).backward()
        optimizer.step()
    for parameter in case.model.parameters():
        parameter.grad = None


@healthy()
def fine_tuning_with_a_frozen_half(case):
    def prepare(case):
        pretrain(case, 120)
        parameters = list(case.model.parameters())
        for parameter in parameters[: len(parameters) // 2]:
            parameter.requires_grad_(False)

    case.prepare.append(prepare)
    case.rate /= 5


@healthy()
def careful_fine_tuning(case):
    case.prepare.append(lambda case: pretrain(case, 250))
    case.optimizer_kind, case.rate = "adam", 2e-5


@healthy()
def only_the_head(case):
    def prepare(case):
        pretrain(case, 120)
        for name, parameter in case.model.named_parameters():
            parameter.requires_grad_(name.startswith("head"))

    case.prepare.append(prepare)
    case.select = lambda model: [p for n, p in model.named_parameters() if n.startswith("head")]
    case.rate *= 2


@healthy()
def warmup_and_cosine(case):
    case.warmup, case.schedule = 40, "cosine"


@healthy()
def warm_restarts(case):
    case.schedule = "restarts"


@healthy()
def decay_by_steps(case):
    case.schedule = "steps"


@healthy("mlp", "conv", "conv_norm")
def dropout(case):
    case.dropout = 0.4


@healthy()
def decoupled_weight_decay(case):
    case.optimizer_kind, case.decay, case.rate = "adam", 0.1, 2e-3


@healthy("mlp", "conv", "recurrent")
def tiny_batches(case):
    case.batch_size, case.clip = 4, 5.0
    case.rate /= 3


@healthy(*LABELLED)
def memorising(case):
    case.subset, case.optimizer_kind, case.rate = 100, "adam", 1e-3


@healthy()
def accumulation(case):
    case.micro_batches, case.steps = 4, 160
    case.batch_size = max(case.batch_size // 2, 8)


@healthy()
def clipping_at_one(case):
    case.clip = 1.0


@healthy(*LABELLED)
def noisy_labels(case):
    def relabel(y):
        generator = torch.Generator().manual_seed(5)
        is_wrong = torch.rand(len(y), generator=generator) < 0.25
        return torch.where(is_wrong, torch.randint(0, int(y.max()) + 1, (len(y),), generator=generator), y)

    case.relabel = relabel


@healthy(*PICTURES)
def imbalanced(case):
    def prepare(case):
        kept = (case.y == 0) | (torch.rand(len(case.y), generator=case.generator) < 0.12)
        case.x, case.y = case.x[kept], case.y[kept]

    case.prepare.append(prepare)


@healthy("mlp", "conv")
def deep_tanh(case):
    case.activation, case.depth = nn.Tanh, 5


@healthy(*PICTURES)
def label_smoothing(case):
    case.loss = nn.CrossEntropyLoss(label_smoothing=0.1)


@healthy(*LABELLED)
def drawn_with_replacement(case):
    def change(case, step, x, y):
        chosen = torch.randint(0, len(case.x), (len(x),), generator=case.generator)
        return case.x[chosen], case.y[chosen]

    case.on_batch.append(change)


@healthy(*PICTURES)
def inputs_between_0_and_1(case):
    case.on_batch.append(lambda case, step, x, y: ((x - x.min()) / (x.max() - x.min()), y))


@healthy("recurrent")
def lstm(case):
    case.cell, case.clip = nn.LSTM, 1.0


@healthy("mlp", "conv")
def leaky_rectifiers(case):
    case.activation = case.draw.choice([nn.LeakyReLU, nn.GELU, nn.SiLU])


# -- runs of other kinds ----------------------------------------------------------------------------------------------


def _digits():
    (x, y), _ = networks.digits()
    return x.flatten(1), y


def _loop(model, loss, optimizer, batches, watch, steps=240):
    exporter = watch(model, loss)
    for _ in range(steps):
        x, y = batches()
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    exporter.close()
    return exporter


@other
def adversarial(seed, watch, generator_first=False):
    torch.manual_seed(seed)
    x, _ = _digits()
    g = nn.Sequential(nn.Linear(16, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64))
    d = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    both = nn.ModuleDict({"g": g, "d": d})
    og, od = (torch.optim.Adam(part.parameters(), 1e-3, (0.5, 0.99)) for part in (g, d))
    exporter = watch(both, None)

    def train_d():
        z, real = torch.randn(32, 16), x[torch.randint(0, len(x), (32,))]
        od.zero_grad()
        (F.softplus(-d(real)).mean() + F.softplus(d(g(z).detach())).mean()).backward()
        od.step()

    def train_g():
        og.zero_grad()
        F.softplus(-d(g(torch.randn(32, 16)))).mean().backward()
        og.step()

    for _ in range(150):
        for train in (train_g, train_d) if generator_first else (train_d, train_g):
            train()
    exporter.close()
    return exporter


@other
def adversarial_generator_first(seed, watch):
    return adversarial(seed, watch, generator_first=True)


@other
def autoencoder(seed, watch):
    torch.manual_seed(seed)
    x, _ = _digits()
    model = nn.Sequential(
        nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8), nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64)
    )

    def batches():
        batch = x[torch.randint(0, len(x), (64,))]
        return batch, batch

    return _loop(model, nn.MSELoss(), torch.optim.Adam(model.parameters(), 2e-3), batches, watch)


@other
def regression(seed, watch):
    from sklearn.datasets import load_diabetes

    torch.manual_seed(seed)
    data = load_diabetes()
    x, y = torch.tensor(data.data, dtype=torch.float32) * 20, torch.tensor(data.target, dtype=torch.float32)[:, None]
    y = (y - y.mean()) / y.std()
    model = nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def batches():
        chosen = torch.randint(0, len(x), (32,))
        return x[chosen], y[chosen]

    return _loop(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.02, 0.9), batches, watch)


@other
def several_labels(seed, watch):
    torch.manual_seed(seed)
    x, y = _digits()
    targets = torch.stack([(y % 2).float(), (y > 4).float(), (y % 3 == 0).float()], 1)
    model = networks.mlp([96, 96], classes=3)

    def batches():
        chosen = torch.randint(0, len(x), (64,))
        return x[chosen], targets[chosen]

    return _loop(model, nn.BCEWithLogitsLoss(), torch.optim.Adam(model.parameters(), 1e-3), batches, watch)


@other
def reinforcement(seed, watch):
    torch.manual_seed(seed)
    x, y = _digits()
    model = networks.mlp([64])
    optimizer, baseline = torch.optim.Adam(model.parameters(), 2e-3), 0.1
    exporter = watch(model, None)
    for _ in range(240):
        chosen = torch.randint(0, len(x), (32,))
        policy = torch.distributions.Categorical(logits=model(x[chosen]))
        action = policy.sample()
        reward = (action == y[chosen]).float()
        optimizer.zero_grad()
        (-(reward - baseline) * policy.log_prob(action)).mean().backward()
        optimizer.step()
        baseline = 0.9 * baseline + 0.1 * reward.mean().item()
    exporter.close()
    return exporter


@other
def groups_with_different_rates(seed, watch):
    torch.manual_seed(seed)
    (x, y), _ = networks.digits()
    model = networks.convnet([12, 16, 24], norm="batch")
    groups = [
        {"params": [p for n, p in model.named_parameters() if n.startswith(prefix)], "lr": rate, "weight_decay": decay}
        for prefix, rate, decay in (("conv", 1e-4, 0.01), ("norm", 1e-3, 0.0), ("head", 1e-3, 0.01))
    ]

    def batches():
        chosen = torch.randint(0, len(x), (64,))
        return x[chosen], y[chosen]

    return _loop(model, nn.CrossEntropyLoss(), torch.optim.AdamW(groups), batches, watch)


@other
def adapters(seed, watch):
    """A frozen network with trained low-rank adapters whose second factor begins at zero."""
    torch.manual_seed(seed)
    (x, y), _ = networks.digits()
    model = networks.mlp([96, 96])
    pretrained = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(60):
        chosen = torch.randint(0, 700, (64,))
        pretrained.zero_grad()
        F.cross_entropy(model(x[chosen]), y[chosen]).backward()
        pretrained.step()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.grad = None
    for name in ("fc0", "fc1"):
        setattr(model, name, _Adapted(model.get_submodule(name)))
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-3)

    def batches():
        chosen = torch.randint(0, len(x), (32,))
        return x[chosen], y[chosen]

    return _loop(model, nn.CrossEntropyLoss(), optimizer, batches, watch)


class _Adapted(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))
