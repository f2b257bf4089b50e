"""skorch, trained epoch by epoch."""

import os

import torch
from skorch import NeuralNetClassifier
from task import EPOCHS, dataset, network
from torch import nn

import ikkuna

settings = {"lr": 0.1, "optimizer__momentum": 0.9, "batch_size": 32, "max_epochs": 1, "train_split": None}
net = NeuralNetClassifier(network, criterion=nn.CrossEntropyLoss, verbose=0, **settings).initialize()
exporter = ikkuna.watch(net.module_, loss=net.criterion_, every=1, backend=["tb", "jsonl"], resume="auto")
states = {"model": net.module_, "optimizer": net.optimizer_, "monitor": exporter}
saved = torch.load("checkpoint.pt") if os.path.exists("checkpoint.pt") else {"epoch": 0}
if saved["epoch"]:
    for name, each in states.items():
        each.load_state_dict(saved[name])
images, labels = dataset().tensors
for epoch in range(saved["epoch"], EPOCHS):
    net.partial_fit(images, labels)
    exporter.epoch_finished()
    torch.save({"epoch": epoch + 1, **{name: each.state_dict() for name, each in states.items()}}, "new.pt")
    os.replace("new.pt", "checkpoint.pt")
exporter.close()
