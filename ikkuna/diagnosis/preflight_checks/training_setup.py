"""A model with a batch, a loss and optimizers, as training would use them; each pass leaves them as they were."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.backends import mha
from torch.nn.parameter import is_lazy

from ikkuna.diagnosis.preflight_checks.batch import Batch
from ikkuna.diagnosis.preflight_checks.outputs import CannotJudgeError, inner_loss, main_output
from ikkuna.support.failures import error_text
from ikkuna.support.modules import class_name, named_modules, named_parameters
from ikkuna.support.random_states import RandomReader, RandomStates
from ikkuna.support.torch_internals import BATCH_NORMS
from ikkuna.support.undisturbed import isolated, run_model, undisturbed, without_replica_wrappers

_CONTAINERS = ("_parameters", "_buffers", "_modules")


@contextmanager
def restored(owners: Iterable[nn.Module], *, values: bool = True) -> Iterator[None]:
    """Restore attributes, parameters and buffers of every module in `owners` after the body, and the values of the parameters.

    Some modules initialise their parameters from the first batch, count their calls, or keep tensors for later.
    Attributes are restored by identity; a change inside a user's list or dictionary stays.

    Examples
    --------
    >>> model = nn.Linear(1, 1)
    >>> with restored([model]):
    ...     model.calls = 3
    ...     _ = nn.init.zeros_(model.weight)
    >>> hasattr(model, "calls"), bool(model.weight == 0)
    (False, False)
    """
    modules = {id(module): module for owner in owners for module in owner.modules()}.values()
    attributes = [
        (module, dict(vars(module)), {key: dict(vars(module)[key]) for key in _CONTAINERS}) for module in modules
    ]
    parameters = {
        id(t): t for module in modules for t in module._parameters.values() if t is not None and values
    }.values()
    copies = [(parameter, parameter.detach().clone()) for parameter in parameters]
    try:
        yield
    finally:
        for module, before, contents in attributes:
            _restore(vars(module), before)
            for name, content in contents.items():
                _restore(before[name], content)
        for parameter, value in copies:
            _restore_values(parameter, value)


def _restore(now: dict[str, Any], before: dict[str, Any]) -> None:
    if now.keys() != before.keys() or any(now[name] is not before[name] for name in before):
        now.clear()
        now.update(before)


def _restore_values(tensor: Tensor, value: Tensor) -> None:
    a, b = (t.to_local() if hasattr(t, "to_local") else t for t in (tensor, value))
    with torch.no_grad():
        if not torch.equal(a.isnan(), b.isnan()) or not torch.equal(a.nan_to_num(), b.nan_to_num()):
            tensor.copy_(value)


_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


@contextmanager
def unobserved(owners: Iterable[nn.Module]) -> Iterator[None]:
    """Remove the forward hooks of ikkuna for the duration of the body, and keep those of the user, which may compute.

    An exporter would otherwise take a pass of a check for the begin of a training step.
    """
    modules = {id(module): module for owner in owners for module in owner.modules()}.values()
    tables: list[dict[int, Any]] = [vars(module)[name] for module in modules for name in _HOOKS]
    before = [(table, dict(table)) for table in tables if any(map(_is_ours, table.values()))]
    for table, hooks in before:
        for key, hook in hooks.items():
            if _is_ours(hook):
                del table[key]
    try:
        yield
    finally:
        for table, hooks in before:
            added = {key: hook for key, hook in table.items() if key not in hooks}
            table.clear()
            table.update({**hooks, **added})


def _is_ours(hook: object) -> bool:
    return type(hook).__module__.startswith("ikkuna.")


class Evaluation(NamedTuple):
    """The results of a pass in evaluation mode.

    Parameters
    ----------
    output : Tensor
        The scores or predictions.
    loss : Tensor or None
        The loss, if the model computes it.
    draws : bool
        Whether a global random generator was used.
    """

    output: Tensor
    loss: Tensor | None
    draws: bool


class ObjectiveModel(nn.Module):
    """A model that returns what an objective of the user's computes with it, and the first call of the model itself.

    Parameters
    ----------
    module : nn.Module
        The model.
    objective : callable
        Called with the model and a batch.
    """

    def __init__(self, module: nn.Module, objective: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.module, self.objective = module, objective
        self.training = module.training

    def forward(self, batch: Any) -> dict[str, Any]:
        """Return the loss, and the arguments and the output of the first call of the model, by name."""
        calls: list[tuple[Any, Any, Any]] = []
        handle = self.module.register_forward_hook(lambda _, *call: calls.append(call), with_kwargs=True)
        try:
            loss = self.objective(self.module, batch)
        finally:
            handle.remove()
        args, kwargs, output = calls[0] if calls else ((), {}, None)
        return {"output": output, "loss": loss, "args": args, "kwargs": kwargs}


class TrainingSetup:
    """A model with a batch, a loss and optimizers; each pass leaves them as they were.

    A pass restores the model, the loss module and all random states, and starts with the random state of the user.

    Parameters
    ----------
    model : nn.Module
        The model.
    batch : Batch, optional
        The batch.
    loss : callable, optional
        Called with the output and the labels.
    optimizers : tuple of torch.optim.Optimizer
        The optimizers.
    causal : bool, optional
        Whether an output may depend only on earlier positions; ``None`` if the batch decides.
    objective : callable, optional
        Called with the model and the batch; then the batch has the only named input ``batch``, and the model computes the loss.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Batch | None = None,
        loss: Callable[..., Any] | None = None,
        optimizers: tuple[torch.optim.Optimizer, ...] = (),
        causal: bool | None = None,
        objective: Callable[[nn.Module, Any], Any] | None = None,
    ) -> None:
        self.model = without_replica_wrappers(model if objective is None else ObjectiveModel(model, objective))
        self.loss = loss
        self.optimizers = optimizers
        self.causal = causal
        self.names = {module: name or class_name(module).lower() for name, module in named_modules(model)}
        self.parameters = dict(named_parameters(model))
        if isinstance(loss, nn.Module):
            known = set(map(id, self.parameters.values()))
            own = {f"{class_name(loss).lower()}.{name}": p for name, p in named_parameters(loss)}
            self.parameters |= {name: p for name, p in own.items() if id(p) not in known}
        self._batch = batch if batch is None or self._device is None else batch.copy(self._device)

    @property
    def _device(self) -> torch.device | None:
        """The device of the parameters, if they have one device."""
        devices = {parameter.device for parameter in self.model.parameters()}
        return devices.pop() if len(devices) == 1 and "meta" not in {device.type for device in devices} else None

    # -- what exists without a pass
    @property
    def root(self) -> str:
        """The name of the model."""
        return self.names[next(iter(self.names))]

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that require a gradient, by name."""
        return {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}

    @property
    def batch(self) -> Batch:
        """The batch, on the device of the model.

        Raises
        ------
        CannotJudgeError
            If there is none, or if it is empty.
        """
        if self._batch is None:
            raise CannotJudgeError("no batch was given")
        tensors = self._batch.tensors
        if not tensors:
            raise CannotJudgeError("the batch contains no tensor")
        if self._batch.size == 0 or not any(tensor.numel() for tensor in tensors):
            raise CannotJudgeError("the batch is empty")
        return self._batch

    def require_values(self) -> None:
        """Raise `CannotJudgeError` if the parameters have no values."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        if any(is_lazy(tensor) for tensor in tensors):
            raise CannotJudgeError("the model has lazy parameters; call it once before")
        if any(tensor.is_meta for tensor in tensors):
            raise CannotJudgeError("the model is on the meta device, where tensors have no values")

    @property
    def _owners(self) -> list[nn.Module]:
        """The modules that passes run: the model, and the loss if it is a module."""
        return [self.model, *([self.loss] if isinstance(self.loss, nn.Module) else [])]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore attributes and values of the model and the loss after the body."""
        try:
            self.require_values()
        except CannotJudgeError:  # no pass will run
            yield
            return
        with restored(self._owners):
            yield

    # -- passes
    @contextmanager
    def running(self, *, as_training: bool = False, autograd: bool = False) -> Iterator[None]:
        """Restore everything after the body.

        Parameters
        ----------
        as_training : bool
            Use the modes in which the user left the modules, instead of evaluation mode.
        autograd : bool
            Record operations for a backward pass.
        """
        self.require_values()
        modes = [(module, module.training) for owner in self._owners for module in owner.modules()]
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(unobserved(self._owners))
            # in evaluation mode torch's encoder layers may read a mask of numbers as one of truth, which training adds to scores
            stack.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
            mha.set_fastpath_enabled(False)
            for owner in self._owners[1:]:
                stack.enter_context(undisturbed(owner, autograd=True))
            stack.enter_context(isolated(self.model))
            if as_training:
                for module, training in modes:
                    module.training = training
            stack.callback(_refresh_recurrent_weights, self.model)
            stack.enter_context(torch.set_grad_enabled(autograd))
            yield

    def random_states(self) -> RandomStates:
        """Return the states of the random generators, those of the model's device included."""
        return RandomReader({self._device} if self._device is not None else ()).read()

    def evaluate(self, batch: Batch, *, batch_statistics: bool = False) -> Evaluation:
        """Return what the model computes in evaluation mode.

        With ``batch_statistics=True`` batch norms stay in training mode: those of a new model do not normalise otherwise.

        Raises
        ------
        CannotJudgeError
            If the model raises, or if its output contains no tensor.
        """
        with self.running():
            if batch_statistics:
                train_norms(self.model)
            before = self.random_states()
            try:
                result = run_model(self.model, batch.copy().inputs)
            except Exception as error:
                raise CannotJudgeError(f"in evaluation mode the model raises {error_text(error)}") from error
            draws = not before.equals(self.random_states())
            output = main_output(result, batch.loss_inside)
            loss = inner_loss(result) if batch.loss_inside else None
        return Evaluation(output, loss, draws)

    def call_loss(self, result: Any, labels: Any) -> Tensor:
        """Return what the loss function returns for an output and labels."""
        assert self.loss is not None
        if isinstance(self.loss, nn.Module) and type(self.loss).__module__.startswith("torch."):
            result = getattr(result, "logits", result)  # the models of transformers return several values
        loss: Tensor = self.loss(result) if labels is None else self.loss(result, labels)
        if not isinstance(loss, Tensor):
            raise TypeError(f"the loss function returned a {type(loss).__name__} instead of a tensor")
        return loss


def train_norms(model: nn.Module) -> None:
    """Put batch norms into training mode."""
    for module in model.modules():
        if isinstance(module, BATCH_NORMS):
            module.training = True


def _refresh_recurrent_weights(model: nn.Module) -> None:
    """Let RNNs forget the weights that ``functional_call`` lent them."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module._update_flat_weights()
