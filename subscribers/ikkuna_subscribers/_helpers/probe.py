"""What metrics share that run the model over a few inputs which stay the same."""

import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ikkuna.errors import ConfigError
from ikkuna.export.messages import ModuleMessage, NetworkMessage
from ikkuna.export.subscriber import PlotSubscriber
from ikkuna_subscribers._helpers.probe_data import ProbeData

__all__ = ["ProbeSubscriber", "first_tensor"]

log = logging.getLogger("ikkuna")


class ProbeSubscriber(PlotSubscriber):
    """A base for metrics of what the model does with a fixed probe set, taken every epoch or every so many steps.

    Training pauses for it: the model runs in evaluation mode, nobody else looks, and every flag, buffer and random state is
    afterwards as it was.  A compiled model is run without its compiled code.
    A first look is taken at registration, if the model is known by then, so that what cannot work is said at once.
    What fails later for want of memory, or because the model has changed, becomes NaN, and the log says why.

    Parameters
    ----------
    dataset, samples, batch_size, seed
        See `ProbeData`.
    every : int, optional
        Number of optimizer steps from one look to the next, the first step included; by default once an epoch.
    forward : callable, optional
        Computes outputs from the model and a batch's inputs; by default the model is called with them.
    **options
        See `Subscriber`.
    """

    needs_model = True

    def __init__(
        self,
        dataset: Any,
        *,
        samples: int | None = None,
        batch_size: int = 256,
        seed: int = 0,
        every: int | None = None,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        **options: Any,
    ) -> None:
        name = type(self).__name__
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise ConfigError(f"{name} needs every >= 1, got {every!r}")
        if every is not None and "subsample" in options:
            raise ConfigError(f"{name} takes every=, in steps, or subsample=, in epochs, got both")
        if every is not None:
            options["subsample"] = every
        super().__init__("epoch_finished" if every is None else "batch_finished", **options)
        self.data = ProbeData(name, dataset, samples, batch_size, seed)
        self.forward = forward
        self._shown: dict[tuple[str, str, str], None] = {}  # module, path and kind of every series so far
        self._told: set[tuple[str, str]] = set()

    @abstractmethod
    def look(self, message: NetworkMessage | None) -> None:
        """Run the model and emit what is found; without a message, at registration, only keep it, and raise what is wrong."""

    def begin(self) -> None:
        """Take the first look."""
        if any(is_lazy(p) for named in self.modules for p in named.module.parameters()):
            return  # the model's first call will make them, with random numbers that belong to training
        try:
            self.look(None)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{type(self).__name__} cannot look at this model: {_told(error)}{_advice(error)}"
            ) from error

    def compute(self, message: NetworkMessage) -> None:
        """Take a look, unless the optimizer skipped the step."""
        if message.skipped or self.evaluate is None:
            return
        try:
            self.look(message)
        except Exception as error:
            if not (isinstance(error, ConfigError) or _is_out_of_memory(error)):
                raise
            self.tell("all of it", f"{_told(error)}{_advice(error)}")
            for module, path, kind in self._shown:
                self._emit(message, module, path, kind, math.nan)

    def evaluate_probe(
        self,
        see: Mapping[nn.Module, Callable[[Any, Any, Any, Any], object]] | None = None,
        visit: Callable[[Any, Any], object] | None = None,
        around: Callable[[nn.Module], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Run the model over the probe set.

        Parameters
        ----------
        see : hooks by module, called with it, its arguments, its keywords and what it returned
        visit : called with outputs and labels of each batch
        around : makes, of the model, a context that its call is made in
        """
        assert self.evaluate is not None
        forward = self.forward or _call

        def call(model: nn.Module, inputs: Any) -> Any:
            with around(model):
                return forward(model, inputs)

        with ExitStack() as stack:
            for module, hook in (see or {}).items():
                handle = module.register_forward_hook(hook, with_kwargs=True)
                stack.callback(handle.remove)
            stack.enter_context(torch.compiler.set_stance("force_eager"))  # compiled code knows nothing of these hooks
            self.evaluate(self.data, None, visit=visit, forward=call)

    def outputs(self, take: Callable[[dict[str, Tensor]], object]) -> None:
        """Run the model over the probe set, and hand what modules returned for each batch to `take`, by their names.

        Modules are those with parameters, or those that ``modules=`` names, as far as they return numbers.
        Of several calls in one forward the last one counts.
        """
        wanted = [named for named in self.modules if self.subscription.modules is not None or _owns(named.module)]
        batch: dict[str, Tensor] = {}

        def hook_of(name: str) -> Callable[[Any, Any, Any, Any], None]:
            def keep(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                tensor = first_tensor(output)
                if tensor is not None and tensor.is_floating_point():
                    batch[name] = tensor.detach().clone()  # what follows may work in place

            return keep

        def visit(outputs: Any, labels: Any) -> None:
            seen = {named.name: batch[named.name] for named in wanted if named.name in batch}
            batch.clear()
            take(seen)

        self.evaluate_probe({named.module: hook_of(named.name) for named in wanted}, visit)

    def emit_of(
        self, message: NetworkMessage, module: str, value: float, kind: str, path: str = "", why: str = ""
    ) -> None:
        """Emit a value of a module, and if it is NaN tell why, once."""
        self._shown[module, path, kind] = None
        if why and math.isnan(value):
            self.tell(module, f"{kind} is NaN: {why}")
        self._emit(message, module, path, kind, value)

    def emit_whole(self, message: NetworkMessage, value: float, kind: str, why: str = "") -> None:
        """Emit a value of the whole network, and if it is NaN tell why, once."""
        self.emit_of(message, "", value, kind, why=why)

    def _emit(self, message: NetworkMessage, module: str, path: str, kind: str, value: float) -> None:
        name = f"{module}:{path}" if path else module
        about = ModuleMessage(message.stamp, message.kind, module=module, path=path, name=name) if module else message
        self.emit(about, value, kind)

    def tell(self, what: str, why: str) -> None:
        """Log why something is not as one would wish, once."""
        if (what, why) not in self._told:
            self._told.add((what, why))
            log.warning("%s, %s: %s", type(self).__name__, what or "the network", why)


def first_tensor(output: Any) -> Tensor | None:
    """Return the first tensor of what a module returned; ``None`` if there is none.

    Examples
    --------
    >>> first_tensor({"a": None, "b": (torch.ones(2), torch.zeros(1))})
    tensor([1., 1.])
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(output, nn.utils.rnn.PackedSequence):
        return output.data
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
    return next((found for part in parts if (found := first_tensor(part)) is not None), None)


def _owns(module: nn.Module) -> bool:
    return bool(module._parameters) or "parametrizations" in module._modules


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def _advice(error: Exception) -> str:
    if isinstance(error, ConfigError):
        return ""
    if _is_out_of_memory(error):
        return "; take fewer samples= or a smaller batch_size="
    return "; if its forward takes other arguments, give forward= a function of the model and a batch's inputs"
