"""Training with every strategy: each function runs in every process and returns the values published there."""

import contextlib
import copy

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import ikkuna
from ikkuna.export import subscriber as installed
from ikkuna.metrics.messages.kinds import FORWARD_KINDS, MICRO_KINDS, PARAMETER_KINDS
from tests.distributed import loops
from tests.distributed.loops import data, local, network, published_of


def ddp(rank, size):
    return published_of(DistributedDataParallel(network()), *local(*data(), rank, size))


def ddp_positions(rank, size):
    return published_of(DistributedDataParallel(loops.positional()), *local(*data(), rank, size))


def ddp_uneven(rank, size):
    inputs, labels = data()
    cut = 5 if size == 2 else 1
    part = (
        slice(None, cut)
        if rank == 0
        else slice(cut, None)
        if size == 2
        else slice(1 + 3 * (rank - 1), 4 + 3 * (rank - 1))
    )
    return published_of(DistributedDataParallel(network()), inputs[:, part], labels[:, part])


def sharded_optimizer(rank, size):
    """Each rank has the state of its own part of the parameters."""

    def optimizer(model):
        options = {"lr": 0.1, "momentum": 0.9}
        if size == 1:
            return torch.optim.SGD(model.parameters(), **options)
        return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, **options)

    made = [installed.OptimizerStateSubscriber("momentum_buffer", backend="null")]
    model = network() if size == 1 else DistributedDataParallel(network())
    return published_of(model, *local(*data(), rank, size), made, optimizer)


def sharded(mesh=None, **options):
    model = network()
    for module in (model.block, model.last):
        fully_shard(module, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def fsdp(rank, size):
    return published_of(sharded(), *local(*data(), rank, size))


def fsdp_after(rank, size):
    """The model is added before it is sharded, all of it in one unit."""
    model, loss = network(), nn.CrossEntropyLoss()
    with loops.watching(model, loss, loops.every_metric()) as (_, published):
        fully_shard(model)
        loops.steps(model, loss, loops.sgd(model), *local(*data(), rank, size))
    return published


def fsdp_blocks_after(rank, size):
    """The model is added before its blocks are sharded; the metrics include percentiles, which read every element."""
    return _sharded_while_watched(rank, size)


def fsdp_kept_after(rank, size):
    """As before; the gathered parameters stay until the backward."""
    return _sharded_while_watched(rank, size, reshard_after_forward=False)


def _sharded_while_watched(rank, size, **options):
    model, loss = network(), nn.CrossEntropyLoss()
    kinds = (*FORWARD_KINDS, *PARAMETER_KINDS, *MICRO_KINDS)
    with loops.watching(model, loss, loops.every_metric(kinds)) as (_, published):
        for module in (model.block, model.last, model):
            fully_shard(module, **options)
        loops.steps(model, loss, loops.sgd(model), *local(*data(), rank, size))
    return published


def fsdp_sharded_later(rank, size):
    """The model is sharded after its first step, which every rank makes with all data."""
    model, loss = network(), nn.CrossEntropyLoss()
    inputs, labels = data()
    with loops.watching(model, loss, loops.every_metric()) as (exporter, published):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loops.steps(model, loss, optimizer, inputs[:1], labels[:1])
        for module in (model.block, model.last, model):
            fully_shard(module, reshard_after_forward=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loops.steps(model, loss, optimizer, *local(inputs[1:], labels[1:], rank, size))
        health = exporter.health()
    return published, (health.errors, health.skipped)


def fsdp_by_hand(rank, size):
    """No optimizer of torch steps, so that parameters are read while FSDP has gathered them."""
    model, loss = network(), nn.CrossEntropyLoss()
    with loops.watching(model, loss, loops.every_metric()) as (exporter, published):
        for module in (model.block, model.last, model):
            fully_shard(module)
        loops.steps_by_hand(model, loss, exporter, *local(*data(), rank, size))
    return published


def fsdp_mixed(rank, size):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return published_of(sharded(mp_policy=policy), *local(*data(), rank, size))


def fully_sharded(model, **options):
    """Return a model in the first edition of FSDP, the block and the last layer in units of their own."""
    options = {"device_id": torch.device("cpu"), **options}
    model.block = FullyShardedDataParallel(model.block, **options)
    model.last = FullyShardedDataParallel(model.last, **options)
    return FullyShardedDataParallel(model, **options)


def fsdp1(rank, size):
    return published_of(fully_sharded(network(), use_orig_params=True), *local(*data(), rank, size))


def hsdp(rank, size):
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    return published_of(sharded(mesh), *local(*data(), rank, size))


def parallel(mesh, model=None):
    plan = {
        "first": ColwiseParallel(output_layouts=Replicate()),
        "block.0": ColwiseParallel(),
        "block.2": RowwiseParallel(),
    }
    return parallelize_module(model or network(), mesh, plan)


def tp(rank, size):
    return published_of(parallel(init_device_mesh("cpu", (size,))), *data())


def tp_sequence(rank, size):
    """The normalisation and the following modules receive slices of the batch as DTensors, until the block gathers them."""
    from torch.distributed.tensor.parallel import PrepareModuleInput

    mesh = init_device_mesh("cpu", (size,))
    plan = {
        "first": ColwiseParallel(output_layouts=Shard(0), use_local_output=False),
        "norm": SequenceParallel(sequence_dim=0),
        "relu": PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Shard(0)),
        "block.0": ColwiseParallel(input_layouts=Shard(0)),
        "block.2": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
        "last": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
    }
    return published_of(parallelize_module(network(), mesh, plan), *data())


def tp_and_data(rank, size):
    """Two data-parallel replicas of a model on two ranks each: FSDP over one dimension, tensor parallel over the other."""
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
    model = fully_shard(parallel(mesh["tp"]), mesh=mesh["dp"])
    return published_of(model, *local(*data(), mesh["dp"].get_local_rank(), 2))


def accumulating(wrap):
    def train(model, loss, optimizer, inputs, labels):
        for x, y in zip(inputs, labels, strict=True):
            optimizer.zero_grad()
            for i, (part, target) in enumerate(zip(x.split(len(x) // 2), y.split(len(y) // 2), strict=True)):
                with wrap(model, i == 0):
                    (loss(model(part), target) / 2).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    return train


def ddp_no_sync(rank, size):
    def wrap(model, is_first):
        return model.no_sync() if is_first else contextlib.nullcontext()

    return published_of(DistributedDataParallel(network()), *local(*data(), rank, size), train=accumulating(wrap))


def fsdp_accumulated(rank, size):
    def wrap(model, is_first):
        model.set_requires_gradient_sync(not is_first)
        return contextlib.nullcontext()

    return published_of(sharded(), *local(*data(), rank, size), train=accumulating(wrap))


def _trained(wrap, rank, size, is_watched):
    torch.manual_seed(rank)
    model, loss = wrap(copy.deepcopy(network())), nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    inputs, labels = local(*data(), rank, size)
    if is_watched:
        with loops.watching(model, loss, loops.every_metric()):
            losses = loops.steps(model, loss, optimizer, inputs, labels)
    else:
        losses = loops.steps(model, loss, optimizer, inputs, labels)
    states = [v for state in optimizer.state.values() for v in state.values()]
    return losses, loops.fingerprint(*model.parameters(), *states)


def untouched_ddp(rank, size):
    return [_trained(DistributedDataParallel, rank, size, is_watched) for is_watched in (False, True)]


def untouched_fsdp(rank, size):
    return [_trained(fully_shard, rank, size, is_watched) for is_watched in (False, True)]


def untouched_fsdp1(rank, size):
    return _untouched_by_watch(lambda model: fully_sharded(model, use_orig_params=True), rank, size)


def untouched_fsdp1_flat(rank, size):
    """Each unit has one flat parameter in place of those of its modules."""
    return _untouched_by_watch(fully_sharded, rank, size)


def _untouched_by_watch(wrap, rank, size):
    found = []
    for is_watched in (False, True):
        model, loss = wrap(network()), nn.CrossEntropyLoss()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        watch = ikkuna.watch(model, loss, every=1, backend="null") if is_watched else contextlib.nullcontext()
        with watch:
            losses = loops.steps(model, loss, optimizer, *local(*data(), rank, size))
        found.append((losses, loops.fingerprint(*model.parameters())))
    return found
