"""Programs of the third set: recurrent networks, attention, masks, embeddings, text and time series."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.diagnosis.unseen import fault, healthy
from tests.diagnosis.unseen.programs import Program, classifier, loader, mlp, regressor
from tests.diagnosis.unseen.third_common import training


def series(rows=640, length=16):
    """Noisy waves of one of three frequencies."""
    labels = torch.randint(0, 3, (rows,))
    time = torch.arange(length) + 6.28 * torch.rand(rows, 1)
    waves = (time * torch.tensor([0.4, 0.8, 1.3])[labels][:, None]).sin()
    return (waves + 0.3 * torch.randn(rows, length))[..., None], labels


def sentences(rows=640, length=14, words=60):
    """Texts of 3 to `length` words padded by 0; the class is the group of most of the words."""
    labels = torch.randint(0, 3, (rows,))
    lengths = torch.randint(3, length + 1, (rows,))
    ours = torch.rand(rows, length) < 0.6
    tokens = torch.where(ours, 1 + labels[:, None] * 19, torch.ones(1, 1).long()) + torch.randint(0, 19, (rows, length))
    tokens = tokens.clamp(max=words - 1) * (torch.arange(length) < lengths[:, None])
    return tokens, lengths, labels


def rows_of_a_language(rows=512, length=12, words=20):
    """Texts in which a word mostly follows from the one before it."""
    following = torch.randperm(words)
    texts = [torch.randint(0, words, (rows,))]
    for _ in range(length - 1):
        texts.append(torch.where(torch.rand(rows) < 0.85, following[texts[-1]], torch.randint(0, words, (rows,))))
    return torch.stack(texts, 1)


class Recurrent(nn.Module):
    """A recurrent network that answers from its last output."""

    def __init__(self, cell=nn.GRU, features=1, classes=3, width=24, batch_first=True):
        super().__init__()
        self.cell, self.head = cell(features, width, batch_first=batch_first), nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.cell(x)[0][:, -1])


# --- recurrent networks -----------------------------------------------------------------------------------------------


@fault(
    "recurrent networks",
    "`batch_first` was forgotten: the cell takes rows for time and walks from one text of the batch to the next",
    "cell",
    why="the first dimension of the cell's input is the batch, though batch_first is false; outputs depend on other rows",
    report="https://github.com/IBM/TabFormer/pull/14",
)
def cell_that_walks_through_the_batch():
    return classifier(Recurrent(nn.LSTM, batch_first=False), loader(*series()), epochs=5, rate=5e-3)


class KeepsState(Recurrent):
    def forward(self, x):
        state = getattr(self, "state", None)
        state = None if state is None or state.shape[1] != len(x) else state.detach()
        outputs, self.state = self.cell(x, state)
        return self.head(outputs[:, -1])


@fault(
    "recurrent networks",
    "the hidden state is handed from batch to batch although the batches are shuffled and have nothing to do with each other",
    "cell",
    why="the initial state of the cell is the last state of the batch before, whose rows are others",
)
def state_of_the_batch_before():
    return classifier(KeepsState(), loader(*series(length=5)), epochs=5, rate=5e-3)


class LastOfPadded(nn.Module):
    def __init__(self, packed):
        super().__init__()
        self.words, self.cell = nn.Embedding(60, 16, padding_idx=0), nn.RNN(16, 24, batch_first=True)
        self.head, self.packed = nn.Linear(24, 3), packed

    def forward(self, tokens, lengths):
        x = self.words(tokens)
        if self.packed:
            x = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return self.head(self.cell(x)[1][0])
        return self.head(self.cell(x)[0][:, -1])


def of_texts(program, tokens, lengths, labels):
    return F.cross_entropy(program.model(tokens, lengths), labels)


@fault(
    "padding",
    "the answer is taken from the last position, which is twenty steps or more behind the end of the text",
    "cell",
    why="the last tokens of nearly all rows are 0, the index of padding, and the cell runs over them to the end",
)
def answer_from_the_padding():
    tokens, lengths, labels = sentences()
    tokens = F.pad(tokens, (0, 20))
    return training(LastOfPadded(packed=False), loader(tokens, lengths, labels), of_texts)


class SortsByLength(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.cell, self.head = nn.Embedding(60, 16), nn.GRU(16, 24, batch_first=True), nn.Linear(24, 3)

    def forward(self, tokens, lengths):
        lengths, order = lengths.sort(descending=True)
        packed = pack_padded_sequence(self.words(tokens[order]), lengths, batch_first=True)
        outputs, _ = pad_packed_sequence(self.cell(packed)[0], batch_first=True)
        return self.head(outputs[torch.arange(len(lengths)), lengths - 1])


@fault(
    "padding",
    "the texts are sorted by length for packing, and neither the labels nor the outputs are put into the same order",
    why="the rows that reach the embedding are a permutation of those of the batch, while the targets keep its order",
)
def sorted_texts_and_unsorted_labels():
    return training(SortsByLength(), loader(*sentences()), of_texts)


class StepByStep(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(1, 24), nn.Linear(24, 2)

    def forward(self, x):
        state = torch.zeros(len(x), 24)
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state.detach())
        return self.head(state)


@fault(
    "gradients cut",
    "the state is detached at every time step instead of once a batch, so that no gradient goes back in time",
    "cell",
    why="the state that goes into the cell has no gradient, at any step; only the last step of the cell is trained",
)
def state_detached_at_every_step():
    inputs = torch.randn(640, 10, 1)
    return classifier(StepByStep(), loader(inputs, (inputs[:, 6, 0] > 0).long()), epochs=5, rate=5e-3)


class Translator(nn.Module):
    """A text is copied backwards: the decoder begins with the encoder's state, or with zeros."""

    def __init__(self, passes):
        super().__init__()
        self.words = nn.Embedding(12, 24)
        self.encoder, self.decoder = nn.GRU(24, 48, batch_first=True), nn.GRU(24, 48, batch_first=True)
        self.head, self.passes = nn.Linear(48, 12), passes

    def forward(self, texts):
        _, state = self.encoder(self.words(texts))
        begun = F.pad(texts.flip(1)[:, :-1], (1, 0), value=11)
        return self.head(self.decoder(self.words(begun), state if self.passes else None)[0])


def backwards(program, texts):
    return F.cross_entropy(program.model(texts).flatten(0, 1), texts.flip(1).flatten())


# --- attention and masks ----------------------------------------------------------------------------------------------


class Attentive(nn.Module):
    """One layer of a transformer over words, with a mask for the padding."""

    def __init__(self, mask, positions=None):
        super().__init__()
        self.words, self.head, self.mask, self.positions = nn.Embedding(60, 24), nn.Linear(24, 3), mask, positions
        self.layer = nn.TransformerEncoderLayer(24, 2, 48, dropout=0.0, batch_first=True)

    def forward(self, tokens, lengths):
        x = self.words(tokens)
        x = x if self.positions is None else x + self.positions(x)
        return self.head(self.layer(x, src_key_padding_mask=self.mask(tokens)).mean(1))


@fault(
    "masks",
    "the mask of the padding is the wrong way round: True stands where there are words, and the attention sees padding alone",
    "layer",
    why="the positions that the mask excludes are those whose tokens are not 0; what remains is the padding",
)
def mask_the_wrong_way_round():
    tokens, lengths, labels = sentences()
    tokens = F.pad(tokens, (0, 2))
    return training(Attentive(lambda t: t != 0), loader(tokens, lengths, labels), of_texts)


def waves_of_position(length, width=24):
    angle = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
    return torch.stack([angle.sin(), angle.cos()], 2).flatten(1)


@fault(
    "attention",
    "the encoding of position is indexed by the first dimension, which is the batch here: `table[:x.size(0)]`",
    why="what is added to the embeddings differs from row to row of the batch and is the same at all positions of a row",
    report="https://github.com/zcao0420/MOFormer/issues/9",
)
def position_in_the_batch():
    table = 3 * waves_of_position(64)
    model = Attentive(lambda t: t == 0, lambda x: table[: len(x), None])
    tokens, places = torch.randint(2, 60, (640, 14)), torch.randint(0, 14, (640,))
    tokens[torch.arange(640), places] = 1
    return training(model, loader(tokens, torch.full((640,), 14), (places * 3) // 14), of_texts)


class Writer(nn.Module):
    """A small language model by attention."""

    def __init__(self, causal, words=20, dim=2):
        super().__init__()
        self.words, self.places = nn.Embedding(words, 32), nn.Parameter(0.1 * torch.randn(12, 32))
        self.keys, self.queries, self.values = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.head, self.causal, self.dim = (
            nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, words)),
            causal,
            dim,
        )

    def forward(self, tokens):
        x = self.words(tokens) + self.places[: tokens.shape[1]]
        scores = self.queries(x) @ self.keys(x).transpose(1, 2) / 32**0.5
        if self.causal:
            scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), -1e9)
        return self.head(x + scores.softmax(self.dim) @ self.values(x))


def next_word(program, texts):
    return F.cross_entropy(program.model(texts[:, :-1]).flatten(0, 1), texts[:, 1:].flatten())


@fault(
    "masks",
    "the language model has no causal mask, so that each position sees the word that it is to predict",
    why="the attention gives weight to later positions, and the input at the next position is the target",
)
def attention_to_the_future():
    return training(Writer(causal=False), loader(rows_of_a_language(), batch=16), next_word, epochs=4, rate=5e-3)


@fault(
    "text",
    "the targets are the words of the input themselves, since the shift by one was lost, and the network learns to copy",
    why="input and target of each step are equal, and the loss goes to zero",
)
def targets_not_shifted():
    def objective(program, texts):
        return F.cross_entropy(program.model(texts).flatten(0, 1), texts.flatten())

    return training(Writer(causal=True), loader(rows_of_a_language(), batch=16), objective, epochs=4)


@fault(
    "text",
    "the outputs (batch, time, words) get the shape that the loss wants by `view(batch, words, time)`, not by a transpose",
    why="the outputs as the loss sees them are not a transpose of those of the head, and the loss hardly falls",
)
def view_for_a_transpose():
    def objective(program, texts):
        outputs = program.model(texts[:, :-1])
        return F.cross_entropy(outputs.view(len(outputs), 20, -1), texts[:, 1:])

    return training(Writer(causal=True), loader(rows_of_a_language(), batch=16), objective, epochs=4)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.cell, self.head = nn.Embedding(60, 16), nn.GRU(16, 24, batch_first=True), nn.Linear(24, 4)

    def forward(self, tokens):
        return self.head(self.cell(self.words(tokens))[0])


@fault(
    "padding",
    "the loss of each word's tag counts the padding, nine tenths of all positions, with 0 as its tag",
    why="most targets are 0 exactly where the token is 0, and the loss falls on these while the words are hardly learned",
)
def padding_counts_in_the_loss():
    def objective(program, tokens):
        return F.cross_entropy(program.model(tokens).flatten(0, 1), (tokens.sign() * (1 + tokens % 3)).flatten())

    tokens = F.pad(sentences()[0], (0, 76))
    return training(Tagger(), loader(tokens), objective, epochs=3)


# --- embeddings and text ----------------------------------------------------------------------------------------------


class Bag(nn.Module):
    def __init__(self, words=60, width=16, **options):
        super().__init__()
        self.words, self.head = nn.Embedding(words, width, **options), nn.Linear(width, 3)

    def forward(self, tokens):
        return self.head(self.words(tokens).mean(1))


@fault(
    "embeddings",
    "the words were not turned to lower case as in the vocabulary, and nine in ten became the unknown word",
    "words",
    why="one index makes up nine tenths of all that the embedding gets, and most of its rows never get a gradient",
)
def words_not_in_lower_case():
    tokens, _, labels = sentences()
    tokens = torch.where(torch.rand(tokens.shape) < 0.93, torch.ones_like(tokens), tokens)
    return classifier(Bag(), loader(tokens, labels), epochs=5)


# --- time series ------------------------------------------------------------------------------------------------------


def windows(walk, length=12, ahead=1):
    pieces = walk.unfold(0, length + ahead, 1)
    return pieces[:, :length], pieces[:, -1:]


@fault(
    "time series",
    "the levels of a series with a trend are predicted, and the network must answer later for levels it never saw",
    why="inputs and targets of the evaluation are all larger than any value in the batches with gradients",
)
def levels_with_a_trend():
    walk = torch.arange(900) / 60 + (torch.arange(900) / 4).sin() + 0.1 * torch.randn(900)
    inputs, targets = windows(walk)
    later = inputs[700:], targets[700:]

    def loop(program):
        for _ in range(program.epochs):
            for rows, goals in program.loader:
                program.optimizer.zero_grad()
                program.loss(program.model(rows), goals).backward()
                program.optimizer.step()
            program.model.eval()
            with torch.no_grad():
                program.loss(program.model(later[0]), later[1])
            program.model.train()

    model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 1))
    return regressor(model, loader(inputs[:500], targets[:500]), epochs=6, loop=loop)


@fault(
    "time series",
    "the series was smoothed by a centred mean before it was cut, and each window has a part of its future in it",
    knowable=False,
    why="the leak happened in the preparation; what remains is a smooth series that is easy to predict, as many are",
)
def smoothed_with_the_future():
    noise = torch.randn(1, 1, 680)
    walk = F.conv1d(noise, torch.ones(1, 1, 11) / 11).flatten()
    inputs, targets = windows(walk)
    return regressor(mlp(12, 1), loader(inputs, targets), epochs=5)


# --- healthy ----------------------------------------------------------------------------------------------------------


@healthy("recurrent networks")
def texts_packed_by_length():
    """Padded texts through a packed cell; the loss falls to less than a half."""
    return training(LastOfPadded(packed=True), loader(*sentences()), of_texts, epochs=7, rate=5e-3)


@healthy("sequence to sequence")
def texts_copied_backwards():
    """A decoder that begins with the state of the encoder, with the true words as its input; the loss falls by half."""
    return training(Translator(passes=True), loader(torch.randint(0, 11, (960, 4))), backwards, rate=0.01)


@healthy("text")
def a_small_language_model():
    """Attention with a causal mask; the loss falls to a half or less, towards the entropy of the texts."""
    return training(Writer(causal=True), loader(rows_of_a_language(), batch=16), next_word, epochs=4, rate=5e-3)


@healthy("embeddings")
def sparse_gradients_of_many_words():
    """An embedding of 5000 words with sparse gradients and its own optimizer; the loss falls to a third or less."""
    words = torch.randint(0, 3, (640,))
    tokens = torch.randint(0, 4, (640, 6)) * 3 + words[:, None]
    model = Bag(words=5000, sparse=True)
    optimizer = torch.optim.SparseAdam(model.words.parameters(), 0.05)
    model.head.requires_grad_(False)
    return Program(model, nn.CrossEntropyLoss(), loader(tokens, words), optimizer, 5)


@healthy("recurrent networks")
def one_long_series_in_pieces():
    """The state is carried on and detached from piece to piece of one long series, in order; the loss falls by half."""
    time = torch.arange(8 * 1601).view(8, 1601)
    series = (time * 0.3).sin() * (time * 0.021).cos()
    pieces = [(series[:, i : i + 16, None], series[:, i + 1 : i + 17, None]) for i in range(0, 1600, 16)]
    model = Recurrent(classes=1)

    def loop(program):
        state = None
        for rows, goals in program.loader:
            program.optimizer.zero_grad()
            outputs, state = program.model.cell(rows, state)
            F.mse_loss(program.model.head(outputs), goals).backward()
            program.optimizer.step()
            state = state.detach()

    return Program(model, None, pieces, torch.optim.Adam(model.parameters(), 0.01), 1, loop)
