"""Finds the loss of a step, its weight, and the outputs and labels that it was computed from."""

from collections.abc import Mapping
from threading import get_ident
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ikkuna.distributed.dtensor import is_distributed
from ikkuna.metrics.messages.stamp import TRAINING
from ikkuna.numerics.elements import has_numbers, widest_float
from ikkuna.observation.hooks.context import SEES_BACKWARD, HookContext, backward_roots
from ikkuna.observation.hooks.hook import in_backward
from ikkuna.observation.model.watched_model import is_shifted
from ikkuna.observation.steps.forwards import Forward

__all__ = ["LossHooks", "label_weight", "loss_weight"]


_BY_SEQUENCE = ("CTCLoss",)


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


_IGNORED = -100  # the label that models of transformers leave out


class LossHooks:
    """Records the loss, the labels, and the arguments of the loss for subscribers that measure them together.

    There are three sources, in this order:

    1. The calls of the loss module that the user has set.
    2. In training, the scalar on which ``backward()`` is called.  The loss of a step is the sum over its backward passes, without the
       factor of a gradient scaler: the function whose gradient the optimizer receives.  Optimizers of different parameters have
       different losses: each has the sum since the optimizer before, under the number of the optimizer.
    3. In another pass, the field ``loss`` of what the model returns.

    Labels are the second argument of the loss module, or the keyword argument ``labels`` of a model that returns a ``loss``.

    Parameters
    ----------
    context : HookContext

    Attributes
    ----------
    has_loss, has_labels : bool
        Whether a loss and labels were seen, in any step.
    """

    def __init__(self, context: HookContext) -> None:
        self.context = context
        self.has_loss = self.has_labels = False
        self._was_called = self._is_unowned = False
        self._numbers: dict[int, int] = {}
        self._owned: list[set[int]] = []

    def step_ended(self) -> None:
        """Forget what was seen in the step."""
        self._was_called = self._is_unowned = False

    # -- the loss module ------------------------------------------------------------------------------------------

    def loss_called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Record what one call of the loss module receives and returns."""
        context = self.context
        if context.is_off or in_backward() or not isinstance(output, Tensor):
            return
        if (forward := context.tracker.calls.last(get_ident())) is None:
            return
        self._was_called = self.has_loss = True
        if context.recorder.rows is not None:
            self._record_call(module, [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)], output, forward)
        if context.observer is not None and forward.part >= 0 and context.tracker.pass_name == TRAINING:
            context.observer.loss_called(args, kwargs)

    def _record_call(self, module: nn.Module, given: list[Tensor], output: Tensor, forward: Forward) -> None:
        """Record what one call of the loss module receives and returns, in a step that is sampled."""
        seen = dict(zip(("network_output", "input_labels"), given, strict=False))
        seen = {kind: tensor.detach() for kind, tensor in {**seen, "loss": output}.items()}
        labels = seen.get("input_labels")
        if self.context.recorder.wants(self.context.sites("loss")):
            is_readable = labels is None or has_numbers(labels)
            weight = loss_weight(module, output, seen.get("network_output"), labels) if is_readable else None
            self._record(output, weight, forward.part)
        self._record_arguments(seen, forward)

    def _record(self, loss: Tensor, weight: Any, part: int, path: str = "") -> None:
        self.context.recorder.receive(self.context.sites("loss"), loss, path, weight, part=part)

    def _record_arguments(self, seen: dict[str, Tensor], forward: Forward) -> None:
        recorder = self.context.recorder
        if (labels := seen.get("input_labels")) is not None:
            self.has_labels = True
            recorder.receive(self.context.sites("input_labels"), labels, "", part=forward.part)
        recorder.receive_together(seen, part=forward.part)

    # -- a model that computes its own loss ------------------------------------------------------------------------

    def root_ended(self, module: nn.Module, kwargs: dict[str, Any], output: Any, forward: Forward) -> None:
        """Record the loss, the outputs and the labels of a model that returns its own loss."""
        context = self.context
        plan, is_training = context.recorder.plan, context.tracker.pass_name == TRAINING
        if context.model.loss is not None or not (plan.together or plan.kinds & {"loss", "input_labels"}):
            return
        if (loss := _field(output, "loss")) is None:
            return
        logits, labels = _field(output, "logits"), kwargs.get("labels")
        seen = {"loss": loss.detach()}
        if isinstance(labels, Tensor):
            labels = labels.detach()
            if is_shifted(module) and labels.ndim == 2:
                labels = labels[:, 1:]
                logits = None if logits is None else logits[:, : labels.shape[1]]
            seen = {"input_labels": labels, **seen}
            if logits is not None:
                seen = {"network_output": logits.detach(), **seen}
        if loss.numel() == 1 and not (is_training and SEES_BACKWARD):
            self.has_loss = True
            weight = 1 if (found := seen.get("input_labels")) is None else label_weight(found, _IGNORED)
            self._record(loss, weight, forward.part)
        self._record_arguments(seen, forward)

    # -- the scalar of backward() ---------------------------------------------------------------------------------

    def backward_begins(self, part: int) -> None:
        """Record the scalar of which the running backward computes gradients; called once for each backward."""
        context = self.context
        tracker, recorder = context.tracker, context.recorder
        if self._was_called or context.model.stages or tracker.pass_name != TRAINING:
            return
        if recorder.wants(context.sites("loss")) and (loss := _backward_loss()) is not None:
            self.has_loss = self._is_unowned = True
            self._record(loss, "total", part, _path(len(tracker.optimizers.stepped)))

    def optimizer_ends(self, optimizer: int, owned: frozenset[int]) -> None:
        """Assign the losses since the last optimizer to the one whose step ends, and remove the factor of its gradient scaler.

        Parameters
        ----------
        optimizer : int
            Identifier of the optimizer.
        owned : frozenset of int
            The ids of its parameters.
        """
        context = self.context
        if (number := self._numbers.get(optimizer)) is None:
            number = self._numbers[optimizer] = self._new_number(owned)
        if self._is_unowned and (rows := context.recorder.rows) is not None:
            self._is_unowned = False
            path = _path(len(context.tracker.optimizers.stepped))
            rows.rename_total(context.sites("loss"), path, _path(number), context.loss_scale.factor)

    def _new_number(self, owned: frozenset[int]) -> int:
        """Return the number of an optimizer; one of the same parameters, as of another phase of the training, has the same."""
        for number, known in enumerate(self._owned):
            if not known.isdisjoint(owned):
                known |= owned
                return number
        self._owned.append(set(owned))
        return len(self._owned) - 1


def _path(number: int) -> str:
    return str(number) if number else ""


def _field(output: Any, name: str) -> Tensor | None:
    """Return the tensor that a model returns under a name."""
    value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
    return value if isinstance(value, Tensor) else None


def _backward_loss() -> Tensor | None:
    """Return the number of which the running backward computes gradients, attached to no graph.

    ``None`` if it starts from a tensor of several elements, which may be a gradient of the user's own.
    """
    total: Tensor | None = None
    for root, gradient in backward_roots():
        if not isinstance(root, Tensor) or root.numel() != 1:
            return None
        value = root.detach().reshape(())
        if isinstance(gradient, Tensor) and not is_distributed(root):
            value = value * gradient.detach().reshape(())
        total = value if total is None else total + value
    return total
