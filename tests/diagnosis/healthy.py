"""Healthy variations of a training run, about which no rule may complain."""

import functools
import random
from pydoc_data import topics

import torch
from torch import nn
from torch.nn import functional as F

from tests.diagnosis import networks
from tests.diagnosis.planted import (
    LABELLED,
    NUMBERS,
    PICTURES,
    as_regression,
    evaluate,
    marked_classes,
    step_by_scaler,
    use_scaler,
)
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


@healthy("mlp", "conv_norm", "recurrent")
def evaluation_by_hand(case):
    case.dropout = 0.3 if case.family == "mlp" else 0.0

    def change(case):
        case.model.eval()
        evaluate(case)
        case.model.train()

    case.on_epoch.append(change)


@healthy("mlp", "conv_norm", "transformer")
def scaled_and_clipped(case):
    scaler = use_scaler(case)
    step_by_scaler(case, scaler)
    case.before_step.append(lambda case, optimizer: scaler.unscale_(optimizer))
    case.clip = 1.0


@healthy("mlp", "conv_norm")
def a_forward_without_gradients_in_each_step(case):
    def change(case, step, x, y):
        with torch.no_grad():
            case.model(x), case.model(x)
        return x, y

    case.on_batch.append(change)


@healthy(*PICTURES)
def numbers(case):
    as_regression(case, case.draw.choice(NUMBERS[:3])())


@healthy("mlp", "conv")
def numbers_with_noise(case):
    """Three quarters of the variance of the labels cannot be learned."""
    as_regression(case, nn.MSELoss())
    case.on_batch.append(lambda case, step, x, y: (x, y + torch.randn(y.shape, generator=case.generator)))


@healthy("mlp", "recurrent")
def probabilities_as_labels(case):
    classes = 8 if case.family == "recurrent" else 10
    case.on_batch.append(lambda case, step, x, y: (x, 0.8 * nn.functional.one_hot(y, classes).float() + 0.2 / classes))


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


@functools.cache
def _bytes():
    """Return an English text, the documentation of Python, as bytes."""
    return torch.tensor(list("".join(topics.topics.values()).encode()))


def text_windows(samples, length):
    """Return parts of the text at random places, (samples, length)."""
    text = _bytes()
    return text[torch.randint(0, len(text) - length, (samples, 1)) + torch.arange(length)]


def _text_batches(samples=16, length=32):
    windows = text_windows(samples, length + 1)
    return windows[:, :-1], windows[:, 1:].flatten()


def _language_model(model, rate, watch, warmup=0, steps=300):
    """Train a language model of bytes, which learns for up to 200 steps only how frequent each byte is."""
    exporter = watch(model, loss := nn.CrossEntropyLoss())
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / (warmup + 1), 1.0, warmup)
    for _ in range(steps):
        x, y = _text_batches()
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
        schedule.step()
    exporter.close()
    return exporter


@other
def transformer_on_text(seed, watch):
    torch.manual_seed(seed)
    draw = random.Random(seed)
    width, depth = draw.choice([(48, 2), (64, 4), (64, 8), (128, 2)])
    model = networks.Transformer(256, width, depth)
    if draw.random() < 0.5:
        model.head.weight = model.tok.weight
    return _language_model(model, draw.choice([3e-4, 1e-3, 2e-3]), watch, draw.choice([0, 50]))


class _RecurrentModel(nn.Module):
    def __init__(self, cell, width, depth):
        super().__init__()
        self.tok = nn.Embedding(256, width)
        self.rnn = cell(width, width, depth, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, x):
        return self.head(self.rnn(self.tok(x))[0]).flatten(0, 1)


@other
def recurrent_network_on_text(seed, watch):
    torch.manual_seed(seed)
    draw = random.Random(seed)
    model = _RecurrentModel(draw.choice([nn.LSTM, nn.GRU]), draw.choice([48, 96, 128]), draw.choice([1, 2, 3]))
    return _language_model(model, draw.choice([1e-3, 2e-3]), watch, draw.choice([0, 50]))


class _Bottleneck(nn.Module):
    def __init__(self, before, width, stride):
        super().__init__()
        after = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, after, 1, bias=False), nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride > 1 or before != after:
            self.downsample = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x):
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        return self.relu(self.bn3(self.conv3(x)) + shortcut)


@other
def resnet50_narrow(seed, watch, steps=60):
    """The blocks and the initialisation of ResNet-50: its first gradients are far larger than the last ones."""
    torch.manual_seed(seed)
    blocks, before = [], 8
    for stage, depth in enumerate((3, 4, 6, 3)):
        for i in range(depth):
            blocks.append(_Bottleneck(before, 8 << stage, 2 if stage and not i else 1))
            before = 32 << stage
    stem = (nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10))
    if seed % 4 != 1:  # otherwise the initialisation of torch's layers
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    (x, y), _ = networks.digits()

    def batches():
        chosen = torch.randint(0, len(x), (16,))
        return F.interpolate(x[chosen].expand(-1, 3, -1, -1), size=(32, 32), mode="bilinear"), y[chosen]

    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=1e-4)
    return _loop(model, nn.CrossEntropyLoss(), optimizer, batches, watch, steps)
