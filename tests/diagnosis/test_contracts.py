"""Each loss of torch is called rightly, which is never accused, and wrongly, which names the argument."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import ikkuna
from ikkuna.diagnosis.preflight_checks.contracts import CONTRACTS, findings_of, loss_calls

pytestmark = pytest.mark.filterwarnings("ignore:reduction")


def numbers(*shape, seed=0):
    """Return outputs of a network: they have a gradient."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).requires_grad_().mul(1.5)


SCORES, MORE = numbers(8, 5), numbers(8, 5, seed=1)
IMAGE = numbers(4, 5, 6, 7)
CLASSES, PIXELS = torch.arange(8) % 5, torch.arange(4 * 6 * 7).view(4, 6, 7) % 5
BITS = (MORE > 0).float().detach()
SIGNS = 2 * BITS[:, 0] - 1
SOFT = MORE.detach().softmax(1)
COLUMN, OTHERS = numbers(8, 1), numbers(8, 1, seed=1)
COUNTS = torch.arange(8.0)[:, None]
NUMBERS_OF_LABELS = torch.tensor([[3, 0, -1, -1, -1], [1, 2, 4, -1, -1]])
FRAMES = numbers(20, 4, 6)
CHARACTERS = torch.tensor([[1, 2, 3], [4, 5, 1], [2, 2, 3], [1, 3, 0]])
LENGTHS = (20, 20, 20, 20), (3, 3, 3, 2)

#: function, arguments, options
RIGHT = {
    "bits": (F.binary_cross_entropy, (SCORES.sigmoid(), BITS)),
    "soft bits": (F.binary_cross_entropy, (SCORES.sigmoid(), SOFT)),
    "bits of scores": (F.binary_cross_entropy_with_logits, (SCORES, BITS), {"pos_weight": torch.ones(5) * 30}),
    "scores behind tanh": (F.binary_cross_entropy_with_logits, (SCORES.tanh(), BITS)),
    "pairs": (F.cosine_embedding_loss, (SCORES, MORE, SIGNS)),
    "classes": (F.cross_entropy, (SCORES, CLASSES), {"weight": torch.arange(5.0), "label_smoothing": 0.2}),
    "ignored classes": (F.cross_entropy, (SCORES, CLASSES - 1), {"ignore_index": -1}),
    "classes of pixels": (F.cross_entropy, (IMAGE, PIXELS)),
    "soft classes": (F.cross_entropy, (SCORES, SOFT)),
    "soft classes of pixels": (F.cross_entropy, (IMAGE, IMAGE.detach().softmax(1))),
    "weighted samples": (F.cross_entropy, (SCORES, F.one_hot(CLASSES, 5) * torch.arange(8.0)[:, None])),
    "rewarded actions": (F.cross_entropy, (SCORES, -F.one_hot(CLASSES, 5) * torch.arange(8.0)[:, None])),
    "masked rows of soft classes": (F.cross_entropy, (SCORES, SOFT * (torch.arange(8) < 4)[:, None])),
    "one sample without a batch": (F.cross_entropy, (SCORES[0], SOFT[0])),
    "log-probabilities are scores": (F.cross_entropy, (SCORES.log_softmax(1), CLASSES)),
    "positive scores": (F.cross_entropy, (SCORES.relu(), CLASSES)),
    "half a smoothing of two classes": (F.cross_entropy, (SCORES[:, :2], CLASSES % 2), {"label_smoothing": 0.5}),
    "characters": (F.ctc_loss, (FRAMES.log_softmax(2), CHARACTERS, *LENGTHS)),
    "characters in one row": (F.ctc_loss, (FRAMES.log_softmax(2), CHARACTERS.flatten()[:11], *LENGTHS)),
    "variances": (F.gaussian_nll_loss, (COLUMN, COUNTS, OTHERS.exp())),
    "variances with a floor": (F.gaussian_nll_loss, (COLUMN, COUNTS, F.softplus(OTHERS) + 1e-6)),
    "clamped variances": (F.gaussian_nll_loss, (COLUMN, COUNTS, OTHERS.exp().clamp(min=1e-4))),
    "a fixed variance": (F.gaussian_nll_loss, (COLUMN, COUNTS, torch.full((8, 1), 1e-6))),
    "one variance": (F.gaussian_nll_loss, (COLUMN, COUNTS, 1.0)),
    "distances": (F.hinge_embedding_loss, (SCORES.abs(), 2 * BITS - 1)),
    "numbers": (F.huber_loss, (COLUMN, OTHERS.detach())),
    "divergence": (F.kl_div, (SCORES.log_softmax(1), SOFT), {"reduction": "batchmean"}),
    "divergence of logarithms": (F.kl_div, (SCORES.log_softmax(1), SOFT.log()), {"log_target": True}),
    "divergence of maps": (
        F.kl_div,
        (IMAGE.flatten(2).log_softmax(2).view_as(IMAGE), IMAGE.flatten(2).softmax(2).view_as(IMAGE).detach()),
    ),
    "reverse divergence": (F.kl_div, (SOFT.log(), SCORES.softmax(1))),
    "hard targets of a divergence": (F.kl_div, (SCORES.log_softmax(1), F.one_hot(CLASSES, 5).float())),
    "absolute errors": (F.l1_loss, (COLUMN, COUNTS)),
    "classes of hidden states": (F.linear_cross_entropy, (SCORES, numbers(3, 5), CLASSES % 3)),
    "ranks": (F.margin_ranking_loss, (COLUMN[:, 0], OTHERS[:, 0], SIGNS), {"margin": 0.1}),
    "squared errors": (F.mse_loss, (COLUMN, 1000 * COUNTS)),
    "margins": (F.multi_margin_loss, (SCORES, CLASSES)),
    "numbers of labels": (F.multilabel_margin_loss, (SCORES[:2], NUMBERS_OF_LABELS)),
    "every label": (F.multilabel_margin_loss, (SCORES[:1], torch.arange(5)[None])),
    "no label": (F.multilabel_margin_loss, (SCORES[:1], torch.full((1, 5), -1))),
    "columns": (F.multilabel_soft_margin_loss, (SCORES, BITS)),
    "likelihood": (F.nll_loss, (SCORES.log_softmax(1), CLASSES)),
    "likelihood of pixels": (F.nll_loss, (IMAGE.log_softmax(1), PIXELS)),
    "likelihood of a mixture": (F.nll_loss, ((SCORES.softmax(1) / 2 + MORE.softmax(1) / 2 + 1e-8).log(), CLASSES)),
    "likelihood in bfloat16": (F.nll_loss, (numbers(8, 500).bfloat16().log_softmax(1), CLASSES)),
    "a forbidden class": (
        F.nll_loss,
        (SCORES.masked_fill(torch.arange(5) == 4, -math.inf).log_softmax(1), CLASSES % 4),
    ),
    "counts": (F.poisson_nll_loss, (COLUMN, COUNTS)),
    "counts of rates": (F.poisson_nll_loss, (F.softplus(COLUMN), COUNTS), {"log_input": False}),
    "smooth errors": (F.smooth_l1_loss, (COLUMN, COUNTS)),
    "soft margins": (F.soft_margin_loss, (COLUMN[:, 0], SIGNS)),
    "soft margins behind tanh": (F.soft_margin_loss, (COLUMN[:, 0].tanh(), SIGNS)),
    "triplets": (F.triplet_margin_loss, (SCORES, MORE, MORE.roll(1, 0))),
    "collapsed triplets": (F.triplet_margin_loss, (torch.ones(8, 5), torch.ones(8, 5), torch.ones(8, 5))),
    "triplets of a distance": (F.triplet_margin_with_distance_loss, (SCORES, MORE, MORE.roll(1, 0))),
}

#: function, arguments, options, the severity and words of the text, and the mistake where it has a name of its own
WRONG = {
    "signs for bits": (F.binary_cross_entropy_with_logits, (SCORES, 2 * BITS - 1), {}, "warning", "from -1 to 1"),
    "percent for bits": (F.binary_cross_entropy_with_logits, (SCORES, 100 * BITS), {}, "warning", "as target"),
    "negative weight": (F.binary_cross_entropy_with_logits, (SCORES, BITS), {"pos_weight": -torch.ones(5)}, "error", "pos_weight"),
    "a negative row": (F.binary_cross_entropy, (SCORES.sigmoid(), BITS, -torch.ones(5)), {}, "warning", "as weight"),
    "sigmoid before scores": (F.binary_cross_entropy_with_logits, (SCORES.sigmoid(), BITS), {}, "error", "sigmoid", "sigmoid_twice"),
    "exchanged bits": (F.binary_cross_entropy, (SOFT, SCORES.sigmoid()), {}, "warning", "target has one"),
    "bits for pairs": (F.cosine_embedding_loss, (SCORES, MORE, BITS[:, 0]), {}, "error", "such as 0"),
    "a row and itself": (F.cosine_embedding_loss, (SCORES, SCORES, SIGNS), {}, "error", "equal"),
    "softmax before scores": (F.cross_entropy, (SCORES.softmax(1), CLASSES), {}, "error", "probabilities", "softmax_twice"),
    "one class": (F.cross_entropy, (COLUMN, torch.zeros(8).long()), {}, "error", "constant"),
    "a smoothing of 0.9": (F.cross_entropy, (SCORES, CLASSES), {"label_smoothing": 0.9}, "warning", "0.28"),
    "several labels": (F.cross_entropy, (SCORES, BITS), {}, "warning", "sums go from", "labels_no_distribution"),
    "scores of a teacher": (F.cross_entropy, (SCORES, MORE.detach()), {}, "warning", "least label", "labels_no_distribution"),
    "softmax over the batch": (F.cross_entropy, (SCORES, MORE.detach().softmax(0)), {}, "warning", "sums", "labels_no_distribution"),
    "a teacher too warm": (F.cross_entropy, (SCORES, (MORE / 1000).detach().softmax(1)), {}, "warning", "1/5"),
    "negative weight of a class": (F.cross_entropy, (SCORES, CLASSES), {"weight": torch.arange(5.0) - 1}, "error", "as weight"),
    "characters of scores": (F.ctc_loss, (FRAMES, CHARACTERS, *LENGTHS), {}, "error", "log_probs"),
    "characters of probabilities": (F.ctc_loss, (FRAMES.softmax(2), CHARACTERS, *LENGTHS), {}, "error", "gets probabilities"),
    "characters normalised over time": (F.ctc_loss, (FRAMES.log_softmax(0), CHARACTERS, *LENGTHS), {}, "error", "along axis 0"),
    "blanks as characters": (F.ctc_loss, (FRAMES.log_softmax(2), CHARACTERS, *LENGTHS), {"blank": 1}, "error", "the blank"),
    "fewer frames than characters": (F.ctc_loss, (FRAMES.log_softmax(2), CHARACTERS, (2, 2, 2, 1), LENGTHS[1]), {}, "error", "fewer"),
    "no blank between equal characters": (F.ctc_loss, (FRAMES.log_softmax(2), CHARACTERS, (3,) * 4, LENGTHS[1]), {}, "info", "fewer"),
    "logarithm as variance": (F.gaussian_nll_loss, (COLUMN, COUNTS, OTHERS.clamp(min=1e-6)), {}, "warning", "lower bound"),
    "bounded variance": (F.gaussian_nll_loss, (COLUMN, COUNTS, OTHERS.clamp(min=0.1)), {}, "warning", "0.1"),
    "rectified variance": (F.gaussian_nll_loss, (COLUMN, COUNTS, OTHERS.relu()), {}, "warning", "lower bound"),
    "bits for distances": (F.hinge_embedding_loss, (SCORES.abs(), BITS), {}, "error", "1 or -1"),
    "divergence of probabilities": (F.kl_div, (SCORES.softmax(1), SOFT), {}, "error", "gets probabilities"),
    "divergence of scores": (F.kl_div, (SCORES, SOFT), {}, "error", "above 0"),
    "divergence without a normaliser": (F.kl_div, (-SCORES.abs(), SOFT), {}, "warning", "sums"),
    "divergence from logarithms": (F.kl_div, (SCORES.log_softmax(1), SOFT.log()), {}, "error", "negative"),
    "probabilities as logarithms": (F.kl_div, (SCORES.log_softmax(1), SOFT), {"log_target": True}, "error", "above 0"),
    "divergence from several labels": (F.kl_div, (SCORES.log_softmax(1), BITS), {}, "warning", "as target"),
    "exchanged divergence": (F.kl_div, (SOFT, SCORES.softmax(1)), {}, "error", "without a gradient"),
    "hidden states": (F.linear_cross_entropy, (SCORES, MORE[:3], CLASSES % 3), {"label_smoothing": 0.9}, "warning", "smoothing"),
    "bits for ranks": (F.margin_ranking_loss, (COLUMN[:, 0], OTHERS[:, 0], BITS[:, 0]), {}, "error", "1 or -1"),
    "a rank and itself": (F.margin_ranking_loss, (COLUMN[:, 0], COLUMN[:, 0], SIGNS), {}, "error", "equal"),
    "ties of ranks": (F.margin_ranking_loss, (COLUMN[:, 0], OTHERS[:, 0], SIGNS * (torch.arange(8) > 0)), {}, "info", "such as 0"),
    "margin of one class": (F.multi_margin_loss, (COLUMN, torch.zeros(8).long()), {}, "error", "constant"),
    "columns for numbers": (F.multilabel_margin_loss, (SCORES, BITS.long()), {}, "error", "twice, all of them 0 or 1"),
    "numbers behind the end": (F.multilabel_margin_loss, (SCORES[:1], torch.tensor([[3, -1, 2, -1, -1]])), {}, "warning", "behind"),
    "numbers for columns": (F.multilabel_soft_margin_loss, (SCORES[:2], NUMBERS_OF_LABELS.float()), {}, "warning", "outside"),
    "sigmoid before columns": (F.multilabel_soft_margin_loss, (SCORES.sigmoid(), BITS), {}, "error", "sigmoid", "sigmoid_twice"),
    "likelihood of scores": (F.nll_loss, (SCORES, CLASSES), {}, "error", "above 0", "no_log_softmax"),
    "likelihood of probabilities": (F.nll_loss, (SCORES.softmax(1), CLASSES), {}, "error", "gets probabilities", "no_log_softmax"),
    "likelihood along another axis": (F.nll_loss, (IMAGE.log_softmax(-1), PIXELS), {}, "error", "classes are along", "no_log_softmax"),
    "negative counts": (F.poisson_nll_loss, (COLUMN, COUNTS - 4), {}, "error", "from -4"),
    "exponential twice": (F.poisson_nll_loss, (COLUMN.exp(), COUNTS), {}, "error", "result of exp"),
    "negative rates": (F.poisson_nll_loss, (COLUMN, COUNTS), {"log_input": False}, "error", "negative"),
    "bits for soft margins": (F.soft_margin_loss, (SCORES, BITS), {}, "error", "1 or -1"),
    "sigmoid before soft margins": (F.soft_margin_loss, (COLUMN[:, 0].sigmoid(), SIGNS), {}, "warning", "sigmoid"),
    "the anchor as positive": (F.triplet_margin_loss, (SCORES, SCORES, MORE), {}, "error", "positive"),
    "the anchor as negative": (F.triplet_margin_loss, (SCORES, MORE, SCORES), {}, "error", "negative"),
    "the positive as negative": (F.triplet_margin_with_distance_loss, (SCORES, MORE, MORE), {}, "error", "negative"),
}  # fmt: skip


def found_in(function, args, kwargs):
    """Return the findings of a call."""
    with loss_calls() as calls:
        function(*args, **kwargs)
    return findings_of(calls)


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_call_is_not_accused(name):
    function, args, *options = RIGHT[name]
    assert found_in(function, args, dict(*options)) == []


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_named_with_its_argument(name):
    function, args, kwargs, severity, words, *rule = WRONG[name]
    [finding] = found_in(function, args, kwargs)
    assert (finding.rule, finding.severity) == (*(rule or ["loss_contract"]), severity)
    assert f"{function.__name__} wants" in finding.message
    assert words in finding.message


def test_every_loss_of_torch_has_a_contract_and_a_right_call():
    losses = {f for name, f in vars(F).items() if name.endswith(("_loss", "cross_entropy")) or name == "kl_div"}
    losses.add(F.binary_cross_entropy_with_logits)
    assert set(CONTRACTS) == losses
    assert {call[0] for call in RIGHT.values()} == losses


def test_every_requirement_is_violated_by_a_wrong_call():
    violated = set()
    for function, args, kwargs, *_ in WRONG.values():
        with loss_calls() as calls:
            function(*args, **kwargs)
        for requirement in CONTRACTS[function]:
            value = calls[0].arguments.get(requirement.argument)
            if value is not None and requirement.judge(calls[0], value):
                violated.add(requirement)
    assert violated == {requirement for each in CONTRACTS.values() for requirement in each}


SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 9), SHAPES, st.integers(0, 10**6), st.sampled_from([0.01, 1.0, 30.0]), st.booleans())
def test_losses_of_random_shapes_and_scales_are_not_accused(classes, shape, seed, scale, is_half):
    dtype = torch.bfloat16 if is_half else torch.float32
    shape = [shape[0], classes, *shape[1:]]
    scores, others = (scale * numbers(*shape, seed=seed + i).to(dtype) for i in range(2))
    labels = others.detach().argmax(1)
    signs = torch.where(others.detach() > 0, 1.0, -1.0)
    calls = [
        (F.cross_entropy, scores, labels),
        (F.nll_loss, scores.log_softmax(1), labels),
        (F.binary_cross_entropy_with_logits, scores, others.detach().sigmoid()),
        (F.kl_div, scores.log_softmax(1), F.softmax(others.detach(), 1)),
        (F.soft_margin_loss, scores, signs.to(dtype)),
        (F.poisson_nll_loss, scores, others.detach().abs().round()),
        (F.hinge_embedding_loss, scores.abs(), signs.to(dtype)),
    ]
    for function, *args in calls:
        assert found_in(function, args, {}) == []


def test_uniform_labels_of_a_second_term_regularise():
    uniform = torch.full((8, 5), 0.2)
    with loss_calls() as calls:
        F.cross_entropy(SCORES, CLASSES)
        F.cross_entropy(MORE, uniform)
    assert findings_of(calls) == []
    assert [finding.rule for finding in findings_of(calls[1:])] == ["loss_contract"]


# -- where calls are seen


class Trained(nn.Module):
    """A model that computes its loss."""

    def __init__(self, last):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 5), last)

    def forward(self, x, labels=None):
        scores = self.body(x)
        return (scores if labels is None else F.nll_loss(scores, labels)), scores


X = numbers(8, 4).detach()


def rules(findings):
    return {finding.rule: finding for finding in findings}


@pytest.mark.parametrize("last", [nn.LogSoftmax(1), nn.Softmax(1)])
def test_a_loss_in_the_model_is_seen_before_the_first_step(last):
    found = rules(ikkuna.preflight(Trained(last), {"x": X, "labels": CLASSES}))
    assert ("no_log_softmax" in found) == isinstance(last, nn.Softmax)


@pytest.mark.parametrize(
    "loss",
    [
        nn.KLDivLoss(reduction="batchmean"),
        lambda y, t: F.kl_div(y, t, reduction="batchmean") + y.square().mean(),
        lambda y, t: nn.KLDivLoss(reduction="batchmean")(input=y, target=t),
    ],
)
def test_modules_functions_and_sums_are_seen(loss, tmp_path):
    model = nn.Sequential(nn.Linear(4, 5), nn.Softmax(1))
    before = rules(ikkuna.preflight(model, (X, SOFT), loss))["loss_contract"]
    with ikkuna.watch(model, loss, log_dir=tmp_path, verbosity=0) as watched:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(2):
            watched.loss(model(X), SOFT).backward()
            optimizer.step()
    live = rules(watched.findings)["loss_contract"]
    assert (live.message, live.advice, live.step) == (before.message, before.advice, 0)


@pytest.mark.parametrize(
    ("loss", "args", "kwargs", "words"),
    [
        (nn.MarginRankingLoss(), (COLUMN[:, 0], OTHERS[:, 0], BITS[:, 0]), {}, "margin_ranking_loss wants 1 or -1"),
        (nn.GaussianNLLLoss(), (COLUMN, COUNTS), {"var": OTHERS.clamp(min=1e-3)}, "lower bound of 0.001"),
        (nn.TripletMarginLoss(), (SCORES,), {"negative": MORE, "positive": SCORES}, "other rows than positive"),
        (nn.PoissonNLLLoss(), (COLUMN.exp(), COUNTS), {}, "result of exp"),
    ],
)
def test_a_loss_of_several_outputs_is_seen_in_training(loss, args, kwargs, words, tmp_path):
    model = nn.Linear(4, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with ikkuna.watch(model, loss, log_dir=tmp_path, verbosity=0) as watched:
        (watched.loss(*args, **kwargs) + model(X).square().mean()).backward(retain_graph=True)
        optimizer.step()
        model(X).sum().backward()
        optimizer.step()
    assert words in rules(watched.findings)["loss_contract"].message


def test_a_compiled_loss_is_left_as_it_is():
    loss = torch.compile(nn.KLDivLoss(reduction="batchmean"), backend="eager")
    found = ikkuna.preflight(nn.Sequential(nn.Linear(4, 5), nn.LogSoftmax(1)), (X, SOFT), loss)
    assert not [finding for finding in found if finding.severity != "info"]
