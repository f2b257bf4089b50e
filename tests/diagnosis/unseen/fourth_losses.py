"""Programs of the fourth set: loss functions, their arguments, and objectives of the user's own."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.diagnosis.unseen import fault, healthy
from tests.diagnosis.unseen.fourth_common import SmallNet, fit, fit_with, glyphs, patients, priced, split
from tests.diagnosis.unseen.programs import Program, blobs, loader, mlp, program
from tests.diagnosis.unseen.third_common import training

# --- what the loss gets from the network ------------------------------------------------------------------------------


@fault(
    "loss",
    "the network ends in Softmax although CrossEntropyLoss takes logits",
    "1",
    why="the inputs of the loss are from 0 to 1 and sum to 1 in each row, and the loss cannot fall near 0",
)
def glyph_net_that_ends_in_softmax():
    model = nn.Sequential(SmallNet(), nn.Softmax(dim=1))
    (inputs, labels), held_out = split(*glyphs())
    return program(model, nn.CrossEntropyLoss(), loader(inputs, labels), 1e-3, epochs=6, loop=fit_with(held_out))


@fault(
    "loss",
    "NLLLoss gets logits instead of logarithms of probabilities",
    why="the inputs of the loss are not logarithms of probabilities: they become positive, and the loss falls below 0",
)
def nll_of_logits():
    return program(SmallNet(), nn.NLLLoss(), loader(*glyphs()), 1e-3, epochs=6, loop=fit)


class Probability(nn.Module):
    """A binary classifier whose forward ends in a sigmoid."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(12, 64), nn.Linear(64, 64)
        self.out = nn.Linear(64, 1)

    def forward(self, x):
        x = F.relu(self.fc2(F.relu(self.fc1(x))))
        return torch.sigmoid(self.out(x))


@fault(
    "loss",
    "forward ends in a sigmoid, and BCEWithLogitsLoss takes one more",
    why="the inputs of the loss are from 0 to 1 in all rows, so that it cannot fall below 0.31 for a row of class 1",
)
def probability_as_a_logit():
    return program(Probability(), nn.BCEWithLogitsLoss(), loader(*patients()), 2e-3, epochs=8, loop=fit)


@fault(
    "loss",
    "CrossEntropyLoss on a single output with targets of 0 and 1, which is 0 for every row",
    why="the loss is exactly 0 from the first step, and all gradients are 0, since there is one output only",
)
def cross_entropy_of_one_output():
    return program(mlp(12, 1, 64), nn.CrossEntropyLoss(), loader(*patients()), 2e-3, epochs=6, loop=fit)


@fault(
    "shapes",
    "outputs of shape (N, 1) meet targets of shape (N,), which MSELoss broadcasts to N x N",
    why="the shapes of outputs and targets differ, and the outputs go to the mean of the targets",
)
def targets_without_the_last_axis():
    inputs, prices = priced()
    return program(mlp(8, 1, 64), nn.MSELoss(), loader(inputs, prices.squeeze(1)), 2e-3, epochs=6, loop=fit)


@fault(
    "loss",
    "KLDivLoss gets probabilities where it wants their logarithms",
    why="the inputs of the loss are from 0 to 1 in all rows; the loss is below 0",
)
def kl_of_two_probabilities():
    inputs, labels = blobs(1024)
    soft = 0.9 * F.one_hot(labels, 5) + 0.02
    model = nn.Sequential(mlp(20, 5, 64), nn.Softmax(dim=-1))
    return program(model, nn.KLDivLoss(reduction="batchmean"), loader(inputs, soft), 2e-3, epochs=6, loop=fit)


@fault(
    "loss",
    "reduction='sum' with a batch of 128 rows and a learning rate that was chosen for the mean",
    why="the loss adds up the rows of a batch, and the steps are so large that the training diverges",
)
def sum_with_the_rate_of_the_mean():
    inputs, prices = priced()
    data = loader(inputs, prices, batch=128, drop_last=True)
    return program(mlp(8, 1, 64), nn.MSELoss(reduction="sum"), data, 0.01, torch.optim.SGD, epochs=15, loop=fit)


@fault(
    "labels",
    "CosineEmbeddingLoss gets 0 for unlike pairs where it wants -1, so that they count for nothing",
    why="the targets are 0 and 1, but the loss knows 1 and -1 only; all embeddings become alike",
)
def unlike_pairs_are_zero():
    inputs, labels = blobs(2048)
    left, right = inputs.chunk(2)
    alike = labels[:1024] == labels[1024:]
    data = loader(left, right, alike.float(), batch=64)

    def loop(program):
        program.model.train()
        for _ in range(program.epochs):
            for left, right, alike in program.loader:
                program.optimizer.zero_grad()
                program.loss(program.model(left), program.model(right), alike).backward()
                program.optimizer.step()

    return program(mlp(20, 16, 64), nn.CosineEmbeddingLoss(margin=0.2), data, 1e-3, epochs=8, loop=loop)


@fault(
    "labels",
    "rows have several labels of 0 or 1, as for BCEWithLogitsLoss, and CrossEntropyLoss takes them for probabilities",
    why="the targets of most rows do not sum to 1, but to 0, 2 or 3",
)
def several_labels_in_cross_entropy():
    inputs = torch.randn(1024, 12)
    labels = (inputs @ torch.randn(12, 6) / 3 > 0.3).float()
    return program(mlp(12, 6, 64), nn.CrossEntropyLoss(), loader(inputs, labels), 2e-3, epochs=6, loop=fit)


# --- the path from the loss to the weights ----------------------------------------------------------------------------


@fault(
    "graph",
    "the loss is wrapped in a new tensor with requires_grad=True, which silenced an error and cuts it from the network",
    why="no weight ever gets a gradient, although backward runs without an error",
)
def loss_wrapped_to_silence_an_error():
    def loop(program):
        program.model.train()
        for _ in range(program.epochs):
            for inputs, labels in program.loader:
                program.optimizer.zero_grad()
                loss = program.loss(program.model(inputs), labels)
                loss = torch.tensor(loss.item(), requires_grad=True)
                loss.backward()
                program.optimizer.step()

    return program(mlp(20, 5, 64), nn.CrossEntropyLoss(), loader(*blobs(1024)), 1e-3, epochs=5, loop=loop)


@fault(
    "loss",
    "the distances within a batch are roots of sums that are 0 on the diagonal, where the gradient is infinite",
    why="the loss of the first step is finite, and all gradients are nan from that step on",
)
def roots_of_zero_distances():
    def objective(program, inputs, labels):
        points = program.model(inputs)
        distances = (points[:, None] - points[None, :]).square().sum(-1).sqrt()
        alike = labels[:, None] == labels[None, :]
        return (distances * alike).mean() + ((1 - distances).relu() * ~alike).mean()

    return training(mlp(20, 8, 64), loader(*blobs(1024)), objective, 1e-3, epochs=4)


@fault(
    "loss",
    "the own Gaussian likelihood lacks the logarithm of the variance, so that a boundless variance is its best value",
    why="the second output grows without end, and the loss goes to 0 whatever the first one is",
)
def likelihood_without_its_logarithm():
    def objective(program, inputs, prices):
        mean, log_variance = program.model(inputs).chunk(2, 1)
        return ((prices - mean).square() * (-log_variance).exp()).mean() / 2

    return training(mlp(8, 2, 64), loader(*priced()), objective, 2e-3, epochs=8)


@fault(
    "loss",
    "positive and negative are swapped in the call of TripletMarginLoss",
    knowable=False,
    why="the loss falls, if slowly, and which of the two should be near is known to the user alone",
)
def positive_and_negative_swapped():
    inputs, labels = blobs(1600)
    anchors = torch.arange(800)
    scores = torch.rand(800, 1600)
    alike = labels[:800, None] == labels[None, :]
    near, far = (scores * alike).argmax(1), (scores * ~alike).argmax(1)
    data = loader(inputs[anchors], inputs[near], inputs[far], batch=40)

    def loop(program):
        program.model.train()
        for _ in range(program.epochs):
            for anchor, positive, negative in program.loader:
                program.optimizer.zero_grad()
                anchor, positive, negative = (program.model(rows) for rows in (anchor, positive, negative))
                program.loss(anchor, negative, positive).backward()
                program.optimizer.step()

    return program(mlp(20, 8, 64), nn.TripletMarginLoss(margin=1.0), data, 1e-3, epochs=6, loop=loop)


# --- healthy ----------------------------------------------------------------------------------------------------------


@healthy("loss")
def summed_loss_with_a_rate_for_it():
    inputs, prices = priced()
    (inputs, prices), held_out = split(inputs, prices)
    data = loader(inputs, prices, batch=64)
    return program(
        mlp(8, 1, 64), nn.MSELoss(reduction="sum"), data, 3e-4, torch.optim.SGD, epochs=14, loop=fit_with(held_out)
    )


@healthy("loss")
def triplets_on_a_sphere():
    inputs, labels = blobs(1600)
    scores = torch.rand(800, 1600)
    alike = labels[:800, None] == labels[None, :]
    data = loader(inputs[:800], inputs[(scores * alike).argmax(1)], inputs[(scores * ~alike).argmax(1)], batch=40)
    model = mlp(20, 16, 64)

    def loop(program):
        program.model.train()
        for _ in range(program.epochs):
            for triple in program.loader:
                program.optimizer.zero_grad()
                program.loss(*(F.normalize(program.model(rows), dim=1) for rows in triple)).backward()
                program.optimizer.step()

    return program(model, nn.TripletMarginLoss(margin=0.4), data, 1e-3, epochs=6, loop=loop)


@healthy("distillation")
def student_of_a_wide_teacher():
    inputs, labels = glyphs()
    teacher = SmallNet(width=24)
    earlier = program(teacher, nn.CrossEntropyLoss(), loader(inputs, labels), 2e-3, epochs=2, loop=fit)
    earlier.loop(earlier)
    teacher.requires_grad_(False).eval()

    def loop(program):
        program.model.train()
        for _ in range(program.epochs):
            for inputs, labels in program.loader:
                with torch.no_grad():
                    soft = F.log_softmax(teacher(inputs) / 4, dim=1)
                program.optimizer.zero_grad()
                outputs = program.model(inputs)
                guided = program.loss(F.log_softmax(outputs / 4, dim=1), soft)
                (16 * guided + 0.3 * F.cross_entropy(outputs, labels)).backward()
                program.optimizer.step()

    student = nn.Sequential(nn.Flatten(), mlp(256, 8, 48))
    loss = nn.KLDivLoss(reduction="batchmean", log_target=True)
    optimizer = torch.optim.Adam(student.parameters(), 1e-3)
    return Program(student, loss, loader(inputs, labels), optimizer, 6, loop, others=[teacher])


class Reader(nn.Module):
    """A recurrent network over the columns of a line of writing, for CTC."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(8, 48, batch_first=True, bidirectional=True), nn.Linear(96, 6)

    def forward(self, x):
        return self.head(self.rnn(x)[0]).log_softmax(-1).transpose(0, 1)


@healthy("loss")
def lines_read_with_ctc():
    letters = torch.randn(6, 8)
    lengths = torch.randint(3, 6, (640,))
    words = torch.randint(1, 6, (640, 5))
    columns = letters[words].repeat_interleave(4, 1) + 0.3 * torch.randn(640, 20, 8)
    columns = columns * (torch.arange(20) < 4 * lengths[:, None])[..., None]

    def loop(program):
        program.model.train()
        for _ in range(program.epochs):
            for columns, words, lengths in program.loader:
                program.optimizer.zero_grad()
                program.loss(program.model(columns), words, 4 * lengths, lengths).backward()
                nn.utils.clip_grad_norm_(program.model.parameters(), 5.0)
                program.optimizer.step()

    data = loader(columns, words, lengths)
    return program(Reader(), nn.CTCLoss(blank=0, zero_infinity=True), data, 5e-3, epochs=8, loop=loop)
