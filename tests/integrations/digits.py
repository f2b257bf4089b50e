"""One small training in the loops of several trainers: the same data, seed, accumulation and clipping."""

import logging
from functools import cache

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import ikkuna
from ikkuna.export.subscriber import (
    DistanceFromInitSubscriber,
    LearningRateSubscriber,
    LossSubscriber,
    NormSubscriber,
    RatioSubscriber,
)
from ikkuna.store.json_lines import read

ACCUMULATION, CLIP, RATE, EPOCHS, VALIDATIONS = 2, 0.1, 0.05, 2, 4


def dataset():
    inputs = torch.randn(48, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def batches():
    return DataLoader(dataset(), 8)


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))


def subscribers():
    kinds = ("weights", "weight_gradients", "weight_updates", "activations", "layer_gradients", "loss")
    return [
        *(NormSubscriber(kind) for kind in kinds[:5]),
        NormSubscriber("activations", tag="testing"),
        RatioSubscriber(["weight_updates", "weights"], subsample=3),
        DistanceFromInitSubscriber(),
        LearningRateSubscriber(),
        LossSubscriber(),
    ]


def plain(log_dir, epochs=EPOCHS):
    """Train in a plain loop; return the directory of the run and the model."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    with ikkuna.watch(model, *subscribers(), log_dir=log_dir, backend="jsonl", rules=None) as exporter:
        for _ in range(epochs):
            for number, (inputs, labels) in enumerate(batches(), 1):
                (F.cross_entropy(model(inputs), labels) / ACCUMULATION).backward()
                if number % ACCUMULATION == 0:
                    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                    optimizer.step()
                    optimizer.zero_grad()
            exporter.evaluate(batches())
            exporter.epoch_finished()
        directory = exporter.message_bus.run.directory
    return directory, model


@cache
def lightning_module():
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self, rate=RATE):
            super().__init__()
            self.save_hyperparameters()
            self.net = network()

        def training_step(self, batch, index):
            return {"loss": F.cross_entropy(self.net(batch[0]), batch[1])}

        def validation_step(self, batch, index):
            self.net(batch[0])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.hparams.rate, momentum=0.9)

    return Module


def lightning_trainer(directory, *callbacks, epochs=EPOCHS, **options):
    import lightning

    lightning_module()
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(
        **{"logger": False, **quiet, **options},
        default_root_dir=directory,
        max_epochs=epochs,
        accelerator="cpu",
        callbacks=list(callbacks),
        accumulate_grad_batches=ACCUMULATION,
        gradient_clip_val=CLIP,
        log_every_n_steps=1,
    )


class Classifier(nn.Module):
    """A model that computes its own loss, as those of transformers."""

    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, inputs, labels=None):
        outputs = self.net(inputs)
        return {"loss": F.cross_entropy(outputs, labels), "logits": outputs}


def transformers_trainer(directory, *callbacks, epochs=EPOCHS, **options):
    import transformers

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self):  # in a fixed order
            return self.accelerator.prepare(DataLoader(self.train_dataset, 8, collate_fn=self.data_collator))

    defaults = {"eval_strategy": "epoch", "save_strategy": "no", "logging_strategy": "no", "report_to": []}
    arguments = transformers.TrainingArguments(
        str(directory),
        **{**defaults, **options},
        num_train_epochs=epochs,
        per_device_eval_batch_size=8,
        gradient_accumulation_steps=ACCUMULATION,
        max_grad_norm=CLIP,
        lr_scheduler_type="constant",
        learning_rate=RATE,
        use_cpu=True,
        disable_tqdm=True,
    )
    model = Classifier()
    items = [{"inputs": inputs, "labels": labels} for inputs, labels in dataset()]
    return Trainer(
        model,
        arguments,
        train_dataset=items,
        eval_dataset=items,
        callbacks=list(callbacks),
        optimizers=(torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9), None),
    )


def points(directory, prefix=""):
    """Return the values of a run in double precision, of each series and step; names without a prefix."""
    keys = ("kind", "pass", "step")
    return {
        ((entry["module"] or "").removeprefix(prefix), *(entry[key] for key in keys)): entry["value"]
        for entry in read(directory)
        if "value" in entry
    }
