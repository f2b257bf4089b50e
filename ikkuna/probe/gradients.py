"""The gradients of a loss with respect to what layers give out, what they receive, and what they have learned."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ikkuna.errors import ConfigError
from ikkuna.modules import named_parameters, unwrap
from ikkuna.probe.capture import Call, capture
from ikkuna.probe.isolation import isolated
from ikkuna.probe.layers import LayerId, find_layers
from ikkuna.probe.loss import as_tensor, compute_loss, run_model
from ikkuna.probe.outputs import called, choose, pad_value, shape_result

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

    An RNN's output at time :math:`t` acts on the loss in two ways: through the layers above, and through its next step.
    *Local* gradients, the default, hold the first way alone.  With ``through_time=True`` they hold both,
    :math:`dL/dh_t = \partial L/\partial h_t + (\partial h_{t+1}/\partial h_t)^\top\, dL/dh_{t+1}`,
    which tells whether anything of the loss still reaches the early steps.

    Parameters
    ----------
    model : nn.Module
        Left as it was found, also after an exception: no gradient is stored.
    layers : int, str, nn.Module or sequence of them
        See :func:`~ikkuna.probe.layers.find_layer`; ``None`` is the model itself.
    x, y : Tensor, array or list
        Input and targets; a tuple `x` stands for several arguments, a dictionary for named ones.
    loss_fn : callable, optional
        Called with the output, and `y` if given; otherwise guessed (see :func:`~ikkuna.probe.loss.compute_loss`).
    wrt, mode : {'outputs', 'weights', 'inputs'}
        With respect to what; two names for one argument.
    through_time : bool
        See above; for ``nn.RNN``, ``nn.LSTM``, ``nn.GRU`` of any depth and direction.  An RNN cell's always are.
    rnn_layer : int, optional
        Which layer inside an RNN of several; the last by default.
    part : {'auto', 'output', 'h_n', 'c_n'}
        Which output of an RNN; ``'auto'`` is the sequence or, if the loss depends on the last state alone, that.
    sample_weight : (sample,), optional
        Multiplies each sample's loss before the mean.
    closure : callable, optional
        Runs the model and returns the loss, in place of `x`, `y` and `loss_fn`.
    train : bool
        Run the model in training mode.
    as_dict : bool
        Return a dictionary by layer name.
    pad : 0 or 'nan'
        What stands beyond the end of a packed sequence.

    Returns
    -------
    Tensor, list or dict
        Shaped as :func:`~ikkuna.probe.outputs.get_outputs` returns the value; of weights, a dictionary by parameter name.
        Zero where the loss does not depend on it.

    Raises
    ------
    KeyError
        For an unknown layer.
    ConfigError
        For a loss that cannot be guessed or does not depend on the layers, and for a layer that was not called.

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
    model = unwrap(model)
    chosen = [("", model)] if layers is None else find_layers(model, layers)
    run = closure or _closure(model, x, y, loss_fn, sample_weight)
    with isolated(model, train):
        if wrt == "weights":
            results = _of_weights(chosen, run)
        else:
            with capture([module for _, module in chosen], wrt, rnn_layer, through_time) as calls:
                loss = _checked(run())
            # Copies: recomputation inside a checkpoint calls the modules again while the gradients are computed.
            met = [(name, list(calls[module])) for name, module in chosen if calls[module] or layers != "*"]
            results = _of_calls([(name, called(each, name)) for name, each in met], loss, part, pad)
    return shape_result(results, 0 if layers is None else layers, as_dict)


def _closure(model: nn.Module, x: Any, y: Any, loss_fn: Any, sample_weight: Any) -> Callable[[], Tensor]:
    if x is None:
        raise ConfigError("give the input x, or a closure that runs the model and returns the loss")
    return lambda: compute_loss(run_model(model, x), as_tensor(y, model), loss_fn, sample_weight)


def _checked(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ConfigError(f"the closure must return the loss, a tensor with one number, got {type(loss).__name__}")
    if not loss.requires_grad:
        raise ConfigError("the loss does not depend on the layers asked for (detached, or computed without autograd?)")
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
        return torch.stack([call.arrange("output", gradient(choose(call, part)[1]), 0.0) for call in calls], 1)
    if last.steps is not None:
        return last.arrange_steps([gradient(step) for step in last.steps], pad_value(pad))
    name, value = choose(last, part)
    if part == "auto" and found.get(id(value)) is None and _reached(last, "h_n", found):
        name, value = "h_n", last.parts["h_n"]
    return last.arrange(name, gradient(value), pad_value(pad))


def _reached(call: Call, part: str, found: dict[int, Tensor | None]) -> bool:
    return part in call.parts and found.get(id(call.parts[part])) is not None
