"""Programs of the third set: losses, their arguments, and the shapes and scales in which outputs and targets meet."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.diagnosis.unseen import fault, healthy
from tests.diagnosis.unseen.programs import Program, blobs, classifier, loader, mlp, regressor
from tests.diagnosis.unseen.third_common import training


def answers(share=0.5, rows=768):
    """Twelve columns and an answer of 0 or 1, where `share` of the rows are 1."""
    inputs = torch.randn(rows, 12)
    scores = inputs[:, 0] - inputs[:, 1] * inputs[:, 2] + 0.3 * torch.randn(rows)
    return inputs, (scores > scores.quantile(1 - share)).float()


def curve(rows=768):
    """Twelve columns and one real target, as a vector of one dimension."""
    inputs = torch.randn(rows, 12)
    return inputs, inputs[:, 0] + 2 * (inputs[:, 1] * 2).sin() + 0.1 * torch.randn(rows)


def tags(rows=768):
    """Rows with several of six tags each."""
    inputs = torch.randn(rows, 12)
    return inputs, (inputs @ torch.randn(12, 6) > 1).float()


# --- classification ---------------------------------------------------------------------------------------------------


@fault(
    "loss and activation",
    "the network ends in a log-softmax over the rows of the batch (dim=0) instead of over the classes",
    "5",
    why="the exponentials of the outputs sum to 1 over each column of the batch and not over each row",
)
def log_softmax_over_the_rows():
    return classifier(nn.Sequential(*mlp(20, 5), nn.LogSoftmax(dim=0)), loader(*blobs()), loss=nn.NLLLoss(), epochs=5)


@fault(
    "loss and activation",
    "NLLLoss gets raw scores, since the log-softmax was forgotten",
    why="the loss is negative and falls without bound; the inputs of the loss are no log-probabilities",
)
def scores_without_log_softmax():
    return classifier(mlp(20, 5), loader(*blobs()), loss=nn.NLLLoss(), epochs=5)


@fault(
    "loss and activation",
    "the network ends in a sigmoid, and the loss applies another one (BCEWithLogitsLoss)",
    "5",
    why="the outputs lie between 0 and 1 and go into a loss for scores; the loss cannot fall below 0.31 and 0.69",
)
def sigmoid_twice():
    inputs, goals = answers()
    model = nn.Sequential(*mlp(12, 1), nn.Sigmoid())
    return classifier(model, loader(inputs, goals[:, None]), loss=nn.BCEWithLogitsLoss(), epochs=5)


@fault(
    "arguments of losses",
    "the weights of the classes are their shares instead of the inverse, so that the rare class counts even less",
    why="the weight that the loss gets is largest for the class with the most targets",
)
def weights_of_classes_upside_down():
    inputs, goals = answers(share=0.1)
    weight = goals.long().bincount() / len(goals)
    return classifier(mlp(12, 2), loader(inputs, goals.long()), loss=nn.CrossEntropyLoss(weight=weight), epochs=5)


@fault(
    "arguments of losses",
    "`ignore_index=0` was taken over from a task with padding, but here 0 is a class",
    why="the targets of 0 do not count in the loss, and the gradient of the output is zero in all of these rows",
)
def class_zero_is_ignored():
    return classifier(mlp(20, 5), loader(*blobs()), loss=nn.CrossEntropyLoss(ignore_index=0), epochs=5)


@fault(
    "loss of another task",
    "rows with several tags are trained by the cross entropy of one class instead of one binary loss per tag",
    why="the targets of a row sum to 0, 2 or 3, which are no probabilities of classes that exclude each other",
)
def several_tags_as_one_class():
    return classifier(mlp(12, 6), loader(*tags()), loss=nn.CrossEntropyLoss(), epochs=5)


@fault(
    "arguments of losses",
    "the soft margin loss wants targets of -1 and 1 and gets 0 and 1, so that no row of class 0 counts",
    why="for all targets of 0 the loss is log 2 and its gradient is zero, and the outputs grow for every row",
)
def targets_of_zero_in_a_margin_loss():
    inputs, goals = answers()
    return classifier(mlp(12, 1), loader(inputs, goals[:, None]), loss=nn.SoftMarginLoss(), epochs=5)


@fault(
    "numerics",
    "an entropy written by hand takes the logarithm of zero for the classes that are ruled out, and 0 times -inf is NaN",
    why="probabilities are exactly 0 where the scores were masked, and the first loss is NaN although all outputs are finite",
)
def entropy_of_an_impossible_class():
    inputs, labels = blobs()
    possible = F.one_hot(labels, 5) + torch.randint(0, 2, (768, 5)) > 0

    def objective(program, rows, goals, possible):
        shares = program.model(rows).masked_fill(~possible, float("-inf")).softmax(1)
        return -(F.one_hot(goals, 5) * shares.log()).sum(1).mean()

    return training(mlp(20, 5), loader(inputs, labels, possible), objective)


@fault(
    "numerics",
    "the branch of `torch.where` that is not taken has the root of a negative number: a gradient of NaN, a finite loss",
    why="the first loss is finite while the gradients of its backward pass are NaN",
)
def nan_from_the_branch_not_taken():
    inputs, goals = answers()

    def objective(program, rows, answer):
        hidden = program.model[0](rows)
        roots = torch.where(hidden > 0, hidden.sqrt(), torch.zeros_like(hidden))
        return F.binary_cross_entropy_with_logits(program.model[1](roots).squeeze(1), answer)

    return training(nn.Sequential(nn.Linear(12, 32), nn.Linear(32, 1)), loader(inputs, goals), objective, epochs=3)


# --- regression and shapes --------------------------------------------------------------------------------------------


@fault(
    "broadcasting",
    "outputs of shape (32, 1) meet targets of shape (32), and the difference is a 32x32 matrix",
    why="the shapes of the two inputs of the loss differ, and every output is drawn to the mean of the batch",
)
def a_column_minus_a_row():
    return regressor(mlp(12, 1), loader(*curve()), loss=lambda o, t: ((o - t) ** 2).mean(), epochs=5)


@fault(
    "reduction",
    "the loss is summed over batch and outputs while the rate was chosen for the mean, and the training diverges",
    why="the loss argument says sum; gradients are larger by the size of the batch, and the loss grows to infinity",
)
def summed_at_the_rate_of_a_mean():
    inputs, targets = curve()
    model, data = mlp(12, 1), loader(inputs, targets[:, None])
    return Program(model, nn.MSELoss(reduction="sum"), data, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), 5)


@fault(
    "arguments of losses",
    "PoissonNLLLoss takes the logarithm of the rate by default, but the network ends in a softplus and gives the rate",
    "5",
    why="the inputs of the loss are never negative, though `log_input` is true; rates below 1 cannot be predicted",
)
def rate_taken_for_its_logarithm():
    inputs, targets = curve()
    counts = torch.poisson((0.4 * targets - 1).exp())
    model = nn.Sequential(*mlp(12, 1), nn.Softplus())
    return regressor(model, loader(inputs, counts[:, None]), loss=nn.PoissonNLLLoss(), epochs=5)


@fault(
    "arguments of losses",
    "the pinball loss has prediction and target the wrong way round: it trains the tenth percentile for the ninetieth",
    knowable=False,
    why="a tenth of the targets lies below the outputs, which is right for the other quantile; the wish is not in the run",
)
def percentile_of_the_other_end():
    def pinball(outputs, targets, q=0.9):
        error = outputs - targets
        return torch.maximum(q * error, (q - 1) * error).mean()

    inputs, targets = curve()
    return regressor(mlp(12, 1), loader(inputs, targets[:, None]), loss=pinball, epochs=5)


# --- healthy ----------------------------------------------------------------------------------------------------------


@healthy("losses of one's own")
def focal_loss_on_few_positives():
    """A focal loss written by hand, on a tenth of positives; it falls to less than a half."""

    def focal(outputs, goals):
        plain = F.binary_cross_entropy_with_logits(outputs, goals, reduction="none")
        return ((1 - (-plain).exp()) ** 2 * plain).mean()

    inputs, goals = answers(share=0.1)
    return classifier(mlp(12, 1), loader(inputs, goals[:, None]), loss=focal, epochs=5)


@healthy("losses of one's own")
def likelihood_below_zero():
    """The likelihood of a Gaussian with a small spread: the loss becomes negative, and rightly so."""
    inputs = torch.randn(960, 12)
    targets = 0.3 * inputs[:, 0] + 0.02 * torch.randn(960)

    def objective(program, rows, goals):
        mean, spread = program.model(rows).unbind(1)
        return F.gaussian_nll_loss(mean, goals, spread.exp())

    return training(mlp(12, 2), loader(inputs, targets), objective)


@healthy("losses of one's own")
def sums_at_a_rate_for_sums():
    """The loss is summed, and the rate of SGD is small accordingly; the loss falls to a third or less."""
    inputs, targets = curve()
    model, data = mlp(12, 1), loader(inputs, targets[:, None])
    return Program(model, nn.MSELoss(reduction="sum"), data, torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9), 5)


@healthy("losses of one's own")
def shares_as_targets():
    """The targets are the shares of three annotators; the cross entropy falls to near the entropy of the targets."""
    inputs, labels = blobs()
    votes = torch.stack([torch.where(torch.rand(768) < 0.9, labels, torch.randint(0, 5, (768,))) for _ in range(3)])
    return classifier(mlp(20, 5), loader(inputs, F.one_hot(votes, 5).float().mean(0)), epochs=5)


@healthy("losses of one's own")
def outliers_under_a_huber_loss():
    """A few targets are far away; the Huber loss falls by more than a third, and its rest is that of the outliers."""
    inputs, targets = curve()
    targets = torch.where(torch.rand(768) < 0.03, targets + 9, targets)
    return regressor(mlp(12, 1), loader(inputs, targets[:, None]), loss=nn.HuberLoss(), epochs=6, rate=0.01)
