"""Results of a training run, observed with plain hooks of torch in float64; nothing here is of ikkuna.

Everything is kept as a copy until the step ends: memory and time do not matter, only that each number is easy to verify.
"""

import importlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

__all__ = ["KINDS", "STATISTICS", "Key", "Observation", "Reference", "wide"]

KINDS = (
    *("activations", "layer_gradients", "weights", "weight_gradients", "weight_updates"),
    *("biases", "bias_gradients", "bias_updates"),
)
STATISTICS = ("norm2", "mean", "variance", "min", "max")

Key = tuple[str, str, int]
"""Kind, name of the series and step."""


@dataclass
class Observation:
    """All elements that were seen of one series in one step, in float64.

    Parameters
    ----------
    parts : list of Tensor
        The elements, one tensor for each call of the module.
    """

    parts: list[Tensor] = field(default_factory=list)

    def statistics(self) -> dict[str, float]:
        """Return each of `STATISTICS`, from its definition."""
        x = torch.cat([part.reshape(-1) for part in self.parts])
        mean = x.mean()
        return {
            "norm2": x.square().sum().sqrt().item(),
            "mean": mean.item(),
            "variance": (x - mean).square().mean().item(),
            "min": x.min().item(),
            "max": x.max().item(),
        }

    @property
    def scale(self) -> float:
        """The root mean square of the elements, to which the error of their mean is relative."""
        x = torch.cat([part.reshape(-1) for part in self.parts])
        return math.sqrt(x.square().mean().item())


class Reference:
    """Observes each leaf of a model, each module that owns parameters, and all parameters.

    Parameters
    ----------
    model : nn.Module
        The model.
    optimizer : Optimizer, optional
        Its optimizer; each step of it ends a step of training.

    Attributes
    ----------
    seen : dict
        An `Observation` for each kind, series and step.
    unreadable : int
        Number of nested tensors, of which ikkuna reads no numbers.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self.seen: dict[Key, Observation] = {}
        self.step = 0
        self.unreadable = 0
        self._model = model
        self._before: dict[str, Tensor] = {}
        self._waiting: list[tuple[str, str, Tensor]] = []
        for name, module in model.named_modules():
            is_leaf = next(module.children(), None) is None or _is_parametrized(module)
            owns = next(module.parameters(recurse=False), None) is not None
            takes_hooks = not isinstance(module, torch.jit.ScriptModule)
            if (is_leaf or owns) and takes_hooks and ".parametrizations" not in name:
                module.register_forward_hook(self._hook(module, name or type(module).__name__.lower()))
        if optimizer is not None:
            optimizer.register_step_pre_hook(lambda *_: self._optimizer_begins(optimizer))
            optimizer.register_step_post_hook(lambda *_: self._optimizer_ends())

    # -- modules --------------------------------------------------------------------------------------------------

    def _hook(self, observed: nn.Module, name: str) -> Any:
        def called(module: nn.Module, args: Any, output: Any) -> Any:
            if module is not observed:  # a copy of the model has copies of its hooks
                return None
            if isinstance(output, Tensor):
                return self._output(name, output)
            for path, tensor in _tensors(output):
                self._output(f"{name}:{path}" if path else name, tensor)
            return None

        return called

    def _output(self, name: str, output: Tensor) -> Tensor | None:
        is_recomputed = torch._C._current_graph_task_id() != -1
        if not is_recomputed:
            self._add("activations", name, output)
        if not output.requires_grad:
            return None
        output.register_hook(lambda grad: self._add("layer_gradients", name, grad))
        # an in-place operation on a view cuts its hook off; on a clone it does not
        is_whole_view = output._base is not None and output._base.numel() == output.numel()
        return output.clone() if is_whole_view else None

    # -- parameters -----------------------------------------------------------------------------------------------

    def _optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for kind, series, name, parameter in self._parameters():
            self._add("weights" if kind == "weight" else "biases", series, parameter)
            if id(parameter) in owned:
                if parameter.grad is not None:
                    self._add(f"{kind}_gradients", series, parameter.grad)
                if parameter.requires_grad:
                    self._before[name] = wide(parameter)

    def _optimizer_ends(self) -> None:
        for kind, series, name, parameter in self._parameters():
            if name in self._before:
                self._add(f"{kind}_updates", series, wide(parameter) - self._before.pop(name))
        self.step += 1

    def _parameters(self) -> Iterator[tuple[str, str, str, nn.Parameter]]:
        """Yield the kind, series, name and tensor of each parameter once."""
        for name, parameter in self._model.named_parameters():
            short = name.replace("parametrizations.", "").removesuffix(".original")
            owner, _, last = short.rpartition(".")
            if last.startswith("original"):
                owner, _, tensor = owner.rpartition(".")
                last = f"{tensor}.{last}"
            owner = owner or type(self._model).__name__.lower()
            is_bias = "bias" in last.split(".")[0]
            series = owner if last in ("weight", "bias") else f"{owner}.{last}"
            yield "bias" if is_bias else "weight", series, name, parameter

    def _add(self, kind: str, series: str, tensor: Tensor) -> None:
        if tensor.is_nested:
            self.unreadable += 1
            return
        elements = wide(tensor)
        if elements.numel():
            self.seen.setdefault((kind, series, self.step), Observation()).parts.append(elements)


def wide(tensor: Tensor) -> Tensor:
    """Return a copy in float64; complex numbers count by their magnitude, quantised ones by what they stand for."""
    plain = _dequantized(tensor.detach(), getattr(tensor, "quant_state", None))
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    plain = plain.abs() if plain.is_complex() else plain
    return plain.to(torch.float64, copy=True)


def _dequantized(tensor: Tensor, quant_state: Any) -> Tensor:
    if quant_state is not None:
        bitsandbytes = importlib.import_module("bitsandbytes")
        unpacked: Tensor = bitsandbytes.functional.dequantize_4bit(tensor.data, quant_state)
        return unpacked
    return tensor.dequantize() if type(tensor) is not Tensor and hasattr(tensor, "tensor_impl") else tensor


def _is_parametrized(module: nn.Module) -> bool:
    return nn.utils.parametrize.is_parametrized(module)


def _tensors(value: Any) -> list[tuple[str, Tensor]]:
    """Return each tensor in nested tuples, lists and mappings once, with its path.

    The path of the first tensor of (nested) tuples is empty.
    """
    found: list[tuple[str, Tensor]] = []

    def visit(value: Any, path: tuple[Any, ...]) -> None:
        if isinstance(value, PackedSequence):
            value = value.data
        if isinstance(value, Tensor):
            if not any(value is known for _, known in found):
                is_first = all(key == 0 for key in path)
                found.append(("" if is_first else ".".join(map(str, path)), value))
            return
        if isinstance(value, dict):
            items = list(value.items())
        elif isinstance(value, tuple | list):
            items = list(enumerate(value))
        elif hasattr(value, "__dataclass_fields__"):
            items = [(name, getattr(value, name)) for name in value.__dataclass_fields__]
        else:
            items = []
        for key, part in items:
            visit(part, (*path, key))

    visit(value, ())
    return found
