"""Other features on several ranks: every subscriber, evaluation, full matrices, spread, files, modules of one rank only."""

import itertools
import math
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoints
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from ikkuna.diagnosis import RecorderOptions, read_dump
from ikkuna.export import Exporter
from ikkuna.export import subscriber as installed
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import CallbackSubscriber
from ikkuna.testing import small_model
from tests.distributed import loops
from tests.distributed.loops import data, local, network
from tests.subscribers import EVERY_SUBSCRIBER, NEEDS


def rows(steps=3):
    generator = torch.Generator().manual_seed(5)
    return torch.randn(steps, 8, 4, generator=generator), torch.randint(3, (steps, 8), generator=generator)


def published_by(name, model, inputs, labels):
    """Return the values that a subscriber, and those it depends on, publish for the small model."""
    loss = nn.CrossEntropyLoss()
    made = [make(backend="null") for make in (*NEEDS.get(name, ()), EVERY_SUBSCRIBER[name])]
    with loops.watching(model, loss, made) as (exporter, published):
        loops.steps(model, loss, loops.sgd(model), inputs, labels)
        exporter.epoch_finished()
    return published


def every_subscriber(rank, size):
    inputs, labels = local(*rows(), rank, size)
    model = {name: DistributedDataParallel(small_model()) for name in EVERY_SUBSCRIBER}
    return {name: published_by(name, model[name], inputs, labels) for name in EVERY_SUBSCRIBER}


def held_out(n=9):
    inputs, labels = data(1, n)
    return TensorDataset(inputs[0], labels[0])


def tested(model, inputs, labels):
    """Return the results of a test during training, and the values of a subscriber of its pass."""
    made = [
        installed.TestAccuracySubscriber(held_out(), batch_size=4, every=2, backend="null"),
        installed.TestAccuracySubscriber(held_out(), batch_size=4, publishes="by_epoch", backend="null"),
        installed.MeanSubscriber("activations", tag="testing", backend="null"),
        installed.NormSubscriber("activations", tag="testing", backend="null"),
        installed.NormSubscriber("weights", backend="null"),
    ]
    loss = nn.CrossEntropyLoss()
    with loops.watching(model, loss, made) as (exporter, published):
        losses = loops.steps(model, loss, loops.sgd(model), inputs, labels)
        exporter.epoch_finished()
    return losses, published


def evaluation_ddp(rank, size):
    return tested(DistributedDataParallel(network()), *local(*data(), rank, size))


def evaluation_fsdp(rank, size):
    model = network()
    fully_shard(model.block)
    return tested(fully_shard(model), *local(*data(), rank, size))


def matrix_metrics(**options):
    return [
        installed.SpectralNormSubscriber("weights", backend="null", **options),
        installed.RankSubscriber("weights", subsample=1, backend="null", **options),
        installed.CosineSubscriber("weights", backend="null", **options),
        installed.TrustRatioSubscriber(backend="null"),
        installed.DistanceFromInitSubscriber(backend="null"),
        installed.GlobalNormSubscriber(backend="null"),
        installed.OptimizerStateSubscriber("momentum_buffer", backend="null"),
        installed.HistogramSubscriber("weights", subsample=1, backend="null"),
    ]


def matrices(rank, size):
    inputs, labels = local(*data(), rank, size)
    return [
        loops.published_of(fully_shard(network()), inputs, labels, matrix_metrics(gather=gather))
        for gather in (False, True)
    ]


def matrices_of_slices(rank, size):
    model = FullyShardedDataParallel(network(), use_orig_params=True, device_id=torch.device("cpu"))
    return loops.published_of(model, *local(*data(), rank, size), matrix_metrics(gather=True))


def spread(rank, size):
    model, loss = DistributedDataParallel(network()), nn.CrossEntropyLoss()
    made = [installed.RankSpreadSubscriber(kind, backend="null") for kind in ("activations", "weights")]
    inputs, labels = local(*data(), rank, size)
    if rank == 1:
        inputs = inputs * 100
    with loops.watching(model, loss, made) as (_, published):
        loops.steps(model, loss, loops.sgd(model), inputs, labels)
    return published


def noise(model, batches, **options):
    """Return the published gradient noise over steps of several micro-batches."""
    loss, optimizer = nn.CrossEntropyLoss(), loops.sgd(model)
    made = [installed.GradientNoiseScaleSubscriber(backend="null", beta=0.0, **options)]
    with loops.watching(model, loss, made) as (_, published):
        for parts in batches:
            optimizer.zero_grad()
            for inputs, labels in parts:
                (loss(model(inputs), labels) / len(parts)).backward()
            optimizer.step()
    return published


def noise_of_ranks(rank, size):
    inputs, labels = local(*data(), rank, size)
    return noise(DistributedDataParallel(network()), [[part] for part in zip(inputs, labels, strict=True)], ranks=True)


def nan_on_one_rank(rank, size):
    """The last step's data hold a NaN on rank 1."""
    inputs, labels = local(*data(), rank, size)
    inputs = inputs.clone()
    if rank == 1:
        inputs[2, 0, 0] = math.nan
    made = [
        *(installed.MeanSubscriber(kind, backend="null") for kind in ("input_data", "activations")),
        installed.MinMaxSubscriber("input_data", backend="null"),
        installed.NonFiniteSubscriber("input_data", backend="null"),
        installed.NormSubscriber("input_data", finite_only=True, backend="null"),
        installed.RankSpreadSubscriber("input_data", "mean", backend="null"),
    ]
    return loops.published_of(DistributedDataParallel(network()), inputs, labels, made)


def files(rank, size):
    agreed = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(agreed)
    [directory] = agreed
    made = [installed.NormSubscriber("weights", backend=["tb", "jsonl"]), installed.LearningRateSubscriber()]
    model, loss = DistributedDataParallel(network()), nn.CrossEntropyLoss()
    with loops.watching(model, loss, made, log_dir=directory) as (_, _):
        loops.steps(model, loss, loops.sgd(model), *local(*data(), rank, size))
    dist.barrier()
    found = sorted(str(path.relative_to(directory)) for path in Path(directory).rglob("*") if path.is_file())
    runs = EventMultiplexer().AddRunsFromDirectory(directory).Reload()
    tags = {run: sorted(tags["scalars"]) for run, tags in runs.Runs().items()}
    dist.barrier()
    if rank == 0:
        shutil.rmtree(directory)
    return found, tags


def _resumed(make, rank, size):
    """Train in one go, and in halves with a checkpoint of torch between; return the distances of both, and the names of runs."""
    agreed = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(agreed)
    directory = Path(agreed[0])
    inputs, labels = local(*data(6), rank, size)
    found = {}
    for part, does, log_dir in (
        (slice(6), None, "whole"),
        (slice(3), checkpoints.save, "halves"),
        (slice(3, 6), checkpoints.load, "halves"),
    ):
        model, loss = make(), nn.CrossEntropyLoss()
        made, options = [installed.DistanceFromInitSubscriber(backend="jsonl")], {"log_dir": directory / log_dir}
        with loops.watching(model, loss, made, resume="auto", **options) as (exporter, published):
            state = {"model": model, "monitor": exporter}
            if does is checkpoints.load:
                does(state, checkpoint_id=directory / "checkpoint")
            loops.steps(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), inputs[part], labels[part])
            if does is checkpoints.save:
                does(state, checkpoint_id=directory / "checkpoint")
        dist.barrier()
        found.setdefault(log_dir, {}).update(published)
    names = sorted(path.name for path in (directory / "halves").glob("run*"))
    dist.barrier()
    if rank == 0:
        shutil.rmtree(directory)
    return found["whole"], found["halves"], names


def stored_by_torch(rank, size):
    return _resumed(lambda: DistributedDataParallel(network()), rank, size)


def shards_stored_by_torch(rank, size):
    return _resumed(lambda: fully_shard(network()), rank, size)


def pipeline(rank, size):
    """Each rank trains its own stage, and all publish the union."""
    model = network()
    stage = model.block if rank else model.first
    loss = nn.CrossEntropyLoss()
    made = [installed.NormSubscriber(kind, backend="null") for kind in ("weights", "activations", "layer_gradients")]
    from ikkuna.export import Exporter
    from ikkuna.export.messages import MessageBus

    bus, published = MessageBus("stage"), {}
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(("block" if rank else "first", stage))
        for subscriber in made:
            bus.register_subscriber(subscriber)
        names = [name for s in made for name in s.publishes]
        bus.register_subscriber(
            CallbackSubscriber(names, lambda m: published.update({(m.kind, m.series_name, m.global_step): m.data}))
        )
        optimizer = loops.sgd(stage)
        for _ in range(3):
            optimizer.zero_grad()
            stage(torch.ones(2, 8 if rank else 6)).square().sum().backward()
            optimizer.step()
    assert loss is not None
    return published


def evaluation_on_rank_0(rank, size):
    """As in many scripts, rank 0 alone tests the model."""
    model, loss = DistributedDataParallel(network()), nn.CrossEntropyLoss()
    made = [
        installed.NormSubscriber("weights", backend="null"),
        installed.NormSubscriber("activations", tag="testing", backend="null"),
    ]
    inputs, labels = local(*data(6), rank, size)
    with loops.watching(model, loss, made) as (exporter, published):
        optimizer = loops.sgd(model)
        for part in (slice(0, 3), slice(3, 6)):
            loops.steps(model, loss, optimizer, inputs[part], labels[part])
            if rank == 0:
                exporter.evaluate([held_out().tensors])
                exporter.epoch_finished()
        dist.barrier()
    return published


def validation_of_ranks(rank, size):
    """Validate in the training loop, each rank on its own data, and rank 0 once more; return what is published and expected."""
    model, loss = DistributedDataParallel(network()), nn.CrossEntropyLoss()
    made = [installed.TrainAccuracySubscriber(tag="validation", publishes="accuracy", backend="null")]
    inputs, labels = local(*data(6), rank, size)
    x, y = (tensor[rank::size] for tensor in held_out().tensors)
    expected = {}
    with loops.watching(model, loss, made) as (exporter, published):
        optimizer = loops.sgd(model)
        for part in (slice(0, 3), slice(3, 6)):
            loops.steps(model, loss, optimizer, inputs[part], labels[part])
            if rank == 0 or part.start == 0:
                model.eval()
                with torch.no_grad():
                    outputs = model.module(x)
                    loss(outputs, y)
                expected["accuracy", None, part.stop - 1] = float((outputs.argmax(1) == y).double().mean())
                model.train()
        exporter.close()
        dist.barrier()
    return published, expected


def two_exporters(rank, size):
    """Two exporters share a bus, and another one follows."""
    from ikkuna.export import Exporter
    from ikkuna.export.messages import MessageBus

    inputs, labels = local(*data(), rank, size)
    bus, published, loss = MessageBus("both"), {}, nn.CrossEntropyLoss()
    models = {name: DistributedDataParallel(network()) for name in ("a", "b")}
    exporters = [Exporter(message_bus=bus, on_error="raise") for _ in models]
    for exporter, (name, model) in zip(exporters, models.items(), strict=True):
        exporter.add_modules((name, model))
    bus.register_subscriber(installed.NormSubscriber("activations", backend="null"))
    bus.register_subscriber(
        CallbackSubscriber(
            "activations_norm2", lambda m: published.update({(m.kind, m.series_name, m.global_step): m.data})
        )
    )
    optimizers = [loops.sgd(model) for model in models.values()]
    for x, y in zip(inputs, labels, strict=True):
        for model, optimizer in zip(models.values(), optimizers, strict=True):
            loops.steps(model, loss, optimizer, x[None], y[None])
    for exporter in exporters:
        exporter.close()
    return published, loops.published_of(DistributedDataParallel(network()), inputs, labels)


def scaled_and_checkpointed(rank, size):
    """A gradient scaler that skips the second step, and a checkpoint."""

    class Checkpointed(loops.Network):
        def forward(self, x):
            x = self.relu(self.norm(self.first(x)))
            return self.last(x + checkpoint(self.block, x, use_reentrant=False))

    torch.manual_seed(1)
    model = Checkpointed()
    return _scaled(DistributedDataParallel(model) if size > 1 else model, *local(*data(4), rank, size))


def _scaled(model, inputs, labels):
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    steps = itertools.count()

    def train(model, loss, optimizer, inputs, labels):
        for x, y in zip(inputs, labels, strict=True):
            optimizer.zero_grad()
            value = scaler.scale(loss(model(x), y))
            (value * math.inf if next(steps) == 1 else value).backward()
            scaler.step(optimizer)
            scaler.update()

    return loops.published_of(model, inputs, labels, train=train)


def compiled(rank, size):
    model = torch.compile(DistributedDataParallel(network()), backend="aot_eager")
    return loops.published_of(model, *local(*data(), rank, size))


def found_loss(rank, size):
    """Train with a loss that no module computes; return the losses shown by this rank, and its own."""
    inputs, labels = local(*rows(), rank, size)
    model, own = DistributedDataParallel(small_model()), []
    shown = []
    keep = CallbackSubscriber("loss_mean", lambda message: shown.append(message.data), backend="null")
    with loops.watching(model, None, [installed.MeanSubscriber("loss", backend="null"), keep]):
        optimizer = loops.sgd(model)
        for x, y in zip(inputs, labels, strict=True):
            optimizer.zero_grad()
            parts = [torch.nn.functional.cross_entropy(model(x[i::2]), y[i::2]) / 2 for i in range(2)]
            for part in parts:
                part.backward()
            optimizer.step()
            own.append(sum(part.item() for part in parts))
    return shown, own


def judged_ranks(model, change=None, steps=8):
    """Train with the rule about ranks; return its findings, and its name if it judged."""
    inputs, labels = (x[:1].repeat(steps, *[1] * (x.ndim - 1)) for x in local(*data(), dist.get_rank(), 2))
    loss = nn.CrossEntropyLoss()
    exporter = Exporter(message_bus=MessageBus("ranks"), on_error="raise")
    exporter.add_modules(model)
    exporter.apply_rules(["ranks_differ"], every=1, backend="null")
    optimizer = loops.sgd(model)
    for step in range(steps):
        optimizer.zero_grad()
        loss(model(inputs[step]), labels[step]).backward()
        optimizer.step()
        if change is not None and step == 1:
            change()
    exporter.close()
    return [(f.rule, f.module, f.step) for f in exporter.findings], exporter.findings.judged


def ranks_that_part(rank, size):
    """The first weight of rank 1 is changed after the second step."""
    model = DistributedDataParallel(network())

    def change():
        if rank == 1:
            next(model.parameters()).data.mul_(1.01)

    return judged_ranks(model, change)


def ranks_that_agree(rank, size):
    return judged_ranks(DistributedDataParallel(network()))


def ranks_with_shards(rank, size):
    return judged_ranks(fully_shard(network()))


def recorded_ranks(rank, size):
    """Record each step; in the fifth the data of rank 1 contain a NaN.  Return the facts of the dump of this rank."""
    agreed = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(agreed)
    [directory] = agreed
    inputs, labels = (x[:1].repeat(6, *[1] * (x.ndim - 1)) for x in local(*data(), rank, size))
    if rank == 1:
        inputs[4].view(-1)[0] = math.nan
    model, loss = DistributedDataParallel(network()), nn.CrossEntropyLoss()
    made = [installed.LossSubscriber(backend="tb"), installed.NormSubscriber("weights", backend="tb")]
    with loops.watching(model, loss, made, log_dir=directory) as (exporter, _):
        exporter.apply_rules(["nonfinite"], every=1, backend="null")
        exporter.record_steps(RecorderOptions(every=1, record_batches=True, max_dumps=1))
        loops.steps(model, loss, loops.sgd(model), inputs, labels)
    dist.barrier()
    dump = read_dump(exporter.dumps[0])
    [[args, _]] = dump.tensors("batches.pt")[-1]["model_calls"]
    place = dump.path.relative_to(directory).parts[-2]
    found = place, (dump.facts["rank"], dump.facts["ranks"]), dump.steps.tolist(), int(args[0].isnan().sum())
    dist.barrier()
    if rank == 0:
        shutil.rmtree(directory)
    return found
