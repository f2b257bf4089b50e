"""A SummaryWriter of your own, and a function: backends without any plugin."""

from task import EPOCHS, batches, network, sgd
from tensorboardX import SummaryWriter
from torch.nn import functional as F

import ikkuna


def print_loss(tag, value, step):
    if tag == "Network/loss" and step % 8 == 0:
        print(f"step {step}: loss {value:.3f}")


model, writer = network(), SummaryWriter("my_run")
optimizer = sgd(model)
with ikkuna.watch(model, every=1, backend=[writer, print_loss, "jsonl"]) as exporter:
    for _ in range(EPOCHS):
        for inputs, labels in batches():
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        exporter.epoch_finished()
writer.close()
