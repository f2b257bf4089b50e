"""Models that compute in unusual ways: solvers, gradients inside the loss, functional calls, changing parameters."""

import copy

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

from tests.trial.program import LABELS, NO_LOSS, Training, blobs, mlp, pictures, program, standard


def adam(model, rate=3e-3):
    return torch.optim.Adam(model.parameters(), rate)


class Dynamics(nn.Module):
    """A neural differential equation, by the classical method of Runge and Kutta."""

    def __init__(self):
        super().__init__()
        self.field, self.head = mlp(8, 32, 8, activation=nn.Tanh), nn.Linear(8, 3)

    def solve(self, x, steps=4):
        width = 1 / steps
        for _ in range(steps):
            a = self.field(x)
            b = self.field(x + width / 2 * a)
            c = self.field(x + width / 2 * b)
            d = self.field(x + width * c)
            x = x + width / 6 * (a + 2 * b + 2 * c + d)
        return x

    def forward(self, x):
        return self.head(self.solve(x))


@program()
def neural_differential_equation():
    """A neural differential equation."""
    model = Dynamics()
    return standard(model, adam(model), blobs, F.cross_entropy)


class Adjoint(torch.autograd.Function):
    """Solves forward by Euler without a graph, and backward by the adjoint equation, as torchdiffeq does."""

    @staticmethod
    def forward(ctx, field, x, *parameters):
        ctx.field = field
        with torch.no_grad():
            for _ in range(5):
                x = x + 0.2 * field(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        parameters = tuple(ctx.field.parameters())
        total = [torch.zeros_like(p) for p in parameters]
        for _ in range(5):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                value = ctx.field(x)
                found = torch.autograd.grad(value, (x, *parameters), gradient)
            x = x - 0.2 * value
            gradient = gradient + 0.2 * found[0]
            total = [sum_ + 0.2 * each for sum_, each in zip(total, found[1:], strict=True)]
        return None, gradient, *total


class AdjointModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.field, self.head = mlp(8, 16, 8, activation=nn.Tanh), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(Adjoint.apply(self.field, x, *self.field.parameters()))


@program(layers=False)  # the solver calls the field inside the backward
def adjoint_method():
    """A differential equation whose gradient is computed by the adjoint method."""
    model = AdjointModel()
    return standard(model, adam(model), blobs, F.cross_entropy)


class Equilibrium(nn.Module):
    """A deep equilibrium model: a fixed point without a graph, then one call with one."""

    def __init__(self):
        super().__init__()
        self.inner, self.inject, self.head = nn.Linear(16, 16), nn.Linear(8, 16), nn.Linear(16, 3)
        nn.init.normal_(self.inner.weight, std=0.1)

    def forward(self, x):
        injected, z = self.inject(x), torch.zeros(len(x), 16)
        with torch.no_grad():
            for _ in range(8):
                z = (self.inner(z) + injected).tanh()
        return self.head((self.inner(z) + injected).tanh())


@program(layers=False)  # calls without a graph inside the forward
def deep_equilibrium():
    """A deep equilibrium model."""
    model = Equilibrium()
    return standard(model, adam(model), blobs, F.cross_entropy)


@program(told=LABELS, layers=False)  # the residual is a second derivative
def physics_informed():
    """A physics-informed network: the residual of u'' = -u is a second derivative."""
    model = mlp(1, 32, 32, 1, activation=nn.Tanh)
    optimizer = adam(model)

    def step():
        x = (3 * torch.rand(64, 1)).requires_grad_()
        u = model(x)
        (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        ends = model(torch.tensor([[0.0], [1.5708]])) - torch.tensor([[0.0], [1.0]])
        optimizer.zero_grad()
        loss = (second + u).square().mean() + 10 * ends.square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, step)


class Hyper(nn.Module):
    """A hypernetwork: one network computes the weights of a layer."""

    def __init__(self):
        super().__init__()
        self.hyper, self.embedding = mlp(4, 32, 8 * 3), nn.Parameter(torch.randn(4))

    def forward(self, x):
        return x @ self.hyper(self.embedding).view(8, 3)


@program()
def hypernetwork():
    """A hypernetwork."""
    model = Hyper()
    return standard(model, adam(model), blobs, F.cross_entropy)


@program(layers=False)  # inner steps call the model with other parameters
def meta_learning():
    """MAML by functional calls: two inner steps, a gradient through them."""
    model = mlp(1, 32, 1)
    optimizer = adam(model)

    def step():
        losses = []
        for _ in range(4):
            amplitude, phase = 0.5 + torch.rand(1), 3 * torch.rand(1)
            x = 4 * torch.rand(20, 1) - 2
            y = amplitude * (x + phase).sin()
            fast = dict(model.named_parameters())
            for _ in range(2):
                inner = F.mse_loss(functional_call(model, fast, (x[:10],)), y[:10])
                gradients = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
                fast = {name: p - 0.05 * g for (name, p), g in zip(fast.items(), gradients, strict=True)}
            losses.append(F.mse_loss(functional_call(model, fast, (x[10:],)), y[10:]))
        optimizer.zero_grad()
        loss = torch.stack(losses).mean()
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, step)


@program(layers=False, told=NO_LOSS)
def reptile():
    """Reptile: inner steps of a copy, the weights move towards it; the gradient is set by hand."""
    model = mlp(1, 32, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)

    def step():
        amplitude, phase = 0.5 + torch.rand(1), 3 * torch.rand(1)
        fast = copy.deepcopy(model)
        inner = torch.optim.SGD(fast.parameters(), 0.02)
        for _ in range(3):
            x = 4 * torch.rand(20, 1) - 2
            inner.zero_grad()
            F.mse_loss(fast(x), amplitude * (x + phase).sin()).backward()
            inner.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for p, moved in zip(model.parameters(), fast.parameters(), strict=True):
                p.grad = p - moved
        optimizer.step()

    return Training(model, step)


@program(2, layers=False, told=LABELS)
def forward_forward():
    """The forward-forward algorithm: each layer has an optimizer and a loss of its own."""
    model = nn.ModuleList([nn.Linear(64, 32), nn.Linear(32, 32)])
    optimizers = [torch.optim.Adam(layer.parameters(), 0.03) for layer in model]

    def step():
        x, _ = pictures(32)
        good, bad = x.flatten(1), x.flatten(1)[:, torch.randperm(64)]
        for layer, optimizer in zip(model, optimizers, strict=True):
            scores = [layer(F.normalize(each)).relu() for each in (good, bad)]
            high, low = (score.square().mean(1) for score in scores)
            optimizer.zero_grad()
            F.softplus(torch.cat([0.5 - high, low - 0.5])).mean().backward()
            optimizer.step()
            good, bad = (score.detach() for score in scores)

    return Training(model, step)


@program(layers=False, told=NO_LOSS)
def gradients_by_transforms():
    """Gradients of single samples by ``vmap`` and ``grad``, clipped and averaged, as in private training."""
    model = mlp(8, 32, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.2)

    def loss(parameters, x, y):
        return F.cross_entropy(functional_call(model, parameters, (x[None],)), y[None])

    def step():
        x, y = blobs()
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        found = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in found.values()]).norm(dim=0)
        share = (1 / norms).clamp(max=1)
        optimizer.zero_grad()
        for name, p in model.named_parameters():
            clipped = torch.einsum("n,n...->...", share, found[name])
            p.grad = (clipped + 0.1 * torch.randn_like(p)) / len(x)
        optimizer.step()

    return Training(model, step)


@program(layers=False, told=[*LABELS, *NO_LOSS], unseen=range(60))
def gradients_by_autograd_grad():
    """Gradients by ``torch.autograd.grad``, assigned by hand."""
    model = mlp(8, 32, 3)
    optimizer = adam(model)

    def step():
        x, y = blobs()
        loss = F.cross_entropy(model(x), y)
        for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            p.grad = g
        optimizer.step()
        return loss

    return Training(model, step)


@program(2, 30, layers=False)
def bilevel():
    """Bilevel optimization: the weight decay of each layer is learned on other data by one unrolled step."""
    model, decay = mlp(8, 16, 3), nn.Parameter(torch.full((4,), -4.0))
    optimizer, of_decay = torch.optim.SGD(model.parameters(), 0.1), torch.optim.Adam([decay], 0.01)

    def step():
        for _ in range(2):
            x, y = blobs()
            optimizer.zero_grad()
            penalty = sum(d.exp().detach() * p.square().sum() for d, p in zip(decay, model.parameters(), strict=True))
            (F.cross_entropy(model(x), y) + penalty).backward()
            optimizer.step()
        x, y = blobs()
        parameters = dict(model.named_parameters())
        inner = F.cross_entropy(functional_call(model, parameters, (x,)), y)
        inner = inner + sum(d.exp() * p.square().sum() for d, p in zip(decay, parameters.values(), strict=True))
        gradients = torch.autograd.grad(inner, list(parameters.values()), create_graph=True)
        fast = {name: p - 0.1 * g for (name, p), g in zip(parameters.items(), gradients, strict=True)}
        x, y = blobs()
        (gradient,) = torch.autograd.grad(F.cross_entropy(functional_call(model, fast, (x,)), y), decay)
        decay.grad = gradient
        of_decay.step()

    return Training(model, step)


@program(5, 12, layers=False)
def federated_averaging():
    """Federated averaging: the watched model is the first client's; the average is loaded after five steps."""
    model = mlp(8, 16, 3)
    others = [copy.deepcopy(model) for _ in range(2)]
    clients = [(each, torch.optim.SGD(each.parameters(), 0.1)) for each in (model, *others)]

    def step():
        for client, optimizer in clients:
            for _ in range(5):
                x, y = blobs()
                optimizer.zero_grad()
                F.cross_entropy(client(x), y).backward()
                optimizer.step()
        states = [client.state_dict() for client, _ in clients]
        mean = {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}
        for client, _ in clients:
            client.load_state_dict(mean)

    return Training(model, step)


@program(layers=False)
def population_based():
    """Population-based training: two members, the worse one takes the weights and the rate of the better one."""
    members = [mlp(8, 16, 3) for _ in range(2)]
    optimizers = [torch.optim.SGD(member.parameters(), rate) for member, rate in zip(members, (0.2, 0.05), strict=True)]
    drawn = iter(range(10**9))

    def step():
        losses = []
        for member, optimizer in zip(members, optimizers, strict=True):
            x, y = blobs()
            optimizer.zero_grad()
            losses.append(F.cross_entropy(member(x), y))
            losses[-1].backward()
            optimizer.step()
        if next(drawn) % 20 == 19:
            best = int(losses[1] < losses[0])
            members[1 - best].load_state_dict(members[best].state_dict())
            optimizers[1 - best].param_groups[0]["lr"] = 1.2 * optimizers[best].param_groups[0]["lr"]
        return losses[0]

    return Training(members[0], step)


class SparseProcess(nn.Module):
    """A Gaussian process with inducing points."""

    def __init__(self):
        super().__init__()
        self.points = nn.Parameter(torch.linspace(-2, 2, 8)[:, None])
        self.log_scale, self.log_noise = nn.Parameter(torch.zeros(())), nn.Parameter(torch.tensor(-1.0))
        self.mean, self.root = nn.Parameter(torch.zeros(8)), nn.Parameter(0.5 * torch.eye(8))

    def kernel(self, a, b):
        return (-torch.cdist(a, b).square() / (2 * self.log_scale.exp() ** 2)).exp()

    def forward(self, x):
        prior = self.kernel(self.points, self.points) + 1e-3 * torch.eye(8)
        cross = torch.linalg.solve(prior, self.kernel(self.points, x))
        spread = self.root.tril().T @ cross
        variance = 1 - (self.kernel(self.points, x) * cross).sum(0) + spread.square().sum(0)
        return cross.T @ self.mean, variance, prior


@program(told=LABELS)
def sparse_gaussian_process():
    """A sparse variational Gaussian process: parameters without layers."""
    model = SparseProcess()

    def batch():
        x = 4 * torch.rand(32, 1) - 2
        return x, x[:, 0].sin() + 0.1 * torch.randn(32)

    def loss(output, y):
        mean, variance, prior = output
        noise = model.log_noise.exp() ** 2
        fit = 0.5 * (((y - mean).square() + variance) / noise + noise.log()).mean()
        root = model.root.tril()
        inner = torch.linalg.solve(prior, root @ root.T).trace() + model.mean @ torch.linalg.solve(prior, model.mean)
        divergence = 0.5 * (inner - 8 + torch.logdet(prior) - 2 * root.diagonal().abs().log().sum())
        return fit + divergence / 200

    return standard(model, adam(model, 1e-2), batch, loss)


class Rounded(nn.Module):
    """A linear layer whose weight is rounded to four bits, with a straight-through gradient."""

    def __init__(self, width, out):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(out, width) / width**0.5), nn.Parameter(torch.zeros(out))

    def forward(self, x):
        scale = self.weight.detach().abs().max() / 7
        rounded = (self.weight / scale).round() * scale
        return F.linear(x, self.weight + (rounded - self.weight).detach(), self.bias)


@program()
def quantization_aware():
    """Quantization-aware training with a straight-through estimator."""
    model = nn.Sequential(Rounded(8, 32), nn.ReLU(), Rounded(32, 3))
    return standard(model, adam(model), blobs, F.cross_entropy)


class LowRank(nn.Module):
    """A frozen linear layer and a correction of low rank."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = (
            nn.Linear(base.in_features, rank, bias=False),
            nn.Linear(rank, base.out_features, bias=False),
        )
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


@program(judged={"frozen_inside": "true: the corrections train around frozen weights"})
def low_rank_adaptation():
    """LoRA: frozen layers with a correction of low rank."""
    model = mlp(8, 32, 32, 3)
    for number in (0, 2):
        model[number] = LowRank(model[number])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 3e-3)
    return standard(model, optimizer, blobs, F.cross_entropy)


@program()
def weight_norm():
    """Weight norm by a parametrization."""
    model = mlp(8, 32, 3)
    parametrizations.weight_norm(model[0])
    return standard(model, adam(model), blobs, F.cross_entropy)


@program()
def orthogonal_weights():
    """An orthogonal weight by a parametrization."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    parametrizations.orthogonal(model[2])
    return standard(model, adam(model), blobs, F.cross_entropy)


@program()
def pruning():
    """Magnitude pruning in the middle of the training."""
    model, drawn = mlp(8, 32, 3), iter(range(10**9))
    prune.l1_unstructured(model[0], "weight", 0.2)

    def after():
        if next(drawn) == 30:
            prune.l1_unstructured(model[0], "weight", 0.3)

    return standard(model, adam(model), blobs, F.cross_entropy, after=after)


@program()
def dropouts():
    """Dropout of units, of channels, and alpha dropout."""
    model = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.Dropout2d(0.1), nn.SELU(), nn.AlphaDropout(0.05)),
        *(nn.Flatten(), nn.Linear(512, 4), nn.FeatureAlphaDropout(0.0)),
    )
    return standard(model, adam(model), pictures, F.cross_entropy)


class Stochastic(nn.Module):
    """Residual blocks that are skipped at random."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            if not self.training or torch.rand(()) < 0.7:
                x = x + block(x)
        return self.last(x)


@program()
def stochastic_depth():
    """Stochastic depth: blocks are skipped at random."""
    model = Stochastic()
    return standard(model, adam(model), blobs, F.cross_entropy)


@program(told=["1.0 is a scripted module"])
def scripted_part():
    """A scripted part."""
    model = nn.Sequential(
        nn.Linear(8, 16), torch.jit.script(nn.Sequential(nn.ReLU(), nn.Linear(16, 16))), nn.Linear(16, 3)
    )
    return standard(model, adam(model), blobs, F.cross_entropy)


@program()
def lazy_layers():
    """Lazy layers, which get their parameters in a first call before the optimizer is made."""
    model = nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.LazyLinear(3))
    model(blobs()[0])
    return standard(model, adam(model), blobs, F.cross_entropy)


@program()
def complex_weights():
    """Complex weights."""

    class Spectral(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.head = nn.Parameter(torch.randn(5, dtype=torch.complex64)), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=8))

    model = Spectral()
    return standard(model, adam(model), blobs, F.cross_entropy)


# the reference observes the layers of the first step
@program(layers=False, told=["the model has changed since it was added: added 3"])
def growing_network():
    """A layer is added to the network in the middle, and to the optimizer."""
    model, drawn = mlp(8, 16, 3), iter(range(10**9))
    optimizer = adam(model)

    def after():
        if next(drawn) == 30:
            model.append(nn.Linear(3, 3))
            nn.init.eye_(model[-1].weight)
            optimizer.add_param_group({"params": model[-1].parameters()})

    return standard(model, optimizer, blobs, F.cross_entropy, after=after)


@program()
def kolmogorov_arnold():
    """A network of learned one-dimensional functions."""

    class Layer(nn.Module):
        def __init__(self, width, out):
            super().__init__()
            self.register_buffer("centres", torch.linspace(-2, 2, 6))
            self.weight = nn.Parameter(0.3 * torch.randn(out, width, 6))

        def forward(self, x):
            return torch.einsum("nik,oik->no", (-(x[..., None] - self.centres).square()).exp(), self.weight)

    model = nn.Sequential(Layer(8, 8), Layer(8, 3))
    return standard(model, adam(model, 1e-2), blobs, F.cross_entropy)


@program()
def spiking():
    """Spiking neurons with a surrogate gradient; the loss is summed over time."""

    class Spike(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return (x > 0).float()

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return gradient / (1 + 10 * x.abs()) ** 2

    class Spiking(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden, self.out = nn.Linear(8, 32), nn.Linear(32, 3)

        def forward(self, x):
            potential, output, outputs = torch.zeros(len(x), 32), torch.zeros(len(x), 3), []
            for _ in range(5):
                potential = 0.9 * potential + self.hidden(x)
                spikes = Spike.apply(potential - 1)
                potential = potential - spikes
                output = 0.9 * output + self.out(spikes)
                outputs.append(output)
            return outputs

    model, loss_of = Spiking(), nn.CrossEntropyLoss()
    return standard(model, adam(model), blobs, lambda outputs, y: sum(loss_of(each, y) for each in outputs))


@program(judged={"loss_at_init": "true: the margin and the scale of 8 make the first loss large"})
def metric_learning():
    """Cosine logits with a margin and a learned centre for each class."""

    class Margin(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.centres = mlp(8, 32, 8), nn.Parameter(torch.randn(3, 8))

        def forward(self, x):
            return 8 * F.normalize(self.body(x)) @ F.normalize(self.centres).T

    model = Margin()
    return standard(model, adam(model), blobs, lambda out, y: F.cross_entropy(out - 0.8 * F.one_hot(y, 3), y))
