"""Healthy programs: supervised learning on tables, images, sequences and graphs."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from tests.diagnosis.unseen import healthy
from tests.diagnosis.unseen.loops import evaluating, steps
from tests.diagnosis.unseen.other_models import low_rank, nodes, pretrained
from tests.diagnosis.unseen.programs import (
    Classifier,
    RecurrentClassifier,
    Transformer,
    blobs,
    classifier,
    convolutional,
    image_classifier,
    images,
    language_model,
    loader,
    many_labels,
    masks,
    mlp,
    program,
    recurrent,
    regressor,
    segmentation,
    signals,
    text,
)
from tests.diagnosis.unseen.supervised import dice, two_channels

# --- tables and regression --------------------------------------------------------------------------------------------


@healthy("tables")
def tables():
    return classifier()


@healthy("tables")
def tables_with_sgd():
    return classifier(rate=0.1, kind=torch.optim.SGD)


@healthy("tables")
def two_classes_of_binary_columns():
    inputs = (torch.rand(768, 16) < 0.4).float()
    labels = (inputs @ torch.randn(16) > 0).long()
    return classifier(mlp(16, 2), loader(inputs, labels))


@healthy("tables")
def one_logit_for_two_classes():
    inputs, labels = blobs(classes=2)
    return classifier(mlp(20, 1), loader(inputs, labels[:, None].float()), loss=nn.BCEWithLogitsLoss())


@healthy("tables")
def rare_class_with_inverse_weights():
    inputs, labels = blobs(classes=3)
    keep = (labels == 0) | (torch.rand(len(labels)) < 0.15)
    counts = labels[keep].bincount(minlength=3).float()
    loss = nn.CrossEntropyLoss(weight=counts.sum() / counts / 3)
    return classifier(mlp(20, 3), loader(inputs[keep], labels[keep], batch=16), loss=loss, epochs=6)


@healthy("regression")
def ordinary_regression():
    return regressor()


@healthy("regression")
def robust_regression():
    return regressor(loss=nn.SmoothL1Loss())


@healthy("regression")
def absolute_error_with_a_wide_net():
    return regressor(mlp(12, 1, 96, nn.SiLU), loss=nn.L1Loss())


@healthy("Poisson")
def counts_with_a_poisson_loss():
    inputs = torch.randn(768, 12)
    rates = (inputs @ torch.randn(12, 1) / 4 + 0.5).exp()
    return regressor(data=loader(inputs, torch.poisson(rates)), loss=nn.PoissonNLLLoss())


@healthy("Poisson")
def gaussian_likelihood_with_a_variance():
    def loss(outputs, targets):
        return F.gaussian_nll_loss(outputs[:, :1], targets, F.softplus(outputs[:, 1:]) + 1e-3)

    return regressor(mlp(12, 2), loss=loss)


@healthy("many labels")
def several_labels():
    return classifier(mlp(20, 6), loader(*many_labels()), loss=nn.BCEWithLogitsLoss())


@healthy("many labels")
def several_labels_weighted():
    inputs, labels = many_labels()
    loss = nn.BCEWithLogitsLoss(pos_weight=(1 - labels).sum(0) / labels.sum(0))
    return classifier(mlp(20, 6), loader(inputs, labels), loss=loss)


@healthy("smoothing")
def label_smoothing():
    return classifier(loss=nn.CrossEntropyLoss(label_smoothing=0.1))


@healthy("smoothing")
def distillation_with_soft_labels():
    inputs, _ = blobs()
    teacher = pretrained(200)
    with torch.no_grad():
        soft = (3 * teacher(inputs)).softmax(1)
    return classifier(data=loader(inputs, soft))


@healthy("mixup")
def mixed_up_rows():
    def collate(rows):
        inputs = torch.stack([x for x, _ in rows])
        labels = F.one_hot(torch.stack([y for _, y in rows]), 5).float()
        share = float(torch.distributions.Beta(0.4, 0.4).sample())
        order = torch.randperm(len(inputs))
        return share * inputs + (1 - share) * inputs[order], share * labels + (1 - share) * labels[order]

    return classifier(data=loader(*blobs(), collate_fn=collate))


@healthy("dropout")
def heavy_dropout():
    model = nn.Sequential(nn.Dropout(0.2), nn.Linear(20, 96), nn.ReLU(), nn.Dropout(0.5), nn.Linear(96, 5))
    inputs, labels = blobs(1024)
    validation = loader(inputs[768:], labels[768:], shuffle=False)
    return classifier(model, loader(inputs[:768], labels[:768]), loop=evaluating(validation=validation))


@healthy("dropout")
def stochastic_depth():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = nn.Linear(20, 32), nn.Linear(32, 5)
            self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

        def forward(self, x):
            x = self.first(x).relu()
            for block in self.blocks:
                if not self.training or torch.rand(()) < 0.8:
                    x = x + block(x).relu() * (1.25 if self.training else 1.0)
            return self.head(x)

    return classifier(Deep())


# --- images and segmentation ------------------------------------------------------------------------------------------


@healthy("images")
def small_images():
    return image_classifier()


@healthy("images")
def images_with_validation():
    pixels, labels = images(768)
    loop = evaluating(validation=loader(pixels[512:], labels[512:], shuffle=False))
    return image_classifier(data=loader(pixels[:512], labels[:512]), loop=loop)


@healthy("images")
def images_between_zero_and_one():
    pixels, labels = images()
    return image_classifier(data=loader((pixels / 4 + 0.5).clamp(0, 1), labels), rate=0.05, kind=torch.optim.SGD)


@healthy("batch of one")
def one_row_a_step():
    return classifier(data=loader(*blobs(250), batch=1), rate=1e-3, epochs=1)


@healthy("batch of one")
def one_image_a_step_with_group_norm():
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(800, 4))
    return image_classifier(model, loader(*images(240), batch=1), rate=1e-3, epochs=1)


@healthy("segmentation")
def masks_with_a_binary_loss():
    return segmentation()


@healthy("segmentation")
def masks_with_dice():
    return segmentation(loss=lambda o, m: dice(o.sigmoid(), m) + F.binary_cross_entropy_with_logits(o, m))


@healthy("segmentation")
def masks_with_an_ignored_border():
    pixels, mask = masks()
    labels = mask[:, 0].long()
    labels[:, :2] = labels[:, -2:] = 255
    return segmentation(two_channels(), loader(pixels, labels, batch=16), loss=nn.CrossEntropyLoss(ignore_index=255))


@healthy("layer scale")
def scaled_residual_branches():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = nn.Linear(20, 32), nn.Linear(32, 5)
            self.branches = nn.ModuleList(
                nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()) for _ in range(3)
            )
            self.scales = nn.ParameterList(nn.Parameter(torch.full((32,), 1e-5)) for _ in range(3))

        def forward(self, x):
            x = self.first(x)
            for branch, scale in zip(self.branches, self.scales, strict=True):
                x = x + scale * branch(x)
            return self.head(x)

    return classifier(Scaled())


@healthy("layer scale")
def last_norm_of_a_branch_at_zero():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.features, self.head = convolutional(), nn.Linear(144, 4)
            self.branch = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16))
            nn.init.zeros_(self.branch[1].weight)

        def forward(self, x):
            x = self.features(x)
            return self.head((x + self.branch(x)).relu().flatten(1))

    return image_classifier(Residual())


# --- sequences --------------------------------------------------------------------------------------------------------


@healthy("language models")
def small_language_model():
    return language_model()


@healthy("language models")
def padded_language_model():
    tokens = text()
    lengths = torch.randint(6, 17, (len(tokens), 1))
    tokens[torch.arange(tokens.shape[1])[None] >= lengths] = 0

    def loss(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0)

    return language_model(data=loader(tokens[:, :-1], tokens[:, 1:], batch=24), loss=loss)


@healthy("weight tying")
def tied_embedding_and_head():
    model = Transformer()
    nn.init.normal_(model.embedding.weight, std=0.1)
    model.head.weight = model.embedding.weight
    return language_model(model)


@healthy("masked language models")
def words_behind_masks():
    tokens = text()[:, :-1]
    hidden = torch.rand(tokens.shape) < 0.2
    data = loader(tokens.masked_fill(hidden, 0), tokens.masked_fill(~hidden, -100), batch=24)
    return language_model(Transformer(causal=False), data)


@healthy("recurrent networks")
def waves_with_a_gru():
    return recurrent()


@healthy("recurrent networks")
def waves_with_an_lstm_and_clipping():
    def loop(program):
        for _, inputs, labels in steps(program):
            program.optimizer.zero_grad()
            program.loss(program.model(inputs), labels).backward()
            nn.utils.clip_grad_norm_(program.model.parameters(), 1.0)
            program.optimizer.step()

    return recurrent(RecurrentClassifier(kind=nn.LSTM), loop=loop)


@healthy("recurrent networks")
def packed_rows_of_various_lengths():
    class Packed(RecurrentClassifier):
        def forward(self, batch):
            waves, lengths = batch[:, 1:], batch[:, 0, 0].long()
            packed = nn.utils.rnn.pack_padded_sequence(waves, lengths, batch_first=True, enforce_sorted=False)
            return self.head(self.rnn(packed)[1][0])

    waves, labels = signals(length=16)
    lengths = torch.randint(8, 17, (len(waves),))
    waves[torch.arange(16)[None] >= lengths[:, None]] = 0
    first = lengths.float()[:, None, None].expand(-1, 1, 3)
    return recurrent(Packed(), loader(torch.cat([first, waves], 1), labels))


@healthy("curriculum")
def easy_rows_first():
    inputs, labels = blobs()
    order = pretrained(1)(inputs).gather(1, labels[:, None])[:, 0].argsort(descending=True)

    def loop(program):
        for epoch in range(8):
            rows = order[: 192 + 96 * epoch]
            for part in rows[torch.randperm(len(rows))].split(32):
                program.optimizer.zero_grad()
                program.loss(program.model(inputs[part]), labels[part]).backward()
                program.optimizer.step()

    return classifier(loop=loop)


@healthy("curriculum")
def longer_sequences_later():
    tokens = text()

    def loop(program):
        for epoch in range(8):
            for rows in torch.randperm(len(tokens)).split(24):
                part = tokens[rows, : 6 + epoch]
                program.optimizer.zero_grad()
                program.loss(program.model(part[:, :-1]), part[:, 1:]).backward()
                program.optimizer.step()

    return language_model(loop=loop)


# --- graphs and fine-tuning -------------------------------------------------------------------------------------------


@healthy("graphs")
def graph_with_all_nodes_in_a_batch():
    return nodes()


@healthy("graphs")
def graph_of_three_layers():
    return nodes(layers=3, rate=5e-3)


@healthy("fine-tuning")
def pretrained_network():
    return classifier(pretrained(100), rate=3e-4)


@healthy("fine-tuning")
def frozen_backbone_with_a_new_head():
    model = Classifier()
    model.features.requires_grad_(False)
    program_ = program(model, nn.CrossEntropyLoss(), loader(*images()), 3e-3)

    def loop(program):
        program.model.features.eval()
        for _, inputs, labels in steps(program):
            program.optimizer.zero_grad()
            program.loss(program.model(inputs), labels).backward()
            program.optimizer.step()

    program_.loop = loop
    return program_


@healthy("fine-tuning")
def low_rank_corrections():
    return classifier(low_rank())


@healthy("fine-tuning")
def lower_rates_for_lower_layers():
    model = pretrained()
    program_ = classifier(model)
    groups = [{"params": model[index].parameters(), "lr": rate} for index, rate in ((0, 1e-4), (2, 3e-4), (4, 3e-3))]
    program_.optimizer = torch.optim.AdamW(groups)
    return program_


@healthy("fine-tuning")
def unfrozen_after_some_epochs():
    model = pretrained()
    model[0].requires_grad_(False)

    def loop(program):
        for number, inputs, labels in steps(program):
            if number == 96:
                program.model[0].requires_grad_(True)
                program.optimizer.add_param_group({"params": program.model[0].parameters(), "lr": 1e-4})
            program.optimizer.zero_grad()
            program.loss(program.model(inputs), labels).backward()
            program.optimizer.step()

    program_ = classifier(model, loop=loop)
    program_.optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    return program_


# --- schedules --------------------------------------------------------------------------------------------------------


@healthy("cyclic rates")
def one_cycle():
    program_ = classifier()
    program_.schedulers = [lr_scheduler.OneCycleLR(program_.optimizer, max_lr=1e-2, total_steps=200)]
    return program_


@healthy("cyclic rates")
def warm_restarts():
    program_ = classifier()
    program_.schedulers = [lr_scheduler.CosineAnnealingWarmRestarts(program_.optimizer, T_0=48)]
    return program_


@healthy("cyclic rates")
def triangular_rates_with_momentum():
    program_ = classifier(rate=0.02, kind=lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9))
    program_.schedulers = [lr_scheduler.CyclicLR(program_.optimizer, 0.005, 0.05, step_size_up=30)]
    return program_


@healthy("cyclic rates")
def warm_up_and_cosine():
    program_ = image_classifier()
    warm_up = lr_scheduler.LinearLR(program_.optimizer, 0.01, total_iters=20)
    cosine = lr_scheduler.CosineAnnealingLR(program_.optimizer, T_max=108)
    program_.schedulers = [lr_scheduler.SequentialLR(program_.optimizer, [warm_up, cosine], milestones=[20])]
    return program_


@healthy("averages")
def averaged_weights_swapped_for_validation():
    inputs, labels = blobs(1024)
    data, validation = loader(inputs[:768], labels[:768]), loader(inputs[768:], labels[768:], shuffle=False)

    def loop(program):
        average = copy.deepcopy(program.model)
        for _ in range(8):
            for x, y in program.loader:
                program.optimizer.zero_grad()
                program.loss(program.model(x), y).backward()
                program.optimizer.step()
                with torch.no_grad():
                    for mean, p in zip(average.parameters(), program.model.parameters(), strict=True):
                        mean.lerp_(p, 0.05)
            kept = copy.deepcopy(program.model.state_dict())
            program.model.load_state_dict(average.state_dict())
            program.model.eval()
            with torch.no_grad():
                for x, y in validation:
                    program.loss(program.model(x), y)
            program.model.load_state_dict(kept)
            program.model.train()

    return classifier(data=data, loop=loop)


@healthy("averages")
def stochastic_weight_averaging():
    def loop(program):
        average = torch.optim.swa_utils.AveragedModel(program.model)
        for number, inputs, labels in steps(program):
            program.optimizer.zero_grad()
            program.loss(program.model(inputs), labels).backward()
            program.optimizer.step()
            if number > 100:
                average.update_parameters(program.model)

    return classifier(loop=loop)
