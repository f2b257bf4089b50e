"""Objectives of a user's own: what the graph of autograd shows of wrong ones, and that right ones are not accused."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ikkuna
from ikkuna.diagnosis.objective.graph import ObjectiveGraph, operation, terms

pytestmark = pytest.mark.filterwarnings("ignore:reduction", "ignore:Using a target size")

ROWS, WORDS, TIMES = 16, 11, 7
RULES = {
    *("loss_contract", "label_shape", "mixed_reduction", "unbounded_loss", "own_candidate", "loss_floor", "time_leak"),
    *("label_offset", "padding_in_loss", "inverted_mask", "added_mask", "viewed_axes", "one_label", "entropy_punished", "constant_result"),
    *("codes_across_samples", "mask_as_index", "trivial_optimum", "softmax_twice", "sigmoid_twice", "no_log_softmax"),
    *("labels_no_distribution", "softmax_axis", "same_sides"),
}  # fmt: skip
RIGHT, WRONG = {}, {}


def right(make):
    RIGHT[make.__name__] = make
    return make


def wrong(*rules):
    """Register a program whose findings of `RULES` are these."""

    def register(make):
        WRONG[make.__name__] = make, set(rules)
        return make

    return register


def net(inputs=8, outputs=4):
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs))


def rows(features=8):
    return torch.randn(ROWS, features)


def classes(count=4):
    return torch.randint(count, (ROWS,))


def train(model, objective, steps=54, optimizer=None):
    """Return the losses of some steps down an objective of the model."""
    optimizer = optimizer or torch.optim.Adam(model.parameters(), 1e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = objective(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def found(make, tmp_path):
    torch.manual_seed(0)
    model, objective = make()
    watched = ikkuna.watch(model, log_dir=tmp_path, backend="null")
    train(model, objective)
    watched.close()
    return [each for each in watched.findings if each.rule in RULES]


# -- terms -------------------------------------------------------------------------------------------------------------


class Variational(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = net(8, 6), net(3, 8)

    def forward(self, x):
        mean, logarithm = self.encoder(x).chunk(2, 1)
        return self.decoder(mean + torch.randn_like(mean) * (0.5 * logarithm).exp()), mean, logarithm


def variational(combined):
    def objective(model):
        x = rows()
        made, mean, logarithm = model(x)
        return combined(made, x, -0.5 * (1 + logarithm - mean.pow(2) - logarithm.exp()))

    return Variational(), objective


@right
def autoencoder_of_means():
    return variational(lambda made, x, divergence: F.mse_loss(made, x) + 0.1 * divergence.sum(1).mean())


@right
def autoencoder_of_sums():
    return variational(lambda made, x, divergence: (made - x).square().sum() + divergence.sum())


@right
def autoencoder_of_sums_divided():
    return variational(lambda made, x, divergence: F.mse_loss(made, x) + 1e-3 * divergence.sum() / ROWS)


@right
def autoencoder_with_a_small_weight_of_the_sum():
    return variational(lambda made, x, divergence: F.mse_loss(made, x) + divergence.sum() / (ROWS * 8))


@wrong("mixed_reduction")
def divergence_of_a_sum():
    return variational(lambda made, x, divergence: F.mse_loss(made, x) + divergence.sum())


@wrong("unbounded_loss")
def divergence_with_the_wrong_sign():
    return variational(lambda made, x, divergence: F.mse_loss(made, x) - 0.1 * divergence.sum(1).mean())


@right
def penalty_of_weights_that_is_a_sum():
    def objective(model):
        penalty = sum(p.square().sum() for p in model.parameters())
        return (
            F.cross_entropy(model(rows()), classes())
            + 1e-4 * penalty
            + (model[0].weight @ model[0].weight.T).abs().sum()
        )

    return net(8, 4), objective


@right
def uncertain_tasks():
    class Tasks(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.spreads = net(8, 5), nn.Parameter(torch.zeros(2))

        def forward(self, x):
            return self.body(x)

    def objective(model):
        out = model(rows())
        tasks = torch.stack([F.mse_loss(out[:, 0], torch.randn(ROWS)), F.cross_entropy(out[:, 1:], classes())])
        return (torch.exp(-model.spreads) * tasks + model.spreads).sum()

    return Tasks(), objective


@right
def physics_informed():
    def objective(model):
        x = torch.rand(ROWS, 1, requires_grad=True)
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return (slope + y).square().mean() + 100 * (model(torch.zeros(1, 1)) - 1).square().mean()

    return net(1, 1), objective


@right
def focal_and_smoothed():
    def objective(model):
        scores, labels = model(rows()), classes()
        losses = F.cross_entropy(scores, labels, reduction="none", label_smoothing=0.1)
        return ((1 - (-losses).exp()) ** 2 * losses).mean()

    return net(), objective


@right
def correntropy():
    return net(8, 1), lambda model: (1 - (-(model(rows()) - torch.randn(ROWS, 1)).square()).exp()).mean()


@wrong("label_shape")
def column_and_row():
    return net(8, 1), lambda model: (model(rows()) - torch.randn(ROWS)).square().mean()


def actor_and_critic(values_of):
    model = nn.ModuleDict({"actor": net(), "critic": net(8, 1)})

    def objective(model):
        x, rewards = rows(), torch.randn(ROWS)
        chosen = model["actor"](x).log_softmax(1).gather(1, classes()[:, None])[:, 0]
        return 0.5 * F.mse_loss(values_of(model["critic"](x)), rewards) - (chosen * rewards).mean()

    return model, objective


@wrong("label_shape")
def column_of_values_beside_a_policy():
    return actor_and_critic(lambda values: values)


@right
def row_of_values_beside_a_policy():
    return actor_and_critic(lambda values: values.squeeze(1))


@right
def pairs_of_scores():
    def objective(model):
        scores = model(rows())
        return F.softplus(scores - scores.T).mean() + ((scores - scores.T) ** 2).mean()

    return net(8, 1), objective


# -- losses of torch among others --------------------------------------------------------------------------------------


def distilled(student_of, weight=0.5):
    teacher = net().requires_grad_(False)

    def objective(model):
        x = rows()
        scores, goals = model(x), teacher(x)
        return weight * F.cross_entropy(scores, classes()) + student_of(scores, goals)

    return net(), objective


@right
def student():
    return distilled(lambda o, t: 9 * F.kl_div((o / 3).log_softmax(1), (t / 3).softmax(1), reduction="batchmean"))


@right
def student_of_logarithms():
    return distilled(lambda o, t: F.kl_div(o.log_softmax(1), t.log_softmax(1), log_target=True, reduction="batchmean"))


@right
def student_without_labels():
    return distilled(lambda o, t: (t.softmax(1) * (t.log_softmax(1) - o.log_softmax(1))).sum(1).mean(), weight=0)


@wrong("loss_contract")
def student_of_probabilities():
    return distilled(lambda o, t: F.kl_div(o.softmax(1), t.softmax(1), reduction="batchmean"))


@wrong("loss_contract")
def student_of_probabilities_and_logarithms():
    return distilled(lambda o, t: F.kl_div(o.softmax(1), t.log_softmax(1), log_target=True, reduction="batchmean"))


@wrong("no_log_softmax")
def likelihood_of_scores_beside_a_penalty():
    return net(), lambda m: F.nll_loss(m(rows()), classes()) + 0.1 * m[0].weight.abs().mean()


@wrong("sigmoid_twice")
def two_sigmoids_beside_a_penalty():
    bits = (torch.rand(ROWS, 4) > 0.5).float()
    return (
        nn.Sequential(*net(), nn.Sigmoid()),
        lambda m: F.binary_cross_entropy_with_logits(m(rows()), bits) + 0.1 * m[0].weight.abs().mean(),
    )


@right
def expected_error():
    """The product of two distributions, subtracted elementwise from a number, is no divergence."""
    return net(), lambda m: (1 - F.one_hot(classes(), 4) * m(rows()).softmax(1)).mean()


# -- policies and values -----------------------------------------------------------------------------------------------


@right
def policy_of_a_normal_distribution():
    """Rewards that are all negative make the factors of the squares negative."""

    def objective(model):
        mean = model(rows())
        choice = torch.distributions.Normal(mean, 1.0)
        actions = choice.sample()
        return -(choice.log_prob(actions).sum(1) * -torch.rand(ROWS)).mean()

    return net(), objective


@right
def clipped_policy():
    def objective(model):
        out = model(rows())
        choice, value = torch.distributions.Categorical(logits=out[:, :3]), out[:, 3]
        actions, advantage = choice.sample(), torch.randn(ROWS)
        ratio = (choice.log_prob(actions) - choice.log_prob(actions).detach() + 0.01).exp()
        gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        return -gain + 0.5 * F.mse_loss(value, torch.randn(ROWS)) - 0.01 * choice.entropy().mean()

    return net(), objective


@right
def values_of_actions():
    goal = net().requires_grad_(False)

    def objective(model):
        x, actions = rows(), classes()
        target = torch.rand(ROWS) + 0.9 * goal(rows()).max(1).values
        return F.smooth_l1_loss(model(x).gather(1, actions[:, None]).squeeze(1), target)

    return net(), objective


@right
def generator_and_critic():
    critic = net(2, 1)

    def objective(model):
        made = model(rows())
        return (
            -F.binary_cross_entropy_with_logits(critic(made), torch.zeros(ROWS, 1)) - 0.1 * critic(made).square().mean()
        )

    return net(8, 2), objective


# -- similarities ------------------------------------------------------------------------------------------------------


def two_views(scores_of):
    def objective(model):
        x = rows()
        codes = F.normalize(torch.cat([model(x), model(x + 0.1 * torch.randn_like(x))]), dim=1)
        return F.cross_entropy(scores_of(codes @ codes.T), torch.arange(2 * ROWS).roll(ROWS))

    return net(), objective


@right
def contrast_with_a_temperature():
    return two_views(lambda s: s.masked_fill(torch.eye(2 * ROWS).bool(), -1e9) / 0.1)


@right
def contrast_of_large_temperature():
    return two_views(lambda s: s.masked_fill(torch.eye(2 * ROWS).bool(), -math.inf) / 0.5)


@wrong("own_candidate")
def contrast_with_itself():
    return two_views(lambda s: s / 0.1)


@wrong("loss_floor", "own_candidate")
def contrast_multiplied_by_the_temperature():
    return two_views(lambda s: s * 0.05)


@wrong("codes_across_samples")
def contrast_of_codes_across_samples():
    def objective(model):
        one, two = (F.normalize(model(rows()), dim=0) for _ in range(2))
        return F.cross_entropy(one @ two.T / 0.1, torch.arange(ROWS))

    return net(), objective


@right
def first_of_many_candidates():
    """The right candidate is always the first, as in a contrast with a memory."""

    def objective(model):
        x, memory = rows(), F.normalize(torch.randn(32, 4), dim=1)
        one, two = F.normalize(model(x), dim=1), F.normalize(model(x + 0.1), dim=1).detach()
        scores = torch.cat([(one * two).sum(1, keepdim=True), one @ memory.T], 1)
        return F.cross_entropy(scores / 0.1, torch.zeros(ROWS, dtype=torch.long)) + 0 * one.sum()

    return net(), objective


@right
def correlations_of_features():
    def objective(model):
        one, two = (F.normalize(model(rows()), dim=0) for _ in range(2))
        return (one.T @ two - torch.eye(4)).square().sum()

    return net(), objective


@right
def images_and_texts():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.image, self.text, self.scale = net(), net(), nn.Parameter(torch.zeros(()))

        def forward(self, x, y):
            a, b = F.normalize(self.image(x), dim=1), F.normalize(self.text(y), dim=1)
            return self.scale.exp() * a @ b.T

    def objective(model):
        scores, labels = model(rows(), rows()), torch.arange(ROWS)
        return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)) / 2

    return Both(), objective


@wrong("trivial_optimum")
def twins():
    def objective(model):
        x = rows()
        one, two = (model(x + 0.1 * torch.randn_like(x)) for _ in range(2))
        return -F.cosine_similarity(one, two).mean()

    return net(), objective


@wrong("trivial_optimum")
def twins_of_squares():
    def objective(model):
        x = rows()
        return F.mse_loss(model(x), model(x + 0.1 * torch.randn_like(x)))

    return net(), objective


@right
def twins_with_a_stop():
    return net(), lambda m: -F.cosine_similarity(m(x := rows()), m(x + 0.1).detach()).mean()


@right
def twins_with_a_variance():
    def objective(model):
        x = rows()
        one, two = model(x), model(x + 0.1 * torch.randn_like(x))
        return F.mse_loss(one, two) + F.relu(1 - one.std(0)).mean() + F.relu(1 - two.std(0)).mean()

    return net(), objective


@right
def twins_of_normalised_outputs():
    def objective(model):
        x = rows()
        return F.mse_loss(model(x), model(x + 0.1 * torch.randn_like(x)))

    return nn.Sequential(*net(), nn.BatchNorm1d(4, affine=False)), objective


@right
def triplets():
    return net(), lambda m: F.triplet_margin_loss(m(x := rows()), m(x + 0.1), m(x.roll(1, 0)))


@right
def residuals_of_values():
    """Both sides of the difference have a gradient, and the reward keeps them apart."""
    return net(8, 1), lambda m: F.mse_loss(m(rows()), torch.rand(ROWS, 1) + 0.9 * m(rows()))


# -- labels and operations ---------------------------------------------------------------------------------------------


def critic_of(labels):
    def objective(model):
        scores = [model(rows()) for _ in labels]
        return sum(
            F.binary_cross_entropy_with_logits(s, torch.full_like(s, y)) for s, y in zip(scores, labels, strict=True)
        )

    return net(8, 1), objective


@wrong("one_label")
def everything_is_real():
    return critic_of([1.0, 1.0])


@right
def real_and_made():
    return critic_of([1.0, 0.0])


class Pooled(nn.Module):
    def __init__(self, scores, norm=None):
        super().__init__()
        self.body, self.score, self.head = nn.Linear(8, 12), nn.Linear(12, 1), nn.Linear(12, 4)
        self.scores, self.norm = scores, norm or nn.Identity()

    def forward(self, x):
        hidden = self.norm(self.body(x).tanh())
        return self.head((self.scores(self.score(hidden)) * hidden).sum(1))


def pooled(model):
    return model, lambda m: F.cross_entropy(m(torch.randn(ROWS, TIMES, 8)), classes())


@right
def pool_over_times():
    return pooled(Pooled(lambda scores: scores.softmax(1)))


@wrong("constant_result")
def pool_over_scores():
    return pooled(Pooled(lambda scores: scores.softmax(2)))


@wrong("constant_result")
def groups_of_one():
    return nn.Sequential(nn.Linear(8, 6), nn.GroupNorm(6, 6), nn.Linear(6, 4)), lambda m: F.cross_entropy(
        m(rows()), classes()
    )


def policy(old, bonus=-0.1):
    def objective(model):
        choice = torch.distributions.Categorical(logits=model(rows()))
        logarithms = choice.log_prob(choice.sample())
        ratio = (logarithms - old(logarithms)).exp()
        return -(ratio * torch.randn(ROWS)).mean() + bonus * choice.entropy().mean()

    return net(), objective


@right
def ratio_to_the_old_policy():
    return policy(lambda logarithms: logarithms.detach())


@wrong("constant_result")
def ratio_to_itself():
    return policy(lambda logarithms: logarithms * 1)


def preferences(make_reference):
    """Return a policy that learns which of two choices is better, beside a reference."""
    model = net()
    reference = make_reference(model)

    def objective(model):
        x, better = rows(), classes()
        worse = (better + 1) % 4
        with torch.no_grad():
            before = reference(x).log_softmax(1)
        moved = model(x).log_softmax(1) - before
        sides = [moved.gather(1, each[:, None]).squeeze(1) for each in (better, worse)]
        return -F.logsigmoid(0.1 * (sides[0] - sides[1])).mean()

    return model, objective


@right
def reference_that_stays():
    return preferences(lambda model: copy.deepcopy(model).requires_grad_(False))


@wrong("same_sides")
def reference_that_is_the_policy():
    return preferences(lambda model: model)


@wrong("entropy_punished")
def certain_actions():
    def objective(model):
        choice = torch.distributions.Categorical(logits=model(rows()))
        return -(choice.log_prob(choice.sample()) * torch.randn(ROWS)).mean() + 0.1 * choice.entropy().mean()

    return net(), objective


@right
def bonus_for_other_actions():
    def objective(model):
        scores = model(rows())
        logarithms, shares = scores.log_softmax(1), scores.softmax(1)
        taken = logarithms.gather(1, classes()[:, None]).squeeze(1)
        return -(taken * torch.randn(ROWS)).mean() + 0.1 * (shares * logarithms).sum(1).mean()

    return net(), objective


@right
def certain_predictions():
    """The entropy of samples without labels is made smaller on purpose."""

    def objective(model):
        scores = model(rows())
        return (
            F.cross_entropy(model(rows()), classes()) - 0.1 * (scores.softmax(1) * scores.log_softmax(1)).sum(1).mean()
        )

    return net(), objective


def nodes_of_a_mask(convert):
    mask, labels = torch.arange(ROWS) % 3 == 0, torch.arange(ROWS) % 4
    return net(), lambda m: F.cross_entropy(m(rows())[convert(mask)], labels[convert(mask)])


@right
def known_nodes():
    return nodes_of_a_mask(lambda mask: mask)


@right
def numbers_of_nodes():
    return nodes_of_a_mask(lambda mask: mask.nonzero().flatten())


@wrong("mask_as_index")
def mask_as_numbers():
    return nodes_of_a_mask(lambda mask: mask.long())


# -- sequences ---------------------------------------------------------------------------------------------------------


class Reader(nn.Module):
    """Attention over words, with a mask of positions (time, time) or of keys (row, time), True where a key is left out."""

    def __init__(self, outputs=WORDS, mask=None, keys=None, torchs=False):
        super().__init__()
        self.embedding, self.position = nn.Embedding(WORDS, 12), nn.Parameter(torch.randn(TIMES, 12))
        self.attention = nn.MultiheadAttention(12, 2, batch_first=True)
        self.head, self.mask, self.keys, self.torchs = nn.Linear(12, outputs), mask, keys, torchs

    def forward(self, words):
        x = self.embedding(words) + self.position
        keys = None if self.keys is None else self.keys(words)
        x = x + self.attention(x, x, x, attn_mask=self.mask, key_padding_mask=keys, need_weights=not self.torchs)[0]
        return self.head(x)


class Recurrent(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(WORDS, 12), nn.GRU(12, 12, batch_first=True, **options)
        self.head = nn.Linear(24 if options.get("bidirectional") else 12, WORDS)

    def forward(self, words):
        return self.head(self.rnn(self.embedding(words))[0])


CAUSAL = torch.ones(TIMES, TIMES).triu(1).bool()


def text(length=TIMES + 1):
    return torch.randint(1, WORDS, (ROWS, length))


def next_words(model, shift=1, sliced=False):
    def objective(model):
        words = text(TIMES + shift)
        if sliced:
            words = words[:, :TIMES]
            return F.cross_entropy(model(words)[:, :-shift].flatten(0, 1), words[:, shift:].flatten())
        return F.cross_entropy(model(words[:, :TIMES]).transpose(1, 2), words[:, shift:])

    return model, objective


@right
def language_model():
    return next_words(Reader(mask=CAUSAL))


@right
def language_model_of_slices():
    return next_words(Reader(mask=CAUSAL, torchs=True), sliced=True)


@right
def recurrent_language_model():
    return next_words(Recurrent())


@wrong("time_leak")
def no_mask():
    return next_words(Reader())


@wrong("time_leak")
def no_mask_in_the_function_of_torch():
    return next_words(Reader(torchs=True), sliced=True)


@wrong("time_leak")
def transposed_mask():
    return next_words(Reader(mask=CAUSAL.T & ~torch.eye(TIMES).bool()))


@wrong("time_leak")
def both_directions():
    return next_words(Recurrent(bidirectional=True))


@wrong("label_offset")
def shifted_twice():
    return next_words(Reader(mask=CAUSAL), shift=2, sliced=True)


@wrong("label_offset")
def not_shifted():
    return next_words(Recurrent(), shift=0)


@wrong("viewed_axes")
def view_for_a_transpose():
    model, _ = next_words(Reader(mask=CAUSAL))

    def objective(model):
        words = text()
        return F.cross_entropy(model(words[:, :-1]).reshape(ROWS, WORDS, TIMES), words[:, 1:])

    return model, objective


@right
def several_words_ahead():
    """A second head predicts the word after the next."""

    class Heads(Reader):
        def __init__(self):
            super().__init__(outputs=2 * WORDS, mask=CAUSAL)

    def objective(model):
        words = text(TIMES + 2)
        one, two = model(words[:, :TIMES]).chunk(2, -1)
        return F.cross_entropy(one.transpose(1, 2), words[:, 1:-1]) + F.cross_entropy(two.transpose(1, 2), words[:, 2:])

    return Heads(), objective


@right
def masked_words():
    def objective(model):
        words = text(TIMES)
        hidden = torch.rand(ROWS, TIMES) < 0.3
        labels = torch.where(hidden, words, -100)
        return F.cross_entropy(model(words.masked_fill(hidden, 0)).flatten(0, 1), labels.flatten())

    return Reader(), objective


@right
def autoencoder_of_words():
    class Coded(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(WORDS, 12)
            self.encoder, self.decoder = nn.GRU(12, 5, batch_first=True), nn.GRU(5, 12, batch_first=True)
            self.head = nn.Linear(12, WORDS)

        def forward(self, words):
            code = self.encoder(self.embedding(words))[1][0]
            return self.head(self.decoder(code[:, None].expand(-1, TIMES, -1))[0])

    return next_words(Coded(), shift=0)


def padded(ignored, keys, tags=4, torchs=False):
    """Tags of words of rows that end in zeros."""

    def objective(model):
        words = text(TIMES)
        words[torch.arange(TIMES) >= torch.randint(2, TIMES, (ROWS, 1))] = 0
        labels = torch.where(words == 0, ignored, words % tags)
        return F.cross_entropy(model(words).transpose(1, 2), labels)

    return Reader(outputs=tags, keys=keys, torchs=torchs), objective


@right
def tags_without_padding():
    return padded(-100, lambda words: words == 0)


@right
def tags_masked_by_hand():
    model, _ = padded(-100, lambda words: words == 0)

    def objective(model):
        words = text(TIMES)
        words[torch.arange(TIMES) >= torch.randint(2, TIMES, (ROWS, 1))] = 0
        losses = F.cross_entropy(model(words).transpose(1, 2), words % 4, reduction="none")
        return (losses * (words != 0)).sum() / (words != 0).sum()

    return model, objective


@wrong("padding_in_loss")
def tags_of_padding():
    return padded(0, lambda words: words == 0)


@wrong("inverted_mask")
def mask_of_words():
    return padded(-100, lambda words: words != 0)


@wrong("added_mask")
def mask_of_padding_as_numbers():
    return padded(-100, lambda words: (words == 0).float(), torchs=True)


@wrong("added_mask")
def mask_of_words_as_numbers():
    return padded(-100, lambda words: (words != 0).float(), torchs=True)


@right
def mask_of_large_negative_numbers():
    return padded(-100, lambda words: (words == 0) * -1e9, torchs=True)


@right
def one_is_added_to_some_scores():
    return padded(-100, lambda words: (words > WORDS // 2).float() + (words == 0) * -1e9, torchs=True)


@right
def a_mask_of_truth_in_the_function_of_torch():
    return padded(-100, lambda words: words == 0, torchs=True)


# -- the tests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RIGHT)
def test_right_objectives_are_not_accused(name, tmp_path):
    assert [str(each) for each in found(RIGHT[name], tmp_path)] == []


@pytest.mark.parametrize("name", WRONG)
def test_wrong_objectives_are_named(name, tmp_path):
    make, rules = WRONG[name]
    assert {each.rule for each in found(make, tmp_path) if each.severity != "info"} == rules


@pytest.mark.parametrize(("rate", "rules"), [(1e-3, ["same_sides"]), (1e-7, [])])
def test_sides_are_the_same_once_the_weights_have_moved(rate, rules, tmp_path):
    """The first updates of a warm-up may be lost in the rounding of the outputs."""
    torch.manual_seed(0)
    model, objective = reference_that_is_the_policy()
    with ikkuna.watch(model, log_dir=tmp_path, backend="null", verbosity=0) as handle:
        train(model, objective, optimizer=torch.optim.Adam(model.parameters(), rate))
    assert [each.rule for each in handle.findings if each.rule == "same_sides"] == rules


def test_the_module_of_an_attention_is_named(tmp_path):
    assert found(no_mask, tmp_path)[0].module == found(mask_of_words, tmp_path)[0].module == "attention"


@pytest.mark.parametrize("name", ["contrast_with_itself", "no_mask", "divergence_of_a_sum", "student_of_probabilities"])
def test_training_is_the_same_when_its_objective_is_read(name, tmp_path):
    losses = []
    for is_watched in (False, True):
        torch.manual_seed(0)
        model, objective = WRONG[name][0]()
        watched = ikkuna.watch(model, log_dir=tmp_path, backend="null") if is_watched else None
        losses.append(train(model, objective))
        if watched is not None:
            watched.close()
    assert losses[0] == losses[1]


def test_the_factors_of_terms_are_the_gradients_of_the_objective():
    """Each factor is compared with the gradient that autograd computes."""
    torch.manual_seed(0)
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    kept = []

    def term(value):
        kept.append(value)
        value.retain_grad()
        return value

    objective = (
        2 * term(x.exp()).sum(1).mean()
        - (term(x.tanh())[:, :2] / 4).sum()
        + (1 - term(x.sigmoid()).mean()) * 3
        + (term(x.square()) + torch.ones(2, 6, 3)).mean(0).sum()
        + torch.cat([term(x.sin()), torch.zeros(2, 3)]).view(-1).mean()
    )
    by_operation = {operation(each.node): each for each in terms(ObjectiveGraph([objective]))}
    objective.backward()
    assert len(by_operation) == len(kept)
    for value in kept:
        name = operation(value.grad_fn)
        gradients = value.grad[value.grad != 0]
        assert by_operation[name].low == pytest.approx(float(gradients.min()))
        assert by_operation[name].high == pytest.approx(float(gradients.max()))


# -- before the first step ---------------------------------------------------------------------------------------------


def checked(make):
    torch.manual_seed(0)
    model, objective = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = ikkuna.preflight(model, torch.zeros(ROWS), objective=lambda model, batch: objective(model))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return [each for each in found if each.severity != "info"]


@pytest.mark.parametrize("name", RIGHT)
def test_right_objectives_are_not_accused_before_the_first_step(name):
    assert [str(each) for each in checked(RIGHT[name])] == []


@pytest.mark.parametrize(
    ("layers", "objective", "rule", "module"),
    [
        ([nn.Linear(8, 4), nn.Softmax(0)], lambda m, x: m(x).square().mean(), "batch_leak", "1"),
        ([nn.Linear(8, 4), nn.Softmax(1)], lambda m, x: F.kl_div(m(x), m(x).detach()), "loss_contract", "1"),
        (
            [nn.Linear(8, 4), nn.Linear(4, 4)],
            lambda m, x: m[1](m[0](x).detach().tanh()).mean() + 0 * m(x).sum(),
            "wrong_gradient",
            "0",
        ),
        ([nn.Linear(8, 4), nn.Dropout(0.5)], lambda m, x: F.dropout(m(x)).mean().detach(), "no_gradient", None),
        ([nn.Linear(8, 4)], lambda m, x: (_ for _ in ()).throw(ValueError("no")), "first_step_runs", None),
    ],
)
def test_an_objective_is_checked_before_the_first_step(layers, objective, rule, module):
    found = {each.rule: each for each in ikkuna.preflight(nn.Sequential(*layers), rows(), objective=objective)}
    assert found[rule].module == module


def test_an_objective_that_mixes_samples_is_no_leak():
    def mixed(model, batch):
        inputs, labels = batch
        half = (inputs + inputs.roll(1, 0)) / 2
        return (F.cross_entropy(model(half), labels) + F.cross_entropy(model(half), labels.roll(1, 0))) / 2

    found = ikkuna.preflight(net(), (rows(), classes()), objective=mixed)
    assert not found
    assert "batch_leak" in found.judged


@pytest.mark.parametrize("kind", [list, tuple, lambda batch: {"inputs": batch[0], "labels": batch[1]}])
def test_an_objective_receives_the_batch_as_it_is(kind):
    received = []

    def objective(model, batch):
        received.append(batch)
        inputs, labels = batch.values() if isinstance(batch, dict) else batch
        return F.cross_entropy(model(inputs), labels)

    batch = kind((rows(), classes()))
    assert not [each for each in ikkuna.preflight(net(), batch, objective=objective) if each.severity != "info"]
    assert {type(each) for each in received} == {type(batch)}


def test_a_loss_and_an_objective_are_refused():
    with pytest.raises(ikkuna.errors.ConfigError, match="got both"):
        ikkuna.preflight(net(), rows(), nn.MSELoss(), objective=lambda m, x: m(x).mean())
    with pytest.raises(ikkuna.errors.ConfigTypeError, match="function of model and batch"):
        ikkuna.preflight(net(), rows(), objective=3)
