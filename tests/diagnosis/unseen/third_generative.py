"""Programs of the third set: adversarial networks, autoencoders, diffusion, contrastive learning, distillation."""

import itertools

import torch
from torch import nn
from torch.nn import functional as F

from tests.diagnosis.unseen import fault, healthy
from tests.diagnosis.unseen.programs import Program, blobs, loader, mlp
from tests.diagnosis.unseen.third_common import training


def cloud(rows=768, features=12):
    """Rows near a plane of three dimensions, standardised."""
    rows_of_cloud = torch.randn(rows, 3) @ torch.randn(3, features)
    return (rows_of_cloud - rows_of_cloud.mean(0)) / rows_of_cloud.std(0) + 0.05 * torch.randn(rows, features)


# --- adversarial networks ---------------------------------------------------------------------------------------------


def adversaries(step, rate=2e-3, epochs=5):
    """A generator of points, and a critic with an optimizer of its own, which `step` trains in turn."""
    generator, critic = mlp(4, 2, 32), mlp(2, 1, 32, nn.LeakyReLU)
    points = 0.5 * torch.randn(768, 2) + torch.tensor([2.0, -1.0])
    of_critic = torch.optim.Adam(critic.parameters(), rate, betas=(0.5, 0.999))

    def loop(program):
        for _ in range(program.epochs):
            for (real,) in program.loader:
                step(program, critic, of_critic, real)

    of_generator = torch.optim.Adam(generator.parameters(), rate, betas=(0.5, 0.999))
    return Program(generator, None, loader(points), of_generator, epochs, loop, others=[critic])


def judged(scores, real):
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(real)))


@fault(
    "adversarial networks",
    "the points are detached in the step of the generator as well as in that of the critic",
    why="backward of the generator's loss reaches the critic alone; no parameter of the generator ever has a gradient",
)
def generator_behind_a_detach():
    def step(program, critic, of_critic, real):
        made = program.model(torch.randn(len(real), 4)).detach()
        of_critic.zero_grad()
        (judged(critic(real), True) + judged(critic(made), False)).backward()
        of_critic.step()
        program.optimizer.zero_grad()
        judged(critic(made), True).backward()
        program.optimizer.step()

    return adversaries(step)


@fault(
    "adversarial networks",
    "the critic is told that the points of the generator are real too, since the line was copied from that of the real ones",
    why="all targets of the critic are 1, and its scores grow for every input until the generator gets no gradient",
)
def everything_is_real():
    def step(program, critic, of_critic, real):
        made = program.model(torch.randn(len(real), 4))
        of_critic.zero_grad()
        (judged(critic(real), True) + judged(critic(made.detach()), True)).backward()
        of_critic.step()
        program.optimizer.zero_grad()
        judged(critic(made), True).backward()
        program.optimizer.step()

    return adversaries(step)


@healthy("adversarial networks")
def points_of_two_adversaries():
    """The losses do not fall, as they should not; the mean of the generated points goes from the origin to near (2, -1)."""

    def step(program, critic, of_critic, real):
        made = program.model(torch.randn(len(real), 4))
        of_critic.zero_grad()
        (judged(critic(real), True) + judged(critic(made.detach()), False)).backward()
        of_critic.step()
        program.optimizer.zero_grad()
        judged(critic(made), True).backward()
        program.optimizer.step()

    return adversaries(step, rate=1e-2)


# --- autoencoders -----------------------------------------------------------------------------------------------------


class Variational(nn.Module):
    def __init__(self, spread=lambda logarithm: (0.5 * logarithm).exp()):
        super().__init__()
        self.encoder, self.decoder, self.spread = mlp(12, 8), mlp(4, 12), spread

    def forward(self, x):
        mean, logarithm = self.encoder(x).chunk(2, 1)
        self.kl = 0.5 * (mean**2 + logarithm.exp() - 1 - logarithm)
        return self.decoder(mean + torch.randn_like(mean) * self.spread(logarithm))


@fault(
    "autoencoders",
    "the divergence is summed over batch and code while the error is a mean, so that the code carries nothing",
    "encoder",
    why="the loss is made of a mean of the order of 1 and a sum over 128 values; mean and logarithm of each code go to 0",
)
def divergence_summed_and_error_averaged():
    def objective(program, rows):
        return F.mse_loss(program.model(rows), rows) + program.model.kl.sum()

    return training(Variational(), loader(cloud()), objective)


@fault(
    "autoencoders",
    "the logarithm of the variance is used as the deviation, so that the noise of the code is not what the loss says",
    why="code minus mean is the noise times the logarithm, though the divergence takes the exponential of it",
)
def logarithm_for_the_deviation():
    def objective(program, rows):
        return F.mse_loss(program.model(rows), rows) + 0.02 * program.model.kl.sum(1).mean()

    return training(Variational(spread=lambda logarithm: logarithm), loader(cloud()), objective)


@healthy("autoencoders")
def divergence_that_comes_in_slowly():
    """The weight of the divergence grows from 0 to 0.02; the error of the reconstruction falls by more than half."""
    steps = itertools.count()

    def objective(program, rows):
        weight = min(next(steps) / 100, 1.0) * 0.02
        return F.mse_loss(program.model(rows), rows) + weight * program.model.kl.sum(1).mean()

    return training(Variational(), loader(cloud()), objective, epochs=6, rate=5e-3)


# --- diffusion --------------------------------------------------------------------------------------------------------


def diffusion(kept, target=lambda noise: noise, epochs=5):
    """A network that predicts the noise of a row, from the row with the noise and the share of what is kept."""

    def objective(program, rows):
        share = kept[torch.randint(0, len(kept), (len(rows), 1))]
        noise = torch.randn_like(rows)
        noisy = share.sqrt() * rows + (1 - share).sqrt() * noise
        return F.mse_loss(program.model(torch.cat([noisy, share], 1)), target(noise))

    points = torch.randn(960, 1).sign() * torch.tensor([2.0, 1.0]) + 0.1 * torch.randn(960, 2)
    return training(mlp(3, 2, 64), loader(points), objective, epochs=epochs, rate=5e-3)


@fault(
    "diffusion",
    "the loss compares the output with noise that was drawn anew, not with the noise in the input",
    why="the target is another draw than what was added to the rows, and the loss stays at 1, its variance",
)
def noise_drawn_again():
    return diffusion((1 - torch.linspace(1e-3, 0.2, 50)).cumprod(0), target=torch.randn_like)


@fault(
    "diffusion",
    "the product over time of what is kept was forgotten, so that the last step has little more noise than the first",
    knowable=False,
    why="such a schedule may be meant; that the samples later start from pure noise is no part of the training",
)
def noise_of_one_step_only():
    return diffusion(1 - torch.linspace(1e-3, 0.2, 50))


@healthy("diffusion")
def noise_predicted():
    """The loss falls from 1 to less than a half."""
    return diffusion((1 - torch.linspace(1e-3, 0.2, 50)).cumprod(0))


# --- contrastive learning ---------------------------------------------------------------------------------------------


def views(rows):
    return [rows + 0.3 * torch.randn_like(rows) for _ in range(2)]


def contrast(masked):
    def objective(program, rows, _):
        one, two = views(rows)
        codes = F.normalize(torch.cat([program.model(one), program.model(two)]), dim=1)
        scores = codes @ codes.T / 0.2
        if masked:
            scores = scores.masked_fill(torch.eye(len(codes)).bool(), -1e9)
        return F.cross_entropy(scores, torch.arange(len(codes)).roll(len(rows)))

    return objective


@fault(
    "contrastive learning",
    "the similarity of each view with itself stays among the candidates, and it is always the largest",
    why="in each row of the scores the diagonal is the maximum, 1 / temperature, and is never the target",
)
def each_view_like_itself():
    return training(mlp(20, 16), loader(*blobs()), contrast(masked=False))


@healthy("contrastive learning")
def two_views_among_many():
    """The loss falls to less than a half of that of guessing, log 63."""
    return training(mlp(20, 16), loader(*blobs()), contrast(masked=True), rate=5e-3)


@fault(
    "contrastive learning",
    "positive and negative have changed places in the call of the triplet loss",
    why="the rows of the second argument have other labels than the anchors, those of the third have the same",
)
def positive_and_negative_changed():
    inputs, labels = blobs()
    positive = torch.stack([(labels == label).nonzero().flatten()[0] for label in labels])
    negative = torch.stack([(labels != label).nonzero().flatten()[i % 200] for i, label in enumerate(labels)])

    def objective(program, rows, alike, unlike, *_):
        code = program.model
        return F.triplet_margin_loss(code(rows), code(unlike), code(alike))

    data = loader(inputs, inputs[positive], inputs[negative], labels, labels[positive], labels[negative])
    return training(mlp(20, 8), data, objective)


@fault(
    "contrastive learning",
    "the gradient is not stopped at the target view, and there are no negatives: the encoder gives one code for all rows",
    why="the loss comes to its minimum of -1 at once, while the codes of the rows of a batch become equal",
)
def twins_without_a_stop():
    def objective(program, rows, _):
        one, two = (program.model(view) for view in views(rows))
        return -F.cosine_similarity(one, two).mean()

    return training(mlp(20, 16), loader(*blobs()), objective, rate=0.01)


# --- distillation -----------------------------------------------------------------------------------------------------


def taught(teach, before=lambda teacher: teacher.eval()):
    """A student that learns the outputs of a teacher, which was trained beforehand."""
    inputs, labels = blobs()
    teacher = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 5))
    optimizer = torch.optim.Adam(teacher.parameters(), 0.02)
    for _ in range(40):
        optimizer.zero_grad()
        F.cross_entropy(teacher(inputs), labels).backward()
        optimizer.step()
    teacher.zero_grad()
    before(teacher.requires_grad_(False))

    def objective(program, rows, _):
        with torch.no_grad():
            goals = teacher(rows)
        return teach(program.model(rows), goals)

    return training(mlp(20, 5, 24), loader(inputs, labels), objective, others=[teacher])


@fault(
    "distillation",
    "the teacher is in training mode and drops units at random while it teaches",
    why="the mode of the teacher's dropout, and outputs that differ for the same rows",
)
def teacher_in_training_mode():
    def teach(outputs, goals):
        return F.kl_div(outputs.log_softmax(1), goals.softmax(1), reduction="batchmean")

    return taught(teach, before=lambda teacher: teacher.train())


@fault(
    "distillation",
    "`kl_div` gets probabilities where it wants their logarithms",
    why="the first argument of the loss lies between 0 and 1 and is no logarithm of a probability; the loss is negative",
)
def probabilities_for_their_logarithms():
    return taught(lambda o, t: F.kl_div(o.softmax(1), t.softmax(1), reduction="batchmean"))


@healthy("distillation")
def student_at_a_temperature():
    """Both outputs are softened by a temperature of 3; the divergence falls to less than a tenth."""
    return taught(lambda o, t: 9 * F.kl_div((o / 3).log_softmax(1), (t / 3).softmax(1), reduction="batchmean"))
