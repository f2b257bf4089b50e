"""Outputs of layers, the loss of a model, and its gradients."""

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ikkuna.errors import ConfigError
from ikkuna.inspect.probe.capture import Call, LayerId, capture, find_layers, first_tensor
from ikkuna.numerics.elements import has_fractions
from ikkuna.support.modules import class_name, named_parameters
from ikkuna.support.undisturbed import as_tensor, isolated, run_model, without_replica_wrappers


def compute_loss(output: Any, y: Any, loss_fn: Callable[..., Any] | None, sample_weight: Any = None) -> Tensor:
    """Return the loss of the `output` of a model.

    Without a `loss_fn`, integer targets mean cross entropy, targets with the shape of the output mean the mean squared
    error, and an output with a single element is itself the loss.

    Parameters
    ----------
    output : Any
        The output of the model.
    y : Any
        The targets, or ``None``.
    loss_fn : callable, optional
        Called with the output, and with `y` if that is given.
    sample_weight : sequence of float, optional
        (sample,).  The result is the mean over all elements, each multiplied by the weight of its sample.

    Raises
    ------
    ConfigError
        If no loss can be guessed, if the loss has more than one element, or if it cannot be weighted.
    """
    if loss_fn is None:
        loss_fn, output = _guess(output, y)
    if sample_weight is not None:
        loss = _weighted(loss_fn, output, y, sample_weight)
    else:
        loss = loss_fn(output) if y is None else loss_fn(output, y)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigError(f"the loss must be a tensor with one number, got {got}")
    return loss.reshape(())


def _guess(output: Any, y: Any) -> tuple[Callable[..., Any], Tensor]:
    first = first_tensor(output)
    if y is None:
        if first.numel() == 1:
            return lambda value: value, first
        raise ConfigError("the output of the model is not a loss; give loss_fn, targets y or a closure")
    if isinstance(y, Tensor) and not y.is_floating_point():
        if y.shape == first.shape[:-1]:
            return _last_axis_cross_entropy, first
        if y.shape == first.shape[:1] + first.shape[2:]:
            return functional.cross_entropy, first
    elif isinstance(y, Tensor) and y.shape == first.shape:
        return functional.mse_loss, first
    shape = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
    raise ConfigError(f"no loss can be guessed for output {tuple(first.shape)} and targets {shape}; give loss_fn")


def _last_axis_cross_entropy(output: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    loss = functional.cross_entropy(output.flatten(0, -2), y.flatten(), reduction=reduction)
    return loss.view(y.shape) if reduction == "none" else loss


def _weighted(loss_fn: Callable[..., Any], output: Any, y: Any, sample_weight: Any) -> Tensor:
    if isinstance(loss_fn, nn.Module) and hasattr(loss_fn, "reduction"):
        single = copy.copy(loss_fn)
        single.__dict__["reduction"] = "none"
        losses = single(output, y)
    elif "reduction" in inspect.signature(loss_fn).parameters:
        losses = loss_fn(output, y, reduction="none")
    else:
        losses = loss_fn(output) if y is None else loss_fn(output, y)
    weight = torch.as_tensor(sample_weight)
    if not isinstance(losses, Tensor) or losses.ndim == 0 or losses.shape[0] != weight.shape[0]:
        raise ConfigError("sample_weight needs a loss_fn that returns shape (sample, …) or has an argument `reduction`")
    weight = weight.to(losses.device, losses.dtype).view(-1, *[1] * (losses.ndim - 1))
    return (losses * weight).mean()


def get_outputs(
    model: nn.Module,
    layers: LayerId | Sequence[LayerId],
    x: Any,
    *,
    train: bool = False,
    as_dict: bool = False,
    part: str = "auto",
    rnn_layer: int | None = None,
    pad: Any = 0,
) -> Any:
    """Return detached copies of the outputs of `layers` for the input `x`.

    Parameters
    ----------
    model : nn.Module
        The model.  Its state is restored, also after an exception.
    layers : int, str, nn.Module or sequence of them
        See :func:`~ikkuna.inspect.probe.capture.find_layer`; ``'*'`` means every leaf that is called.
    x : Tensor, ndarray, list, PackedSequence, tuple or dict
        The input.  A tuple is passed as several arguments, a dictionary as named arguments.
    train : bool
        Run the model in training mode.
    as_dict : bool
        Return a dictionary by layer name.
    part : {'auto', 'output', 'h_n', 'c_n'}
        Which output of an RNN; ``'auto'`` is the sequence.
    rnn_layer : int, optional
        Which layer inside an RNN with several layers; the last one by default.
    pad : {0, 'nan'}
        The value after the end of a packed sequence.

    Returns
    -------
    Tensor, list or dict of Tensor
        For a list of layers, a list in the same order.  The output of an RNN has the shape ``(sample, time, channel)``
        for every layout of its input, the outputs of an RNN cell have it over its calls, and a state has ``(sample,
        channel)``. For other modules, the output of the last call.

    Raises
    ------
    KeyError
        If a layer does not exist.
    ConfigError
        If a layer was not called, or has no such part.

    Examples
    --------
    >>> rnn = nn.RNN(1, 1, nonlinearity="relu", bias=False, batch_first=True)
    >>> for weight, value in zip(rnn.parameters(), (1.0, 0.5)):
    ...     _ = nn.init.constant_(weight, value)
    >>> get_outputs(rnn, "rnn", torch.ones(1, 3, 1)).flatten()
    tensor([1.0000, 1.5000, 1.7500])
    """
    model = without_replica_wrappers(model)
    chosen = find_layers(model, layers)
    with isolated(model, train), torch.no_grad(), capture([m for _, m in chosen], "outputs", rnn_layer) as calls:
        run_model(model, x)
    results = {}
    for name, module in chosen:
        if not calls[module] and layers == "*":
            continue
        value = _collect(checked_calls(calls[module], name), part, pad)
        results[name] = value.detach().clone()
    return shape_result(results, layers, as_dict)


def checked_calls(calls: list[Call], name: str) -> list[Call]:
    """Return `calls`, or raise `ConfigError` if the layer was not called."""
    if not calls:
        raise ConfigError(f"the layer {name!r} was not called while the model ran")
    return calls


def _collect(calls: list[Call], part: str, pad: Any) -> Tensor:
    if isinstance(calls[-1].module, nn.RNNCellBase):
        return torch.stack([call.arrange("output", choose_part(call, part)[1], 0.0) for call in calls], 1)
    name, value = choose_part(calls[-1], part)
    return calls[-1].arrange(name, value, pad_value(pad))


def choose_part(call: Call, part: str) -> tuple[str, Tensor]:
    """Return the name and the tensor of a part of a call.

    Raises
    ------
    ConfigError
        If there is no such part.
    """
    name = "output" if part == "auto" else part
    name = {"h_n": "output", "c_n": "1"}.get(name, name) if isinstance(call.module, nn.RNNCellBase) else name
    if name not in call.parts:
        known = ", ".join(call.parts) or "no tensors"
        raise ConfigError(f"{class_name(call.module)} has no part {part!r}; available: {known}")
    return name, call.parts[name]


def pad_value(pad: Any) -> float:
    """Return `pad`, which must be 0 or ``'nan'``, as a float."""
    if pad not in (0, "nan"):
        raise ConfigError(f"pad must be 0 or 'nan', got {pad!r}")
    return float(pad)


def shape_result(results: dict[str, Any], layers: Any, as_dict: bool) -> Any:
    """Return one result for a single layer, a list for several layers, or a dictionary by name."""
    if as_dict:
        return results
    values = list(results.values())
    single = isinstance(layers, int | nn.Module) or (isinstance(layers, str) and layers != "*")
    return values[0] if single else values


def sequence_summary(rnn: nn.RNNBase, output: Any) -> Tensor:
    """Return the state of the last layer after it has read the whole sequence: ``(sample, directions * channel)``.

    For a bidirectional RNN this differs from ``out[:, -1]``, because the backward direction ends at the first step.

    Parameters
    ----------
    rnn : nn.RNNBase
        The RNN.
    output : tuple
        The output of the RNN.
    """
    state = output[1][0] if isinstance(rnn, nn.LSTM) else output[1]
    return Call(rnn, {}).arrange("h_n", state, 0.0)


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
        See :func:`~ikkuna.inspect.probe.capture.find_layer`; ``None`` means the model itself.
    x, y : Tensor, ndarray or list
        Input and targets.  A tuple `x` is passed as several arguments, a dictionary as named arguments.
    loss_fn : callable, optional
        Called with the output, and with `y` if given.  By default the loss is guessed (see
        :func:`~ikkuna.inspect.probe.outputs.compute_loss`).
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
        Shaped like the value that :func:`~ikkuna.inspect.probe.outputs.get_outputs` returns; for weights, a dictionary by
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
    named = {name: {key: p for key, p in named_parameters(module) if has_fractions(p)} for name, module in chosen}
    flat = list({id(p): p.requires_grad_() for group in named.values() for p in group.values()}.values())
    loss = _checked(run())
    gradients = torch.autograd.grad(loss, flat, allow_unused=True) if flat else ()
    by_id = {id(p): torch.zeros_like(p) if g is None else g for p, g in zip(flat, gradients, strict=True)}
    return {name: {key: by_id[id(p)].detach().clone() for key, p in group.items()} for name, group in named.items()}


def _of_calls(met: list[tuple[str, list[Call]]], loss: Tensor, part: str, pad: Any) -> dict[str, Any]:
    tensors = {id(t): t for _, calls in met for call in calls for t in _tensors(call) if t.requires_grad}
    gradients = torch.autograd.grad(loss, list(tensors.values()), allow_unused=True) if tensors else ()
    found: dict[int, Tensor | None] = dict(zip(tensors, gradients, strict=True))
    return {name: _collect_gradients(calls, found, part, pad).detach() for name, calls in met}


def _tensors(call: Call) -> list[Tensor]:
    return call.steps if call.steps is not None else list(call.parts.values())


def _collect_gradients(calls: list[Call], found: dict[int, Tensor | None], part: str, pad: Any) -> Tensor:
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
