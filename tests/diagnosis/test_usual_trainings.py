"""Usual trainings of usual models under ``watch`` as it is by default: no rule may complain about one of them."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import ikkuna
from tests.diagnosis.healthy import text_windows
from tests.diagnosis.networks import digits
from tests.real_models.timm_import import import_timm

pytestmark = pytest.mark.slow
TRAININGS = {}


def training(function):
    """Register a function that returns a model, its loss module or ``None``, a function that makes a step, and their number."""
    TRAININGS[function.__name__] = function
    return function


def pictures(samples=64):
    (x, y), _ = digits()
    chosen = torch.randint(0, len(x), (samples,))
    return x[chosen], y[chosen]


def supervised(model, optimizer, loss=None, batch=pictures, schedule=None, clip=None, steps=300):
    """Return a training by the standard loop."""
    loss = loss or nn.CrossEntropyLoss()

    def step():
        x, y = batch()
        optimizer.zero_grad()
        loss(model(x), y).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if schedule is not None:
            schedule.step()

    return model, loss, step, steps


class VisionTransformer(nn.Module):
    def __init__(self, width=64, depth=4):
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, 2)
        self.token, self.places = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(0.02 * torch.randn(1, 17, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        tokens = self.patches(x).flatten(2).mT
        tokens = torch.cat([self.token.expand(len(x), -1, -1), tokens], 1) + self.places
        return self.head(self.encoder(tokens)[:, 0])


@training
def vision_transformer_with_warm_up_and_cosine():
    model = VisionTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.05)
    schedules = [
        torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, 1, 50),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 250),
    ]
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, schedules, [50])
    return supervised(model, optimizer, nn.CrossEntropyLoss(label_smoothing=0.1), schedule=schedule)


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(128, 8), nn.Linear(128, 8)
        self.decoder = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, x):
        hidden = self.encoder(x)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        return self.decoder(mean + torch.randn_like(mean) * (log_variance / 2).exp()), mean, log_variance


@training
def variational_autoencoder():
    model = Autoencoder()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step():
        x, _ = pictures()
        optimizer.zero_grad()
        output, mean, log_variance = model(x)
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()
        (F.mse_loss(output, x.flatten(1), reduction="sum") / len(x) + divergence).backward()
        optimizer.step()

    return model, None, step, 300


@training
def diffusion_with_an_average_of_the_weights():
    model = nn.Sequential(
        *(nn.Conv2d(2, 32, 3, 1, 1), nn.GroupNorm(8, 32), nn.SiLU()),
        *(nn.Conv2d(32, 32, 3, 1, 1), nn.GroupNorm(8, 32), nn.SiLU(), nn.Conv2d(32, 1, 3, 1, 1)),
    )
    nn.init.zeros_(model[-1].weight)
    average, optimizer = copy.deepcopy(model), torch.optim.AdamW(model.parameters(), 1e-3)

    def step():
        x, _ = pictures(32)
        time, noise = torch.rand(32, 1, 1, 1), torch.randn_like(x)
        noisy = torch.cos(1.57 * time) * x + torch.sin(1.57 * time) * noise
        optimizer.zero_grad()
        F.mse_loss(model(torch.cat([noisy, time.expand_as(x)], 1)), noise).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(parameter, 0.01)

    return model, None, step, 250


@training
def contrastive():
    layers = [nn.Conv2d(1, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32)]
    head = [nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)]
    model = nn.Sequential(*layers, *head)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)

    def step():
        x, _ = pictures()
        views = torch.cat([x + 0.3 * torch.randn_like(x), torch.roll(x, 1, 3) + 0.3 * torch.randn_like(x)])
        z = F.normalize(model(views), dim=1)
        similarities = (z @ z.T / 0.2).fill_diagonal_(-1e9)
        optimizer.zero_grad()
        F.cross_entropy(similarities, torch.arange(128).roll(64)).backward()
        optimizer.step()

    return model, None, step, 300


@training
def mixed_labels():
    layers = nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10)
    model = nn.Sequential(*layers)

    def batch():
        (x, y), share = pictures(), torch.rand(64, 1)
        other, others = x.roll(1, 0), y.roll(1, 0)
        mixed = share[:, :, None, None] * x + (1 - share[:, :, None, None]) * other
        return mixed, share * F.one_hot(y, 10) + (1 - share) * F.one_hot(others, 10)

    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
    return supervised(model, optimizer, batch=batch)


@training
def four_micro_batches_in_bfloat16():
    layers = nn.Flatten(), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10)
    model, loss = nn.Sequential(*layers), nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)

    def step():
        optimizer.zero_grad()
        for _ in range(4):
            x, y = pictures(16)
            with torch.autocast("cpu", torch.bfloat16):
                value = loss(model(x), y) / 4
            value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return model, loss, step, 250


@training
def q_learning_with_a_copy():
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    target, optimizer = copy.deepcopy(model), torch.optim.Adam(model.parameters(), 1e-3)
    states, actions = torch.randn(2000, 4), torch.randint(0, 2, (2000,))
    rewards, following = (states[:, 0] * (2 * actions - 1) > 0).float(), 0.9 * states + 0.3 * torch.randn(2000, 4)
    steps = iter(range(10**9))

    def step():
        if next(steps) % 50 == 0:
            target.load_state_dict(model.state_dict())
        chosen = torch.randint(0, 2000, (64,))
        wanted = rewards[chosen] + 0.95 * target(following[chosen]).max(1).values.detach()
        optimizer.zero_grad()
        F.smooth_l1_loss(model(states[chosen]).gather(1, actions[chosen, None])[:, 0], wanted).backward()
        optimizer.step()

    return model, None, step, 400


@training
def forecast_by_an_lstm():
    class Forecast(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.LSTM(1, 32, batch_first=True), nn.Linear(32, 1)

        def forward(self, x):
            return self.head(self.rnn(x)[0][:, -1])

    def batch():
        waves = torch.sin(0.3 * torch.arange(25) + 6 * torch.rand(32, 1)) + 0.05 * torch.randn(32, 25)
        return waves[:, :24, None], waves[:, 24:]

    model = Forecast()
    return supervised(model, torch.optim.Adam(model.parameters(), 3e-3), nn.MSELoss(), batch)


@training
def spectral_and_weight_norm():
    layers = [nn.Flatten(), spectral_norm(nn.Linear(64, 64)), nn.LeakyReLU(0.1), weight_norm(nn.Linear(64, 64))]
    model = nn.Sequential(*layers, nn.LeakyReLU(0.1), nn.Linear(64, 10))
    return supervised(model, torch.optim.Adam(model.parameters(), 1e-3))


@training
def logistic_regression_by_lbfgs():
    (x, y), _ = digits()
    model, loss = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), nn.CrossEntropyLoss()
    optimizer = torch.optim.LBFGS(model.parameters(), 0.5, max_iter=5)

    def closure():
        optimizer.zero_grad()
        value = loss(model(x), y) + 1e-4 * sum(parameter.square().sum() for parameter in model.parameters())
        value.backward()
        return value

    return model, loss, lambda: optimizer.step(closure), 40


def of_transformers(model, rate, labels, samples=8, length=48, steps=200):
    """Return a training of a model that computes its own loss."""
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.1)

    def step():
        tokens = text_windows(samples, length)
        optimizer.zero_grad()
        model(input_ids=tokens, labels=labels(tokens)).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return model, None, step, steps


@training
def gpt2_of_transformers():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 256, "n_positions": 64, "n_embd": 64, "n_layer": 4, "n_head": 4}
    return of_transformers(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)), 6e-4, lambda tokens: tokens)


@training
def llama_of_transformers():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 4}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, max_position_embeddings=64)
    return of_transformers(transformers.LlamaForCausalLM(config), 1e-3, lambda tokens: tokens)


@training
def bert_of_transformers():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 128}
    config = transformers.BertConfig(**sizes, num_attention_heads=4, max_position_embeddings=64, num_labels=2)
    labels = lambda tokens: ((tokens == ord("e")).sum(1) > 2).long()  # noqa: E731
    return of_transformers(transformers.BertForSequenceClassification(config), 1e-4, labels, 16, 32)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("name", TRAININGS)
def test_no_rule_complains_about_a_usual_training(name, seed, tmp_path):
    torch.manual_seed(seed)
    model, loss, step, steps = TRAININGS[name]()
    check(model, loss, step, steps, tmp_path)


def check(model, loss, step, steps, log_dir):
    with ikkuna.watch(model, loss=loss, log_dir=log_dir, backend="null", verbosity=0) as exporter:
        for _ in range(steps):
            step()
    assert exporter.health().errors == 0
    assert not [str(finding) for finding in exporter.findings if finding.severity != "info"]
    assert len(exporter.findings.judged) > 10


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "rate", "options"),
    [
        ("resnet18", 0.05, {}),
        ("convnext_atto", 1e-3, {}),
        ("vit_tiny_patch16_224", 5e-4, {"img_size": 32, "patch_size": 8}),
        ("densenet121", 0.02, {}),
    ],
)
def test_no_rule_complains_about_a_training_of_timm(name, rate, options, tmp_path):
    timm = import_timm()
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10, in_chans=1, **options)
    parameters = model.parameters()
    is_large = rate > 0.01
    optimizer = torch.optim.SGD(parameters, rate, momentum=0.9) if is_large else torch.optim.AdamW(parameters, rate)

    def batch():
        x, y = pictures(16)
        return F.interpolate(x, size=(32, 32)), y

    check(*supervised(model, optimizer, batch=batch, steps=50), tmp_path)
