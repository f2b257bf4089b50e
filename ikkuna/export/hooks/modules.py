"""The hooks on modules whose outputs somebody wants, and when they are there."""

from typing import TYPE_CHECKING

from torch import nn

from ikkuna.export.hooks.compiler_stance import Stance
from ikkuna.export.hooks.hook import ModulePlaces, ModuleTap, Switch, Undo, tap_module, was_compiled
from ikkuna.export.messages.kinds import FORWARD_KINDS
from ikkuna.export.rows.plan import Plan
from ikkuna.export.rows.site import Site
from ikkuna.export.steps.step_tracker import TRAINING
from ikkuna.modules import NamedModule

if TYPE_CHECKING:
    from ikkuna.export.session import Session

__all__ = ["ForwardTaps"]


class ForwardTaps:
    """Puts hooks on modules for a sampled step and takes them off before one that is not, unless a compiler has traced them.

    A compiled graph holds what the hooks left in it and looks for them at every call, so there they stay, and a switch
    says whether the coming step is sampled.  Whether the model is compiled shows at its first call: until then hooks are on.

    Parameters
    ----------
    observer : who keeps the step
    in_graph : whether compiled models are looked at within their graphs; otherwise sampled steps run without the compiler

    Attributes
    ----------
    modules, roots : what is looked at, and whose calls are forwards of the whole
    switch : what traced hooks ask; ``None`` where hooks are not to be traced
    is_compiled : whether a compiled root was called
    """

    def __init__(self, observer: "Session", in_graph: bool = True) -> None:
        self._observer = observer
        self.modules: tuple[NamedModule, ...] = ()
        self.roots: tuple[nn.Module, ...] = ()
        self.switch = Switch() if in_graph else None
        self.is_compiled = False
        self._is_settled = not in_graph
        self._stance = Stance()
        self._traced: set[str] = set()
        self._installed_for: Plan | None = None
        self._taps: dict[str, tuple[ModuleTap, Undo]] = {}

    def prepare(self, all_wishes: Plan, next_step: Plan) -> bool:
        """Take a change of what is wanted; say whether a compiled model has to be traced anew."""
        if self.switch is None:
            self.turn(next_step)
            return False
        self.switch.root = self._observer.place("input_data").slot
        self.switch.inputs, self.switch.outputs = (
            self._observer.place(kind).slot if all_wishes.task(kind, None) else -1
            for kind in ("input_data", "network_output")
        )
        self.turn(next_step)
        self.is_compiled = self.is_compiled or any(
            map(was_compiled, (*self.roots, *(named.module for named in self.modules)))
        )
        if self._is_settled and not self.is_compiled:
            return False
        return self.install(all_wishes) and self.is_compiled

    def is_found_compiled(self) -> bool:
        """Whether a root proves to be compiled that was not known to be."""
        return self.switch is not None and not self.is_compiled and any(map(was_compiled, self.roots))

    def turn(self, plan: Plan) -> None:
        """Tell traced hooks what the coming step wants, or have it run eagerly if they are not to be traced."""
        if self.switch is not None:
            self.switch.on = plan.is_in_graph
        self._stance.be_eager(plan.is_in_graph and self.switch is None)

    def turn_for_pass(self, plan: Plan) -> None:
        """Have another pass of a compiled model run eagerly if anybody wants to see it: its graph holds no look at a tensor."""
        self._stance.be_eager(plan.is_in_graph and (self.is_compiled or self.switch is None))

    def settle(self, is_compiled: bool) -> None:
        """Take the call of a root; a first one that is not traced shows that hooks can come and go."""
        self.is_compiled = self.is_compiled or is_compiled
        if not self._is_settled:
            self._is_settled = True
            clock = self._observer.clock
            in_use = clock.is_open or clock.pass_name != TRAINING  # what is there is there for the step or pass
            if not in_use:
                self.remove()

    def was_traced(self, module: str | None) -> None:
        """Note that a compiled graph has looked at a module."""
        if module is not None:
            self._traced.add(module)

    def install(self, plan: Plan) -> bool:
        """Put hooks on the modules whose outputs `plan` wants; say whether any were put."""
        if plan is self._installed_for:
            return False
        self._installed_for = plan
        found = False
        for named in self.modules if plan.forward else ():
            known = self._taps.get(named.name)
            had = known[0].places if known else ModulePlaces()
            places = ModulePlaces(
                *(self._place(plan, kind, named, place) for kind, place in zip(FORWARD_KINDS, had, strict=True))
            )
            if places == had:
                continue
            if known:
                known[1]()  # it looks at less than is wanted now
            is_root = any(named.module is root for root in self.roots)
            self._taps[named.name] = tap_module(named.module, self._observer.model, places, self.switch, is_root)
            found = True
        return found

    def _place(self, plan: Plan, kind: str, named: NamedModule, had: Site | None) -> Site | None:
        return self._observer.place(kind, named.name) if plan.task(kind, named.name) else had

    def keep_for(self, plan: Plan) -> None:
        """Take hooks off after a step, unless the next one wants the very same."""
        if not plan.forward or plan is not self._installed_for:
            self.remove()

    def remove(self, everything: bool = False) -> None:
        """Take hooks off, but for those a compiled graph relies on."""
        self._installed_for = None
        if everything:
            self._stance.be_eager(False)
        for name in list(self._taps):
            if everything or not (self.is_compiled or name in self._traced):
                self._taps.pop(name)[1]()
