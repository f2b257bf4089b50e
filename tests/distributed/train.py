"""A typical training script, for one process or for ``torchrun``, which divides the batches."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ikkuna.export import Exporter
from ikkuna.export.subscriber import LossSubscriber, NormSubscriber, TrainAccuracySubscriber
from ikkuna.metrics.messages.kinds import FORWARD_KINDS, PARAMETER_KINDS
from tests.distributed.loops import data, local, network


def main(log_dir):
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    model, loss = network(), nn.CrossEntropyLoss()
    if size > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Exporter(log_dir=log_dir) as exporter:
        exporter.add_modules(model)
        exporter.set_loss(loss)
        subscribers = [
            LossSubscriber(),
            TrainAccuracySubscriber(),
            *map(NormSubscriber, (*FORWARD_KINDS, *PARAMETER_KINDS)),
        ]
        for subscriber in subscribers:
            exporter.message_bus.register_subscriber(subscriber)
        for inputs, labels in zip(*local(*data(), rank, size), strict=True):
            optimizer.zero_grad()
            loss(model(inputs), labels).backward()
            optimizer.step()
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
