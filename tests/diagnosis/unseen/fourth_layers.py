"""Programs of the fourth set: layers, activations, initial weights, dropout and what forward does with them."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.diagnosis.unseen import fault, healthy
from tests.diagnosis.unseen.fourth_common import fit, fit_with, glyphs, patients, priced, split
from tests.diagnosis.unseen.programs import Program, blobs, loader, mlp, program

CROSS_ENTROPY = nn.CrossEntropyLoss()


def flat():
    inputs, labels = glyphs()
    return inputs.flatten(1), labels


# --- activations and depth --------------------------------------------------------------------------------------------


@fault(
    "activation",
    "the network for regression ends in a ReLU, although half of the targets are negative",
    "5",
    why="the outputs are never below 0, and half of the targets are",
)
def relu_after_the_last_layer():
    model = nn.Sequential(*mlp(8, 1, 64), nn.ReLU())
    return program(model, nn.MSELoss(), loader(*priced()), 2e-3, epochs=8, loop=fit)


@fault(
    "activation",
    "the autoencoder's decoder ends in a sigmoid, while the images are standardised and reach from -1 to 2",
    "decoder.3",
    why="the outputs are from 0 to 1, and many of the targets are not",
)
def decoder_with_a_sigmoid():
    model = nn.Sequential()
    model.add_module("encoder", nn.Sequential(nn.Linear(256, 96), nn.ReLU(), nn.Linear(96, 24)))
    model.add_module("decoder", nn.Sequential(nn.Linear(24, 96), nn.ReLU(), nn.Linear(96, 256), nn.Sigmoid()))
    inputs, _ = flat()
    return program(model, nn.MSELoss(), loader(inputs, inputs), 2e-3, epochs=8, loop=fit)


class OnlyLinear(nn.Module):
    """A network whose author forgot the activations in forward."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(12, 128), nn.Linear(128, 64)
        self.dropout = nn.Dropout(0.1)
        self.fc3 = nn.Linear(64, 1)

    def forward(self, x):
        return self.fc3(self.dropout(self.fc2(self.fc1(x))))


@fault(
    "activation",
    "forward calls three linear layers without an activation between them",
    why="the output of each linear layer goes into the next one, so that the network is linear",
)
def three_layers_in_a_line():
    return program(OnlyLinear(), nn.BCEWithLogitsLoss(), loader(*patients()), 2e-3, epochs=8, loop=fit)


# --- initial weights --------------------------------------------------------------------------------------------------


def constant(module):
    if isinstance(module, nn.Linear):
        nn.init.constant_(module.weight, 0.05)
        nn.init.zeros_(module.bias)


@fault(
    "initialisation",
    "all weights begin with the same constant, so that the units of a layer stay equal to each other",
    "1",
    why="all units of a hidden layer have equal outputs and gradients, in each step",
)
def weights_of_one_constant():
    model = nn.Sequential(nn.Flatten(), *mlp(256, 8, 64)).apply(constant)
    return program(model, CROSS_ENTROPY, loader(*flat()), 1e-3, epochs=6, loop=fit)


def normal(module):
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight)


@fault(
    "initialisation",
    "the weights are drawn with a deviation of 1, whatever the width, so that tanh is saturated from the beginning",
    "0",
    why="nearly all outputs of tanh are -1 or 1 at the first step, and the first loss is far above that of guessing",
)
def normal_weights_of_deviation_one():
    model = mlp(256, 8, 256, nn.Tanh).apply(normal)
    return program(model, CROSS_ENTROPY, loader(*flat()), 0.01, torch.optim.SGD, epochs=6, loop=fit)


# --- what is registered, and what forward does ------------------------------------------------------------------------


class Stack(nn.Module):
    """A network with its blocks in a list of Python."""

    def __init__(self):
        super().__init__()
        self.inlet = nn.Linear(20, 32)
        self.blocks = [nn.Linear(32, 32) for _ in range(3)]
        self.outlet = nn.Linear(32, 5)

    def forward(self, x):
        x = self.inlet(x).relu()
        for block in self.blocks:
            x = block(x).relu()
        return self.outlet(x)


@fault(
    "parameters",
    "the hidden layers are in a Python list, so that the optimizer does not know their weights",
    why="the gradient flows through linear layers that are no modules of the model, and whose weights never change",
)
def layers_in_a_python_list():
    return program(Stack(), CROSS_ENTROPY, loader(*blobs(1024)), 2e-3, epochs=6, loop=fit)


class FreshHead(nn.Module):
    """A network that makes its head within forward."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())

    def forward(self, x):
        x = self.body(x)
        return nn.Linear(x.shape[1], 5)(x)


@fault(
    "parameters",
    "forward makes a new last layer in each call, so that the outputs come from random weights every time",
    why="the outputs of the same rows differ between two calls, and the last layer is no module of the model",
)
def new_layer_in_forward():
    return program(FreshHead(), CROSS_ENTROPY, loader(*blobs(1024)), 2e-3, epochs=6, loop=fit)


class AlwaysDropping(nn.Module):
    """A network with the dropout function without its argument `training`."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(256, 96), nn.Linear(96, 96), nn.Linear(96, 8)

    def forward(self, x):
        x = F.dropout(self.fc1(x).relu(), p=0.4)
        x = F.dropout(self.fc2(x).relu(), p=0.4)
        return self.fc3(x)


@fault(
    "dropout",
    "F.dropout is called without training=self.training, and so drops values in the validation too",
    why="the outputs for the same rows of the validation are random in evaluation mode",
)
def dropout_in_the_validation():
    (inputs, labels), held_out = split(*flat())
    return program(AlwaysDropping(), CROSS_ENTROPY, loader(inputs, labels), 1e-3, epochs=8, loop=fit_with(held_out))


@fault(
    "dropout",
    "dropout was given the probability to keep, 0.9, where PyTorch wants the probability to drop",
    "2",
    why="the layer's p can be read, and nine of ten values are 0 in training",
)
def probability_to_keep():
    layers = [nn.Linear(256, 96), nn.ReLU(), nn.Dropout(0.9), nn.Linear(96, 96), nn.ReLU(), nn.Dropout(0.9)]
    (inputs, labels), held_out = split(*flat())
    model = nn.Sequential(*layers, nn.Linear(96, 8))
    return program(model, CROSS_ENTROPY, loader(inputs, labels), 1e-3, epochs=8, loop=fit_with(held_out))


@fault(
    "shapes",
    "log_softmax is taken over the rows of the batch instead of the classes",
    "5",
    why="the exponentials of the inputs of the loss sum to 1 over the batch, and not in each row",
)
def log_softmax_over_rows():
    model = nn.Sequential(*mlp(20, 5, 64), nn.LogSoftmax(dim=0))
    return program(model, nn.NLLLoss(), loader(*blobs(1024)), 2e-3, epochs=6, loop=fit)


class TwoBranches(nn.Module):
    """A network with a branch for the numbers and one for the context."""

    def __init__(self):
        super().__init__()
        self.numbers = nn.Sequential(nn.Linear(14, 32), nn.ReLU())
        self.context = nn.Sequential(nn.Linear(6, 32), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 5))

    def forward(self, x):
        numbers = self.numbers(x[:, :14])
        self.context(x[:, 14:])
        return self.head(torch.cat([numbers, numbers], 1))


@fault(
    "layers",
    "one branch is joined with itself, so that the outputs of the other branch are not used",
    "context.0",
    why="the branch runs, but its weights never get a gradient",
)
def one_branch_joined_twice():
    return program(TwoBranches(), CROSS_ENTROPY, loader(*blobs(1024)), 2e-3, epochs=6, loop=fit)


class ThroughNumpy(nn.Module):
    """A network that smooths its hidden units by NumPy."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 64), nn.ReLU())
        self.head = nn.Linear(64, 5)

    def forward(self, x):
        hidden = self.body(x).detach().numpy()
        smooth = 0.5 * hidden + 0.25 * (hidden[:, [-1, *range(63)]] + hidden[:, [*range(1, 64), 0]])
        return self.head(torch.from_numpy(smooth))


@fault(
    "graph",
    "forward takes the hidden units to NumPy and back, which cuts the first layer off from the gradient",
    "body.0",
    why="the first layer's weights never get a gradient, although they are in the optimizer",
)
def hidden_units_through_numpy():
    return program(ThroughNumpy(), CROSS_ENTROPY, loader(*blobs(1024)), 2e-3, epochs=6, loop=fit)


# --- healthy ----------------------------------------------------------------------------------------------------------


class Sign(torch.autograd.Function):
    """The sign, with the gradient of a clipped identity."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.where(x >= 0, 1.0, -1.0)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (ctx.saved_tensors[0].abs() <= 1)


class Binary(nn.Module):
    def forward(self, x):
        return Sign.apply(x)


@healthy("activation")
def binary_units_with_an_own_gradient():
    layers = [nn.Linear(256, 128), nn.BatchNorm1d(128), Binary(), nn.Linear(128, 8)]
    (inputs, labels), held_out = split(*flat())
    return program(
        nn.Sequential(*layers), CROSS_ENTROPY, loader(inputs, labels), 2e-3, epochs=6, loop=fit_with(held_out)
    )


class LowRank(nn.Module):
    """A frozen layer with a trained correction of rank 4 that begins at 0."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, 4, bias=False)
        self.up = nn.Linear(4, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


@healthy("fine-tuning")
def corrections_of_low_rank():
    inputs, labels = blobs(2048)
    model = mlp(20, 5, 64)
    earlier = program(model, CROSS_ENTROPY, loader(inputs[:1024], labels[:1024]), 3e-3, epochs=3, loop=fit)
    earlier.loop(earlier)
    for place in (0, 2, 4):
        model[place] = LowRank(model[place])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    data = loader(inputs[1024:].roll(3, 1), labels[1024:])
    return Program(model, CROSS_ENTROPY, data, torch.optim.AdamW(trained, 3e-3), 8, fit)
