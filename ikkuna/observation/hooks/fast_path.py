"""Keeps the fast path of ``nn.TransformerEncoderLayer``, which torch switches off if a module in the layer has a hook.

In evaluation mode such a layer may be computed by one operator, whose bits differ from those of the modules one by one.
"""

import threading
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ikkuna.observation.hooks.context import HookContext
from ikkuna.observation.hooks.hook import Hook, Remove, remove_all
from ikkuna.support.failures import log


class _Call:
    """A running call of a layer whose hooks are put aside.

    Parameters
    ----------
    layer : nn.Module
        The layer.
    kwargs : dict
        The keyword arguments of its call.

    Attributes
    ----------
    has_seen_inside : bool
        Whether a module inside the layer was called.
    remove : callable, optional
        Removes the process-wide hooks that stand for those that are put aside.
    """

    def __init__(self, layer: nn.Module, kwargs: dict[str, Any]) -> None:
        self.layer, self.kwargs = layer, kwargs
        self.thread = threading.get_ident()
        self.has_seen_inside = False
        self.remove: Remove | None = None
        self.is_over = False
        self._held = [
            (module, hooks, key, hook)
            for module in layer.modules()
            for hooks in (module._forward_pre_hooks, module._forward_hooks)
            for key, hook in hooks.items()
            if isinstance(hook, Hook)
        ]
        for _, hooks, key, _ in self._held:
            hooks.pop(key, None)

    def hooks_of(self, module: nn.Module, before: bool) -> list[tuple[int, Hook]]:
        """Return the hooks of a module that are put aside, those before or after its forward."""
        kind = module._forward_pre_hooks if before else module._forward_hooks
        return [(key, hook) for owner, hooks, key, hook in self._held if owner is module and hooks is kind]

    def kwargs_of(self, module: nn.Module) -> dict[str, Any]:
        """Return the keyword arguments of the layer; torch passes those of other modules to no process-wide hook before a forward."""
        return self.kwargs if module is self.layer else {}

    def end(self) -> None:
        """Put the hooks back."""
        self.is_over, self.kwargs = True, {}
        held, self._held = self._held, []
        for _, hooks, key, hook in held:
            hooks[key] = hook

    @property
    def observes_inside(self) -> bool:
        """Whether hooks of modules inside the layer are put aside."""
        return any(module is not self.layer and hooks is module._forward_hooks for module, hooks, *_ in self._held)


class _Guard:
    """The hook before a layer's forward, and how many hooks in the layer need it."""

    def __init__(self, handle: Any) -> None:
        self.count = 0
        self._handle = handle

    def remove(self) -> None:
        """Remove the hook if no other needs it."""
        self.count -= 1
        if not self.count:
            self._handle.remove()


class _FastPathHook(Hook):
    """A hook that is called whether anything is recorded or not."""

    __slots__ = ()

    def resumes(self, context: Any) -> bool:
        """Return ``True``."""
        return True


class FastPathHooks:
    """Puts ikkuna's hooks in a transformer layer aside while the layer runs in evaluation mode.

    Meanwhile two process-wide hooks stand for them, which torch does not look for.
    So torch decides as without ikkuna, and modules that are called are observed in either case.

    Parameters
    ----------
    context : HookContext

    Attributes
    ----------
    layers : dict
        The layer that contains a module, by the module's id.
    calls : list
        Running calls of layers.
    """

    def __init__(self, context: HookContext) -> None:
        self.context = context
        self.calls: list[_Call] = []
        self.layers: dict[int, nn.Module] = {}
        self._guards: dict[int, _Guard] = {}
        self._warned = False

    def find(self, roots: Iterable[nn.Module]) -> None:
        """Find the layers with a fast path below `roots`."""
        found = (
            module for root in roots for module in root.modules() if isinstance(module, nn.TransformerEncoderLayer)
        )
        self.layers = {id(module): layer for layer in found for module in layer.modules()}

    def guard(self, module: nn.Module) -> "_Guard | None":
        """Guard the layer that contains `module`, if there is one, until the result is removed as often as it was returned."""
        layer = self.layers.get(id(module))
        if layer is None:
            return None
        guard = self._guards.get(id(layer))
        if guard is None or not guard.count:
            handle = layer.register_forward_pre_hook(_FastPathHook(self, FastPathHooks.layer_begins), with_kwargs=True)
            guard = self._guards[id(layer)] = _Guard(handle)
        guard.count += 1
        return guard

    def is_frozen(self, module: nn.Module) -> bool:
        """Return whether `module` is in a layer that a compiled graph may compute by one operator."""
        layer = self.layers.get(id(module))
        return layer is not None and not layer.training and not any(p.requires_grad for p in layer.parameters())

    def warn(self) -> None:
        """Log once that modules are not observed."""
        if not self._warned:
            self._warned = True
            log.warning(
                "torch computes an nn.TransformerEncoderLayer in evaluation mode by one operator: modules inside it are not called and "
                "not observed; torch.backends.mha.set_fastpath_enabled(False) makes torch call them"
            )

    def finish(self) -> None:
        """Put back the hooks of calls that were interrupted, and of those that have raised."""
        calls, self.calls = self.calls, []
        for call in calls:
            call.end()
            if call.remove is not None:
                call.remove()

    # -- calls ----------------------------------------------------------------------------------------------------

    def layer_begins(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Handle the beginning of a layer's forward."""
        if layer.training:
            return
        if any(call.is_over for call in self.calls):
            self.finish()
        call = _Call(layer, kwargs)
        self.calls.append(call)
        before = register_module_forward_pre_hook(_FastPathHook(self, FastPathHooks.module_begins, call))
        after = register_module_forward_hook(_FastPathHook(self, FastPathHooks.module_ends, call), always_call=True)
        call.remove = remove_all([before, after])

    def module_begins(self, call: _Call, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Call the hooks before a module's forward that are put aside."""
        if call.is_over or call.thread != threading.get_ident():
            return
        for key, hook in call.hooks_of(module, before=True):
            has_kwargs = key in module._forward_pre_hooks_with_kwargs
            hook(module, args, call.kwargs_of(module)) if has_kwargs else hook(module, args)

    def module_ends(self, call: _Call, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Call the hooks after a module's forward that are put aside; `output` is ``None`` if the forward has raised."""
        if call.is_over or call.thread != threading.get_ident():
            return
        call.has_seen_inside = call.has_seen_inside or module is not call.layer
        has_raised = output is None
        if module is call.layer and has_raised:
            call.end()  # torch calls those hooks itself; it iterates over the process-wide ones now, which stay for a while
            return
        for key, hook in call.hooks_of(module, before=False):
            if has_raised and key not in module._forward_hooks_always_called:
                continue
            has_kwargs = key in module._forward_hooks_with_kwargs
            hook(module, args, call.kwargs_of(module), output) if has_kwargs else hook(module, args, output)
        if module is call.layer:
            self._end(call)

    def _end(self, call: _Call) -> None:
        if call.observes_inside and not call.has_seen_inside:
            self.warn()
        call.end()
        self.calls.remove(call)
        if call.remove is not None:
            call.remove()
