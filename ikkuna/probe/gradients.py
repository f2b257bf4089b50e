"""Gradients of a loss with respect to the outputs, inputs and parameters of layers."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ikkuna.errors import ConfigError
from ikkuna.modules import named_parameters
from ikkuna.probe.capture import Call, capture
from ikkuna.probe.isolation import isolated, without_replica_wrappers
from ikkuna.probe.layers import LayerId, find_layers
from ikkuna.probe.loss import as_tensor, compute_loss, run_model
from ikkuna.probe.outputs import checked_calls, choose_part, pad_value, shape_result

__all__ = ["get_gradients"]

_WRT = ("outputs", "weights", "inputs")


def get_gradients(
    model: nn.Module,
    layers: LayerId | Sequence[LayerId] | None = None,
    x: Any = None,
    y: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    *,
    wrt: str = "outputs",
    mode: str | None = None,
    through_time: bool = False,
    rnn_layer: int | None = None,
    part: str = "auto",
    sample_weight: Any = None,
    closure: Callable[[], Tensor] | None = None,
    train: bool = False,
    as_dict: bool = False,
    pad: Any = 0,
) -> Any:
    r"""Return the gradient of the loss with respect to outputs, weights or inputs of `layers`.

    The output of an RNN at time :math:`t` affects the loss in two ways: through the layers above, and through the next
    time step.  *Local* gradients, the default, contain only the first part.  With ``through_time=True`` they contain
    both, :math:`dL/dh_t = \partial L/\partial h_t + (\partial h_{t+1}/\partial h_t)^\top\, dL/dh_{t+1}`, which shows
    whether the loss reaches the early time steps.

    Parameters
    ----------
    model : nn.Module
        The model.  Its state is restored, also after an exception, and no gradient is stored in it.
    layers : int, str, nn.Module or sequence of them
        See :func:`~ikkuna.probe.layers.find_layer`; ``None`` means the model itself.
    x, y : Tensor, ndarray or list
        Input and targets.  A tuple `x` is passed as several arguments, a dictionary as named arguments.
    loss_fn : callable, optional
        Called with the output, and with `y` if given.  By default the loss is guessed (see
        :func:`~ikkuna.probe.loss.compute_loss`).
    wrt, mode : {'outputs', 'weights', 'inputs'}
        The tensors to differentiate with respect to.  Both names mean the same argument.
    through_time : bool
        See above; for ``nn.RNN``, ``nn.LSTM`` and ``nn.GRU`` of any depth and direction.  Gradients of an RNN cell
        always contain both parts.
    rnn_layer : int, optional
        Which layer inside an RNN with several layers; the last one by default.
    part : {'auto', 'output', 'h_n', 'c_n'}
        Which output of an RNN.  ``'auto'`` is the sequence, or the last state if the loss depends only on that.
    sample_weight : sequence of float, optional
        (sample,).  The loss of each sample is multiplied by its weight before the mean.
    closure : callable, optional
        Runs the model and returns the loss; replaces `x`, `y` and `loss_fn`.
    train : bool
        Run the model in training mode.
    as_dict : bool
        Return a dictionary by layer name.
    pad : {0, 'nan'}
        The value after the end of a packed sequence.

    Returns
    -------
    Tensor, list or dict
        Shaped like the value that :func:`~ikkuna.probe.outputs.get_outputs` returns; for weights, a dictionary by
        parameter name.  Zero if the loss does not depend on the tensor.

    Raises
    ------
    KeyError
        If a layer does not exist.
    ConfigError
        If the loss cannot be guessed or does not depend on the layers, or if a layer was not called.

    Examples
    --------
    >>> rnn = nn.RNN(1, 1, nonlinearity="relu", bias=False, batch_first=True)
    >>> for weight, value in zip(rnn.parameters(), (1.0, 0.5)):
    ...     _ = nn.init.constant_(weight, value)
    >>> last = lambda output: output[0][:, -1].sum()
    >>> get_gradients(rnn, "rnn", torch.ones(1, 3, 1), loss_fn=last, through_time=True).flatten()
    tensor([0.2500, 0.5000, 1.0000])
    >>> get_gradients(rnn, "rnn", torch.ones(1, 3, 1), loss_fn=last).flatten()
    tensor([0., 0., 1.])
    """
    wrt = wrt if mode is None else mode
    if wrt not in _WRT:
        raise ConfigError(f"wrt (or mode) must be one of {', '.join(map(repr, _WRT))}, got {wrt!r}")
    model = without_replica_wrappers(model)
    chosen = [("", model)] if layers is None else find_layers(model, layers)
    run = closure or _closure(model, x, y, loss_fn, sample_weight)
    with isolated(model, train):
        if wrt == "weights":
            results = _of_weights(chosen, run)
        else:
            with capture([module for _, module in chosen], wrt, rnn_layer, through_time) as calls:
                loss = _checked(run())
            recorded = [(name, calls[module]) for name, module in chosen if calls[module] or layers != "*"]
            results = _of_calls([(name, checked_calls(each, name)) for name, each in recorded], loss, part, pad)
    return shape_result(results, 0 if layers is None else layers, as_dict)


def _closure(model: nn.Module, x: Any, y: Any, loss_fn: Any, sample_weight: Any) -> Callable[[], Tensor]:
    if x is None:
        raise ConfigError("get_gradients needs the input x, or a closure that runs the model and returns the loss")
    return lambda: compute_loss(run_model(model, x), as_tensor(y, model), loss_fn, sample_weight)


def _checked(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ConfigError(f"the closure must return the loss, a tensor with one number, got {type(loss).__name__}")
    if not loss.requires_grad:
        raise ConfigError("the loss does not depend on the layers (detached, or computed without autograd?)")
    return loss


def _of_weights(chosen: list[tuple[str, nn.Module]], run: Callable[[], Tensor]) -> dict[str, Any]:
    named = {name: dict(named_parameters(module)) for name, module in chosen}
    flat = list({id(p): p.requires_grad_() for group in named.values() for p in group.values()}.values())
    loss = _checked(run())
    gradients = torch.autograd.grad(loss, flat, allow_unused=True) if flat else ()
    by_id = {id(p): torch.zeros_like(p) if g is None else g for p, g in zip(flat, gradients, strict=True)}
    return {name: {key: by_id[id(p)].detach().clone() for key, p in group.items()} for name, group in named.items()}


def _of_calls(met: list[tuple[str, list[Call]]], loss: Tensor, part: str, pad: Any) -> dict[str, Any]:
    tensors = {id(t): t for _, calls in met for call in calls for t in _tensors(call) if t.requires_grad}
    gradients = torch.autograd.grad(loss, list(tensors.values()), allow_unused=True) if tensors else ()
    found: dict[int, Tensor | None] = dict(zip(tensors, gradients, strict=True))
    return {name: _collect(calls, found, part, pad).detach() for name, calls in met}


def _tensors(call: Call) -> list[Tensor]:
    return call.steps if call.steps is not None else list(call.parts.values())


def _collect(calls: list[Call], found: dict[int, Tensor | None], part: str, pad: Any) -> Tensor:
    def gradient(value: Tensor) -> Tensor:
        known = found.get(id(value))
        return torch.zeros_like(value) if known is None else known

    last = calls[-1]
    if isinstance(last.module, nn.RNNCellBase):
        return torch.stack([call.arrange("output", gradient(choose_part(call, part)[1]), 0.0) for call in calls], 1)
    if last.steps is not None:
        return last.arrange_steps([gradient(step) for step in last.steps], pad_value(pad))
    name, value = choose_part(last, part)
    if part == "auto" and found.get(id(value)) is None and _reached(last, "h_n", found):
        name, value = "h_n", last.parts["h_n"]
    return last.arrange(name, gradient(value), pad_value(pad))


def _reached(call: Call, part: str, found: dict[int, Tensor | None]) -> bool:
    return part in call.parts and found.get(id(call.parts[part])) is not None
