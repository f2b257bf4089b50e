"""Faults that are planted into a training run: name → (function of a case, rules that may name it, families)."""

import copy
import math

import torch
from torch import nn

from tests.diagnosis.training import FAMILIES

FAULTS = {}
PICTURES = ("mlp", "conv", "conv_norm")
LABELLED = (*PICTURES, "recurrent")


def fault(*rules, families=FAMILIES):
    def register(function):
        FAULTS[function.__name__] = function, frozenset(rules), families
        return function

    return register


@fault("lr_too_high", "diverges", "nonfinite")
def rate_far_too_high(case):
    case.rate *= case.draw.choice([60, 100, 200]) if case.optimizer_kind == "adam" else case.draw.choice([60, 100])


@fault("lr_too_low")
def rate_far_too_low(case):
    case.rate /= case.draw.choice([1000, 2000, 5000])


@fault("not_zeroed")
def gradients_not_cleared(case):
    case.clears = False


@fault("dead_units", "zero_gradient", families=("mlp", "conv", "recurrent"))
def dead_layer(case):
    def prepare(case):
        nn.init.constant_(case.pick().bias, -case.draw.choice([20.0, 30.0, 60.0]))

    case.prepare.append(prepare)


@fault("signal_scale", "loss_at_init")
def initial_weights_too_large(case):
    factor = case.draw.choice([8, 12, 20])

    def prepare(case):
        for module in case.model.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                module.weight.data.mul_(factor)

    case.prepare.append(prepare)


@fault("signal_lost", "vanishing_gradient", "ignores_input", families=("mlp", "conv"))
def initial_weights_too_small(case):
    case.depth = 5

    def prepare(case):
        for module in case.model.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                module.weight.data.mul_(0.05)

    case.prepare.append(prepare)


@fault("not_in_optimizer")
def layer_not_in_optimizer(case):
    case.prepare.append(lambda case: case.pick())
    case.select = lambda model: [p for n, p in model.named_parameters() if not n.startswith(case.hit + ".")]


@fault("frozen_inside", families=("mlp", "transformer"))
def layer_frozen_by_mistake(case):
    case.depth = 3

    def prepare(case):
        names = case.hidden_layers()
        case.hit = names[len(names) // 2]
        for parameter in case.model.get_submodule(case.hit).parameters():
            parameter.requires_grad_(False)

    case.prepare.append(prepare)


@fault("no_gradient")
def output_detached(case):
    case.prepare.append(lambda case: case.pick().register_forward_hook(lambda module, args, out: out.detach()))


@fault("zero_gradient", "dead_units")
def output_times_zero(case):
    case.prepare.append(lambda case: case.pick().register_forward_hook(lambda module, args, out: out * 0.0))


@fault("never_moves", families=FAMILIES)
def group_without_rate(case):
    case.prepare.append(lambda case: case.pick())

    def select(model):
        frozen = [p for n, p in model.named_parameters() if n.startswith(case.hit + ".")]
        rest = [p for n, p in model.named_parameters() if not n.startswith(case.hit + ".")]
        return [{"params": rest}, {"params": frozen, "lr": 0.0}]

    case.select = select


@fault("signal_lost", "vanishing_gradient", "saturated", "ignores_input", families=("mlp", "conv"))
def sigmoids_in_many_layers(case):
    case.activation, case.depth = nn.Sigmoid, 7


@fault("saturated", "signal_scale", families=("mlp", "conv"))
def saturated_layer(case):
    case.activation = case.draw.choice([nn.Tanh, nn.Sigmoid])
    case.depth = 3

    def prepare(case):
        layer = case.pick()
        layer.weight.data.mul_(case.draw.choice([30, 50]))

    case.prepare.append(prepare)


@fault("no_learning")
def labels_shuffled(case):
    case.on_batch.append(lambda case, step, x, y: (x, y[torch.randperm(len(y), generator=case.generator)]))


@fault("softmax_twice")
def softmax_before_cross_entropy(case):
    case.wrap = lambda model: nn.Sequential(model, nn.Softmax(1))


def marked_classes(case, step, x, y):
    """Return labels between 0 and 1: one number for each of ten classes."""
    return x, nn.functional.one_hot(y, 10).float()


@fault("sigmoid_twice", families=PICTURES)
def sigmoid_before_binary_cross_entropy(case):
    case.on_batch.append(marked_classes)
    case.loss = nn.BCEWithLogitsLoss()
    case.wrap = lambda model: nn.Sequential(model, nn.Sigmoid())


@fault("loss_scale")
def loss_is_a_sum(case):
    case.loss = nn.CrossEntropyLoss(reduction="sum")


@fault("input_scale", families=PICTURES)
def inputs_not_normalised(case):
    case.on_batch.append(lambda case, step, x, y: (x * 77 + 80, y))


@fault("not_shuffled", families=LABELLED)
def data_sorted_by_label(case):
    case.shuffles = False

    def prepare(case):
        order = torch.argsort(case.y, stable=True)
        case.x, case.y = case.x[order], case.y[order]

    case.prepare.append(prepare)


@fault("nonfinite")
def weight_becomes_nan(case):
    at = case.draw.randint(60, 180)

    def change(case, step, optimizer):
        if step == at:
            parameters = dict(case.model.named_parameters())
            parameters[case.hit + ".weight"].data.view(-1)[0] = math.nan

    case.prepare.append(lambda case: case.pick())
    case.on_step.append(change)


@fault("evaluation_mode", families=("mlp", "conv_norm"))
def training_in_evaluation_mode(case):
    case.norm, case.dropout = case.draw.choice([("batch", 0.0), (None, 0.3)])
    case.evaluates = case.stays_in_evaluation = True


@fault("running_statistics", families=("conv_norm",))
def running_statistics_stand_still(case):
    def prepare(case):
        for module in case.model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 1e-4

    # the running mean is 0 and the running variance 1, far from images that are not normalised
    case.on_batch.append(lambda case, step, x, y: (x * 8 + 8, y))
    case.prepare.append(prepare)


@fault("running_statistics", families=("conv_norm",))
def other_data_in_training_mode(case):
    def change(case, step, x, y):
        with torch.no_grad():
            case.model(x * 30 + 30)
        return x, y

    case.on_batch.append(change)


@fault("loss_spike", "gradient_spike")
def one_huge_step(case):
    at = case.draw.randint(120, 200)

    def change(case, step, optimizer):
        for group in optimizer.param_groups:
            if step == at:
                group["kept"], group["lr"] = group["lr"], group["lr"] * 60
            if step == at + 1:
                group["lr"] = group["kept"]

    case.on_step.append(change)


@fault("lost_updates", families=("mlp", "transformer", "recurrent"))
def weights_in_bfloat16(case):
    case.optimizer_kind = "adam"
    case.rate = case.draw.choice([2e-5, 5e-5])
    case.prepare.append(lambda case: case.model.to(torch.bfloat16))
    if case.family == "mlp":
        case.on_batch.append(lambda case, step, x, y: (x.bfloat16(), y))


@fault("ignores_input", "zero_gradient", "signal_lost")
def head_ignores_its_input(case):
    hook = lambda module, args: (args[0] * 0.0,)  # noqa: E731
    case.prepare.append(lambda case: case.model.get_submodule("head").register_forward_pre_hook(hook))


@fault("wrong_sign", "diverges", "lr_too_high", "nonfinite")
def loss_with_the_wrong_sign(case):
    case.on_loss.append(lambda loss: -loss)


@fault("repeated_batch", families=LABELLED)
def same_batch_in_every_step(case):
    kept = []

    def change(case, step, x, y):
        kept.append((x, y))
        return kept[0]

    case.on_batch.append(change)


@fault("lr_vanished")
def schedule_in_batches(case):
    factor = case.draw.choice([0.8, 0.9])

    def change(case, step, optimizer):
        for group in optimizer.param_groups:
            group["lr"] *= factor

    case.on_step.append(change)


@fault("weight_decay", "decay_dominates", "nonfinite", "diverges", "lr_too_high")
def weight_decay_too_high(case):
    case.optimizer_kind, case.decay = "adam", case.draw.choice([30, 50])


@fault("optimizer_reset")
def optimizer_created_in_every_step(case):
    case.optimizer_kind = "adam"
    case.rate = min(case.rate, 1e-3)
    case.on_step.append(lambda case, step, optimizer: case.optimizer() if step else None)


@fault("clipped_hard")
def clipping_far_too_low(case):
    case.optimizer_kind, case.rate, case.clip = "momentum", 0.03, case.draw.choice([1e-3, 3e-4])


@fault("one_label", families=LABELLED)
def labels_all_the_same(case):
    case.relabel = torch.zeros_like


@fault("overfit", families=LABELLED)
def few_data(case):
    case.subset, case.evaluates, case.batch_size = 100, True, 32


@fault("class_collapse", "ignores_input", "no_learning", families=LABELLED)
def weights_of_classes_wrong(case):
    weights = torch.full((8 if case.family == "recurrent" else 10,), 1e-5)
    weights[case.draw.randrange(len(weights))] = 1.0
    case.loss = nn.CrossEntropyLoss(weight=weights)


@fault("update_ratio", families=FAMILIES)
def one_group_far_too_fast(case):
    case.depth = 3
    case.optimizer_kind = "adam"
    case.rate = min(case.rate, 1e-3)
    case.prepare.append(lambda case: case.pick())

    def select(model):
        fast = [p for n, p in model.named_parameters() if n == case.hit + ".weight"]
        rest = [p for n, p in model.named_parameters() if n != case.hit + ".weight"]
        return [{"params": rest}, {"params": fast, "lr": 0.3}]

    case.select = select


@fault("rank_collapse", "signal_lost", "ignores_input", families=FAMILIES)
def output_on_a_line(case):
    """The outputs of a layer keep one number of each row."""

    def prepare(case):
        layer = case.pick()
        direction = nn.functional.normalize(torch.randn(len(layer.bias)), dim=0)

        def project(module, args, out):
            last = out.movedim(1, -1) if out.ndim == 4 else out
            line = (last @ direction.to(last.dtype))[..., None] * direction.to(last.dtype)
            return line.movedim(-1, 1) if out.ndim == 4 else line

        layer.register_forward_hook(project)

    case.prepare.append(prepare)


@fault("gradients_cleared")
def gradients_cleared_before_the_step(case):
    to_none = case.draw.choice([True, False])
    case.before_step.append(lambda case, optimizer: optimizer.zero_grad(set_to_none=to_none))


@fault("step_without_gradients")
def step_without_backward(case):
    case.backward = lambda loss: None


@fault("all_gradients_zero")
def loss_clamped_below_its_values(case):
    case.on_loss.append(lambda loss: loss.clamp(max=1e-3))


def use_scaler(case):
    """Scale the loss, and return the scaler."""
    scaler = torch.amp.GradScaler("cpu", init_scale=case.draw.choice([2.0**14, 2.0**16]))
    case.backward = lambda loss: scaler.scale(loss).backward()
    return scaler


def step_by_scaler(case, scaler):
    def make_step(optimizer):
        scaler.step(optimizer)
        scaler.update()

    case.make_step = make_step


@fault("scaler_bypassed")
def step_beside_the_scaler(case):
    case.optimizer_kind, case.rate = "adam", min(case.rate, 1e-3)
    use_scaler(case)


@fault("clipped_before_unscaling")
def clipped_with_the_factor_of_the_scaler(case):
    step_by_scaler(case, use_scaler(case))
    case.clip = case.draw.choice([0.5, 1.0, 5.0])


@fault("weights_restored")
def checkpoint_loaded_in_the_loop(case):
    distance = case.draw.choice([20, 30, 40])
    case.prepare.append(lambda case: setattr(case, "kept", copy.deepcopy(case.model.state_dict())))

    def change(case, step, optimizer):
        if step % distance == 0:
            case.model.load_state_dict(case.kept)

    case.on_step.append(change)


def evaluate(case):
    """Evaluate as a user does: three batches of held-out data, without gradients."""
    with torch.no_grad():
        for begin in range(0, 90, 30):
            case.model(case.held_out[0][begin : begin + 30])


@fault("evaluation_in_training_mode", families=("mlp", "conv_norm"))
def evaluation_without_eval(case):
    case.dropout = 0.3 if case.family == "mlp" else 0.0
    case.on_epoch.append(evaluate)


def with_adam(case, **settings):
    """Make the optimizer of a case an Adam with other settings."""
    case.optimizer_kind = "adam"
    case.rate = min(case.rate, 1e-3)
    case.optimizer_settings = settings


@fault("betas")
def betas_exchanged(case):
    with_adam(case, betas=case.draw.choice([(0.999, 0.9), (0.99, 0.9)]))


@fault("epsilon")
def epsilon_of_another_optimizer(case):
    with_adam(case, eps=case.draw.choice([10.0, 100.0]))


@fault("decay_dominates", "weight_decay", "nonfinite", "diverges")
def weight_decay_of_ten(case):
    case.optimizer_kind, case.rate, case.decay = "adam", case.draw.choice([1e-3, 2e-3]), 10


@fault("rate_squared")
def schedule_that_returns_the_rate(case):
    def change(case, step, optimizer):
        if not step:
            rate = case.rate
            case.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: rate * 0.999**number)
        elif step > 1:
            case.scheduler.step()

    case.on_step.append(change)


@fault("same_random_numbers", families=("mlp", "conv"))
def seed_in_the_loop(case):
    case.dropout = 0.3
    case.on_step.append(lambda case, step, optimizer: torch.manual_seed(case.seed) and None)


@fault("repeated_backward")
def two_backward_passes_for_a_step(case):
    def backward(loss):
        loss.backward(retain_graph=True)
        loss.backward()

    case.backward = backward


@fault("schedule_past_end")
def cosine_of_epochs_in_batches(case):
    period, base = 2 * case.draw.choice([8, 10, 20, 25]), case.rate

    def change(case, step, optimizer):
        for group in optimizer.param_groups:
            group["lr"] = base * 0.5 * (1 + math.cos(2 * math.pi * step / period))

    case.on_step.append(change)


@fault("lr_vanished", families=PICTURES)
def steps_of_epochs_in_batches(case):
    def change(case, step, optimizer):
        if step in (5, 10):
            for group in optimizer.param_groups:
                group["lr"] *= 0.1

    case.on_step.append(change)


def as_regression(case, function, factor=1.0):
    """Let a case predict ten numbers in place of classes: the distances of the class on a line."""

    def change(case, step, x, y):
        places = torch.linspace(-1, 1, 10)
        return x, factor * (2 * places[y][:, None] - places).abs()

    case.on_batch.append(change)
    case.loss = function


NUMBERS = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, lambda: nn.MSELoss(reduction="sum"))


@fault("no_better_than_constant", "ignores_input", families=PICTURES)
def numbers_shuffled(case):
    as_regression(case, case.draw.choice(NUMBERS[:3])())
    case.on_batch.append(lambda case, step, x, y: (x, y[torch.randperm(len(y), generator=case.generator)]))


@fault("no_better_than_constant", families=PICTURES)
def labels_of_classes_shuffled(case):
    case.loss = nn.BCEWithLogitsLoss()
    case.on_batch.append(marked_classes)
    case.on_batch.append(lambda case, step, x, y: (x, y[torch.randperm(len(y), generator=case.generator)]))


@fault("wrong_sign", "diverges", "lr_too_high", "nonfinite", families=PICTURES)
def distance_with_the_wrong_sign(case):
    as_regression(case, case.draw.choice(NUMBERS)())
    case.on_loss.append(lambda loss: -loss)
