"""Accelerate, which stores the state of the exporter in its checkpoints."""

import glob

import accelerate
from task import EPOCHS, batches, network, sgd
from torch.nn import functional as F

import ikkuna

accelerator = accelerate.Accelerator(cpu=True)
model = network()
model, optimizer, data = accelerator.prepare(model, sgd(model), batches())
exporter = ikkuna.watch(model, every=1, backend=["tb", "jsonl"], resume="auto")
accelerator.register_for_checkpointing(exporter)
finished = len(glob.glob("saved/epoch*/custom_checkpoint_0.pkl"))
if finished:
    accelerator.load_state(f"saved/epoch{finished}")
for epoch in range(finished, EPOCHS):
    for inputs, labels in data:
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(inputs), labels))
        optimizer.step()
    exporter.epoch_finished()
    accelerator.save_state(f"saved/epoch{epoch + 1}")
exporter.close()
