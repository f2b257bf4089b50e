"""Models of data: autoencoders, diffusion, flows, contrastive and self-supervised features."""

import copy
import math

import torch
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F

from tests.trial.program import LABELS, Training, mlp, pictures, program, standard


def adam(model, rate=3e-3):
    return torch.optim.Adam(model.parameters(), rate)


def unlabelled(samples=32):
    x, _ = pictures(samples)
    return x, x


class Variational(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.mean, self.spread = mlp(64, 64), nn.Linear(64, 4), nn.Linear(64, 4)
        self.decoder = mlp(4, 64, 64)

    def forward(self, x):
        hidden = self.encoder(x.flatten(1)).relu()
        posterior = Normal(self.mean(hidden), (self.spread(hidden) / 2).exp())
        return self.decoder(posterior.rsample()), posterior


@program()
def variational_autoencoder():
    """A variational autoencoder."""
    model = Variational()

    def loss(output, x):
        restored, posterior = output
        prior = Normal(torch.zeros(()), torch.ones(()))
        divergence = kl_divergence(posterior, prior).sum(1).mean()
        return F.mse_loss(restored, x.flatten(1), reduction="sum") / len(x) + divergence

    return standard(model, adam(model), unlabelled, loss)


@program()
def denoising_autoencoder():
    """A denoising autoencoder with a bottleneck."""
    model = nn.Sequential(nn.Flatten(), mlp(64, 32, 8, 32, 64))

    def batch():
        x, _ = pictures(32)
        return x + 0.2 * torch.randn_like(x), x.flatten(1)

    return standard(model, adam(model), batch, F.mse_loss)


@program()
def masked_autoencoder():
    """A masked autoencoder."""
    model = nn.Sequential(nn.Flatten(), mlp(64, 64, 64))

    def batch():
        x, _ = pictures(32)
        return x * (torch.rand_like(x) > 0.5), x.flatten(1)

    return standard(model, adam(model), batch, F.mse_loss)


class Quantized(nn.Module):
    """VQ-VAE with a straight-through estimator."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = mlp(64, 32, 4), mlp(4, 32, 64)
        self.codes = nn.Embedding(16, 4)

    def forward(self, x):
        z = self.encoder(x.flatten(1))
        nearest = torch.cdist(z, self.codes.weight).argmin(1)
        code = self.codes(nearest)
        return self.decoder(z + (code - z).detach()), z, code


@program()
def vector_quantized_autoencoder():
    """VQ-VAE: a codebook, a commitment, a straight-through gradient."""
    model = Quantized()

    def loss(output, x):
        restored, z, code = output
        of_codes = F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())
        return F.mse_loss(restored, x.flatten(1)) + of_codes

    return standard(model, adam(model), unlabelled, loss)


@program()
def diffusion():
    """Denoising diffusion with an averaged copy of the weights."""
    model = nn.Sequential(
        *(nn.Conv2d(2, 16, 3, 1, 1), nn.GroupNorm(4, 16), nn.SiLU()),
        *(nn.Conv2d(16, 16, 3, 1, 1), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 1, 3, 1, 1)),
    )
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))

    def batch():
        x, _ = pictures(16)
        time, noise = torch.rand(16, 1, 1, 1), torch.randn_like(x)
        noisy = (1.57 * time).cos() * x + (1.57 * time).sin() * noise
        return torch.cat([noisy, time.expand_as(x)], 1), noise

    return standard(model, adam(model), batch, F.mse_loss, after=lambda: average.update_parameters(model))


@program()
def flow_matching():
    """Flow matching in the plane."""
    model = mlp(3, 64, 64, 2)

    def batch():
        angle, time, noise = 6.28 * torch.rand(64), torch.rand(64, 1), torch.randn(64, 2)
        x = torch.stack([angle.cos(), angle.sin()], 1)
        return torch.cat([time * x + (1 - time) * noise, time], 1), x - noise

    return standard(model, adam(model), batch, F.mse_loss)


class Coupling(nn.Module):
    """RealNVP in the plane."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(mlp(1, 32, 2) for _ in range(4))

    def forward(self, x):
        log_determinant = torch.zeros(len(x))
        for layer in self.layers:
            kept, changed = x.chunk(2, 1)
            scale, shift = layer(kept).chunk(2, 1)
            scale = scale.tanh()
            x = torch.cat([changed * scale.exp() + shift, kept], 1)
            log_determinant = log_determinant + scale[:, 0]
        return x, log_determinant


@program(told=LABELS)
def normalising_flow():
    """A normalising flow by its likelihood."""
    model = Coupling()

    def batch():
        angle = 6.28 * torch.rand(64)
        x = torch.stack([angle.cos(), angle.sin()], 1) + 0.1 * torch.randn(64, 2)
        return x, x

    def loss(output, _):
        z, log_determinant = output
        return (0.5 * z.square().sum(1) + math.log(2 * math.pi) - log_determinant).mean()

    return standard(model, adam(model), batch, loss)


@program(told=LABELS, layers=False)  # the score is differentiated twice
def score_matching():
    """Sliced score matching: a gradient inside the loss."""
    model = mlp(2, 32, 2, activation=nn.Softplus)

    def step():
        x = torch.randn(64, 2).requires_grad_()
        direction = torch.randn(64, 2)
        score = model(x)
        (gradient,) = torch.autograd.grad((score * direction).sum(), x, create_graph=True)
        optimizer.zero_grad()
        loss = ((gradient * direction).sum(1) + 0.5 * score.square().sum(1)).mean()
        loss.backward()
        optimizer.step()
        return loss

    optimizer = adam(model)
    return Training(model, step)


@program(told=LABELS, layers=False)  # the calls of the sampler are no part of the step
def energy_based_model():
    """An energy-based model whose samples are drawn by Langevin dynamics through the model."""
    model = mlp(2, 32, 1, activation=nn.SiLU)
    optimizer = adam(model, 1e-3)

    def step():
        angle = 6.28 * torch.rand(32)
        real = torch.stack([angle.cos(), angle.sin()], 1)
        x = torch.randn(32, 2)
        for _ in range(3):
            x = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(model(x).sum(), x)
            x = x - 0.05 * gradient + 0.1 * torch.randn_like(x)
        on_real, on_fake = model(real), model(x.detach())
        optimizer.zero_grad()
        loss = (on_real - on_fake).mean() + 0.1 * (on_real.square() + on_fake.square()).mean()
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, step)


def views():
    x, _ = pictures(32)
    return torch.cat([x + 0.2 * torch.randn_like(x), x.roll(1, 3) + 0.2 * torch.randn_like(x)])


def encoder():
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 32)),
        *(nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16)),
    )


@program()
def simclr():
    """SimCLR: InfoNCE over two views."""
    model = encoder()

    def loss(z, y):
        z = F.normalize(z, dim=1)
        return F.cross_entropy((z @ z.T / 0.2).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9), y)

    return standard(model, adam(model), lambda: (views(), (torch.arange(64) + 32) % 64), loss)


class TwoTowers(nn.Module):
    """CLIP's two encoders with a learned temperature."""

    def __init__(self):
        super().__init__()
        self.pictures, self.words = nn.Sequential(nn.Flatten(), mlp(64, 32, 8)), nn.Embedding(64, 8)
        self.log_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x, words):
        return self.log_scale.exp() * F.normalize(self.pictures(x), dim=1) @ F.normalize(self.words(words), dim=1).T


@program()
def contrastive_towers():
    """CLIP: pictures and words, cross-entropy in both directions."""
    model = TwoTowers()
    optimizer = adam(model)

    def step():
        x, words = torch.zeros(16, 1, 8, 8), torch.randperm(64)[:16]
        x.flatten(1)[torch.arange(16), words] = 3.0
        logits = model(x + 0.1 * torch.randn_like(x), words)
        optimizer.zero_grad()
        loss = (F.cross_entropy(logits, torch.arange(16)) + F.cross_entropy(logits.T, torch.arange(16))) / 2
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, step)


class Bootstrap(nn.Module):
    """BYOL: an online network with a predictor, and a slow copy."""

    def __init__(self):
        super().__init__()
        self.online, self.predictor = encoder(), mlp(16, 32, 16)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            wanted = self.target(x)
        return self.predictor(self.online(x)), wanted


@program(layers=False, told=LABELS)  # the target is called, too
def byol():
    """BYOL with a momentum encoder inside the model."""
    model = Bootstrap()
    optimizer = torch.optim.Adam([*model.online.parameters(), *model.predictor.parameters()], 3e-3)

    def step():
        output, wanted = model(views())
        optimizer.zero_grad()
        loss = 2 - 2 * F.cosine_similarity(output, wanted.roll(32, 0)).mean()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mean, parameter in zip(model.target.parameters(), model.online.parameters(), strict=True):
                mean.lerp_(parameter, 0.01)
        return loss

    return Training(model, step)


@program(told=LABELS)
def siamese():
    """A siamese network: two calls in a step, triplet loss."""
    model = nn.Sequential(nn.Flatten(), mlp(64, 32, 8))
    optimizer, loss_of = adam(model), nn.TripletMarginLoss()

    def step():
        x, _ = pictures(32)
        like = x + 0.3 * torch.randn_like(x)
        optimizer.zero_grad()
        loss = loss_of(model(x), model(like), model(x.roll(1, 0)))
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, step)


@program(told=LABELS)
def super_resolution():
    """Super resolution by a pixel shuffle."""
    model = nn.Sequential(nn.Conv2d(1, 16, 3, 1, 1), nn.ReLU(), nn.Conv2d(16, 4, 3, 1, 1), nn.PixelShuffle(2))

    def batch():
        x, _ = pictures(16)
        return F.avg_pool2d(x, 2), x

    return standard(model, adam(model), batch, F.l1_loss)


class Shrinking(nn.Module):
    """A small U-net."""

    def __init__(self):
        super().__init__()
        self.down, self.inner, self.up = (
            nn.Conv2d(1, 8, 3, 2, 1),
            nn.Conv2d(8, 8, 3, 1, 1),
            nn.ConvTranspose2d(8, 8, 2, 2),
        )
        self.head = nn.Conv2d(9, 2, 1)

    def forward(self, x):
        hidden = self.inner(self.down(x).relu()).relu()
        return self.head(torch.cat([x, self.up(hidden).relu()], 1))


@program()
def segmentation():
    """Segmentation by a U-net, cross-entropy and Dice."""
    model = Shrinking()

    def batch():
        masks = torch.zeros(16, 8, 8, dtype=torch.long)
        for mask, (row, column) in zip(masks, torch.randint(0, 5, (16, 2)), strict=True):
            mask[row : row + 4, column : column + 4] = 1
        return masks[:, None] + 0.3 * torch.randn(16, 1, 8, 8), masks

    def loss(output, y):
        share = output.softmax(1)[:, 1]
        dice = 1 - 2 * (share * y).sum() / (share.sum() + y.sum())
        return F.cross_entropy(output, y) + dice

    return standard(model, adam(model), batch, loss)


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 1, 1), nn.ReLU())
        self.there, self.box = nn.Conv2d(16, 1, 1), nn.Conv2d(16, 4, 1)

    def forward(self, x):
        hidden = self.body(x)
        return {"there": self.there(hidden)[:, 0], "box": self.box(hidden)}


@program()
def detection():
    """A detector of one stage: objectness and boxes, an output that is a dictionary."""
    model = Detector()

    def batch():
        x, there = 0.2 * torch.randn(16, 1, 8, 8), torch.zeros(16, 4, 4)
        cells = torch.randint(0, 4, (16, 2))
        there[torch.arange(16), cells[:, 0], cells[:, 1]] = 1
        return x + F.interpolate(there[:, None], scale_factor=2), there

    def loss(output, there):
        boxes = F.smooth_l1_loss(output["box"], torch.full_like(output["box"], 0.5), reduction="none").mean(1)
        return F.binary_cross_entropy_with_logits(output["there"], there) + (boxes * there).sum() / there.sum()

    return standard(model, adam(model), batch, loss)
