"""Faults of the later set: fine-tuning, experts, and mistakes in loops, optimizers, schedules and custom gradients."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

from tests.diagnosis.unseen import fault, healthy
from tests.diagnosis.unseen.loops import steps
from tests.diagnosis.unseen.programs import blobs, classifier, image_classifier, loader, mlp, regressor

# --- fine-tuning ------------------------------------------------------------------------------------------------------


def trained(rows=200):
    model, (inputs, labels) = mlp(20, 5), blobs()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(rows):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    model.zero_grad(set_to_none=True)
    return model


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.body, self.head = nn.Linear(20, 48), mlp(48, 48), nn.Linear(48, 5)
        self.first.requires_grad_(False)
        self.reentrant = reentrant

    def forward(self, x):
        return self.head(checkpoint(self.body, self.first(x), use_reentrant=self.reentrant))


@fault(
    "fine-tuning",
    "a checkpointed part gets inputs that want no gradient, so that it is never trained",
    "body",
    why="trainable parameters inside the checkpoint get no gradient in any step",
)
def checkpoint_without_gradient():
    return classifier(Checkpointed(reentrant=True))


@healthy("fine-tuning")
def checkpoint_with_gradient():
    return classifier(Checkpointed(reentrant=False))


@fault(
    "fine-tuning",
    "a layer is frozen by gradients of zero, and the weight decay of the optimizer still changes it",
    "0",
    why="weights with gradients of exactly zero shrink in every step",
)
def frozen_by_gradients_of_zero():
    def loop(program):
        for _, inputs, labels in steps(program):
            program.optimizer.zero_grad()
            program.loss(program.model(inputs), labels).backward()
            for p in program.model[0].parameters():
                p.grad.zero_()
            program.optimizer.step()

    return classifier(trained(), loop=loop, rate=1e-2, kind=lambda p, lr: torch.optim.AdamW(p, lr=lr, weight_decay=1.0))


@fault(
    "fine-tuning",
    "the head is initialized anew at the begin of each epoch",
    "4",
    why="the weights of one layer jump between two steps, without an optimizer, at each epoch",
)
def head_reset_in_each_epoch():
    def loop(program):
        for _ in range(8):
            program.model[4].reset_parameters()
            for inputs, labels in program.loader:
                program.optimizer.zero_grad()
                program.loss(program.model(inputs), labels).backward()
                program.optimizer.step()

    return classifier(trained(), loop=loop, rate=1e-3)


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(20, 48).requires_grad_(False)
        self.down, self.up = nn.Linear(20, 4, bias=False), nn.Linear(4, 48, bias=False)
        self.head = nn.Linear(48, 5)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.head((self.base(x) + self.up(self.down(x))).relu())

    @torch.no_grad()
    def merge(self):
        self.base.weight += self.up.weight @ self.down.weight


def adapted(merged):
    def loop(program):
        for _, inputs, labels in steps(program):
            program.optimizer.zero_grad()
            program.loss(program.model(inputs), labels).backward()
            program.optimizer.step()
            if merged:
                program.model.merge()

    program = classifier(Adapted(), loop=loop)
    program.optimizer = torch.optim.Adam([p for p in program.model.parameters() if p.requires_grad], lr=3e-3)
    return program


@fault(
    "fine-tuning",
    "the correction is merged into the frozen weights after each step and stays in the adapter, so that it adds up",
    "base",
    why="frozen weights change in every step",
)
def adapter_merged_in_each_step():
    return adapted(merged=True)


@healthy("fine-tuning")
def adapter_beside_frozen_weights():
    return adapted(merged=False)


# --- experts ----------------------------------------------------------------------------------------------------------


class Routed(nn.Module):
    """One of four experts for each row."""

    def __init__(self, weighted=True, capacity=None, start=0.0):
        super().__init__()
        self.router, self.head = nn.Linear(20, 4), nn.Linear(24, 5)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(20, 24), nn.ReLU()) for _ in range(4))
        self.weighted, self.capacity = weighted, capacity
        with torch.no_grad():
            self.router.bias[0] += start

    def forward(self, x):
        shares, best = self.router(x).softmax(1).max(1)
        mixed = torch.zeros(len(x), 24)
        for number, expert in enumerate(self.experts):
            rows = (best == number).nonzero()[: self.capacity, 0]
            if len(rows):
                outputs = expert(x[rows])
                mixed = mixed.index_add(0, rows, outputs * shares[rows, None] if self.weighted else outputs)
        return self.head(mixed)


@fault(
    "experts",
    "the router sends every row to the first expert and nothing balances it",
    "router",
    why="three of the four experts are never called and get no gradient",
)
def all_rows_to_one_expert():
    return classifier(Routed(start=12.0))


@fault(
    "experts",
    "the choice of an expert is not weighted by its share, so that the router gets no gradient",
    "router",
    why="the parameters of the router never get a gradient",
)
def router_without_gradient():
    return classifier(Routed(weighted=False))


@fault(
    "experts",
    "an expert takes one row of a batch and all others are dropped, so that their outputs are the bias of the head",
    "experts",
    why="nearly all rows of a batch have the same output, and nearly all rows get no gradient",
)
def capacity_of_one_row():
    return classifier(Routed(capacity=1))


class Mixed(nn.Module):
    def __init__(self, copied):
        super().__init__()
        self.router, self.head = nn.Linear(20, 4), nn.Linear(24, 5)
        nn.init.zeros_(self.router.weight)
        nn.init.zeros_(self.router.bias)
        expert = nn.Sequential(nn.Linear(20, 24), nn.ReLU())
        each = [copy.deepcopy(expert) if copied else nn.Sequential(nn.Linear(20, 24), nn.ReLU()) for _ in range(4)]
        self.experts = nn.ModuleList(each)

    def forward(self, x):
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        return self.head((self.router(x).softmax(1)[:, :, None] * outputs).sum(1))


@fault(
    "experts",
    "the experts are copies of one and get equal gradients, so that they stay equal",
    "experts",
    why="four modules have equal weights and equal gradients in every step",
)
def experts_are_copies():
    return classifier(Mixed(copied=True))


@healthy("experts")
def experts_of_their_own():
    return classifier(Mixed(copied=False))


# --- loops ------------------------------------------------------------------------------------------------------------


@fault(
    "loops",
    "the step is made only if the loss is the lowest so far, so that most gradients are thrown away",
    why="most backward passes are followed by no step",
)
def step_only_when_better():
    def loop(program):
        best = float("inf")
        for _, inputs, labels in steps(program):
            program.optimizer.zero_grad()
            loss = program.loss(program.model(inputs), labels)
            loss.backward()
            if loss.item() < best:
                best = loss.item()
                program.optimizer.step()

    return classifier(loop=loop)


@fault(
    "loops",
    "more parts are accumulated than an epoch has, and the count begins anew, so that there is never a step",
    why="there are backward passes and no step of the optimizer",
)
def accumulates_more_than_an_epoch():
    def loop(program):
        for _ in range(8):
            program.optimizer.zero_grad()
            for number, (inputs, labels) in enumerate(program.loader):
                (program.loss(program.model(inputs), labels) / 32).backward()
                if (number + 1) % 32 == 0:
                    program.optimizer.step()
                    program.optimizer.zero_grad()

    return classifier(loop=loop)


@fault(
    "loops",
    "the gradients are cleared once an epoch, so that each step uses the sum of all before it",
    why="gradients grow within an epoch and are those of earlier batches too",
)
def cleared_once_an_epoch():
    def loop(program):
        for _ in range(8):
            program.optimizer.zero_grad()
            for inputs, labels in program.loader:
                program.loss(program.model(inputs), labels).backward()
                program.optimizer.step()

    return classifier(loop=loop, rate=0.05, kind=torch.optim.SGD)


def sharpness(removed):
    def loop(program):
        for _, inputs, labels in steps(program):
            parameters = list(program.model.parameters())
            program.optimizer.zero_grad()
            program.loss(program.model(inputs), labels).backward()
            with torch.no_grad():
                norm = sum(p.grad.square().sum() for p in parameters).sqrt()
                moves = [0.1 * p.grad / norm for p in parameters]
                for p, move in zip(parameters, moves, strict=True):
                    p.add_(move)
            program.optimizer.zero_grad()
            program.loss(program.model(inputs), labels).backward()
            if removed:
                with torch.no_grad():
                    for p, move in zip(parameters, moves, strict=True):
                        p.sub_(move)
            program.optimizer.step()

    return classifier(loop=loop, rate=0.1, kind=torch.optim.SGD, epochs=6)


@fault(
    "loops",
    "the disturbance of a sharpness-aware step is not removed, so that the weights climb in each step",
    why="the weights change between two passes outside of the optimizer's step, along the gradient",
)
def disturbance_not_removed():
    return sharpness(removed=False)


@fault(
    "loops",
    "the noise that is added to the gradients is many times larger than they are",
    why="the gradients of following steps have nothing in common, and their size does not depend on the loss",
)
def noise_drowns_the_gradients():
    def loop(program):
        for _, inputs, labels in steps(program):
            program.optimizer.zero_grad()
            program.loss(program.model(inputs), labels).backward()
            for p in program.model.parameters():
                p.grad += 5 * torch.randn_like(p)
            program.optimizer.step()

    return classifier(loop=loop, rate=0.01, kind=torch.optim.SGD)


@fault(
    "loops",
    "the random numbers are seeded in each step, so that dropout always removes the same units",
    "2",
    why="the outputs of the dropout are zero at the same places in every step",
)
def same_units_dropped():
    def loop(program):
        for _, inputs, labels in steps(program):
            torch.manual_seed(0)
            program.optimizer.zero_grad()
            program.loss(program.model(inputs), labels).backward()
            program.optimizer.step()

    model = nn.Sequential(nn.Linear(20, 48), nn.ReLU(), nn.Dropout(0.5), nn.Linear(48, 5))
    return classifier(model, loop=loop, data=loader(*blobs(), shuffle=False))


@fault(
    "loops",
    "a second backward pass through the same batch adds its gradient again before the step",
    why="each step is preceded by two backward passes of the same rows, and the gradient is twice that of the loss",
)
def backward_twice():
    def loop(program):
        for _, inputs, labels in steps(program):
            program.optimizer.zero_grad()
            loss = program.loss(program.model(inputs), labels)
            loss.backward(retain_graph=True)
            loss.backward()
            program.optimizer.step()

    return classifier(loop=loop, rate=0.1, kind=torch.optim.SGD)


# --- optimizers and schedules -----------------------------------------------------------------------------------------


@fault(
    "optimizers", "the optimizer maximizes the loss", why="the optimizer's option maximize is set and the loss rises"
)
def optimizer_that_maximizes():
    return classifier(rate=0.02, kind=lambda p, lr: torch.optim.SGD(p, lr=lr, maximize=True))


@fault(
    "optimizers",
    "a dampening of one removes all gradients but the first from the momentum",
    why="the optimizer states a dampening of one, and every update is a part of the first one",
)
def dampening_of_one():
    return classifier(rate=0.02, kind=lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, dampening=1.0))


@fault(
    "optimizers",
    "Adadelta is run with a rate that is meant for Adam, where its own scale makes the updates tiny",
    why="the updates are a millionth of the weights and the loss stays where it began",
)
def rate_of_adam_for_adadelta():
    return classifier(rate=1e-3, kind=torch.optim.Adadelta)


@fault(
    "optimizers",
    "Adagrad divides by a sum that was begun far too high, so that the updates are tiny",
    why="the initial sum of the optimizer is far above all squared gradients",
)
def sum_of_adagrad_begun_too_high():
    return classifier(rate=1e-2, kind=lambda p, lr: torch.optim.Adagrad(p, lr=lr, initial_accumulator_value=1e4))


def scheduled(make, rate=3e-3, **options):
    program = classifier(rate=rate, **options)
    program.schedulers = [make(program.optimizer)]
    return program


@fault(
    "schedules",
    "the function of the schedule returns a rate where a factor is wanted, so that the rate is multiplied by itself",
    why="the rate in use is the square of the configured one from the first step",
    report="https://github.com/lhoyer/MIC/issues/60",
)
def schedule_returns_a_rate():
    return scheduled(lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 3e-3 * 0.999**step))


@fault(
    "schedules", "the schedule raises the rate without end", why="the rate grows in each step until the loss diverges"
)
def rate_that_grows():
    return scheduled(lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 1.06), epochs=10)


@fault(
    "schedules",
    "the rate falls by half at each batch in which the loss is not the lowest, and is nearly zero soon",
    why="the rate falls by orders of magnitude within the first epochs, while the loss still falls",
)
def plateau_without_patience():
    def loop(program):
        schedule = lr_scheduler.ReduceLROnPlateau(program.optimizer, factor=0.5, patience=0)
        for _, inputs, labels in steps(program):
            program.optimizer.zero_grad()
            loss = program.loss(program.model(inputs), labels)
            loss.backward()
            program.optimizer.step()
            schedule.step(loss.item())

    return classifier(loop=loop, rate=0.02, kind=torch.optim.SGD)


# --- gradients of the user's own --------------------------------------------------------------------------------------


class WrongSign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return -gradient * (s + x * s * (1 - s))


class Nothing(WrongSign):
    @staticmethod
    def backward(ctx, gradient):
        return None


class Applied(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function.apply(x)


def with_function(function):
    return classifier(nn.Sequential(nn.Linear(20, 48), Applied(function), nn.Linear(48, 5)))


@fault(
    "own gradients",
    "the backward pass of a function of the user's own has the wrong sign",
    "1",
    why="the gradient differs from a finite difference by its sign, in everything before the function",
)
def backward_with_the_wrong_sign():
    return with_function(WrongSign)


@fault(
    "own gradients",
    "the backward pass of a function of the user's own returns nothing",
    "1",
    why="no parameter before the function gets a gradient",
)
def backward_returns_nothing():
    return with_function(Nothing)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


@fault(
    "own gradients",
    "the reversal of gradients for the domain's head was put in front of the classifier too",
    "1",
    why="the gradient of the features has the wrong sign for the loss, which rises while the head follows",
)
def reversal_before_the_wrong_head():
    return with_function(Reversed)


@fault(
    "own gradients",
    "a hook on the parameters scales their gradients to nearly nothing",
    "0",
    why="the gradient that is stored is a thousandth of a millionth of the one that the backward pass computed",
)
def hook_scales_gradients_away():
    program = classifier(kind=torch.optim.SGD, rate=0.1)
    for p in program.model[0].parameters():
        p.register_hook(lambda gradient: 1e-9 * gradient)
    return program


@fault(
    "own gradients",
    "values are rounded in the forward pass without a gradient of their own, so that nothing before learns",
    "1",
    why="all gradients before the rounding are exactly zero",
)
def rounding_without_its_gradient():
    class Rounded(nn.Module):
        def forward(self, x):
            return (4 * x).round() / 4

    return image_classifier(nn.Sequential(nn.Conv2d(1, 8, 3), Rounded(), nn.ReLU(), nn.Flatten(), nn.Linear(800, 4)))


@fault(
    "own gradients",
    "the layer keeps the output of the first call and returns it for every later batch",
    "cached",
    why="the outputs of a module are the same in all steps while its inputs differ",
)
def output_cached():
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.kept = nn.Linear(12, 24), None

        def forward(self, x):
            if self.kept is None:
                self.kept = self.inner(x).detach()
            return self.kept

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.cached, self.head = Cached(), nn.Linear(24, 1)

        def forward(self, x):
            return self.head(self.cached(x).relu())

    return regressor(Model())
