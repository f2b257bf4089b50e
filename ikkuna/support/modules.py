"""Names of the user's modules and parameters, without the names of wrappers, the signature of a model, and tied weights."""

import linecache
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import takewhile
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from ikkuna.errors import ConfigError, ConfigTypeError
from ikkuna.support.torch_internals import FLATTENED

N = TypeVar("N")
ModuleFilter = Callable[["NamedModule"], bool] | Iterable[type[nn.Module]] | None

_INNER = {  # name of a wrapper class → the attribute that holds the wrapped module
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "ActivationWrapper": "_checkpoint_wrapped_module",
    "AveragedModel": "module",
    "_FabricModule": "_original_module",
    "ObjectiveModel": "module",
}
_CLASSES = 512  # entries of caches by class or by name of a parameter
_ORIGINAL = re.compile(r"\.original\d*$")


@dataclass(frozen=True, slots=True, eq=False)
class NamedModule:
    """A module with its dotted name, its other names, and the innermost class of the user that contains it."""

    name: str
    module: nn.Module = field(repr=False)
    aliases: tuple[str, ...] = ()
    owner: type | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class NamedParameter:
    """A parameter of a named module.

    Parameters
    ----------
    module : str
        Dotted name of the module that owns the parameter.
    path : str
        The parameter's own name; empty for ``weight`` and ``bias``.
    is_bias : bool
        The result of :func:`is_bias`.
    parameter : nn.Parameter
        The tensor.
    aliases : tuple of str
        Other names of the same tensor, if it is tied.
    """

    module: str
    path: str
    is_bias: bool
    parameter: nn.Parameter = field(repr=False)
    aliases: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of the parameter's series: the name of the module, followed by `path` if that is not empty."""
        return f"{self.module}.{self.path}" if self.path else self.module


def unwrap(module: nn.Module) -> nn.Module:
    """Return the user's own module inside compile, data-parallel, checkpoint and averaging wrappers.

    Examples
    --------
    >>> type(unwrap(nn.DataParallel(nn.Linear(2, 2)))).__name__
    'Linear'
    """
    return module if not _inner_attribute(type(module).__mro__) else list(wrapped_modules(module))[-1]


def wrapped_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield `module` and, if it is a wrapper, the modules inside it, from the outermost to the user's own."""
    inner: Any = module
    while isinstance(inner, nn.Module):
        yield inner
        attribute = _inner_attribute(type(inner).__mro__)
        inner = getattr(inner, attribute) if attribute and hasattr(inner, attribute) else None


@lru_cache(maxsize=_CLASSES)
def _inner_attribute(mro: tuple[type, ...]) -> str:
    """Return the attribute in which a wrapper holds the wrapped module; an empty string for other classes."""
    return next((_INNER[base.__name__] for base in mro if base.__name__ in _INNER), "")


def class_name(module: nn.Module) -> str:
    """Return the name of the user's class, without the prefix that a parametrisation or FSDP adds.

    Examples
    --------
    >>> class_name(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    'Linear'
    """
    return _class_name(type(unwrap(module)).__mro__)


@lru_cache(maxsize=_CLASSES)
def _class_name(mro: tuple[type, ...]) -> str:
    name = mro[0].__name__
    bases = {base.__name__ for base in mro[1:]}
    for prefix in ("Parametrized", "FSDP"):
        if name.startswith(prefix) and name.removeprefix(prefix) in bases:
            name = name.removeprefix(prefix)
    return name


_CAUSAL = ("ForCausalLM", "LMHeadModel")


def shifts_labels(model: nn.Module) -> bool:
    """Return whether a model compares each output with the label of the next position.

    This holds for causal language models of transformers, which are recognised by the names of their classes.

    Examples
    --------
    >>> class GPT2LMHeadModel(nn.Module): ...
    >>> shifts_labels(GPT2LMHeadModel()), shifts_labels(nn.Linear(2, 2))
    (True, False)
    """
    config = getattr(model, "config", None)
    names = (cls.__name__ for cls in type(model).__mro__)
    return any(name.endswith(_CAUSAL) for name in names) and not getattr(config, "is_encoder_decoder", False)


def named_children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the name and the unwrapped module of each direct child, except the container of parametrisations."""
    for name, child in module._modules.items():
        if child is not None and not (name == "parametrizations" and is_parametrized(module)):
            yield name, unwrap(child)


def _has_parametrizations(module: nn.Module) -> bool:
    """Whether tensors of a module are parametrised; the attribute that other modules lack takes long to look up."""
    return "parametrizations" in module._modules and is_parametrized(module)


def named_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the name and module of the unwrapped `root` (``''``) and of all modules inside it, each module once.

    This is ``nn.Module.named_modules()`` without wrappers and without the modules of parametrisations.

    Examples
    --------
    >>> [name for name, _ in named_modules(nn.Sequential(nn.DataParallel(nn.Linear(2, 2))))]
    ['', '0']
    """
    return _named_modules(unwrap(root), "", set())


def _named_modules(module: nn.Module, name: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    if id(module) not in seen:
        seen.add(id(module))
        yield name, module
        for part, child in named_children(module):
            yield from _named_modules(child, f"{name}.{part}" if name else part, seen)


def name_of(root: nn.Module, module: nn.Module) -> str:
    """Return the name of `module`, or of the module that it wraps, in :func:`named_modules`.

    Raises
    ------
    KeyError
        If it is not a part of `root`.
    """
    for name, candidate in named_modules(root):
        if candidate is unwrap(module):
            return name
    raise KeyError(f"the given layer, a {class_name(module)}, is not part of the model")


def named_parameters(root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the name and tensor of every parameter in `root`, each tensor once, without wrappers in the names.

    A tensor behind a parametrisation is named after the parametrised one, such as ``fc.weight.original0``.

    Examples
    --------
    >>> model = nn.DataParallel(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    >>> [name for name, _ in named_parameters(model)]
    ['bias', 'weight.original0', 'weight.original1']
    """
    seen = set()
    for name, module in named_modules(root):
        for own, parameter in owned_parameters(module):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{name}.{own}" if name else own, parameter


def module_of(parameter: str) -> str:
    """Return the name of the module that owns a parameter.

    Examples
    --------
    >>> module_of("encoder.0.weight"), module_of("scale")
    ('encoder.0', '')
    """
    return parameter.rpartition(".")[0]


def common_module(parameters: Sequence[str]) -> str | None:
    """Return the name of the innermost module that contains all parameters; ``None`` if that is the whole model.

    Examples
    --------
    >>> common_module(["encoder.0.weight", "encoder.0.bias"]), common_module(["encoder.0.weight", "encoder.10.weight"])
    ('encoder.0', 'encoder')
    """
    modules = [module_of(name).split(".") for name in parameters]
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*modules, strict=False))
    return ".".join(parts[0] for parts in shared) or None


@lru_cache(maxsize=_CLASSES)
def is_bias(name: str) -> bool:
    """Return whether the last part of a parameter's name contains ``bias``.

    The tensors behind a parametrised bias, such as ``fc.bias.original0``, count as biases.

    Examples
    --------
    >>> is_bias("rnn.bias_ih_l0"), is_bias("relative_bias.weight")
    (True, False)
    """
    return "bias" in _ORIGINAL.sub("", name).rpartition(".")[2]


def _paths(
    module: nn.Module, name: str, prefix: str, depth: int, seen: frozenset[int], owner: type | None = None
) -> Iterator[tuple[str, nn.Module, int, type | None]]:
    owner = _users_class(type(module).__mro__) or owner
    yield name, module, depth, owner
    for part, child in named_children(module):
        path = f"{prefix}{part}"
        if not child._modules:
            yield path, child, depth + 1, _users_class(type(child).__mro__) or owner
        elif id(child) not in seen:  # a module that contains itself
            yield from _paths(child, path, path + ".", depth + 1, seen | {id(child)}, owner)


@lru_cache(maxsize=_CLASSES)
def _users_class(mro: tuple[type, ...]) -> type | None:
    """Return the first class that is not of torch."""
    return next((c for c in mro if c.__module__.partition(".")[0] not in ("torch", "builtins")), None)


@lru_cache(maxsize=_CLASSES)
def definition(owner: type) -> str:
    """Return the name of a class with the file and the line of its definition; the name alone if the source is unknown.

    Nothing of the class is executed.  The path is relative to the working directory if the file is below it.

    Examples
    --------
    >>> definition(NamedModule).partition(":")[0].endswith("modules.py"), definition(type("Made", (), {}))
    (True, 'Made')
    """
    codes = [
        f.__code__ for f in vars(owner).values() if isinstance(f, FunctionType) and f.__module__ == owner.__module__
    ]
    file = getattr(sys.modules.get(owner.__module__), "__file__", None)
    file = file or next((code.co_filename for code in codes), "")  # a notebook has no file
    head = re.compile(rf"\s*class\s+{re.escape(owner.__name__)}\b")
    lines = [number for number, line in enumerate(linecache.getlines(file), 1) if head.match(line)]
    if not lines:
        return owner.__name__
    first = min((code.co_firstlineno for code in codes if code.co_filename == file), default=lines[0])
    inside = os.path.relpath(file)
    shown = inside if not inside.startswith("..") else file
    return f"{owner.__name__}, {shown}:{max((line for line in lines if line <= first), default=lines[0])}"


def _chosen(module: nn.Module, level: int, depth: int) -> bool:
    if depth >= 0 and level == depth:
        return True
    owns = any(parameter is not None for parameter in module._parameters.values())
    is_leaf = not module._modules or next(named_children(module), None) is None
    return (depth < 0 or level < depth) and (owns or is_leaf or _has_parametrizations(module))


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
    """Return the observed modules of `root`, in the order of their registration.

    Parameters
    ----------
    root : nn.Module
        The model.  Wrappers (compile, data parallel, checkpoint) are skipped and never appear in a name.
    name : str, optional
        Name of the root and prefix of all names inside it.  By default the root has its class name in lower case, and
        the modules inside it have their dotted paths.
    depth : int
        -1 selects all leaves and all modules that own parameters.  Otherwise the modules at this depth (that of the
        root is 0) are selected, with the leaves and the owners of parameters above it.
    module_filter : type, iterable of type or callable
        Keep only modules of these classes, or those for which a function of a :class:`NamedModule` returns True.
    recursive : bool
        If False, return only the root.

    Raises
    ------
    ConfigError
        If `module_filter` matches no module.

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
            (path, m, owner)
            for path, m, level, owner in _paths(root, top, prefix, 0, frozenset((id(root),)))
            if _chosen(m, level, depth)
        ]
    else:
        found = [(top, root, _users_class(type(root).__mro__))]
    names: dict[int, list[str]] = {}
    modules = {id(module): (module, owner) for _, module, owner in reversed(found)}
    for path, module, _ in found:
        names.setdefault(id(module), []).append(path)
    named = [NamedModule(paths[0], modules[k][0], tuple(paths[1:]), modules[k][1]) for k, paths in names.items()]
    kept = tuple(n for n in named if accepts(n))
    if named and not kept:
        types = ", ".join(sorted({class_name(n.module) for n in named}))
        raise ConfigError(f"module_filter matches none of the {len(named)} modules (types present: {types})")
    return kept


def parameters_of(modules: Iterable[NamedModule]) -> tuple[NamedParameter, ...]:
    """Return every parameter that `modules` own, each tensor once, under the first of its names.

    Only ``named_parameters()`` is read, because reading ``module.weight`` can run code that changes buffers.

    Examples
    --------
    >>> [p.name for p in parameters_of(walk(nn.LSTM(2, 3)))]
    ['lstm.weight_ih_l0', 'lstm.weight_hh_l0', 'lstm.bias_ih_l0', 'lstm.bias_hh_l0']
    """
    found: dict[int, NamedParameter] = {}
    for named in modules:
        for raw, parameter in owned_parameters(named.module):
            path = "" if raw in ("weight", "bias") else raw
            entry = NamedParameter(named.name, path, is_bias(raw), parameter)
            if (known := found.get(id(parameter))) is None:
                found[id(parameter)] = entry
            else:
                aliases = (*known.aliases, entry.name)
                found[id(parameter)] = NamedParameter(known.module, known.path, known.is_bias, parameter, aliases)
    return tuple(found.values())


def owned_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield a module's own parameters; ``weight.original`` of a parametrisation is named ``weight``."""
    if type(module).named_parameters is nn.Module.named_parameters:
        for own, parameter in module._parameters.items():
            if parameter is not None:
                yield own, parameter
    else:
        yield from module.named_parameters(recurse=False, remove_duplicate=False)
    if _has_parametrizations(module):
        for name, parameter in module.get_submodule("parametrizations").named_parameters():
            yield name.removesuffix(".original"), parameter


Signature = dict[str, Any]


def signature(model: nn.Module) -> Signature:
    """Return the name of the class of a model, and the names and shapes of its parameters without wrappers.

    Shapes are those of `shape_of`.

    Examples
    --------
    >>> signature(nn.Linear(3, 2))
    {'class': 'Linear', 'parameters': {'weight': [2, 3], 'bias': [2]}}
    """
    shapes = {name: shape_of(parameter) for name, parameter in named_parameters(model)}
    return {"class": class_name(model), "parameters": {n: None if s is None else list(s) for n, s in shapes.items()}}


def shape_of(parameter: nn.Parameter) -> tuple[int, ...] | None:
    """Return the shape of a parameter; ``None`` for that of a lazy module, and of FSDP1, whose shapes depend on the rank."""
    return None if is_lazy(parameter) or is_flattened(parameter) else tuple(parameter.shape)


def is_flattened(parameter: nn.Parameter) -> bool:
    """Return whether FSDP1 has made a parameter a part of a flat one, or it is a flat one."""
    return getattr(parameter, FLATTENED, False)


def difference(stored: Signature, present: Signature) -> str:
    """Return how a stored signature differs from that of the present model; empty if it does not.

    Examples
    --------
    >>> difference(signature(nn.Linear(3, 2)), signature(nn.Linear(4, 2)))
    'Linear (2 parameters) with weight of shape [2, 3], not Linear (2 parameters) with weight of shape [2, 4]'
    """
    texts = [f"{each['class']} ({len(each['parameters'])} parameters)" for each in (stored, present)]
    before, now = stored["parameters"], present["parameters"]
    for name in dict.fromkeys((*before, *now)):
        if name not in before or name not in now:
            own, other = ("with", "without") if name in before else ("without", "with")
            return f"{texts[0]} {own} {name}, not {texts[1]} {other} it"
        if None not in (before[name], now[name]) and list(before[name]) != list(now[name]):
            shapes = [f"with {name} of shape {list(shapes[name])}" for shapes in (before, now)]
            return f"{texts[0]} {shapes[0]}, not {texts[1]} {shapes[1]}"
    return "" if stored["class"] == present["class"] else f"{texts[0]}, not {texts[1]}"


def embedding_pairs(modules: Iterable[tuple[N, nn.Module]]) -> Iterator[tuple[N, nn.Module, N, nn.Module]]:
    """Yield name and module of each embedding and of each linear layer whose weight has the same shape, if both are trainable."""
    known = list(modules)
    embeddings = [(name, module) for name, module in known if isinstance(module, nn.Embedding)]
    layers = [(name, module) for name, module in known if isinstance(module, nn.Linear)]
    for name, embedding in embeddings:
        for other, layer in layers:
            a, b = embedding._parameters.get("weight"), layer._parameters.get("weight")
            if a is not None and b is not None and a.shape == b.shape and a.requires_grad and b.requires_grad:
                yield name, embedding, other, layer


def have_same_values(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same values, and not only one value, as a copy of weights has.

    Examples
    --------
    >>> have_same_values(torch.arange(3.0), torch.arange(3.0)), have_same_values(torch.zeros(3), torch.zeros(3))
    (True, False)
    """
    a, b = a.detach(), b.detach()
    return a.device == b.device and a.dtype == b.dtype and torch.equal(a, b) and bool((a != a.flatten()[0]).any())
