"""Programs of the third set: architecture, initialisation, normalisation, dropout, frozen parts, gradients cut."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.diagnosis.unseen import fault, healthy
from tests.diagnosis.unseen.programs import Program, blobs, classifier, loader, mlp, regressor
from tests.diagnosis.unseen.third_common import training


def rings(rows=768):
    """Points in the plane on one of three rings, which no line separates."""
    labels = torch.randint(0, 3, (rows,))
    angle, radius = 6.28 * torch.rand(rows), 1 + labels + 0.2 * torch.randn(rows)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1), labels


def surface(rows=768):
    """Ten columns, and a target from about -3 to 3."""
    inputs = torch.randn(rows, 10)
    return inputs, 1.5 * (inputs[:, :1] + inputs[:, 1:2]).sin() + inputs[:, 2:3] + 0.05 * torch.randn(rows, 1)


# --- initialisation ---------------------------------------------------------------------------------------------------


@fault(
    "initialisation",
    "all weights begin at the same constant, so that the units of a layer are copies of each other and stay so",
    "0",
    why="the rows of each weight are equal to each other at every step, and so are the outputs of the hidden units",
)
def all_weights_a_tenth():
    model = mlp(20, 5)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)
    return classifier(model, loader(*blobs()), epochs=5)


@fault(
    "initialisation",
    "the weights are drawn with a deviation of 1 whatever the width, and all tanh units are saturated from the start",
    "0",
    why="the outputs of the tanh layers are -1 or 1 almost everywhere, and the gradients before them are near zero",
)
def weights_of_deviation_one():
    model = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(64, 64), nn.Tanh())], nn.Linear(64, 3))
    for module in model:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=1.0)
    inputs = torch.randn(768, 64)
    labels = inputs[:, :3].argmax(1)
    return classifier(model, loader(inputs, labels), epochs=5, rate=1e-3)


# --- architecture -----------------------------------------------------------------------------------------------------


@fault(
    "architecture",
    "no activation stands between the linear layers, which together are one linear map",
    why="the output of each linear layer is the input of the next one, and the loss stays near that of guessing",
)
def linear_upon_linear():
    model = nn.Sequential(nn.Linear(2, 64), nn.Linear(64, 64), nn.Linear(64, 3))
    return classifier(model, loader(*rings()), epochs=5, rate=0.01)


@fault(
    "architecture",
    "a ReLU follows the last layer of a regression, so that no target below zero can be reached",
    "5",
    why="half of the targets are negative and no output is; the gradient is zero wherever the output is",
)
def rectified_output():
    return regressor(nn.Sequential(*mlp(10, 1), nn.ReLU()), loader(*surface()), epochs=5)


class Blocks(nn.Module):
    """Hidden layers that are used in turn."""

    def __init__(self, blocks, features=20, classes=5, width=32):
        super().__init__()
        self.stem, self.blocks, self.head = nn.Linear(features, width), blocks, nn.Linear(width, classes)

    def forward(self, x):
        x = self.stem(x).relu()
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x)


@fault(
    "parameters not registered",
    "the layers are kept in a list of Python instead of a ModuleList, and the optimizer never gets them",
    why="modules are called that are no children of the network; their parameters get gradients and never move",
)
def layers_in_a_plain_list():
    return classifier(Blocks([nn.Linear(32, 32) for _ in range(4)]), loader(*blobs()), epochs=5)


class Scaled(nn.Module):
    """Cosine scores, with or without a scale."""

    def __init__(self, scale):
        super().__init__()
        self.body, self.classes, self.scale = nn.Linear(20, 32), nn.Parameter(torch.randn(5, 32)), scale

    def forward(self, x):
        return self.scale * F.linear(F.normalize(self.body(x).relu(), dim=1), F.normalize(self.classes, dim=1))


class Growing(nn.Module):
    """Blocks that are added to what they get, in one of two ways."""

    def __init__(self, depth, shrink):
        super().__init__()
        self.stem, self.head = nn.Linear(20, 32), nn.Linear(32, 5)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(depth))
        self.shrink = shrink
        if shrink:
            for block in self.blocks:
                nn.init.zeros_(block.weight)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x.relu()) if self.shrink else 2 * x + block(x.relu())
        return self.head(x)


# --- normalisation and dropout ----------------------------------------------------------------------------------------


@fault(
    "dropout",
    "dropout of 0.95 where keeping 0.95 was meant",
    "2",
    why="nineteen of twenty outputs of the dropout are zero in training",
)
def kept_for_dropped():
    model = nn.Sequential(nn.Linear(20, 48), nn.ReLU(), nn.Dropout(0.95), nn.Linear(48, 5))
    return classifier(model, loader(*blobs()), epochs=5)


class DropsAlways(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(10, 64), nn.Linear(64, 1)

    def forward(self, x):
        return self.last(F.dropout(self.first(x).relu(), 0.5))


@fault(
    "train and eval",
    "`F.dropout` is called without `training=self.training`, so that the evaluation drops units as well",
    why="in evaluation mode half of the inputs of the last layer are zero, and two passes of the same rows differ",
)
def dropout_in_the_evaluation():
    held = surface(96)

    def loop(program):
        for _ in range(program.epochs):
            for rows, goals in program.loader:
                program.optimizer.zero_grad()
                program.loss(program.model(rows), goals).backward()
                program.optimizer.step()
            program.model.eval()
            with torch.no_grad():
                program.loss(program.model(held[0]), held[1])
            program.model.train()

    return regressor(DropsAlways(), loader(*surface()), epochs=5, loop=loop)


@fault(
    "normalisation",
    "batch norm is trained on batches of two rows, whose statistics are noise: each value becomes about -1 or 1",
    "1",
    why="the outputs of the normalisation before scale and shift are -1 and 1 in each column; the batch has two rows",
)
def batch_norm_of_two_rows():
    model = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
    return regressor(model, loader(*surface(288), batch=2), epochs=1)


@fault(
    "normalisation",
    "`momentum=0.001` of the batch norm was chosen as if it were the share that is kept, as in another framework (0.999)",
    "1",
    why="the running statistics are still near their start, 0 and 1, when the evaluation uses them for inputs of mean 40",
)
def running_statistics_that_stand_still():
    inputs, targets = surface(768)
    held = inputs[:96]

    def loop(program):
        for _ in range(program.epochs):
            for rows, goals in program.loader:
                program.optimizer.zero_grad()
                program.loss(program.model(rows), goals).backward()
                program.optimizer.step()
            program.model.eval()
            with torch.no_grad():
                program.loss(program.model(40 + 8 * held), targets[:96])
            program.model.train()

    model = nn.Sequential(nn.BatchNorm1d(10, momentum=0.001), *mlp(10, 1))
    return regressor(model, loader(40 + 8 * inputs, targets), epochs=5, loop=loop)


# --- frozen parts and gradients cut -----------------------------------------------------------------------------------


@fault(
    "frozen parts",
    "the loop that freezes the body ran after the head was attached; `loss.requires_grad_()` silenced the error of backward",
    "head",
    why="no parameter wants a gradient, the head included, although backward and step are called",
)
def head_frozen_with_the_body():
    model = Blocks(nn.ModuleList([nn.Linear(32, 32)]))
    for parameter in model.parameters():
        parameter.requires_grad = False

    def objective(program, rows, goals):
        return F.cross_entropy(program.model(rows), goals).requires_grad_()

    return training(model, loader(*blobs()), objective)


@fault(
    "frozen parts",
    "the frozen body is in training mode, and the statistics of its batch norms drift to the new data",
    "0.1",
    why="the batch norms of the body, whose parameters want no gradient, change their running statistics at each batch",
)
def frozen_but_its_statistics_move():
    body = nn.Sequential(nn.Linear(20, 48), nn.BatchNorm1d(48), nn.ReLU()).requires_grad_(False)
    inputs, labels = blobs()
    model = nn.Sequential(body, nn.Linear(48, 5))
    for _ in range(30):
        model(torch.randn(64, 20))
    return classifier(model, loader(3 * inputs + 5, labels), epochs=5)


@fault(
    "frozen parts",
    "the body is frozen by setting its gradients to zero, but AdamW's decay goes on to shrink it",
    "0",
    why="the body's gradients are zero at each step while its weights shrink by the same factor",
)
def frozen_but_decaying():
    body = nn.Sequential(nn.Linear(20, 64), nn.ReLU())
    model = nn.Sequential(body, nn.Linear(64, 5))

    def loop(program):
        for _ in range(program.epochs):
            for rows, goals in program.loader:
                program.optimizer.zero_grad(set_to_none=False)
                program.loss(program.model(rows), goals).backward()
                for parameter in body.parameters():
                    parameter.grad.zero_()
                program.optimizer.step()

    data = loader(*blobs())
    return Program(
        model, nn.CrossEntropyLoss(), data, torch.optim.AdamW(model.parameters(), 0.02, weight_decay=0.3), 5, loop
    )


@fault(
    "frozen parts",
    "the state was loaded with `strict=False` under other names, so that nothing was loaded and the frozen body is random",
    knowable=False,
    why="frozen random features are used on purpose too; that a file was read in vain happens before the training",
)
def nothing_was_loaded():
    trained = nn.Sequential(nn.Linear(2, 16), nn.Tanh())
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 3))
    model.load_state_dict({f"module.{name}": value for name, value in trained.state_dict().items()}, strict=False)
    model[0].requires_grad_(False)
    return classifier(model, loader(*rings()), epochs=5)


class NoGradientOfTheBody(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = mlp(2, 16), nn.Linear(16, 3)

    def forward(self, x):
        with torch.no_grad():
            code = self.encoder(x)
        return self.head(code.relu())


@fault(
    "gradients cut",
    "`torch.no_grad()` around the encoder was left from the time when it was pretrained, but here it begins at random",
    "encoder",
    why="the encoder is in the optimizer and wants gradients, but never gets one, while the head learns",
)
def no_grad_around_the_encoder():
    return classifier(NoGradientOfTheBody(), loader(*rings()), epochs=5)


class Chosen(nn.Module):
    """Three experts, of which the gate takes one, by argmax or by weights."""

    def __init__(self, hard):
        super().__init__()
        self.gate, self.experts, self.hard = nn.Linear(10, 3), nn.ModuleList(mlp(10, 1, 16) for _ in range(3)), hard

    def forward(self, x):
        scores = self.gate(x)
        weights = F.one_hot(scores.argmax(1), 3).float() if self.hard else scores.softmax(1)
        return (torch.cat([expert(x) for expert in self.experts], 1) * weights).sum(1, keepdim=True)


@fault(
    "gradients cut",
    "the gate chooses an expert by argmax, which has no derivative, and so the gate is never trained",
    "gate",
    why="the parameters of the gate have no gradient after any backward pass",
)
def gate_by_argmax():
    return regressor(Chosen(hard=True), loader(*surface()), epochs=5)


# --- healthy ----------------------------------------------------------------------------------------------------------


@healthy("frozen parts")
def random_features_that_stay():
    """Only the head is trained, on many random features that are frozen on purpose; the loss falls to a half or less."""
    model = nn.Sequential(nn.Linear(2, 256), nn.ReLU(), nn.Linear(256, 3))
    model[0].requires_grad_(False)
    return classifier(model, loader(*rings()), epochs=5, rate=0.01)


@healthy("architecture")
def blocks_that_begin_as_nothing():
    """24 residual blocks whose weights begin at zero; the loss falls to less than a third."""
    return classifier(Growing(24, shrink=True), loader(*blobs()), epochs=5, rate=1e-3)


@healthy("architecture")
def linear_for_a_linear_task():
    """Two linear layers without activation for a linear relation, as a bottleneck of rank 2; the loss falls to near 0."""
    inputs = torch.randn(768, 10)
    targets = inputs @ torch.randn(10, 2) @ torch.randn(2, 6) / 3
    return regressor(nn.Sequential(nn.Linear(10, 2), nn.Linear(2, 6)), loader(inputs, targets), epochs=5, rate=0.02)


@healthy("architecture")
def scaled_cosines():
    """Cosine scores with a scale of 16; the loss falls to less than a quarter."""
    return classifier(Scaled(16.0), loader(*blobs()), epochs=5)


@healthy("frozen parts")
def body_thawed_half_way():
    """The head is trained alone for two epochs, then all; the loss falls slowly first, then to less than a third."""
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))

    def loop(program):
        for epoch in range(program.epochs):
            program.model[:4].requires_grad_(epoch >= 2)
            for rows, goals in program.loader:
                program.optimizer.zero_grad()
                program.loss(program.model(rows), goals).backward()
                program.optimizer.step()

    return classifier(model, loader(*rings()), epochs=6, rate=5e-3, loop=loop)
