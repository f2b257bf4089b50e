"""Trainings whose ranks are replicas, with one bit flipped on one rank, and trainings whose ranks may differ."""

import random
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import CallbackSubscriber, MeanSubscriber
from tests.distributed.loops import data, fingerprint, local, network

STEPS = 12
FLIPPED = 3
MODULES = ("first", "norm", "block.0", "block.2", "last")


def ddp(model, **options):
    return DistributedDataParallel(model, **options)


def hsdp(model):
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return fully_shard(model, mesh=mesh)


WRAPPERS = {"ddp": ddp, "hsdp": hsdp}


def train(
    model,
    optimizer=None,
    steps=STEPS,
    before_step=None,
    after_step=None,
    every=1,
    synchronised=None,
    on_error="raise",
    watched=None,
    accumulates_from=STEPS * 9,
):
    """Train with the rule; return rule, module, step and text of each finding, and the names of the rules that judged."""
    inputs, labels = local(*data(steps), dist.get_rank(), dist.get_world_size())
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    exporter = Exporter(message_bus=MessageBus("replicas"), on_error=on_error)
    exporter.add_modules(model if watched is None else watched)
    exporter.apply_rules(["ranks_differ"], every=every, backend="null")
    for step in range(steps):
        optimizer.zero_grad()
        if step >= accumulates_from:
            with model.no_sync():
                nn.functional.cross_entropy(model(inputs[step]), labels[step]).backward()
        with nullcontext() if synchronised is None or synchronised(step) else model.no_sync():
            nn.functional.cross_entropy(model(inputs[step]), labels[step]).backward()
        if before_step is not None:
            before_step(step, model, optimizer)
        optimizer.step()
        if after_step is not None:
            after_step(step, model, optimizer)
    exporter.close()
    findings = exporter.findings
    return [(f.module, f.step, f.message, f.modules) for f in findings], findings.judged


def flip(tensor, element, bit):
    """Flip one bit of one element of the local part of a tensor."""
    plain = getattr(tensor, "_local_tensor", tensor).detach()
    words = plain.view(-1).view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[plain.element_size()])
    size = 8 * plain.element_size()
    words[element % len(words)] ^= (1 << bit) - ((1 << size) if bit == size - 1 else 0)


def parameter_of(model, module, name):
    return getattr(getattr(model, "module", model).get_submodule(module), name)


def owners(tensor):
    """Return the ranks that hold the same part of a tensor as this one, and whether it is not empty."""
    if not hasattr(tensor, "device_mesh"):
        return list(range(dist.get_world_size())), True
    mesh = tensor.device_mesh
    return mesh.mesh[:, mesh.get_coordinate()[1]].tolist(), tensor._local_tensor.numel() > 0


def flipped(strategy, what, module, name, element, bit, rank):
    """Train with one bit flipped on one rank after step 3, or before its optimizer's step.

    Return the findings, the ranks that hold the flipped part (no ranks if it is empty), and whether these are equal in the end.
    """
    torch.manual_seed(0)
    model = WRAPPERS[strategy](network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    parts = []

    def act(step, model, optimizer):
        if step != FLIPPED:
            return
        parameter = parameter_of(model, module, name)
        ranks, has_elements = owners(parameter)
        held = [None] * dist.get_world_size()
        dist.all_gather_object(held, ranks if has_elements else [])
        parts.extend(held[rank])
        if dist.get_rank() == rank and has_elements:
            tensor = {"weights": parameter, "gradients": parameter.grad}.get(what)
            flip(optimizer.state[parameter][what] if tensor is None else tensor, element, bit)

    moment = {"before_step": act} if what == "gradients" else {"after_step": act}
    findings, judged = train(model, optimizer, **moment)
    assert judged
    states = [x for parameter in model.parameters() for x in optimizer.state[parameter].values()]
    digests = [None] * dist.get_world_size()
    dist.all_gather_object(digests, fingerprint(*model.parameters(), *states))
    return findings, parts, len({digests[i] for i in parts}) <= 1


def cases(strategy, size, count, seed=0):
    """Return what to flip in `count` trainings."""
    chance = random.Random(f"{strategy} {size} {seed}")
    kinds = ("weights", "gradients", "exp_avg", "exp_avg_sq")
    return [
        (
            kinds[i % len(kinds)],
            chance.choice(MODULES),
            chance.choice(("weight", "bias")),
            chance.randrange(10_000),
            chance.randrange(32),
            chance.randrange(size),
        )
        for i in range(count)
    ]


COUNT = 8


def flips_of(strategy, size, count=COUNT, seed=0):
    return [(case, *flipped(strategy, *case)) for case in cases(strategy, size, count, seed)]


def flips_of_ddp(rank, size):
    return flips_of("ddp", size)


def flips_of_hsdp(rank, size):
    return flips_of("hsdp", size)


# -- mistakes ---------------------------------------------------------------------------------------------------------


def different_start(rank, size):
    """The wrapper does not broadcast, and each rank has another seed."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    return train(ddp(model, init_sync=False))


def clipped_on_one_rank(rank, size):
    def clip(step, model, optimizer):
        if step >= 5 and rank == size - 1:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

    return train(ddp(network()), before_step=clip)


def other_rate(rank, size):
    model = ddp(network())
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1 + 0.01 * rank))


def average(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def different_start_by_hand(rank, size):
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    return train(model, before_step=lambda step, model, optimizer: average(model))


def flip_by_hand(rank, size):
    """A bit flips in a model whose gradients the program averages itself."""

    def act(step, model, optimizer):
        if step == 6 and rank == 1:
            flip(model.block[0].weight, 3, 0)

    return train(network(), before_step=lambda step, model, optimizer: average(model), after_step=act)


def never_synchronised(rank, size):
    return train(ddp(network()), synchronised=lambda step: False)


def batch_norm():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def flip_of_a_buffer(rank, size):
    """A bit of a buffer flips that the program keeps equal on all ranks."""
    model = ddp(batch_norm(), forward_sync_buffers=False)

    def act(step, model, optimizer):
        norm = model.module[1]
        for buffer in (norm.running_mean, norm.running_var):
            dist.all_reduce(buffer)
            buffer /= size
        if step == 8 and rank == 1:
            flip(norm.running_mean, 3, 0)

    return train(model, after_step=act)


MISTAKES = (
    "different_start",
    "clipped_on_one_rank",
    "other_rate",
    "different_start_by_hand",
    "flip_by_hand",
    "flip_of_a_buffer",
)


# -- what may differ --------------------------------------------------------------------------------------------------


def healthy_ddp(rank, size):
    return train(ddp(network()), steps=20)


def buffers_of_each_rank(rank, size):
    """Each rank has its own statistics, and later those of the first rank."""
    return train(ddp(batch_norm()), steps=20)


def buffers_without_broadcast(rank, size):
    return train(ddp(batch_norm(), forward_sync_buffers=False), steps=20)


def broadcast_buffers(rank, size):
    """The model inside of the wrapper is watched, whose buffers are equal at each forward until gradients are accumulated."""
    model = ddp(batch_norm())
    return train(model, steps=20, watched=model.module, accumulates_from=10)


def buffers_after_evaluation_mode(rank, size):
    """A batch norm in evaluation mode is equal on all ranks, and is not when it is trained again."""

    def act(step, model, optimizer):
        model.module[1].train(step >= 8)

    model = ddp(batch_norm(), forward_sync_buffers=False)
    model.module[1].eval()
    return train(model, steps=20, after_step=act)


def healthy_hsdp(rank, size):
    return train(hsdp(network()), steps=20)


def healthy_fsdp(rank, size):
    return train(fully_shard(network()))


def accumulating(rank, size):
    """The optimizer steps after every second batch; the first backward of each pair is local."""
    model, (inputs, labels) = ddp(network()), local(*data(12), rank, size)
    optimizer = torch.optim.AdamW(model.parameters())
    exporter = Exporter(message_bus=MessageBus("replicas"), on_error="raise")
    exporter.add_modules(model)
    exporter.apply_rules(["ranks_differ"], every=1, backend="null")
    for i, (x, y) in enumerate(zip(inputs, labels, strict=True)):
        with nullcontext() if i % 2 else model.no_sync():
            nn.functional.cross_entropy(model(x), y).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    exporter.close()
    return [(f.module, f.step, f.message, f.modules) for f in exporter.findings], exporter.findings.judged


def tensor_parallel(rank, size):
    model = network()
    plan = {"block.0": ColwiseParallel(), "block.2": RowwiseParallel()}
    model = parallelize_module(model, init_device_mesh("cpu", (size,)), plan)
    torch.manual_seed(3)
    inputs = torch.randn(STEPS, 6, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter = Exporter(message_bus=MessageBus("replicas"), on_error="raise")
    exporter.add_modules(model)
    exporter.apply_rules(["ranks_differ"], every=1, backend="null")
    for x in inputs:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    exporter.close()
    return [(f.module, f.step, f.message, f.modules) for f in exporter.findings], exporter.findings.judged


def ensemble(rank, size):
    torch.manual_seed(rank)
    return train(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))


def search_of_rates(rank, size):
    """Equal models on equal data with another rate each: equal gradients in the first step only."""
    torch.manual_seed(0)
    model, x = network(), torch.randn(4, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1))
    exporter = Exporter(message_bus=MessageBus("replicas"), on_error="raise")
    exporter.add_modules(model)
    exporter.apply_rules(["ranks_differ"], every=1, backend="null")
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    exporter.close()
    return [(f.module, f.step, f.message, f.modules) for f in exporter.findings], exporter.findings.judged


def local_sgd(rank, size):
    """Each rank trains by itself; the weights are averaged after every fourth step."""

    def act(step, model, optimizer):
        for parameter in model.parameters() if step % 4 == 3 else ():
            dist.all_reduce(parameter.data)
            parameter.data /= size

    return train(network(), after_step=act)


def uneven_batches(rank, size):
    """In each epoch rank 0 has fewer batches than the others, which go on without it; the steps of the ranks drift apart."""
    inputs, labels = local(*data(STEPS), rank, size)
    model, loss, bus = ddp(network()), nn.CrossEntropyLoss(), MessageBus("uneven")
    optimizer, own, published = torch.optim.SGD(model.parameters(), lr=0.1), [], []
    exporter = Exporter(message_bus=bus, on_error="raise")
    exporter.add_modules(model)
    exporter.set_loss(loss)
    exporter.apply_rules(["ranks_differ"], every=1, backend="null")
    bus.register_subscriber(MeanSubscriber("loss", backend="null"))
    bus.register_subscriber(CallbackSubscriber("loss_mean", lambda message: published.append(message.data)))
    for _ in range(3):
        with model.join():
            for x, y in zip(inputs[: 2 + 2 * rank], labels, strict=False):
                optimizer.zero_grad()
                value = loss(model(x), y)
                value.backward()
                optimizer.step()
                own.append(value.item())
    exporter.close()
    assert published == pytest.approx(own, rel=1e-6)
    return list(exporter.findings), exporter.findings.judged


def post_local_sgd(rank, size):
    model = ddp(network())
    model.register_comm_hook(PostLocalSGDState(None, dist.new_group([rank]), start_localSGD_iter=4), post_localSGD_hook)
    return train(model)


def replicas_that_cannot_be_found(rank, size):
    """The process group of the wrapper was destroyed for the functions that read it."""
    model = ddp(network())
    original, dist.get_process_group_ranks = dist.get_process_group_ranks, None
    try:
        return train(model, on_error="disable")
    finally:
        dist.get_process_group_ranks = original


def sharded_optimizer(rank, size):
    model = ddp(network())
    return train(model, ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.01))


def ignored_parameters(rank, size):
    """One layer is left out of the wrapper on purpose."""
    model = network()
    torch.manual_seed(rank)
    nn.init.normal_(model.last.weight)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["last.weight", "last.bias"])
    return train(ddp(model))


HEALTHY = (
    *("healthy_ddp", "healthy_hsdp", "healthy_fsdp", "accumulating", "tensor_parallel", "ensemble", "search_of_rates"),
    *("local_sgd", "sharded_optimizer", "ignored_parameters", "uneven_batches"),
    *(
        "buffers_of_each_rank",
        "buffers_without_broadcast",
        "broadcast_buffers",
        "buffers_after_evaluation_mode",
    ),
)
NOT_COMPARED = ("healthy_fsdp", "ensemble", "search_of_rates", "local_sgd", "uneven_batches")
