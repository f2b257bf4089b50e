"""The Trainer of transformers; the loss is computed inside the model."""

import os

import transformers
from task import EPOCHS, dataset, network
from torch import nn
from torch.nn import functional as F

from ikkuna.integrations.transformers import IkkunaCallback


class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, images, labels=None):
        logits = self.net(images)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


settings = {"per_device_train_batch_size": 32, "num_train_epochs": EPOCHS, "save_strategy": "epoch", "use_cpu": True}
arguments = transformers.TrainingArguments("saved", report_to=["tensorboard"], learning_rate=0.01, **settings)
items = [{"images": image, "labels": label} for image, label in dataset()]
monitor = IkkunaCallback(every=1, log_dir="run", backend=["tb", "jsonl"])
trainer = transformers.Trainer(Digits(), arguments, train_dataset=items, callbacks=[monitor])
trainer.train(resume_from_checkpoint=any(os.path.isdir(f"saved/checkpoint-{8 * epoch}") for epoch in range(1, 5)))
