"""Healthy programs: several networks, unusual optimizers, precision and gradients of other kinds."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

from tests.diagnosis.unseen import healthy
from tests.diagnosis.unseen.generative import (
    Autoencoder,
    adversarial,
    autoencoder,
    diffusion,
    evidence,
    noised,
    train_critic,
    train_generator,
)
from tests.diagnosis.unseen.loops import steps
from tests.diagnosis.unseen.other_models import bandit, contrastive, info_nce, policy_gradient
from tests.diagnosis.unseen.programs import (
    Program,
    blobs,
    classifier,
    image_classifier,
    language_model,
    loader,
    mlp,
    recurrent,
    regression,
    regressor,
)

# --- several networks -------------------------------------------------------------------------------------------------


@healthy("autoencoders")
def variational_autoencoder():
    return autoencoder()


@healthy("autoencoders")
def divergence_warmed_up():
    weight = {"now": 0.0}

    def loss(outputs, pixels):
        weight["now"] = min(1.0, weight["now"] + 0.01)
        return evidence(outputs, pixels, weight["now"])

    return autoencoder(Autoencoder(), loss, rate=2e-3)


@healthy("adversarial networks")
def generator_and_critic():
    def step(program, critic, critic_optimizer, real, number):
        train_critic(program, critic, critic_optimizer, real, torch.randn(32, 4))
        train_generator(program, critic, torch.randn(32, 4))

    return adversarial(step, steps=250)


@healthy("adversarial networks")
def wasserstein_with_clipped_weights():
    def step(program, critic, critic_optimizer, real, number):
        for _ in range(2):
            critic_optimizer.zero_grad()
            (critic(program.model(torch.randn(32, 4)).detach()).mean() - critic(real).mean()).backward()
            critic_optimizer.step()
            with torch.no_grad():
                for p in critic.parameters():
                    p.clamp_(-0.1, 0.1)
        program.optimizer.zero_grad()
        (-critic(program.model(torch.randn(32, 4))).mean()).backward()
        program.optimizer.step()

    return adversarial(step, steps=120)


@healthy("diffusion")
def denoising():
    return diffusion(lambda m, x, e, t, s: F.mse_loss(m(noised(x, e, s), t / 100), e))


@healthy("diffusion")
def velocity_of_a_flow():
    return diffusion(lambda m, x, e, t, s: F.mse_loss(m(t / 100 * x + (1 - t / 100) * e, t / 100), x - e))


@healthy("contrastive learning")
def two_views_of_a_row():
    return contrastive(info_nce)


@healthy("contrastive learning")
def triplets():
    def loss(first, second):
        return F.triplet_margin_loss(first, second, second.roll(1, 0), margin=0.5)

    return contrastive(loss)


@healthy("contrastive learning")
def positives_with_a_stopped_gradient():
    model = mlp(20, 8)
    predictor = mlp(8, 8)
    inputs, _ = blobs()
    optimizer = torch.optim.SGD([*model.parameters(), *predictor.parameters()], lr=0.05, momentum=0.9)

    def loop(program):
        for _ in range(150):
            rows = inputs[torch.randint(len(inputs), (48,))]
            first, second = (program.model(rows + 0.2 * torch.randn_like(rows)) for _ in range(2))
            program.optimizer.zero_grad()
            near = F.cosine_similarity(predictor(first), second.detach()).mean()
            far = F.cosine_similarity(predictor(second), first.detach()).mean()
            (1 - (near + far) / 2).backward()
            program.optimizer.step()

    return Program(model, None, [(inputs[:48], None)], optimizer, loop=loop)


@healthy("reinforcement learning")
def policy_with_a_baseline():
    return bandit(policy_gradient, steps=250)


@healthy("reinforcement learning")
def actor_and_critic_with_clipping():
    def loss(logits, actions, rewards):
        value = logits[:, 4]
        chosen = logits[:, :4].log_softmax(1).gather(1, actions[:, None])[:, 0]
        entropy = torch.distributions.Categorical(logits=logits[:, :4]).entropy().mean()
        return -(chosen * (rewards - value).detach()).mean() + 0.5 * F.mse_loss(value, rewards) - 0.01 * entropy

    return bandit(loss, clip=0.5, outputs=5)


@healthy("reinforcement learning")
def values_with_a_target_network():
    model, solution = mlp(6, 4), torch.randn(6, 4)
    target = copy.deepcopy(model).requires_grad_(False)

    def loop(program):
        memory = []
        for number in range(250):
            states = torch.randn(8, 6)
            with torch.no_grad():
                actions = program.model(states).argmax(1)
            actions = torch.where(torch.rand(8) < 0.3, torch.randint(4, (8,)), actions)
            memory.append((states, actions, (actions == (states @ solution).argmax(1)).float(), torch.randn(8, 6)))
            states, actions, rewards, following = memory[torch.randint(len(memory), ()).item()]
            wanted = rewards + 0.5 * target(following).max(1).values
            program.optimizer.zero_grad()
            F.smooth_l1_loss(program.model(states).gather(1, actions[:, None])[:, 0], wanted).backward()
            program.optimizer.step()
            if number % 25 == 0:
                target.load_state_dict(program.model.state_dict())

    return Program(model, None, [(torch.randn(8, 6), None)], torch.optim.Adam(model.parameters(), lr=2e-3), loop=loop)


class Experts(nn.Module):
    """Each row goes to the best of four experts."""

    def __init__(self):
        super().__init__()
        self.router, self.head = nn.Linear(20, 4), nn.Linear(24, 5)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(20, 24), nn.ReLU()) for _ in range(4))

    def forward(self, x):
        share = self.router(x).softmax(1)
        best = share.argmax(1)
        mixed = torch.zeros(len(x), 24)
        for number, expert in enumerate(self.experts):
            rows = (best == number).nonzero()[:, 0]
            if len(rows):
                mixed = mixed.index_add(0, rows, expert(x[rows]) * share[rows, number, None])
        self.balance = 4 * ((best[:, None] == torch.arange(4)).float().mean(0) * share.mean(0)).sum()
        return self.head(mixed)


@healthy("experts")
def one_of_four_experts():
    model = Experts()
    return classifier(model, loss=lambda o, y: F.cross_entropy(o, y) + 0.01 * model.balance)


@healthy("experts")
def mixture_of_all_experts():
    class Soft(Experts):
        def forward(self, x):
            each = torch.stack([expert(x) for expert in self.experts], 1)
            return self.head((self.router(x).softmax(1)[:, :, None] * each).sum(1))

    return classifier(Soft())


# --- optimizers, precision, gradients ---------------------------------------------------------------------------------


@healthy("sharpness-aware")
def sharpness_aware_steps():
    def loop(program):
        for _, inputs, labels in steps(program):
            program.optimizer.zero_grad()
            program.loss(program.model(inputs), labels).backward()
            with torch.no_grad():
                norm = sum(p.grad.square().sum() for p in program.model.parameters()).sqrt()
                moves = [0.05 * p.grad / norm for p in program.model.parameters()]
                for p, move in zip(program.model.parameters(), moves, strict=True):
                    p.add_(move)
            program.optimizer.zero_grad()
            program.loss(program.model(inputs), labels).backward()
            with torch.no_grad():
                for p, move in zip(program.model.parameters(), moves, strict=True):
                    p.sub_(move)
            program.optimizer.step()

    return classifier(loop=loop, rate=0.1, kind=torch.optim.SGD, epochs=6)


@healthy("second order")
def quasi_newton_with_a_closure():
    inputs, targets = regression(256)

    def loop(program):
        for _ in range(60):

            def closure():
                program.optimizer.zero_grad()
                loss = program.loss(program.model(inputs), targets)
                loss.backward()
                return loss

            program.optimizer.step(closure)

    return regressor(
        data=[(inputs, targets)],
        loop=loop,
        rate=0.1,
        kind=lambda p, lr: torch.optim.LBFGS(p, lr=lr, max_iter=4, history_size=5),
    )


@healthy("mixed precision")
def bfloat16_autocast():
    def loop(program):
        for _, inputs, labels in steps(program):
            program.optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = program.loss(program.model(inputs), labels)
            loss.backward()
            program.optimizer.step()

    return image_classifier(loop=loop)


@healthy("mixed precision")
def scaled_loss_with_clipping():
    def loop(program):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
        for _, inputs, labels in steps(program):
            program.optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = program.loss(program.model(inputs), labels)
            scaler.scale(loss).backward()
            scaler.unscale_(program.optimizer)
            nn.utils.clip_grad_norm_(program.model.parameters(), 1.0)
            scaler.step(program.optimizer)
            scaler.update()

    return classifier(loop=loop)


@healthy("clipping")
def clipped_at_each_step():
    def loop(program):
        for _, inputs, labels in steps(program):
            program.optimizer.zero_grad()
            program.loss(program.model(inputs), labels).backward()
            nn.utils.clip_grad_norm_(program.model.parameters(), 0.25)
            program.optimizer.step()

    return language_model(loop=loop)


@healthy("clipping")
def clipped_values():
    def loop(program):
        for _, inputs, labels in steps(program):
            program.optimizer.zero_grad()
            program.loss(program.model(inputs), labels).backward()
            nn.utils.clip_grad_value_(program.model.parameters(), 0.05)
            program.optimizer.step()

    return recurrent(loop=loop)


@healthy("accumulation")
def four_parts_a_step():
    def loop(program):
        for number, inputs, labels in steps(program):
            (program.loss(program.model(inputs), labels) / 4).backward()
            if number % 4 == 3:
                program.optimizer.step()
                program.optimizer.zero_grad()

    return classifier(data=loader(*blobs(1024), batch=8), loop=loop, epochs=3)


@healthy("accumulation")
def two_losses_with_two_backward_passes():
    def loop(program):
        for _, inputs, labels in steps(program):
            program.optimizer.zero_grad()
            program.loss(program.model(inputs), labels).backward()
            (1e-3 * program.model(inputs).square().mean()).backward()
            program.optimizer.step()

    return classifier(loop=loop)


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() <= 1)


@healthy("straight-through")
def binary_activations():
    class Binary(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden, self.norm, self.head = nn.Linear(20, 64), nn.BatchNorm1d(64), nn.Linear(64, 5)

        def forward(self, x):
            return self.head(Sign.apply(self.norm(self.hidden(x))))

    return classifier(Binary())


@healthy("straight-through")
def codes_from_a_codebook():
    class Quantized(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.codes, self.decoder = nn.Linear(12, 4), nn.Embedding(16, 4), nn.Linear(4, 12)

        def forward(self, x):
            z = self.encoder(x)
            code = self.codes(torch.cdist(z, self.codes.weight).argmin(1))
            self.commitment = F.mse_loss(z, code.detach()) + F.mse_loss(code, z.detach())
            return self.decoder(z + (code - z).detach())

    inputs = torch.randn(768, 3) @ torch.randn(3, 12)
    model = Quantized()
    return regressor(model, loader(inputs, inputs), loss=lambda o, t: F.mse_loss(o, t) + 0.25 * model.commitment)


@healthy("gradient penalties")
def penalty_on_the_slope():
    def loop(program):
        for _, inputs, targets in steps(program):
            inputs = inputs.clone().requires_grad_()
            program.optimizer.zero_grad()
            outputs = program.model(inputs)
            (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
            (program.loss(outputs, targets) + 0.01 * slope.square().sum(1).mean()).backward()
            program.optimizer.step()

    return regressor(mlp(12, 1, act=nn.Tanh), loop=loop)


@healthy("adversarial training")
def perturbed_inputs():
    def loop(program):
        for _, inputs, labels in steps(program):
            inputs = inputs.clone().requires_grad_()
            (slope,) = torch.autograd.grad(program.loss(program.model(inputs), labels), inputs)
            program.optimizer.zero_grad()
            program.loss(program.model((inputs + 0.1 * slope.sign()).detach()), labels).backward()
            program.optimizer.step()

    return classifier(loop=loop)


@healthy("optimizers")
def decay_for_weights_only():
    program = classifier()
    weights = [p for p in program.model.parameters() if p.ndim > 1]
    others = [p for p in program.model.parameters() if p.ndim < 2]
    groups = [{"params": weights, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    program.optimizer = torch.optim.AdamW(groups, lr=3e-3)
    return program


@healthy("optimizers")
def rms_prop_with_momentum():
    return recurrent(kind=lambda p, lr: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5))


@healthy("meta-learning")
def one_inner_step():
    def loop(program):
        for _, inputs, targets in steps(program):
            weights = dict(program.model.named_parameters())
            half = len(inputs) // 2
            inner = program.loss(torch.func.functional_call(program.model, weights, inputs[:half]), targets[:half])
            slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
            moved = {name: w - 0.01 * s for (name, w), s in zip(weights.items(), slopes, strict=True)}
            program.optimizer.zero_grad()
            program.loss(torch.func.functional_call(program.model, moved, inputs[half:]), targets[half:]).backward()
            program.optimizer.step()

    return regressor(loop=loop, epochs=5)
