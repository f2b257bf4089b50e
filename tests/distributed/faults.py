"""Failures of ranks.  The models are not wrapped, so that only ikkuna can make a rank wait for another."""

import os
import signal
import time
from datetime import timedelta
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ikkuna
from ikkuna.distributed import rendezvous
from ikkuna.distributed.rendezvous import World
from ikkuna.errors import LogDirError, StopTraining
from ikkuna.export import subscriber as installed
from ikkuna.export.subscriber import CallbackSubscriber, Subscriber
from ikkuna.observation import ranks
from tests.distributed import loops
from tests.distributed.loops import data, local, network
from tests.distributed.special import held_out

STEPS = 12


def norms():
    return [
        installed.NormSubscriber("weights", backend="null"),
        installed.NormSubscriber("activations", backend="null"),
    ]


def train(subscribers, before=lambda step: None, model=None, count=STEPS, before_close=lambda: None, **options):
    """Train this rank's own model; return the published values, the number of steps, and the health."""
    model, loss = model or network(), nn.CrossEntropyLoss()
    optimizer, made = loops.sgd(model), 0
    with loops.watching(model, loss, subscribers, **{"on_error": "disable", **options}) as (exporter, published):
        for step, (x, y) in enumerate(zip(*data(count), strict=True)):
            before(step)
            loops.steps(model, loss, optimizer, x[None], y[None])
            made += 1
        before_close()
        exporter.close()
    return {"published": published, "steps": made, "health": exporter.health()}


def patient(seconds):
    rendezvous.agree.__defaults__ = (seconds,)


def stopped(rank, size):
    """Rank 1 sees values only where it waits for them; return the rule that stops the training, and the number of steps."""
    model, loss, poll = (
        nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)),
        nn.CrossEntropyLoss(),
        ranks.Exchange.poll,
    )
    nn.init.constant_(model[0].bias, -100.0)
    if rank == 1:
        ranks.Exchange.poll = lambda *arguments: len(arguments) == 4 and poll(*arguments)
    monitor = ikkuna.watch(model, loss, rules=["dead_units"], stop="error", every=1, backend="null", recorder=False)
    try:
        loops.steps(model, loss, loops.sgd(model), *data(40))
    except StopTraining as stop:
        return stop.finding.rule, monitor.health().steps
    finally:
        ranks.Exchange.poll = poll
        monitor.close()


def attached_on_one_rank(rank, size):
    patient(1.0)
    calls, agree = [], rendezvous.agree
    rendezvous.agree = lambda *arguments: calls.append(1) or agree(*arguments)
    found = train(norms()) | {"calls": len(calls)} if rank == 0 else None
    rendezvous.agree = agree
    patient(rendezvous.PATIENCE)
    dist.barrier()
    return found


def attached_on_both_again(rank, size):
    """The next exporters of both ranks find each other, although one rank had another exporter before."""
    return train(norms(), before_close=dist.barrier)


def different_subscribers(rank, size):
    return train([*norms(), installed.MeanSubscriber("weights" if rank else "biases", backend="null")])


def different_arguments(rank, size):
    return train([installed.NormSubscriber("weights", p=3 + rank, publishes="norm", backend="null")])


def _train_ahead(rank, name, *made):
    """Train; rank 1 makes step 4 after rank 0 has made all steps, so a rank 0 that waited for it would never end."""
    store = World.here().store

    def before(step):
        if rank == 1 and step == 4:
            store.wait([name], timedelta(seconds=60))

    def before_close():
        if rank == 0:
            store.set(name, "")
        dist.barrier()

    return train([*norms(), *made], before, before_close=before_close)


def state_on_one_rank(rank, size):
    """Rank 1 does not load the state of the checkpoint."""

    class Resumed(loops.Exporter):
        def add_modules(self, *arguments):
            super().add_modules(*arguments)
            if rank == 0:
                self.load_state_dict({"global_step": 7, "train_step": 0, "epoch": 0})

    exporter, loops.Exporter = loops.Exporter, Resumed
    try:
        return train(norms())
    finally:
        loops.Exporter = exporter


def resumed_without_a_state(rank, size):
    """Rank 0 has a run, and the disk of rank 1 has none."""
    with TemporaryDirectory() as directory:
        options = {"log_dir": directory, "subscribers": [installed.NormSubscriber("weights", backend="jsonl")]}
        train(**options, count=3, before_close=dist.barrier)
        options["subscribers"] = [installed.NormSubscriber("weights", backend="jsonl")]
        return train(**options, count=2, before_close=dist.barrier, resume=True)["published"]


def nothing_to_resume(rank, size):
    with TemporaryDirectory() as directory:
        try:
            train([], log_dir=directory, resume=True)
        except LogDirError as error:
            return str(error)


def late(rank, size):
    """Rank 1 is late; rank 0 does not wait for it."""
    return _train_ahead(rank, "late")


def late_while_modules_are_read(rank, size):
    """As before, with subscribers that read the model's modules and optimizers, and do not run it."""
    classes = installed.BufferReplicaSubscriber, installed.ModuleStateSubscriber, installed.WeightDecaySubscriber
    return _train_ahead(rank, "late while modules are read", *(made(backend="null") for made in classes))


def far_behind(rank, size):
    """Rank 1 pauses while rank 0 makes more steps than may wait."""
    ranks.WAITING = 5
    try:
        return _train_ahead(rank, "far behind")
    finally:
        ranks.WAITING = 64


def closed_early(rank, size):
    """Rank 1 makes fewer steps and leaves."""
    found = train(norms(), count=STEPS - 4 * rank)
    dist.barrier()
    return found


def silent_at_the_end(rank, size):
    """Rank 1 makes fewer steps and sends nothing, but does not close."""
    return train(norms(), count=STEPS - 4 * rank, before_close=dist.barrier if rank else lambda: None) | _met(rank)


def _met(rank):
    if rank == 0:
        dist.barrier()  # the other one closes now
    return {}


def attached_on_one_rank_of_shards(rank, size):
    """Any collective of ikkuna would hang: a test of the model, the gathering of a matrix, a partial sum."""
    patient(1.0)
    model, loss = fully_shard(network()), nn.CrossEntropyLoss()
    inputs, labels = local(*data(), rank, size)
    made = [
        installed.TestAccuracySubscriber(held_out(), every=1, backend="null"),
        installed.SpectralNormSubscriber("weights", gather=True, backend="null"),
        installed.NormSubscriber("weights", backend="null"),
    ]
    optimizer, found = loops.sgd(model), None
    if rank == 0:
        with loops.watching(model, loss, made, on_error="disable") as (exporter, found):
            loops.steps(model, loss, optimizer, inputs, labels)
            health = exporter.health()
        found = found, health.disabled
    else:
        loops.steps(model, loss, optimizer, inputs, labels)
    patient(rendezvous.PATIENCE)
    return found


class Agreeing(Subscriber):
    """Calls the other ranks in compute, which ``needs_model`` permits."""

    fields = ("sumsq",)
    needs_model = True

    def compute(self, message):
        total = torch.tensor(message.record.l2_norm)
        dist.all_reduce(total)
        self.emit(message, total.item())


def own_collective(rank, size):
    inputs, labels = local(*data(), rank, size)
    made = [Agreeing("weights", publishes="agreed", backend="null"), *norms()]
    torch.manual_seed(0)
    watched = DistributedDataParallel(network())
    published = loops.published_of(watched, inputs, labels, made)
    plain = DistributedDataParallel(network())
    loops.steps(plain, nn.CrossEntropyLoss(), loops.sgd(plain), inputs, labels)
    return published, loops.fingerprint(*watched.parameters()) == loops.fingerprint(*plain.parameters())


def failing_subscriber(rank, size):
    """A subscriber that fails on one rank only."""

    def fail(message):
        if rank == 1:
            raise ValueError("on purpose")

    return train([*norms(), CallbackSubscriber("activations", fail)], before_close=dist.barrier)


def group_destroyed(rank, size):
    """The default group is destroyed before close(); this runs last."""

    def destroy():
        dist.barrier()
        dist.destroy_process_group()

    return train(norms(), before_close=destroy)


def _killed(rank, victim):
    def before(step):
        if rank == victim and step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)

    return train(norms(), before)


def killed_last(rank, size):
    return _killed(rank, size - 1)


def killed_first(rank, size):
    return _killed(rank, 0)
