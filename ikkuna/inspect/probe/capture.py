"""Finds modules, runs the user's model, and records what its modules receive and return.

A forward hook replaces every output by a clone and keeps the original.
A later in-place operation therefore cannot overwrite the original, and the gradient with respect to it is the gradient
with respect to the returned value.  No backward hook is needed.
"""

import dataclasses
import difflib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from ikkuna.errors import ConfigError
from ikkuna.support.modules import class_name, name_of, named_children, named_modules, unwrap
from ikkuna.support.torch_internals import pytree

LayerId = int | str | nn.Module
_log = logging.getLogger(__name__)


def leaves(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules without children, by name; parametrisations do not count as children."""
    return {name: module for name, module in named_modules(model) if next(named_children(module), None) is None}


def find_layers(model: nn.Module, layers: LayerId | Sequence[LayerId]) -> list[tuple[str, nn.Module]]:
    """Return ``(name, module)`` for each of `layers`, in the given order; ``'*'`` means every leaf.

    Raises
    ------
    KeyError
        If a layer is not found (see :func:`find_layer`).
    """
    if isinstance(layers, str) and layers == "*":
        return list(leaves(model).items())
    if isinstance(layers, int | str | nn.Module) or not isinstance(layers, Iterable):
        return [find_layer(model, layers)]
    return [find_layer(model, layer) for layer in layers]


def find_layer(model: nn.Module, layer: LayerId) -> tuple[str, nn.Module]:
    """Return the name and the module that `layer` refers to.

    Parameters
    ----------
    model : nn.Module
        The model; wrappers are skipped.
    layer : int, str or nn.Module
        A number is the position among the leaves, from 0, or from the end if negative.  A string is the full name of a
        module, or else the end of a name, a part of a name, or a part of a class name (case-insensitive).  If several
        modules match, the first one is used and a warning is logged.

    Raises
    ------
    KeyError
        If nothing matches; the message lists candidates.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.LSTM(3, 4))
    >>> find_layer(model, "lstm")[0], find_layer(model, 1)[0]
    ('2', '1')
    """
    if isinstance(layer, nn.Module):
        return name_of(model, layer), unwrap(layer)
    if isinstance(layer, bool) or not isinstance(layer, int | str):
        raise KeyError(f"a layer must be an int, a str or a module, got {type(layer).__name__}")
    if isinstance(layer, int):
        return _at(model, layer)
    modules = dict(named_modules(model))
    if layer in modules and layer:
        return layer, modules[layer]
    matching = _matching(modules, layer)
    if not matching:
        raise KeyError(_unknown(model, layer, modules))
    if len(matching) > 1:
        _log.warning("several layers match %r (%s); the first one is used", layer, ", ".join(matching[:5]))
    return matching[0], modules[matching[0]]


def _matching(modules: dict[str, nn.Module], text: str) -> list[str]:
    names = [name for name in modules if name]
    tests: tuple[Any, ...] = (
        lambda name: name.endswith(f".{text}"),
        lambda name: text in name,
        lambda name: text.lower() in class_name(modules[name]).lower(),
    )
    for test in tests:
        if matching := [name for name in names if test(name)]:
            return matching
    root = class_name(modules[""]).lower()
    return [""] if text and text.lower() in root else []


def _at(model: nn.Module, position: int) -> tuple[str, nn.Module]:
    found = list(leaves(model).items())
    if not -len(found) <= position < len(found):
        known = ", ".join(f"{i}: {name or class_name(module)}" for i, (name, module) in enumerate(found[:20]))
        raise KeyError(f"no layer {position}; the model has {len(found)}: {known}")
    return found[position]


def _unknown(model: nn.Module, text: str, modules: dict[str, nn.Module]) -> str:
    known = [f"{name} ({class_name(module)})" for name, module in leaves(model).items()]
    close = difflib.get_close_matches(text, [name for name in modules if name], n=3, cutoff=0.5)
    hint = f"close: {', '.join(close)}; " if close else ""
    more = f" and {len(known) - 20} more" if len(known) > 20 else ""
    return f"no layer {text!r} in {class_name(model)}; {hint}available: {', '.join(known[:20])}{more}"


RNN_PARAMETERS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
"""The names of an RNN's parameters, without the ending of a layer and direction."""

State = tuple[Tensor, ...]


class Sequences:
    """The input of an RNN as ``(time, batch, channel)``, with the length of each sequence.

    Parameters
    ----------
    data : Tensor or PackedSequence
        The input, in any layout that an RNN accepts.
    batch_first : bool
        Whether a batched tensor is ``(batch, time, channel)``.
    """

    def __init__(self, data: Any, batch_first: bool) -> None:
        self.packed = data if isinstance(data, PackedSequence) else None
        self.batch_first = batch_first
        self.unbatched = False
        if self.packed is not None:
            self.data, self.lengths = pad_packed_sequence(self.packed)
        else:
            self.unbatched = data.ndim == 2
            batched = data.unsqueeze(1) if self.unbatched else data
            self.data = batched.transpose(0, 1) if batch_first and not self.unbatched else batched
            self.lengths = torch.full((self.data.shape[1],), self.data.shape[0], device="cpu")

    def restore(self, output: Tensor) -> Any:
        """Return `output`: (time, batch, channel) in the layout of the input."""
        if self.packed is not None:
            order, lengths = self.packed.sorted_indices, self.lengths
            if order is not None:
                output, lengths = output.index_select(1, order), lengths[order.cpu()]
            data = pack_padded_sequence(output, lengths).data
            return PackedSequence(data, self.packed.batch_sizes, order, self.packed.unsorted_indices)
        if self.unbatched:
            return output.squeeze(1)
        return output.transpose(0, 1) if self.batch_first else output

    def restore_state(self, state: Tensor) -> Tensor:
        """Return `state`: (layer, batch, channel) in the layout that the RNN returns."""
        return state.squeeze(1) if self.unbatched else state


def unroll(rnn: nn.RNNBase, data: Any, hx: Any, stepwise: bool) -> tuple[Any, list[list[Tensor]]]:
    """Return the result of ``rnn(data, hx)`` and the tensors of every layer that its gradients flow through.

    In training mode, dropout between layers draws different numbers than the fused module.

    Parameters
    ----------
    rnn : nn.RNNBase
        An ``nn.RNN``, ``nn.LSTM`` or ``nn.GRU``.
    data : Tensor or PackedSequence
        The input of the RNN.
    hx : Tensor or tuple of Tensor, optional
        The initial state.
    stepwise : bool
        Run single steps, so that the output of each step is an input of the next one in the graph.  Otherwise each
        layer runs at once.

    Returns
    -------
    output : Any
        The result of the module.
    layers : list of list of Tensor
        For each layer a list with its output ``(time, batch, channel)``; if stepwise, a list with the state
        ``(batch, channel)`` of every time step, the forward direction before the backward direction.
    """
    sequences = Sequences(data, rnn.batch_first)
    x, layers, last = sequences.data, [], []
    for layer in range(rnn.num_layers):
        if layer and rnn.dropout and rnn.training:
            x = dropout(x, rnn.dropout)
        directions = [
            _Direction(rnn, layer, reverse, hx, sequences) for reverse in (False, True)[: 1 + rnn.bidirectional]
        ]
        runs = [direction.step(x) if stepwise else direction.run(x) for direction in directions]
        parts = [torch.stack(states) if stepwise else states[0] for states, _ in runs]
        parts = [mask_sequences(part, sequences.lengths) for part in parts] if sequences.packed is not None else parts
        x = torch.cat(parts, -1)
        layers.append([state for states, _ in runs for state in states] if stepwise else [x])
        last += [state for _, state in runs]
    states = tuple(sequences.restore_state(torch.stack(each)) for each in zip(*last, strict=True))
    final: Any = states if isinstance(rnn, nn.LSTM) else states[0]
    return (sequences.restore(x), final), layers


def mask_sequences(output: Tensor, lengths: Tensor) -> Tensor:
    """Return `output`: (time, batch, channel) with zeros after the end of each sequence."""
    steps = torch.arange(output.shape[0], device=output.device)
    inside = steps[:, None] < lengths.to(output.device)[None, :]
    return torch.where(inside[..., None], output, 0.0)


class _Direction:
    """One direction of one layer, as a module that borrows the weights of the RNN."""

    def __init__(self, rnn: nn.RNNBase, layer: int, reverse: bool, hx: Any, sequences: Sequences) -> None:
        suffix = f"_l{layer}{'_reverse' if reverse else ''}"
        names = [name for name in RNN_PARAMETERS if hasattr(rnn, name + suffix)]
        self.weights = {f"{name}_l0": getattr(rnn, name + suffix) for name in names}
        self.cell = _single(rnn, self.weights["weight_ih_l0"].shape[1])
        self.reverse, self.lengths = reverse, sequences.lengths
        self.state = _initial(rnn, 2 * layer + reverse if rnn.bidirectional else layer, hx, sequences)

    def call(self, x: Any, state: State) -> tuple[Any, State]:
        hx = state if len(state) == 2 else state[0]
        out, last = torch.func.functional_call(self.cell, self.weights, (x, hx))
        return out, last if isinstance(last, tuple) else (last,)

    def run(self, x: Tensor) -> tuple[list[Tensor], State]:
        """Return the whole output ``(time, batch, channel)`` and the last state."""
        order = _reversal(self.lengths, x.shape[0]).to(x.device) if self.reverse else None
        turned = x if order is None else x.gather(0, order[..., None].expand_as(x))
        packed = pack_padded_sequence(turned, self.lengths, enforce_sorted=False)
        out, last = self.call(packed, self.state)
        padded, _ = pad_packed_sequence(out, total_length=x.shape[0])
        padded = padded if order is None else padded.gather(0, order[..., None].expand_as(padded))
        return [padded], tuple(part[0] for part in last)

    def step(self, x: Tensor) -> tuple[list[Tensor], State]:
        """Return the output ``(batch, channel)`` of every step in the order of time, and the last state."""
        state, outputs = self.state, [x] * x.shape[0]
        lengths = self.lengths.to(x.device)
        for t in reversed(range(x.shape[0])) if self.reverse else range(x.shape[0]):
            inside = (t < lengths)[None, :, None]
            _, new = self.call(x[t : t + 1], state)
            # A separate tensor for each step, because gradients are computed with respect to tensors.
            state = tuple(torch.where(inside, b, a) for a, b in zip(state, new, strict=True))
            outputs[t] = state[0][0].clone()
            state = (outputs[t].unsqueeze(0), *state[1:])
        return outputs, tuple(part[0] for part in state)


def _single(rnn: nn.RNNBase, inputs: int) -> nn.RNNBase:
    kind = next(k for k in (nn.LSTM, nn.GRU, nn.RNN) if isinstance(rnn, k))
    options: dict[str, Any] = {"bias": rnn.bias, "device": "meta"}
    if kind is nn.RNN:
        options["nonlinearity"] = rnn.nonlinearity
    elif kind is nn.LSTM:
        options["proj_size"] = rnn.proj_size
    single: nn.RNNBase = kind(inputs, rnn.hidden_size, **options)
    return single.train(rnn.training)


def _initial(rnn: nn.RNNBase, index: int, hx: Any, sequences: Sequences) -> State:
    batch = sequences.data.shape[1]
    sizes = [rnn.proj_size or rnn.hidden_size] + [rnn.hidden_size] * isinstance(rnn, nn.LSTM)
    if hx is None:
        return tuple(sequences.data.new_zeros(1, batch, size) for size in sizes)
    parts: Sequence[Tensor] = hx if isinstance(hx, tuple | list) else (hx,)
    return tuple((part.unsqueeze(1) if part.ndim == 2 else part)[index : index + 1] for part in parts)


def _reversal(lengths: Tensor, steps: int) -> Tensor:
    """Return the time index to read at each time and sequence if every sequence is reversed within its length."""
    t = torch.arange(steps, device="cpu")[:, None]
    return torch.where(t < lengths[None, :], lengths[None, :] - 1 - t, t)


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
                handle = module.register_forward_pre_hook(partial(_keep_inputs, calls[module]), with_kwargs=True)
            else:
                hook = partial(_keep_outputs, calls[module])
                if isinstance(module, nn.RNNBase) and (not _is_last(module, rnn_layer) or through_time):
                    hook = partial(_keep_layer, calls[module], rnn_layer, through_time)
                handle = module.register_forward_hook(hook, with_kwargs=True)
            stack.callback(handle.remove)
        yield calls


def _is_last(rnn: nn.RNNBase, layer: int | None) -> bool:
    if layer is not None and not -rnn.num_layers <= layer < rnn.num_layers:
        raise ConfigError(f"rnn_layer must be less than the number of layers, {rnn.num_layers}, got {layer}")
    return layer is None or layer % rnn.num_layers == rnn.num_layers - 1


def _keep_outputs(calls: list[Call], module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    kept: list[Tensor] = []
    passed = _clone_tensors(output, kept)
    parts = dict(zip(_names(module, len(kept)), kept, strict=True))
    calls.append(Call(module, parts, *_layout(module, args, kwargs)))
    return passed


def _keep_inputs(calls: list[Call], module: nn.Module, args: Any, kwargs: Any) -> Any:
    kept: list[Tensor] = []
    passed = _clone_tensors((args, kwargs), kept)
    parts = {"output" if i == 0 else str(i): tensor for i, tensor in enumerate(kept)}
    calls.append(Call(module, parts, *_layout(module, args, kwargs)))
    return passed


def _keep_layer(
    calls: list[Call], layer: int | None, stepwise: bool, module: nn.RNNBase, args: Any, kwargs: Any, output: Any
) -> Any:
    # Clones have a history, so that results computed from them have one even if no parameter is trained.
    data, hx = _clone_tensors(_rnn_arguments(args, kwargs), [])
    result, layers = unroll(module, data, hx, stepwise)
    chosen = layers[-1 if layer is None else layer]
    call = Call(module, {}, *_layout(module, args, kwargs))
    if stepwise:
        call.steps = chosen
    else:
        call.parts["output"], call.time_first = chosen[0], True
    calls.append(call)
    return result


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
