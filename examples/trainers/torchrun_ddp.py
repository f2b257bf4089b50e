"""DDP with ``torchrun``: every rank asks for the state of its exporter, and rank 0 saves it with the model."""

import os

import torch
import torch.distributed as dist
from task import EPOCHS, batches, network, sgd
from torch import nn

import ikkuna

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
model = nn.parallel.DistributedDataParallel(network())
optimizer = sgd(model)
saved = torch.load("checkpoint.pt") if os.path.exists("checkpoint.pt") else {"epoch": 0}
with ikkuna.watch(model, every=1, backend=["tb", "jsonl"], resume="auto") as exporter:
    objects = {"model": model, "optimizer": optimizer, "monitor": exporter}
    for name in objects.keys() & saved.keys():
        objects[name].load_state_dict(saved[name])
    for epoch in range(saved["epoch"], EPOCHS):
        for inputs, labels in exporter.epoch(batches()):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[rank::size]), labels[rank::size]).backward()
            optimizer.step()
        states = {"epoch": epoch + 1, **{name: each.state_dict() for name, each in objects.items()}}
        if rank == 0:
            torch.save(states, "new.pt")
            os.replace("new.pt", "checkpoint.pt")
dist.destroy_process_group()
