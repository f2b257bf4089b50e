"""Silent errors that users reported in public trackers, rebuilt small.

Each function returns a `Training`, with the error or mended.  ``ERRORS`` has the place of the report, the mistake in a sentence,
what finds it, and why the rest does not.  If the error is one of a library or a device, the rebuild has its effect, not its cause.
"""

from typing import NamedTuple

import numpy
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from tests.diagnosis import networks
from tests.diagnosis.real_errors.training import Training

ERRORS = {}


class Error(NamedTuple):
    """One error, the preflight checks and the rules that find it, and why not both do."""

    build: object
    source: str
    mistake: str
    checks: frozenset
    rules: frozenset
    reason: str


def error(source, mistake, checks=(), rules=(), reason=""):
    def register(build):
        ERRORS[build.__name__] = Error(build, source, mistake, frozenset(checks), frozenset(rules), reason)
        return build

    return register


def digits(size=32, seed=0):
    """Return a function of a step that draws a batch of images with labels."""
    (x, y), _ = networks.digits()
    generator = torch.Generator().manual_seed(seed)

    def batch(step):
        rows = torch.randint(len(x), (size,), generator=generator)
        return x[rows], y[rows]

    return batch


def sentences(size=12):
    """Return a function of a step that draws windows of a text, with the next tokens as labels of each position."""
    ids = networks.text()
    generator = torch.Generator().manual_seed(0)

    def batch(step):
        begin = torch.randint(0, len(ids) - 33, (size,), generator=generator)
        window = ids[begin[:, None] + torch.arange(33)]
        return window[:, :-1], window[:, 1:]

    return batch


def mlp(depth=2):
    return networks.mlp([64] * depth)


def adam(model, rate=1e-3):
    return torch.optim.Adam(model.parameters(), rate)


@error(
    "https://stackoverflow.com/questions/60335387",
    "The loop never calls ``zero_grad()``.",
    rules=["not_zeroed"],
    reason="The checks before the first step do not see the loop.",
)
def gradients_never_cleared(is_mended):
    model = mlp()
    return Training(model, digits(), torch.optim.SGD(model.parameters(), 0.02, momentum=0.9), clears=is_mended)


@error(
    "https://github.com/huggingface/accelerate/issues/3209",
    "A wrapper replaces the parameters after the optimizer was created, so that the optimizer updates the old ones.",
    checks=["not_in_optimizer"],
    rules=["missing_step"],
)
def optimizer_of_replaced_parameters(is_mended):
    model = mlp()
    optimizer = adam(model)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().clone()))
    return Training(model, digits(), adam(model) if is_mended else optimizer)


@error(
    "https://github.com/pytorch/pytorch/issues/118115",
    "``addcdiv_`` writes its result into a copy if the tensor is not contiguous, so that Adam updates only the other parameters.",
    rules=["never_moves"],
    reason="The checks before the first step do not run the optimizer.",
)
def update_of_weights_that_are_not_contiguous(is_mended):
    model = mlp()
    layer = model.fc1
    layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    optimizer = adam(model)
    kept = []
    if not is_mended:
        optimizer.register_step_pre_hook(lambda *_: kept.append(layer.weight.detach().clone()))
        optimizer.register_step_post_hook(lambda *_: layer.weight.data.copy_(kept.pop()))
    return Training(model, digits(), optimizer)


@error(
    "https://github.com/pytorch/pytorch/issues/115607",
    "A compiled step was traced while the gradients were None, and never updates these parameters later.",
    rules=["never_moves"],
    reason="The checks before the first step do not run the optimizer.",
)
def parameters_skipped_by_a_compiled_step(is_mended):
    model = mlp()
    late = [model.fc0.weight, model.fc0.bias]

    class Traced(torch.optim.Adam):
        """An optimizer whose step takes the parameters that had gradients when it was traced."""

        def _init_group(self, *args):
            gradients = [parameter.grad for parameter in late]
            for parameter in late:
                parameter.grad = None
            found = super()._init_group(*args)
            for parameter, gradient in zip(late, gradients, strict=True):
                parameter.grad = gradient
            return found

    def before_step(step):
        for parameter in late:
            parameter.requires_grad_(step >= 30)  # frozen in the steps that were traced

    optimizer = adam(model) if is_mended else Traced(model.parameters(), adam(model).defaults["lr"])
    return Training(model, digits(), optimizer, steps=160, before_step=before_step)


@error(
    "https://github.com/Lightning-Universe/lightning-bolts/issues/654",
    "The model ends with a softmax, and the loss applies another one.",
    checks=["softmax_twice"],
    rules=["softmax_twice"],
)
def softmax_before_the_cross_entropy(is_mended):
    body = mlp()
    model = body if is_mended else nn.Sequential(body, nn.Softmax(-1))
    return Training(model, digits(), adam(model))


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(64, 32), nn.Linear(32, 1)

    def forward(self, x):
        return self.head(torch.relu(self.body(x.flatten(1))))


class SquaredError(nn.Module):
    """The mean squared error without a warning about shapes, as written by hand."""

    def forward(self, output, target):
        return (output - target).square().mean()


@error(
    "https://github.com/deepset-ai/FARM/issues/229",
    "Outputs of shape (N, 1) and labels of shape (N) are broadcast to (N, N), so that the model learns the mean.",
    checks=["label_shape"],
    reason="The loss falls to the variance of the labels, as for data without information; no rule reads shapes.",
)
def labels_that_are_broadcast(is_mended):
    draw = digits()

    def batch(step):
        x, y = draw(step)
        target = (y.float() - 4.5) / 3
        return x, target[:, None] if is_mended else target

    model = Regression()
    return Training(model, batch, adam(model), SquaredError())


class TokenLoss(nn.Module):
    def forward(self, output, labels):
        return functional.cross_entropy(output.flatten(0, 1), labels.flatten())


class LanguageModel(nn.Module):
    """One attention layer; its mask is missing unless ``is_causal``."""

    def __init__(self, is_causal, depth=1):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(60, 32), nn.Embedding(32, 32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 60)
        self.is_causal = is_causal
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, ids):
        h = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1]) if self.is_causal else None
        return self.head(self.norm(h + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]))


@error(
    "https://github.com/huggingface/transformers/issues/31673",
    "The causal mask is not applied, so that the labels are visible and the loss falls to zero.",
    checks=["time_leak"],
    reason="A loss that falls fast is no sign of a mistake to a rule.",
)
def causal_mask_not_applied(is_mended):
    model = LanguageModel(is_mended)
    return Training(model, sentences(), adam(model), TokenLoss())


@error(
    "https://github.com/huggingface/accelerate/issues/2142",
    "The schedule advances once for each of eight processes, so that the learning rate is zero after an eighth of the run.",
    rules=["lr_vanished"],
    reason="The checks before the first step do not see the schedule.",
)
def schedule_advanced_by_every_process(is_mended):
    model, steps, processes = mlp(), 240, 8
    optimizer = adam(model)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)

    def after_step(step):
        for _ in range(1 if is_mended else processes):
            schedule.step()

    return Training(model, digits(), optimizer, steps=steps, after_step=after_step)


class AlwaysDropped(nn.Module):
    """Drops inputs in evaluation mode too, unless ``is_mended``."""

    def __init__(self, is_mended):
        super().__init__()
        self.is_mended = is_mended

    def forward(self, x):
        return functional.dropout(x, 0.2, self.training if self.is_mended else True)


@error(
    "https://github.com/huggingface/transformers/pull/33844",
    "A dropout of an attention layer stays active in evaluation mode.",
    checks=["random_output"],
    reason="The rules judge training, which is right.",
)
def dropout_in_evaluation_mode(is_mended):
    body = mlp()
    model = nn.Sequential(body.flat, body.fc0, body.act0, AlwaysDropped(is_mended), body.fc1, body.act1, body.head)
    return Training(model, digits(), adam(model))


@error(
    "https://github.com/pytorch/pytorch/issues/72253",
    "The layers of a ``TransformerEncoder`` are copies and begin with the same weights.",
    reason="Layers with equal weights are also made on purpose; the checks compare units inside a layer only.",
)
def layers_that_begin_equal(is_mended):
    layers = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), 3, enable_nested_tensor=False
    )
    if is_mended:
        for layer in layers.layers:
            for parameter in layer.parameters():
                if parameter.dim() > 1:
                    nn.init.xavier_uniform_(parameter)
    model = nn.Sequential(nn.Embedding(60, 32), layers, nn.Linear(32, 60))
    nn.init.normal_(model[0].weight, std=0.02)

    def batch(step):
        ids, _ = sentences_of(step)
        return ids, ids.roll(5, 1)

    sentences_of = sentences()
    return Training(model, batch, adam(model), TokenLoss())


class Augmented(Dataset):
    """Draws its samples with the random numbers of numpy."""

    def __getitem__(self, index):
        (x, y), _ = networks.digits()
        row = numpy.random.randint(len(x))
        return x[row], y[row]

    def __len__(self):
        return 32 * 60


def seed_by_worker(worker):
    numpy.random.seed(torch.initial_seed() % 2**32)


def seed_alike(worker):
    numpy.random.seed(0)  # torch itself seeds numpy since version 1.9


@error(
    "https://github.com/pytorch/pytorch/issues/5059",
    "All workers of a data loader draw the same random numbers of numpy, so that consecutive batches are equal.",
    rules=["batch_twice"],
    reason="The checks before the first step do not see the loader.",
)
def workers_with_the_same_seed(is_mended):
    model, batches = mlp(), []

    def batch(step):
        if not batches:
            loader = DataLoader(
                Augmented(), 32, num_workers=2, worker_init_fn=seed_by_worker if is_mended else seed_alike
            )
            batches.extend(loader)
        return batches[step % len(batches)]

    return Training(model, batch, adam(model))


@error(
    "https://discuss.pytorch.org/t/84911",
    "Everything but batch norm is frozen, the new output layer too.",
    checks=["frozen_output_layer"],
    reason="The rules judge what is trained.",
)
def output_layer_frozen_too(is_mended):
    model = networks.mlp([64, 64], norm="batch")
    pretraining = Training(model, digits(seed=1), adam(model), steps=60)
    for step in range(pretraining.steps):
        pretraining.make_step(step)
    model.zero_grad()
    model.head.reset_parameters()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name or (is_mended and name.startswith("head")))
    return Training(model, digits(), torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-3))


@error(
    "https://github.com/open-mmlab/mmpretrain/issues/702",
    "The stages that the configuration freezes are trained, because the method that freezes them is not called.",
    reason="A layer that is trained and should not be is only known to the user.",
)
def stages_not_frozen(is_mended):
    model = mlp(3)
    if is_mended:
        model.fc0.requires_grad_(False)
    return Training(model, digits(), adam(model))


@error(
    "https://github.com/huggingface/transformers/issues/37766",
    "The loss of each micro-batch is not divided by the number of micro-batches.",
    rules=["loss_scale"],
    reason="The checks before the first step do not see the loop.",
)
def accumulation_without_division(is_mended):
    model = mlp()

    class Loss(nn.Module):
        def forward(self, output, labels):
            return functional.cross_entropy(output, labels) / (8 if is_mended else 1)

    return Training(model, digits(16), adam(model), Loss(), steps=80, micro_batches=8)
