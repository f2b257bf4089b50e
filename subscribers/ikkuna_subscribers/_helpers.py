"""The base class of metrics that run the model over a fixed probe set."""

import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Subset

from ikkuna.errors import ConfigError, ConfigTypeError, is_integer
from ikkuna.export.messages import ModuleMessage, NetworkMessage
from ikkuna.export.subscriber import Pending, PlotSubscriber
from ikkuna.metrics.messages.kinds import PARAMETER_KINDS, STATE_PREFIXES
from ikkuna.support.undisturbed import call_model


def require_integers(owner: str, least: int = 1, **numbers: object) -> None:
    """Raise an error if one of `numbers` is not an integer of at least `least`.

    Parameters
    ----------
    owner : str
        The class that the error text names.
    least : int
        The smallest allowed value.
    **numbers : object
        The values to check, by the names of the arguments.

    Raises
    ------
    ConfigError
        Names the argument and its value.

    Examples
    --------
    >>> require_integers("SomeSubscriber", window=0)
    Traceback (most recent call last):
    ikkuna.errors.ConfigError: SomeSubscriber needs window >= 1, got 0
    """
    for name, number in numbers.items():
        if not is_integer(number, least):
            raise ConfigError(f"{owner} needs {name} >= {least}, got {number!r}")


def require_dataset(owner: str, dataset: Any) -> None:
    """Raise an error, in the name of the subscriber `owner`, unless `dataset` is a map-style data set with at least one item."""
    is_sized = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    is_number = isinstance(dataset, Tensor) and not dataset.ndim
    if not is_sized or is_number or isinstance(dataset, str | dict | DataLoader):
        raise ConfigTypeError(
            f"{owner} needs a map-style data set, with __len__ and __getitem__, or a tensor, "
            f"got {type(dataset).__name__}"
        )
    if not len(dataset):
        raise ConfigError(f"{owner} needs a data set with at least one item, got an empty one")


def scheduled_kind(owner: str, every: int | None, options: dict[str, Any]) -> str:
    """Return the kind whose messages trigger an evaluation, and set ``options["subsample"]`` if it is a step.

    Parameters
    ----------
    owner : str
        The class that error texts name.
    every : int or None
        The number of optimizer steps from one evaluation to the next, the first step included; ``None`` for once an epoch.
    options : dict of str to Any
        Keyword arguments for the constructor of `Subscriber`; changed in place.

    Raises
    ------
    ConfigError
        If `every` is not a positive integer.

    Examples
    --------
    >>> options = {}
    >>> scheduled_kind("Some", 100, options), options
    ('batch_finished', {'subsample': 100})
    """
    if every is None:
        return "epoch_finished"
    require_integers(owner, every=every)
    options["subsample"] = every
    return "batch_finished"


class SampleCount:
    """Counts the samples of ``input_data``: the length of the first axis of the first tensor among the network's arguments.

    Examples
    --------
    >>> from ikkuna.export.messages import Stamp
    >>> count, stamp = SampleCount(), Stamp(0, 0, 0)
    >>> row = count.measure(NetworkMessage(stamp, "input_data", torch.ones(8, 3)))
    >>> count.add(NetworkMessage(stamp, "input_data", row.numpy()))
    >>> count.take(), count.take()
    ((8.0, 1.0), (nan, 0.0))
    """

    def __init__(self) -> None:
        self._found: tuple[float, float] | None = None
        self._size = -1  # of the last call, since most batches are equally large
        self._row: Tensor | None = None

    def measure(self, message: NetworkMessage) -> Tensor | None:
        """Return the row of one call: the number of samples, and 1."""
        x: Tensor = message.data
        if not x.ndim:
            return None
        if x.shape[0] != self._size:
            self._size = x.shape[0]
            self._row = torch.tensor([self._size, 1], dtype=torch.float64, device="cpu")
        return self._row

    def add(self, message: NetworkMessage) -> None:
        """Store the merged row of the first tensor of a step; rows of further tensors are ignored."""
        if self._found is None:
            samples, calls = message.data
            self._found = float(samples), float(calls)

    def take(self) -> tuple[float, float]:
        """Return and clear the numbers of samples and of calls; without a call, NaN and 0."""
        found, self._found = self._found, None
        return found or (math.nan, 0.0)


class TensorCopies:
    """One copy of a tensor for each series.

    Examples
    --------
    >>> import torch
    >>> from ikkuna.export.messages import Stamp
    >>> copies, message = TensorCopies(), ModuleMessage(Stamp(0, 0, 0), "weights", torch.ones(2), module="fc")
    >>> copies.store(message); copies.find(message)
    tensor([1., 1.])
    """

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, str | None], Tensor] = {}

    def store(self, message: ModuleMessage) -> None:
        """Copy the tensor of `message`, and drop the previous copy of the same series."""
        self._tensors[message.kind, message.series_name] = message.data.clone()

    def find(self, message: ModuleMessage) -> Tensor | None:
        """Return the copy of the same series, or ``None`` if there is none of the same shape, dtype and device."""
        known, x = self._tensors.get((message.kind, message.series_name)), message.data
        fits = known is not None and (known.shape, known.dtype, known.device) == (x.shape, x.dtype, x.device)
        return known if fits else None


def require_parameter_kind(name: str, kind: str) -> None:
    """Raise `ConfigError`, in the name of the subscriber `name`, if a module can have several tensors of `kind` in a step."""
    if kind not in PARAMETER_KINDS and not kind.startswith(STATE_PREFIXES):
        raise ConfigError(
            f"{name} needs a kind with one tensor per parameter and step: "
            f"{', '.join(PARAMETER_KINDS)} or a state of the optimizer; got {kind!r}"
        )


T = TypeVar("T")
_NAMES = ("previous", "init")


class EarlierResults(Generic[T]):
    """Stores the result of the previous evaluation of each layer, of the first evaluation, or both.

    Parameters
    ----------
    owner : str
        The class that error texts name.
    names : iterable of {'previous', 'init'}
        The evaluations to store.

    Raises
    ------
    ConfigError
        If `names` has another element.

    Examples
    --------
    >>> earlier = EarlierResults("Some", ["previous", "init"])
    >>> earlier.store({"fc": 1}); earlier.store({"fc": 2})
    >>> earlier.find("fc"), earlier.find("out")
    ([2, 1], [None, None])
    """

    def __init__(self, owner: str, names: Iterable[str]) -> None:
        self.names = (names,) if isinstance(names, str) else tuple(dict.fromkeys(names))
        if not set(self.names) <= set(_NAMES):
            raise ConfigError(f"{owner} compares to {' and '.join(map(repr, _NAMES))}, got {list(self.names)}")
        self._stored: dict[str, dict[str, T]] = {name: {} for name in self.names}

    def find(self, layer: str) -> list[T | None]:
        """Return the stored results of a layer in the order of `names`; ``None`` for an evaluation that did not happen yet."""
        return [self._stored[name].get(layer) for name in self.names]

    def store(self, results: Mapping[str, T]) -> None:
        """Store the results of an evaluation, by layer."""
        for name, stored in self._stored.items():
            for layer, value in results.items():
                if name == "previous":
                    stored[layer] = value
                else:
                    stored.setdefault(layer, value)


class ProbeData:
    """The batches of a fixed choice of the items of a data set, in a fixed order.

    Items are read from the data set once and then kept, so that random augmentation cannot change them.
    The choice is random, without replacement, and uses a generator of its own.

    Parameters
    ----------
    owner : str
        The class that error texts name.
    dataset : torch.utils.data.Dataset or Tensor
        A map-style data set; the items are inputs, or pairs (input, label).
    samples : int, optional
        The number of items; by default all.
    batch_size : int
        The number of items per batch.
    seed : int
        The seed of the choice.

    Raises
    ------
    ConfigTypeError
        If `dataset` is not a map-style data set.
    ConfigError
        If `dataset` is empty or has fewer than `samples` items, or a number is out of range.

    Examples
    --------
    >>> data = ProbeData("Some", torch.arange(10), samples=5, batch_size=3)
    >>> len(data), [len(batch) for batch in data], sorted(torch.cat(list(data)).tolist()) == sorted(set(torch.cat(list(data)).tolist()))
    (5, [3, 2], True)
    """

    def __init__(
        self, owner: str, dataset: Any, samples: int | None = None, batch_size: int = 256, seed: int = 0
    ) -> None:
        require_dataset(owner, dataset)
        require_integers(owner, batch_size=batch_size, samples=1 if samples is None else samples)
        if samples is not None and samples > len(dataset):
            raise ConfigError(f"{owner} got samples={samples}, but the probe set has {len(dataset)} items")
        self._dataset = dataset
        self._size = len(dataset) if samples is None else samples
        self._batch_size = batch_size
        self._seed = seed
        self._batches: list[Any] | None = None

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Any]:
        if self._batches is None:
            self._batches = list(self._loader())
            self._dataset = None  # not needed any more
        return iter(self._batches)

    def _loader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(self._seed)
        order = list(range(self._size))
        if self._size < len(self._dataset):
            order = torch.randperm(len(self._dataset), generator=generator, device="cpu")[: self._size].tolist()
        return DataLoader(Subset(self._dataset, order), self._batch_size, generator=generator)


log = logging.getLogger("ikkuna")


class ProbeSubscriber(PlotSubscriber):
    """A metric that evaluates the model on a fixed probe set, once an epoch or every so many steps.

    Training pauses during an evaluation.  The model runs in evaluation mode, other subscribers do not record,
    and every flag, buffer and random state is restored afterwards.  A compiled model runs without its compiled code.
    The first evaluation takes place at registration, if the model is known by then, and raises what is wrong.
    If a later evaluation fails because memory is short or the model has changed, its values are NaN and the log gives the reason.

    Parameters
    ----------
    dataset : torch.utils.data.Dataset or Tensor
        See `ProbeData`.
    samples, batch_size, seed : int
        See `ProbeData`.
    every : int, optional
        The number of optimizer steps from one evaluation to the next, the first step included; by default once an epoch.
    forward : callable, optional
        Computes outputs from the model and a batch's inputs; by default the model is called with the inputs.
    **options : Any
        See `Subscriber`.
    """

    needs_model = True
    state: Collection[str] = ("_emitted",)

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
        kind = scheduled_kind(name, every, options)
        super().__init__(kind, **options)
        self.data = ProbeData(name, dataset, samples, batch_size, seed)
        self.forward = forward
        self._emitted: dict[tuple[str, str, str], None] = {}  # module, path and kind of every series so far
        self._logged: set[tuple[str, str]] = set()

    @abstractmethod
    def evaluate_and_emit(self, message: NetworkMessage | None) -> None:
        """Run the model and emit the values.

        At registration there is no message: then only store results, and raise `ConfigError` if the model does not fit.
        """

    def begin(self) -> None:
        """Evaluate the model for the first time."""
        if any(is_lazy(p) for named in self.modules for p in named.module.parameters()):
            return  # the first call of the model initialises them with random numbers that belong to training
        try:
            self.evaluate_and_emit(None)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{type(self).__name__} cannot evaluate this model: {_text(error)}{_advice(error)}"
            ) from error

    def compute(self, message: NetworkMessage) -> None:
        """Evaluate the model, unless the optimizer skipped the step."""
        if message.skipped or self.evaluate is None:
            return
        with self._failing(message):
            self.evaluate_and_emit(message)

    @contextmanager
    def _failing(self, message: NetworkMessage) -> Iterator[None]:
        """Emit NaN for all values if memory is short or the model has changed."""
        try:
            yield
        except Exception as error:
            if not (isinstance(error, ConfigError) or _is_out_of_memory(error)):
                raise
            self.warn_once("all values", f"{_text(error)}{_advice(error)}")
            for module, path, kind in self._emitted:
                self._emit(message, module, path, kind, math.nan)

    def conclude(
        self, message: NetworkMessage | None, work: Callable[[], T], emit: Callable[[NetworkMessage, T], None]
    ) -> None:
        """Compute results of an evaluation with `work`, which may wait for the device, and pass them to `emit`.

        On an accelerator `work` runs beside training, on tensors that training does not change, and after that of the evaluation before.
        At registration only `work` is called.
        """
        if message is None:
            work()
            return

        def then(pending: Pending[T]) -> None:
            with self._failing(message):
                emit(message, pending.result())

        self.later(message, {p.device for named in self.modules for p in named.module.parameters()}, work, then)

    def run_model(
        self,
        hooks: Mapping[nn.Module, Callable[[Any, Any, Any, Any], object]] | None = None,
        visit: Callable[[Any, Any], object] | None = None,
        around: Callable[[nn.Module], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Run the model over the probe set.

        Parameters
        ----------
        hooks : mapping of Module to callable, optional
            Forward hooks, called with the module, its arguments, its keyword arguments and its output.
        visit : callable, optional
            Called with the outputs and the labels of each batch.
        around : callable
            Returns, for the model, a context manager that surrounds each call of it.
        """
        assert self.evaluate is not None
        forward = self.forward or call_model

        def call(model: nn.Module, inputs: Any) -> Any:
            with around(model):
                return forward(model, inputs)

        with ExitStack() as stack:
            for module, hook in (hooks or {}).items():
                handle = module.register_forward_hook(hook, with_kwargs=True)
                stack.callback(handle.remove)
            stack.enter_context(torch.compiler.set_stance("force_eager"))  # compiled code does not call these hooks
            self.evaluate(self.data, None, visit=visit, forward=call)

    def collect_outputs(self, visit: Callable[[dict[str, Tensor]], object]) -> None:
        """Run the model over the probe set and call `visit` with the outputs of the modules for each batch, by name.

        The modules are those with parameters, or those that ``modules=`` names; outputs that are not floating are left out.
        If a forward calls a module several times, the last call counts.
        """
        wanted = [named for named in self.modules if self.subscription.modules is not None or _owns(named.module)]
        batch: dict[str, Tensor] = {}

        def hook_of(name: str) -> Callable[[Any, Any, Any, Any], None]:
            def store(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                tensor = first_tensor(output)
                if tensor is not None and tensor.is_floating_point():
                    batch[name] = tensor.detach().clone()  # the next module may overwrite it

            return store

        def visit_batch(outputs: Any, labels: Any) -> None:
            found = {named.name: batch[named.name] for named in wanted if named.name in batch}
            batch.clear()
            visit(found)

        self.run_model({named.module: hook_of(named.name) for named in wanted}, visit_batch)

    def emit_module(
        self, message: NetworkMessage, module: str, value: float, kind: str, path: str = "", reason: str = ""
    ) -> None:
        """Emit a value of a module, or of the network if `module` is empty; if it is NaN, log `reason` once."""
        self._emitted[module, path, kind] = None
        if reason and math.isnan(value):
            self.warn_once(module, f"{kind} is NaN: {reason}")
        self._emit(message, module, path, kind, value)

    def _emit(self, message: NetworkMessage, module: str, path: str, kind: str, value: float) -> None:
        name = f"{module}:{path}" if path else module
        source = ModuleMessage(message.stamp, message.kind, module=module, path=path, name=name) if module else message
        self.emit(source, value, kind)

    def warn_once(self, what: str, reason: str) -> None:
        """Log a warning about a module, or about the network if `what` is empty, unless it was logged before."""
        if (what, reason) not in self._logged:
            self._logged.add((what, reason))
            log.warning("%s, %s: %s", type(self).__name__, what or "the network", reason)


def first_tensor(output: Any) -> Tensor | None:
    """Return the first tensor of a module's output; ``None`` if there is none.

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


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def _advice(error: Exception) -> str:
    if isinstance(error, ConfigError):
        return ""
    if _is_out_of_memory(error):
        return "; take fewer samples= or a smaller batch_size="
    return "; if its forward takes other arguments, give forward= a function of the model and a batch's inputs"
