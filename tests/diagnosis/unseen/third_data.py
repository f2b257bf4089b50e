"""Programs of the third set: what reaches the network, i.e. rows, labels, their order and their preparation."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

from tests.diagnosis.unseen import fault, healthy
from tests.diagnosis.unseen.programs import Program, blobs, classifier, loader, mlp, regressor


def table(rows=768, columns=10):
    """Standardised columns and a target that is a smooth function of four of them."""
    inputs = torch.randn(rows, columns)
    targets = inputs[:, :1] * inputs[:, 1:2] + inputs[:, 2:3].sin() + 0.5 * inputs[:, 3:4]
    return inputs, targets + 0.05 * torch.randn(rows, 1)


def glyphs(rows=768):
    """Images of one of four bright 8x8 patterns with noise, values from 0 to 1, flattened."""
    patterns = (torch.rand(4, 64) > 0.6).float()
    labels = torch.randint(0, 4, (rows,))
    return (0.7 * patterns[labels] + 0.3 * torch.rand(rows, 64)).clamp(0, 1), labels


# --- rows and labels that do not belong together ----------------------------------------------------------------------


class Pairs:
    """Two loaders that are walked side by side."""

    def __init__(self, *loaders):
        self.loaders = loaders

    def __iter__(self):
        return zip(*self.loaders, strict=True)

    def __len__(self):
        return len(self.loaders[0])


@fault(
    "labels",
    "inputs and labels come from two loaders that shuffle each by itself, so that no row meets its own label",
    why="the same row comes with another label in every epoch, and the loss stays at the entropy of the labels",
)
def two_loaders_that_shuffle_apart():
    inputs, labels = blobs()
    pairs = Pairs(
        DataLoader(inputs, batch_size=32, shuffle=True),
        DataLoader(labels, batch_size=32, shuffle=True),
    )
    return classifier(mlp(20, 5), pairs, epochs=5)


@fault(
    "labels",
    "the files were listed as text (0, 1, 10, 100, ...) and the labels by number, so that they are paired wrongly",
    knowable=False,
    why="each row keeps one wrong label in all epochs; a run looks as if the labels had no relation to the inputs",
)
def files_in_the_order_of_text():
    inputs, labels = blobs()
    order = sorted(range(len(inputs)), key=str)
    return classifier(mlp(20, 5), loader(inputs[order], labels), epochs=5)


@fault(
    "labels",
    "the labels count from 1, and a clamp that silenced the error of the index merges the two last classes",
    why="one output is never a target, while the last class is twice as frequent as any other",
)
def labels_from_one_clamped():
    inputs, labels = blobs()
    return classifier(mlp(20, 5), loader(inputs, (labels + 1).clamp(max=4)), epochs=5)


@fault(
    "labels",
    "rows that nobody had labelled yet were filled with class 0",
    knowable=False,
    why="the classes are unequally frequent, which is so in much sound data; nothing tells a filled label from a true one",
)
def unlabelled_rows_are_class_zero():
    inputs, labels = blobs()
    labels = torch.where(torch.rand(len(labels)) < 0.5, torch.zeros_like(labels), labels)
    return classifier(mlp(20, 5), loader(inputs, labels), epochs=5)


@fault(
    "labels",
    "one row in a hundred is of the class that matters, and neither the loss nor the sampling makes up for it",
    why="nearly all targets of the run are of one class, and the network predicts this class for every row",
)
def one_in_a_hundred():
    inputs = torch.randn(768, 12)
    labels = (inputs[:, 0] + 0.8 * torch.randn(768) > 2.95).long()
    return classifier(mlp(12, 2), loader(inputs, labels), epochs=5, rate=1e-3)


# --- values of the inputs ---------------------------------------------------------------------------------------------


@fault(
    "preprocessing",
    "the pixels go into the network as bytes from 0 to 255, without division",
    why="the inputs are whole numbers to 255, and the first outputs and losses are larger than usual by this factor",
)
def pixels_as_bytes():
    inputs, labels = glyphs()
    model, data = mlp(64, 4), loader((inputs * 255).round(), labels)
    return Program(model, nn.CrossEntropyLoss(), data, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), 5)


@fault(
    "preprocessing",
    "a missing value in the table was written as -999, and nobody replaced it",
    why="in some columns one and the same value of -999 returns, hundreds of standard deviations from the rest",
)
def missing_is_minus_999():
    inputs, targets = table()
    inputs[torch.rand_like(inputs) < 0.03] = -999.0
    return regressor(mlp(10, 1), loader(inputs, targets), epochs=5)


@fault(
    "preprocessing",
    "mean and standard deviation were taken over each row instead of each column, which removes the level of the row",
    knowable=False,
    why="rows of mean 0 and variance 1 are wanted in other tasks; that the level had the answer is no longer in the data",
)
def standardised_along_the_wrong_axis():
    inputs = torch.randn(768, 10) + 2 * torch.randn(768, 1)
    targets = inputs.mean(1, keepdim=True)
    inputs = (inputs - inputs.mean(1, keepdim=True)) / inputs.std(1, keepdim=True)
    return regressor(mlp(10, 1), loader(inputs, targets), epochs=5)


@fault(
    "preprocessing",
    "the target is among the columns of the input, since the table was not cut before it was standardised",
    why="one column of every batch is equal to the target up to a factor and a shift, and the loss goes to zero",
)
def target_among_the_columns():
    inputs, targets = table()
    inputs[:, 6] = ((targets - targets.mean()) / targets.std()).squeeze(1)
    return regressor(mlp(10, 1), loader(inputs, targets), epochs=5)


@fault(
    "preprocessing",
    "the prices are predicted in units of money, hundreds of thousands, by a network whose outputs begin near 0",
    why="the targets are of the order of 3e5 and the outputs of 0.1; at this rate of Adam they never come near",
)
def prices_in_units_of_money():
    inputs, targets = table()
    return regressor(mlp(10, 1), loader(inputs, 3e5 + 8e4 * targets), epochs=5, rate=1e-3)


# --- order of the rows ------------------------------------------------------------------------------------------------


@fault(
    "order of data",
    "the rows are sorted by class and the loader does not shuffle",
    why="all rows of a batch have one label; the loss of each batch falls until the next class comes, then it jumps",
)
def one_class_after_another():
    inputs, labels = blobs()
    order = labels.argsort()
    return classifier(mlp(20, 5), loader(inputs[order], labels[order], shuffle=False), epochs=5)


class Overwritten(Dataset):
    """Rows that are read into one buffer, which is returned without a copy."""

    def __init__(self, inputs, labels, copies):
        self.inputs, self.labels, self.copies = inputs, labels, copies
        self.buffer = torch.empty(inputs.shape[1])

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        self.buffer.copy_(self.inputs[index])
        return self.buffer.clone() if self.copies else self.buffer, self.labels[index]


@fault(
    "order of data",
    "the data set reads each row into one buffer and returns this buffer, so that a batch has the last row 32 times",
    why="all rows of each batch are equal, while their labels differ",
)
def a_buffer_that_is_written_again():
    return classifier(mlp(20, 5), DataLoader(Overwritten(*blobs(), copies=False), 32, shuffle=True), epochs=5)


@fault(
    "leaks",
    "the rows that measure the accuracy were drawn from the training rows, with the seed of the split forgotten",
    why="each row of the batches without gradients occurs in the batches with gradients as well",
)
def measured_on_rows_it_learned():
    inputs, labels = blobs(512)
    held = torch.randperm(512)[:96]

    def loop(program):
        for _ in range(program.epochs):
            for rows, goals in program.loader:
                program.optimizer.zero_grad()
                program.loss(program.model(rows), goals).backward()
                program.optimizer.step()
            program.model.eval()
            with torch.no_grad():
                program.loss(program.model(inputs[held]), labels[held])
            program.model.train()

    return classifier(mlp(20, 5), loader(inputs, labels), epochs=6, loop=loop)


@fault(
    "leaks",
    "the rows of the validation are not standardised, unlike those of the training",
    why="the inputs without gradients have mean 50 and a spread of 9, those with gradients mean 0 and a spread of 1",
)
def validation_without_the_scaler():
    inputs, targets = table()
    inputs, targets, held, goals_held = inputs[:640], targets[:640], inputs[640:], targets[640:]

    def loop(program):
        for _ in range(program.epochs):
            for rows, goals in program.loader:
                program.optimizer.zero_grad()
                program.loss(program.model(rows), goals).backward()
                program.optimizer.step()
            program.model.eval()
            with torch.no_grad():
                program.loss(program.model(50 + 9 * held), goals_held)
            program.model.train()

    return regressor(mlp(10, 1), loader(inputs, targets), epochs=5, loop=loop)


# --- healthy ----------------------------------------------------------------------------------------------------------


@healthy("labels")
def a_tenth_of_the_labels_is_wrong():
    """The loss falls towards the entropy that the noise leaves, not to zero."""
    inputs, labels = blobs()
    wrong = torch.rand(len(labels)) < 0.1
    return classifier(
        mlp(20, 5), loader(inputs, torch.where(wrong, torch.randint(0, 5, labels.shape), labels)), epochs=5
    )


@healthy("labels")
def rare_class_drawn_more_often():
    """The sampler makes the classes equally frequent; the loss falls to a third or less."""
    inputs = torch.randn(960, 12)
    labels = (inputs[:, 0] > 1.8).long()
    weights = torch.tensor([1.0, (labels == 0).sum() / (labels == 1).sum()])[labels]
    sampler = WeightedRandomSampler(weights.tolist(), len(labels))
    return classifier(mlp(12, 2), loader(inputs, labels, shuffle=False, sampler=sampler), epochs=5)


@healthy("preprocessing")
def bytes_behind_a_batch_norm():
    """The pixels are bytes, and a batch norm in front of the network standardises them; the loss falls to near zero."""
    inputs, labels = glyphs()
    model = nn.Sequential(nn.BatchNorm1d(64), *mlp(64, 4))
    return classifier(model, loader((inputs * 255).round(), labels), epochs=5)


@healthy("order of data")
def short_rows_first():
    """A curriculum: the rows of short vectors come first, then all; the loss falls to less than a quarter."""
    inputs, labels = blobs(960)
    easy = inputs.norm(dim=1).argsort()[:320]
    first, all_rows = loader(inputs[easy], labels[easy]), loader(inputs, labels)

    def loop(program):
        for data in (first, first, first, program.loader, program.loader, program.loader):
            for rows, goals in data:
                program.optimizer.zero_grad()
                program.loss(program.model(rows), goals).backward()
                program.optimizer.step()

    return classifier(mlp(20, 5), all_rows, loop=loop)


class Stream(IterableDataset):
    def __iter__(self):
        for _ in range(100):
            yield table(32)


@healthy("order of data")
def a_stream_without_end():
    """No row is ever seen twice; the loss falls to less than a half."""
    return regressor(mlp(10, 1), DataLoader(Stream(), batch_size=None), epochs=1, rate=1e-2)
