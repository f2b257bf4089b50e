"""Healthy trainings with drawn widths, batches, rates, optimizers and seeds."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, RandomSampler

from tests.diagnosis.unseen import Case, cases
from tests.diagnosis.unseen.later_generative import Cosines, Denoiser, Variational, denoising, teacher
from tests.diagnosis.unseen.later_loops import Adapted, Routed
from tests.diagnosis.unseen.later_sequences import AttentionPool, Convolutions, Forecast, Speech, by_degree, series
from tests.diagnosis.unseen.loops import evaluating, steps
from tests.diagnosis.unseen.programs import (
    Program,
    RecurrentClassifier,
    Transformer,
    blobs,
    graph,
    images,
    loader,
    many_labels,
    masks,
    mlp,
    regression,
    signals,
    text,
    token_loss,
)

__all__ = ["PROGRAMS", "RECIPES", "Draw", "varied"]

#: each optimizer with the rate it is given for a rate of Adam
OPTIMIZERS: dict[str, Callable] = {
    "Adam": torch.optim.Adam,
    "AdamW": lambda p, lr: torch.optim.AdamW(p, lr=lr, weight_decay=0.05),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": lambda p, lr: torch.optim.Adamax(p, lr=2 * lr),
    "RMSprop": lambda p, lr: torch.optim.RMSprop(p, lr=lr / 3),
    "Adagrad": lambda p, lr: torch.optim.Adagrad(p, lr=4 * lr),
    "SGD with momentum": lambda p, lr: torch.optim.SGD(p, lr=6 * lr, momentum=0.9),
    "SGD with Nesterov's momentum": lambda p, lr: torch.optim.SGD(p, lr=6 * lr, momentum=0.9, nesterov=True),
    "SGD": lambda p, lr: torch.optim.SGD(p, lr=30 * lr),
}
ADAPTIVE = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax")
ACTIVATIONS = {"ReLU": nn.ReLU, "GELU": nn.GELU, "tanh": nn.Tanh, "SiLU": nn.SiLU, "leaky ReLU": nn.LeakyReLU}


@dataclass
class Draw:
    """Draw settings by a seed, and keep them."""

    seed: int
    settings: dict[str, object] = field(default_factory=dict)

    def __post_init__(self):
        self.random = random.Random(self.seed)

    def __call__(self, name: str, *values):
        return self.settings.setdefault(name, self.random.choice(values))

    def optimizer(self, parameters, rate: float, names=tuple(OPTIMIZERS)) -> torch.optim.Optimizer:
        rate *= self("rate", 0.5, 1.0, 1.7)
        return OPTIMIZERS[self("optimizer", *names)](parameters, lr=rate)

    def program(self, model, loss, data, rate=2e-3, names=tuple(OPTIMIZERS), **options) -> Program:
        parameters = [p for p in model.parameters() if p.requires_grad]
        return Program(model, loss, data, self.optimizer(parameters, rate, names), **options)

    def mlp(self, features: int, outputs: int) -> nn.Sequential:
        return mlp(features, outputs, self("width", 24, 48, 96, 160), ACTIVATIONS[self("activation", *ACTIVATIONS)])

    def loader(self, *tensors, batches=(16, 32, 64), **options) -> DataLoader:
        return loader(*tensors, batch=self("batch", *batches), **options)


RECIPES: dict[str, tuple[str, Callable[[Draw], Program]]] = {}


def recipe(family: str):
    def register(build: Callable[[Draw], Program]) -> Callable[[Draw], Program]:
        RECIPES[build.__name__] = family, build
        return build

    return register


# --- tables -----------------------------------------------------------------------------------------------------------


@recipe("tables")
def classes(draw):
    return draw.program(draw.mlp(20, 5), nn.CrossEntropyLoss(), draw.loader(*blobs()))


@recipe("tables")
def validated_classes(draw):
    inputs, labels = blobs(1024)
    validation = loader(inputs[768:], labels[768:], shuffle=False)
    data = draw.loader(inputs[:768], labels[:768])
    return draw.program(draw.mlp(20, 5), nn.CrossEntropyLoss(), data, loop=evaluating(validation=validation))


@recipe("tables")
def one_logit(draw):
    inputs, labels = blobs(classes=2)
    return draw.program(draw.mlp(20, 1), nn.BCEWithLogitsLoss(), draw.loader(inputs, labels[:, None].float()))


@recipe("regression")
def numbers(draw):
    loss = {"squared": nn.MSELoss(), "robust": nn.SmoothL1Loss(), "absolute": nn.L1Loss()}
    return draw.program(draw.mlp(12, 1), loss[draw("loss", *loss)], draw.loader(*regression()), 1e-3)


@recipe("Poisson")
def counts(draw):
    inputs = torch.randn(768, 12)
    rates = (inputs @ torch.randn(12, 1) / 4 + 0.5).exp()
    return draw.program(draw.mlp(12, 1), nn.PoissonNLLLoss(), draw.loader(inputs, torch.poisson(rates)), 1e-3)


@recipe("many labels")
def columns(draw):
    return draw.program(draw.mlp(20, 6), nn.BCEWithLogitsLoss(), draw.loader(*many_labels()))


@recipe("smoothing")
def smoothed(draw):
    loss = nn.CrossEntropyLoss(label_smoothing=draw("smoothing", 0.05, 0.1, 0.2))
    return draw.program(draw.mlp(20, 5), loss, draw.loader(*blobs()))


@recipe("distillation")
def taught(draw):
    model, rows = teacher()
    student = nn.Sequential(draw.mlp(20, 5), nn.LogSoftmax(1))
    soft = (model(rows) / draw("temperature", 1.0, 2.0, 4.0)).softmax(1)
    return draw.program(student, nn.KLDivLoss(reduction="batchmean"), draw.loader(rows, soft))


@recipe("dropout")
def dropped(draw):
    width, share = draw("width", 48, 96, 160), draw("share", 0.1, 0.3, 0.5)
    layers = nn.Linear(20, width), nn.ReLU(), nn.Dropout(share), nn.Linear(width, width), nn.ReLU(), nn.Dropout(share)
    return draw.program(nn.Sequential(*layers, nn.Linear(width, 5)), nn.CrossEntropyLoss(), draw.loader(*blobs()))


@recipe("batch of one")
def one_row(draw):
    data = loader(*blobs(240), batch=1)
    return draw.program(draw.mlp(20, 5), nn.CrossEntropyLoss(), data, 4e-4, ADAPTIVE, epochs=1)


@recipe("accumulation")
def parts(draw):
    each = draw("parts", 2, 4, 8)

    def loop(program):
        for number, inputs, labels in steps(program):
            (program.loss(program.model(inputs), labels) / each).backward()
            if number % each == each - 1:
                program.optimizer.step()
                program.optimizer.zero_grad()

    return draw.program(draw.mlp(20, 5), nn.CrossEntropyLoss(), loader(*blobs(), batch=8), loop=loop, epochs=4)


@recipe("contrastive learning")
def scaled_cosines(draw):
    model = Cosines(draw("scale", 8.0, 16.0, 30.0))
    return draw.program(model, nn.CrossEntropyLoss(), draw.loader(*blobs(classes=20)), 2e-3, ADAPTIVE)


@recipe("layer scale")
def scaled_branches(draw):
    width, start = draw("width", 24, 32, 64), draw("start", 1e-5, 1e-3, 0.1)

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = nn.Linear(20, width), nn.Linear(width, 5)
            branches = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(3)]
            self.branches = nn.ModuleList(branches)
            self.scales = nn.ParameterList(nn.Parameter(torch.full((width,), start)) for _ in range(3))

        def forward(self, x):
            x = self.first(x)
            for branch, scale in zip(self.branches, self.scales, strict=True):
                x = x + scale * branch(x)
            return self.head(x)

    return draw.program(Scaled(), nn.CrossEntropyLoss(), draw.loader(*blobs()))


# --- schedules, precision, experts, fine-tuning -----------------------------------------------------------------------


@recipe("cyclic rates")
def cycles(draw):
    program = draw.program(draw.mlp(20, 5), nn.CrossEntropyLoss(), loader(*blobs()), names=("Adam", "AdamW"))
    rate = program.optimizer.param_groups[0]["lr"]
    make = {
        "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=3 * rate, total_steps=200),
        "triangles": lambda o: lr_scheduler.CyclicLR(o, rate / 5, 2 * rate, step_size_up=24, cycle_momentum=False),
        "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=draw("period", 24, 48)),
        "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=192),
        "steps": lambda o: lr_scheduler.StepLR(o, 64, 0.3),
        "warm-up": lambda o: lr_scheduler.LinearLR(o, 0.01, total_iters=40),
    }
    program.schedulers = [make[draw("schedule", *make)](program.optimizer)]
    return program


@recipe("mixed precision")
def autocast(draw):
    dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16}[draw("dtype", "float16", "bfloat16")]

    def loop(program):
        scaler = torch.amp.GradScaler(
            "cpu", init_scale=2.0 ** draw("scale", 10, 14, 16), enabled=dtype == torch.float16
        )
        for _, inputs, labels in steps(program):
            program.optimizer.zero_grad()
            with torch.autocast("cpu", dtype):
                outputs = program.model(inputs)
            loss = program.loss(outputs.float(), labels)
            scaler.scale(loss).backward()
            scaler.unscale_(program.optimizer)
            nn.utils.clip_grad_norm_(program.model.parameters(), 1.0)
            scaler.step(program.optimizer)
            scaler.update()

    return draw.program(draw.mlp(20, 5), nn.CrossEntropyLoss(), draw.loader(*blobs()), names=ADAPTIVE, loop=loop)


@recipe("experts")
def routed(draw):
    model = Routed(start=draw("start", 0.0, 0.1))
    balance = draw("balance", 0.01, 0.05)

    def loss(outputs, labels):
        return F.cross_entropy(outputs, labels) + balance * model.router.weight.square().mean()

    return draw.program(model, loss, draw.loader(*blobs()), names=ADAPTIVE)


@recipe("fine-tuning")
def corrected(draw):
    return draw.program(Adapted(), nn.CrossEntropyLoss(), draw.loader(*blobs()), 3e-3, ADAPTIVE)


@recipe("fine-tuning")
def tuned_on_other_labels(draw):
    model, rows = teacher()
    model.requires_grad_(draw("all", True, False))
    model[4] = nn.Linear(64, 3)
    labels = model[:4](rows).detach() @ torch.randn(64, 3)
    return draw.program(model, nn.CrossEntropyLoss(), draw.loader(rows, labels.argmax(1)), 1e-3, ADAPTIVE)


@recipe("sharpness-aware")
def sharpness_aware(draw):
    radius = draw("radius", 0.02, 0.05, 0.1)

    def loop(program):
        for _, inputs, labels in steps(program):
            parameters = list(program.model.parameters())
            program.optimizer.zero_grad()
            program.loss(program.model(inputs), labels).backward()
            with torch.no_grad():
                norm = sum(p.grad.square().sum() for p in parameters).sqrt() + 1e-12
                moves = [radius * p.grad / norm for p in parameters]
                torch._foreach_add_(parameters, moves)
            program.optimizer.zero_grad()
            program.loss(program.model(inputs), labels).backward()
            with torch.no_grad():
                torch._foreach_sub_(parameters, moves)
            program.optimizer.step()

    return draw.program(draw.mlp(20, 5), nn.CrossEntropyLoss(), draw.loader(*blobs()), loop=loop, epochs=5)


# --- images -----------------------------------------------------------------------------------------------------------


@recipe("images")
def squares(draw):
    width, norm = draw("width", 8, 16, 24), draw("norm", "batch", "group", "none")

    def block(before, after):
        norms = {"batch": nn.BatchNorm2d(after), "group": nn.GroupNorm(4, after), "none": nn.Identity()}
        return [nn.Conv2d(before, after, 3, padding=1), norms[norm], nn.ReLU(), nn.MaxPool2d(2)]

    model = nn.Sequential(*block(1, width), *block(width, 2 * width), nn.Flatten(), nn.Linear(18 * width, 4))
    return draw.program(model, nn.CrossEntropyLoss(), draw.loader(*images()), 1e-3, epochs=5)


@recipe("segmentation")
def rectangles(draw):
    width = draw("width", 8, 12, 16)
    model = nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 1, 1),
    )

    def dice(outputs, mask):
        shares = outputs.sigmoid()
        return 1 - ((2 * (shares * mask).sum() + 1) / (shares.sum() + mask.sum() + 1))

    loss = {"binary": nn.BCEWithLogitsLoss(), "Dice": dice}
    data = draw.loader(*masks(), batches=(8, 16, 32))
    return draw.program(model, loss[draw("loss", *loss)], data, 3e-3, ADAPTIVE, epochs=6)


# --- sequences, audio, graphs -----------------------------------------------------------------------------------------


@recipe("language models")
def next_words(draw):
    model = Transformer(width=draw("width", 16, 24, 48), layers=draw("layers", 1, 2, 3))
    if draw("tied", True, False):
        nn.init.normal_(model.embedding.weight, std=0.1)
        model.head.weight = model.embedding.weight
    tokens = text()
    data = draw.loader(tokens[:, :-1], tokens[:, 1:], batches=(16, 24, 48))
    return draw.program(model, token_loss, data, 2e-3, ADAPTIVE, epochs=6)


@recipe("recurrent networks")
def frequencies(draw):
    kind = {"GRU": nn.GRU, "LSTM": nn.LSTM}[draw("cell", "GRU", "LSTM")]
    return draw.program(RecurrentClassifier(kind=kind), nn.CrossEntropyLoss(), draw.loader(*signals()), 5e-3, ADAPTIVE)


@recipe("time series")
def forecast(draw):
    model = Forecast(pool=AttentionPool(1) if draw("pool", True, False) else None)
    return draw.program(model, nn.MSELoss(), draw.loader(*series()), 4e-3, ADAPTIVE)


@recipe("audio")
def characters(draw):
    labels = torch.randint(1, 6, (320, 4))
    frames = torch.randn(6, 8)[labels].repeat_interleave(5, 1) + draw("noise", 0.2, 0.4) * torch.randn(320, 20, 8)

    def loss(outputs, targets):
        rows = len(targets)
        return F.ctc_loss(outputs, targets, torch.full((rows,), 20), torch.full((rows,), 4))

    return draw.program(Speech(True), loss, draw.loader(frames, labels, batches=(10, 20, 40)), 4e-3, ADAPTIVE, epochs=6)


@recipe("graphs")
def communities(draw):
    features, adjacency, labels = graph()
    chosen = torch.rand(len(labels)) < draw("share", 0.3, 0.6, 0.9)

    def loss(outputs, labels):
        return F.cross_entropy(outputs[chosen], labels[chosen])

    return draw.program(Convolutions(adjacency, by_degree), loss, [(features, labels)], 6e-3, ADAPTIVE, epochs=120)


# --- networks that generate -------------------------------------------------------------------------------------------


@recipe("autoencoders")
def variational(draw):
    inputs = torch.randn(768, 3) @ torch.randn(3, 12)
    model, weight = Variational(), draw("weight", 0.01, 0.05)
    loss = lambda o, t: F.mse_loss(o, t) + weight * model.divergence  # noqa: E731 - short enough here
    return draw.program(model, loss, draw.loader(inputs, inputs), 2e-3, ADAPTIVE)


@recipe("diffusion")
def denoised(draw):
    program = denoising(Denoiser(draw("dropped", 0.0, 0.1, 0.2)))
    program.optimizer = draw.optimizer(program.model.parameters(), 2e-3, ADAPTIVE)
    return program


# --- healthy programs of the two sets, with other batches, rates and optimizers ---------------------------------------

#: programs whose loop, batch or optimizer is their point are drawn with other seeds and, where it may change, another rate
PROGRAMS = {
    "generator_and_critic": True,
    "wasserstein_with_clipped_weights": True,
    "velocity_of_a_flow": True,
    "two_views_of_a_row": True,
    "triplets": True,
    "positives_with_a_stopped_gradient": True,
    "policy_with_a_baseline": True,
    "actor_and_critic_with_clipping": True,
    "values_with_a_target_network": True,
    "one_of_four_experts": True,
    "mixture_of_all_experts": True,
    "quasi_newton_with_a_closure": False,
    "binary_activations": True,
    "codes_from_a_codebook": True,
    "penalty_on_the_slope": True,
    "perturbed_inputs": True,
    "one_inner_step": True,
    "easy_rows_first": True,
    "longer_sequences_later": True,
    "mixed_up_rows": True,
    "stochastic_depth": True,
    "unfrozen_after_some_epochs": True,
    "lower_rates_for_lower_layers": True,
    "frozen_backbone_with_a_new_head": True,
    "packed_rows_of_various_lengths": True,
    "words_behind_masks": True,
    "padded_language_model": True,
    "averaged_weights_swapped_for_validation": True,
    "gaussian_likelihood_with_a_variance": True,
    "old_policy_detached": True,
}


def varied(case: Case, draw: Draw, other_rate: bool) -> Program:
    """Build a program and change the rates of its optimizer and the size of its batches."""
    program = case.build()
    factor = draw("rate", 0.5, 1.0, 1.7) if other_rate else 1.0
    for group in program.optimizer.param_groups:
        group["lr"] *= factor
    if type(program.optimizer) is torch.optim.Adam and not program.schedulers:
        kind = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW, "RAdam": torch.optim.RAdam}
        groups = [{"params": group["params"], "lr": group["lr"]} for group in program.optimizer.param_groups]
        program.optimizer = kind[draw("optimizer", *kind)](groups)
    data = program.loader
    if isinstance(data, DataLoader) and data.batch_size > 1:
        size, shuffled = (
            int(data.batch_size * draw("batch factor", 0.5, 1.0, 2.0)),
            isinstance(data.sampler, RandomSampler),
        )
        program.loader = DataLoader(data.dataset, batch_size=size, shuffle=shuffled, collate_fn=data.collate_fn)
    return program


def healthy_case(name: str) -> Case:
    return cases("first", "later")[name]
