"""Observes gradients: of what modules return, of micro-batches, before clipping, and all together in counted steps."""

import math
import weakref
from operator import attrgetter
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ikkuna.metrics.messages.kinds import MICRO_KINDS
from ikkuna.metrics.messages.stamp import TRAINING
from ikkuna.numerics.statistics import needed_fields
from ikkuna.numerics.statistics.host import HostStatistics
from ikkuna.numerics.statistics.native.kernels import ListMemory, flags_of
from ikkuna.numerics.statistics.record import Records
from ikkuna.observation.hooks.backward import BackwardHooks
from ikkuna.observation.hooks.context import HookContext
from ikkuna.observation.hooks.hook import Hook
from ikkuna.observation.hooks.nested_tensors import Leaves, with_batch_sizes
from ikkuna.observation.hooks.parameter_table import ParameterTable, Wanted
from ikkuna.observation.model.parameters import TrackedParameters
from ikkuna.observation.rows.plan import Key, Site
from ikkuna.observation.steps.forwards import MICRO_PART, Forward
from ikkuna.support.modules import is_flattened
from ikkuna.support.torch_internals import GLOBAL_FORWARD_HOOKS

CACHED = 8
"""Number of forwards of a step whose hooks serve the next steps as well."""


class OutputHooks:
    """The hooks of the gradient of one output by the number of the forward; ``None`` for those that have not been needed.

    Attributes
    ----------
    hooks : list
        The hooks.
    natives : list
        For each hook what native functions register in its place.
    """

    def __init__(self) -> None:
        self.hooks: list[Hook | None] = [None] * CACHED
        self.natives: list[object] = [None] * CACHED


class LayerGradientHooks:
    """Registers hooks on the outputs of modules, and records the gradients that they report.

    Parameters
    ----------
    context : HookContext
    backward : BackwardHooks
        Recognises which backward is running.

    Attributes
    ----------
    lasting : list
        The handles of hooks that would outlive a backward.
    """

    def __init__(self, context: HookContext, backward: BackwardHooks) -> None:
        self.context = context
        self._backward = backward
        self._hooks: dict[tuple[Site, str], OutputHooks] = {}
        self.lasting: list[Any] = []

    def of(self, site: Site, path: str = "") -> OutputHooks:
        """Return the hooks of an output."""
        return self._hooks.get((site, path)) or self._hooks.setdefault((site, path), OutputHooks())

    def watch(self, site: Site, module: nn.Module, outputs: Leaves, sizes: Tensor | None, forward: Forward) -> None:
        """Register hooks on the outputs of one call of a module; `sizes` are those of a packed sequence."""
        for path, output in outputs:
            if output.requires_grad:
                hook, native = self._hook(site, path, None if path else sizes, forward)
                base = output._base
                if base is None and self.context.native.watch(output, native):
                    continue
                if base is None:
                    handle = output.register_hook(hook)
                    if output.is_leaf:
                        self.lasting.append(handle)
                elif _owns_base(module) and base.requires_grad and base.numel() == output.numel() and not base.is_leaf:
                    base.register_hook(self._base_hook(_OfView(output), hook))
                else:
                    self.lasting += self._register_on_view(output, base, hook, outputs)

    def _base_hook(self, view: "_OfView", hook: Hook) -> Hook:
        return Hook(self, LayerGradientHooks.base_gradient_computed, view, *hook.bound)

    def _register_on_view(self, view: Tensor, base: Tensor, hook: Hook, outputs: Leaves) -> list[Any]:
        """Register hooks on a view and on its base; return the handles of those that would outlive the graph."""
        is_output = any(base is other for _, other in outputs)
        if is_output or not base.requires_grad or base.numel() != view.numel():
            handle = view.register_hook(hook)
            return [handle] if view.is_leaf else []
        state = _ViewGradient(view)
        of_view = Hook(self, LayerGradientHooks.view_gradient_computed, state, *hook.bound)
        handles = [view.register_hook(of_view), base.register_hook(self._base_hook(state, hook))]
        return handles if base.is_leaf else []

    def _hook(self, site: Site, path: str, sizes: Tensor | None, forward: Forward) -> tuple[Hook, object]:
        """Return the hook of an output, and what native functions register in its place."""
        context, number = self.context, forward.number
        of_output = self.of(site, path) if 0 <= number < CACHED and sizes is None else None
        if of_output is not None and (known := of_output.hooks[number]) is not None:
            return known, of_output.natives[number]
        hook = Hook(self, LayerGradientHooks.gradient_computed, site, path, sizes, forward)
        if of_output is None:
            return hook, None
        native = None if path else context.native.gradient_hook(context.recorder, site, forward, hook)
        of_output.natives[number], of_output.hooks[number] = native, hook
        return hook, native

    def gradient_computed(
        self, site: Site, path: str, sizes: Tensor | None, forward: Forward, grad: Tensor | None
    ) -> None:
        """Record a gradient; one of several outputs of a node, such as a fused LSTM, has none if nothing uses it."""
        context = self.context
        recorder = context.recorder
        if recorder.rows is None or grad is None:
            return
        part = self._backward.reach(forward)
        recorder.receive(site, with_batch_sizes(context.averaged(grad), sizes), path, part=part)
        if not context.loss_scale.is_used and context.replicas == 1:
            context.native.permit_gradients(recorder, forward, part)

    def view_gradient_computed(
        self,
        view: "_ViewGradient",
        site: Site,
        path: str,
        sizes: Tensor | None,
        forward: Forward,
        grad: Tensor | None,
    ) -> None:
        """Record the gradient of an output that is a view."""
        view.has_come = True
        self.gradient_computed(site, path, sizes, forward, grad)

    def base_gradient_computed(
        self, view: "_OfView", site: Site, path: str, sizes: Tensor | None, forward: Forward, grad: Tensor | None
    ) -> None:
        """Record the gradient of an output that is a view from that of its base, unless it comes to the view itself."""
        if grad is not None:
            self.gradient_computed(site, path, sizes, forward, view.of_base(grad))

    def step_ended(self) -> None:
        """Remove the hooks that would outlive a backward."""
        lasting, self.lasting = self.lasting, []
        for handle in lasting:
            handle.remove()


def _owns_base(module: nn.Module) -> bool:
    """Whether an output of a module that is a view is a view of a tensor that nothing else has.

    ``nn.Linear`` returns such a view for inputs with more than two axes, unless a second hook has replaced its output.
    """
    return type(module) is nn.Linear and len(module._forward_hooks) == 1 and not GLOBAL_FORWARD_HOOKS


class _OfView:
    """Makes the gradient of an output that is a view from that of its base."""

    __slots__ = ("size", "stride")

    def __init__(self, view: Tensor) -> None:
        self.size, self.stride = view.size(), view.stride()

    def of_base(self, grad: Tensor) -> Tensor | None:
        return grad.detach().contiguous().as_strided(self.size, self.stride)


class _ViewGradient(_OfView):
    """Remembers whether the gradient of an output that is a view has come to the view, or else comes to its base.

    An in-place operation on a view cuts the view's own hook off without an error; its gradient then arrives at the base.
    """

    __slots__ = ("has_come", "version", "view")

    def __init__(self, view: Tensor) -> None:
        super().__init__(view)
        self.has_come = False
        self.view = weakref.ref(view)
        self.version = view._version

    def of_base(self, grad: Tensor) -> Tensor | None:
        view = self.view()
        is_cut_off = not self.has_come and (view is None or view._version != self.version)
        return super().of_base(grad) if is_cut_off else None


class MicroGradientHooks:
    """Records the gradients of one micro-batch, before autograd adds them to those of the others.

    They are as autograd has computed them, without the factor of a gradient scaler: not clipped, and of this process alone.

    Parameters
    ----------
    context : HookContext
    table : ParameterTable
        Knows of which parameters a plan wants them.

    Attributes
    ----------
    is_used : bool
        Whether hooks are registered for this step.
    """

    def __init__(self, context: HookContext, table: ParameterTable) -> None:
        self.context = context
        self._table = table
        self.is_used = False
        self._hooked: list[tuple[Any, Any]] = []  # nodes and handles; a node has hooks only as long as it lives
        self._kept: object = None
        self._hooks: dict[Key, tuple[Hook, object]] = {}  # a node that lives on has one hook for all plans

    def step_opened(self) -> None:
        """Register hooks for the parameters whose micro-batch gradients a subscriber wants."""
        context, self.is_used = self.context, True
        listed, others = self._table.prepared(MICRO_KINDS, self._wanted)
        if listed:
            tensors: list[Tensor] = [each.parameter for each in listed]
            self._kept = context.native.watch_parameters(tensors, [each.native for each in listed])
        for each in others:
            # a hook on the parameter itself would also report gradients that are only returned to the user
            node = context.parameters.accumulate_node(each.parameter) if each.parameter.requires_grad else None
            if node is not None:
                self._hooked.append((node, node.register_prehook(each.hook)))

    def _wanted(self, wanted: Wanted) -> "tuple[list[_Parameter], list[_Parameter]]":
        """Return the parameters whose gradients are wanted: those with native hooks, and the others."""
        found: tuple[list[_Parameter], list[_Parameter]] = [], []
        for named in self.context.parameters.all:
            if (key := wanted.get(id(x := named.parameter))) is not None:
                hook, native = self._hook(key)
                is_plain = type(x) is nn.Parameter and x.layout is torch.strided and not is_flattened(x)
                found[native is None or not is_plain].append(_Parameter(x, hook, native))
        return found

    def _hook(self, key: Key) -> tuple[Hook, object]:
        if key not in self._hooks:
            recorder, hook = self.context.recorder, Hook(self, MicroGradientHooks.gradient_computed, *key)
            row = recorder.index.row(*key)
            self._hooks[key] = hook, self.context.native.micro_gradient_hook(recorder, row, hook)
        return self._hooks[key]

    def gradient_computed(self, site: Site, path: str, grads: tuple[Tensor | None, ...]) -> None:
        """Record a gradient that is about to be added."""
        context = self.context
        if (grad := grads[0]) is None or context.recorder.rows is None:
            return
        if context.tracker.pass_name == TRAINING:
            if context.loss_scale.is_used:
                grad = context.loss_scale.removed_from(grad)
            context.recorder.receive(site, grad, path, part=MICRO_PART)
            if not context.loss_scale.is_used:
                context.native.permit_micro_gradients(context.recorder)

    def step_ended(self) -> None:
        """Remove the hooks."""
        self.is_used = False
        hooked, self._hooked, self._kept = self._hooked, [], None
        for _, handle in hooked:
            handle.remove()


class _Parameter(NamedTuple):
    """A parameter, the hook of its gradient, and what native functions register in its place."""

    parameter: nn.Parameter
    hook: Hook
    native: object


_GRADIENT = attrgetter("grad")
_SQUARES = needed_fields(("sumsq",))
_SHARE = 0.001


class GradientNorm:
    """Reads the global norm of gradients of the host, as often as that takes a thousandth of the time of the steps.

    Parameters
    ----------
    tracked : TrackedParameters
        The parameters; one that several modules have counts once.

    Attributes
    ----------
    due : int
        The step whose gradients are read next.
    threshold : float
        A step with a larger norm, or NaN, is measured itself.
    """

    def __init__(self, tracked: TrackedParameters) -> None:
        self._tracked, self._statistics = tracked, HostStatistics()
        self.threshold = math.inf
        self._list_parameters()

    def expect(self, step: int) -> int:
        """Return the number of steps from a step to the next reading, also if the training was resumed at an earlier step."""
        if self._listed is not self._tracked.all:
            self._list_parameters()
        return min(max(self.due - step, 0), self._every)

    def _list_parameters(self) -> None:
        self._listed, self._every, self.due = self._tracked.all, 1, 0
        self._parameters = list({id(named.parameter): named.parameter for named in self._tracked.all}.values())
        count = len(self._parameters)
        self._rows, self._flags = np.arange(count), np.full(count, flags_of(_SQUARES), np.int32)
        self._memory = ListMemory(count)

    def read(self, step: int, seconds: float) -> float | None:
        """Return the norm; ``None`` if there is no gradient, one that the native library cannot read, or a parameter was replaced.

        Parameters
        ----------
        step : int
            The open step.
        seconds : float
            The time of a step.
        """
        began = perf_counter()
        norm = None if self._tracked.have_changed() else self._norm()
        self._every = math.ceil((perf_counter() - began) / (_SHARE * seconds)) if seconds > 0 else 1
        self.due = step + self._every
        return norm

    def _norm(self) -> float | None:
        kernels = self._statistics.kernels
        if kernels is None or kernels.reader is None or not self._parameters:
            return None
        gradients = list(map(_GRADIENT, self._parameters))
        left = kernels.reader.add_all(gradients, self._flags, self._statistics.addresses(self._rows), self._memory)
        values, _ = self._statistics.take(len(gradients))
        if len(left) or not values[:, 0].any():
            return None
        return math.hypot(*Records(values, _SQUARES).l2_norm.tolist())
