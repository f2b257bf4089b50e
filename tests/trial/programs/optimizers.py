"""How steps are made: optimizers, precision, accumulation, checkpoints, averages of weights."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.trial.program import LABELS, Training, blobs, mlp, program, sentences, standard


def adam(model, rate=3e-3):
    return torch.optim.Adam(model.parameters(), rate)


def network():
    return mlp(8, 32, 32, 3)


def with_optimizer(make):
    model = network()
    return standard(model, make(model.parameters()), blobs, F.cross_entropy)


@program()
def momentum():
    """SGD with Nesterov's momentum and weight decay."""
    return with_optimizer(lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=1e-4))


@program()
def fused_adam():
    """Fused AdamW."""
    return with_optimizer(lambda p: torch.optim.AdamW(p, 3e-3, fused=True))


@program()
def foreach_adam():
    """AdamW over lists of tensors."""
    return with_optimizer(lambda p: torch.optim.AdamW(p, 3e-3, foreach=True))


@program()
def rmsprop():
    """RMSprop with momentum."""
    return with_optimizer(lambda p: torch.optim.RMSprop(p, 1e-3, momentum=0.5))


@program()
def adagrad():
    """Adagrad."""
    return with_optimizer(lambda p: torch.optim.Adagrad(p, 0.02))


@program()
def adafactor():
    """Adafactor."""
    return with_optimizer(lambda p: torch.optim.Adafactor(p, 1e-2))


class Lion(torch.optim.Optimizer):
    """The sign of an averaged gradient."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    p.sub_((0.9 * mean + 0.1 * p.grad).sign(), alpha=group["lr"])
                    mean.lerp_(p.grad, 0.01)


@program()
def lion():
    """Lion, an optimizer of the program's own."""
    return with_optimizer(lambda p: Lion(p, 1e-3))


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum of matrices, by Newton and Schulz."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.mul_(0.9).add_(p.grad)
                x = mean / (mean.norm() + 1e-7)
                for _ in range(5):
                    square = x @ x.T
                    x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
                p.sub_(x, alpha=group["lr"])


@program()
def muon_and_adam():
    """Muon for the matrices and Adam for the rest: two optimizers that step together."""
    model = network()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    optimizers = Muon(matrices, 0.01), torch.optim.Adam(others, 3e-3)

    def step():
        x, y = blobs()
        loss = F.cross_entropy(model(x), y)
        model.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss

    return Training(model, step)


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD: gradients between a fast and an averaged point; ``train`` and ``eval`` move the weights."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["fast"], state["mean"] = p.clone(), p.clone()
                state["fast"].sub_(p.grad, alpha=group["lr"])
                state["mean"].lerp_(state["fast"], 1 / self.count)
                p.copy_(0.9 * state["mean"] + 0.1 * state["fast"])


@program()
def schedule_free():
    """A schedule-free optimizer."""
    return with_optimizer(lambda p: ScheduleFree(p, 0.3))


# a closure, of which only the last evaluation counts
@program(layers=False, judged={"repeated_batch": "true: each step has all data"})
def lbfgs():
    """Logistic regression by L-BFGS with a closure."""
    model, (x, y) = nn.Linear(8, 3), blobs(128)
    optimizer = torch.optim.LBFGS(model.parameters(), 0.5, max_iter=4, line_search_fn="strong_wolfe")

    def step():
        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y) + 1e-3 * model.weight.square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    return Training(model, step)


@program(layers=False)  # the ascent is no part of the step
def sharpness_aware():
    """SAM by hand: two backwards, the weights are moved and moved back."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)

    def step():
        x, y = blobs()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            moves = [0.05 * p.grad / norm for p in model.parameters()]
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Training(model, step)


@program()
def lookahead():
    """Lookahead: every fifth step the weights return half of the way."""
    model, drawn = network(), iter(range(1, 10**9))
    slow = copy.deepcopy(model)

    def after():
        if next(drawn) % 5 == 0:
            with torch.no_grad():
                for mean, p in zip(slow.parameters(), model.parameters(), strict=True):
                    mean.lerp_(p, 0.5)
                    p.copy_(mean)

    return standard(model, adam(model), blobs, F.cross_entropy, after=after)


@program()
def weight_averaging():
    """Stochastic weight averaging with its schedule."""
    model, drawn = network(), iter(range(10**9))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    average, schedule = AveragedModel(model), SWALR(optimizer, 0.05, 10)

    def after():
        if next(drawn) >= 30:
            average.update_parameters(model)
            schedule.step()

    return standard(model, optimizer, blobs, F.cross_entropy, after=after)


@program()
def exchanged_average():
    """An average of the weights that is exchanged with them for an evaluation, and back."""
    model, drawn = network(), iter(range(10**9))
    average = {name: value.clone() for name, value in model.state_dict().items()}

    def after():
        for name, value in model.state_dict().items():
            average[name].lerp_(value, 0.1)
        if next(drawn) % 20 == 19:
            kept = copy.deepcopy(model.state_dict())
            model.load_state_dict(average)
            model.eval()
            with torch.no_grad():
                model(blobs()[0])
            model.train()
            model.load_state_dict(kept)

    return standard(model, adam(model), blobs, F.cross_entropy, after=after)


@program(layers=False)
def gradient_scaler():
    """Autocast and a gradient scaler, with clipping of unscaled gradients."""
    model = network()
    optimizer, scaler = adam(model), torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=20)

    def step():
        x, y = blobs()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return Training(model, step)


@program()
def autocast():
    """Autocast in bfloat16, without a scaler."""
    model = network()
    optimizer = adam(model)

    def step():
        x, y = blobs()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, step)


@program()
def half_weights():
    """Weights in bfloat16."""
    model = network().bfloat16()
    return standard(model, adam(model, 1e-2), lambda: _half(*blobs()), F.cross_entropy)


def _half(x, y):
    return x.bfloat16(), y


@program()
def double_weights():
    """Weights in float64."""
    model = network().double()
    return standard(model, adam(model), lambda: _double(*blobs()), F.cross_entropy)


def _double(x, y):
    return x.double(), y


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1)) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.last(x)


@program()
def checkpoints():
    """Checkpoints without reentrance, with dropout."""
    model = Checkpointed(False)
    return standard(model, adam(model), blobs, F.cross_entropy)


@program(layers=False)  # the calls that count have no graph
def reentrant_checkpoints():
    """Reentrant checkpoints."""
    model = Checkpointed(True)
    return standard(model, adam(model), blobs, F.cross_entropy)


@program()
def sequential_checkpoints():
    """``checkpoint_sequential`` in two segments."""

    class Segments(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = mlp(8, 16, 16, 16, 3)

        def forward(self, x):
            return checkpoint_sequential(self.layers, 2, x.requires_grad_(), use_reentrant=False)

    model = Segments()
    return standard(model, adam(model), blobs, F.cross_entropy)


@program(layers=False)
def optimizer_in_backward():
    """Each parameter has an optimizer that steps in the backward."""
    model = network()
    optimizers = {p: torch.optim.SGD([p], 0.05) for p in model.parameters()}

    def reached(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(reached)

    def step():
        x, y = blobs()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return Training(model, step)


@program(told=LABELS)
def saved_tensors_on_another_device():
    """Saved tensors are packed and unpacked by hooks."""
    model = network()
    optimizer = adam(model)

    def step():
        x, y = blobs()
        optimizer.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, step)


@program()
def micro_batches_of_different_sizes():
    """Two micro-batches of different sizes, weighted by them."""
    model = network()
    optimizer = adam(model)

    def step():
        optimizer.zero_grad()
        losses = []
        for size in (24, 8):
            x, y = blobs(size)
            losses.append(F.cross_entropy(model(x), y, reduction="sum") / 32)
            losses[-1].backward()
        optimizer.step()
        return sum(losses)

    return Training(model, step)


@program(told=["torch.compiler.reset()"])
def compiled():
    """torch.compile."""
    model = network()
    call, optimizer = torch.compile(model, backend="aot_eager"), adam(model)

    def step():
        x, y = blobs()
        optimizer.zero_grad()
        loss = F.cross_entropy(call(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, step)


@program()
def data_parallel():
    """DataParallel without a device."""
    model = nn.DataParallel(network())
    return standard(model, adam(model), blobs, F.cross_entropy)


@program(layers=False)  # the calls for the export are no part of a step
def exported_in_between():
    """The model is exported and traced between steps."""
    model, drawn = network(), iter(range(10**9))

    def after():
        if next(drawn) == 30:
            torch.export.export(model, (blobs()[0],))
            torch.jit.trace(model, blobs()[0], check_trace=False)

    return standard(model, adam(model), blobs, F.cross_entropy, after=after)


@program()
def saved_and_loaded():
    """Model and optimizer are saved, and loaded into a new optimizer."""
    model, drawn = network(), iter(range(10**9))
    optimizers = [adam(model)]

    def step():
        if next(drawn) == 30:
            state = copy.deepcopy((model.state_dict(), optimizers[0].state_dict()))
            optimizers[0] = adam(model)
            model.load_state_dict(state[0])
            optimizers[0].load_state_dict(state[1])
        x, y = blobs()
        optimizers[0].zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizers[0].step()
        return loss

    return Training(model, step)


@program()
def tied_weights():
    """Input and output embeddings share a weight."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.inner, self.head = nn.Embedding(16, 16), nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
            self.head.weight = self.words.weight

        def forward(self, words):
            return self.head(self.inner(self.words(words)).tanh()).mT

    def batch():
        words = sentences()
        return words[:, :-1], words[:, 1:]

    model = Tied()
    return standard(model, adam(model), batch, F.cross_entropy)


@program()
def shared_module():
    """One layer is called three times in a forward."""

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.inner, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 3)

        def forward(self, x):
            x = self.first(x)
            for _ in range(3):
                x = x + self.inner(x).tanh()
            return self.last(x)

    model = Shared()
    return standard(model, adam(model), blobs, F.cross_entropy)
