"""Programs of the fourth set: generators, autoencoders, diffusion, and representations without labels."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

from tests.diagnosis.unseen import fault, healthy
from tests.diagnosis.unseen.fourth_common import handwriting, ring
from tests.diagnosis.unseen.programs import Program, blobs, loader, mlp, program
from tests.diagnosis.unseen.third_common import training

# --- two networks against each other ----------------------------------------------------------------------------------

WITH_LOGITS = nn.BCEWithLogitsLoss()


def adversarial(detached=False, swapped=False):
    """Return a program of a generator and a discriminator of points."""
    model = nn.ModuleDict({"generator": mlp(4, 2, 64), "discriminator": mlp(2, 1, 64, nn.LeakyReLU)})
    theirs = torch.optim.Adam(model["discriminator"].parameters(), 4e-3, betas=(0.5, 0.999))

    def loop(program):
        generator, discriminator = program.model["generator"], program.model["discriminator"]
        program.model.train()
        for _ in range(program.epochs):
            for (points,) in program.loader:
                ones, zeros = torch.ones(len(points), 1), torch.zeros(len(points), 1)
                fakes = generator(torch.randn(len(points), 4))
                theirs.zero_grad()
                told = program.loss(discriminator(points), ones) + program.loss(discriminator(fakes.detach()), zeros)
                told.backward()
                theirs.step()

                program.optimizer.zero_grad()
                judged = discriminator(fakes.detach() if detached else fakes)
                program.loss(judged, zeros if swapped else ones).backward()
                program.optimizer.step()

    optimizer = torch.optim.Adam(model["generator"].parameters(), 1e-3, betas=(0.5, 0.999))
    return Program(model, WITH_LOGITS, loader(ring(2048), batch=64), optimizer, 20, loop)


@fault(
    "graph",
    "the fake points are detached in the generator's step too, so that the generator gets no gradient",
    "generator.0",
    why="the generator's weights never get a gradient, while its optimizer takes steps",
)
def generator_step_with_detached_fakes():
    return adversarial(detached=True)


@fault(
    "targets",
    "the generator's step has the label of fakes, so that the generator helps the discriminator",
    why="both networks lower the same loss on fakes with the label 0, and both losses go to 0",
)
def generator_step_with_the_label_of_fakes():
    return adversarial(swapped=True)


# --- autoencoders with a distribution ---------------------------------------------------------------------------------


class Variational(nn.Module):
    """A variational autoencoder of flat images; `noisy` draws the code from mean and logarithm of the variance."""

    def __init__(self, noisy):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(256, 96), nn.ReLU(), nn.Linear(96, 16))
        self.decoder = nn.Sequential(nn.Linear(8, 96), nn.ReLU(), nn.Linear(96, 256))
        self.noisy = noisy

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, 1)
        return self.decoder(self.noisy(mean, log_variance)), mean, log_variance


def reparametrised(mean, log_variance):
    return mean + torch.randn_like(mean) * (0.5 * log_variance).exp()


def bright(rows=1024):
    pixels, _ = handwriting(rows)
    return pixels.float().div(255).flatten(1)


def divergence(mean, log_variance):
    return -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1)


def bound(program, images):
    images_again, mean, log_variance = program.model(images)
    likelihood = F.binary_cross_entropy_with_logits(images_again, images, reduction="none").sum(1)
    return (likelihood + divergence(mean, log_variance)).mean()


@fault(
    "objective",
    "the divergence is summed over codes and rows, and the error is a mean over all pixels, so that the code carries nothing",
    why="the divergence goes to 0, and the outputs are the same for all rows",
)
def summed_divergence_beside_a_mean_error():
    def objective(program, images):
        images_again, mean, log_variance = program.model(images)
        error = F.mse_loss(images_again.sigmoid(), images)
        return error + divergence(mean, log_variance).sum()

    return training(Variational(reparametrised), loader(bright()), objective, 2e-3, epochs=6)


@fault(
    "graph",
    "the code is drawn by sample() instead of rsample(), so that the encoder learns nothing from the error",
    "encoder.2",
    why="no gradient comes to the encoder through its code, only from the divergence, which goes to 0",
)
def code_by_sample():
    def drawn(mean, log_variance):
        return torch.distributions.Normal(mean, (0.5 * log_variance).exp()).sample()

    return training(Variational(drawn), loader(bright()), bound, 2e-3, epochs=6)


@fault(
    "objective",
    "the standard deviation of the code is exp(log_variance) instead of its root",
    knowable=False,
    why="the run looks like one with another parametrisation, and both terms of the loss fall",
)
def deviation_equal_to_the_variance():
    def drawn(mean, log_variance):
        return mean + torch.randn_like(mean) * log_variance.exp()

    return training(Variational(drawn), loader(bright()), bound, 2e-3, epochs=6)


# --- diffusion --------------------------------------------------------------------------------------------------------


class Denoiser(nn.Module):
    """A network that tells the noise of a point from the point and the time."""

    def __init__(self):
        super().__init__()
        self.time, self.net = nn.Embedding(100, 16), mlp(18, 2, 96, nn.SiLU)

    def forward(self, points, times):
        return self.net(torch.cat([points, self.time(times)], 1))


def diffusion(fresh):
    """Return a program that learns to tell the noise; `fresh` compares with noise that was not added."""
    kept = (1 - torch.linspace(1e-3, 0.08, 100)).cumprod(0).sqrt()[:, None]

    def loop(program):
        program.model.train()
        for _ in range(program.epochs):
            for (points,) in program.loader:
                times, noise = torch.randint(100, (len(points),)), torch.randn_like(points)
                noisy = kept[times] * points + (1 - kept[times].square()).sqrt() * noise
                program.optimizer.zero_grad()
                target = torch.randn_like(points) if fresh else noise
                program.loss(program.model(noisy, times), target).backward()
                program.optimizer.step()

    return program(Denoiser(), nn.MSELoss(), loader(ring(2048), batch=64), 3e-3, epochs=10, loop=loop)


@fault(
    "targets",
    "the target of the denoiser is drawn anew, and is not the noise that was added",
    knowable=False,
    why="the loss stays at 1 as with any target that cannot be predicted; that another noise was added is not to be seen",
)
def target_is_another_noise():
    return diffusion(fresh=True)


# --- representations --------------------------------------------------------------------------------------------------


def views(inputs, noise=0.3):
    return inputs + noise * torch.randn_like(inputs), inputs + noise * torch.randn_like(inputs)


@fault(
    "objective",
    "two views of each row are drawn together, and nothing drives rows apart, so that all rows get the same code",
    why="the codes of all rows become equal, and the loss goes to 0 within a few steps",
)
def views_drawn_together_only():
    def objective(program, inputs):
        first, second = (F.normalize(program.model(view), dim=1) for view in views(inputs))
        return 2 - 2 * (first * second).sum(1).mean()

    return training(mlp(20, 16, 64), loader(blobs(1024)[0], batch=64), objective, 2e-3, epochs=10)


# --- healthy ----------------------------------------------------------------------------------------------------------


@healthy("adversarial")
def generator_of_points_on_a_ring():
    return adversarial()


@healthy("objective")
def divergence_with_a_rising_weight():
    steps = iter(range(10_000))

    def objective(program, images):
        images_again, mean, log_variance = program.model(images)
        likelihood = F.binary_cross_entropy_with_logits(images_again, images, reduction="none").sum(1)
        return (likelihood + min(1.0, next(steps) / 150) * divergence(mean, log_variance)).mean()

    return training(Variational(reparametrised), loader(bright()), objective, 2e-3, epochs=8)


@healthy("diffusion")
def denoiser_of_points():
    return diffusion(fresh=False)


@healthy("representations")
def pairs_with_a_slow_target():
    """BYOL: a predictor, a target network that follows slowly, and no negative pairs."""
    inputs, _ = blobs(1024)
    encoder = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16))
    model = nn.ModuleDict(
        {"encoder": encoder, "predictor": nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))}
    )
    target = copy.deepcopy(encoder).requires_grad_(False)

    def loop(program):
        program.model.train()
        for _ in range(program.epochs):
            for (inputs,) in program.loader:
                first, second = views(inputs)
                loss = 0.0
                for seen, other in ((first, second), (second, first)):
                    guess = F.normalize(program.model["predictor"](program.model["encoder"](seen)), dim=1)
                    loss = loss + 1 - (guess * F.normalize(target(other), dim=1)).sum(1).mean()
                program.optimizer.zero_grad()
                loss.backward()
                program.optimizer.step()
                with torch.no_grad():
                    for slow, fast in zip(target.parameters(), program.model["encoder"].parameters(), strict=True):
                        slow.lerp_(fast, 0.02)

    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    return Program(model, None, loader(inputs, batch=64), optimizer, 10, loop, others=[target])


@healthy("adversarial")
def features_that_hide_the_domain():
    """A gradient that is turned round makes the features equal in two domains."""
    inputs, labels = blobs(1024)
    domain = torch.randint(2, (1024, 1)).float()
    parts = {
        "features": nn.Sequential(nn.Linear(20, 64), nn.ReLU()),
        "label": nn.Linear(64, 5),
        "domain": mlp(64, 1, 32),
    }

    def objective(program, inputs, labels, domain):
        features = program.model["features"](inputs + 0.3 * domain)
        turned = 2 * features.detach() - features
        guessed = program.model["domain"](turned)
        return F.cross_entropy(program.model["label"](features), labels) + 0.1 * WITH_LOGITS(guessed, domain)

    return training(nn.ModuleDict(parts), loader(inputs, labels, domain), objective, 2e-3, epochs=8)
