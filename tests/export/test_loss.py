"""The loss of every kind of loop is shown, and equals the figure that the loop computes itself."""

import logging
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ikkuna
from ikkuna.errors import ConfigError, ConfigTypeError
from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import (
    ConstantPredictionSubscriber,
    LossSubscriber,
    NormSubscriber,
    PerplexitySubscriber,
    PredictionSubscriber,
    TrainAccuracySubscriber,
)
from ikkuna.testing import RecordingBackend

X, Y = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])


class Watched:
    """Models under an exporter, and the losses shown, by name and step."""

    def __init__(self, *models, loss=None, subscribers=(), **options):
        self.backend = RecordingBackend()
        self.exporter = Exporter(message_bus=MessageBus("loss"), on_error="raise", **options)
        for model in models:
            self.exporter.add_modules(model)
        if loss is not None:
            self.exporter.set_loss(loss)
        for make in subscribers or (LossSubscriber,):
            self.exporter.message_bus.register_subscriber(make(backend=self.backend))

    def shown(self, kind="loss", name=None):
        self.exporter.close()
        return {s: value for series, value, s in self.backend.values if (series.kind, series.name) == (kind, name)}


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


def train(model, loss_of, steps=3, scaler=None):
    """Train, and return the losses of the loop."""
    optimizer, losses = sgd(model), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model)
        (loss if scaler is None else scaler.scale(loss)).backward()
        (optimizer if scaler is None else scaler).step(*([] if scaler is None else [optimizer]))
        if scaler is not None:
            scaler.update()
        losses.append(loss.item())
    return dict(enumerate(losses))


def functional(model):
    return F.cross_entropy(model(X), Y)


def test_functional_loss():
    model = network()
    watched = Watched(model)
    expected = train(model, functional)
    assert watched.shown() == pytest.approx(expected, rel=1e-7)


def test_training_is_bit_identical_and_the_graph_is_freed():
    alone, model = network(), network()
    watched = Watched(model)
    freed = []

    def loss_of(model):
        loss = functional(model)
        loss.grad_fn.register_hook(lambda *_: None)
        import weakref

        weakref.finalize(loss, freed.append, None)
        return loss

    assert train(alone, functional) == train(model, loss_of)
    assert all(map(torch.equal, alone.parameters(), model.parameters()))
    assert len(freed) == 3
    watched.exporter.close()


@pytest.mark.parametrize("divided", [True, False])
def test_accumulation_shows_the_sum_of_what_backward_was_called_on(divided):
    model, expected = network(), {}
    watched, optimizer = Watched(model), sgd(network())
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        for part in range(2):
            loss = F.cross_entropy(model(X[part::2]), Y[part::2]) / (2 if divided else 1)
            loss.backward()
            expected[step] = expected.get(step, 0.0) + loss.item()
        optimizer.step()
    assert watched.shown() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("micro", [1, 2])
def test_gradient_scaler_is_unscaled_from_the_first_step_on(fused, micro):
    model, expected = network(), {}
    watched = Watched(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(5):
        optimizer.zero_grad()
        for part in range(micro):
            loss = F.cross_entropy(model(X[part::micro]), Y[part::micro]) / micro
            scaler.scale(loss).backward()
            expected[step] = expected.get(step, 0.0) + loss.item()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 4096.0
    assert watched.shown() == pytest.approx(expected, rel=1e-6)


def test_a_step_that_a_scaler_skips_shows_no_loss():
    model = network()
    watched, optimizer = Watched(model), sgd(model)
    scaler, expected = torch.amp.GradScaler("cpu", init_scale=4.0), []
    for step in range(4):
        optimizer.zero_grad()
        loss = functional(model) * (float("inf") if step == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        expected += [] if step == 1 else [loss.item()]
    assert list(watched.shown().values()) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("every", [1, 4])
def test_the_loss_behind_cleared_gradients_of_its_terms(given, every):
    # the weights of the terms are computed from their gradients, as for physics-informed networks
    model, criterion, losses, rates = network(), nn.CrossEntropyLoss(), {}, {}
    watched = Watched(
        model,
        loss=criterion if given else None,
        subscribers=[
            lambda **o: LossSubscriber(every=every, **o),
            lambda **o: TrainAccuracySubscriber(every=every, **o),
        ],
    )
    optimizer = sgd(model)
    for step in range(12):
        outputs = model(X)
        term, penalty = criterion(outputs, Y), outputs.square().mean()
        for _ in range(2 if step % 3 == 2 else 0):
            optimizer.zero_grad()
            (3 * term).backward(retain_graph=True)
        optimizer.zero_grad()
        loss = term if given else term + 0.1 * penalty
        loss.backward()
        optimizer.step()
        losses[step], rates[step] = loss.item(), (outputs.argmax(1) == Y).double().mean().item()
    shown = watched.shown()
    assert shown == pytest.approx({step: losses[step] for step in range(0, 12, every)}, rel=1e-6)
    assert watched.shown("train_accuracy") == pytest.approx({step: rates[step] for step in range(0, 12, every)})


def test_closure_shows_the_last_evaluation():
    model, evaluations, expected = network(), [], {}
    watched = Watched(model)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = functional(model)
        loss.backward()
        evaluations.append(loss.item())
        return loss

    for step in range(3):
        optimizer.step(closure)
        expected[step] = evaluations[-1]
    assert len(evaluations) > 3
    assert watched.shown() == pytest.approx(expected, rel=1e-6)


class OfOthers:
    """Another model, of which a loss module computes losses as well."""

    def __init__(self):
        torch.manual_seed(2)
        self.model = nn.Linear(3, 4)
        self.optimizer = sgd(self.model)

    def train(self, loss):
        self.optimizer.zero_grad()
        loss(self.model(X), Y).backward()
        self.optimizer.step()

    def ask(self, loss):
        with torch.no_grad():
            loss(self.model(X), Y)

    def prepare(self, loss):
        """The backward follows later."""
        self.waiting = loss(self.model(X), Y)


@pytest.mark.parametrize(
    ("how", "as_in"),
    [
        *((how, as_in) for how in ("train", "ask", "prepare") for as_in in ("flat", "whole", "in checkpoint")),
        *(("train", "compiled"), ("prepare", "compiled")),  # nothing shows whose a call is that has no graph
    ],
)
def test_the_loss_of_another_model_through_the_same_module_does_not_count(how, as_in):
    model, loss, others = network(), nn.CrossEntropyLoss(), OfOthers()
    optimizer, expected = sgd(model), {}
    called = torch.compile(model, backend="eager") if as_in == "compiled" else model
    watched = Watched(called, loss=loss, subscribers=(LossSubscriber, TrainAccuracySubscriber))

    def outputs():
        if as_in == "in checkpoint":
            return torch.utils.checkpoint.checkpoint(model, X.clone().requires_grad_(), use_reentrant=False)
        return called(X).view(-1, 4) if as_in == "flat" else called(X)

    def step(number):
        for place in ("before", "between", "behind", "after the backward", "after the step"):
            if place == "between":
                made = outputs()
            elif place == "behind":
                value = loss(made, Y)
            elif place == "after the backward":
                value.backward()
            elif place == "after the step":
                optimizer.step()
            getattr(others, how)(loss)
            optimizer.zero_grad() if place == "before" else None
        expected[number] = value.item(), (made.argmax(1) == Y).double().mean().item()

    for number in range(3):
        step(number)
    assert watched.shown() == pytest.approx({n: value for n, (value, _) in expected.items()}, rel=1e-6)
    accuracies = watched.shown("train_accuracy")
    assert accuracies == pytest.approx({n: value for n, (_, value) in expected.items()})


@pytest.mark.parametrize("how", ["train", "ask", "prepare"])
def test_the_loss_of_another_model_does_not_count_beside_models_that_the_loop_calls(how):
    layers, loss, others, expected = network(), nn.CrossEntropyLoss(), OfOthers(), {}
    model = nn.ModuleDict({"encoder": layers[:2], "decoder": layers[2:]})
    watched, optimizer = Watched(model, loss=loss, subscribers=(LossSubscriber, TrainAccuracySubscriber)), sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        getattr(others, how)(loss)
        outputs = model["decoder"](model["encoder"](X))
        getattr(others, how)(loss)
        value = loss(outputs, Y)
        with torch.no_grad():
            loss(outputs, Y)  # a figure of the model
        getattr(others, how)(loss)
        value.backward()
        optimizer.step()
        expected[step] = value.item(), (outputs.argmax(1) == Y).double().mean().item()
    del expected[0]  # shows that the model is never called as a whole
    assert watched.shown() == pytest.approx({step: value for step, (value, _) in expected.items()}, rel=1e-6)
    accuracies = watched.shown("train_accuracy")
    assert accuracies == pytest.approx({step: value for step, (_, value) in expected.items()})


def test_the_loss_of_a_model_between_others_is_its_own():
    # what comes before the watched model or behind it has parameters of its own, and so has a server that gets detached values
    before, model, behind = nn.Linear(3, 3), network(), nn.Linear(4, 4)
    for make, train_also in (
        (lambda: behind(model(before(X))), (before, behind)),
        (lambda: behind(GraphOfItsOwn.apply(before(X), model)), (before, behind)),
        (lambda: split(model, behind), (behind,)),
        (lambda: frozen(model, behind), (behind,)),
    ):
        loss, optimizers, expected = nn.CrossEntropyLoss(), [sgd(each) for each in (model, *train_also)], []
        watched = Watched(model, loss=loss)
        for _ in range(3):
            result = make()
            output, after = result if isinstance(result, tuple) else (result, lambda: None)
            value = loss(output, Y)
            (3 * value).backward()  # which is shown if the module's call is not
            after()
            for optimizer in optimizers:
                optimizer.step()
            expected.append(value.item())
        assert list(watched.shown().values()) == pytest.approx(expected, rel=1e-6)
        model.requires_grad_(True)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_loss_module_that_only_shows_a_figure_of_the_model_counts(is_late):
    model, loss = network(), nn.CrossEntropyLoss()
    optimizer, expected, objectives = sgd(model), [], []
    watched = Watched(model, loss=loss)
    for _ in range(4):
        outputs = model(X)
        objective = F.cross_entropy(outputs, Y, label_smoothing=0.5)
        if is_late:
            objective.backward()
        with torch.no_grad():
            expected.append(loss(outputs.detach().view(-1, 4), Y).item())
        if not is_late:
            objective.backward()
        optimizer.step()
        objectives.append(objective.item())
    assert list(watched.shown(name="objective").values()) == pytest.approx(objectives[is_late:], rel=1e-6)
    if is_late:  # before the first step it is not known that the module is called behind the backward
        expected[0] = objectives[0]
    assert list(watched.shown().values()) == pytest.approx(expected, rel=1e-6)


class GraphOfItsOwn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, model):
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = model(ctx.x)
        return ctx.y.detach().clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.y.backward(gradient)
        return ctx.x.grad, None


def split(client, server):
    """The server computes gradients of what the client sends, from which the client goes on."""
    sent = client(X)
    received = sent.detach().requires_grad_()
    return server(received), lambda: sent.backward(received.grad)


def frozen(features, head):
    features.requires_grad_(False)
    return head(features(X))


@pytest.mark.parametrize("watched_as", ["whole", "parts", "discriminator"])
def test_two_losses(watched_as):
    """Each optimizer has its own loss: ``loss``, and ``loss/1``; a single network has its own."""
    torch.manual_seed(0)
    generator, discriminator = nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    whole = nn.ModuleDict({"g": generator, "d": discriminator})
    models = {"whole": (whole,), "parts": (("g", generator), ("d", discriminator)), "discriminator": (discriminator,)}
    watched, of_discriminator, of_generator = Watched(*models[watched_as]), [], []
    of_g, of_d = sgd(generator), sgd(discriminator)
    for _ in range(4):
        real, fake = torch.randn(4, 3), generator(torch.randn(4, 2))
        of_d.zero_grad()
        losses = [F.softplus(-discriminator(real)).mean(), F.softplus(discriminator(fake.detach())).mean()]
        for loss in losses:
            loss.backward()
        of_d.step()
        of_discriminator.append(sum(losses).item())
        of_g.zero_grad()
        loss = F.softplus(-discriminator(fake)).mean()
        loss.backward()
        of_g.step()
        of_generator.append(loss.item())
    shown, other = list(watched.shown().values()), list(watched.shown(name="1").values())
    # a whole that is never called is recognised by its first step
    missing = 1 if watched_as == "whole" else 0
    assert shown == pytest.approx(of_discriminator[missing:], rel=1e-6)
    assert other == pytest.approx([] if watched_as == "discriminator" else of_generator, rel=1e-6)


def test_another_optimizer_of_the_same_parameters_has_the_same_loss():
    model = network()
    watched = Watched(model)
    expected = [*train(model, functional, 2).values(), *train(model, functional, 2).values()]
    assert list(watched.shown().values()) == pytest.approx(expected, rel=1e-6)


def test_two_optimizers_after_one_backward_have_one_loss():
    model = network()
    watched, expected = Watched(model), {}
    optimizers = sgd(model[0]), sgd(model[2])
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = functional(model)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        expected[step] = loss.item()
    assert watched.shown() == pytest.approx(expected, rel=1e-6)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of the compiler itself
@pytest.mark.parametrize("what", ["loss", "model", "both"])
@pytest.mark.parametrize("module", [False, True], ids=["found", "set_loss"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_loss(what, module, backend):
    torch.compiler.reset()
    model, loss_function = network(), nn.CrossEntropyLoss()
    watched = Watched(model, loss=loss_function if module else None)
    if what == "model":
        compiled = torch.compile(model, backend=backend)
        expected = train(model, lambda _: loss_function(compiled(X), Y))
    elif what == "loss":
        compiled = torch.compile(loss_function, backend=backend)
        expected = train(model, lambda model: compiled(model(X), Y))
    else:
        compiled = torch.compile(lambda x, y: loss_function(model(x), y), backend=backend)
        expected = train(model, lambda _: compiled(X, Y))
    assert watched.shown() == pytest.approx(expected, rel=1e-6)


def test_gradient_penalties_and_attacks_are_no_losses():
    model, expected = network(), {}
    watched, optimizer = Watched(model), sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        x = X.clone().requires_grad_()
        penalty = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0].square().mean()
        loss = functional(model) + 0.1 * penalty
        loss.backward()
        optimizer.step()
        expected[step] = loss.item()
    assert watched.shown() == pytest.approx(expected, rel=1e-6)


def test_gradients_of_the_users_own_are_no_loss(caplog):
    """``tensor.backward(gradient)`` starts from several numbers; one line says that there is no loss."""
    model = network()
    watched, optimizer = Watched(model), sgd(model)
    for _ in range(3):
        optimizer.zero_grad()
        model(X).backward(torch.ones(8, 4))
        optimizer.step()
    assert watched.shown() == {}
    assert caplog.text.count("the loss cannot be seen") == 1


def test_a_model_that_trains_in_evaluation_mode_is_not_said_to_have_no_loss(caplog):
    """Its first step seems to be that of a model that is never called as a whole, so the loss is known from the second one on."""
    model, loss = nn.Linear(3, 4).eval(), nn.CrossEntropyLoss()
    watched = Watched(model, loss=loss)
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for _ in range(5):
        optimizer.zero_grad()
        value = loss(model(X), Y)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert watched.shown() == pytest.approx(dict(enumerate(losses[1:], 1)))
    assert "cannot be seen" not in caplog.text


def test_losses_with_weights_and_several_roots():
    """``torch.autograd.backward`` of several scalars, and with a gradient, is the weighted sum."""
    model, expected = network(), {}
    watched, optimizer = Watched(model), sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        first, second = F.cross_entropy(model(X), Y), model(X).square().mean()
        torch.autograd.backward([first, second], [None, torch.tensor(0.5)])
        optimizer.step()
        expected[step] = first.item() + 0.5 * second.item()
    assert watched.shown() == pytest.approx(expected, rel=1e-6)


def test_checkpoints():
    """A backward inside a backward is not the loop's own."""
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self, reentrant):
            super().__init__()
            self.net, self.reentrant = network(), reentrant

        def forward(self, x):
            return checkpoint(self.net, x, use_reentrant=self.reentrant)

    class Segments(Checkpointed):
        def forward(self, x):
            for layer in (*self.net, nn.Identity()):
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
            return x

    subscribers = (
        LossSubscriber,
        TrainAccuracySubscriber,
        lambda backend: NormSubscriber("layer_gradients", backend=backend),
    )
    for reentrant in (False, True):
        for make in (Checkpointed, Segments):
            model = make(reentrant)
            watched, x = Watched(model, subscribers=subscribers), X.clone().requires_grad_()
            expected = train(model, lambda model, x=x: F.cross_entropy(model(x), Y))
            assert watched.shown() == pytest.approx(expected, rel=1e-6)
            assert len(watched.shown("train_accuracy")) == 3


@pytest.mark.parametrize(
    ("of", "is_shown"),
    [
        (lambda loss, model: sum(loss(model(X[:n]), Y[:n]) for n in (3, 5, 8)), True),
        (lambda loss, model: loss(model(X), Y) + 0.3 * model[0].weight.square().sum(), True),
        (lambda loss, model: loss(model(X), Y), False),
    ],
    ids=["several calls", "penalty", "one call"],
)
def test_what_backward_is_called_on_is_shown_beside_the_loss_module_where_it_differs(of, is_shown):
    model, loss = network(), nn.CrossEntropyLoss()
    watched = Watched(model, loss=loss, subscribers=(LossSubscriber, PerplexitySubscriber))
    seen = []
    loss.register_forward_hook(lambda module, args, output: seen.append((output.item(), len(args[1]))))
    expected = train(model, lambda model: of(loss, model), 1)
    mean = sum(value * count for value, count in seen) / sum(count for _, count in seen)
    assert watched.shown() == pytest.approx({0: mean}, rel=1e-6)
    assert watched.shown(name="objective") == pytest.approx(expected if is_shown else {}, rel=1e-6)
    assert watched.shown("perplexity") == pytest.approx({0: math.exp(mean)}, rel=1e-6)
    assert watched.shown("perplexity", "objective") == {}


# -- functions given by the user --------------------------------------------------------------------------------------


class Adjoint(torch.autograd.Function):
    """Solves an equation without a graph, and computes gradients inside the backward, as ``odeint_adjoint`` does."""

    @staticmethod
    def forward(ctx, field, x, *parameters):
        ctx.field = field
        ctx.save_for_backward(x)
        return x + field(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            found = torch.autograd.grad(x + ctx.field(x), (x, *ctx.field.parameters()), gradient)
        return None, *found


def adjoint(model):
    return F.cross_entropy(Adjoint.apply(model, X, *model.parameters()), Y % 3)


def differentiable_inner_steps(model):
    """As `higher` and `torchopt` do: the loss is that of weights which are no leaves."""
    weights = dict(model.named_parameters())
    inner = F.cross_entropy(torch.func.functional_call(model, weights, (X[:4],)), Y[:4] % 3)
    gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
    weights = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
    return F.cross_entropy(torch.func.functional_call(model, weights, (X[4:],)), Y[4:] % 3)


def test_the_loss_after_differentiable_inner_steps():
    """It is what the loop calls ``backward()`` on; the losses of the inner steps are none."""
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
    watched = Watched(model)
    expected = train(model, differentiable_inner_steps, steps=4)
    assert watched.shown() == pytest.approx(expected, rel=1e-6)


def test_a_loss_behind_an_adjoint_is_not_seen_and_one_line_says_so(caplog):
    """The forward calls the model without a graph, so that the loss is not seen; its steps count."""
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
    watched = Watched(model)
    train(model, adjoint, steps=4)
    assert watched.shown() == {}
    assert watched.exporter.health().steps == 4
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert line.startswith("the loss cannot be seen")


def test_a_function_is_called_through_what_set_loss_returns():
    model, subscribers = network(), (LossSubscriber, TrainAccuracySubscriber)
    watched = Watched(model, subscribers=subscribers)
    loss_function = watched.exporter.set_loss(F.cross_entropy)
    assert watched.exporter.loss is loss_function
    accuracy = {}

    def loss_of(model):
        accuracy[len(accuracy)] = (model(X).argmax(1) == Y).float().mean().item()
        return loss_function(model(X), Y)

    expected = train(model, loss_of)
    assert watched.shown() == pytest.approx(expected, rel=1e-6)
    assert watched.shown("train_accuracy") == pytest.approx(accuracy)


@pytest.mark.parametrize("given", [None, F.cross_entropy], ids=["not set", "set"])
def test_a_function_that_saves_no_labels_shows_the_loss_and_says_that_labels_are_unknown(given, caplog):
    model = network()
    watched = Watched(model, loss=given, subscribers=(LossSubscriber, TrainAccuracySubscriber))
    expected = train(model, lambda model: (model(X) - F.one_hot(Y)).abs().mean())
    assert watched.shown() == pytest.approx(expected, rel=1e-6)
    assert caplog.text.count("the labels cannot be seen") == 1
    assert watched.shown("train_accuracy") == {}


# -- labels of functional losses --------------------------------------------------------------------------------------

PADDED = torch.tensor([0, 1, 0, 2, 0, 0, 3, 1])
PICTURE = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(4))


class Padded(nn.Module):
    """A loss of the user's own, which does not say which labels it leaves out."""

    def forward(self, outputs, labels):
        return F.cross_entropy(outputs, labels, ignore_index=0)


FUNCTIONAL = {
    "plain": lambda z, y: F.cross_entropy(z, y),
    "nll": lambda z, y: F.nll_loss(F.log_softmax(z, 1), y),
    "ignored": lambda z, y: F.cross_entropy(z, y, ignore_index=0),
    "sum": lambda z, y: F.cross_entropy(z, y, ignore_index=0, reduction="sum") / 4,
    "smoothed": lambda z, y: F.cross_entropy(z, y, ignore_index=0, label_smoothing=0.1, weight=torch.arange(4.0)),
    "composed": lambda z, y: 0.5 * F.cross_entropy(z, y, ignore_index=0) + 0.1 * F.mse_loss(z, torch.zeros(8, 4)),
    "sequences": lambda z, y: F.cross_entropy(z.view(2, 4, 4).mT, y.view(2, 4), ignore_index=0),
    "images": lambda z, y: F.cross_entropy(z.view(2, 2, 2, 4).movedim(-1, 1), y.view(2, 2, 2), ignore_index=0),
    "module": lambda z, y: nn.CrossEntropyLoss(ignore_index=0)(z, y),
    "probabilities": lambda z, y: F.cross_entropy(z, F.one_hot(y, 4).float()),
}


@pytest.mark.parametrize("kept", [False, True], ids=["dropped", "kept"])
@pytest.mark.parametrize("name", FUNCTIONAL)
def test_functional_losses_give_outputs_labels_and_what_is_ignored(name, kept):
    """Also if the outputs are gone when ``backward()`` is called; their scale is unknown then."""
    model, valid, outputs = network(), slice(None), []
    watched = Watched(model, subscribers=(TrainAccuracySubscriber, PredictionSubscriber))
    accuracies, entropies, magnitudes = {}, {}, {}
    valid = PADDED >= 0 if name in ("plain", "nll", "probabilities") else PADDED != 0

    def loss_of(model):
        z = model(X)
        outputs[:] = [z] if kept else []
        step = len(accuracies)
        accuracies[step] = (z.argmax(1) == PADDED)[valid].float().mean().item()
        entropies[step] = F.cross_entropy(z[valid], PADDED[valid]).item()
        magnitudes[step] = z[valid].abs().max().item()
        return FUNCTIONAL[name](z, PADDED)

    train(model, loss_of)
    assert watched.shown("train_accuracy") == pytest.approx(accuracies)
    if name != "probabilities":
        assert watched.shown("output_cross_entropy") == pytest.approx(entropies, rel=1e-4)
        assert set(watched.shown("label_count").values()) == {int(valid.sum())}
    if name not in ("sequences", "images", "probabilities", "composed"):
        assert watched.shown("output_magnitude") == (pytest.approx(magnitudes, rel=1e-6) if kept else {})


@pytest.mark.parametrize(
    ("loss", "labels", "is_of_classes"),
    [
        (F.mse_loss, torch.randn(8, 4, generator=torch.Generator().manual_seed(5)), False),
        (F.smooth_l1_loss, torch.randn(8, 4, generator=torch.Generator().manual_seed(5)), False),
        (F.binary_cross_entropy_with_logits, F.one_hot(Y, 4).float(), True),
        (F.binary_cross_entropy_with_logits, torch.ones(8, 4), False),
    ],
)
def test_labels_that_are_numbers_have_an_accuracy_only_if_they_are_probabilities(loss, labels, is_of_classes):
    model, means = network(), []

    class Mean(TrainAccuracySubscriber):
        def measure(self, bundle):
            means.append(bundle["input_labels"].data.mean().item())
            return super().measure(bundle)

    watched = Watched(model, subscribers=(Mean,))
    train(model, lambda model: loss(model(X), labels))
    assert len(watched.shown("train_accuracy")) == 3 * is_of_classes
    assert means == pytest.approx([labels.mean().item()] * 3)


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(ignore_index=0), Padded()])
def test_labels_that_a_loss_module_ignores_do_not_count(loss):
    model, accuracies = network(), {}
    watched = Watched(model, loss=loss, subscribers=(TrainAccuracySubscriber, PredictionSubscriber))

    def loss_of(model):
        z = model(X)
        accuracies[len(accuracies)] = (z.argmax(1) == PADDED)[PADDED != 0].float().mean().item()
        return loss(z, PADDED)

    expected = train(model, loss_of)
    assert watched.shown("train_accuracy") == pytest.approx(accuracies)
    assert watched.shown("output_cross_entropy") == pytest.approx(expected, rel=1e-5)


def test_a_loss_inside_a_checkpoint_is_not_read():
    """To unpack what it has saved would compute it at once, and break the backward."""
    from torch.utils.checkpoint import checkpoint

    model, calls = network(), []

    def loss(z, y):
        calls.append(1)
        return F.cross_entropy(z, y)

    watched = Watched(model, subscribers=(LossSubscriber, TrainAccuracySubscriber))
    expected = train(model, lambda model: checkpoint(loss, model(X), Y, use_reentrant=False))
    assert watched.shown() == pytest.approx(expected, rel=1e-6)
    assert (len(calls), watched.shown("train_accuracy")) == (6, {})


def test_nothing_of_torch_is_replaced_between_steps_that_measure_labels():
    before, model, seen = torch.autograd._engine_run_backward, network(), []
    watched = Watched(model, subscribers=(lambda backend: TrainAccuracySubscriber(subsample=2, backend=backend),))

    def loss_of(model):
        seen.append(torch.autograd._engine_run_backward is before)
        return functional(model)

    alone = network()
    assert train(model, loss_of, 4) == train(alone, functional, 4)
    assert all(map(torch.equal, alone.parameters(), model.parameters()))
    model(X)
    watched.exporter.close()
    assert torch.autograd._engine_run_backward is before
    assert seen[1::2] == [True, True]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_function_is_averaged_over_micro_batches_as_a_module(reduction):
    import functools

    model, labels = network(), torch.tensor([0, 1, 0, 2, 0, 0, 3, 1])
    watched = Watched(model)
    loss_function = watched.exporter.set_loss(functools.partial(F.cross_entropy, ignore_index=0, reduction=reduction))
    optimizer = sgd(model)
    whole = F.cross_entropy(model(X), labels, ignore_index=0, reduction=reduction).item()
    for part in (slice(0, 3), slice(3, 8)):
        loss_function(model(X[part]), labels[part]).backward()
    optimizer.step()
    assert watched.shown() == pytest.approx({0: whole}, rel=1e-6)


@pytest.mark.parametrize("wrong", [3, "cross_entropy", nn.CrossEntropyLoss, None])
def test_a_loss_that_cannot_be_called_is_refused(wrong):
    with Exporter(message_bus=MessageBus()) as exporter, pytest.raises(ConfigTypeError, match="set_loss"):
        exporter.set_loss(wrong)


def test_watch_takes_a_function_and_shows_the_loss_without_one(tmp_path):
    model = network()
    with ikkuna.watch(model, log_dir=tmp_path) as exporter:
        kinds = {kind for r in exporter.message_bus.registered for kind in r.kinds}
        assert {"loss", "input_labels"} < kinds
    with ikkuna.watch(model, loss=F.cross_entropy, log_dir=tmp_path) as exporter:
        assert "train_accuracy" in exporter.message_bus.kinds


def test_evaluation_computes_a_functional_loss():
    model = network()
    watched = Watched(
        model, loss=F.cross_entropy, subscribers=(lambda backend: LossSubscriber(tag="testing", backend=backend),)
    )
    expected = F.cross_entropy(model(X), Y).item()
    watched.exporter.evaluate([(X, Y)])
    assert watched.shown() == pytest.approx({0: expected}, rel=1e-6)


# -- what is not sampled costs nothing --------------------------------------------------------------------------------


def test_no_hook_is_registered_on_steps_that_are_not_sampled(monkeypatch):
    model, looked = network(), []
    watched = Watched(model, subscribers=(lambda backend: LossSubscriber(subsample=3, backend=backend),))
    from ikkuna.observation.hooks import loss

    monkeypatch.setattr(loss, "backward_roots", lambda was=loss.backward_roots: looked.append(0) or was())
    hooks = []

    def loss_of(model):
        output = model(X)
        hooks.append(len(output._backward_hooks or ()))
        return F.cross_entropy(output, Y)

    expected = train(model, loss_of, 5)
    assert watched.shown() == pytest.approx({0: expected[0], 3: expected[3]}, rel=1e-6)
    assert (hooks, len(looked)) == ([1, 0, 0, 1, 0], 2)


# -- trainers and language models -------------------------------------------------------------------------------------


def language_model(kind="gpt2"):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(2)
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=11, n_positions=16)
        return transformers.GPT2LMHeadModel(config)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=11, **shape))


TEXT = torch.randint(11, (4, 9), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_language_model_that_computes_its_own_loss(kind):
    """Loss, perplexity and accuracy; a causal model is compared with the next token, ignored labels are left out."""
    labels = TEXT.clone()
    labels[:, :3] = -100
    model = language_model(kind).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    makes = (LossSubscriber, PerplexitySubscriber, TrainAccuracySubscriber, PredictionSubscriber)
    watched, optimizer, losses, accuracies = Watched(model, subscribers=makes), sgd(model), {}, {}
    for step in range(3):
        optimizer.zero_grad()
        output = model(input_ids=TEXT, labels=labels)
        logits, own = (output.logits[:, :-1], labels[:, 1:]) if kind == "gpt2" else (output.logits, labels)
        valid = own != -100
        accuracies[step] = (logits.argmax(-1) == own)[valid].float().mean().item()
        losses[step] = F.cross_entropy(logits[valid], own[valid]).item()
        output.loss.backward()
        optimizer.step()
    assert watched.shown() == pytest.approx(losses, rel=1e-5)
    assert watched.shown("perplexity") == pytest.approx({s: math.exp(v) for s, v in losses.items()}, rel=1e-5)
    assert watched.shown("train_accuracy") == pytest.approx(accuracies)
    assert watched.shown("output_cross_entropy") == pytest.approx(losses, rel=1e-4)
    assert watched.shown("output_classes") == {0: 11, 1: 11, 2: 11}


def test_labels_that_are_not_shifted_yet():
    """A language model of the user's own, whose loss function shifts the labels itself."""
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))

    def shifted(logits, labels):
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    makes = [
        lambda backend, make=make: make(shift=1, backend=backend)
        for make in (TrainAccuracySubscriber, PredictionSubscriber)
    ]
    watched, optimizer = Watched(model, subscribers=makes), sgd(model)
    loss_function = watched.exporter.set_loss(shifted)
    logits = model(TEXT)
    loss = loss_function(logits, TEXT)
    loss.backward()
    optimizer.step()
    accuracy = (logits[:, :-1].argmax(-1) == TEXT[:, 1:]).float().mean().item()
    assert watched.shown("train_accuracy") == pytest.approx({0: accuracy})
    assert watched.shown("output_cross_entropy") == pytest.approx({0: loss.item()}, rel=1e-4)


@pytest.mark.parametrize("make", [TrainAccuracySubscriber, PredictionSubscriber])
@pytest.mark.parametrize("shift", [-1, 0.5, True, "1"])
def test_wrong_shifts_are_refused(make, shift):
    with pytest.raises(ConfigError, match="shift"):
        make(shift=shift)


def test_evaluation_of_a_model_that_computes_its_own_loss():
    """The mean over all labels, not over batches."""
    labels = TEXT.clone()
    labels[0, :6] = -100
    model = language_model()
    watched = Watched(model, subscribers=(lambda backend: LossSubscriber(tag="testing", backend=backend),))
    watched.exporter.evaluate([{"input_ids": TEXT[i], "labels": labels[i]} for i in (slice(0, 1), slice(1, 4))])
    with torch.no_grad():
        whole = model.eval()(input_ids=TEXT, labels=labels).loss.item()
    assert watched.shown() == pytest.approx({0: whole}, rel=1e-5)


def test_transformers_trainer_with_accumulation(tmp_path):
    """The loss of a step is that which the trainer reports."""
    transformers = pytest.importorskip("transformers")
    model = language_model()
    watched = Watched(model)
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=4, per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=1,
        save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    items = [{"input_ids": text, "labels": text} for text in TEXT.repeat(4, 1)]
    trainer = transformers.Trainer(model, arguments, train_dataset=items)
    trainer.train()
    reported = {line["step"] - 1: line["loss"] for line in trainer.state.log_history if "loss" in line}
    assert len(reported) == 4
    assert watched.shown() == pytest.approx(reported, abs=1e-4)  # the trainer rounds


def test_lightning_step_that_returns_a_dict():
    lightning = pytest.importorskip("lightning")
    losses = []

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, index):
            loss = F.cross_entropy(self(batch[0]), batch[1])
            losses.append(loss.item())
            return {"loss": loss, "extra": 1}

        def configure_optimizers(self):
            return sgd(self)

    module = Module()
    watched = Watched(module)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), 2)
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", barebones=True, accumulate_grad_batches=2)
    trainer.fit(module, data)
    assert watched.shown() == pytest.approx({0: sum(losses[:2]) / 2, 1: sum(losses[2:]) / 2}, rel=1e-6)


def test_two_kinds_of_subscribers_see_the_same_loss():
    model = network()
    watched = Watched(model, subscribers=(LossSubscriber, lambda backend: NormSubscriber("loss", backend=backend)))
    expected = train(model, functional)
    assert watched.shown("loss_norm2") == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("calls", [1, 2, 4])
def test_a_first_step_whose_backward_comes_before_the_loss_module_has_the_sum_of_its_backwards(calls):
    loss, model = nn.CrossEntropyLoss(), network()
    watched, optimizer, sums, means = Watched(model, loss=loss), sgd(model), [], []
    for _ in range(2):
        penalty = model(X).square().mean() + 5
        penalty.backward()
        losses = [loss(model(X + i), Y) for i in range(calls)]
        for each in losses:
            (each / calls).backward()
        optimizer.step()
        optimizer.zero_grad()
        means.append(sum(each.item() for each in losses) / calls)
        sums.append(penalty.item() + means[-1])
    assert watched.shown() == pytest.approx({0: sums[0], 1: means[1]})


@pytest.mark.parametrize("make", [PredictionSubscriber, ConstantPredictionSubscriber])
@pytest.mark.parametrize("has_module", [True, False])
def test_outputs_that_are_compared_with_two_labels_have_no_figures(make, has_module):
    """Each comparison is a part of what is minimised; two parts of the outputs, or two equal comparisons, are none."""
    is_of_classes = make is PredictionSubscriber
    loss = nn.CrossEntropyLoss() if is_of_classes else nn.MSELoss()
    first, second = (Y, Y.flip(0)) if is_of_classes else (torch.randn(8, 4), torch.randn(8, 4))
    criterion = loss if has_module else (F.cross_entropy if is_of_classes else F.mse_loss)
    model = network()
    watched, optimizer = Watched(model, loss=loss if has_module else None, subscribers=[make]), sgd(model)
    for step in range(4):
        outputs = model(X)
        if step == 0:
            (0.3 * criterion(outputs, first) + 0.7 * criterion(outputs, second)).backward()
        elif step == 1:
            (0.3 * criterion(outputs, first) + 0.7 * criterion(outputs, first)).backward()
        elif step == 2:
            (criterion(outputs[:4], first[:4]) + criterion(outputs[4:], first[4:])).backward()
        else:
            criterion(outputs, second).backward()
        optimizer.step()
        optimizer.zero_grad()
    kind = "output_dependence" if is_of_classes else "loss_form"
    assert sorted(watched.shown(kind)) == [1, 2, 3]


def test_a_scripted_loss_is_observed(tmp_path):
    model, loss = nn.Linear(8, 3), torch.jit.script(nn.CrossEntropyLoss())
    optimizer, found = torch.optim.SGD(model.parameters(), 0.1), []
    with ikkuna.watch(model, loss, log_dir=tmp_path, every=1, verbosity=0) as monitor:
        for _ in range(5):
            x = torch.randn(16, 8)
            optimizer.zero_grad()
            value = loss(model(x), x[:, :3].argmax(1))
            value.backward()
            optimizer.step()
            found.append(value.item())
    assert monitor.history("loss").values.tolist() == pytest.approx(found)
