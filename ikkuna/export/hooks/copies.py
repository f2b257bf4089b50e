"""Keeps ikkuna's hooks out of copies and pickles of modules."""

import copyreg
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Any

from torch import nn

from ikkuna.export.hooks.hook import Hook

__all__ = ["HookFreeCopies"]

_HOOKS = {  # dictionaries of hooks → dictionaries of the marks of these hooks
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
}
_USERS: Counter[type[nn.Module]] = Counter()  # of this process, like the table of copyreg


class HookFreeCopies:
    """Makes ``copy``, ``pickle`` and ``torch.save`` leave ikkuna's hooks out, for some classes of modules.

    A copy, such as an average of weights, is not observed, can be scripted, and can be loaded where ikkuna is not installed.
    For this a function is registered with ``copyreg``; a class for which the user has registered one keeps it.

    Examples
    --------
    >>> import copy
    >>> model, copies = nn.Linear(2, 2), HookFreeCopies()
    >>> handle = model.register_forward_hook(Hook())
    >>> copies.include([model])
    >>> len(copy.deepcopy(model)._forward_hooks)
    0
    >>> copies.remove()
    """

    def __init__(self) -> None:
        self._classes: set[type[nn.Module]] = set()

    def include(self, modules: Iterable[nn.Module]) -> None:
        """Include the classes of modules."""
        for cls in {type(module) for module in modules} - self._classes:
            if copyreg.dispatch_table.setdefault(cls, _reduce) is _reduce:
                self._classes.add(cls)
                _USERS[cls] += 1

    def remove(self) -> None:
        """Remove what was registered, unless another object needs it."""
        for cls in self._classes:
            _USERS[cls] -= 1
            if not _USERS[cls]:
                del _USERS[cls]
                if copyreg.dispatch_table.get(cls) is _reduce:
                    del copyreg.dispatch_table[cls]
        self._classes = set()


def _reduce(module: nn.Module) -> Any:
    """Return what the module's own ``__reduce_ex__`` returns, without ikkuna's hooks in its state."""
    reduced = module.__reduce_ex__(2)
    if not isinstance(reduced, tuple) or len(reduced) < 3:
        return reduced
    state = reduced[2]
    if isinstance(state, dict):
        state = _without_hooks(state)
    elif isinstance(state, tuple) and len(state) == 2 and isinstance(state[0], dict):  # a class with slots
        state = _without_hooks(state[0]), state[1]
    return (*reduced[:2], state, *reduced[3:])


def _without_hooks(state: dict[str, Any]) -> dict[str, Any]:
    changed = {}
    for name, marks in _HOOKS.items():
        hooks = state.get(name)
        own = {key for key, hook in hooks.items() if isinstance(hook, Hook)} if isinstance(hooks, dict) else set()
        for each in (name, *marks) if own else ():
            changed[each] = OrderedDict((key, value) for key, value in state.get(each, {}).items() if key not in own)
    return {**state, **changed} if changed else state
