"""Programs of the fourth set on words and sequences: shifts, masks, padding, recurrent networks and attention."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.diagnosis.unseen import fault, healthy
from tests.diagnosis.unseen.fourth_common import fit, fit_with, reviews, split
from tests.diagnosis.unseen.programs import Program, Transformer, loader, program, signals, text, token_loss

CROSS_ENTROPY = nn.CrossEntropyLoss()
TOKENS = nn.CrossEntropyLoss(ignore_index=-100)

# --- language models --------------------------------------------------------------------------------------------------


class Writer(nn.Module):
    """A language model of PyTorch's own encoder layers."""

    def __init__(self, words=20, width=32, causal=True, dropout=0.0):
        super().__init__()
        self.embedding, self.position = nn.Embedding(words, width), nn.Embedding(64, width)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head, self.causal = nn.Linear(width, words), causal

    def forward(self, tokens):
        length = tokens.shape[1]
        x = self.embedding(tokens) + self.position.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length) if self.causal else None
        return self.head(self.encoder(x, mask=mask))


def by_classes(loss):
    """Return the loss of tokens for logits with the classes last."""

    def tokens(logits, labels):
        return loss(logits.transpose(1, 2), labels)

    return tokens


@fault(
    "targets",
    "the labels of the language model are its inputs, without the shift by one word, so that it learns to copy",
    why="the targets equal the inputs at each place, and the loss goes to 0",
)
def labels_without_a_shift():
    tokens = text(640, 20)
    return program(Writer(), by_classes(CROSS_ENTROPY), loader(tokens, tokens), 2e-3, epochs=4, loop=fit)


@fault(
    "mask",
    "the encoder of the language model runs without a causal mask, so that each place sees the word to predict",
    why="the loss falls far below the entropy of the text, and the outputs depend on words to the right",
)
def next_word_without_a_causal_mask():
    tokens = text(640, 20)
    data = loader(tokens[:, :-1], tokens[:, 1:])
    return program(Writer(causal=False), by_classes(CROSS_ENTROPY), data, 3e-3, epochs=8, loop=fit)


@fault(
    "targets",
    "the labels are shifted in the data set, and once more in the loss, so that the model predicts the word after the next",
    why="each target equals the input two places further on",
)
def labels_shifted_in_data_and_loss():
    tokens = text(640, 20)

    def loop(program):
        program.model.train()
        for _ in range(program.epochs):
            for inputs, labels in program.loader:
                program.optimizer.zero_grad()
                logits = program.model(inputs)[:, :-1]
                program.loss(logits.flatten(0, 1), labels[:, 1:].flatten()).backward()
                program.optimizer.step()

    return program(Writer(), CROSS_ENTROPY, loader(tokens[:, :-1], tokens[:, 1:]), 2e-3, epochs=5, loop=loop)


@fault(
    "shapes",
    "the logits are brought to (batch, classes, length) by view instead of transpose for CrossEntropyLoss",
    why="the loss gets another view of the same memory, in which the scores of one word are spread over several places",
)
def classes_to_the_front_by_view():
    tokens = text(640, 20)

    def loss(logits, labels):
        batch, length, words = logits.shape
        return CROSS_ENTROPY(logits.reshape(batch, words, length), labels)

    return program(Writer(), loss, loader(tokens[:, :-1], tokens[:, 1:]), 2e-3, epochs=5, loop=fit)


def padded(rows=640, length=24):
    """Return sequences of a Markov chain that end early and are padded by 0."""
    tokens = text(rows, length)
    return tokens * (torch.arange(length + 1) < torch.randint(4, length // 2, (rows, 1)))


@fault(
    "padding",
    "the labels of the padding were not set to ignore_index, and most labels are padding",
    why="two thirds of the targets are the same word 0, which also fills the ends of the inputs",
)
def padding_counts_as_a_word():
    tokens = padded()
    data = loader(tokens[:, :-1], tokens[:, 1:])
    return program(Writer(), by_classes(TOKENS), data, 2e-3, epochs=5, loop=fit)


# --- classifiers of sequences -----------------------------------------------------------------------------------------


class Judge(nn.Module):
    """A classifier of reviews with an encoder, and the mean over the words."""

    def __init__(self, inverted=False, batch_first=True):
        super().__init__()
        self.embedding = nn.Embedding(60, 32, padding_idx=0)
        self.encoder = nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=batch_first)
        self.head, self.inverted = nn.Linear(32, 2), inverted

    def forward(self, words):
        padding = words == 0
        ignored = ~padding if self.inverted else padding
        if not self.encoder.self_attn.batch_first:
            return self.head(self.encoder(self.embedding(words)).mean(1))
        x = self.encoder(self.embedding(words), src_key_padding_mask=ignored)
        kept = (~padding).unsqueeze(-1)
        return self.head((x * kept).sum(1) / kept.sum(1))


@fault(
    "mask",
    "src_key_padding_mask is True for the words and False for the padding, so that attention sees the padding only",
    "encoder.self_attn",
    why="the mask hides the places with words, and leaves those with padding, in every row",
)
def padding_mask_the_wrong_way_round():
    words, _, labels = reviews()
    words[:, -1] = 0
    return program(Judge(inverted=True), CROSS_ENTROPY, loader(words, labels), 1e-3, epochs=6, loop=fit)


@fault(
    "shapes",
    "the encoder layer lacks batch_first=True, so that attention mixes the rows of a batch instead of the words of a row",
    "encoder",
    why="the outputs of a row depend on the other rows, and not on the order in which its words stand together",
)
def attention_across_the_batch():
    words, _, labels = reviews()
    return program(Judge(batch_first=False), CROSS_ENTROPY, loader(words, labels), 1e-3, epochs=6, loop=fit)


class Recurrent(nn.Module):
    """A recurrent classifier of waves; `read` takes what the head gets from outputs and state."""

    def __init__(self, read, batch_first=True, layers=1):
        super().__init__()
        self.lstm = nn.LSTM(3, 32, layers, batch_first=batch_first)
        self.head, self.read = nn.Linear(32, 3), read

    def forward(self, x):
        outputs, (state, _) = self.lstm(x)
        return self.head(self.read(outputs, state))


@fault(
    "shapes",
    "the LSTM lacks batch_first=True, so that it runs along the rows of the batch",
    "lstm",
    why="the outputs of a row depend on the rows before it in the batch",
)
def lstm_along_the_batch():
    model = Recurrent(lambda outputs, state: outputs[:, -1], batch_first=False)
    return program(model, CROSS_ENTROPY, loader(*signals(768)), 3e-3, epochs=6, loop=fit)


@fault(
    "recurrent",
    "the head reads h_n[0], the state of the first of two layers, so that the second layer is not used",
    "lstm",
    why="the weights of the second layer never get a gradient",
)
def state_of_the_lower_layer():
    model = Recurrent(lambda outputs, state: state[0], layers=2)
    return program(model, CROSS_ENTROPY, loader(*signals(768)), 3e-3, epochs=6, loop=fit)


class Reader(nn.Module):
    """A recurrent classifier of reviews that may be told their lengths."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(60, 24)
        self.gru, self.head = nn.GRU(24, 32, batch_first=True), nn.Linear(32, 2)

    def forward(self, words):
        return self.head(self.gru(self.embedding(words))[0][:, -1])


@fault(
    "padding",
    "the head reads the last step of rows padded on the right, which is a long way of padding after the last word",
    "gru",
    why="most rows end in a run of the word 0, and the state at their last step is nearly the same for all",
)
def state_after_the_padding():
    words, _, labels = reviews(1024, 24)
    words = F.pad(words, (0, 40))
    return program(Reader(), CROSS_ENTROPY, loader(words, labels), 2e-3, epochs=4, loop=fit)


class Sorted(nn.Module):
    """A recurrent classifier that sorts the rows of a batch by length, and does not sort them back."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(60, 24, padding_idx=0)
        self.gru, self.head = nn.GRU(24, 32, batch_first=True), nn.Linear(32, 2)

    def forward(self, words):
        lengths, order = (words != 0).sum(1).sort(descending=True)
        packed = nn.utils.rnn.pack_padded_sequence(self.embedding(words[order]), lengths, batch_first=True)
        return self.head(self.gru(packed)[1][-1])


@fault(
    "labels",
    "forward sorts the rows by length for packing and does not undo it, so that outputs and labels are of different rows",
    why="an output depends on another row than its own, which follows the lengths of the rows",
)
def rows_sorted_for_packing():
    words, _, labels = reviews()
    return program(Sorted(), CROSS_ENTROPY, loader(words, labels), 2e-3, epochs=6, loop=fit)


@fault(
    "preprocessing",
    "the vocabulary has small letters and the text capital ones, so that almost every word became the unknown word",
    why="nearly all inputs are the same word 1",
)
def capital_letters_not_in_the_vocabulary():
    words, _, labels = reviews()
    known = torch.rand(words.shape) < 0.03
    words = torch.where((words > 0) & ~known, 1, words)
    return program(Judge(), CROSS_ENTROPY, loader(words, labels), 1e-3, epochs=6, loop=fit)


# --- healthy ----------------------------------------------------------------------------------------------------------


@healthy("weights")
def one_matrix_for_words_in_and_out():
    tokens = text(640, 20)
    model = Writer(dropout=0.1)
    model.head = nn.Linear(32, 20, bias=False)
    model.head.weight = model.embedding.weight
    nn.init.normal_(model.embedding.weight, std=0.05)
    return program(model, by_classes(CROSS_ENTROPY), loader(tokens[:, :-1], tokens[:, 1:]), 5e-3, epochs=8, loop=fit)


@healthy("targets")
def masked_words_to_restore():
    """Hide 15 % of the words, which are to be predicted; the other labels are ignored."""
    tokens = text(1024, 20)[:, :20]
    tokens = torch.where(torch.arange(20) % 4 == 3, (tokens.roll(1, 1) + 3) % 19 + 1, tokens)

    def hide(rows):
        words = torch.stack([row[0] for row in rows])
        hidden = torch.rand(words.shape) < 0.15
        return words.masked_fill(hidden, 0), words.masked_fill(~hidden, -100)

    data = loader(tokens, collate_fn=hide)
    return program(Writer(causal=False), by_classes(TOKENS), data, 3e-3, epochs=8, loop=fit)


class Scaled(nn.Module):
    """A residual branch with a gain that begins at 1e-4 (LayerScale)."""

    def __init__(self, branch, width):
        super().__init__()
        self.branch, self.gain = branch, nn.Parameter(1e-4 * torch.ones(width))

    def forward(self, x):
        return self.gain * self.branch(x)


@healthy("initialisation")
def branches_that_begin_at_almost_nothing():
    model = Transformer(width=32)
    for block in model.blocks:
        block.attention, block.feed = Scaled(block.attention, 32), Scaled(block.feed, 32)
    tokens = text(640, 16)
    return program(
        model, token_loss, loader(tokens[:, :-1], tokens[:, 1:]), 5e-3, torch.optim.AdamW, epochs=6, loop=fit
    )


@healthy("optimizer")
def sparse_gradients_of_a_bag_of_words():
    words, _, labels = reviews(1024)
    bag, head = nn.EmbeddingBag(4000, 16, mode="mean", sparse=True, padding_idx=0), nn.Linear(16, 2)
    data = loader(words, labels)
    dense = torch.optim.Adam(head.parameters(), 5e-3)

    def loop(program):
        program.model.train()
        for _ in range(program.epochs):
            for words, labels in program.loader:
                program.optimizer.zero_grad()
                dense.zero_grad()
                program.loss(program.model(words), labels).backward()
                program.optimizer.step()
                dense.step()

    optimizer = torch.optim.SparseAdam(bag.parameters(), 2e-2)
    return Program(nn.Sequential(bag, head), CROSS_ENTROPY, data, optimizer, 6, loop)


@healthy("data")
def short_reviews_first():
    """A curriculum: the batches of an epoch go from short reviews to long ones, in the same order every time."""
    words, lengths, labels = reviews(1152)
    (words, lengths, labels), held_out = split(words, lengths, labels)
    order = lengths.argsort(stable=True)
    data = loader(words[order], labels[order], shuffle=False)
    held_out = [(words, labels) for words, _, labels in held_out]
    return program(Judge(), CROSS_ENTROPY, data, 1e-3, epochs=6, loop=fit_with(held_out))
