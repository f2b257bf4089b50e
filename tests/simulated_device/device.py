"""Operators of the simulated device."""

from collections.abc import Callable
from functools import cache, partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._device import _device_constructors

from tests.simulated_device import streams
from tests.simulated_device.autocast import install_autocast
from tests.simulated_device.cuda import MIXES_DEVICES, bytes_of, converted_bytes, launches_of, waits
from tests.simulated_device.hooks import raise_errors_of_hooks
from tests.simulated_device.log import write
from tests.simulated_device.recurrent import CELLS
from tests.simulated_device.storage import allocate, copy_storage, is_simulated, memory, memory_of, require_dtype

__all__ = ["install", "provide_pinned_memory"]

_aten = torch.ops.aten
_HOST = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_libraries: list[torch.library.Library] = []  # a registration lives as long as its library


def install() -> None:
    """Register the device as ``torch.device("sim")`` and ``torch.sim``; a second call does nothing."""
    if _libraries:
        return
    torch.utils.backend_registration._setup_privateuseone_for_python_backend("sim", backend_module=_module())
    everything, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    _libraries.extend((everything, aten))
    everything.fallback(_run, "PrivateUse1")
    install_autocast(everything, aten)
    for name, kernel in {**_composites(), **_KERNELS}.items():
        aten.impl(name.removeprefix("aten::"), kernel, "PrivateUse1")
    raise_errors_of_hooks()


def _module() -> ModuleType:
    """Return ``torch.sim``, which has the functions of ``torch.cuda`` that are used."""
    module: Any = ModuleType("torch.sim")
    module.Event, module.Stream, module.stream = streams.Event, streams.Stream, streams.stream
    module.current_stream, module.default_stream = streams.current_stream, lambda device=None: streams._default
    module.synchronize = lambda device=None: streams.wait("synchronize")
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count, module.current_device = lambda: 1, lambda: 0
    module.manual_seed = module.manual_seed_all = module.set_device = lambda number: (
        None
    )  # numbers are drawn on the host
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    return module  # type: ignore[no-any-return]


def _composites() -> dict[str, Callable[..., Any]]:
    """Return kernels of the operators that torch would compose of others on this device, but not on CUDA."""
    kernels: dict[str, Callable[..., Any]] = {}
    for name in torch._C._dispatch_get_all_op_names():
        has = partial(torch._C._dispatch_has_kernel_for_dispatch_key, name)
        is_list = name.startswith("aten::_foreach_") and not name.endswith("out")
        is_composite = has("CPU") and (has("CompositeExplicitAutograd") or has("CompositeImplicitAutograd"))
        if is_list or (name.startswith("aten::") and is_composite):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            kernels[name] = partial(_run, getattr(getattr(_aten, packet), overload or "default"))
    return kernels


class _Operator(NamedTuple):
    """Contents of the schema of an operator: its name, whether it is a view, and the places of its arguments.

    `numbers` are the places where a number stands for a tensor; `changed` and `outputs` are names.
    """

    name: str
    is_view: bool
    returns: bool
    names: tuple[str, ...]
    numbers: tuple[int, ...]
    changed: tuple[str, ...]
    outputs: frozenset[str]


@cache
def _described(op: Any) -> _Operator:
    schema = op._schema
    name, arguments = schema.name.removeprefix("aten::"), schema.arguments
    is_alias = any(r.alias_info and not r.alias_info.is_write for r in schema.returns)
    return _Operator(
        name,
        name in ("set_", "is_set_to") or is_alias,
        bool(schema.returns),
        tuple(a.name for a in arguments),
        tuple(i for i, a in enumerate(arguments) if str(a.type) == "Tensor"),
        tuple(a.name for a in arguments if a.alias_info and a.alias_info.is_write),
        frozenset(a.name for a in arguments if a.is_out),
    )


def _tensors(x: Any) -> list[Tensor]:
    """Return the tensors in an argument or a result of an operator: a tensor, a list, or neither."""
    if isinstance(x, Tensor):
        return [x]
    return [part for part in x if isinstance(part, Tensor)] if isinstance(x, list | tuple) else []


class _Lowered:
    """The arguments of an operator with the memory of device tensors in their place."""

    def __init__(self, op: _Operator, args: Any, kwargs: Any) -> None:
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}  # by id, memory and its tensor
        self.args = [self._lower(x) for x in args]
        self.kwargs = {key: self._lower(x) for key, x in kwargs.items() if key != "pin_memory"}
        _replace_numbers(op, self.args)
        every = {**dict(zip(op.names, self.args, strict=False)), **self.kwargs} if op.changed else {}
        self.changed = [every[name] for name in op.changed if name in every]
        outputs = {id(x) for name in op.outputs for x in _tensors(every.get(name))}
        self.inputs = [pair for key, pair in self._tensors.items() if key not in outputs]

    def _lower(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            if x.device.type != "sim":
                return x
            host = memory_of(x)
            self._tensors[id(host)] = host, x
            return host
        if isinstance(x, list | tuple):
            return [self._lower(part) for part in x]
        return torch.device("cpu") if isinstance(x, torch.device) else x

    def resize(self) -> None:
        """Give outputs that were too small the memory that the kernel has allocated for them."""
        for host, x in self._tensors.values():
            if host.shape != x.shape or host.untyped_storage().nbytes() != x.untyped_storage().nbytes():
                allocate(host, x)

    def lift(self, x: Any) -> Any:
        """Return the device tensors of a result."""
        if isinstance(x, Tensor):
            return self._tensors[id(x)][1] if id(x) in self._tensors else allocate(x)
        if isinstance(x, list | tuple):
            return type(x)(self.lift(part) for part in x)
        return x


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator: a view on the shapes alone, others with the host's kernel on the memory of the tensors."""
    return _compute(op, op, *args, **kwargs)


def _compute(function: Callable[..., Any], op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator, with a function that computes it on the memory of the tensors."""
    described = _described(op)
    name = described.name
    if described.is_view:
        return op.redispatch(_HOST, *args, **kwargs)
    if name not in MIXES_DEVICES and any(map(_is_on_host, (*args, *kwargs.values()))):
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, but found sim:0 and cpu")
    lowered = _Lowered(described, args, kwargs)
    for _, x in lowered.inputs:
        streams.require_finished(x)
    result = function(*lowered.args, **lowered.kwargs)
    lowered.resize()
    written = _tensors(result) if described.returns else [x for part in lowered.changed for x in _tensors(part)]
    read = [host for host, _ in lowered.inputs]
    converted = converted_bytes(name, read, result)
    memory.peak = max(memory.peak, memory.used + converted)
    launches = launches_of(name, lowered.args) + bool(converted)
    write("launch", name, bytes_of(read) + converted, bytes_of(written) + converted, launches)
    streams.current_stream().kernels += 1
    if waits(name, lowered.args):
        streams.wait(name)
    lifted = lowered.lift(result)
    for x in (*_tensors(lifted), *(lowered.lift(x) for part in lowered.changed for x in _tensors(part))):
        if x.device.type == "sim":
            streams.note_written(x)
    return lifted


def _is_on_host(x: Any) -> bool:
    if isinstance(x, list | tuple):
        return any(map(_is_on_host, x))
    return isinstance(x, Tensor) and x.dim() > 0 and x.device.type != "sim"


def _replace_numbers(op: _Operator, args: list[Any]) -> None:
    """Put 0-d tensors in place of numbers where the operator takes tensors."""
    for i in op.numbers:
        if i < len(args) and isinstance(args[i], bool | int | float | complex):
            like = next((x for arg in args for x in _tensors(arg) if x.is_floating_point()), None)
            dtype = like.dtype if like is not None and isinstance(args[i], float) else None
            args[i] = torch.tensor(args[i], dtype=dtype, device="cpu")


def _empty(size: Any, *stride: Any, dtype: Any = None, memory_format: Any = None, **kwargs: Any) -> Tensor:
    if stride:
        host = torch.empty_strided(size, *stride, dtype=dtype, device="cpu")
    else:
        host = torch.empty(size, dtype=dtype, memory_format=memory_format, device="cpu")
    host.untyped_storage().fill_(0xFF)
    return allocate(host)


def _resize(x: Tensor, size: Any, **options: Any) -> Tensor:
    return allocate(memory_of(x).clone().resize_(size), x)


def _copy(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy within the device, to it, or from it."""
    if is_simulated(source):
        streams.require_finished(source)
    if is_simulated(target):
        within = is_simulated(source)
        memory_of(target).copy_(memory_of(source) if within else source)
        write("launch" if within else "h2d", "copy_", bytes_of(source), bytes_of(target), int(within))
        streams.current_stream().kernels += 1
        streams.note_written(target)
        if not (within or (non_blocking and source.is_pinned())):
            streams.wait("copy to the device")
        return target
    require_dtype(target.dtype)
    if source.dtype != target.dtype or not source.is_contiguous():
        write("launch", "copy_", bytes_of(source), source.numel() * target.element_size(), 1)  # CUDA converts first
    write("d2h", "copy_", source.numel() * target.element_size(), bytes_of(target))
    if non_blocking and target.is_pinned():
        streams.copy_later(source, target)
        return target
    streams.wait("copy to the host")
    return target.copy_(memory_of(source))


def _item(x: Tensor) -> Any:
    write("d2h", "item", x.element_size(), x.element_size())
    streams.wait("item")
    return memory_of(x).item()


def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *args: Any) -> Any:
    transposed, groups = args[3], args[-2]
    bias_shape = [weight.shape[1] * groups if transposed else weight.shape[0]]
    return _run(_aten.convolution_backward.default, grad, x, weight, bias_shape, *args)


_KERNELS: dict[str, Callable[..., Any]] = {
    "empty.memory_format": _empty,
    "empty_strided": _empty,
    "_copy_from": _copy,
    "_local_scalar_dense": _item,
    "resize_": _resize,
    "record_stream": lambda x, stream: None,
    **{name: partial(_compute, cell, getattr(_aten, name).default) for name, cell in CELLS.items()},
    "convolution_overrideable": partial(_run, _aten.convolution.default),
    "convolution_backward_overrideable": _convolution_backward,
}


def provide_pinned_memory() -> None:
    """Let torch provide pinned memory, generators and copies of storages, which only C++ can add otherwise; this lasts."""
    _device_constructors()  # cached: the functions that follow the default device, before one of them is replaced
    empty, generator = torch.empty, torch.Generator

    def pinning(*args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        x = empty(*args, **options)
        if pin_memory:
            x.untyped_storage().is_pinned_by_sim = True
        return x

    class Meta(type(generator)):
        def __instancecheck__(cls, x: Any) -> bool:
            return isinstance(x, generator)

    class Generator(generator, metaclass=Meta):
        def __new__(cls, device: Any = "cpu") -> Any:
            return generator("cpu" if torch.device(device).type == "sim" else device)

    clone = torch.UntypedStorage.clone
    torch.UntypedStorage.clone = lambda x: copy_storage(x) if hasattr(x, "host") else clone(x)  # type: ignore[method-assign]
    torch.empty, torch.Generator = pinning, Generator  # type: ignore[assignment,misc]
    Tensor.pin_memory = lambda x, device=None: pinning(x.shape, dtype=x.dtype, pin_memory=True, device="cpu").copy_(x)  # type: ignore[method-assign]
    Tensor.is_pinned = lambda x, device=None: x.is_cpu and hasattr(x.untyped_storage(), "is_pinned_by_sim")  # type: ignore[method-assign]
