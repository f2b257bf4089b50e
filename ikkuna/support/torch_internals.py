"""The names of torch that ikkuna uses although torch does not document them, each with a fallback for a torch without it.

No other file uses such a name, so that this file is all that a new version of torch can break; ``tests/test_structure.py`` checks this.
The functions are aliases where possible, because some of them run in every hook.
"""

import ctypes
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from operator import attrgetter, methodcaller
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils import _pytree

pytree = _pytree
_C: Any = torch._C
_FUNCTORCH: Any = getattr(_C, "_functorch", None)
_FRAMES: Any = getattr(getattr(_C, "_dynamo", None), "eval_frame", None)
_DISPATCH: Any = getattr(torch.utils, "_python_dispatch", None)

_BATCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)

BATCH_NORMS: Any = getattr(nn.modules.batchnorm, "_BatchNorm", _BATCH)
"""The base class of batch normalisations, for ``isinstance``; without it, the documented classes, which miss those of other projects."""

RUNNING_NORMS: Any = getattr(nn.modules.batchnorm, "_NormBase", (*_BATCH, *_INSTANCE))
"""The base class of batch and instance normalisations, for ``isinstance``; without it, the documented classes."""

CONVOLUTIONS: Any = getattr(nn.modules.conv, "_ConvNd", (nn.Conv1d, nn.Conv2d, nn.Conv3d))
"""The base class of convolutions, for ``isinstance``; without it, the documented classes that are not transposed."""

DROPOUTS: Any = getattr(nn.modules.dropout, "_DropoutNd", _DROPOUTS)
"""The base class of dropouts, for ``isinstance``; without it, the documented classes."""

TENSOR_ADDRESS = "_cdata"
"""Attribute of a tensor: the address of its C++ object; without it, tensors are checked by functions of Python, which takes longer."""

_TENSOR_FUNCTIONS = (
    *("get_data_ptr", "get_numel", "get_dim", "get_storage_offset", "get_storage_size", "get_sizes", "get_strides"),
    *("get_dtype", "get_device_type", "get_layout"),
    *("dtype_float32", "dtype_float64", "dtype_bfloat16", "device_type_cpu", "layout_strided"),
)

GLOBAL_FORWARD_HOOKS: dict[int, Any] = getattr(nn.modules.module, "_global_forward_hooks", {})
"""The forward hooks of all modules; without it, none: one that replaces an output by a view of a shared tensor is not noticed."""

has_global_hooks: Callable[[], bool] = getattr(nn.modules.module, "_has_any_global_hook", lambda: False)
"""Return whether hooks of all modules are registered; without it, ``False``: they also see the calls that checks make."""

own_hooks: Callable[[Optimizer], dict[int, Callable[..., Any]]] = (
    attrgetter("_optimizer_step_pre_hooks") if hasattr(Optimizer, "register_step_pre_hook") else lambda optimizer: {}
)
"""Return the hooks that an optimizer itself has before its step, by the numbers of their handles; without them, none."""

BACKWARD_CALL: CodeType | None = getattr(getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", None)
"""The code that starts a backward; without it, ``None``: the stack does not show what a backward starts from."""

set_grad_enabled: Callable[[bool], object] = getattr(_C, "_set_grad_enabled", torch.set_grad_enabled)
"""Switch gradients on this thread on or off; without it, the documented class, which does the same and is slower."""

graph_task: Callable[[], int] = getattr(_C, "_current_graph_task_id", lambda: -1)
"""Return the number of the backward that runs on this thread, or -1; without it, -1: a checkpoint's second forward is not recognised."""

keeps_graph: Callable[[], bool] = getattr(
    getattr(_C, "_autograd", None), "_get_current_graph_task_keep_graph", lambda: False
)
"""Return whether the running backward keeps its graph; without it, ``False``: forwards that it alone has reached do not count later."""

cuda_stream_handle: Callable[[int], int] | None = getattr(_C, "_cuda_getCurrentRawStream", None)
"""Return the handle of the current stream of a CUDA device; without it, ``None``: the documented function takes ten times as long."""

sequence_number: Callable[[], int] = getattr(torch.autograd, "_get_sequence_nr", count().__next__)
"""Return how many operators autograd has recorded on this thread; without it, more at each call: no optimizers share a step."""

_NODE: Any = getattr(getattr(_C, "_functions", None), "AccumulateGrad", None)

number_of_node: Callable[[Any], int] = (
    methodcaller("_sequence_nr") if hasattr(_NODE, "_sequence_nr") else lambda node: -1
)
"""Return the number that `sequence_number` returned before autograd has recorded a node; without it, -1: fewer steps are counted only."""

current_node: Callable[[], Any] = getattr(_C, "_current_autograd_node", lambda: None)
"""Return the node of autograd that runs on this thread; without it, ``None``: a reentrant checkpoint is not recognised."""

will_execute: Callable[[Any], bool] = getattr(_C, "_will_engine_execute_node", lambda node: True)
"""Whether the running backward will execute a node; without it, each backward counts as one that adds to gradients."""

function_transforms: Callable[[], Any] = getattr(_FUNCTORCH, "peek_interpreter_stack", lambda: None)
"""Return the innermost transform of :mod:`torch.func` on this thread; without it, ``None``: hooks inside of it fail and are counted."""

is_transformed: Callable[[Tensor], bool] = getattr(_FUNCTORCH, "is_functorch_wrapped_tensor", lambda x: False)
"""Whether a tensor exists only inside of a transform of :mod:`torch.func`; without it, it is measured and the failure counted."""

kept_version: Callable[[Tensor], AbstractContextManager[Any]] = getattr(
    torch.autograd.grad_mode, "_unsafe_preserve_version_counter", lambda x: nullcontext()
)
"""Write to a tensor without a change of its version; without it, a backward that has saved the tensor raises."""

holds_other_tensors: Callable[[object], bool] = getattr(_DISPATCH, "is_traceable_wrapper_subclass", lambda x: False)
"""Whether a tensor is a subclass around other tensors; without it, no: its storage is read, if it has one."""

DISPATCH_MODE: Any = getattr(_DISPATCH, "TorchDispatchMode", object)
"""The base class of what receives each operation; without it, the operations of a step cannot be recorded."""

MODULE_CALL: CodeType = getattr(nn.Module, "_call_impl", nn.Module.__call__).__code__
"""The code that calls a module's forward and hooks."""

tracing_state: Callable[[], Any] = getattr(_C, "_get_tracing_state", lambda: None)
"""Return the state of :func:`torch.jit.trace` on this thread, or ``None``; without it, ``None``: a traced model contains our hooks."""

dispatch_modes: Callable[[], int] = getattr(_C, "_len_torch_dispatch_stack", lambda: 0)
"""Return how many modes, such as that of fake tensors, see the operators of this thread; without it, 0: a generator's state may be fake."""

compiled_programs: Callable[[CodeType], list[Any]] = getattr(_FRAMES, "_debug_get_cache_entry_list", lambda code: [])
"""Return the compiler's programs of a function; without it, none: a model compiled before the exporter is not recognised."""

drop_programs: Callable[[CodeType], None] = getattr(_FRAMES, "reset_code", lambda code: torch.compiler.reset())
"""Drop the compiler's programs of a function; without it, those of all functions."""


def native_functions() -> list[int | None]:
    """Return the addresses of the functions of torch's C interface that ``tensors.cpp`` calls, in its order.

    Raises
    ------
    RuntimeError
        If torch has no such interface; tensors are then checked by functions of Python.
    """
    try:
        library = ctypes.CDLL(_C.__file__)
        functions = [getattr(library, f"aoti_torch_{name}") for name in _TENSOR_FUNCTIONS]
    except (AttributeError, OSError) as error:
        raise RuntimeError(f"torch does not export its C interface: {error}") from error
    return [ctypes.cast(function, ctypes.c_void_p).value for function in functions]


def parallel_for() -> int | None:
    """Return the address of ``torch_parallel_for``, which runs a native function in torch's threads.

    Without it, ``None``: large tensors are measured in one thread.
    """
    try:
        return ctypes.cast(ctypes.CDLL(_C.__file__).torch_parallel_for, ctypes.c_void_p).value
    except (AttributeError, OSError):
        return None


def skip_in_compiler(function: Callable[..., Any]) -> None:
    """Keep the compiler from compiling a function as a program of its own; inside of a graph it is traced as usual.

    torch before 2.7 has another name for it; without either, the function is compiled, which takes time and changes no value.
    """
    if hasattr(_FRAMES, "set_code_exec_strategy"):
        skip = _FRAMES._FrameAction.SKIP
        _FRAMES.set_code_exec_strategy(function.__code__, _FRAMES._FrameExecStrategy(skip, skip))
    elif hasattr(_FRAMES, "skip_code"):
        _FRAMES.skip_code(function.__code__)


def call_from_compiled(function: Callable[..., Any]) -> None:
    """Let compiled code call a function as it is, together with everything that it calls.

    ``torch.compiler.disable`` does the same with a wrapper, whose calls take longer than the hooks that are called here.

    Examples
    --------
    >>> def one(): ...
    >>> call_from_compiled(one)
    >>> torch.compile(lambda x: (one(), x + 1)[1], backend="eager")(torch.ones(1))
    tensor([2.])
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    skip_in_compiler(function)


def insert_as_constant(function: Callable[..., Any]) -> None:
    """Let the compiler call a function while it traces, and insert the result as a constant.

    ``torch.compiler.assume_constant_result`` does the same and imports the compiler, which takes longer than all of ikkuna.

    Examples
    --------
    >>> def one(): ...
    >>> def other(): ...
    >>> insert_as_constant(one)
    >>> vars(one) == vars(torch.compiler.assume_constant_result(other))
    True
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]


def autograd_enabled_inside_operators() -> AbstractContextManager[Any]:
    """Return a context in which autograd records although an operator runs, into which autograd does not look."""
    if not hasattr(_C, "_ForceDispatchKeyGuard"):
        return nullcontext()
    include, exclude = _C._dispatch_tls_local_include_set(), _C._dispatch_tls_local_exclude_set()
    for name in ("AutogradFunctionality", "AutogradCPU", "AutogradCUDA", "AutogradOther", "ADInplaceOrView"):
        exclude = exclude.remove(getattr(_C.DispatchKey, name))
    guard: AbstractContextManager[Any] = _C._ForceDispatchKeyGuard(include, exclude)
    return guard


def saves_tensors_elsewhere() -> bool:
    """Return whether hooks for saved tensors are active, as inside a checkpoint; torch before 2.7 does not tell.

    Examples
    --------
    >>> saves_tensors_elsewhere()
    False
    """
    top = getattr(getattr(_C, "_autograd", None), "_top_saved_tensors_default_hooks", None)
    return top is not None and top(True) is not None


def nodes_behind(
    first: Iterable[Any], most: float = math.inf, ends: Callable[[Any], bool] = lambda node: False
) -> Iterator[Any]:
    """Yield nodes of a graph of autograd and those behind them, each once, the nearest first.

    Parameters
    ----------
    first : iterable of object
        The nodes to begin with; ``None`` is left out.
    most : float
        The walk ends when it has found so many nodes.
    ends : callable
        Returns whether nothing behind a node is wanted.

    Examples
    --------
    >>> x = torch.ones(1, requires_grad=True)
    >>> [node.name() for node in nodes_behind([x.exp().log().grad_fn])]
    ['LogBackward0', 'ExpBackward0', 'torch::autograd::AccumulateGrad']
    """
    waiting = deque(dict.fromkeys(node for node in first if node is not None))
    seen = set(waiting)
    while waiting and len(seen) < most:
        yield (node := waiting.popleft())
        if not ends(node):
            new = dict.fromkeys(
                behind for behind, _ in node.next_functions if behind is not None and behind not in seen
            )
            seen.update(new)
            waiting.extend(new)


def saved_by(node: Any, name: str) -> Any:
    """Return what a node of autograd has saved under a name, without its graph, if that is a tensor.

    ``None`` if it has saved nothing under this name, if it was freed, or if torch keeps it elsewhere: to unpack what a checkpoint
    has saved would compute the checkpoint now, and break the backward that follows.  So does a torch that does not tell.

    Examples
    --------
    >>> node = torch.nn.functional.nll_loss(torch.zeros(2, 3, requires_grad=True), torch.tensor([2, 0])).grad_fn
    >>> saved_by(node, "target"), saved_by(node, "ignore_index"), saved_by(node, "weight"), saved_by(node, "nothing")
    (tensor([2, 0]), -100, None, None)
    """
    try:
        raw = getattr(node, f"_raw_saved_{name}", None)
        if raw is None:
            found = getattr(node, f"_saved_{name}", None)
            return found - (1 << 64) if isinstance(found, int) and found >> 63 == 1 else found  # torch forgets the sign
        if isinstance(raw, tuple):
            return tuple(
                None if each.unpack_hook is not None or each.data is None else each.data.detach() for each in raw
            )
        found = None if getattr(raw, "unpack_hook", True) is not None else raw.data
    except RuntimeError:  # it was freed
        return None
    return found.detach() if isinstance(found, Tensor) else None


Memory = StorageWeakRef
"""A weak reference to the memory of tensors; its address is not that of other memory as long as it exists."""


def memory_of(x: Tensor) -> Memory | None:
    """Return a weak reference to the memory of a tensor, which equals that of its views alone; ``None`` without memory.

    Examples
    --------
    >>> x = torch.ones(4)
    >>> memory_of(x[2:]) == memory_of(x), memory_of(x.clone()) == memory_of(x), memory_of(x.to_sparse())
    (True, False, None)
    """
    try:
        return Memory(x.untyped_storage())
    except (NotImplementedError, RuntimeError):
        return None


def shape_behind(node: Any, index: int = 0) -> tuple[int, ...] | None:
    """Return the shape of an output of the operation that a node of autograd stands for; ``None`` if torch does not tell.

    Examples
    --------
    >>> shape_behind(torch.ones(2, 3, requires_grad=True).sum(1).grad_fn)
    (2,)
    """
    metadata = getattr(node, "_input_metadata", ())
    return tuple(metadata[index].shape) if index < len(metadata) else None


BeforeBackward = Callable[[Sequence[Any], Sequence[Any], bool], object]
"""A function of the tensors that a backward starts from, of their gradients, and of whether it adds to those of all leaves."""

_before_backward: tuple[BeforeBackward, ...] = ()
_run_backward: Any = None


def _run_observed_backward(t_outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    if graph_task() == -1:  # the outermost one
        # arguments: gradients, whether the graph is kept, and made, inputs
        accumulates = kwargs.get("accumulate_grad", False) and not (len(args) > 3 and args[3])
        for call in _before_backward:
            call(t_outputs, args[0] if args else (), accumulates)
    return _run_backward(t_outputs, *args, **kwargs)


def call_before_backward(function: BeforeBackward, call: bool) -> None:
    """Call a function before each backward, see `BeforeBackward`, or do so no more.

    A backward inside another one does not count.  torch has no hook for this: what a loss has saved is freed by the time the first hook
    of a tensor runs.  So the function of torch that starts a backward is replaced while there is a function to call, as
    :mod:`torch.compiler` does to trace; without such a function in torch, nothing is called.

    Examples
    --------
    >>> x = torch.tensor(3.0, requires_grad=True)
    >>> call_before_backward(print, True)
    >>> x.backward()
    (tensor(3., requires_grad=True),) (tensor(1.),) True
    >>> call_before_backward(print, False)
    >>> x.backward()
    """
    global _before_backward, _run_backward
    _before_backward = (*(each for each in _before_backward if each is not function), *((function,) if call else ()))
    current = getattr(torch.autograd, "_engine_run_backward", None)
    if _before_backward and current is not None and current is not _run_observed_backward:
        _run_backward = current
        torch.autograd._engine_run_backward = _run_observed_backward  # type: ignore[attr-defined]
    elif not _before_backward and current is _run_observed_backward:
        torch.autograd._engine_run_backward = _run_backward  # type: ignore[attr-defined]


skip_in_compiler(_run_observed_backward)


def current_trace() -> Hashable:
    """Return an object that stands for the graph that the compiler traces at the moment.

    Without torch's own, one object stands for all graphs: their calls get other numbers, and equal blocks are compiled each by itself.
    """
    try:
        from torch._guards import TracingContext
    except ImportError:
        return current_trace
    return TracingContext.get()


def is_traced_branch() -> bool:
    """Return whether the compiler traces a function for an operator such as ``torch.cond``.

    Its backward runs the graph anew, of which a hook of a tensor cannot be a part.
    A checkpoint is such an operator too, but one that the compiler understands.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    tracer = InstructionTranslator.current_tx().output.current_tracer
    while tracer.parent is not None:
        if "checkpoint" not in str(tracer.source_target):
            return True
        tracer = tracer.parent
    return False


insert_as_constant(is_traced_branch)


def default_store() -> Any:
    """Return the store through which the processes of the default group met.

    torch has no other way to it, so there is no fallback.

    Raises
    ------
    RuntimeError
        If there is no default group, or if torch has no such function.
    """
    from torch.distributed import distributed_c10d

    if not hasattr(distributed_c10d, "_get_default_store"):
        raise RuntimeError(f"torch {torch.__version__} does not give access to the store of the default process group")
    return distributed_c10d._get_default_store()


COMPILER_FRAMES = "torch._dynamo.external_utils"
"""The module whose ``wrap_inline`` makes the frame that the compiler puts around modules of torch; it may not be imported."""

FLATTENED = "_fsdp_flattened"
"""The attribute by which FSDP1 marks flat parameters, and those that it has made parts of them."""


def is_in_join() -> bool:
    """Return whether ranks may have different numbers of batches, because the running data-parallel wrapper is in ``join()``."""
    active: Any = getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
    return active is not None and bool(active._join_config.enable)


def flat_parameters(unit: Any) -> tuple[list[nn.Parameter], int | None, int]:
    """Return the parameters of a wrapper of FSDP1, the number of this rank's shard, and how many ranks average gradients.

    The number is ``None`` if each rank has the parameters whole.
    """
    if (handle := getattr(unit, "_handle", None)) is None:  # it has no parameters
        return [], None, 1
    flat = handle.flat_param
    size = round(unit._gradient_predivide_factor * unit._gradient_postdivide_factor)
    return [flat, *(flat._params or ())], handle.rank if handle.uses_sharded_strategy else None, size
