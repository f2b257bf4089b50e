"""Relations that a right program keeps: each names its planted fault, and all are silent for healthy models of many kinds."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import ikkuna
from tests.diagnosis.healthy_models import LanguageModel, stack, vectors

FAULTS, HEALTHY = {}, {}


def fault(*expected):
    """Register a function that returns model, batch and loss, in which exactly `expected` must be found."""

    def register(function):
        FAULTS[function.__name__] = (function, set(expected))
        return function

    return register


def healthy(function):
    """Register a function that returns model, batch and loss, in which nothing may be found."""
    HEALTHY[function.__name__] = function
    return function


def names(model, batch, loss):
    optimizer = torch.optim.Adam(model.parameters())
    return {finding.rule for finding in ikkuna.preflight(model, batch, loss, optimizer) if finding.severity != "info"}


def segmenter(classes=4):
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, classes, 3, padding=1))


# -- freed outputs: the loss


@fault("unbounded_loss")
def likelihood_with_the_wrong_sign_of_one_term():
    def loss(output, y):
        mean, log_variance = output[:, :1], output[:, 1:]
        return (log_variance - 0.5 * (mean - y).square()).mean() + log_variance.square().mean()

    return stack([20, 64, 2]), (torch.randn(32, 20), torch.randn(32, 1)), loss


@fault("loss_contract")
def binary_cross_entropy_with_labels_of_plus_and_minus_one():
    y = torch.rand(32, 5).round() * 2 - 1
    return stack([20, 64, 5]), (torch.randn(32, 20), y), nn.BCEWithLogitsLoss()


@fault("wrong_optimum")
def cross_entropy_with_the_wrong_sign():
    return stack([20, 64, 10]), vectors(), lambda output, y: -functional.cross_entropy(output, y)


@fault("wrong_optimum")
def squared_error_with_the_wrong_sign():
    return (
        stack([20, 64, 1]),
        (torch.randn(32, 20), torch.randn(32, 1)),
        lambda output, y: -(output - y).square().mean(),
    )


@fault("wrong_optimum")
def reconstruction_with_the_wrong_sign():
    def loss(output, x):
        return divergence(*output[1:]).mean() - (output[0] - x).square().sum(1).mean()

    x = torch.randn(32, 20)
    return Autoencoder(bounded=False), (x, x), loss


@fault("viewed_axes")
def scores_whose_axes_are_reshaped_instead_of_transposed():
    def loss(output, y):
        return functional.cross_entropy(output.reshape(-1, 8, 8, 4).permute(0, 3, 1, 2), y)

    return segmenter(), (torch.randn(16, 3, 8, 8), torch.randint(4, (16, 8, 8))), loss


@fault("viewed_axes")
def classes_of_an_image_that_are_flattened_without_a_permutation():
    def loss(output, y):
        return functional.cross_entropy(output.reshape(-1, 4), y.reshape(-1))

    return segmenter(), (torch.randn(16, 3, 8, 8), torch.randint(4, (16, 8, 8))), loss


@fault("softmax_twice")
def softmax_inside_of_the_loss():
    return stack([20, 64, 10]), vectors(), lambda output, y: functional.cross_entropy(output.softmax(1), y)


@fault("loss_floor")
def softmax_inside_of_a_loss_by_hand():
    def loss(output, y):
        return -output.softmax(1).log_softmax(1)[torch.arange(len(y)), y].mean()

    return stack([20, 64, 10]), vectors(), loss


@fault("labels_no_distribution")
def cross_entropy_for_several_labels():
    y = torch.rand(32, 10).round()
    return stack([20, 64, 10]), (torch.randn(32, 20), y), nn.CrossEntropyLoss()


@fault("labels_without_gradient")
def ignored_label_that_is_a_class():
    y = torch.randint(4, (16, 8, 8))
    return segmenter(), (torch.randn(16, 3, 8, 8), y), nn.CrossEntropyLoss(ignore_index=0)


@fault("labels_out_of_reach")
def tanh_for_labels_of_a_larger_range():
    model = nn.Sequential(stack([20, 64, 1]), nn.Tanh())
    return model, (torch.randn(32, 20), 5 * torch.randn(32, 1)), nn.MSELoss()


@fault("labels_without_gradient")
def loss_of_the_first_row():
    def loss(output, y):
        return functional.mse_loss(output, y, reduction="none")[0].mean()

    return stack([20, 64, 1]), (torch.randn(32, 20), torch.randn(32, 1)), loss


def overlap(p, y, axes=(), smooth=1.0):
    return (2 * (p * y).sum(axes) + smooth) / ((p + y).sum(axes) + smooth)


def masks(classes=1):
    y = torch.randint(classes, (8, 16, 16)) if classes > 1 else (torch.rand(8, 1, 16, 16) > 0.7).float()
    return torch.randn(8, 3, 16, 16), y


@fault("wrong_optimum")
def dice_score_of_the_batch():
    return segmenter(1), masks(), lambda output, y: overlap(output.sigmoid(), y, tuple(range(4)))


@fault("wrong_optimum")
def dice_score_of_each_picture_behind_a_sigmoid():
    loss = lambda output, y: overlap(output, y, (1, 2, 3), 1e-6).mean()  # noqa: E731
    return nn.Sequential(segmenter(1), nn.Sigmoid()), masks(), loss


def dice_of_classes(output, y):
    marked = functional.one_hot(y, output.shape[1]).movedim(-1, 1)
    return overlap(output.softmax(1), marked, (0, 2, 3)).mean()


@fault("wrong_optimum")
def dice_score_of_classes():
    return segmenter(), masks(4), dice_of_classes


@fault("wrong_optimum")
def score_of_intersection_over_union():
    def loss(output, y):
        p = output.sigmoid()
        both = (p * y).sum()
        return both / (p.sum() + y.sum() - both + 1e-6)

    return segmenter(1), masks(), loss


@healthy
def dice_loss():
    return segmenter(1), masks(), lambda output, y: 1 - overlap(output.sigmoid(), y, tuple(range(4)))


@healthy
def negative_dice_score_of_classes():
    return segmenter(), masks(4), lambda output, y: -dice_of_classes(output, y)


@healthy
def expected_cost_of_forbidden_actions():
    y = (torch.rand(32, 10) > 0.7).float()
    return stack([20, 64, 10]), (torch.randn(32, 20), y), lambda output, y: (output.softmax(1) * y).sum(1).mean()


@healthy
def probability_of_the_opposite():
    y = torch.randint(2, (32, 1)).float()
    return stack([20, 64, 1]), (torch.randn(32, 20), y), lambda output, y: (1 - output.sigmoid() - y).square().mean()


@healthy
def anomalies_above_samples_of_label_one():
    def loss(output, y):
        return (output[y == 1][:, None] - output[y == 0]).sigmoid().mean()

    return stack([20, 64, 1]), (torch.randn(32, 20), torch.randint(2, (32, 1)).float()), loss


@healthy
def energies_that_correlate_negatively_with_quality():
    def loss(output, y):
        return torch.corrcoef(torch.stack([output.flatten(), y.flatten()]))[0, 1]

    return stack([20, 64, 1]), (torch.randn(32, 20), torch.randint(2, (32, 1)).float()), loss


def hinge(output, y):
    return (1 - y * output).clamp(min=0).mean()


@fault("labels_without_gradient")
def hinge_loss_by_hand_of_zero_and_one():
    return stack([20, 64, 1]), (torch.randn(32, 20), torch.randint(2, (32, 1)).float()), hinge


@healthy
def hinge_loss_by_hand_of_signs():
    return stack([20, 64, 1]), (torch.randn(32, 20), 2 * torch.randint(2, (32, 1)).float() - 1), hinge


@healthy
def rows_without_labels():
    def loss(output, y):
        known = y >= 0
        return functional.cross_entropy(output[known], y[known])

    y = torch.randint(10, (32,))
    y[8:] = -1
    return stack([20, 64, 10]), (torch.randn(32, 20), y), loss


@healthy
def rows_of_the_largest_losses():
    def loss(output, y):
        return functional.cross_entropy(output, y, reduction="none").topk(8).values.mean()

    return stack([20, 64, 10]), vectors(), loss


@healthy
def rows_outside_of_the_training_set():
    def loss(output, y):
        return functional.cross_entropy(output[:8], y[:8] % 2)

    return stack([20, 64, 2]), (torch.randn(32, 20), torch.randint(2, (32,))), loss


@fault("divided_twice")
def mean_divided_by_the_samples_again():
    def loss(output, y):
        return functional.mse_loss(output, y) / len(y)

    return stack([20, 64, 1]), (torch.randn(32, 20), torch.randn(32, 1)), loss


class Categories(nn.Module):
    """A classifier of rows whose first number is that of a category."""

    def __init__(self):
        super().__init__()
        self.categories, self.head = nn.Embedding(40, 8), stack([27, 32, 4])

    def forward(self, x):
        return self.head(torch.cat([self.categories(x[:, 0].long()), x[:, 1:]], 1))


def categories(scale):
    x = torch.randn(32, 20)
    x[:, 0] = torch.arange(32) / scale
    return Categories(), (x, torch.randint(4, (32,))), nn.CrossEntropyLoss()


@fault("one_index")
def categories_that_are_scaled():
    return categories(40)


@healthy
def numbers_of_categories():
    return categories(1)


# -- the batch and sequences


class Recurrent(nn.Module):
    """A classifier of sequences with a GRU."""

    def __init__(self, batch_first):
        super().__init__()
        self.rnn, self.head = nn.GRU(6, 32, batch_first=batch_first), nn.Linear(32, 3)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


@fault("batch_leak")
def forgotten_batch_first():
    return Recurrent(False), (torch.randn(16, 12, 6), torch.randint(3, (16,))), nn.CrossEntropyLoss()


@fault("batch_position")
def positions_that_are_added_along_the_samples():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.places = nn.Parameter(torch.randn(100, 1, 6))

        def forward(self, x):
            return x + self.places[: len(x)]

    model = nn.Sequential(Positions(), nn.Flatten(), stack([72, 64, 3]))
    return model, (torch.randn(16, 12, 6), torch.randint(3, (16,))), nn.CrossEntropyLoss()


def over_all_tokens(output, y):
    return functional.cross_entropy(output.flatten(0, 1), y.flatten())


@fault("label_offset")
def language_model_without_a_shift():
    x = torch.randint(50, (8, 12))
    return LanguageModel(), (x, x.clone()), over_all_tokens


@fault("label_offset")
def language_model_with_two_shifts():
    def loss(output, y):
        return over_all_tokens(output[:, :-1], y[:, 1:])

    x = torch.randint(50, (8, 13))
    return LanguageModel(), (x[:, :-1], x[:, 1:]), loss


@fault("label_offset")
def language_model_with_a_shift_backwards():
    x = torch.randint(50, (8, 13))
    return LanguageModel(), (x[:, 1:], x[:, :-1]), over_all_tokens


class Translator(nn.Module):
    """A model with an encoder that sees all positions, and a decoder with its own inputs."""

    def __init__(self, is_causal=True):
        super().__init__()
        self.embedding, self.head, self.is_causal = nn.Embedding(50, 32), nn.Linear(32, 50), is_causal
        self.body = nn.Transformer(32, 2, 1, 1, 64, 0.0, batch_first=True)

    def forward(self, source, target):
        mask = torch.ones(target.shape[1], target.shape[1]).triu(1).bool() if self.is_causal else None
        return self.head(self.body(self.embedding(source), self.embedding(target), tgt_mask=mask))


def sentences(shift=1):
    source, target = torch.randint(50, (8, 12)), torch.randint(50, (8, 13))
    return (source, target[:, :12], target[:, shift : 12 + shift]), over_all_tokens


class Normalized(nn.Module):
    """A layer that normalises its first batch by its parameters, as in a flow."""

    def __init__(self, size, always):
        super().__init__()
        self.offset, self.scale, self.always = nn.Parameter(torch.zeros(size)), nn.Parameter(torch.ones(size)), always
        self.register_buffer("is_initialised", torch.tensor(False))

    def forward(self, x):
        if not self.is_initialised and (self.always or self.training):
            self.offset.data, self.scale.data = -x.mean(0).detach(), 1 / x.std(0).detach()
            self.is_initialised.fill_(True)
        return (x + self.offset) * self.scale


@pytest.mark.parametrize("always", [True, False])
def test_a_layer_that_is_initialised_by_its_first_batch_mixes_no_samples(always):
    torch.manual_seed(0)
    layers = (nn.Linear(20, 32), Normalized(32, always), nn.Tanh(), nn.Linear(32, 10))
    model = nn.Sequential(*layers)
    assert not names(model, vectors(), nn.CrossEntropyLoss())
    assert not model[1].is_initialised
    assert bool((model[1].scale == 1).all())


@healthy
def translator():
    return Translator(), *sentences()


@fault("time_leak")
def translator_whose_decoder_has_no_mask():
    return Translator(is_causal=False), *sentences()


@fault("label_offset")
def translator_without_a_shift():
    return Translator(), *sentences(0)


class Pooled(nn.Module):
    """A classifier of texts by the mean of its embeddings."""

    def __init__(self, masked):
        super().__init__()
        self.embedding, self.head, self.masked = nn.Embedding(50, 32, padding_idx=0), stack([32, 64, 3]), masked

    def forward(self, x):
        count = (x != 0).sum(1, keepdim=True) if self.masked else x.shape[1]
        return self.head(self.embedding(x).sum(1) / count)


def texts():
    x = torch.randint(1, 50, (16, 12))
    x[::2, 8:] = 0
    return x, torch.randint(3, (16,))


@fault("padding_changes_output")
def mean_over_padding():
    return Pooled(False), texts(), nn.CrossEntropyLoss()


@healthy
def mean_over_words():
    return Pooled(True), texts(), nn.CrossEntropyLoss()


@healthy
def language_model_that_shifts_in_the_loss():
    x = torch.randint(50, (8, 12))
    return LanguageModel(), (x, x.clone()), lambda output, y: over_all_tokens(output[:, :-1], y[:, 1:])


@healthy
def autoencoder_of_tokens():
    class Coder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.rnn = nn.Embedding(50, 32), nn.GRU(32, 32, batch_first=True, bidirectional=True)
            self.head = nn.Linear(64, 50)

        def forward(self, x):
            return self.head(self.rnn(self.embedding(x))[0])

    x = torch.randint(50, (8, 12))
    return Coder(), (x, x.clone()), over_all_tokens


# -- gradients, layers, and what belongs together


@fault("wrong_gradient")
def detached_gate():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.gate, self.head = nn.Linear(20, 64), nn.Linear(64, 64), nn.Linear(64, 10)

        def forward(self, x):
            x = self.net(x).tanh()
            return self.head(x * self.gate(x.detach()).sigmoid())

    return Gated(), vectors(), nn.CrossEntropyLoss()


@fault("mixed_reduction")
def sum_of_one_term_and_mean_of_another():
    def loss(output, x):
        reconstruction, mean, log_variance = output
        return functional.binary_cross_entropy(reconstruction, x) + divergence(mean, log_variance).sum()

    x = torch.rand(32, 20)
    return Autoencoder(), (x, x), loss


@fault("inplace_changes_output")
def relu_in_place_on_a_residual():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.act, self.net = nn.ReLU(inplace=True), nn.Linear(64, 64)

        def forward(self, x):
            return x + self.net(self.act(x))

    return nn.Sequential(nn.Linear(20, 64), Block(), nn.Linear(64, 10)), vectors(), nn.CrossEntropyLoss()


class Swish(torch.autograd.Function):
    """A product with the sigmoid; `scale` of the gradient is 1."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        share = x.sigmoid()
        return ctx.scale * gradient * (share + x * share * (1 - share)), None


class OwnActivation(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return Swish.apply(x, self.scale)


def with_own_activation(scale):
    model = nn.Sequential(nn.Linear(20, 32), OwnActivation(scale), nn.Linear(32, 10))
    return model, vectors(), nn.CrossEntropyLoss()


@fault("reversed_gradient")
def backward_with_the_wrong_sign():
    return with_own_activation(-1.0)


@healthy
def backward_of_the_users_own():
    return with_own_activation(1.0)


@healthy
def gradient_that_is_scaled_on_purpose():
    return with_own_activation(0.1)


@healthy
def reversal_in_front_of_one_of_two_losses():
    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.classes, self.side = nn.Linear(20, 32), nn.Linear(32, 10), nn.Linear(32, 2)

        def forward(self, x):
            features = self.body(x).relu()
            return torch.cat([self.classes(features), self.side(Reversal.apply(features))], 1)

    def loss(outputs, y):
        return functional.cross_entropy(outputs[:, :10], y) + functional.cross_entropy(outputs[:, 10:], y % 2)

    return TwoHeads(), vectors(), loss


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


@fault("no_activation")
def layers_without_an_activation():
    model = nn.Sequential(nn.Linear(20, 64), nn.Dropout(0.1), nn.Linear(64, 64), nn.Linear(64, 10))
    return model, vectors(), nn.CrossEntropyLoss()


@healthy
def blocks_that_begin_at_zero():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
            nn.init.zeros_(self.net[2].weight)

        def forward(self, x):
            return x + self.net(x)

    return nn.Sequential(nn.Linear(20, 64), Block(), nn.Linear(64, 10)), vectors(), nn.CrossEntropyLoss()


@fault("labels_of_other_samples")
def time_and_samples_in_different_orders():
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.rnn, self.head = nn.Embedding(50, 32), nn.GRU(32, 32), nn.Linear(32, 5)

        def forward(self, x):
            return self.head(self.rnn(self.embedding(x.T))[0]).flatten(0, 1)

    return Tagger(), (torch.randint(50, (8, 12)), torch.randint(5, (8, 12)).flatten()), nn.CrossEntropyLoss()


@fault("label_in_inputs")
def label_among_the_columns():
    x, y = vectors()
    x[:, 7] = 2 * y - 3
    return stack([20, 64, 10]), (x, y), nn.CrossEntropyLoss()


@fault("duplicate_rows")
def the_same_rows_from_each_worker():
    x, y = vectors(8)
    return stack([20, 64, 10]), (x.repeat(4, 1), y.repeat(4)), nn.CrossEntropyLoss()


class NextToken(nn.Module):
    """A recurrent network that predicts the next token of each position."""

    def __init__(self, batch_first):
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(20, 16), nn.GRU(16, 32, batch_first=batch_first)
        self.head = nn.Linear(32, 20)

    def forward(self, x):
        return self.head(self.rnn(self.embedding(x))[0]).flatten(0, -2)


def next_tokens(shape, axis):
    tokens = torch.randint(20, shape)
    length = shape[axis] - 1
    return tokens.narrow(axis, 0, length), tokens.narrow(axis, 1, length)


def entropy_of_tokens(output, y):
    return functional.cross_entropy(output, y.flatten())


@fault("batch_leak")
def forgotten_batch_first_of_next_tokens():
    return NextToken(False), next_tokens((12, 10), 1), entropy_of_tokens


@healthy
def time_first_and_next_tokens():
    return NextToken(False), next_tokens((10, 12), 0), entropy_of_tokens


@pytest.mark.parametrize("seed", range(4))
def test_a_squared_error_of_far_outputs_has_a_bound(seed):
    torch.manual_seed(seed)
    x = torch.randn(64, 6)
    x[:, 2] = 3e4 + 2e5 * torch.rand(64)
    assert "unbounded_loss" not in names(stack([6, 64, 1]), (x, x[:, :1].tanh()), nn.MSELoss())


def test_one_far_row_makes_no_label_of_a_column():
    x = torch.randn(64, 6)
    y = x[:, :1] + 0.5 * torch.randn(64, 1)
    x[0, 1], y[0] = 1e5, 1e5
    assert "label_in_inputs" not in names(stack([6, 64, 1]), (x, y), nn.MSELoss())


@healthy
def a_row_of_nan_in_evaluation_mode():
    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = stack([20, 64, 10])

        def forward(self, x):
            outputs = self.inner(x)
            return outputs if self.training else torch.cat([outputs[:-1], outputs[-1:] * math.nan])

    return Padded(), vectors(), nn.CrossEntropyLoss()


def test_outputs_that_are_not_finite_are_not_compared():
    model, batch, loss = a_row_of_nan_in_evaluation_mode()
    found = ikkuna.preflight(model, batch, loss, torch.optim.Adam(model.parameters()))
    assert found.skipped["ignores_input"] == "the output is not finite in evaluation mode"


def test_a_loss_that_is_maximised_is_not_minimised():
    model, (x, y) = stack([20, 64, 10]), vectors()
    optimizer = torch.optim.Adam(model.parameters(), maximize=True)
    found = ikkuna.preflight(model, (x, y), lambda output, y: -functional.cross_entropy(output, y), optimizer)
    assert not found
    assert found.skipped["freed_outputs"] == "an optimizer maximises the loss"


def test_no_more_classes_are_named_than_a_line_holds():
    weight = torch.tensor([0.0] * 6 + [1.0] * 4)
    model, batch = stack([20, 64, 10]), (torch.randn(40, 20), torch.arange(40) % 10)
    [found] = [
        f
        for f in ikkuna.preflight(model, batch, nn.CrossEntropyLoss(weight=weight))
        if f.rule == "labels_without_gradient"
    ]
    assert "the labels of class 0, 1, 2, 3 and 2 more." in found.message


@healthy
def linear_model_of_low_rank():
    return nn.Sequential(nn.Linear(20, 3), nn.Linear(3, 20)), (torch.randn(32, 20), torch.randn(32, 20)), nn.MSELoss()


@healthy
def relu_in_place():
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(inplace=True), nn.Linear(64, 10))
    return model, vectors(), nn.CrossEntropyLoss()


@healthy
def sum_with_a_divergence():
    def loss(output, x):
        reconstruction, mean, log_variance = output
        error = functional.binary_cross_entropy(reconstruction, x, reduction="sum")
        return (error + divergence(mean, log_variance).sum()) / len(x)

    x = torch.rand(32, 20)
    return Autoencoder(), (x, x), loss


@healthy
def messages_along_the_edges_of_a_graph():
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 3)
            edges = (torch.rand(40, 40) < 0.1).float()
            self.register_buffer("edges", edges / edges.sum(1, keepdim=True).clamp(min=1))

        def forward(self, x):
            x = (self.first(x) + self.edges @ self.first(x)).relu()
            return self.second(x + self.edges @ x)

    return Network(), (torch.randn(40, 8), torch.randint(3, (40,))), nn.CrossEntropyLoss()


@healthy
def tagger_with_time_first():
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.rnn, self.head = nn.Embedding(50, 32), nn.GRU(32, 32), nn.Linear(32, 5)

        def forward(self, x):
            return self.head(self.rnn(self.embedding(x))[0]).flatten(0, 1)

    return Tagger(), (torch.randint(50, (12, 8)), torch.randint(5, (12, 8)).flatten()), nn.CrossEntropyLoss()


# -- healthy models of other kinds than those of the other tests


class Autoencoder(nn.Module):
    """A variational autoencoder that returns the reconstruction, the mean and the logarithm of the variance."""

    def __init__(self, bounded=True):
        super().__init__()
        self.encoder, self.decoder = stack([20, 32, 8]), stack([4, 32, 20])
        if bounded:
            self.decoder.append(nn.Sigmoid())

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, 1)
        code = mean + (0.5 * log_variance).exp() * torch.randn_like(mean) if self.training else mean
        return self.decoder(code), mean, log_variance


def divergence(mean, log_variance):
    return -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1)


@healthy
def variational_autoencoder():
    def loss(output, x):
        reconstruction, mean, log_variance = output
        error = functional.binary_cross_entropy(reconstruction, x, reduction="none").sum(1)
        return (error + divergence(mean, log_variance)).mean()

    x = torch.rand(32, 20)
    return Autoencoder(), (x, x), loss


@healthy
def denoiser_of_a_diffusion():
    class Denoiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = stack([21, 64, 20], nn.SiLU)

        def forward(self, x, t):
            return self.net(torch.cat([x, t[:, None]], 1))

    clean, noise, t = torch.randn(32, 20), torch.randn(32, 20), torch.rand(32)
    noisy = (1 - t[:, None]) * clean + t[:, None] * noise
    return Denoiser(), (noisy, t, noise), nn.MSELoss()


@healthy
def discriminator_with_hinge_loss():
    y = torch.tensor([1.0, -1.0]).repeat(16).unsqueeze(1)
    return stack([20, 64, 1]), (torch.randn(32, 20), y), lambda output, y: (1 - y * output).relu().mean()


@healthy
def critic_whose_loss_is_linear():
    y = torch.tensor([1.0, -1.0]).repeat(16).unsqueeze(1)
    return stack([20, 64, 1]), (torch.randn(32, 20), y), lambda output, y: -(y * output).mean()


@healthy
def generator():
    discriminator = stack([16, 32, 1]).requires_grad_(False)
    return stack([8, 32, 16]), torch.randn(32, 8), lambda fake: -discriminator(fake).mean()


@healthy
def mean_and_variance_of_a_normal_distribution():
    def loss(output, y):
        mean, log_variance = output[:, :1], output[:, 1:]
        return 0.5 * (log_variance + (mean - y).square() / log_variance.exp()).mean()

    return stack([20, 64, 2]), (torch.randn(32, 20), torch.randn(32, 1)), loss


@healthy
def rates_of_a_poisson_distribution():
    y = torch.poisson(2 * torch.ones(32, 1))
    return stack([20, 64, 1]), (torch.randn(32, 20), y), nn.PoissonNLLLoss()


@healthy
def positive_rates_of_a_poisson_distribution():
    y = torch.poisson(2 * torch.ones(32, 1))
    model = nn.Sequential(stack([20, 64, 1]), nn.Softplus())
    return model, (torch.randn(32, 20), y), nn.PoissonNLLLoss(log_input=False)


@healthy
def quantile_regression():
    def loss(output, y):
        return torch.maximum(0.9 * (y - output), -0.1 * (y - output)).mean()

    return stack([20, 64, 1]), (torch.randn(32, 20), torch.randn(32, 1)), loss


@healthy
def focal_loss():
    def loss(output, y):
        p = output.softmax(1).gather(1, y[:, None]).squeeze(1)
        return -((1 - p) ** 2 * p.log()).mean()

    return stack([20, 64, 10]), vectors(), loss


@healthy
def segmentation_with_dice():
    def loss(output, y):
        p, right = output.softmax(1), functional.one_hot(y, 4).movedim(-1, 1)
        overlap = 1 - (2 * (p * right).sum((2, 3)) + 1) / ((p + right).sum((2, 3)) + 1)
        return functional.cross_entropy(output, y) + overlap.mean()

    return segmenter(), (torch.randn(16, 3, 8, 8), torch.randint(4, (16, 8, 8))), loss


@healthy
def contrastive_learning_with_labels():
    def loss(output, y):
        z = functional.normalize(output, dim=1)
        scores = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
        same = (y[:, None] == y).float().fill_diagonal_(0)
        return -((scores.log_softmax(1) * same).sum(1) / same.sum(1).clamp(min=1)).mean()

    return stack([20, 64, 32]), vectors(classes=4), loss


@healthy
def triplets():
    def loss(output, y):
        z = functional.normalize(output, dim=1)
        anchor, other = z, z.roll(1, 0)
        near, far = z[torch.arange(len(z)) ^ 1], other
        return functional.triplet_margin_loss(anchor, near, far)

    return stack([20, 64, 16]), vectors(classes=4), loss


@healthy
def language_model_that_ignores_padding():
    x = torch.randint(1, 50, (8, 13))
    x[:4, 9:] = 0
    model = LanguageModel()
    return (
        model,
        (x[:, :-1], x[:, 1:]),
        lambda o, y: functional.cross_entropy(o.flatten(0, 1), y.flatten(), ignore_index=0),
    )


@healthy
def distillation():
    def loss(output, y):
        return functional.kl_div(output.log_softmax(1), y.softmax(1), reduction="batchmean")

    return stack([20, 64, 10]), (torch.randn(32, 20), 3 * torch.randn(32, 10)), loss


@healthy
def strong_smoothing_of_labels():
    return stack([20, 64, 10]), vectors(), nn.CrossEntropyLoss(label_smoothing=0.3)


@healthy
def mixed_labels():
    y = functional.one_hot(torch.randint(10, (32,)), 10).float()
    return stack([20, 64, 10]), (torch.randn(32, 20), 0.7 * y + 0.3 * y.roll(1, 0)), nn.CrossEntropyLoss()


@healthy
def recurrent_classifier():
    return Recurrent(True), (torch.randn(16, 12, 6), torch.randint(3, (16,))), nn.CrossEntropyLoss()


@healthy
def straight_through_rounding():
    class Rounding(nn.Module):
        def forward(self, x):
            return x + (x.round() - x).detach()

    return nn.Sequential(nn.Linear(20, 64), Rounding(), nn.ReLU(), nn.Linear(64, 10)), vectors(), nn.CrossEntropyLoss()


@healthy
def policy_whose_advantages_multiply_the_loss():
    actions = torch.randint(4, (32, 1))

    def loss(output, advantage):
        return -(output.log_softmax(1).gather(1, actions)[:, 0] * advantage).mean()

    return stack([8, 64, 4]), (torch.randn(32, 8), torch.randn(32)), loss


@healthy
def values_of_chosen_actions():
    actions = torch.randint(4, (32, 1))

    def loss(output, returns):
        return functional.smooth_l1_loss(output.gather(1, actions)[:, 0], returns)

    return stack([8, 64, 4]), (torch.randn(32, 8), torch.randn(32)), loss


@healthy
def ranks():
    def loss(output, y):
        return functional.binary_cross_entropy_with_logits(output, (y[:, None] > torch.arange(4)).float())

    return stack([20, 64, 4]), (torch.randn(32, 20), torch.arange(32) % 5), loss


@healthy
def rates_of_waiting_times():
    return stack([20, 64, 1]), (torch.randn(32, 20), 3 * torch.rand(32, 1)), lambda o, y: (o.exp() * y - o).mean()


@healthy
def mixture_of_densities():
    def loss(output, y):
        weights, means, scales = output.chunk(3, 1)
        parts = torch.distributions.Normal(means, functional.softplus(scales) + 0.01).log_prob(y)
        return -(weights.log_softmax(1) + parts).logsumexp(1).mean()

    return stack([20, 64, 9]), (torch.randn(32, 20), torch.randn(32, 1)), loss


@healthy
def sequences_without_an_alignment():
    class Recogniser(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.GRU(8, 32, batch_first=True), nn.Linear(32, 6)

        def forward(self, x):
            return self.head(self.rnn(x)[0]).log_softmax(2).transpose(0, 1)

    def loss(output, y):
        return functional.ctc_loss(output, y, torch.full((8,), 20), torch.full((8,), 5))

    return Recogniser(), (torch.randn(8, 20, 8), torch.randint(1, 6, (8, 5))), loss


@healthy
def spikes_with_a_surrogate_gradient():
    class Spike(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return (x > 0).to(x)

        @staticmethod
        def backward(ctx, gradient):
            return gradient / (1 + ctx.saved_tensors[0].abs()) ** 2

    class Spikes(nn.Module):
        def forward(self, x):
            return Spike.apply(x)

    return nn.Sequential(nn.Linear(20, 64), Spikes(), nn.Linear(64, 10)), vectors(), nn.CrossEntropyLoss()


@healthy
def outputs_at_the_limit_of_their_last_activation():
    model = nn.Sequential(stack([20, 64, 5]), nn.ReLU())
    nn.init.constant_(model[0][-1].bias, -0.1)
    return model, vectors(), lambda output, y: functional.cross_entropy(output + 0.0, y.clamp_max(4))


@healthy
def as_many_classes_as_places_and_the_classes_last():
    model = nn.Sequential(nn.Embedding(7, 16), nn.Linear(16, 7))
    tokens = torch.randint(7, (16, 8))
    return model, (tokens[:, :-1], tokens[:, 1:]), lambda output, y: functional.cross_entropy(output.mT, y)


@pytest.mark.parametrize("size", [1e3, 1e6, 1e9])
@pytest.mark.parametrize("ignored", [-100, 9])
def test_large_first_outputs_are_not_taken_for_another_optimum(size, ignored):
    """The descent of the outputs is too short for them: it ends far from the labels."""
    torch.manual_seed(0)
    x, y = vectors()
    loss = nn.CrossEntropyLoss(ignore_index=ignored)
    found = {f.rule for f in ikkuna.preflight(stack([20, 64, 10]), (size * x, y), loss)}
    assert not found & {"wrong_optimum", "unbounded_loss"}
    found = {f.rule for f in ikkuna.preflight(stack([20, 64, 10]), (size * x, y), lambda *a: -loss(*a))}
    assert found & {"wrong_optimum", "unbounded_loss"}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name):
    torch.manual_seed(0)
    function, expected = FAULTS[name]
    assert names(*function()) == expected


def test_a_sample_with_nan_is_named():
    x, y = vectors()
    x[5, 3] = x[7, 1] = float("nan")
    (finding,) = ikkuna.preflight(stack([20, 64, 10]), (x, y), nn.CrossEntropyLoss())
    assert "2 NaN or infinite elements in 2 samples, the first of which is sample 5" in finding.message


class Looking(nn.Module):
    """A language model whose second layer looks at all positions, or at other samples."""

    def __init__(self, axis):
        super().__init__()
        self.embedding, self.first, self.axis = nn.Embedding(20, 12), nn.Linear(12, 12), axis
        self.mean, self.head = nn.Identity(), nn.Linear(12, 20)
        self.mean.forward = lambda x: x + x.mean(self.axis, keepdim=True)

    def forward(self, x):
        return self.head(self.mean(self.first(self.embedding(x))))


def test_the_module_that_mixes_positions_or_samples_is_named():
    torch.manual_seed(0)
    x = torch.randint(20, (8, 13))
    for axis, rule in ((1, "time_leak"), (0, "batch_leak")):
        found = ikkuna.preflight(Looking(axis), (x[:, :-1], x[:, 1:]), over_all_tokens)
        assert [(f.rule, f.module) for f in found] == [(rule, "mean")]
    function, _ = FAULTS["forgotten_batch_first"]
    model, batch, loss = function()
    (finding,) = ikkuna.preflight(model, batch, loss)
    assert finding.module == "rnn"


@pytest.mark.parametrize(
    ("activation", "rule", "loss"),
    [
        (nn.Softmax(1), "softmax_twice", nn.CrossEntropyLoss()),
        (nn.ReLU(), "activation_before_loss", nn.CrossEntropyLoss()),
        (nn.Sigmoid(), "sigmoid_twice", nn.BCEWithLogitsLoss()),
        (nn.Tanh(), "labels_out_of_reach", nn.MSELoss()),
    ],
)
def test_an_activation_at_the_end_is_named_if_it_is_a_module(activation, rule, loss):
    torch.manual_seed(0)
    x, y = vectors()
    y = (
        y
        if isinstance(loss, nn.CrossEntropyLoss)
        else (torch.rand(len(x), 10) > 0.5).float() * (1 + 2 * (rule == "labels_out_of_reach"))
    )
    inner = nn.Sequential(nn.Linear(20, 10), activation)

    class Function(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.unused = nn.Linear(20, 10), nn.Dropout()

        def forward(self, x):
            return activation.forward(self.linear(x))

    for model, module in ((inner, "1"), (Function(), None)):
        assert {f.rule: f.module for f in ikkuna.preflight(model, (x, y), loss)}[rule] == module


class Encoder(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.embedding, self.mask, self.head = nn.Embedding(20, 12), mask, nn.Linear(12, 20)
        self.layer = nn.TransformerEncoderLayer(12, 2, 24, 0.0, batch_first=True)

    def forward(self, x):
        return self.head(self.layer(self.embedding(x), src_mask=self.mask))


@pytest.mark.parametrize(
    ("mask", "rules"),
    [
        (torch.ones(6, 6).triu(1).bool(), []),
        (torch.full((6, 6), -math.inf).triu(1), []),
        (torch.ones(6, 6).triu(1), ["time_leak"]),
    ],
)
@pytest.mark.parametrize("enabled", [False, True])
def test_the_fast_path_of_evaluation_hides_no_later_position(mask, rules, enabled):
    """In evaluation mode it reads a mask of numbers as one of truth."""
    torch.manual_seed(0)
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(enabled)
    try:
        found = ikkuna.preflight(Encoder(mask), torch.randint(20, (8, 6)), causal=True)
        assert torch.backends.mha.get_fastpath_enabled() == enabled
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
    assert [finding.rule for finding in found] == rules


@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.parametrize("seed", [0, 1])
def test_healthy_models_have_no_finding(name, seed):
    torch.manual_seed(seed)
    model, batch, loss = HEALTHY[name]()
    found = ikkuna.preflight(model, batch, loss, torch.optim.Adam(model.parameters()))
    assert not found, str(found)
