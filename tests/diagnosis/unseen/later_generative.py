"""Faults of the later set: networks that generate, contrastive and reinforcement learning, distillation."""

import copy
import itertools

import torch
from torch import nn
from torch.nn import functional as F

from tests.diagnosis.unseen import fault, healthy
from tests.diagnosis.unseen.programs import Program, blobs, classifier, loader, mlp, regressor

# --- autoencoders -----------------------------------------------------------------------------------------------------


class Codebook(nn.Module):
    """An autoencoder through the nearest of sixteen codes."""

    def __init__(self, spread):
        super().__init__()
        self.encoder, self.codes, self.decoder = nn.Linear(12, 4), nn.Embedding(16, 4), nn.Linear(4, 12)
        nn.init.uniform_(self.codes.weight, -spread, spread)

    def forward(self, x):
        z = self.encoder(x)
        code = self.codes(torch.cdist(z, self.codes.weight).argmin(1))
        self.commitment = F.mse_loss(z, code.detach()) + F.mse_loss(code, z.detach())
        return self.decoder(z + (code - z).detach())


def codes(spread):
    inputs = torch.randn(768, 3) @ torch.randn(3, 12) / 3
    model = Codebook(spread)
    return regressor(model, loader(inputs, inputs), loss=lambda o, t: F.mse_loss(o, t) + model.commitment)


@fault(
    "autoencoders",
    "the codes begin far from all encodings, so that one of the sixteen codes is used for every row",
    "codes",
    why="the embedding gets one or two indices in all batches, and the other rows never get a gradient",
)
def one_code_for_all_rows():
    return codes(60.0)


@healthy("autoencoders")
def codes_near_the_encodings():
    return codes(1.0)


class Discrete(nn.Module):
    def __init__(self, temperature):
        super().__init__()
        self.encoder, self.decoder, self.temperature = mlp(12, 32), nn.Linear(32, 12), temperature

    def forward(self, x):
        logits = self.encoder(x).view(-1, 4, 8)
        return self.decoder(F.gumbel_softmax(logits, self.temperature, dim=-1).flatten(1))


def discrete(temperature):
    inputs = torch.randn(768, 3) @ torch.randn(3, 12)
    return regressor(Discrete(temperature), loader(inputs, inputs))


@fault(
    "autoencoders",
    "the temperature of the Gumbel softmax is so low that nearly no gradient passes it",
    "encoder",
    why="the softmax is saturated in every row, and the gradients of the encoder are tiny between huge ones",
)
def gumbel_softmax_too_cold():
    return discrete(1e-3)


@healthy("autoencoders")
def gumbel_softmax_at_one():
    return discrete(1.0)


class Variational(nn.Module):
    def __init__(self, sampled=True):
        super().__init__()
        self.encoder, self.spread, self.decoder = mlp(12, 4), nn.Linear(12, 4), mlp(4, 12)
        self.sampled = sampled

    def forward(self, x):
        mean, logs = self.encoder(x), self.spread(x)
        self.divergence = 0.5 * (mean.square() + logs.exp() - 1 - logs).sum(1).mean()
        return self.decoder(mean + (0.5 * logs).exp() * torch.randn_like(mean) if self.sampled else mean)


@fault(
    "autoencoders",
    "the mean is decoded in place of a sample, so that the spread is free to be the prior's",
    "spread",
    knowable=False,
    why="the network is a legal autoencoder with a penalty; nothing shows that a sample was meant",
)
def mean_decoded():
    inputs = torch.randn(768, 3) @ torch.randn(3, 12)
    model = Variational(sampled=False)
    return regressor(model, loader(inputs, inputs), loss=lambda o, t: F.mse_loss(o, t) + 0.05 * model.divergence)


# --- adversarial networks ---------------------------------------------------------------------------------------------


def adversarial_pair(loop, steps=220, rates=(1e-3, 1e-3), confused=False):
    """Return a program that trains a generator and a critic by `loop(generator, critic, optimizers, real)` in each step."""
    generator, critic = mlp(4, 2), mlp(2, 1)
    pair = (
        torch.optim.Adam((critic if confused else generator).parameters(), rates[0]),
        torch.optim.Adam(critic.parameters(), rates[1]),
    )

    def whole(program):
        for _ in range(steps):
            real = torch.randn(48, 2) * 0.3 + torch.tensor([2.0, -1.0])
            loop(program.model, critic, pair, real)

    return Program(generator, None, [(torch.randn(48, 4), None)], pair[0], loop=whole, others=[critic])


def critic_step(generator, critic, optimizer, real, fakes=True):
    optimizer.zero_grad()
    loss = F.softplus(-critic(real)).mean()
    if fakes:
        loss = loss + F.softplus(critic(generator(torch.randn(48, 4)).detach())).mean()
    loss.backward()
    optimizer.step()


def generator_step(generator, critic, optimizer):
    optimizer.zero_grad()
    F.softplus(-critic(generator(torch.randn(48, 4)))).mean().backward()
    optimizer.step()


@fault(
    "adversarial networks",
    "the critic is trained on real rows only, so that it calls everything real",
    why="the outputs of the critic grow on all rows, and its loss runs to zero",
)
def critic_never_shown_a_fake():
    def loop(generator, critic, pair, real):
        critic_step(generator, critic, pair[1], real, fakes=False)
        generator_step(generator, critic, pair[0])

    return adversarial_pair(loop)


@fault(
    "adversarial networks",
    "the generator's optimizer was made with the parameters of the critic, so that the generator never changes",
    why="the generator gets gradients and none of its weights changes",
)
def optimizer_with_the_critics_parameters():
    def loop(generator, critic, pair, real):
        critic_step(generator, critic, pair[1], real)
        generator_step(generator, critic, pair[0])

    return adversarial_pair(loop, confused=True)


@fault(
    "adversarial networks",
    "the critic of a Wasserstein loss has no bound on its slope, so that both losses run away",
    why="the outputs and weights of the critic grow without end",
)
def critic_without_bound():
    def loop(generator, critic, pair, real):
        for _ in range(3):
            pair[1].zero_grad()
            (critic(generator(torch.randn(48, 4)).detach()).mean() - critic(real).mean()).backward()
            pair[1].step()
        pair[0].zero_grad()
        (-critic(generator(torch.randn(48, 4))).mean()).backward()
        pair[0].step()

    return adversarial_pair(loop, steps=120, rates=(5e-3, 5e-3))


@fault(
    "adversarial networks",
    "the weights of the generator are clipped with those of the critic, so that it can return only small values",
    why="after each step nearly all weights of the generator lie at -0.01 or 0.01",
)
def generator_clipped_too():
    def loop(generator, critic, pair, real):
        critic_step(generator, critic, pair[1], real)
        generator_step(generator, critic, pair[0])
        with torch.no_grad():
            for p in itertools.chain(generator.parameters(), critic.parameters()):
                p.clamp_(-0.01, 0.01)

    return adversarial_pair(loop)


@fault(
    "adversarial networks",
    "the gradient penalty is computed without a graph, so that it adds a number and no gradient",
    knowable=False,
    why="the loss differs by a constant only, which is legal; the penalty is not in the graph that an observer sees",
)
def penalty_without_a_graph():
    def loop(generator, critic, pair, real):
        fake = generator(torch.randn(48, 4)).detach()
        between = (0.5 * (real + fake)).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between)
        pair[1].zero_grad()
        (critic(fake).mean() - critic(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()).backward()
        pair[1].step()
        pair[0].zero_grad()
        (-critic(generator(torch.randn(48, 4))).mean()).backward()
        pair[0].step()

    return adversarial_pair(loop, steps=150)


# --- diffusion --------------------------------------------------------------------------------------------------------


class Denoiser(nn.Module):
    def __init__(self, dropped=0.1):
        super().__init__()
        self.classes, self.body, self.dropped = nn.Embedding(4, 8), mlp(2 + 1 + 8, 2, 64), dropped

    def forward(self, rows):
        points, time, labels = rows[:, :2], rows[:, 2:3], rows[:, 3].long()
        labels = labels.masked_fill(torch.rand(len(labels)) < self.dropped, 3)
        return self.body(torch.cat([points, time, self.classes(labels)], 1))


def denoising(model, two_noises=False, after=None):
    centres = torch.tensor([[2.0, 0.0], [-1.0, 1.7], [-1.0, -1.7]])

    def loop(program):
        for number in range(300):
            labels = torch.randint(3, (64,))
            points = centres[labels] + 0.2 * torch.randn(64, 2)
            time = torch.rand(64, 1)
            noise = torch.randn(64, 2)
            noised = (1 - time).sqrt() * points + time.sqrt() * noise
            target = torch.randn_like(points) if two_noises else noise
            program.optimizer.zero_grad()
            outputs = program.model(torch.cat([noised, time, labels[:, None].float()], 1))
            program.loss(outputs, target).backward()
            program.optimizer.step()
            if after:
                after(program, number)

    batch = torch.cat([torch.randn(64, 2), torch.rand(64, 1), torch.randint(3, (64, 1)).float()], 1)
    return Program(
        model, nn.MSELoss(), [(batch, torch.randn(64, 2))], torch.optim.Adam(model.parameters(), lr=2e-3), loop=loop
    )


@healthy("diffusion")
def denoising_of_classes():
    return denoising(Denoiser())


@fault(
    "diffusion",
    "the noise of the target is drawn a second time, so that it has nothing to do with the inputs",
    why="the loss stays at the variance of the targets, which do not depend on the inputs",
)
def noise_drawn_twice():
    return denoising(Denoiser(), two_noises=True)


@fault(
    "diffusion",
    "the condition is dropped in every row, so that the network never sees a class",
    "classes",
    why="the embedding gets one index only",
)
def condition_always_dropped():
    return denoising(Denoiser(dropped=1.0))


@fault(
    "diffusion",
    "the average of the weights is loaded back into the network after each step, so that it hardly moves",
    why="the weights change outside the optimizer's step, and each step is undone by nearly all of its size",
)
def average_loaded_back_in_each_step():
    model = Denoiser()
    average = copy.deepcopy(model)

    def after(program, number):
        with torch.no_grad():
            for mean, p in zip(average.parameters(), program.model.parameters(), strict=True):
                mean.lerp_(p, 0.001)
                p.copy_(mean)

    return denoising(model, after=after)


@fault(
    "diffusion",
    "the random numbers are seeded in each step, so that time and noise are the same in all of them",
    why="inputs and targets are equal in all steps, as is every random number",
)
def seeded_in_each_step():
    return denoising(Denoiser(), after=lambda program, number: torch.manual_seed(0))


# --- contrastive and metric learning ----------------------------------------------------------------------------------


def views(loss, steps=200, normalized=True, others=()):
    """Return a program that trains an encoder on pairs of views by `loss(first, second)`."""
    encoder, (rows, labels) = mlp(20, 16), blobs()
    parameters = [*encoder.parameters(), *others]

    def loop(program):
        for _ in range(steps):
            chosen = torch.randint(len(rows), (48,))
            first, second = (program.model(rows[chosen] + 0.2 * torch.randn(48, 20)) for _ in range(2))
            if normalized:
                first, second = F.normalize(first, dim=1), F.normalize(second, dim=1)
            program.optimizer.zero_grad()
            loss(first, second).backward()
            program.optimizer.step()

    return Program(encoder, None, [(rows[:48], labels[:48])], torch.optim.Adam(parameters, lr=2e-3), loop=loop)


def matched(first, second, temperature=0.2):
    return F.cross_entropy(first @ second.T / temperature, torch.arange(len(first)))


@healthy("contrastive learning")
def matched_views():
    return views(matched)


@fault(
    "contrastive learning",
    "the labels of the pairs are all zero, so that every row shall match the first one",
    why="the embeddings of all rows become equal, as the target is the same column for each",
)
def every_row_matches_the_first():
    return views(lambda a, b: F.cross_entropy(a @ b.T / 0.2, torch.zeros(len(a), dtype=torch.long)))


@fault(
    "contrastive learning",
    "the embeddings are not normalized and the temperature is that of normalized ones",
    why="the logits are in the hundreds at the first step and the softmax is saturated",
)
def cold_temperature_without_normalization():
    return views(lambda a, b: matched(8 * a, 8 * b, 0.01), normalized=False)


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = mlp(20, 16)

    def forward(self, pairs):
        return torch.stack([self.encoder(pairs[:, 0]), self.encoder(pairs[:, 1])], 1)


def cosine_pairs(signs):
    rows, labels = blobs(1536)
    same = (labels[:768] == labels[768:]).float()
    targets = 2 * same - 1 if signs else same
    return classifier(
        Siamese(),
        loader(torch.stack([rows[:768], rows[768:]], 1), targets),
        loss=lambda o, t: F.cosine_embedding_loss(o[:, 0], o[:, 1], t),
    )


@fault(
    "contrastive learning",
    "the cosine loss wants labels of -1 and 1 and gets 0 and 1, so that different pairs are never pushed apart",
    why="pairs with label 0 have a loss of zero and no gradient, and all embeddings become equal",
)
def pairs_labelled_zero_and_one():
    return cosine_pairs(signs=False)


@healthy("contrastive learning")
def pairs_labelled_by_sign():
    return cosine_pairs(signs=True)


class Cosines(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.body, self.centres, self.scale = mlp(20, 16), nn.Parameter(torch.randn(20, 16)), scale

    def forward(self, x):
        return self.scale * F.normalize(self.body(x), dim=1) @ F.normalize(self.centres, dim=1).T


@fault(
    "contrastive learning",
    "the logits are cosines without a scale, so that the cross entropy cannot fall below a floor",
    why="the logits are between -1 and 1, and the loss stays near the logarithm of the classes though all rows are right",
)
def cosines_without_a_scale():
    return classifier(Cosines(1.0), loader(*blobs(classes=20)))


@healthy("contrastive learning")
def cosines_with_a_scale():
    return classifier(Cosines(16.0), loader(*blobs(classes=20)))


# --- reinforcement learning -------------------------------------------------------------------------------------------


def policy(update, steps=200, rows=48):
    """Return a program that trains a policy for rows with a right action each by `update(logits, actions, rewards)`."""
    model, solution = mlp(6, 4), torch.randn(6, 4)

    def loop(program):
        for _ in range(steps):
            states = torch.randn(rows, 6)
            right = (states @ solution).argmax(1)
            logits = program.model(states)
            actions = torch.distributions.Categorical(logits=logits).sample()
            program.optimizer.zero_grad()
            update(logits, actions, (actions == right).float()).backward()
            program.optimizer.step()

    return Program(
        model, None, [(torch.randn(rows, 6), None)], torch.optim.Adam(model.parameters(), lr=3e-3), loop=loop
    )


def logs(logits, actions):
    return logits.log_softmax(1).gather(1, actions[:, None])[:, 0]


def clipped_ratio(detached):
    def update(logits, actions, rewards):
        now = logs(logits, actions)
        ratio = (now - (now.detach() if detached else logs(logits, actions))).exp()
        advantage = rewards - rewards.mean()
        return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()

    return update


@fault(
    "reinforcement learning",
    "the old log-probabilities are not detached, so that the ratio is one and has no gradient",
    why="all gradients are zero but for rounding",
)
def old_policy_not_detached():
    return policy(clipped_ratio(detached=False))


@healthy("reinforcement learning")
def old_policy_detached():
    return policy(clipped_ratio(detached=True))


@fault(
    "reinforcement learning",
    "the advantages of a single step are normalized by their own mean, so that they are always zero",
    why="all gradients are exactly zero",
)
def advantage_of_one_step_normalized():
    def update(logits, actions, rewards):
        advantage = (rewards - rewards.mean()) / (rewards.std(unbiased=False) + 1e-8)
        return -(logs(logits, actions) * advantage).mean()

    return policy(update, steps=300, rows=1)


@fault(
    "reinforcement learning",
    "the bonus for the entropy has the wrong sign, so that the policy becomes certain before it is right",
    why="the probabilities of the outputs saturate within few steps, long before the rewards are high",
)
def entropy_punished():
    def update(logits, actions, rewards):
        entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
        return -(logs(logits, actions) * (rewards - rewards.mean())).mean() + entropy

    return policy(update)


@fault(
    "reinforcement learning",
    "the memory keeps the one state that the environment changes in place, so that all its rows are equal",
    why="all rows of a batch are equal while their targets differ",
)
def memory_of_one_state():
    model, solution = mlp(6, 4), torch.randn(6, 4)

    def loop(program):
        state, memory = torch.randn(6), []
        for number in range(300):
            with torch.no_grad():
                state.mul_(0.7).add_(torch.randn(6))
            action = int(torch.randint(4, ()))
            memory.append((state, action, float(action == int((state @ solution).argmax()))))
            if number < 32:
                continue
            rows = [memory[i] for i in torch.randint(len(memory), (32,)).tolist()]
            actions = torch.tensor([a for _, a, _ in rows])
            values = program.model(torch.stack([s for s, _, _ in rows])).gather(1, actions[:, None])[:, 0]
            program.optimizer.zero_grad()
            F.mse_loss(values, torch.tensor([r for _, _, r in rows])).backward()
            program.optimizer.step()

    return Program(model, None, [(torch.randn(32, 6), None)], torch.optim.Adam(model.parameters(), lr=2e-3), loop=loop)


@fault(
    "reinforcement learning",
    "the update weighs the log-probability of an action that is drawn anew, and not of the one that was rewarded",
    knowable=False,
    why="the loss is legal; only the environment knows which action was taken",
)
def log_probability_of_another_action():
    def update(logits, actions, rewards):
        again = torch.distributions.Categorical(logits=logits).sample()
        return -(logs(logits, again) * (rewards - rewards.mean())).mean()

    return policy(update)


# --- distillation -----------------------------------------------------------------------------------------------------


def teacher(steps=150):
    model, (rows, labels) = mlp(20, 5, 64), blobs()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(rows), labels).backward()
        optimizer.step()
    return model.requires_grad_(False), rows


def distilled(loss, soft=lambda logits: logits.softmax(1), log_outputs=False):
    model, rows = teacher()
    student = nn.Sequential(mlp(20, 5, 24), nn.LogSoftmax(1)) if log_outputs else mlp(20, 5, 24)
    return classifier(student, loader(rows, soft(model(rows))), loss=loss)


@healthy("distillation")
def divergence_of_log_probabilities():
    return distilled(nn.KLDivLoss(reduction="batchmean"), log_outputs=True)


@fault(
    "distillation",
    "the divergence wants log-probabilities and gets probabilities",
    why="the inputs of the divergence are positive, and the loss is not the one of a divergence",
)
def divergence_of_probabilities():
    loss = nn.KLDivLoss(reduction="batchmean")
    return distilled(lambda o, t: loss(o.softmax(1), t))


@fault(
    "distillation",
    "the arguments of the divergence are exchanged, so that the teacher's probabilities are taken as logarithms",
    why="the loss gets values of the student as targets that are negative, and positive values as logarithms",
)
def divergence_exchanged():
    return distilled(lambda o, t: F.kl_div(t, o.softmax(1), reduction="batchmean"))


@fault(
    "distillation",
    "the logits of the teacher are given to a cross entropy as probabilities",
    why="the soft labels are negative and do not sum to one",
)
def logits_of_the_teacher_as_probabilities():
    return distilled(nn.CrossEntropyLoss(), soft=lambda logits: logits)


class WithTeacher(nn.Module):
    def __init__(self, frozen):
        super().__init__()
        self.teacher, self.student = teacher()[0].requires_grad_(not frozen), mlp(20, 5, 24)

    def forward(self, x):
        return torch.stack([self.student(x), self.teacher(x)], 1)


def side_by_side(frozen):
    return classifier(WithTeacher(frozen), loss=lambda o, _: F.mse_loss(o[:, 0], o[:, 1]))


@fault(
    "distillation",
    "the teacher is not frozen and meets the student halfway, so that it forgets what it knew",
    "teacher",
    knowable=False,
    why="nothing says that this part of the network was meant to stay",
)
def teacher_trained_along():
    return side_by_side(frozen=False)


@healthy("distillation")
def frozen_teacher_beside_the_student():
    return side_by_side(frozen=True)


@fault(
    "distillation",
    "the temperature of the teacher is so high that its answers are uniform",
    why="the soft labels of all rows are the same but for a thousandth",
)
def teacher_too_warm():
    return distilled(nn.CrossEntropyLoss(), soft=lambda logits: (logits / 1000).softmax(1))
