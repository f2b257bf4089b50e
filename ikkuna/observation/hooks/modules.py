"""Registers hooks on the observed modules for sampled steps, and keeps them where a compiled graph contains them."""

from collections.abc import Iterable
from typing import Any

from torch import jit, nn

from ikkuna.metrics.messages.kinds import FORWARD_KINDS, MICRO_KINDS, OBSERVED, UNCLIPPED_KINDS
from ikkuna.metrics.messages.stamp import TRAINING
from ikkuna.metrics.subscriber.registered import Registered
from ikkuna.numerics.statistics.native.hook_functions import Function
from ikkuna.observation.hooks.call_stack import in_compiled_call
from ikkuna.observation.hooks.context import HookContext, ObservedSites
from ikkuna.observation.hooks.fast_path import FastPathHooks
from ikkuna.observation.hooks.forward import ForwardHooks
from ikkuna.observation.hooks.gradients import LayerGradientHooks
from ikkuna.observation.hooks.in_graph import CompiledModules, CompilerStance, GraphSwitch, ModuleHook
from ikkuna.observation.hooks.observed import ObservedHooks
from ikkuna.observation.rows.plan import Plan, Site
from ikkuna.observation.steps.step_tracker import State
from ikkuna.support.failures import log
from ikkuna.support.modules import NamedModule

_OF_BACKWARD = frozenset(("loss", *MICRO_KINDS, *UNCLIPPED_KINDS))
"""Kinds of which nothing is recorded in a backward unless the step has begun before it."""

_NO_SITES = ObservedSites()


class _Registration:
    """A hook that is registered on a module, and can be registered again after it was removed.

    Parameters
    ----------
    hook : ModuleHook
    module : nn.Module
    is_first : bool
        Whether it comes before other hooks: that of a root is registered inside the root's own call.

    Attributes
    ----------
    guard : RemovableHandle, optional
        A second hook of the module, which is removed with it.
    """

    __slots__ = ("_handle", "_is_first", "_module", "guard", "hook")

    def __init__(self, hook: ModuleHook, module: nn.Module, is_first: bool) -> None:
        self.hook, self._module, self._is_first = hook, module, is_first
        self.guard: Any = None
        self._handle = module.register_forward_hook(hook, prepend=is_first)

    def remove(self) -> None:
        """Remove the hook."""
        self._module._forward_hooks.pop(self._handle.id, None)
        if self.guard is not None:
            self.guard.remove()

    def repeat(self) -> None:
        """Register the hook again, which has no guard; this costs a tenth of a first registration."""
        hooks: Any = self._module._forward_hooks
        hooks[self._handle.id] = self.hook
        if self._is_first:
            hooks.move_to_end(self._handle.id, last=False)


BACKWARD = "backward of a compiled root"
"""The kind of the site to which compiled graphs report backwards; it is no kind of message."""


class ModuleHooks:
    """Registers and removes the hooks of observed modules.

    A compiled graph contains what the hooks have added, and expects them at every call; there they stay registered,
    and a switch says whether the next step is sampled.  A model proves to be compiled at its first call; until then the hooks stay.

    Parameters
    ----------
    context : HookContext
    forward : ForwardHooks
        Handles the calls.
    fast_paths : FastPathHooks
        Keeps the hooks from changing what transformer layers compute.
    observed : ObservedHooks
        Records what the model passes to ``observe``.
    gradients : LayerGradientHooks
        Has the hooks of gradients.
    in_graph : bool
        Whether compiled models are measured in their graphs; otherwise sampled steps run without the compiler.

    Attributes
    ----------
    switch : GraphSwitch, optional
        ``None`` if compiled models are not measured in their graphs.
    compiled : CompiledModules
        Recognises modules that were compiled.
    """

    def __init__(
        self,
        context: HookContext,
        forward: ForwardHooks,
        fast_paths: FastPathHooks,
        observed: ObservedHooks,
        gradients: LayerGradientHooks,
        in_graph: bool = True,
    ) -> None:
        self._context = context
        self._fast_paths = fast_paths
        self._forward = forward
        self._observed = observed
        self._gradients = gradients
        self.switch = GraphSwitch() if in_graph else None
        self._is_settled = not in_graph
        self._has_warned_of_script = False
        self._stance = CompilerStance()
        self.compiled = CompiledModules()
        self._traced: set[str] = set()
        self.sampled_for: Plan | None = None
        self.installed_for: Plan | None = None
        self._hooks: dict[str, _Registration] = {}
        self._complete: tuple[Any, ...] | None = None  # the sites of the plan whose hooks are all registered
        self._kept: dict[tuple[Any, ...], dict[str, _Registration]] = {}  # the hooks of such plans that were removed
        self._wishes: tuple[Registered, ...] = ()
        self._are_early = False
        forward.root_begins_call, forward.root_has_begun = self.settle, self.remove_early
        forward.native_function = self._native_function

    def prepare(self, wishes: Plan, next_step: Plan) -> bool:
        """Handle a change of what subscribers want; return whether a compiled model has to be compiled again.

        Parameters
        ----------
        wishes : Plan
            Everything that is wanted at any step.
        next_step : Plan
            What is wanted at the next step.
        """
        model, switch = self._context.model, self.switch
        self._kept.clear()
        if switch is None:
            self.set_sampled(next_step)
            return False
        if switch.root is None:
            sites = self._context.sites
            network = ObservedSites(sites("input_data"), sites("network_output"), sites(BACKWARD))
            switch.root = sites.number("", network)
        switch.inputs, switch.outputs = (
            wishes.task(kind, None) is not None for kind in ("input_data", "network_output")
        )
        self.set_sampled(next_step)
        observed = (*model.callable, *(named.module for named in model.modules))
        model.is_compiled = model.is_compiled or self.compiled.includes(observed)
        if not model.is_compiled:
            self.compiled.drop_programs_of_others(observed)
        if self._is_settled and not model.is_compiled:
            return False
        self._wishes = wishes.subscriptions
        return self.install(wishes) and model.is_compiled

    def set_sampled(self, plan: Plan) -> None:
        """Prepare compiled models, and the calls of ``observe``, for the next step."""
        self._observed.set_wanted(OBSERVED in plan.kinds)
        if self.switch is not None:
            self.switch.on = plan.is_in_graph
            self.switch.loss = "loss" in plan.kinds
        self._stance.set_eager(plan.is_in_graph and self.switch is None)
        self.sampled_for = plan

    def set_sampled_pass(self, plan: Plan) -> None:
        """Run compiled models eagerly in another pass that is observed: their graphs measure only training."""
        self.sampled_for = None
        self._observed.set_wanted(OBSERVED in plan.kinds)
        self._stance.set_eager(plan.is_in_graph and (self._context.model.is_compiled or self.switch is None))

    def settle(self, is_compiled: bool) -> None:
        """Handle the beginning of the call of a root: the first one shows whether it is that of a compiled graph."""
        context = self._context
        context.model.is_compiled = context.model.is_compiled or is_compiled
        self._forward.root_begins_call = None
        if not self._is_settled:
            self._is_settled = True
            tracker = context.tracker
            self._are_early = tracker.state is State.IDLE and tracker.pass_name == TRAINING

    def remove_early(self) -> None:
        """Remove the hooks that were registered before the first call, unless they are those of the step that the call has opened."""
        self._forward.root_has_begun = None
        if self._are_early:
            self._are_early = False
            self.remove()

    def was_traced(self, module: str | None) -> None:
        """Handle a measurement of a module in a compiled graph: its hooks must stay."""
        if module is not None:
            self._traced.add(module)

    def install(self, plan: Plan) -> bool:
        """Register hooks on the modules whose outputs `plan` wants; return whether any hook was registered."""
        if self._serve(plan):
            return False
        if self._are_early and plan.subscriptions != self._wishes:
            self.remove_early()
        if self._is_settled:
            self._are_early, self._wishes = False, ()
        self.installed_for = plan
        # the calls of its parts are the only sign of a model that is never called as a whole
        needs_calls = self._context.tracker.is_rootless and not plan.kinds.isdisjoint(_OF_BACKWARD)
        if not (plan.forward or needs_calls):
            return False
        self._complete = None
        if not needs_calls and self._repeat(plan):
            return True
        model, found, kinds = self._context.model, False, [kind in plan.kinds for kind in FORWARD_KINDS]
        may_be_compiled = bool(self._fast_paths.layers) and (
            model.is_compiled or not self._is_settled or in_compiled_call()
        )
        roots = {id(root) for root in model.callable}
        if self.switch is not None:
            self._context.sites.create_numbers(named.name for named in model.modules)
        for named in model.modules:
            known = self._hooks.get(named.name)
            had = known.hook.sites if known else _NO_SITES
            sites = ObservedSites(
                *(
                    self._site(plan, kind, named, site) if is_wanted else site
                    for kind, site, is_wanted in zip(FORWARD_KINDS, had, kinds, strict=True)
                )
            )
            if sites == had and (known or not needs_calls):
                continue
            if self._takes_no_hook(named, may_be_compiled):
                continue
            self._observe(named, sites, is_root=id(named.module) in roots)
            found = True
        self._complete = plan.forward_sites
        return found

    def _repeat(self, plan: Plan) -> bool:
        """Register the hooks again that an earlier step has had for such a plan; return whether there are any."""
        if self._hooks or (kept := self._kept.get(plan.forward_sites)) is None:
            return False
        for name, registration in kept.items():
            registration.repeat()
            self._hooks[name] = registration
        self._complete = plan.forward_sites
        return True

    def _serve(self, plan: Plan) -> bool:
        """Return whether the hooks that are registered are those of a plan."""
        known = self.installed_for
        if plan is known:
            return True
        if known is None or self._are_early or not self._is_settled or self._context.tracker.is_rootless:
            return False
        if is_served := plan.forward_sites == known.forward_sites:
            self.installed_for = plan
        return is_served

    def _takes_no_hook(self, named: NamedModule, may_be_compiled: bool) -> bool:
        """Whether a module is scripted, or a hook would change how it computes; logged once."""
        if isinstance(named.module, jit.ScriptModule):
            if not self._has_warned_of_script:
                self._has_warned_of_script = True
                log.warning("%s is a scripted module: of such modules only the parameters can be observed", named.name)
            return True
        if (is_frozen := may_be_compiled and self._fast_paths.is_frozen(named.module)) and self._is_settled:
            self._fast_paths.warn()
        return is_frozen

    def _observe(self, named: NamedModule, sites: ObservedSites, is_root: bool) -> None:
        """Register the hook of a module, or let the hook that it has observe other tensors."""
        number = None if self.switch is None else self._context.sites.number(named.name, sites)
        # rows exist before the first measurement, because the table of what is wanted is made once for all of them
        for site in filter(None, sites):
            self._context.recorder.index.row(site, "")
        if known := self._hooks.get(named.name):
            known.hook.observe(sites, number)
            return
        hook = ModuleHook(self._forward, ForwardHooks.module_called, sites, number, self.switch)
        registration = _Registration(hook, named.module, is_root)
        if self._fast_paths.layers:
            registration.guard = self._fast_paths.guard(named.module)
        self._hooks[named.name] = registration

    def _native_function(self, module: nn.Module, sites: ObservedSites) -> Function | None:
        """Return the native function of the hook of a module."""
        context = self._context
        gradients = [] if sites.gradients is None else self._gradients.of(sites.gradients).natives
        forward_hooks = module._forward_hooks if type(module) is nn.Linear else None
        return context.native.output_function(context.recorder, sites, forward_hooks, gradients)

    def _site(self, plan: Plan, kind: str, named: NamedModule, had: Site | None) -> Site | None:
        return self._context.sites(kind, named.name) if plan.task(kind, named.name) else had

    def keep_for(self, plan: Plan) -> None:
        """Remove hooks after a step, unless the next step needs the same ones."""
        if not plan.forward or not self._serve(plan):
            self.remove()

    def forget(self, names: Iterable[str]) -> None:
        """Remove the hooks of modules that are not observed any more."""
        self.installed_for = None
        self._kept.clear()
        if self._fast_paths.calls:
            self._fast_paths.finish()
        self._complete = None
        for name in names:
            if (known := self._hooks.pop(name, None)) is not None:
                known.remove()

    def remove_lost(self) -> None:
        """Remove hooks that were registered, but not stored, because an exception came between."""
        for named in self._context.model.modules:
            hooks = named.module._forward_hooks
            ours = [i for i, h in hooks.items() if isinstance(h, ModuleHook) and h.owner() is self._forward]
            for number in ours[named.name in self._hooks :]:
                del hooks[number]

    def remove(self, everything: bool = False) -> None:
        """Remove hooks; without `everything` those stay that a compiled graph contains."""
        self.installed_for = None
        # at first, so that an interrupted removal keeps no part of the hooks
        complete, self._complete = self._complete, None
        if self._fast_paths.calls:
            self._fast_paths.finish()
        if everything:
            self.sampled_for = None
            self._stance.set_eager(False)
            self._kept.clear()
        removed: dict[str, _Registration] = {}
        for name in list(self._hooks):
            if everything or not (self._context.model.is_compiled or name in self._traced):
                removed[name] = self._hooks.pop(name)
                removed[name].remove()
        if complete is not None and not (
            everything or self._hooks or self._fast_paths.layers or self._context.tracker.is_rootless
        ):
            self._kept[complete] = removed
