"""Ranks the rows of the batch of a dumped step by their own loss and gradient, and finds them in a data set."""

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.optim import Optimizer

from ikkuna.errors import ConfigTypeError, DumpError
from ikkuna.export.replay import ReplayRun, Step, explained, on_device, prepare, value_of
from ikkuna.flight_recorder.batch_rows import BatchRows, item_hashes, unusual
from ikkuna.flight_recorder.dump_reading import Dump, read_dump
from ikkuna.printable import printable
from ikkuna.support.failures import suppressed
from ikkuna.support.torch_internals import BATCH_NORMS, DROPOUTS

_SHOWN = 10
_FAR = 10.0  # robust deviations
_TIMES = 5.0  # the median
_PART = 0.1  # of the largest share
_GRADIENT_BYTES = 1 << 28  # of the gradients of the rows that are computed at once
_MOST_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class RankedRow:
    """A row of a batch.

    Parameters
    ----------
    part : int
        The micro-batch.
    number : int
        The row in it.
    name : str
        The id that ``exporter.rows`` has given, or the hash of the content.
    loss, gradient_norm : float
        The loss of the row alone, and the Euclidean norm of its gradient by all parameters, or NaN if it is not known.
    loss_share, gradient_share : float
        Their parts in the sums over all rows of the step with finite values; NaN if they are not known.
    stands_out : bool
        Whether the loss or the gradient is not finite; if all are, whether one is 5 times the median of all rows and 10 robust
        deviations above it, and the share of the row is at least a tenth of the largest one.
    unusual : tuple of str
        What no other row has, see `ikkuna.flight_recorder.batch_rows.unusual`.
    """

    part: int
    number: int
    name: str
    loss: float
    gradient_norm: float
    loss_share: float
    gradient_share: float
    stands_out: bool
    unusual: tuple[str, ...] = ()

    def __str__(self) -> str:
        place = f"row {self.number}" + (f" of micro-batch {self.part}" if self.part else "")
        figures = f"loss {self.loss:.6g} ({self.loss_share:.1%})"
        if not np.isnan(self.gradient_share):
            figures += f", gradient {self.gradient_norm:.6g} ({self.gradient_share:.1%})"
        return printable("; ".join([f"{place}, {self.name}: {figures}", *self.unusual]))


@dataclass(frozen=True, slots=True)
class RowRanking:
    """The rows of a step, those with the largest share first; ``print()`` shows ten.

    Parameters
    ----------
    step : int
        The step.
    rows : tuple of RankedRow
        All rows, in falling order of the larger one of their two shares; values that are not finite come first.
    note : str
        What limits the result; may be empty.
    """

    step: int
    rows: tuple[RankedRow, ...]
    note: str = ""

    @property
    def outliers(self) -> tuple[RankedRow, ...]:
        """The rows that stand out."""
        return tuple(row for row in self.rows if row.stands_out)

    def as_dict(self) -> dict[str, Any]:
        """Return the content for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"step {self.step}: {len(self.rows)} rows, {len(self.outliers)} stand out"]
        lines += [f"  {self.note}"] if self.note else []
        return "\n".join([*lines, *(f"  {row}" for row in self.rows[:_SHOWN])])


def rank_rows(
    dump: str | os.PathLike[str] | Dump,
    model: nn.Module,
    loss: nn.Module | None = None,
    optimizer: Optimizer | Iterable[Optimizer] = (),
    *,
    step: Step | None = None,
) -> RowRanking:
    """Compute the loss and the gradient norm of each row of the batch of a dump, with the weights before its step.

    Each row is a batch of one.  Layers of batch normalisation use their running statistics, and dropout is off, so that a row does not
    depend on others.  If there are such layers, the share of a row in the loss is at least :math:`1 - (n-1) L_{-i} / (n L)` with the
    loss :math:`L` of the batch and :math:`L_{-i}` without the row; in batches of more than 256 rows this is computed for the 192
    rows with the largest losses, gradients and distances of their norms from the median.

    ``torch.func`` computes many rows at once where the model permits it; otherwise they are computed one by one.

    Parameters
    ----------
    dump : path or Dump
        The dump; without the state of the training, the rows are ranked by the losses that it holds of them, or, if it has none,
        with the weights of `model`.
    model, loss, optimizer, step
        See `ikkuna.export.replay.replay`.  With `step` rows are computed one by one, and its optimizers do not step.

    Raises
    ------
    DumpError
        If the dump is damaged, lacks the batch, or does not fit the model, or if its batch has no rows.
    ConfigTypeError
        If an argument has the wrong type.
    """
    found = dump if isinstance(dump, Dump) else read_dump(dump)
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    note = ""
    if found.has("state.pt"):
        run, steps = prepare(found, model, loss, optimizers, step)
        for batch in steps[:-1]:
            run.run(batch)
    else:
        steps = [batch for batch in found.tensors("batches.pt") if batch["step"] == found.step]
        if not steps:
            raise DumpError(f"the dump '{found.path}' has no batch of step {found.step}")
        if found.has("batch_rows.npz") and (ranking := _rank_stored(found, steps[-1])) is not None:
            return ranking
        run = ReplayRun(found, model, loss, optimizers, step)
        note = "the dump has no state: the weights are those of the script, not those of the step"
    return rank_batch(run, steps[-1], note)


def rank_batch(run: ReplayRun, batch: dict[str, Any], note: str = "") -> RowRanking:
    """Rank the rows of what ``batches.pt`` holds of a step, with the present weights of the model of `run`."""
    what = "the rows cannot run alone; pass step=" if run.step is None else "step= cannot run with a batch of one row"
    with explained(what):
        parts = _parts(run, batch)
        with _evaluated(run.model, (BATCH_NORMS, *_RANDOM)):
            found = [_measure(run, part) for part in parts]
        values = np.concatenate(found)  # (rows, 2)
        together, whole = np.zeros((len(values), 1)), np.zeros(2)
        if run.step is None and any(isinstance(each, BATCH_NORMS) and each.training for each in run.model.modules()):
            together, whole = _measure_together(run, parts, found)
    return _ranked(run.dump, batch["step"], parts, (values, together, whole), note)


def without_rows(run: ReplayRun, batch: dict[str, Any], rows: Iterable[RankedRow]) -> dict[str, Any]:
    """Return what ``batches.pt`` holds of a step without some of the rows that `rank_batch` has ranked."""
    calls, losses = list[Any](), list[Any]()
    left_out = {(row.part, row.number) for row in rows}
    for number, part in enumerate(_parts(run, batch)):
        if left := [row for row in range(part.count) if (number, row) not in left_out]:
            call, loss_call = part.of(left)
            calls += call if run.step is not None else [call]
            losses += loss_call if run.step is not None else [loss_call] if loss_call is not None else []
    return batch | {"model_calls": calls, "loss_calls": losses}


def _rank_stored(dump: Dump, batch: dict[str, Any]) -> RowRanking | None:
    """Rank the rows by the losses that a dump holds; return ``None`` if it lacks those of a micro-batch."""
    parts = parts_of(dump, batch)
    arrays = dump.arrays("batch_rows.npz")
    own = arrays["steps"] == batch["step"]
    losses, counts = arrays["losses"][own], np.bincount(arrays["parts"][own]).tolist()
    known = np.isin(np.arange(len(parts)), arrays["parts"][own][~np.isnan(losses)])
    if not known.all() or counts != [part.count for part in parts]:
        return None
    note = "the dump has no state: the losses are those of the training, and gradients are not known"
    return _ranked(dump, batch["step"], parts, (losses[:, None], np.zeros((len(losses), 1)), np.zeros(1)), note)


def _ranked(
    dump: Dump, step: int, parts: list[BatchRows], measured: tuple[NDArray[np.float64], ...], note: str
) -> RowRanking:
    """Return the ranking by losses and gradient norms ``(rows, 2)``, or by losses ``(rows, 1)``."""
    values, together, whole = measured
    names, texts = _names(dump, step, parts), [list(dict.fromkeys(each)) for part in parts for each in unusual(part)]
    finite = np.where(np.isfinite(values), np.abs(values), 0.0)
    totals = np.maximum(finite.sum(0), np.where(np.isfinite(whole), whole, 0.0))
    shares = finite / np.maximum(totals, np.finfo(float).tiny)
    bad = ~np.isfinite(np.hstack([values, together])).all(1)
    is_out: Any = np.hstack([_is_far(values), _is_far(together)]).any(axis=1)
    shares[:, :1] = np.maximum(shares[:, :1], np.where(np.isfinite(together), together, 0.0))
    is_out = bad if bad.any() else is_out & (shares.max(1) >= _PART * shares.max())
    missing = (0, 0), (0, 2 - values.shape[1])
    values, shares = (np.pad(array, missing, constant_values=np.nan) for array in (values, shares))
    places = [(number, row) for number, part in enumerate(parts) for row in range(part.count)]
    order = np.argsort(np.where(bad, -np.inf, -np.nanmax(shares, 1)), kind="stable")
    rows = tuple(
        RankedRow(
            part=places[i][0],
            number=places[i][1],
            name=names[i],
            loss=float(values[i, 0]),
            gradient_norm=float(values[i, 1]),
            loss_share=float(shares[i, 0]),
            gradient_share=float(shares[i, 1]),
            stands_out=bool(is_out[i]),
            unusual=tuple(texts[i]),
        )
        for i in order.tolist()
    )
    return RowRanking(step, rows, note)


def _parts(run: ReplayRun, batch: dict[str, Any]) -> list[BatchRows]:
    """Return the rows that are ranked together: of each micro-batch, or of what the user's step is called with."""
    parts = parts_of(run.dump, batch)
    if run.step is None:
        return parts
    with _evaluated(run.model, (BATCH_NORMS, *_RANDOM)):
        return _parts_of_step(run, batch, [part.count for part in parts])


def parts_of(dump: Dump, batch: dict[str, Any]) -> list[BatchRows]:
    """Return the rows of each micro-batch of what ``batches.pt`` of a dump holds of a step."""
    calls, losses = batch["model_calls"], batch["loss_calls"]
    counts = [None] * len(calls)
    if dump.has("batch_rows.npz"):
        arrays = dump.arrays("batch_rows.npz")
        counts = np.bincount(arrays["parts"][arrays["steps"] == batch["step"]], minlength=len(calls)).tolist()
    parts = [
        BatchRows(call, losses[i] if len(losses) == len(calls) else None, counts[i]) for i, call in enumerate(calls)
    ]
    if not parts or not all(part.count for part in parts):
        raise DumpError(f"the batch of step {batch['step']} has no tensor with rows")
    return parts


def _parts_of_step(run: ReplayRun, batch: dict[str, Any], counts: list[int]) -> list[BatchRows]:
    """Return the rows of what the user's step is called with: of each micro-batch, or of all calls if it needs them together."""
    calls, losses = batch["model_calls"], batch["loss_calls"]
    if len(losses) in (0, len(calls)):
        parts = [BatchRows(calls[i : i + 1], losses[i : i + 1], count) for i, count in enumerate(counts)]
        with suppressed(Exception):  # the step needs the other calls
            _by_step(run, on_device(parts[0].of([0]), run.device))
            return parts
    if len(set(counts)) > 1:
        raise DumpError(f"step= cannot run with a batch of one row: the calls of the model have {counts} rows")
    return [BatchRows(calls, losses, counts[0])]


def _is_far(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    with np.errstate(all="ignore"):
        center = np.nanmedian(np.where(np.isfinite(values), values, np.nan), axis=0)
        deviation = 1.4826 * np.nanmedian(np.abs(values - center), axis=0)
        far: NDArray[np.bool_] = values > np.maximum(center + _FAR * deviation, _TIMES * np.abs(center))
    return far


def _names(dump: Dump, step: int, parts: list[BatchRows]) -> list[str]:
    """Return the ids of the rows, or their hashes."""
    hashes = [f"{value:016x}" for part in parts for value in part.hashes().tolist()]
    if not dump.has("batch_rows.npz"):
        return hashes
    arrays = dump.arrays("batch_rows.npz")
    ids = arrays["ids"][(arrays["steps"] == step) & (arrays["parts"] < len(parts))].tolist()
    return [own or value for own, value in zip(ids, hashes, strict=True)] if len(ids) == len(hashes) else hashes


_RANDOM = (DROPOUTS, nn.RNNBase, nn.MultiheadAttention)  # if they are in training mode


@contextmanager
def _evaluated(model: nn.Module, classes: tuple[Any, ...]) -> Iterator[None]:
    """Put the modules of some classes into evaluation mode."""
    changed = [module for module in model.modules() if module.training and isinstance(module, classes)]
    try:
        for module in changed:
            module.training = False
        yield
    finally:
        for module in changed:
            module.training = True


def _measure(run: ReplayRun, part: BatchRows) -> NDArray[np.float64]:
    """Return the loss and the gradient norm of each row."""
    tensors = [on_device(leaf, run.device) for _, leaf in part.leaves()]
    if run.step is None:
        with suppressed(Exception):  # the model cannot be vectorised
            return _at_once(run, part, tensors)
    one = _by_step if run.step is not None else _alone
    return np.array([one(run, part.call([leaf[i : i + 1] for leaf in tensors])) for i in range(part.count)])


_ALL, _CANDIDATES = 256, 64


def _measure_together(
    run: ReplayRun, parts: list[BatchRows], alone: list[NDArray[np.float64]]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return by which share of itself the loss falls without each row, and the loss and the gradient norm of all rows.

    A row without which a loss becomes finite has infinity.
    """
    buffers = {name: buffer.clone() for name, buffer in run.model.named_buffers()}
    falls, wholes = list[NDArray[np.float64]](), list[tuple[int, float, float]]()
    with _evaluated(run.model, _RANDOM):
        for part, values in zip(parts, alone, strict=True):
            loss, norm = _alone(run, on_device(part.of(range(part.count)), run.device))
            wholes.append((part.count, loss, norm))
            found = np.zeros(part.count)
            for row in _candidates(part, values):
                rest = on_device(part.of([other for other in range(part.count) if other != row]), run.device)
                with suppressed(ValueError):  # one row is left, and batch normalisation needs more
                    (args, kwargs), loss_call = rest
                    without = float(value_of(run.model(*args, **kwargs), run.loss, loss_call).detach())
                    if np.isfinite(loss):
                        found[row] = max(1 - (part.count - 1) * without / (part.count * loss), 0.0) if loss else 0.0
                    elif np.isfinite(without):
                        found[row] = np.inf
            falls.append(found)
    for name, buffer in run.model.named_buffers():
        buffer.copy_(buffers[name])
    counts, losses, norms = np.array(wholes).T
    sums = counts * losses
    scaled = [
        fall * total / max(np.nansum(sums), np.finfo(float).tiny) for fall, total in zip(falls, sums, strict=True)
    ]
    together = np.concatenate(scaled if np.isfinite(sums).all() else falls)
    return together[:, None], np.array([sums.sum(), (counts * norms).sum()])


def _candidates(part: BatchRows, values: NDArray[np.float64]) -> list[int]:
    if part.count <= _ALL:
        return list(range(part.count))
    sizes = torch.linalg.vector_norm(part.leaves()[0][1].reshape(part.count, -1).double(), dim=1).cpu().numpy()
    scores = (*np.nan_to_num(values, nan=np.inf).T, np.abs(sizes - np.nanmedian(sizes)))
    return sorted({int(row) for score in scores for row in np.argsort(-score, kind="stable")[:_CANDIDATES]})


def _at_once(run: ReplayRun, part: BatchRows, tensors: list[Tensor]) -> NDArray[np.float64]:
    model = run.model
    parameters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    fixed = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad} | dict(
        model.named_buffers()
    )

    def value(trained: Mapping[str, Tensor], *row: Tensor) -> Tensor:
        (args, kwargs), loss_call = part.call([leaf[None] for leaf in row])
        return value_of(functional_call(model, {**trained, **fixed}, tuple(args), kwargs), run.loss, loss_call)

    size = sum(p.numel() * p.itemsize for p in parameters.values())
    count = max(min(_GRADIENT_BYTES // max(size, 1), _MOST_AT_ONCE), 1)
    function = vmap(grad_and_value(value), in_dims=(None, *[0] * len(tensors)), randomness="different")
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # operators without a rule for vmap are slow
        for begin in range(0, part.count, count):
            gradients, losses = function(parameters, *(leaf[begin : begin + count] for leaf in tensors))
            norms = [torch.linalg.vector_norm(g.flatten(1), dim=1, dtype=torch.float64) for g in gradients.values()]
            norm = torch.linalg.vector_norm(torch.stack(norms), dim=0)
            found.append(torch.stack([losses.detach().double(), norm], 1).cpu().numpy())
    return np.concatenate(found)


def _alone(run: ReplayRun, calls: Any) -> tuple[float, float]:
    (args, kwargs), loss_call = calls
    parameters = [p for p in run.model.parameters() if p.requires_grad]
    value = value_of(run.model(*args, **kwargs), run.loss, loss_call)
    gradients = torch.autograd.grad(value, parameters, allow_unused=True)
    return float(value.detach()), _norm(gradients)


def _norm(gradients: Iterable[Tensor | None]) -> float:
    norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients if g is not None]
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0


class _StopError(Exception):
    """Ends a step before an optimizer changes parameters."""


def _by_step(run: ReplayRun, calls: Any) -> tuple[float, float]:
    """Return the loss and the gradient norm of a row that the step of the user computes."""
    losses: list[float] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        losses.append(float(output.detach() if run.loss is not None else value_of(output, None, None).detach()))

    def stop(*_: Any) -> None:
        raise _StopError

    handles: list[Any] = [(run.loss or run.model).register_forward_hook(keep)]
    handles += [optimizer.register_step_pre_hook(stop) for optimizer in run.optimizers]
    try:
        with suppressed(_StopError):
            assert run.step is not None
            run.step(*calls)
        norm = _norm(p.grad for p in run.model.parameters())
    finally:
        for handle in handles:
            handle.remove()
        run.model.zero_grad()
    return (losses[-1] if losses else float("nan")), norm


def find_rows(dump: str | os.PathLike[str] | Dump, dataset: Any) -> dict[int, list[int]]:
    """Return the indices in a data set of the rows of a dump's batch: by the number of the row, over all micro-batches.

    The items are read one after another, and compared by the hashes of their tensors, arrays, and lists of numbers.
    A row that an augmentation has changed, or that was padded when the batch was made, is not found.

    Parameters
    ----------
    dump : path or Dump
        The dump.
    dataset : object
        Has a length, and items for the indices from 0 on.

    Raises
    ------
    ConfigTypeError
        If `dataset` has no length or no items, as iterators.
    DumpError
        If the dump has no hashes of the rows of its step.
    """
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ConfigTypeError(f"a data set with a length and items is needed, got {type(dataset).__name__}")
    found = dump if isinstance(dump, Dump) else read_dump(dump)
    arrays = found.arrays("batch_rows.npz")
    hashes = arrays["hashes"][arrays["steps"] == found.step].tolist()
    if not hashes:
        raise DumpError(f"the dump '{found.path}' has no batch with rows of step {found.step}")
    wanted: dict[int, list[int]] = {}
    for row, value in enumerate(hashes):
        wanted.setdefault(value, []).append(row)
    result: dict[int, list[int]] = {}
    for index in range(len(dataset)):
        for value in item_hashes(dataset[index]) & wanted.keys():
            for row in wanted[value]:
                result.setdefault(row, []).append(index)
    return result
