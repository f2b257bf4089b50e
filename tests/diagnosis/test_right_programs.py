"""Programs that train well, which rules have accused: no rule states a cause that they do not have."""

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ikkuna
from tests.diagnosis.networks import digits

PROGRAMS = {}


def program(*rules, steps=60):
    """Register a function that returns a model, its loss and a function that makes a step; name the rules that accused it."""

    def register(function):
        PROGRAMS[function.__name__] = function, rules, steps
        return function

    return register


def supervised(model, optimizer, loss, batches):
    drawn = iter(range(10**9))

    def step():
        x, y = batches[next(drawn) % len(batches)]
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()

    return model, loss, step


def blobs(samples=64, classes=3, features=8, noise=0.3):
    y = torch.randint(0, classes, (samples,))
    return 2 * F.one_hot(y, features).float() + noise * torch.randn(samples, features), y


def mlp(*sizes):
    layers = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


@program("lr_too_high")
def linear_regression():
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, 0.1)
    x = torch.randn(64, 1)
    return supervised(model, torch.optim.Adam(model.parameters(), 0.1), nn.MSELoss(), [(x, 3 * x + 1)])


@program("lr_too_high")
def two_small_layers_whose_loss_falls():
    model = mlp(2, 16, 1)
    x = torch.randn(64, 2)
    return supervised(model, torch.optim.Adam(model.parameters(), 0.1), nn.MSELoss(), [(x, x.sum(1, keepdim=True))])


@program("lr_too_high")
def forward_forward():
    layers = nn.ModuleList([nn.Linear(64, 32), nn.Linear(32, 32)])
    optimizers = [torch.optim.Adam(layer.parameters(), 0.03) for layer in layers]
    x, _ = blobs(features=64)
    right, wrong = x, x.roll(7, 1) * torch.randn(64).sign()

    def step():
        positive, negative = right, wrong
        for layer, optimizer in zip(layers, optimizers, strict=True):
            scores = [layer(F.normalize(each)).relu() for each in (positive, negative)]
            good, bad = (score.square().mean(1) for score in scores)
            optimizer.zero_grad()
            F.softplus(torch.cat([0.5 - good, bad - 0.5])).mean().backward()
            optimizer.step()
            positive, negative = (score.detach() for score in scores)

    return layers, None, step


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.actor, self.critic = nn.Linear(4, 128), nn.Linear(128, 2), nn.Linear(128, 1)

    def forward(self, x):
        hidden = self.hidden(x).relu()
        return self.actor(hidden).log_softmax(-1), self.critic(hidden)[..., 0]


@program("lr_too_high")
def actor_critic():
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), 3e-2)

    def step():
        states = torch.randn(30, 4)
        log_probabilities, values = model(states)
        actions = torch.distributions.Categorical(logits=log_probabilities).sample()
        rewards = ((states[:, 0] > 0) == (actions == 1)).float()
        returns = rewards.flip(0).cumsum(0).flip(0)
        returns = (returns - returns.mean()) / returns.std()
        advantage = returns - values.detach()
        chosen = log_probabilities.gather(1, actions[:, None])[:, 0]
        optimizer.zero_grad()
        (F.smooth_l1_loss(values, returns, reduction="sum") - (chosen * advantage).sum()).backward()
        optimizer.step()

    return model, None, step


class WithTarget(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = mlp(4, 16, 2)
        self.target = copy.deepcopy(self.online)

    def forward(self, x):
        with torch.no_grad():
            wanted = self.target(0.9 * x).max(1).values
        return self.online(x), wanted


@program("not_in_optimizer")
def target_network_by_polyak_averaging():
    model = WithTarget()
    optimizer = torch.optim.Adam(model.online.parameters(), 1e-3)

    def step():
        x = torch.randn(32, 4)
        values, wanted = model(x)
        optimizer.zero_grad()
        F.smooth_l1_loss(values[:, 0], x[:, 0] + 0.9 * wanted).backward()
        optimizer.step()
        with torch.no_grad():
            for mean, parameter in zip(model.target.parameters(), model.online.parameters(), strict=True):
                mean.lerp_(parameter, 0.01)

    return model, None, step


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.experts[0](self.stem(x)).relu())


@program("optimizer_reset")
def an_expert_without_tokens():
    model = Experts()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    x, y = blobs()
    for expert in model.experts:  # the experts have had tokens before
        expert(x).sum().backward()
    optimizer.step()
    return supervised(model, optimizer, nn.CrossEntropyLoss(), [(x, y)])


class Variational(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(0.3 * torch.eye(8))
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(x) * 1e-4 + 30 * (x @ self.factor.tril()).square().mean(1, keepdim=True)


@program("exploding_gradient")
def a_variational_factor():
    model = Variational()
    x, _ = blobs()
    return supervised(model, torch.optim.Adam(model.parameters(), 1e-2), nn.MSELoss(), [(x, x.mean(1, keepdim=True))])


@program("repeated_batch", steps=120)
def ten_batches_an_epoch():
    model = mlp(8, 16, 3)
    return supervised(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        nn.CrossEntropyLoss(),
        [blobs(16, noise=1.5) for _ in range(10)],
    )


@program("repeated_batch")
def a_graph_in_each_step():
    edges = (torch.rand(40, 40) < 0.1).float().fill_diagonal_(1)
    x, y = blobs(40)
    model = mlp(8, 16, 3)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def step():
        optimizer.zero_grad()
        F.cross_entropy(edges @ model(x), y).backward()
        optimizer.step()

    return model, None, step


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 16), nn.Linear(16, 16)

    def forward(self, attention_mask, input_ids):
        return self.head(self.embedding(input_ids) * attention_mask[..., None])


@program("repeated_batch", steps=100)
def a_constant_mask_before_the_tokens():
    model = Masked()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    mask = (torch.arange(8) < 6).float().expand(8, 8)

    def step():
        tokens = torch.randint(0, 16, (8, 8))
        optimizer.zero_grad()
        F.cross_entropy(model(mask, tokens).flatten(0, 1), (tokens + 1).flatten() % 16).backward()
        optimizer.step()

    return model, None, step


class SelfTuned(torch.optim.Optimizer):
    """Finds its rate by itself, as Prodigy does: it begins far below the rounding of float32 and grows."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1.0})
        self.rate = 1e-8

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad.sign(), alpha=self.rate)
        self.rate = min(1.02 * self.rate, 1e-3)


@program("never_moves", steps=120)
def an_optimizer_that_finds_its_rate():
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))
    return supervised(model, SelfTuned(model.parameters()), nn.CrossEntropyLoss(), [blobs() for _ in range(7)])


class GaussianProcess(nn.Module):
    """The tutorial of gpytorch, with a second kernel: scales of shape (1, 1), which begin near 0."""

    def __init__(self):
        super().__init__()
        self.smooth, self.periodic, self.noise = (
            nn.ParameterDict({"scale": torch.full((1, 1), 0.1)}) for _ in range(3)
        )

    def forward(self, x):
        distances = x - x.T
        smooth = (-(distances**2) / (2 * F.softplus(self.smooth["scale"]) ** 2)).exp()
        periodic = (-2 * (3.14 * distances).sin() ** 2 / F.softplus(self.periodic["scale"])).exp()
        covariance = smooth * periodic + F.softplus(self.noise["scale"]) * torch.eye(len(x))
        return torch.distributions.MultivariateNormal(torch.zeros(len(x)), covariance)


@program("lr_too_high", "diverges")
def a_gaussian_process():
    model = GaussianProcess()
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    x = torch.linspace(0, 1, 30)[:, None]
    y = (6.28 * x[:, 0]).sin() + 0.2 * torch.randn(30)

    def step():
        optimizer.zero_grad()
        (-model(x).log_prob(y) / 30).backward()
        optimizer.step()

    return model, None, step


@program("scaler_skips", steps=300)
def wasserstein_gan():
    critic, generator = mlp(4, 16, 1), nn.Linear(2, 4)
    optimizers = [torch.optim.RMSprop(each.parameters(), 5e-5) for each in (critic, generator)]
    drawn = iter(range(10**9))

    def step():
        is_generator = next(drawn) % 3 == 2
        fake = generator(torch.randn(32, 2))
        optimizers[is_generator].zero_grad()
        (
            -critic(fake).mean() if is_generator else critic(fake.detach()).mean() - critic(torch.randn(32, 4)).mean()
        ).backward()
        optimizers[is_generator].step()

    return critic, None, step


@program("diverges", steps=150)
def a_generator_whose_critic_learns_faster():
    generator, critic = mlp(4, 32, 2), mlp(2, 32, 1)
    ours = torch.optim.Adam(generator.parameters(), 2e-4)
    theirs = torch.optim.Adam(critic.parameters(), 1e-2)
    real, fake = torch.ones(32, 1), torch.zeros(32, 1)

    def step():
        noise = torch.randn(32, 4)
        theirs.zero_grad()
        outputs = critic(torch.cat([torch.randn(32, 2) + 3, generator(noise).detach()]))
        F.binary_cross_entropy_with_logits(outputs, torch.cat([real, fake])).backward()
        theirs.step()
        ours.zero_grad()
        F.binary_cross_entropy_with_logits(critic(generator(noise)), real).backward()
        ours.step()

    return generator, None, step


@program("clipped_hard", "not_zeroed", steps=100)
def a_gradient_scaler():
    model = mlp(8, 16, 3)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=2.0**14)

    def step():
        x, y = blobs()
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()

    return model, None, step


@program("one_label", steps=120)
def segmentation_of_squares():
    model = nn.Conv2d(1, 2, 3, padding=1)
    masks = torch.zeros(16, 16, 16, dtype=torch.long)
    masks[:, 4:12, 4:12] = 1
    x = masks[:, None] + 0.3 * torch.randn(16, 1, 16, 16)
    return supervised(model, torch.optim.Adam(model.parameters(), 1e-2), nn.CrossEntropyLoss(), [(x, masks)])


@program("loss_at_init", "input_scale")
def a_head_on_large_features():
    model = nn.Linear(8, 3)
    x, y = blobs()
    return supervised(model, torch.optim.Adam(model.parameters(), 3e-2), nn.CrossEntropyLoss(), [(30 * x, y)])


@program("not_shuffled", steps=150)
def batches_of_one():
    model = mlp(8, 16, 3)
    batches = [(x[None], y[None]) for x, y in zip(*blobs(400), strict=True)]
    return supervised(model, torch.optim.SGD(model.parameters(), 0.02), nn.CrossEntropyLoss(), batches)


def mixed(loss_of):
    """Return a program whose inputs are mixtures of two samples, and whose loss compares the outputs with the labels of both."""
    torch.manual_seed(0)
    model, (images, labels) = mlp(64, 256, 10), digits()[0]
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    shares = torch.distributions.Beta(1.0, 1.0)

    def step():
        chosen = torch.randint(0, len(images), (64,))
        x, y = images[chosen], labels[chosen]
        share, order = shares.sample().item(), torch.randperm(len(x))
        outputs = model((share * x + (1 - share) * x[order]).flatten(1))
        optimizer.zero_grad()
        (share * loss_of(outputs, y) + (1 - share) * loss_of(outputs, y[order])).backward()
        optimizer.step()

    return model, step


@program("no_learning", "one_label", steps=300)
def mixtures_with_a_loss_module():
    loss = nn.CrossEntropyLoss()
    model, step = mixed(loss)
    return model, loss, step


@program("no_learning", "one_label", steps=300)
def mixtures_with_a_function():
    model, step = mixed(F.cross_entropy)
    return model, None, step


@program("one_label", steps=120)
def positives_that_stand_before_the_negatives():
    model, loss = mlp(8, 32, 16), nn.CrossEntropyLoss()
    other, negatives = copy.deepcopy(model).requires_grad_(False), F.normalize(torch.randn(50, 16), dim=1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def step():
        x, _ = blobs()
        one, two = (F.normalize(each(x + 0.1 * torch.randn_like(x)), dim=1) for each in (model, other))
        scores = torch.cat([(one * two).sum(1, keepdim=True), one @ negatives.T], 1) / 0.2
        optimizer.zero_grad()
        loss(scores, torch.zeros(len(x), dtype=torch.long)).backward()
        optimizer.step()

    return model, loss, step


@program("no_learning", steps=180)
def a_queue_that_fills_with_harder_negatives():
    model, loss = mlp(20, 48, 16), nn.CrossEntropyLoss()
    slow, queue = copy.deepcopy(model).requires_grad_(False), list(F.normalize(torch.randn(128, 16), dim=1).split(32))
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)

    def step():
        x = torch.randn(32, 20)
        one, two = (F.normalize(each(x + 3.0 * torch.randn_like(x)), dim=1) for each in (model, slow))
        scores = torch.cat([(one * two).sum(1, keepdim=True), one @ torch.cat(queue).T], 1) / 0.2
        optimizer.zero_grad()
        loss(scores, torch.zeros(len(x), dtype=torch.long)).backward()
        optimizer.step()
        queue[:] = [*queue[1:], two]
        with torch.no_grad():
            for old, new in zip(slow.parameters(), model.parameters(), strict=True):
                old.lerp_(new, 0.01)

    return model, loss, step


@program("not_in_optimizer")
def matrices_that_are_updated_by_hand():
    model, loss = mlp(8, 16, 3), nn.CrossEntropyLoss()
    matrices, others = ([p for p in model.parameters() if (p.ndim == 2) == is_matrix] for is_matrix in (True, False))
    optimizer = torch.optim.AdamW(others, 1e-2)

    def step():
        x, y = blobs()
        model.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            for each in matrices:
                each -= 0.05 * each.grad / each.grad.norm()

    return model, loss, step


class MaskedPooling(nn.Module):
    """Pools sets by attention, of which some are empty."""

    def __init__(self):
        super().__init__()
        self.values, self.keys, self.softmax, self.head = (
            nn.Linear(8, 16),
            nn.Linear(8, 1),
            nn.Softmax(1),
            nn.Linear(16, 2),
        )

    def forward(self, x, known):
        weights = self.softmax(self.keys(x).squeeze(2).masked_fill(~known, float("-inf")))
        return self.head((torch.nan_to_num(weights)[..., None] * self.values(x)).sum(1))


@program("nonfinite")
def rows_that_are_masked_as_a_whole():
    model, loss = MaskedPooling(), nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def step():
        x, known = torch.randn(32, 6, 8), torch.arange(6) < torch.arange(32)[:, None] % 7
        optimizer.zero_grad()
        loss(model(x, known), ((x[..., 0] * known).sum(1) > 0).long()).backward()
        optimizer.step()

    return model, loss, step


@program("wrong_sign", steps=300)
def advantage_with_an_entropy():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)

    def step():
        states = torch.randn(64, 4)
        with torch.no_grad():
            actions = torch.distributions.Categorical(logits=model(states)[:, :2]).sample()
        rewards = ((states[:, 0] > 0).long() == actions).float() - 0.1 * torch.rand(64)
        outputs = model(states)
        policy, values = torch.distributions.Categorical(logits=outputs[:, :2]), outputs[:, 2]
        gain = (policy.log_prob(actions) * (rewards - values.detach())).mean() + 0.01 * policy.entropy().mean()
        optimizer.zero_grad()
        (0.5 * F.mse_loss(values, rewards) - gain).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    return model, None, step


@program("wrong_sign", steps=60)
def a_likelihood_that_is_maximised():
    model = mlp(8, 16, 3)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, maximize=True)

    def step():
        x, y = blobs()
        optimizer.zero_grad()
        (-F.cross_entropy(model(x), y)).backward()
        optimizer.step()

    return model, None, step


@program("wrong_sign", "wrong_optimum", "unbounded_loss", steps=90)
def a_negative_error_that_is_maximised():
    model, error = mlp(8, 16, 1), nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, maximize=True)

    class Closeness(nn.Module):
        def forward(self, outputs, labels):
            return -error(outputs, labels)

    x = torch.randn(64, 8)
    return supervised(model, optimizer, Closeness(), [(x, x[:, :1])])


@program("lr_too_high", steps=60)
def weights_that_a_large_decay_shrinks():
    model, (images, labels) = mlp(64, 128, 128, 10), digits()[0]
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.3)
    batches = [*zip(images.flatten(1).split(64), labels.split(64), strict=True)]
    return supervised(model, optimizer, nn.CrossEntropyLoss(), batches)


LOOP = (
    *(
        "gradients_cleared",
        "step_without_gradients",
        "all_gradients_zero",
        "scaler_bypassed",
        "clipped_before_unscaling",
    ),
    *("weights_restored", "evaluation_in_training_mode"),
)


@program(*LOOP, "not_zeroed", "clipped_hard", steps=120)
def accumulation_with_a_scaler_and_clipping():
    model = mlp(8, 16, 3)
    optimizer, scaler = torch.optim.AdamW(model.parameters(), 1e-3), torch.amp.GradScaler("cpu", growth_interval=40)

    def step():
        for _ in range(4):
            x, y = blobs()
            scaler.scale(F.cross_entropy(model(x), y) / 4).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return model, None, step


@program(*LOOP, steps=120)
def scaled_and_unscaled_by_hand():
    model = mlp(8, 16, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step():
        x, y = blobs()
        optimizer.zero_grad()
        (1024 * F.cross_entropy(model(x), y)).backward()
        for parameter in model.parameters():
            parameter.grad /= 1024
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    return model, None, step


@program(*LOOP, steps=120)
def sharpness_aware_minimisation():
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step():
        x, y = blobs()
        F.cross_entropy(model(x), y).backward()
        norm = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
        moves = [0.05 * parameter.grad / norm for parameter in model.parameters()]
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter += move
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter -= move
        optimizer.step()
        optimizer.zero_grad()

    return model, None, step


@program(*LOOP, steps=60)
def closures():
    model = mlp(8, 16, 3)
    optimizer = torch.optim.LBFGS(model.parameters(), 0.1)

    def step():
        x, y = blobs()

        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)

    return model, None, step


@program(*LOOP, steps=150)
def an_average_is_evaluated_in_place_of_the_weights():
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 3))
    average = copy.deepcopy(model.state_dict())
    optimizer, drawn = torch.optim.Adam(model.parameters(), 1e-2), iter(range(10**9))

    def step():
        x, y = blobs()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        for name, value in model.state_dict().items():
            average[name].lerp_(value, 0.1)
        if next(drawn) % 20 == 19:
            kept = copy.deepcopy(model.state_dict())
            model.load_state_dict(average)
            model.eval()
            with torch.no_grad():
                for _ in range(3):
                    model(x)
            model.train()
            model.load_state_dict(kept)

    return model, None, step


@program(*LOOP, steps=120)
def heads_that_take_turns():
    """Each head has an optimizer; both step each time, and one of them has no gradients."""
    stem, heads = nn.Linear(8, 16), nn.ModuleList([nn.Linear(16, 3), nn.Linear(16, 3)])
    model = nn.ModuleList([stem, heads])
    optimizers = [torch.optim.Adam(each.parameters(), 1e-2) for each in (stem, *heads)]
    drawn = iter(range(10**9))

    def step():
        x, y = blobs()
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.cross_entropy(heads[next(drawn) // 7 % 2](stem(x).relu()), y).backward()
        for optimizer in optimizers:
            optimizer.step()

    return model, None, step


@program(*LOOP, steps=150)
def a_loss_with_a_margin():
    model = nn.Linear(8, 1)
    x, y = blobs(classes=2, noise=0.1)
    return supervised(
        model,
        torch.optim.SGD(model.parameters(), 0.5),
        lambda z, t: F.relu(1 - z[:, 0] * t).mean(),
        [(x, 2.0 * y - 1)],
    )


SETTINGS = ("betas", "epsilon", "decay_dominates", "schedule_past_end", "lr_vanished")
SCHEDULES = {
    "cyclic": lambda optimizer: torch.optim.lr_scheduler.CyclicLR(optimizer, 1e-4, 1e-2, 25, cycle_momentum=False),
    "warm_restarts": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 30),
    "one_cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, 300),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300),
    "linear": lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 300),
    "exponential": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98),
}


def scheduled(schedule):
    def make():
        model = mlp(8, 16, 3)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
        scheduler = schedule(optimizer)
        model, loss, inner = supervised(model, optimizer, nn.CrossEntropyLoss(), [blobs() for _ in range(7)])

        def step():
            inner()
            scheduler.step()

        return model, loss, step

    return make


PROGRAMS |= {name: (scheduled(schedule), SETTINGS, 300) for name, schedule in SCHEDULES.items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_rule_accuses_a_program_that_trains(name, tmp_path):
    torch.manual_seed(1)
    make, rules, steps = PROGRAMS[name]
    model, loss, step = make()
    with ikkuna.watch(model, loss=loss, log_dir=tmp_path, backend="null", verbosity=0) as exporter:
        for _ in range(steps):
            step()
    accused = [str(finding) for finding in exporter.findings if finding.rule in rules]
    is_silent = name in ("ten_batches_an_epoch", "a_constant_mask_before_the_tokens")
    assert not [text for text in accused if is_silent or not text.startswith("info")]


def test_one_label_speaks_of_the_batches_that_were_read(tmp_path):
    """Every second batch has the other label, and every tenth one is read."""
    torch.manual_seed(0)
    model, loss = mlp(8, 16, 2), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with ikkuna.watch(model, loss, log_dir=tmp_path, backend="null", verbosity=0) as handle:
        for step in range(120):
            optimizer.zero_grad()
            loss(model(torch.randn(32, 8)), torch.full((32,), step % 2)).backward()
            optimizer.step()
    [found] = [each for each in handle.findings if each.rule == "one_label"]
    assert found.message.startswith("Every label that was read is 0")


@pytest.mark.parametrize(("period", "expected"), [(10**9, None), (25, "info"), (1, "error")])
def test_an_optimizer_that_is_created_again_and_again_is_found(period, expected, tmp_path):
    torch.manual_seed(0)
    model, loss = mlp(8, 16, 3), nn.CrossEntropyLoss()
    with ikkuna.watch(model, loss, log_dir=tmp_path, rules=["optimizer_reset"], backend="null", verbosity=0) as handle:
        for step in range(160):
            if step % period == 0:
                optimizer = torch.optim.Adam(model.parameters(), 1e-3)
            x, y = blobs()
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
    found = [finding.severity for finding in handle.findings]
    assert found == ([] if expected is None else ["warning"] if expected == "error" else [expected])


def test_a_layer_that_is_replaced_later_is_in_no_optimizer(tmp_path):
    torch.manual_seed(0)
    model, loss = mlp(8, 16, 3), nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with ikkuna.watch(model, loss, log_dir=tmp_path, backend="null", verbosity=0) as handle:
        for step in range(120):
            if step == 50:
                model[0].weight = nn.Parameter(model[0].weight.detach().clone())
            x, y = blobs()
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
    assert [(f.rule, f.module) for f in handle.findings if f.rule == "not_in_optimizer"] == [("not_in_optimizer", "0")]


@pytest.mark.parametrize(("decay", "clamps"), [(0.0, True), (30.0, False)])
def test_weights_that_something_else_shrinks_are_not_blamed_on_a_decay(decay, clamps, tmp_path):
    torch.manual_seed(0)
    model, loss = mlp(8, 16, 3), nn.CrossEntropyLoss()
    optimizer = (
        torch.optim.Adam(model.parameters(), 1e-3)
        if clamps
        else torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=decay)
    )
    with ikkuna.watch(model, loss, log_dir=tmp_path, rules=["weight_decay"], backend="null", verbosity=0) as handle:
        for _ in range(120):
            x, y = blobs()
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
            if clamps:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.clamp_(-0.01, 0.01)
    [found] = handle.findings
    assert ("No optimizer has a weight decay." in found.message) == clamps
    assert found.advice.startswith("search for what else" if clamps else "lower the weight decay")


def test_a_distance_that_is_maximised_is_found(tmp_path):
    torch.manual_seed(0)
    model, loss = mlp(8, 16, 3), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, maximize=True)
    with ikkuna.watch(model, loss, log_dir=tmp_path, backend="null", verbosity=0) as handle:
        for _ in range(60):
            x, y = blobs()
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
    assert "wrong_sign" in [finding.rule for finding in handle.findings]


def test_a_loss_that_makes_nan_of_finite_outputs_is_named(tmp_path):
    torch.manual_seed(0)
    model = mlp(8, 16, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with ikkuna.watch(model, log_dir=tmp_path, rules=["nonfinite"], backend="null", verbosity=0) as handle:
        for step in range(41):
            optimizer.zero_grad()
            outputs = model(torch.randn(16, 8))
            (outputs.square().mean() * (0.0 / torch.zeros(()) if step == 40 else 1.0)).backward()
            optimizer.step()
    [found] = handle.findings
    assert "All activations of this step are finite, so the loss function has made it." in found.message
    assert found.advice.startswith("look in the loss for the logarithm")


@pytest.mark.parametrize("place", ["head", "loss"])
def test_nan_behind_rows_that_are_masked_as_a_whole_is_found(place, tmp_path):
    torch.manual_seed(0)
    model, loss = MaskedPooling(), nn.CrossEntropyLoss()
    with ikkuna.watch(model, loss, log_dir=tmp_path, rules=["nonfinite"], backend="null", verbosity=0) as handle:
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        for step in range(31):
            x, known = torch.randn(32, 6, 8), torch.arange(6) < torch.arange(32)[:, None] % 7
            if step == 20 and place == "head":
                model.head.weight.detach()[0, 0] = float("nan")
            optimizer.zero_grad()
            y = loss(model(x, known), ((x[..., 0] * known).sum(1) > 0).long())
            (y * float("nan") if step == 20 and place == "loss" else y).backward()
            optimizer.step()
    [found] = handle.findings
    assert (found.severity, found.module) == ("error", "head")
    assert found.step >= 20


@pytest.mark.parametrize("options", [{"every": 1, "preset": "full"}, {"every": 10}])
def test_a_slow_start_is_judged_by_steps_and_not_by_samples(options, tmp_path):
    torch.manual_seed(0)
    model, loss, classes = mlp(12, 32, 32, 4), nn.CrossEntropyLoss(), torch.randn(12, 4)
    optimizer = torch.optim.RAdam(model.parameters(), 3e-3)
    with ikkuna.watch(
        model, loss, log_dir=tmp_path, rules=["no_learning"], backend="null", verbosity=0, **options
    ) as handle:
        for _ in range(120):
            x = torch.randn(32, 12)
            y = (x @ classes + 0.5 * torch.randn(32, 4)).argmax(1)
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
    assert not handle.findings


@pytest.mark.parametrize("lowers_rate", [True, False])
def test_the_best_weights_may_be_loaded_when_the_rate_is_lowered(lowers_rate, tmp_path):
    torch.manual_seed(0)
    model, loss = mlp(8, 16, 3), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with ikkuna.watch(model, loss, log_dir=tmp_path, rules=["weights_restored"], backend="null", verbosity=0) as handle:
        for step in range(120):
            if step == 40:
                best = copy.deepcopy(model.state_dict())
            if step in (60, 80, 100):
                model.load_state_dict(best)
                optimizer.param_groups[0]["lr"] *= 0.5 if lowers_rate else 1.0
            x, y = blobs(64)
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
    assert [finding.severity for finding in handle.findings] == (["info"] if lowers_rate else ["error"])


@pytest.mark.parametrize("seed", range(3))
def test_weights_that_move_by_their_last_bit_are_not_restored(seed, tmp_path):
    torch.manual_seed(seed)
    model, loss, truth = mlp(10, 32, 3), nn.CrossEntropyLoss(), torch.randn(10, 3)
    optimizer = torch.optim.SGD(model.parameters(), 1e-8)
    with ikkuna.watch(model, loss, log_dir=tmp_path, backend="null", verbosity=0) as handle:
        for _ in range(200):
            x = torch.randn(32, 10)
            optimizer.zero_grad()
            loss(model(x), (x @ truth).argmax(1)).backward()
            optimizer.step()
    assert "weights_restored" not in {finding.rule for finding in handle.findings}


@pytest.mark.parametrize("seed", [3, 7, 9])
def test_the_noise_of_a_loss_is_no_rise(seed, tmp_path):
    """The loss of an actor and a critic varies from step to step by a fifth, and does not fall."""
    torch.manual_seed(seed)
    model, loss, step = actor_critic()
    with ikkuna.watch(model, loss=loss, log_dir=tmp_path, backend="null", verbosity=0) as exporter:
        for _ in range(60):
            step()
    assert not {finding.rule for finding in exporter.findings} & {"lr_too_high", "diverges"}


class Graph(nn.Module):
    def __init__(self, edges):
        super().__init__()
        self.edges, self.layer = edges, nn.Linear(8, 3)

    def forward(self, x):
        source, target = self.edges
        return self.layer(x + torch.zeros_like(x).index_add(0, target, x[source]))


class Neighbours(nn.Module):
    """Uses a matrix that no module keeps."""

    def __init__(self, matrix):
        super().__init__()
        self.layer, self.matrix = nn.Linear(8, 3), lambda: matrix

    def forward(self, x):
        return self.matrix() @ self.layer(x)


@pytest.mark.parametrize(
    "network",
    [
        lambda: Graph(torch.randint(0, 32, (2, 100))),
        lambda: Neighbours(torch.rand(32, 32)),
        lambda: Neighbours(torch.rand(32, 32).to_sparse()),
    ],
    ids=["edges", "matrix", "sparse matrix"],
)
def test_a_network_that_uses_a_graph_does_not_leak(network):
    x, y = blobs(32)
    found = ikkuna.preflight(network(), (x, y), nn.CrossEntropyLoss())
    assert "batch_leak" not in [finding.rule for finding in found]
    assert "graph" in found.skipped["batch_leak"]


class TimeFirst(nn.Module):
    """Outputs of (time, sample, class), as CTC takes them."""

    def __init__(self, mixes):
        super().__init__()
        self.rnn, self.head, self.mixes = nn.GRU(3, 8, batch_first=True), nn.Linear(8, 4), mixes

    def forward(self, x):
        hidden = self.rnn(x)[0]
        return self.head(hidden + self.mixes * hidden.mean(0)).transpose(0, 1)


@pytest.mark.parametrize("mixes", [False, True])
@pytest.mark.parametrize("times", [6, 8])
def test_outputs_may_have_as_many_times_as_samples(times, mixes):
    x, y = torch.randn(8, times, 3), torch.randint(1, 4, (8, 2))

    def loss(outputs, targets):
        lengths = (torch.full((len(targets),), length) for length in (times, 2))
        return nn.functional.ctc_loss(outputs.log_softmax(-1), targets, *lengths)

    found = {finding.rule for finding in ikkuna.preflight(TimeFirst(mixes), (x, y), loss)}
    assert ("batch_leak" in found) == mixes


def test_samples_that_are_compared_within_the_network_leak():
    """The matrix of samples times samples is computed from the inputs."""

    class Compared(Neighbours):
        def forward(self, x):
            return (x @ x.T).softmax(-1) @ self.layer(x)

    x, y = blobs(32)
    found = ikkuna.preflight(Compared(None), (x, y), nn.CrossEntropyLoss())
    assert "batch_leak" in [finding.rule for finding in found]
