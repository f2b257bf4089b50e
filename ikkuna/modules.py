"""The user's modules and parameters under the names a person expects."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from ikkuna.errors import ConfigError, ConfigTypeError

__all__ = ["ModuleFilter", "NamedModule", "NamedParameter", "class_name", "parameters_of", "unwrap", "walk"]

ModuleFilter = Callable[["NamedModule"], bool] | Iterable[type[nn.Module]] | None

_INNER = {  # wrapper class → the attribute that holds the user's module
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "_FabricModule": "_original_module",
}


@dataclass(frozen=True, slots=True, eq=False)
class NamedModule:
    """A module under its dotted name, with the other names it is reachable by."""

    name: str
    module: nn.Module = field(repr=False)
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class NamedParameter:
    """A parameter as a part of its module.

    Parameters
    ----------
    module : dotted name of the module that owns it
    path : its own name, empty if its last part is ``weight`` or ``bias``
    is_bias : whether it counts as a bias, decided by its own name
    parameter : the tensor
    aliases : other full names of the same tensor, if it is tied
    """

    module: str
    path: str
    is_bias: bool
    parameter: nn.Parameter = field(repr=False)
    aliases: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of its series: the module's, with the parameter's own where it needs one."""
        return f"{self.module}.{self.path}" if self.path else self.module


def unwrap(module: nn.Module) -> nn.Module:
    """Return the user's own module inside compile, data-parallel and checkpoint wrappers."""
    while (attribute := _INNER.get(type(module).__name__)) and isinstance(
        inner := getattr(module, attribute, None), nn.Module
    ):
        module = inner
    return module


def class_name(module: nn.Module) -> str:
    """Return the name of the user's class, without what a parametrisation or sharding puts in front.

    Examples
    --------
    >>> class_name(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    'Linear'
    """
    name = type(module).__name__
    for prefix in ("Parametrized", "FSDP"):
        bases = {base.__name__ for base in type(module).__mro__[1:]}
        if name.startswith(prefix) and name.removeprefix(prefix) in bases:
            name = name.removeprefix(prefix)
    return name


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield direct children, looking through wrappers; what implements a parametrisation is not a child."""
    for name, child in module._modules.items():
        if child is not None and not (
            name == "parametrizations" and torch.nn.utils.parametrize.is_parametrized(module)
        ):
            yield name, unwrap(child)


def _paths(
    module: nn.Module, name: str, prefix: str, depth: int, seen: frozenset[int]
) -> Iterator[tuple[str, nn.Module, int]]:
    yield name, module, depth
    for part, child in _children(module):
        if id(child) not in seen:  # a module that contains itself
            path = f"{prefix}{part}"
            yield from _paths(child, path, path + ".", depth + 1, seen | {id(child)})


def _chosen(module: nn.Module, level: int, depth: int) -> bool:
    if depth >= 0 and level == depth:
        return True
    owns = any(parameter is not None for parameter in module._parameters.values())
    is_leaf = next(_children(module), None) is None
    parametrized = torch.nn.utils.parametrize.is_parametrized(module)
    return (depth < 0 or level < depth) and (owns or is_leaf or parametrized)


def _accepts(module_filter: ModuleFilter) -> Callable[[NamedModule], bool]:
    if module_filter is None:
        return lambda named: True
    if callable(module_filter) and not isinstance(module_filter, type):
        return module_filter
    classes = (module_filter,) if isinstance(module_filter, type) else tuple(module_filter)
    if not classes or not all(isinstance(c, type) and issubclass(c, nn.Module) for c in classes):
        raise ConfigTypeError(
            f"module_filter needs torch.nn.Module classes or a function of a NamedModule, got {module_filter!r}"
        )
    return lambda named: isinstance(named.module, classes)


def walk(
    root: nn.Module,
    name: str | None = None,
    depth: int = -1,
    module_filter: ModuleFilter = None,
    recursive: bool = True,
) -> tuple[NamedModule, ...]:
    """Return the modules below `root` that are looked at, in the order of their registration.

    Parameters
    ----------
    root : nn.Module
        Wrappers (compile, data parallel, checkpoint) are looked through and never show in a name.
    name : str, optional
        What to call the root; names below then begin with it.  By default the root is its class name in lower case and
        names below are its own dotted paths.
    depth : int
        -1 for all leaves and all modules that own parameters; otherwise what stands at this depth (the root's is 0) and
        the leaves and owners above it.
    module_filter : classes, or a function of a NamedModule
        Which of these to keep.
    recursive : bool
        False for the root alone.

    Raises
    ------
    ConfigError
        If `module_filter` leaves nothing.

    Examples
    --------
    >>> [m.name for m in walk(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))]
    ['0', '1']
    """
    root = unwrap(root)
    accepts = _accepts(module_filter)
    prefix = f"{name}." if name else ""
    top = name or class_name(root).lower()
    if recursive:
        found = [
            (path, m)
            for path, m, level in _paths(root, top, prefix, 0, frozenset((id(root),)))
            if _chosen(m, level, depth)
        ]
    else:
        found = [(top, root)]
    names: dict[int, list[str]] = {}
    modules = {id(module): module for _, module in found}
    for path, module in found:
        names.setdefault(id(module), []).append(path)
    named = [NamedModule(paths[0], modules[key], tuple(paths[1:])) for key, paths in names.items()]
    kept = tuple(n for n in named if accepts(n))
    if named and not kept:
        types = ", ".join(sorted({class_name(n.module) for n in named}))
        raise ConfigError(f"module_filter matches none of the {len(named)} modules (types present: {types})")
    return kept


def parameters_of(modules: Iterable[NamedModule]) -> tuple[NamedParameter, ...]:
    """Return every parameter that `modules` own, each tensor once, under the first name it is met by.

    Nothing but ``named_parameters()`` is read: ``module.weight`` can run code that changes buffers.

    Examples
    --------
    >>> [p.name for p in parameters_of(walk(nn.LSTM(2, 3)))]
    ['lstm.weight_ih_l0', 'lstm.weight_hh_l0', 'lstm.bias_ih_l0', 'lstm.bias_hh_l0']
    """
    found: dict[int, NamedParameter] = {}
    for named in modules:
        for raw, parameter in _owned(named.module):
            path, is_bias = _role(raw)
            entry = NamedParameter(named.name, path, is_bias, parameter)
            if (known := found.get(id(parameter))) is None:
                found[id(parameter)] = entry
            else:
                aliases = (*known.aliases, entry.name)
                found[id(parameter)] = NamedParameter(known.module, known.path, known.is_bias, parameter, aliases)
    return tuple(found.values())


def _owned(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    if torch.nn.utils.parametrize.is_parametrized(module):
        yield from module.get_submodule("parametrizations").named_parameters()


def _role(raw: str) -> tuple[str, bool]:
    """Return the path of a parameter and whether it is a bias; ``weight.original`` of a parametrisation is ``weight``."""
    own = raw.removesuffix(".original")
    is_bias = "bias" in own.split(".")[0]
    return ("" if own in ("weight", "bias") else own), is_bias
