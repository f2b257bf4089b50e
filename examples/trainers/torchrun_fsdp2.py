"""FSDP2 with ``torchrun``: the ranks save one checkpoint together, and each rank the state of its exporter."""

import glob

import torch
import torch.distributed as dist
from task import EPOCHS, batches, network, sgd
from torch.distributed import checkpoint, fsdp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import ikkuna

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
optimizer = sgd(model := fsdp.fully_shard(network()))
finished = len(glob.glob("saved*/.metadata"))  # the file that is written last
states = dict(zip(("model_state_dict", "optim_state_dict"), get_state_dict(model, optimizer), strict=True))
with ikkuna.watch(model, every=1, backend=["tb", "jsonl"], resume="auto") as exporter:
    if finished:
        checkpoint.load(states, checkpoint_id=f"saved{finished}")
        set_state_dict(model, optimizer, **states)
        exporter.load_state_dict(torch.load(f"monitor{finished}_{rank}.pt"))
    for epoch in range(finished + 1, EPOCHS + 1):
        for inputs, labels in exporter.epoch(batches()):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs[rank::size]), labels[rank::size]).backward()
            optimizer.step()
        torch.save(exporter.state_dict(), f"monitor{epoch}_{rank}.pt")
        checkpoint.save(dict(zip(states, get_state_dict(model, optimizer), strict=True)), checkpoint_id=f"saved{epoch}")
dist.destroy_process_group()
