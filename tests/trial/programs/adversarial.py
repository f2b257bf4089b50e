"""Networks that train against each other."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.trial.program import LABELS, Training, mlp, program


class Adversaries(nn.Module):
    """A generator of points in the plane and its critic."""

    def __init__(self, critic=None):
        super().__init__()
        self.generator, self.critic = mlp(4, 32, 2), critic or mlp(2, 32, 1, activation=lambda: nn.LeakyReLU(0.2))
        for each in self.modules():
            if isinstance(each, nn.Linear):
                nn.init.kaiming_normal_(each.weight)


def real(samples=32):
    angle = 6.28 * torch.rand(samples)
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(samples, 2)


def adam(*modules, rate=1e-3):
    return [torch.optim.Adam(module.parameters(), rate, betas=(0.5, 0.999)) for module in modules]


def convolutional(generator, critic, rate=1e-3):
    """Return the step of DCGAN's loop: the generator reuses the pictures that the critic has seen."""
    of_generator, of_critic = adam(generator, critic, rate=rate)

    def step():
        of_critic.zero_grad()
        on_real = F.softplus(-critic(real())).mean()
        on_real.backward()
        fake = generator(torch.randn(32, 4))
        on_fake = F.softplus(critic(fake.detach())).mean()
        on_fake.backward()
        of_critic.step()
        of_generator.zero_grad()
        loss = F.softplus(-critic(fake)).mean()
        loss.backward()
        of_generator.step()
        return on_real + on_fake, loss

    return step


@program(2, layers=False, told=LABELS, unseen=[0])
def dcgan_in_one_module():
    """DCGAN's loop with both networks in one module."""
    model = Adversaries()
    return Training(model, convolutional(model.generator, model.critic))


@program((1, 1), layers=False, told=LABELS)
def dcgan_in_two_modules():
    """DCGAN's loop, each network watched by itself."""
    model = Adversaries()
    return Training(model.generator, convolutional(model.generator, model.critic)), Training(model.critic, None)


@program(2, layers=False, told=LABELS, unseen=[0])
def gan_with_frozen_critic():
    """A GAN whose critic is frozen while the generator steps."""
    model = Adversaries()
    of_generator, of_critic = adam(model.generator, model.critic)

    def step():
        model.critic.requires_grad_(False)
        of_generator.zero_grad()
        loss = F.softplus(-model.critic(model.generator(torch.randn(32, 4)))).mean()
        loss.backward()
        of_generator.step()
        model.critic.requires_grad_(True)
        of_critic.zero_grad()
        with torch.no_grad():
            fake = model.generator(torch.randn(32, 4))
        of_critic_loss = F.softplus(-model.critic(real())).mean() + F.softplus(model.critic(fake)).mean()
        of_critic_loss.backward()
        of_critic.step()
        return loss, of_critic_loss

    return Training(model, step)


def wasserstein(model, penalty=None, clip=None, critics=3):
    of_generator, of_critic = adam(model.generator, model.critic)

    def step():
        losses = []
        for _ in range(critics):
            of_critic.zero_grad()
            points, fake = real(), model.generator(torch.randn(32, 4)).detach()
            loss = model.critic(fake).mean() - model.critic(points).mean()
            if penalty is not None:
                loss = loss + penalty(model.critic, points, fake)
            loss.backward()
            of_critic.step()
            losses.append(loss)
            if clip is not None:
                for parameter in model.critic.parameters():
                    parameter.data.clamp_(-clip, clip)
        of_generator.zero_grad()
        loss = -model.critic(model.generator(torch.randn(32, 4))).mean()
        loss.backward()
        of_generator.step()
        return [*losses, loss]

    return step


@program(4, 40, layers=False, told=LABELS, unseen=[0, 1])
def wgan():
    """WGAN with clipped weights, three steps of the critic for one of the generator."""
    model = Adversaries()
    return Training(model, wasserstein(model, clip=0.1))


def gradient_penalty(critic, points, fake):
    share = torch.rand(len(points), 1)
    between = (share * points + (1 - share) * fake).requires_grad_()
    (gradient,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return 10 * (gradient.norm(dim=1) - 1).square().mean()


@program(4, 40, layers=False, told=LABELS, unseen=[0, 1])
def wgan_gp():
    """WGAN with a gradient penalty."""
    model = Adversaries()
    return Training(model, wasserstein(model, gradient_penalty))


@program(4, 40, layers=False, told=LABELS, unseen=[0, 1])
def gan_with_spectral_norm():
    """A hinge GAN with a spectrally normalised critic."""
    normed = nn.utils.parametrizations.spectral_norm
    model = Adversaries(nn.Sequential(normed(nn.Linear(2, 32)), nn.LeakyReLU(0.2), normed(nn.Linear(32, 1))))
    return Training(model, wasserstein(model))


@program(1, layers=False, unseen=[0])
def gan_in_one_backward():
    """A domain-adversarial network: one backward through a reversed gradient, two optimizers that step together."""

    class Reversed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            return -gradient

    model = nn.ModuleDict({"features": mlp(8, 16), "classes": nn.Linear(16, 3), "domain": nn.Linear(16, 2)})
    optimizers = adam(model["features"], nn.ModuleList([model["classes"], model["domain"]]), rate=3e-3)

    def step():
        y, domain = torch.randint(0, 3, (32,)), torch.randint(0, 2, (32,))
        x = 2 * F.one_hot(y, 8).float() + 0.3 * torch.randn(32, 8) + domain[:, None]
        hidden = model["features"](x).relu()
        loss = F.cross_entropy(model["classes"](hidden), y)
        loss = loss + 0.1 * F.cross_entropy(model["domain"](Reversed.apply(hidden)), domain)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss

    return Training(model, step)


@program(1, layers=False)  # the attack's calls are no part of the step
def adversarial_examples():
    """Adversarial training: the gradient of the input is taken before the step."""
    model = mlp(8, 32, 3)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)

    def step():
        y = torch.randint(0, 3, (32,))
        x = 2 * F.one_hot(y, 8).float() + 0.3 * torch.randn(32, 8)
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
        x = (x + 0.1 * gradient.sign()).detach()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, step)
