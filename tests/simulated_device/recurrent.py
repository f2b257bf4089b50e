"""The fused cells of recurrent layers (RNN.cu), which exist for accelerators alone; one kernel each."""

import torch
from torch import Tensor

__all__ = ["CELLS"]


def _with_bias(gates: Tensor, bias: Tensor | None) -> Tensor:
    return gates if bias is None else gates + bias


def _lstm(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the hidden state, the cell state, and the activated gates."""
    gates = _with_bias(input_gates, input_bias) + _with_bias(hidden_gates, hidden_bias)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat((i, f, g, o), 1)


def _lstm_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of the gates, of the cell state before, and of the bias."""
    if grad_hy is None and grad_cy is None:
        return None, None, None
    i, f, g, o = workspace.chunk(4, 1)
    to_hidden = torch.zeros_like(cx) if grad_hy is None else grad_hy
    tanh = cy.tanh()
    to_cell = to_hidden * o * (1 - tanh * tanh) + (0 if grad_cy is None else grad_cy)
    parts = (
        to_cell * g * (1 - i) * i,
        to_cell * cx * (1 - f) * f,
        to_cell * i * (1 - g * g),
        to_hidden * tanh * (1 - o) * o,
    )
    gates = torch.cat(parts, 1)
    return gates, to_cell * f, gates.sum(0) if has_bias else None


def _gru(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the hidden state, and what the backward needs."""
    ir, iz, inew = _with_bias(input_gates, input_bias).chunk(3, 1)
    hr, hz, hnew = _with_bias(hidden_gates, hidden_bias).chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (inew + r * hnew).tanh()
    return n + z * (hx - n), torch.cat((r, z, n, hx, hnew), 1)


def _gru_backward(
    grad_hy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of the gates of input and hidden state, of the hidden state before, and of both biases."""
    r, z, n, hx, hnew = workspace.chunk(5, 1)
    to_z, to_n = grad_hy * (hx - n) * (1 - z) * z, grad_hy * (1 - z) * (1 - n * n)
    to_r = to_n * hnew * (1 - r) * r
    inputs, hidden = torch.cat((to_r, to_z, to_n), 1), torch.cat((to_r, to_z, to_n * r), 1)
    return inputs, hidden, grad_hy * z, inputs.sum(0) if has_bias else None, hidden.sum(0) if has_bias else None


CELLS = {
    "_thnn_fused_lstm_cell": _lstm,
    "_thnn_fused_lstm_cell_backward_impl": _lstm_backward,
    "_thnn_fused_gru_cell": _gru,
    "_thnn_fused_gru_cell_backward": _gru_backward,
}
"""By the name of the operator, what it computes on the host."""
