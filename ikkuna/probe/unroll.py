"""Run an RNN layer by layer or step by step, with the same results as the fused module."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

__all__ = ["Sequences", "mask_sequences", "unroll"]

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
        names = [
            name
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
            if hasattr(rnn, name + suffix)
        ]
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
