"""A plain loop that saves a checkpoint after each epoch; started again, it continues the same curves."""

import os

import torch
from task import EPOCHS, batches, network, sgd
from torch.nn import functional as F

import ikkuna

model = network()
optimizer = sgd(model)
exporter = ikkuna.watch(model, every=1, backend=["tb", "jsonl"], resume="auto")
saved = torch.load("checkpoint.pt") if os.path.exists("checkpoint.pt") else {"epoch": 0}
if saved["epoch"]:
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    exporter.load_state_dict(saved["monitor"])
for epoch in range(saved["epoch"], EPOCHS):
    for inputs, labels in batches():
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    exporter.epoch_finished()
    states = {"model": model, "optimizer": optimizer, "monitor": exporter}
    torch.save({"epoch": epoch + 1, **{name: each.state_dict() for name, each in states.items()}}, "new.pt")
    os.replace("new.pt", "checkpoint.pt")
exporter.close()
