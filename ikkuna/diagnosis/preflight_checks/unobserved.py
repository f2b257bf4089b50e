"""Hides a model from the exporters that observe it."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["unobserved"]

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
