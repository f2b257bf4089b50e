"""Finds the loss of a step, its weight, and the outputs and labels that it was computed from."""

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ikkuna.diagnosis.mistakes import NONFINITE
from ikkuna.diagnosis.objective.graph import ObjectiveGraph
from ikkuna.diagnosis.objective.recorded import RecordedObjective
from ikkuna.diagnosis.recorded_preflight import RecordedPreflight
from ikkuna.distributed.dtensor import is_distributed
from ikkuna.distributed.rendezvous import World
from ikkuna.metrics.messages.kinds import OBJECTIVE
from ikkuna.metrics.messages.stamp import TRAINING
from ikkuna.numerics.elements import has_numbers, widest_float
from ikkuna.numerics.prediction import IGNORED
from ikkuna.observation.hooks.call_stack import SEES_BACKWARD, backward_roots
from ikkuna.observation.hooks.context import HookContext
from ikkuna.observation.hooks.hook import Hook, in_backward
from ikkuna.observation.hooks.loss_owner import LossOwner, is_computed_in
from ikkuna.observation.hooks.nested_tensors import Leaves
from ikkuna.observation.model.watched_model import LossFunction
from ikkuna.observation.rows.recorder import Recorder
from ikkuna.observation.steps.forwards import Forward
from ikkuna.support.modules import shifts_labels
from ikkuna.support.saved_losses import LossArguments, loss_arguments, saved_loss
from ikkuna.support.torch_internals import call_before_backward

_BY_SEQUENCE = ("CTCLoss",)


def without_ignored(labels: Tensor, ignored: int | None) -> Tensor:
    """Return labels in which -100 stands for those that a loss leaves out, as subscribers expect.

    Examples
    --------
    >>> without_ignored(torch.tensor([0, 1, 2]), 0)
    tensor([-100,    1,    2])
    """
    if ignored is None or ignored == IGNORED or labels.is_floating_point() or labels.is_complex():
        return labels
    return torch.where(labels == ignored, IGNORED, labels.long())


def loss_weight(
    module: nn.Module, loss: Tensor, outputs: Tensor | None, labels: Tensor | None
) -> int | Tensor | Literal["sum"] | None:
    """Return the weight of one call's loss in the mean over several calls.

    A mean loss has the weight by which torch has divided the sum: the number of labels that are not ignored, or the sum of their classes'
    weights.  The losses of ``reduction="sum"`` are added up.

    Parameters
    ----------
    module : nn.Module
        The module that computes the loss.
    loss : Tensor
        Its output.
    outputs, labels : Tensor, optional
        The first two tensors it was called with.

    Returns
    -------
    int, Tensor, "sum" or None
        On an accelerator the weight stays there.  ``None`` for a loss that is not one number.

    Examples
    --------
    >>> labels = torch.tensor([0, 1, 1, -100])
    >>> mean, total = nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="sum")
    >>> loss_weight(mean, torch.tensor(0.5), None, labels), loss_weight(total, torch.tensor(0.5), None, labels)
    (3, 'sum')
    >>> loss_weight(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0])), torch.tensor(0.5), None, labels)
    tensor(7., dtype=torch.float64)
    """
    if loss.numel() != 1:
        return None
    if getattr(module, "reduction", None) == "sum":
        return "sum"
    if type(module).__name__ in _BY_SEQUENCE and outputs is not None:
        return outputs.shape[1] if outputs.ndim == 3 else 1  # (time, batch, class)
    if labels is None:
        return 1
    if labels.is_floating_point() or getattr(module, "ignore_index", None) is None:
        return labels.numel()
    return label_weight(labels, int(module.ignore_index), getattr(module, "weight", None))  # type: ignore[arg-type]


def needs_outputs(module: nn.Module) -> bool:
    """Return whether the weight of a loss depends on the outputs of the network."""
    return type(module).__name__ in _BY_SEQUENCE


def is_one_number(value: Any) -> bool:
    """Return whether a value is a tensor of the host, of no subclass, with one element."""
    return type(value) is Tensor and value.is_cpu and value.numel() == 1


def label_weight(labels: Tensor, ignored: int, weights: Tensor | None = None) -> int | Tensor:
    """Return the number of labels that are not ignored, or the sum of their classes' weights.

    Examples
    --------
    >>> label_weight(torch.tensor([0, 1, 1, -100]), -100)
    3
    """
    counts = labels != ignored
    if weights is None:
        count = torch.count_nonzero(counts)
        return int(count) if count.device.type == "cpu" else count
    of_labels = weights.detach().to(widest_float(weights))[torch.where(counts, labels, 0)]
    return torch.where(counts, of_labels, 0.0).sum()


_NONE: tuple[Forward | None, int, range] = None, 0, range(0)


_BROKEN = (
    "It is a weight of this module before the backward of a step whose loss is not finite; other weights are finite."
)
_CHANGED = "an earlier step, or code that writes to the weight, has changed it: clip gradients, lower the learning rate"


class LossHooks:
    """Records the loss, the labels, and the arguments of the loss for subscribers that measure them together.

    There are three sources, in this order; what ``backward()`` is called on has the path ``objective`` beside a loss module, and is
    dropped where it is the same number, as it is not with a penalty, or where the user sums several calls of the module:

    1. The calls of the loss module that the user has set, but those for another model, see `LossOwner`.
    2. In training, the scalar on which ``backward()`` is called.  The loss of a step is the sum over its backward passes, without the
       factor of a gradient scaler: the function whose gradient the optimizer receives.  Optimizers of different parameters have
       different losses: each has the sum since the optimizer before, under the number of the optimizer.
    3. In another pass, the field ``loss`` of what the model returns.

    Labels are the second argument of the loss module, or the keyword argument ``labels`` of a model that returns a ``loss``.
    Otherwise they are what the losses of ``torch.nn.functional`` have saved for their backward, see `loss_arguments`.
    Where outputs and labels are measured together, -100 stands for the labels that the loss leaves out.

    Parameters
    ----------
    context : HookContext

    Attributes
    ----------
    owner : LossOwner
        Finds whether a call of the loss module is one for another model.
    has_loss, has_labels : bool
        Whether a loss and labels were seen, in any step.
    undivided : int
        The number of backward passes of the last step that began at what the loss module had returned.
    preflight : RecordedPreflight, optional
        Receives the first call of the loss module with a gradient, if that is in step 0.
    objective : RecordedObjective, optional
        Receives what the first backward passes through the model are called on.
    is_looking : bool
        Whether each backward of the step reads the tensors that it starts from.
    validation : callable
        Returns the recorder of evaluations in the training loop; called with whether a loss is recorded.
    arm : callable
        Registers hooks on tensors that report a backward as one through a forward.
    """

    def __init__(self, context: HookContext) -> None:
        self.context, self.owner = context, LossOwner(context)
        self.has_loss = self.has_labels = False
        self.preflight: RecordedPreflight | None = None
        self.objective: RecordedObjective | None = None
        self.validation: Callable[[bool], Recorder] = lambda loss: context.recorder
        self._was_called = self._was_left_out = self._is_usually_called = self._is_unowned = self._knows_labels = False
        self._numbers: dict[int, int] = {}
        self._owned: list[set[int]] = []
        self._last_root: weakref.ref[Tensor] | None = None
        self._outputs: list[weakref.ref[Tensor]] = []
        self._losses: list[weakref.ref[Tensor]] = []
        self.undivided = self._undivided = 0
        self._arguments: list[LossArguments] = []
        self._stop_looking: Callable[[], object] = int
        self.is_looking = False
        self._unreached = _NONE
        self.arm: Callable[[Leaves, Forward], None] = _arm_nothing

    def step_opened(self) -> None:
        """Read the tensors that each backward starts from, if the step measures labels."""
        plan = self.context.recorder.plan
        is_wanted = bool(plan.together) or "input_labels" in plan.kinds
        if is_wanted or self.is_looking:
            self._look(is_wanted)

    def _look(self, is_looking: bool) -> None:
        self._stop_looking()
        self._stop_looking, self.is_looking = self.look() if is_looking else int, is_looking

    def look(self) -> Callable[[], object]:
        """Call `backward_starts` before each backward, until the returned function is called."""
        hook = Hook(self, LossHooks.backward_starts).counted()
        call_before_backward(hook, True)
        return weakref.finalize(self, call_before_backward, hook, False)

    def expect_backward(self, forward: Forward, thread: int, recorded: range, outputs: Leaves) -> None:
        """Let backwards that begin from now on reach a forward whose outputs have no hooks.

        Parameters
        ----------
        forward : Forward
            The forward.
        thread : int
            The thread on which it ran.
        recorded : range
            The numbers of the nodes that autograd has recorded in it.
        outputs : list
            What it has returned, as far as that is known.
        """
        self._unreached = forward, thread, recorded
        if self.context.model.loss is not None:
            self.owner.forward_ended(outputs, recorded)
        self._look(True)

    def step_ended(self) -> None:
        """Forget what was seen in the step."""
        if self.context.model.loss is not None:
            self.owner.step_ended()
        self._is_usually_called = self._is_usually_called or self._was_called or self._was_left_out
        self._was_called = self._was_left_out = self._is_unowned = self._knows_labels = False
        self._arguments, self._outputs, self._losses, self._unreached = [], [], [], _NONE
        self.undivided, self._undivided = self._undivided, 0
        if self.objective is not None and self.objective.is_done:
            self.objective = None
        if self.is_looking:
            self._look(False)

    def gradients_cleared(self) -> None:
        """Forget the backwards whose gradients were thrown away."""
        self._undivided = 0

    # -- the loss module ------------------------------------------------------------------------------------------

    def loss_called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Record what one call of the loss module receives and returns."""
        context, given = self.context, (*args, *kwargs.values())
        if in_backward() or not isinstance(output, Tensor):
            return
        is_evaluated = self._is_evaluated(output, given)
        is_training = context.tracker.pass_name == TRAINING and not is_evaluated
        if not is_evaluated and self.has_loss and context.recorder.rows is None and context.observer is None:
            return
        if self.owner.is_another(output, given, is_training):
            return
        if is_evaluated:
            self._record_call(module, given, output, 0, self.validation(True))
            return
        if self.preflight is not None and output.requires_grad and is_training:
            function = module.function if isinstance(module, LossFunction) else module
            self._check(lambda checks: checks.record(function, args, kwargs, output))
        if (forward := context.tracker.calls[get_ident()].last) is None:
            return
        if self._is_unowned and not self._is_beside:
            # a backward has come before in this step; in later steps, what it is called on is recorded beside the loss
            self._was_left_out = True
            return
        self._was_called = self.has_loss = True
        self._losses.append(weakref.ref(output))
        if context.recorder.rows is not None:
            self._record_call(module, given, output, forward.part, context.recorder)
        if context.observer is not None and forward.part >= 0 and is_training:
            context.observer.loss_called(args, kwargs)

    def _check(self, record: Callable[[RecordedPreflight], None]) -> None:
        """Let the first loss of the training be recorded for the checks of the first step, if it can be."""
        checks, self.preflight = self.preflight, None
        if checks is None:
            return
        if (step := self.context.tracker.stamp.global_step) > 0:
            checks.reason = f"the first loss that was seen is that of step {step}"
        elif World.here().size > 1:
            checks.reason = "several processes train together"
        else:
            record(checks)

    def _is_evaluated(self, loss: Tensor, arguments: Sequence[Any] = ()) -> bool:
        """Return whether a loss is that of an evaluation in the training loop.

        Forwards of a model that is never called as a whole are not seen: its loss is one if all of its modules are in evaluation mode,
        unless it is computed from outputs of the training.
        """
        context = self.context
        if loss.requires_grad or torch.is_grad_enabled() or context.tracker.pass_name != TRAINING:
            return False
        if context.events.is_evaluating or not context.tracker.is_rootless:
            return context.events.is_evaluating
        is_trained = any(isinstance(x, Tensor) and x.requires_grad for x in arguments)
        return not (is_trained or any(named.module.training for named in context.model.modules))

    def _record_call(
        self, module: nn.Module, arguments: Sequence[Any], output: Tensor, part: int, recorder: Recorder
    ) -> None:
        """Record what one call of the loss module receives and returns, in a step or pass that is sampled."""
        given = (x for x in arguments if isinstance(x, Tensor))
        seen = dict(zip(("network_output", "input_labels"), given, strict=False))
        seen = {kind: tensor.detach() for kind, tensor in {**seen, "loss": output}.items()}
        labels = seen.get("input_labels")
        ignored = getattr(module, "ignore_index", None)
        if ignored is None:  # a module of the user's own around a loss of torch
            ignored = next((found.ignored for found in loss_arguments([output]) if found.ignored is not None), None)
        if recorder.wants(self.context.sites("loss")):
            is_readable = labels is None or has_numbers(labels)
            weight = loss_weight(module, output, seen.get("network_output"), labels) if is_readable else None
            recorder.receive(self.context.sites("loss"), output, "", weight, part=part)
        self._record_arguments(seen, part, ignored, recorder)

    def _record_arguments(self, seen: dict[str, Tensor], part: int, ignored: int | None, recorder: Recorder) -> None:
        if (labels := seen.get("input_labels")) is not None:
            self.has_labels = True
            recorder.receive(self.context.sites("input_labels"), labels, "", part=part)
            if has_numbers(labels):
                seen = {**seen, "input_labels": without_ignored(labels, ignored)}
        recorder.receive_together(seen, part=part)

    def repeat_call(
        self, module: nn.Module, labels: Tensor, output: "weakref.ref[Tensor]", value: Tensor, forward: Forward
    ) -> None:
        """Record the value that the loss module has returned in a step that is tracked only now; the result may be freed."""
        self._was_called = self.has_loss = True
        self._losses.append(output)
        weight = loss_weight(module, value, None, labels)
        self.context.recorder.receive(self.context.sites("loss"), value, "", weight, part=forward.part)

    def repeat_backward(self, loss: Tensor, forward: Forward) -> None:
        """Record what a backward that has begun was called on, in a step that is tracked only now."""
        self.has_loss = self._is_unowned = True
        path = _path(0, self._is_beside)
        self.context.recorder.receive(self.context.sites("loss"), loss, path, "total", part=forward.part)

    # -- a model that computes its own loss ------------------------------------------------------------------------

    def root_ended(self, module: nn.Module, kwargs: dict[str, Any], output: Any, forward: Forward | None) -> None:
        """Record the loss, the outputs and the labels of a model that returns its own loss; without `forward` it evaluates."""
        context = self.context
        if not torch.is_grad_enabled():
            self.owner.evaluated(output)
        if context.model.loss is not None or isinstance(output, Tensor) or (loss := _field(output, "loss")) is None:
            return
        is_evaluated = forward is None and self._is_evaluated(loss)
        if forward is None and not is_evaluated:
            return
        recorder, part = (context.recorder, forward.part) if forward is not None else (self.validation(True), 0)
        plan, is_training = recorder.plan, context.tracker.pass_name == TRAINING and not is_evaluated
        if not (plan.together or plan.kinds & {"loss", "input_labels"}):
            return
        logits, labels = _field(output, "logits"), kwargs.get("labels")
        seen = {"loss": loss.detach()}
        if isinstance(labels, Tensor):
            self._knows_labels = True
            labels = labels.detach()
            if shifts_labels(module) and labels.ndim == 2:
                labels = labels[:, 1:]
                logits = None if logits is None else logits[:, : labels.shape[1]]
            seen = {"input_labels": labels, **seen}
            if logits is not None:
                seen = {"network_output": logits.detach(), **seen}
        if loss.numel() == 1 and not (is_training and SEES_BACKWARD):
            self.has_loss = True
            weight = 1 if (found := seen.get("input_labels")) is None else label_weight(found, IGNORED)
            recorder.receive(context.sites("loss"), loss, "", weight, part=part)
        self._record_arguments(seen, part, IGNORED, recorder)

    # -- the scalar of backward() ---------------------------------------------------------------------------------

    def backward_begins(self, part: int) -> None:
        """Record the scalar of which the running backward computes gradients; called once for each backward."""
        context = self.context
        tracker, recorder = context.tracker, context.recorder
        if context.model.stages or tracker.pass_name != TRAINING:
            return
        arguments, self._arguments = self._arguments, []
        loss = self._backward_loss() if arguments or "loss" in recorder.plan.kinds else None
        if loss is not None:
            self.has_loss = self._is_unowned = True
            path = _path(len(tracker.optimizers.stepped), self._is_beside)
            recorder.receive(context.sites("loss"), loss, path, "total", part=part)
        value = loss
        for each in self._losses:
            if value is not None:
                break
            value = each()
        if value is not None and value.is_cpu and is_one_number(value) and not math.isfinite(value.item()):
            self._report_broken_weights()
        if self.takes_arguments:
            for outputs, labels, ignored in arguments:
                seen = {"network_output": outputs, "input_labels": labels, **({} if loss is None else {"loss": loss})}
                self._record_arguments(seen, part, ignored, recorder)

    @property
    def takes_arguments(self) -> bool:
        """Whether outputs and labels are those that the losses of a backward have saved."""
        return not (self._was_called or self._knows_labels)

    def _report_broken_weights(self) -> None:
        """Report weights that are not finite, unless all are: the step that follows a loss of NaN makes all of them so."""
        parameters = self.context.parameters.all
        broken = [named for named in parameters if not named.parameter.detach().isfinite().all()]
        if 0 < len(broken) < len(parameters):
            modules = tuple(dict.fromkeys(named.module for named in broken))
            finding = NONFINITE.found(math.nan, modules[0], detail=_BROKEN, advice=_CHANGED, modules=modules)
            self.context.found(finding)

    def outputs_armed(self, outputs: Leaves) -> None:
        """Keep weak references to what the model has returned; a loss may have saved only a function of it."""
        self._outputs += [weakref.ref(tensor) for _, tensor in outputs]

    def backward_starts(self, roots: Sequence[Any], gradients: Sequence[Any], accumulates: bool) -> None:
        """Find what a loss was computed from before its backward frees that."""
        self._arguments = []
        if self.context.tracker.pass_name == TRAINING:
            self._read_objective(roots, [x for reference in self._outputs if (x := reference()) is not None])
        self._outputs = []
        forward, thread, recorded = self._unreached
        if not accumulates or forward is None or forward.part < 0 or thread != get_ident():
            return
        if is_computed_in(roots, recorded):
            self.arm([("", root) for root in roots if isinstance(root, Tensor)], forward)

    def _read_objective(self, roots: Sequence[Any], outputs: list[Tensor]) -> None:
        """Read what a backward in training is called on: the arguments of its losses, and in the first steps the whole graph."""
        if not (is_known := not self.takes_arguments):
            self._arguments = loss_arguments(roots, outputs)
        if (objective := self.objective) is None or World.here().size > 1:
            return
        graph = ObjectiveGraph(roots)
        if not objective.reaches_model(graph):
            return
        if not is_known and self.preflight is not None:
            saved = saved_loss(roots, outputs)
            is_known = saved is not None
            self._check(lambda checks: checks.record_saved(saved))
        objective.backward_starts(graph, outputs, is_known)

    def _backward_loss(self) -> Tensor | None:
        """Return the number of which the running backward computes gradients, attached to no graph.

        ``None`` if it starts from a tensor of several elements, which may be a gradient of the user's own; if it starts from what the
        loss module has returned, which is known; and for a backward inside another one, as of a reentrant checkpoint.
        """
        roots, is_nested = backward_roots()
        if roots and all(any(known() is root for known in self._losses) for root, _ in roots):
            self._undivided += 1
            return None
        if any(not isinstance(root, Tensor) or root.numel() != 1 for root, _ in roots) or not roots:
            return None
        last, self._last_root = self._last_root, weakref.ref(roots[0][0])
        if is_nested and last is not None and last() is roots[0][0]:
            return None
        total: Tensor | None = None
        for root, gradient in roots:
            value = root.detach().reshape(())
            if isinstance(gradient, Tensor) and not is_distributed(root):
                value = value * gradient.detach().reshape(())
            total = value if total is None else total + value
        return total

    def optimizer_ends(self, optimizer: Optimizer, identifier: int) -> None:
        """Assign the losses since the last optimizer to the one whose step ends, and remove the factor of its gradient scaler.

        Parameters
        ----------
        optimizer : Optimizer
            The optimizer.
        identifier : int
            Its number among those of the process.
        """
        context = self.context
        if (number := self._numbers.get(identifier)) is None:
            number = self._numbers[identifier] = self._new_number(context.parameters.owned_ids(optimizer))
        if self._is_unowned and (rows := context.recorder.rows) is not None:
            self._is_unowned = False
            site, path = context.sites("loss"), _path(len(context.tracker.optimizers.stepped), self._is_beside)
            rows.rename_total(site, path, own := _path(number, self._was_called), context.loss_scale.factor)
            if self._was_called:
                rows.drop_if_equal(site, own, "")

    @property
    def _is_beside(self) -> bool:
        """Whether the loss module is called in this step as well, or usually."""
        return self._was_called or self._is_usually_called

    def numbers_of(self, optimizers: frozenset[int]) -> tuple[int, ...]:
        """Return the numbers of optimizers that have stepped."""
        return tuple(sorted(set(map(self._numbers.__getitem__, self._numbers.keys() & optimizers))))

    def _new_number(self, owned: frozenset[int]) -> int:
        """Return the number of an optimizer; one of the same parameters, as of another phase of the training, has the same."""
        for number, known in enumerate(self._owned):
            if not known.isdisjoint(owned):
                known |= owned
                return number
        self._owned.append(set(owned))
        return len(self._owned) - 1


def _path(number: int, is_beside: bool) -> str:
    """Return the path of what ``backward()`` is called on, of an optimizer with this number, perhaps beside a loss module's."""
    return "/".join([*([OBJECTIVE] if is_beside else []), *([str(number)] if number else [])])


def _field(output: Any, name: str) -> Tensor | None:
    """Return the tensor that a model returns under a name."""
    value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
    return value if isinstance(value, Tensor) else None


def _arm_nothing(outputs: Leaves, forward: Forward) -> None:
    """Stand for the method of `BackwardHooks`."""
