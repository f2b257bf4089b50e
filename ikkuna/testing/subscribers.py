"""A small training run, and the checks that every subscriber must pass."""

import gc
import random
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ikkuna.export.exporter import Exporter
from ikkuna.metrics.bus.bus import MessageBus
from ikkuna.metrics.bus.delivery import Event, Finished
from ikkuna.metrics.messages.kinds import MEASURED_TOGETHER, MODULE_KINDS
from ikkuna.metrics.messages.message import Message, NetworkMessage
from ikkuna.metrics.messages.stamp import Stamp
from ikkuna.metrics.subscriber.base import Subscriber
from ikkuna.metrics.subscriber.bases import CallbackSubscriber
from ikkuna.numerics.elements import host_array
from ikkuna.observation.rows.plan import Demand, Site
from ikkuna.observation.rows.recorder import Recorder
from ikkuna.store.names import Series
from ikkuna.store.values import Matrix, is_histogram
from ikkuna.testing.backends import RecordingBackend

Batch = tuple[Tensor, Tensor]


class Value(NamedTuple):
    """One value of a series.

    Parameters
    ----------
    kind : str
        The kind, such as ``"weights_norm2"``.
    name : str or None
        The module, with the parameter's or output's own name if needed; ``None`` for the whole network.
    step : int
        Number of the optimizer step.
    value : Any
        A float, or a histogram.
    """

    kind: str
    name: str | None
    step: int
    value: Any


def small_model() -> nn.Module:
    """Return a network with the layers ``first``, ``relu`` and ``last``, from 4 inputs to 3 classes, the same at every call.

    Global random generators are not used.

    Examples
    --------
    >>> [name for name, _ in small_model().named_children()]
    ['first', 'relu', 'last']
    """
    first, last = nn.utils.skip_init(nn.Linear, 4, 8), nn.utils.skip_init(nn.Linear, 8, 3)
    model = nn.Sequential(OrderedDict(first=first, relu=nn.ReLU(), last=last))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, device="cpu") / 2)
    return model


def _small_batch() -> Batch:
    """Return inputs (8, 4) and labels (8,) for the small model."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(8, 4, generator=generator, device="cpu")
    return inputs, torch.randint(0, 3, (8,), generator=generator, device="cpu")


def train(
    model: nn.Module,
    subscribers: Sequence[Subscriber] = (),
    steps: int = 3,
    batch: Batch | None = None,
    bus: MessageBus | None = None,
) -> dict[str, Any]:
    """Train `model` on one batch with momentum and cross-entropy; return losses, weights, gradients and optimizer state.

    The subscribers are registered in order on `bus`, by default a new one; their errors are raised.
    Without subscribers no exporter is created.
    """
    device = next((parameter.device for parameter in model.parameters()), None)
    inputs, labels = (x.to(device) for x in (batch if batch is not None else _small_batch()))
    loss_function = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    exporter = None
    if subscribers:
        exporter = Exporter(message_bus=bus or MessageBus("testing"), on_error="raise")
    losses = []
    try:
        if exporter is not None:
            exporter.add_modules(model)
            exporter.set_loss(loss_function)
            for subscriber in subscribers:
                exporter.message_bus.register_subscriber(subscriber)
        for _ in range(steps):
            optimizer.zero_grad()
            loss = loss_function(model(inputs), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    finally:
        if exporter is not None:
            exporter.close()
    return {
        "losses": losses,
        "model": model.state_dict(),
        "gradients": {name: parameter.grad for name, parameter in model.named_parameters()},
        "optimizer": optimizer.state_dict(),
    }


def run(
    *subscribers: Subscriber, model: nn.Module | None = None, steps: int = 3, batch: Batch | None = None
) -> list[Value]:
    """Train for some steps and return the values that the subscribers show, in order.

    The values are kept in memory instead of the subscribers' own backends; no file is written.
    Errors of subscribers are raised.

    Parameters
    ----------
    *subscribers : Subscriber
        Created without ``message_bus``; a subscriber of results comes after their publisher.
    model : nn.Module, optional
        `small_model` by default.
    steps : int
        Number of optimizer steps.
    batch : pair of Tensor, optional
        Inputs of the model, and labels for cross-entropy with its output; (8, 4) and 3 classes by default.

    Examples
    --------
    >>> from ikkuna.export.subscriber import NormSubscriber
    >>> values = run(NormSubscriber("weights", p=0))
    >>> values[0]
    Value(kind='weights_norm0', name='first', step=0, value=32.0)
    >>> len(values)                   # two layers, three steps
    6
    """
    recording = RecordingBackend()
    for subscriber in subscribers:
        subscriber.backends = (recording,)
    train(model if model is not None else small_model(), subscribers, steps, batch)
    return [Value(series.kind, series.name, step, value) for series, value, step in recording.values]


Make = Callable[..., Subscriber]


def special_tensors() -> dict[str, Tensor]:
    """Return unusual tensors that a metric must handle, by a description of each."""
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), device="cpu")
    with_nan, with_inf = x.clone(), x.clone()
    with_nan[1, 2], with_inf[1, 2], with_inf[3, 0] = torch.nan, torch.inf, -torch.inf
    return {
        "float32": x,
        "with a NaN": with_nan,
        "with infinities": with_inf,
        "all NaN": torch.full_like(x, torch.nan),
        "empty": x[:0].clone(),
        "zeros": torch.zeros_like(x),
        "constant": torch.full_like(x, 3.0),
        "float64": x.double(),
        "bfloat16": x.bfloat16(),
        "float16": x.half(),
        "float16 near its limit": torch.full_like(x, 6e4).half(),
        "denormal": x * 1e-42,
        "transposed": x.reshape(4, 6).t(),
        "strided": torch.cat([x, x], 1)[:, ::2],
        "expanded": x[:1].expand(6, 4),
        "integers": (10 * x).long(),
        "a number": x[0, 0].clone(),
        "a vector": x[0].clone(),
        "a kernel": x.reshape(6, 1, 2, 2),
    }


def check_subscriber(make: Make, needs: Sequence[Make] = (), tensors: Mapping[str, Tensor] | None = None) -> None:
    """Raise `AssertionError` if a subscriber returned by `make` breaks the contract of subscribers.

    - The constructor has no effect outside the object if no bus is passed.
    - Training is bit-identical with and without the subscriber: losses, weights, gradients, optimizer state, random states, modes.
    - The subscriber accepts each of `special_tensors`, or of `tensors`, does not change it, and keeps no reference to it.
    - Each shown value is a float, a histogram, a matrix or a text; each published value is a float.
    - Each value has the step of its inputs and one of the subscriber's ``publishes`` (or ``kinds``, if it is only shown).

    Parameters
    ----------
    make : callable
        ``make(**options)`` returns a new subscriber and passes `options` (``backend``, ``message_bus``) to `Subscriber`.
        The subscriber must accept the modules of `small_model` and labels from 0 to 2.
    needs : sequence of callables
        The same for each subscriber whose results it takes.
    tensors : mapping of str to Tensor, optional
        Tensors to use instead of `special_tensors`, by a description of each.

    Examples
    --------
    >>> from ikkuna.export.subscriber import NormSubscriber, RatioSubscriber
    >>> check_subscriber(lambda **options: NormSubscriber("weights", **options))
    >>> check_subscriber(
    ...     lambda **options: RatioSubscriber(["weights_norm1", "weights_norm2"], **options),
    ...     needs=[lambda p=p, **options: NormSubscriber("weights", p=p, **options) for p in (1, 2)],
    ... )
    """
    _check_is_invisible(make, needs)
    for what, tensor in (special_tensors() if tensors is None else tensors).items():
        try:
            _check_tensor(make, needs, tensor)
        except Exception as error:
            raise AssertionError(f"special tensor ({what}): {type(error).__name__}: {error}") from error


# -- no effect on training --------------------------------------------------------------------------------------------


def _check_is_invisible(make: Make, needs: Sequence[Make]) -> None:
    before = _surroundings()
    subscribers = [maker(backend=RecordingBackend(), message_bus=None) for maker in (*needs, make)]
    _require_same(before, _surroundings(), "the constructor changed")
    plain = train(small_model())
    before = _surroundings()
    watched = train(small_model(), subscribers)
    _require_same(before, _surroundings(), "training with the subscriber changed")
    _require_same(plain, watched, "training with the subscriber differs in")


def _surroundings() -> dict[str, Any]:
    """Return the global state of this process that a subscriber must not change."""
    return {
        "torch's random state": torch.get_rng_state(),
        "numpy's random state": np.random.get_state(),
        "python's random state": random.getstate(),
        "default dtype": torch.get_default_dtype(),
        "gradient mode": torch.is_grad_enabled(),
        "number of threads": torch.get_num_threads(),
        "deterministic mode": torch.are_deterministic_algorithms_enabled(),
    }


def _require_same(a: Any, b: Any, claim: str, where: str = "") -> None:
    """Raise if two nested structures differ; tensors are compared by bytes, so that NaN equals NaN and -0 differs from 0."""
    if isinstance(a, Mapping) and isinstance(b, Mapping) and a.keys() == b.keys():
        for key in a:
            _require_same(a[key], b[key], claim, f"{where}.{key}".lstrip("."))
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            _require_same(x, y, claim, f"{where}[{i}]")
    else:
        same = _bytes(a) == _bytes(b) if isinstance(a, Tensor | np.ndarray) else a == b
        assert same, f"{claim} {where}"


def _bytes(x: Any) -> bytes:
    if isinstance(x, Tensor):
        x = torch.empty(0, device="cpu") if x.is_meta else x.to_dense() if x.layout is not torch.strided else x
        x = host_array(x.detach().reshape(-1).contiguous().view(torch.uint8))
    return np.asarray(x).tobytes()


# -- special tensors --------------------------------------------------------------------------------------------------


def _check_tensor(make: Make, needs: Sequence[Make], tensor: Tensor) -> None:
    bus, recording, published = MessageBus("contract"), RecordingBackend(), list[Message]()
    subscriber = make(backend=recording)
    subscription = subscriber.subscription
    stamp = Stamp(7 * subscription.subsample, 3, subscription.subsample, subscription.tag or "training")
    content = _bytes(tensor)
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(small_model())
        for needed in needs:
            bus.register_subscriber(needed(backend="null"))
        bus.register_subscriber(subscriber)
        if subscriber.publishes:
            bus.register_subscriber(CallbackSubscriber(subscriber.publishes, published.append, tag=None))
        _feed(bus, stamp, tensor)
        storage = StorageWeakRef(_storage_of(_feed(bus, stamp, tensor.clone())))
    assert _bytes(tensor) == content, f"{subscriber!r} changed the tensor"
    if not storage.expired():
        gc.collect()
    assert storage.expired(), f"{subscriber!r} keeps a reference to the tensor; clone it if the metric needs it later"
    _check_published(subscriber, published, stamp)
    for series, value, step in recording.values:
        _check_shown(subscriber, series, value, step, stamp)


def _storage_of(tensor: Tensor) -> torch.UntypedStorage:
    return (tensor if tensor.layout is torch.strided else tensor.coalesce().values()).untyped_storage()


def _feed(bus: MessageBus, stamp: Stamp, tensor: Tensor) -> Tensor:
    """Deliver a tensor as data of every kind, twice as in a step of two micro-batches; return it."""
    # The axis of the classes is the second one, or the only one.
    labels = torch.zeros(tensor.shape[:1] + tensor.shape[2:] if tensor.ndim > 1 else (), dtype=torch.long, device="cpu")
    loss = (tensor.abs() if tensor.is_complex() else tensor.to_dense()).float().mean()
    together = dict(zip(MEASURED_TOGETHER, (tensor, labels, loss), strict=True))
    seen = {Site(kind, "first"): tensor for kind in MODULE_KINDS}
    seen |= {Site(kind): value for kind, value in {"input_data": tensor, **together}.items()}
    recorder = Recorder(bus.error_guard)
    bus.queue.append(Event(NetworkMessage(stamp, "batch_started")))
    recorder.open(stamp, Demand(bus).of(stamp))
    for _ in range(2):
        for place, value in seen.items():
            recorder.receive(place, value, "")
        recorder.receive_together(together)
    if (rows := recorder.close()) is not None:
        report = {"learning_rates": {"0": 0.1}, "seconds": 0.5, "own_seconds": 0.1}
        bus.queue.append(Finished(rows, NetworkMessage(stamp, "batch_finished", report)))
    for kind in ("epoch_finished", "epoch_started"):
        bus.queue.append(Event(NetworkMessage(stamp, kind)))
    bus.drain(wait=True)
    return tensor


def _check_published(subscriber: Subscriber, published: list[Message], stamp: Stamp) -> None:
    for message in published:
        assert type(message.data) is float, f"{subscriber!r} published {type(message.data).__name__}, not a float"
        assert message.stamp == stamp, f"{subscriber!r} published at {message.stamp}, its inputs are of {stamp}"


def _check_shown(subscriber: Subscriber, series: Series, value: Any, step: int, stamp: Stamp) -> None:
    known = {*subscriber.publishes, *subscriber.kinds}
    assert series.kind in known, f"{subscriber!r} shows {series.kind!r}, which is not among {sorted(known)}"
    shown = isinstance(value, float | str | Matrix) or is_histogram(value)
    assert shown, f"{subscriber!r} shows a {type(value).__name__}"
    assert step == stamp.global_step, f"{subscriber!r} shows step {step}, its inputs are of step {stamp.global_step}"
