"""Reads the graphs of the first objectives of a training, and finds mistakes in them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ikkuna.diagnosis.mistakes import ADDED_MASK, CONSTANT_RESULT, INVERTED_MASK, ONE_LABEL, SAME_SIDES
from ikkuna.diagnosis.objective import operations, positions, sums
from ikkuna.diagnosis.objective.graph import ObjectiveGraph, nearest_parameters, operation, terms
from ikkuna.diagnosis.preflight_checks.batch import tensors_of, without_labels
from ikkuna.diagnosis.preflight_checks.contracts import LossCall, findings_of
from ikkuna.store.finding import Finding
from ikkuna.support.failures import log, switched
from ikkuna.support.modules import module_of, named_modules, named_parameters
from ikkuna.support.threads import run_apart
from ikkuna.support.torch_internals import nodes_behind
from ikkuna.support.undisturbed import gradients

_MOST_PASSES = 6
_MANY_LABELS = 128
_MOVED = 1e-3  # of a weight: the first updates of a warm-up may be lost in the rounding of the outputs
_OF_CLASSES = ("NllLoss", "NllLoss2D")
_BINARY = (
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
)  # candidates of a contrast may have one label on purpose
_OF_DATA = ("Addmm", "Convolution", "Embedding", "NativeBatchNorm", "NativeLayerNorm", "MkldnnRnnLayer")


class RecordedObjective:
    """Finds mistakes in what the first six backward passes that reach the model are called on.

    It sees the graph of autograd, what its nodes have saved, the integers that the model was called with, and where its outputs have
    a gradient.  Nothing is computed again but losses of torch, of detached copies, on a thread of its own.

    Parameters
    ----------
    model : nn.Module, optional
        The model, held weakly; without one nothing is read.

    Attributes
    ----------
    is_done : bool
        Whether enough was read.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._model = weakref.ref(nn.Module() if model is None else model)
        self._left = _MOST_PASSES
        self._inputs: list[weakref.ref[Tensor]] = []
        self._samples: int | None = None
        self._found: list[Finding] = []
        self._sequences: list[positions.LabelledTokens] = []
        self._labels: set[float] = set()
        self._count_of_labels = self._ratios = 0
        self._weights_of_same: list[Tensor] | None = None

    @property
    def is_done(self) -> bool:
        """Whether enough was read."""
        return self._left <= 0

    def model_called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep weak references to what a model is called with."""
        given = [x for x in tensors_of((args, without_labels(kwargs))) if x.ndim and x.is_cpu]
        self._inputs = [weakref.ref(x) for x in given]
        self._samples = given[0].shape[0] if given else None

    def reaches_model(self, graph: ObjectiveGraph) -> bool:
        """Return whether an objective has a gradient with respect to a parameter of the model, or is too large to know."""
        model = self._model()
        return model is not None and (not graph.is_complete or graph.reaches(map(id, model.parameters())))

    def backward_starts(self, graph: ObjectiveGraph, outputs: Sequence[Tensor], is_known: bool) -> None:
        """Read the graph of an objective before its backward frees it.

        Parameters
        ----------
        graph : ObjectiveGraph
            The graph.
        outputs : sequence of Tensor
            What the model has returned.
        is_known : bool
            Whether the objective is one loss of torch, or what a loss function returned, which is checked by itself.
        """
        self._left -= 1
        self._sequences = []

        def read() -> None:
            try:
                switched([gradients(False)], self._read, graph, list(outputs), is_known)
            except Exception:
                log.debug("an objective was not read", exc_info=True)

        if not torch.is_autocast_enabled("cpu"):
            run_apart(read, "ikkuna-objective")

    def output_gradient(self, grad: Tensor) -> None:
        """Judge the positions of sequences by the gradient of an output."""
        for found in self._sequences:
            if grad.is_cpu and grad.ndim == 3 and grad.shape[:2] == found.tokens.shape:
                self._found += positions.padding_in_loss(found, (grad.detach() != 0).any(2))

    def findings(self) -> list[Finding]:
        """Return what was found since the last call, each mistake once."""
        found, self._found, self._sequences = self._found, [], []
        return list({(each.rule, each.module): each for each in found}.values())

    def _read(self, graph: ObjectiveGraph, outputs: list[Tensor], is_known: bool) -> None:
        model = self._model()
        if model is None:
            return
        of_model = {id(parameter): name for name, parameter in named_parameters(model)}
        is_alone = graph.parameters.keys() <= of_model.keys()  # a player of a game may raise another one's loss
        self._read_losses(sums.losses_in(graph.nodes, outputs), is_known, is_alone)
        added = terms(graph, self._samples)
        if added is not None:
            for node, finding in sums.mixed_reduction(added, _is_of_data):
                self._found.append(replace(finding, module=_module_behind(node, of_model)))
            self._found += () if is_known else sums.outer_difference(added, self._samples)
            if is_alone:
                self._found += sums.unbounded(added, self._samples)
                self._found += operations.trivial_optimum(added, outputs)
                self._found += sums.entropy_punished(added)
        self._found += operations.contrasts(graph.nodes)
        self._read_operations(graph.nodes, of_model)
        self._read_sequences(graph, model, of_model)
        if operations.pairs_without_difference(graph.nodes):
            before, weights = self._weights_of_same, _some_weights(model)
            if before is None:
                self._weights_of_same = weights
            elif any(0 < _MOVED * a.norm() < (b - a).norm() for a, b in zip(before, weights, strict=True)):
                self._found.append(SAME_SIDES.found())

    def _read_losses(self, calls: list[LossCall], is_known: bool, is_alone: bool) -> None:
        """Judge the arguments of losses of torch, and when all passes were read whether every label was the same."""
        if not is_known:
            self._found += [*findings_of(calls), *sums.outer_losses(calls)]
        labels = [call.arguments["target"] for call in calls if call.name in _BINARY]
        for target in labels if is_alone else ():
            self._labels.update(target.unique().tolist())
            self._count_of_labels += target.numel()
        if self.is_done and len(self._labels) == 1 and self._count_of_labels >= _MANY_LABELS:
            self._found.append(ONE_LABEL.found(min(self._labels)))

    def _read_operations(self, nodes: list[Any], of_model: dict[int, str]) -> None:
        """Judge the shapes and results of operations."""
        by_shape = (operations.constant_results, operations.softmaxes_over_other_axes, positions.exchanged_heads)
        for node, finding in (each for read in by_shape for each in read(nodes)):
            self._found.append(replace(finding, module=_module_behind(node, of_model)))
        self._found += operations.masks_as_indices(nodes)
        self._ratios += operations.ratios_of_one(nodes)
        if self._ratios == 2:  # before the first update the two may be equal by their initial weights
            detail = (
                "The exponential of a difference is always 1, and the gradients of its two sides cancel each other."
            )
            advice = "detach the older of the two, such as the log-probabilities of the policy that has acted"
            self._found.append(CONSTANT_RESULT.found(detail=detail, advice=advice))
        for node in nodes:
            self._found += positions.exchanged_axes(node) if operation(node) in _OF_CLASSES else ()

    def _read_sequences(self, graph: ObjectiveGraph, model: nn.Module, of_model: dict[int, str]) -> None:
        tokens = self._tokens()
        if tokens is None:
            return
        seen = positions.attentions(graph.nodes, *tokens.shape)
        losses = [node for node in graph.nodes if operation(node) in _OF_CLASSES]
        self._sequences = [each for node in losses if (each := positions.sequences_of(node, tokens)) is not None]
        shifts = {shift for each in self._sequences if (shift := positions.offset(each)) is not None}
        recurrent = {name: module for name, module in named_modules(model) if isinstance(module, nn.RNNBase)}
        self._found += positions.wrong_offset(shifts, seen, list(recurrent.values()))
        for each in self._sequences:
            self._found += positions.next_of_other_rows(each, seen, list(recurrent.values()))
        for place, finding in positions.seen_labels(shifts, seen, recurrent):
            module = place if isinstance(place, str) else _module_behind(place, of_model)
            self._found.append(replace(finding, module=module))
        padding = positions.padding_of(tokens)
        for mistake, masks in ((INVERTED_MASK, positions.inverted_masks), (ADDED_MASK, positions.added_masks)):
            self._found += (mistake.found(module=_module_behind(node, of_model)) for node in masks(seen, padding))

    def _tokens(self) -> Tensor | None:
        """Return the only integers that the model was called with that differ between rows and have more values than a mask."""
        given = [x for reference in self._inputs if (x := reference()) is not None and x.ndim == 2]
        integers = [x for x in given if not x.is_floating_point() and x.dtype is not torch.bool and x.numel()]
        found = [x for x in integers if int(x.max()) > 2 and bool((x != x[:1]).any())]
        return found[0].long() if len(found) == 1 else None


def _some_weights(model: nn.Module) -> list[Tensor]:
    """Return copies of the first elements of the last trainable parameters, which show that an update has moved them."""
    chosen = [p for p in model.parameters() if p.requires_grad and p.is_cpu and p.element_size() > 2][-8:]
    return [p.detach().reshape(-1)[:8].clone() for p in chosen]


def _is_of_data(node: Any) -> bool:
    """Return whether one of the nearest operations behind a node is that of a layer."""
    return any(
        operation(each) in _OF_DATA or (operation(each) == "Mm" and None in [n for n, _ in each.next_functions])
        for each in nodes_behind([node], 200)
    )


def _module_behind(node: Any, names: dict[int, str]) -> str | None:
    """Return the module of the parameters that a node was computed with."""
    nearest: Iterable[str] = (module_of(names[each]) for each in nearest_parameters(node) if each in names)
    return next(iter(nearest), None)
