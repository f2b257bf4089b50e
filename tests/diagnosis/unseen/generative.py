"""Faults in variational autoencoders, adversarial networks and diffusion."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.diagnosis.unseen import fault
from tests.diagnosis.unseen.programs import Program, images, loader, mlp

# --- variational autoencoders -----------------------------------------------------------------------------------------


class Autoencoder(nn.Module):
    def __init__(self, detach: bool = False):
        super().__init__()
        self.encoder, self.decoder = mlp(144, 16), mlp(8, 144)
        self.detach = detach

    def forward(self, x):
        mean, log_variance = self.encoder(x.flatten(1)).chunk(2, 1)
        if self.detach:
            code = torch.normal(mean, (log_variance / 2).exp())
        else:
            code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return self.decoder(code), mean, log_variance


def evidence(outputs, pixels, weight=1.0, mean_over_pixels=False):
    decoded, mean, log_variance = outputs
    error = F.mse_loss(decoded, pixels.flatten(1), reduction="mean" if mean_over_pixels else "sum")
    divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum()
    return (error if mean_over_pixels else error / len(pixels)) + weight * divergence / len(pixels)


def autoencoder(model=None, loss=evidence, rate=1e-3, **options) -> Program:
    pixels, _ = images()
    model = model or Autoencoder()
    return Program(model, loss, loader(pixels, pixels), torch.optim.Adam(model.parameters(), lr=rate), **options)


@fault("autoencoders", "the divergence outweighs a mean error by far: the code ignores the input", module="encoder")
def collapsed_posterior():
    return autoencoder(loss=lambda o, x: evidence(o, x, 50.0, True), rate=3e-3)


@fault("autoencoders", "the divergence has the wrong sign, and the loss has no lower bound")
def divergence_subtracted():
    return autoencoder(loss=lambda o, x: evidence(o, x, -1.0))


@fault("autoencoders", "torch.normal passes no gradient: the encoder does not learn to reconstruct", module="encoder")
def sample_without_gradient():
    return autoencoder(Autoencoder(detach=True))


@fault(
    "autoencoders",
    "the exponential of an unbounded log variance overflows, and the loss becomes infinite",
    module="encoder",
)
def overflowing_variance():
    program = autoencoder(loss=lambda o, x: evidence((o[0], o[1], 60 * o[2]), x), rate=2e-2)
    program.model.encoder[-1].bias.data[8:] = 2.0
    return program


# --- adversarial networks ---------------------------------------------------------------------------------------------


def adversarial(step, rate=(1e-3, 1e-3), parameters=None, steps=200) -> Program:
    """Return a program whose loop calls *step* with the program, its discriminator, the real rows and the number of the step."""
    generator, critic = mlp(4, 2), mlp(2, 1)
    real = torch.randn(512, 2) * torch.tensor([1.0, 0.3]) + 2
    optimizer = torch.optim.Adam(generator.parameters(), lr=rate[0], betas=(0.5, 0.99))
    wanted = parameters(generator, critic) if parameters else critic.parameters()
    critic_optimizer = torch.optim.Adam(wanted, lr=rate[1], betas=(0.5, 0.99))

    def loop(program):
        for number in range(steps):
            step(program, critic, critic_optimizer, real[torch.randint(512, (32,))], number)

    return Program(generator, None, [(torch.randn(32, 4), None)], optimizer, loop=loop, others=[critic])


def towards(logits, value):
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, value))


def train_critic(program, critic, critic_optimizer, real, noise):
    critic_optimizer.zero_grad()
    (towards(critic(real), 1.0) + towards(critic(program.model(noise).detach()), 0.0)).backward()
    critic_optimizer.step()


def train_generator(program, critic, noise, value=1.0):
    program.optimizer.zero_grad()
    towards(critic(program.model(noise)), value).backward()
    program.optimizer.step()


@fault(
    "adversarial networks", "the discriminator wins at once and the saturating loss leaves the generator no gradient"
)
def saturating_generator():
    def step(program, critic, critic_optimizer, real, number):
        for _ in range(3):
            train_critic(program, critic, critic_optimizer, real + 20, torch.randn(32, 4))
        program.optimizer.zero_grad()
        (-towards(critic(program.model(torch.randn(32, 4))), 0.0)).backward()
        program.optimizer.step()

    return adversarial(step, rate=(1e-4, 1e-2))


@fault(
    "adversarial networks",
    "the fake rows are not detached and the generator's gradients are never cleared",
    module="generator",
)
def gradients_from_the_other_loss():
    def step(program, critic, critic_optimizer, real, number):
        critic_optimizer.zero_grad()
        fake = program.model(torch.randn(32, 4))
        (towards(critic(real), 1.0) + towards(critic(fake), 0.0)).backward()
        critic_optimizer.step()
        towards(critic(program.model(torch.randn(32, 4))), 1.0).backward()
        program.optimizer.step()

    return adversarial(step)


@fault("adversarial networks", "the generator is trained towards the label of fakes", knowable=False)
def generator_helps_the_critic():
    def step(program, critic, critic_optimizer, real, number):
        train_critic(program, critic, critic_optimizer, real, torch.randn(32, 4))
        train_generator(program, critic, torch.randn(32, 4), 0.0)

    return adversarial(step)


@fault("adversarial networks", "the discriminator's optimizer holds the generator's parameters", module="critic")
def critic_never_trained():
    def step(program, critic, critic_optimizer, real, number):
        train_critic(program, critic, critic_optimizer, real, torch.randn(32, 4))
        train_generator(program, critic, torch.randn(32, 4))

    return adversarial(step, parameters=lambda generator, critic: generator.parameters())


@fault(
    "adversarial networks", "the noise is one row that is expanded: all fakes of a step are equal", module="generator"
)
def one_noise_for_all():
    def step(program, critic, critic_optimizer, real, number):
        noise = torch.randn(1, 4).expand(32, 4)
        train_critic(program, critic, critic_optimizer, real, noise)
        train_generator(program, critic, noise)

    return adversarial(step)


# --- diffusion --------------------------------------------------------------------------------------------------------


class Denoiser(nn.Module):
    def __init__(self, ignores_time: bool = False):
        super().__init__()
        self.time, self.body = nn.Linear(1, 16), mlp(2 + 16, 2)
        self.ignores_time = ignores_time

    def forward(self, x, time):
        return self.body(torch.cat([x, torch.zeros(len(x), 16) if self.ignores_time else self.time(time)], 1))


def diffusion(loss, model=None, steps=250, rate=2e-3) -> Program:
    """Return a program whose loop calls *loss* with the model, clean rows, noise, the time and the share of the signal."""
    model = model or Denoiser()
    clean = torch.randn(512, 2) * torch.tensor([1.0, 0.2])

    def loop(program):
        for _ in range(steps):
            rows, noise = clean[torch.randint(512, (64,))], torch.randn(64, 2)
            time = torch.randint(100, (64, 1))
            share = torch.cos(time / 100 * 1.57) ** 2
            program.optimizer.zero_grad()
            loss(program.model, rows, noise, time, share).backward()
            program.optimizer.step()

    batch = ((torch.randn(64, 2), torch.rand(64, 1)), None)
    return Program(model, None, [batch], torch.optim.Adam(model.parameters(), lr=rate), loop=loop)


def noised(rows, noise, share):
    return share.sqrt() * rows + (1 - share).sqrt() * noise


@fault("diffusion", "the time is always zero")
def time_is_zero():
    return diffusion(lambda m, x, e, t, s: F.mse_loss(m(noised(x, e, s), torch.zeros(len(x), 1)), e))


@fault("diffusion", "the time embedding is computed by a layer whose output is not used", module="time")
def time_not_used():
    return diffusion(lambda m, x, e, t, s: F.mse_loss(m(noised(x, e, s), t / 100), e), Denoiser(ignores_time=True))


@fault("diffusion", "the square roots of the noise schedule are missing", knowable=False)
def schedule_without_roots():
    return diffusion(lambda m, x, e, t, s: F.mse_loss(m(s * x + (1 - s) * e, t / 100), e))


@fault("diffusion", "the time is passed as a number up to a thousand and drowns the inputs", module="time")
def unscaled_time():
    return diffusion(lambda m, x, e, t, s: F.mse_loss(m(noised(x, e, s), 10.0 * t), e))


@fault("diffusion", "the loss compares the prediction with the noisy input itself, which the model can copy")
def predicts_its_input():
    return diffusion(lambda m, x, e, t, s: F.mse_loss(m(noised(x, e, s), t / 100), noised(x, e, s)))
