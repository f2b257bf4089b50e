"""Silent errors of trainings on several ranks, rebuilt small from the descriptions in public trackers.

Each function trains on one rank of a gloo group, with the error or mended, and returns the findings.  ``ERRORS`` has the place of the
description, the error in a sentence, the rules that should find it, and why no rule does if that is so.
``NOT_REBUILT`` has those of the public lists that cannot be rebuilt with gloo on a processor.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from tests.diagnosis import networks

EVERY = 5
STEPS = 30
ERRORS = {}

NOT_REBUILT = {
    "DeepSpeed 5794": "it blocks a collective, which is not silent",
    "errors of TransformerEngine and of FP8": "the kernels need a device",
    "lightning-thunder 725": "the compiler does not apply autocast to its own operations",
    "transformers 17877, 23723, 34204": "initialisation that is slow, generation, and a processor of images: no training is wrong",
    "Baichuan2 86": "it happens in inference; its cause is that of PyTorch 84803",
    "PyTorch 51800": "an evaluation before the first training step",
    "Stack Overflow 67180955": "the same error as PyTorch 5059",
    "errors of overlapped communication": "it is a race between streams of a device",
}


class Error(NamedTuple):
    """One error, and the rules that should find it."""

    build: object
    source: str
    mistake: str
    rules: frozenset
    reason: str


def error(source, mistake, rules=(), reason=""):
    def register(build):
        ERRORS[build.__name__] = Error(build, source, mistake, frozenset(rules), reason)
        return build

    return register


def batches(seed=0, shared=False, size=32):
    """Return a function that draws a batch of images with labels; the ranks draw different ones unless they share them."""
    (x, y), _ = networks.digits()
    generator = torch.Generator().manual_seed(seed + (0 if shared else 100 * dist.get_rank()))

    def batch():
        rows = torch.randint(len(x), (size,), generator=generator)
        return x[rows], y[rows]

    return batch


def mlp():
    return networks.mlp([64, 64])


def adam(model, rate=1e-3):
    return torch.optim.Adam(model.parameters(), rate)


def train(model, batch, optimizer, called=None, loss=None, before_step=None, after_step=None):
    """Train with the default rules; return the warnings and errors as rule, module, step and text."""
    exporter = Exporter(message_bus=MessageBus("errors"))
    exporter.add_modules(model)
    loss = loss or nn.CrossEntropyLoss()
    if isinstance(loss, nn.Module):
        exporter.set_loss(loss)
    exporter.apply_rules(every=EVERY, backend="null")
    for step in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        loss((called or model)(x), y).backward()
        if before_step is not None:
            before_step(step)
        optimizer.step()
        if after_step is not None:
            after_step(step)
    exporter.close()
    return [(f.rule, f.module, f.step, f.message) for f in exporter.findings if f.severity != "info"]


def average(parameters):
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def replicated(tensor, group):
    """Return the parameter as a DTensor that is declared to be equal on all ranks, whose bits are not compared."""
    return nn.Parameter(DTensor.from_local(tensor.detach().clone(), group, [Replicate()], run_check=False))


class ReplicatedNorm(nn.Module):
    """A layer norm whose weights every rank of a tensor-parallel group holds."""

    def __init__(self, group, width):
        super().__init__()
        self.weight, self.bias = replicated(torch.ones(width), group), replicated(torch.zeros(width), group)

    def forward(self, x):
        return functional.layer_norm(x, x.shape[-1:], self.weight.to_local(), self.bias.to_local())


class TensorParallel(nn.Module):
    """Two layers that are divided over the ranks, and a norm that is not."""

    def __init__(self):
        super().__init__()
        group = init_device_mesh("cpu", (dist.get_world_size(),))
        self.fc0, self.fc1 = nn.Linear(64, 64), nn.Linear(64, 64)
        self.norm, self.head = ReplicatedNorm(group, 64), nn.Linear(64, 10)
        parallelize_module(self, group, {"fc0": ColwiseParallel(), "fc1": RowwiseParallel()})

    def forward(self, x):
        return self.head(self.norm(self.fc1(torch.relu(self.fc0(x.flatten(1))))))


@error(
    "https://github.com/deepspeedai/DeepSpeed/pull/1801",
    "Gradients of layer norms are clipped on the first rank of a tensor-parallel group only (BLOOM-176B).",
    ["ranks_differ"],
)
def norms_clipped_on_the_first_rank(is_mended):
    model = TensorParallel()

    def clip(step):
        for name, parameter in model.named_parameters():
            if is_mended or dist.get_rank() == 0 or "norm" not in name:
                parameter.grad.mul_(0.5)

    return train(model, batches(shared=True), adam(model), before_step=clip)


@error(
    "https://github.com/deepspeedai/DeepSpeed/pull/5411",
    "Each rank of a tensor-parallel group clips by the norm of its own shards, so that what all ranks hold parts.",
    ["ranks_differ"],
)
def clipped_by_the_norm_of_own_shards(is_mended):
    model = TensorParallel()

    def clip(step):
        grads = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
        total = sum(grad.square().sum() for grad in grads)
        if is_mended:
            dist.all_reduce(total)
        for grad in grads:
            grad.mul_(0.5 / total.sqrt())

    return train(model, batches(shared=True), adam(model), before_step=clip)


@error(
    "https://github.com/NVIDIA-NeMo/Automodel/pull/3822",
    "Parameters that all ranks of a tensor-parallel group hold are not broadcast, and begin different.",
    ["ranks_differ"],
)
def replicas_that_begin_different(is_mended):
    model = TensorParallel()
    if not is_mended:
        with torch.no_grad():
            model.norm.weight.to_local().add_(0.01 * dist.get_rank())
    return train(model, batches(shared=True), adam(model))


class Routed(nn.Module):
    """A gate that every rank holds, applied to the rank's own tokens."""

    def __init__(self, group=None):
        super().__init__()
        self.body, self.head = nn.Linear(64, 64), nn.Linear(64, 10)
        self.gate = nn.Linear(64, 64, bias=False)
        if group is not None:
            self.gate.weight = replicated(self.gate.weight, group)

    def forward(self, x):
        h = torch.relu(self.body(x.flatten(1)))
        weight = self.gate.weight.to_local() if isinstance(self.gate.weight, DTensor) else self.gate.weight
        return self.head(h * torch.sigmoid(functional.linear(h, weight)))


def _routed(model, is_mended):
    def reduce(step):
        others = [p for name, p in model.named_parameters() if is_mended or not name.startswith("gate")]
        for parameter in others:
            grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            dist.all_reduce(grad)
            grad /= dist.get_world_size()

    return train(model, batches(), adam(model), before_step=reduce)


@error(
    "https://github.com/pytorch/torchtitan/issues/2387",
    "The gradient of a router that is a replicated DTensor is not reduced over the tensor-parallel group.",
    ["ranks_differ"],
)
def router_gradient_not_reduced(is_mended):
    return _routed(Routed(init_device_mesh("cpu", (dist.get_world_size(),))), is_mended)


@error(
    "https://github.com/NVIDIA/Megatron-LM/issues/599",
    "The router of an MoE layer, a plain parameter, is not synchronised within the tensor-parallel group.",
    reason="Nothing says that the router is replicated: experts, which may differ, look the same.",
)
def plain_router_not_synchronised(is_mended):
    return _routed(Routed(), is_mended)


@error(
    "https://github.com/pytorch/pytorch/issues/104336",
    "The model is moved after it was wrapped, so that the wrapper's hooks belong to parameters that nothing uses.",
    ["ranks_differ"],
)
def moved_after_wrapping(is_mended):
    model = DistributedDataParallel(mlp(), find_unused_parameters=True)
    for module in [] if is_mended else model.module.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().clone()))
    return train(model, batches(), adam(model))


@error(
    "https://x.com/jxmnop/status/1778520637193240892",
    "The loop calls the model sometimes through its data-parallel wrapper and sometimes not.",
    ["ranks_differ"],
)
def wrapper_bypassed(is_mended):
    model = DistributedDataParallel(mlp())
    count = iter(range(10_000))

    def called(x):
        return model(x) if is_mended or next(count) % 2 else model.module(x)

    return train(model, batches(), adam(model), called=called)


@error(
    "https://github.com/pytorch/pytorch/issues/84803",
    "A faulty connection between devices loses what a collective sends: one rank receives zeros, in some steps.",
    ["ranks_differ"],
)
def data_lost_in_a_collective(is_mended):
    model = DistributedDataParallel(mlp())

    def lose(step):
        if not is_mended and step % 11 == 7 and dist.get_rank() == 1:
            model.module.fc1.weight.grad.zero_()

    return train(model, batches(), adam(model), before_step=lose)


@error(
    "https://github.com/pytorch/pytorch/issues/96600",
    "A faulty connection between devices loses a part of the weights when they are sent to another device.",
    ["ranks_differ"],
)
def weights_lost_on_the_way(is_mended):
    model = DistributedDataParallel(mlp())
    if not is_mended and dist.get_rank() == 1:
        with torch.no_grad():
            model.module.fc1.weight[:4].zero_()
    return train(model, batches(), adam(model))


@error(
    "https://github.com/pytorch/torchtitan/issues/166",
    "Each rank initialises another model, and only gradients are averaged.",
    ["ranks_differ"],
)
def different_models_with_averaged_gradients(is_mended):
    torch.manual_seed(0 if is_mended else dist.get_rank())
    model = mlp()
    return train(model, batches(), adam(model), before_step=lambda step: average(model.parameters()))


@error(
    "https://github.com/horovod/horovod/pull/562",
    "After a restart the first rank alone has the learning rate of the checkpoint.",
    ["ranks_differ"],
)
def rate_restored_on_one_rank(is_mended):
    model = DistributedDataParallel(mlp())
    return train(model, batches(), adam(model, 5e-4 if is_mended or dist.get_rank() == 0 else 1e-3))


@error(
    "https://github.com/NVIDIA-NeMo/Automodel/pull/2995",
    "An expert that gets no token on one rank has no gradient there, so that the optimizer skips it on this rank only.",
    ["ranks_differ"],
)
def optimizer_skips_on_one_rank(is_mended):
    model = DistributedDataParallel(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.1)

    def drop(step):
        if not is_mended and dist.get_rank() == 1 and step % 4 == 1:
            model.module.fc1.weight.grad = None

    return train(model, batches(), optimizer, before_step=drop)


class Tied(nn.Module):
    """A model whose first and last layer have the weight of the embedding, as two tensors unless ``is_shared``."""

    def __init__(self, is_shared):
        super().__init__()
        self.embedding, self.body = nn.Embedding(60, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, 60, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.1)
        if is_shared:
            self.head.weight = self.embedding.weight
        else:
            self.head.weight.data.copy_(self.embedding.weight.data)

    def forward(self, ids):
        h = self.embedding(ids)
        return self.head(h + torch.tanh(self.body(h)))


@error(
    "https://github.com/NVIDIA/Megatron-LM/issues/844",
    "The gradients of the shared embedding are not added between the first and the last stage of a pipeline.",
    ["untied_weights"],
    "The rule names the second tensor of the weight, in the first sample; it would do so too if the gradients were added.",
)
def gradients_of_a_shared_embedding_not_added(is_mended):
    model = DistributedDataParallel(Tied(is_mended))
    generator = torch.Generator().manual_seed(dist.get_rank())

    def batch():
        ids = (torch.rand(64, generator=generator).square() * 60).long()
        return ids, (ids + 7) % 60

    return train(model, batch, adam(model))


@error(
    "https://github.com/speechbrain/speechbrain/pull/2814",
    "A module without trainable parameters is not wrapped, and each rank has another one.",
    ["ranks_differ"],
)
def frozen_module_not_broadcast(is_mended):
    torch.manual_seed(0 if is_mended else dist.get_rank())
    frozen = nn.Linear(64, 64).requires_grad_(False)
    body = DistributedDataParallel(nn.Sequential(nn.ReLU(), nn.Linear(64, 10)))
    model = nn.Sequential(nn.Flatten(), frozen, body)
    return train(model, batches(), torch.optim.Adam(body.parameters(), 1e-3))


@error(
    "https://github.com/NVIDIA/Megatron-LM/issues/906",
    "The loss is multiplied by the size of the context-parallel group, and the gradients are averaged over it as well.",
    ["loss_scale"],
)
def loss_scaled_by_the_group(is_mended):
    factor = 1 if is_mended else dist.get_world_size()

    class Loss(nn.Module):
        def forward(self, output, labels):
            return factor * functional.cross_entropy(output, labels)

    model = DistributedDataParallel(mlp())
    return train(model, batches(), adam(model), loss=Loss())


@error(
    "https://github.com/huggingface/accelerate/issues/2665",
    "The optimizer is created before the model is sharded, so that it owns parameters that the model no longer has.",
    rules=["missing_step"],
)
def optimizer_made_before_sharding(is_mended):
    model = mlp()
    early = adam(model)
    fully_shard(model)
    return train(model, batches(), adam(model) if is_mended else early)


def all_errors(rank, size):
    """Return the findings of each program, with the error and mended."""
    found = {}
    for name, each in ERRORS.items():
        for is_mended in (False, True):
            torch.manual_seed(0)
            found[name, is_mended] = each.build(is_mended)
    return found
