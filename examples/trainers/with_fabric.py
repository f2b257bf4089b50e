"""Fabric, which saves and loads the exporter with the model."""

import os

import lightning
from task import EPOCHS, batches, network, sgd
from torch.nn import functional as F

import ikkuna

fabric = lightning.Fabric(accelerator="cpu", devices=1)
model = network()
model, optimizer = fabric.setup(model, sgd(model))
exporter = ikkuna.watch(model, every=1, backend=["tb", "jsonl"], resume="auto")
state = {"model": model, "optimizer": optimizer, "monitor": exporter, "epoch": 0}
if os.path.exists("digits.ckpt"):
    fabric.load("digits.ckpt", state)
for epoch in range(state["epoch"], EPOCHS):
    for inputs, labels in fabric.setup_dataloaders(batches()):
        optimizer.zero_grad()
        fabric.backward(F.cross_entropy(model(inputs), labels))
        optimizer.step()
    exporter.epoch_finished()
    fabric.save("new.ckpt", {**state, "epoch": epoch + 1})
    os.replace("new.ckpt", "digits.ckpt")
exporter.close()
