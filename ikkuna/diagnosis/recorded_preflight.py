"""Checks of the loss on the outputs and labels of the first training step, without a pass of the model."""

from __future__ import annotations

import builtins
import copy
import dis
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodDescriptorType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ikkuna.diagnosis.objective.recorded import RecordedObjective
from ikkuna.diagnosis.preflight_checks.batch import Batch, tensors_of
from ikkuna.diagnosis.preflight_checks.contracts import LossCall, loss_calls
from ikkuna.diagnosis.preflight_checks.first_step import FirstStep
from ikkuna.diagnosis.preflight_checks.freed_outputs import freed_outputs
from ikkuna.diagnosis.preflight_checks.loss import loss_contract, softmax_twice
from ikkuna.diagnosis.preflight_checks.outputs import CannotJudgeError, last_operations, main_output
from ikkuna.diagnosis.preflight_checks.runs import label_shape
from ikkuna.diagnosis.preflight_checks.trial import Check, Trial
from ikkuna.store.finding import Finding
from ikkuna.support.failures import error_text, log, switched
from ikkuna.support.saved_losses import SavedLoss
from ikkuna.support.threads import run_apart
from ikkuna.support.torch_internals import has_global_hooks, pytree
from ikkuna.support.undisturbed import gradients, undisturbed

_CHECKS: dict[Check, str] = {
    label_shape: "the shape of the labels",
    loss_contract: "the arguments of the loss",
    softmax_twice: "a second softmax",
    freed_outputs: "the optimum, the lower bound and the gradients of the loss",
}
_MOST_ELEMENTS = 1_000_000
_SECONDS = 0.5  # of CPU time, so that a busy machine checks as much as another one
_PATIENCE = 10  # times as much wall time, for a loss that waits
_HIDING = ("CompiledFunction", "CheckpointFunction")
_COMPILED = ("_orig_mod", "_torchdynamo_orig_callable", "_compiled_call_impl")


class _Recorded(NamedTuple):
    """Copies of the loss and of the arguments of its first call, and their last operations by the addresses of the copies.

    If they are outputs and labels, these are in `step` and `labels`.
    """

    loss: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    produced_by: dict[int, tuple[str, ...]]
    step: FirstStep
    labels: Tensor | None


class RecordedPreflight:
    """Records the first call of the loss in training, and checks it when the step has ended.

    The checks call a copy of the loss with copies of outputs and labels, on a thread of their own, for which the caller waits: the modes
    and numbers of autograd, which belong to a thread, stay as they are.  They never call the model.
    After 0.5 s of CPU time, or ten times as much wall time, no further call of the loss begins.
    A loss that could change something outside of it, such as a list or a model, is not called, see `why_impure`.

    Parameters
    ----------
    model : nn.Module, optional
        The model, held weakly.

    Attributes
    ----------
    reason : str
        Why nothing, or not everything, could be judged; empty if everything was.
    objective : RecordedObjective
        Reads what the first backward passes are called on.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._model = weakref.ref(nn.Module() if model is None else model)
        self.objective = RecordedObjective(model)
        self._recorded: _Recorded | None = None
        self.reason = "the loss was not seen: pass it as watch(model, loss)"

    @property
    def note(self) -> str:
        """A line that says what was not judged, and what judges it; empty if everything was."""
        if not self.reason:
            return ""
        return (
            f"The loss was not checked completely at the first step ({self.reason}); "
            "ikkuna.preflight(model, batch, loss, optimizer) checks it before training."
        )

    def record(self, loss: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], value: Tensor) -> None:
        """Copy what a call of the loss has received.

        Parameters
        ----------
        loss : callable
            The loss module, or the function of the user.
        args, kwargs : tuple, dict
            Its positional and named arguments.
        value : Tensor
            What it has returned.
        """
        self._record(lambda: _recorded(loss, args, kwargs, value))

    def record_saved(self, saved: SavedLoss | None) -> None:
        """Copy what the nodes of the first loss have saved; ``None`` if it is none of torch's losses."""
        self._record(lambda: _of_saved(saved))

    def _record(self, make: Callable[[], _Recorded]) -> None:
        try:
            self._recorded = make()
        except CannotJudgeError as reason:
            self.reason = str(reason)
        except Exception as error:
            self._failed(error)

    def findings(self) -> list[Finding]:
        """Check what was recorded since the last call, and return the findings."""
        recorded, self._recorded = self._recorded, None
        found = self.objective.findings()
        if recorded is None:
            return found
        model = self._model()
        trial = _RecordedTrial(nn.Module() if model is None else model, recorded)

        def judge() -> None:
            try:
                self._judge(trial, found)
            except Exception as error:
                self._failed(error)

        run_apart(judge, "ikkuna-preflight", trial.end)
        return found

    def _judge(self, trial: _RecordedTrial, found: list[Finding]) -> None:
        reasons: list[str] = []
        late: list[str] = []
        trial.begin()
        for check, name in _CHECKS.items():
            try:
                for finding in check(trial):
                    if not trial.may_be_padding(finding):
                        found.append(finding)
            except CannotJudgeError as reason:
                if trial.is_over:
                    late.append(name)
                elif check is freed_outputs:
                    reasons.append(f"{name}: {reason}")
            except Exception as error:
                reasons.append(f"{name}: the check raised {error_text(error)}")
                log.debug("the check %s failed", check.__name__, exc_info=True)
        if late:
            reasons.append(f"the time of {_SECONDS:g} s was over before {' and '.join(late)} had been tried")
        self.reason = "; ".join(reasons)

    def _failed(self, error: Exception) -> None:
        self.reason = f"the check raised {error_text(error)}"
        log.error("the checks of the first step failed (training is not affected)", exc_info=error)


def _refusal(loss: Callable[..., Any], given: list[Tensor]) -> str:
    """Return why a loss cannot be called with copies of the tensors that it was given; empty if it can."""
    reasons = {
        "outputs and labels are no plain tensors": any(
            type(t) not in (Tensor, nn.Parameter) or t.layout is not torch.strided for t in given
        ),
        "outputs and labels are on an accelerator": any(not t.is_cpu for t in given),
        f"outputs and labels have more than {_MOST_ELEMENTS:,} elements": sum(t.numel() for t in given)
        > _MOST_ELEMENTS,
        "hooks of all modules are registered": has_global_hooks(),
        "the loss is compiled": any(getattr(loss, name, None) is not None for name in _COMPILED),
        "the loss is computed under autocast": torch.is_autocast_enabled("cpu"),
    }
    return next((reason for reason, holds in reasons.items() if holds), "") or why_impure(loss)


def _of_saved(saved: SavedLoss | None) -> _Recorded:
    if saved is None:
        raise CannotJudgeError(
            "backward() is called on something else than one loss of torch: pass the loss as watch(model, loss)"
        )
    if reason := _refusal(saved.loss, [saved.outputs, saved.labels]):
        raise CannotJudgeError(reason)
    value = switched([gradients(False)], saved.loss, saved.outputs, saved.labels)
    outputs = saved.outputs.detach().requires_grad_()
    return _recorded(saved.loss, (outputs, saved.labels), {}, value, last_operations(saved.behind))


def _recorded(
    loss: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    value: Tensor,
    produced_by: tuple[str, ...] | None = None,
) -> _Recorded:
    if reason := _refusal(loss, tensors_of((args, kwargs))):
        raise CannotJudgeError(reason)
    operations: dict[int, tuple[str, ...]] = {}

    def copied_tensor(tensor: Tensor) -> Tensor:
        copied = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        operations[copied.data_ptr()] = last_operations(tensor.grad_fn) if produced_by is None else produced_by
        return copied

    copies, named = pytree.tree_map_only(Tensor, copied_tensor, (args, kwargs))
    if any(each[0].startswith(_HIDING) for each in operations.values() if each):
        raise CannotJudgeError("the last operation of the outputs is hidden in compiled or checkpointed code")
    try:
        copied = copy.deepcopy(loss)
    except Exception as error:
        raise CannotJudgeError(f"the loss cannot be copied: {error_text(error)}") from error
    step, labels = FirstStep(loss=value.detach().clone(), has_gradient=True), None
    given = (*copies, *named.values())
    if len(given) == 2 and isinstance(given[1], Tensor) and not given[1].requires_grad:
        step.result, labels = pytree.tree_map_only(Tensor, Tensor.detach, given[0]), given[1]
        step.output = main_output(step.result, loss_inside=False)
        step.produced_by = operations[step.output.data_ptr()]
    return _Recorded(copied, (copies, named), operations, step, labels)


class _RecordedTrial(Trial):
    """A trial whose first step was recorded in training, and whose model is never called."""

    def __init__(self, model: nn.Module, recorded: _Recorded) -> None:
        super().__init__(model, None, recorded.loss)
        self._recorded = recorded
        self._batch = None if recorded.labels is None else Batch(recorded.step.result, recorded.labels)
        self._is_ended = False
        self.first_step = recorded.step
        self.begin()

    def begin(self) -> None:
        """Begin to count the time of the calling thread."""
        self._begin = time.thread_time(), time.monotonic()

    def end(self) -> None:
        """Let the next call of the loss be refused."""
        self._is_ended = True

    @property
    def is_over(self) -> bool:
        """Whether the time of the thread that has begun, which reads this, is over."""
        busy, passed = time.thread_time() - self._begin[0], time.monotonic() - self._begin[1]
        return self._is_ended or busy >= _SECONDS or passed >= _PATIENCE * _SECONDS

    @cached_property
    def loss_calls(self) -> list[LossCall]:
        """The calls of losses of torch of the copy of the loss."""
        args, kwargs = self._recorded.arguments
        with self.running(as_training=True, autograd=True), loss_calls() as calls:
            self.loss(*args, **kwargs)  # type: ignore[misc]  # there is a loss
        return [call.behind(self._recorded.produced_by) for call in calls]

    def evaluate(self, batch: Batch, *, batch_statistics: bool = False) -> Any:
        """Refuse: the model is not called.

        Raises
        ------
        CannotJudgeError
            Always.
        """
        raise CannotJudgeError("the model is not called while it trains")

    @contextmanager
    def running(self, *, as_training: bool = False, autograd: bool = False) -> Iterator[None]:
        """Restore random states, and the copy of the loss, after the body."""
        owner = self.loss if isinstance(self.loss, nn.Module) else nn.Module()
        with warnings.catch_warnings(), undisturbed(owner, train=owner.training, autograd=autograd):
            warnings.simplefilter("ignore")
            yield

    def call_loss(self, result: Any, labels: Any) -> Tensor:
        """Return what the copy of the loss returns.

        Raises
        ------
        CannotJudgeError
            If the time is over.
        """
        if self.is_over:
            raise CannotJudgeError("the time is over")
        return super().call_loss(result, labels)

    def may_be_padding(self, finding: Finding) -> bool:
        """Return whether a label without a gradient may be the padding of sequences, whose axis the labels do not show."""
        if finding.rule != "labels_without_gradient" or self.batch.labels.ndim > 1:
            return False
        return any(isinstance(module, nn.Embedding | nn.RNNBase) for module in self.names)


# -- losses that change nothing but themselves ---------------------------------------------------------------------------

_PACKAGES = ("torch", "math")
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_BUILTINS = (
    *("abs", "all", "any", "bool", "dict", "divmod", "enumerate", "filter", "float", "getattr", "hasattr", "int", "isinstance"),
    *("len", "list", "map", "max", "min", "pow", "range", "reversed", "round", "set", "slice", "sorted", "str", "sum", "super"),
    *("tuple", "type", "zip", "Exception", "ValueError", "TypeError", "RuntimeError", "AssertionError"),
)  # fmt: skip
_CHANGES = ("STORE_GLOBAL", "DELETE_GLOBAL", "IMPORT_NAME")
_HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def why_impure(loss: Callable[..., Any]) -> str:
    """Return what a loss refers to that a further call could change, in a sentence; empty if there is nothing.

    The functions of the loss, and those that they call, may refer to functions and modules of torch and to constants only.
    A loss with parameters is refused, because it contains a model.

    Examples
    --------
    >>> why_impure(nn.CrossEntropyLoss()), why_impure(lambda output, y: (output - y).abs().mean())
    ('', '')
    >>> why_impure(lambda output, y: print(output))
    'the loss refers to print'
    """
    try:
        reference = next(_outside(loss, "itself", set()), "")
    except RecursionError:
        return "the loss refers to too much"
    return f"the loss refers to {reference}" if reference else ""


def _outside(value: Any, name: str, seen: set[int]) -> Iterator[str]:
    """Yield the names of what a value refers to that is neither of torch nor a constant."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        yield from _outside_module(value, name, seen)
    elif isinstance(value, partial):
        yield from _outside(value.func, name, seen)
        for part in (*value.args, *value.keywords.values()):
            if not (isinstance(part, Tensor) and _is_of_packages(value.func)):
                yield from _outside(part, name, seen)
    elif isinstance(value, tuple | frozenset):
        for part in value:
            yield from _outside(part, name, seen)
    elif isinstance(value, _CONSTANTS) or _is_of_packages(value):
        return
    elif isinstance(value, FunctionType):
        yield from _outside_function(value, seen)
    else:
        yield name


def _outside_module(module: nn.Module, name: str, seen: set[int]) -> Iterator[str]:
    if any(True for _ in module.parameters()):
        yield "parameters of its own"
    for each in module.modules():
        # a hook of ikkuna is left out in copies
        hooks = (hook for table in _HOOK_TABLES for hook in vars(each)[table].values())
        if any(not type(hook).__module__.startswith("ikkuna.") for hook in hooks):
            yield "hooks"
        if _is_of_packages(type(each)):
            continue
        containers = vars(nn.Module()).keys()
        for key, value in vars(each).items():
            if key not in containers and not isinstance(value, Tensor):
                yield from _outside(value, f"its attribute {key}", seen)
        for function in _methods(type(each)):
            yield from _outside_function(function, seen)


def _methods(cls: type) -> Iterator[FunctionType]:
    """Yield the user's methods and properties of a class, without those that only its construction calls."""
    for each in cls.__mro__:
        if _is_of_packages(each):
            break
        for name, value in vars(each).items():
            function = getattr(value, "fget", None) or getattr(value, "__func__", value)
            if name != "__init__" and isinstance(function, FunctionType):
                yield function


def _outside_function(function: FunctionType, seen: set[int]) -> Iterator[str]:
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    for name, cell in cells.items():
        if name != "__class__":
            yield from _outside(cell.cell_contents, name, seen)
    for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield from _outside(default, "a default", seen)
    for code in _codes(function.__code__):
        for instruction in dis.get_instructions(code):
            what, name = instruction.opname, instruction.argval
            if what in _CHANGES or (what == "STORE_DEREF" and name in cells):
                yield str(name)
            elif what in ("LOAD_GLOBAL", "LOAD_NAME"):
                if name in function.__globals__:
                    yield from _outside(function.__globals__[name], name, seen)
                elif name not in _BUILTINS and hasattr(builtins, name):
                    yield name


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _is_of_packages(value: Any) -> bool:
    """Return whether a function, class or module belongs to torch or to mathematics."""
    if isinstance(value, ModuleType):
        name: Any = value.__name__
    elif isinstance(value, type | FunctionType):
        name = value.__module__
    elif isinstance(value, BuiltinFunctionType | MethodDescriptorType):
        owner = getattr(value, "__self__", None) or getattr(value, "__objclass__", None)
        name = (
            getattr(value, "__module__", None) or getattr(owner, "__module__", None) or getattr(owner, "__name__", "")
        )
    else:
        return False
    return name.partition(".")[0] in _PACKAGES
