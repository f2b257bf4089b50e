"""Record the inputs and outputs of modules so that they can be read and differentiated later.

A forward hook replaces every output by a clone and keeps the original.
A later in-place operation therefore cannot overwrite the original, and the gradient with respect to it is the gradient
with respect to the returned value.  No backward hook is needed.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from ikkuna.errors import ConfigError
from ikkuna.probe.unroll import unroll
from ikkuna.torch_internals import pytree

__all__ = ["Call", "capture", "first_tensor"]

_STATES = ("output", "h_n", "c_n")


@dataclasses.dataclass
class Call:
    """The tensors that one call of a module received or returned.

    Parameters
    ----------
    module : nn.Module
        The called module.
    parts : dict of str to Tensor
        The tensors by name: ``output``; for an RNN also ``h_n`` and ``c_n``; for other modules ``1``, ``2``, …
    packed : PackedSequence, optional
        The input of an RNN, if it is a packed sequence.
    unbatched : bool
        Whether the input of an RNN is a single sequence.
    steps : list of Tensor, optional
        The state of every time step of an unrolled RNN, for each direction.
    time_first : bool
        Whether the output comes from a layer inside an RNN, as (time, sample, channel).
    """

    module: nn.Module
    parts: dict[str, Tensor]
    packed: PackedSequence | None = None
    unbatched: bool = False
    steps: list[Tensor] | None = None
    time_first: bool = False

    def arrange(self, part: str, value: Tensor, pad: float) -> Tensor:
        """Return `value`, shaped like the named part, as ``(sample, time, channel)`` if it comes from an RNN.

        A state is returned as ``(sample, channel)`` of the last layer, with the directions side by side.
        """
        if isinstance(self.module, nn.RNNCellBase):
            return value.unsqueeze(0) if value.ndim == 1 else value
        if not isinstance(self.module, nn.RNNBase):
            return value
        if self.time_first:
            return self._masked(value.transpose(0, 1), pad)
        if part in ("h_n", "c_n"):
            return self._last_layer(value)
        if self.packed is not None and value.ndim == 2:
            padded, _ = pad_packed_sequence(self.packed._replace(data=value), batch_first=True, padding_value=pad)
            return padded
        if self.unbatched:
            return value.unsqueeze(0)
        return value if self.module.batch_first else value.transpose(0, 1)

    def _last_layer(self, state: Tensor) -> Tensor:
        state = state.unsqueeze(1) if state.ndim == 2 else state
        directions = 2 if self.module.bidirectional else 1
        return torch.cat(list(state[-directions:]), -1)

    def arrange_steps(self, values: Sequence[Tensor], pad: float) -> Tensor:
        """Return the values of all steps, one direction after the other, as ``(sample, time, channel)``."""
        per_direction = len(values) // (2 if self.module.bidirectional else 1)
        parts = [torch.stack(list(values[i : i + per_direction]), 1) for i in range(0, len(values), per_direction)]
        return self._masked(torch.cat(parts, -1), pad)

    def _masked(self, value: Tensor, pad: float) -> Tensor:
        """Return `value`: (sample, time, channel) with `pad` after the end of each sequence."""
        if self.packed is None:
            return value
        _, lengths = pad_packed_sequence(self.packed)
        inside = torch.arange(value.shape[1], device="cpu")[None, :] < lengths[:, None]
        return torch.where(inside[..., None].to(value.device), value, pad)


@contextmanager
def capture(
    modules: Sequence[nn.Module], wrt: str = "outputs", rnn_layer: int | None = None, through_time: bool = False
) -> Iterator[dict[nn.Module, list[Call]]]:
    """Record the outputs (or inputs) of `modules` while the body runs the model.

    Parameters
    ----------
    modules : sequence of nn.Module
        The modules to record.
    wrt : {'outputs', 'inputs'}
        Which tensors to record.
    rnn_layer : int, optional
        The layer to record inside an RNN with several layers; the last one by default.
    through_time : bool
        Unroll RNNs step by step.

    Yields
    ------
    dict of nn.Module to list of Call
        The calls of each module, in order.
    """
    calls: dict[nn.Module, list[Call]] = {module: [] for module in modules}
    with ExitStack() as stack:
        for module in calls:
            if wrt == "inputs":
                handle = module.register_forward_pre_hook(_Inputs(calls[module]), with_kwargs=True)
            else:
                unrolled = isinstance(module, nn.RNNBase) and (not _is_last(module, rnn_layer) or through_time)
                hook = _Layers(calls[module], rnn_layer, through_time) if unrolled else _Outputs(calls[module])
                handle = module.register_forward_hook(hook, with_kwargs=True)
            stack.callback(handle.remove)
        yield calls


def _is_last(rnn: nn.RNNBase, layer: int | None) -> bool:
    if layer is not None and not -rnn.num_layers <= layer < rnn.num_layers:
        raise ConfigError(f"rnn_layer must be less than the number of layers, {rnn.num_layers}, got {layer}")
    return layer is None or layer % rnn.num_layers == rnn.num_layers - 1


class _Outputs:
    def __init__(self, calls: list[Call]) -> None:
        self.calls = calls

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        kept: list[Tensor] = []
        passed = _clone_tensors(output, kept)
        parts = dict(zip(_names(module, len(kept)), kept, strict=True))
        self.calls.append(Call(module, parts, *_layout(module, args, kwargs)))
        return passed


class _Inputs:
    def __init__(self, calls: list[Call]) -> None:
        self.calls = calls

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        kept: list[Tensor] = []
        passed = _clone_tensors((args, kwargs), kept)
        parts = {"output" if i == 0 else str(i): tensor for i, tensor in enumerate(kept)}
        self.calls.append(Call(module, parts, *_layout(module, args, kwargs)))
        return passed


class _Layers:
    def __init__(self, calls: list[Call], layer: int | None, stepwise: bool) -> None:
        self.calls, self.layer, self.stepwise = calls, -1 if layer is None else layer, stepwise

    def __call__(self, module: nn.RNNBase, args: Any, kwargs: Any, output: Any) -> Any:
        data, hx = _rnn_arguments(args, kwargs)
        result, layers = unroll(module, _with_history(data), _with_history(hx), self.stepwise)
        chosen = layers[self.layer]
        call = Call(module, {}, *_layout(module, args, kwargs))
        if self.stepwise:
            call.steps = chosen
        else:
            call.parts["output"], call.time_first = chosen[0], True
        self.calls.append(call)
        return result


def _with_history(value: Any) -> Any:
    """Return `value` with a history, so that results computed from it have one even if no parameter is trained."""
    return _clone_tensors(value, [])


def _rnn_arguments(args: Any, kwargs: Any) -> tuple[Any, Any]:
    data = args[0] if args else kwargs["input"]
    return data, args[1] if len(args) > 1 else kwargs.get("hx")


def _layout(module: nn.Module, args: Any, kwargs: Any) -> tuple[PackedSequence | None, bool]:
    if not isinstance(module, nn.RNNBase):
        return None, False
    data, _ = _rnn_arguments(args, kwargs)
    return (data, False) if isinstance(data, PackedSequence) else (None, data.ndim == 2)


def _names(module: nn.Module, count: int) -> list[str]:
    names = _STATES if isinstance(module, nn.RNNBase) else ("output",)
    return [names[i] if i < len(names) else str(i) for i in range(count)]


def _clone_tensors(value: Any, kept: list[Tensor]) -> Any:
    """Return a nested `value` with its tensors cloned, and append the original tensors to `kept`."""

    def one(item: Any) -> Any:
        if isinstance(item, PackedSequence):
            return item._replace(data=_clone(item.data, kept))
        if isinstance(item, Tensor):
            return _clone(item, kept)
        if dataclasses.is_dataclass(item) and not isinstance(item, type):
            fields = {field.name: _clone_tensors(getattr(item, field.name), kept) for field in dataclasses.fields(item)}
            return dataclasses.replace(item, **fields)
        return item

    return pytree.tree_map(one, value, is_leaf=lambda item: isinstance(item, PackedSequence))


def _clone(tensor: Tensor, kept: list[Tensor]) -> Tensor:
    if not torch.is_grad_enabled() or not (tensor.is_floating_point() or tensor.is_complex()):
        kept.append(tensor.detach().clone())
        return tensor
    source = tensor if tensor.requires_grad else tensor.detach().requires_grad_()
    kept.append(source)
    return source.clone()


def first_tensor(value: Any) -> Tensor:
    """Return the first tensor of a nested value.

    Raises
    ------
    ConfigError
        If the value contains no tensor.
    """
    kept: list[Tensor] = []
    append: Callable[[Any], Any] = lambda item: kept.append(item.data if isinstance(item, PackedSequence) else item)  # noqa: E731
    pytree.tree_map_only((Tensor, PackedSequence), append, value, is_leaf=lambda item: isinstance(item, PackedSequence))
    if not kept:
        raise ConfigError(f"the output of the model contains no tensor, got {type(value).__name__}")
    return kept[0]
