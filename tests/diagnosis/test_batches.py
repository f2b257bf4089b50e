"""The batch in a dump: which tensors are kept and how, reused and shared memory, bounds, and what its rows are."""

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from ikkuna.diagnosis import RecorderOptions, read_dump
from ikkuna.errors import ConfigError, ConfigTypeError
from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.row_ranking import parts_of
from ikkuna.export.subscriber import LossSubscriber
from ikkuna.flight_recorder.batch_rows import BatchRows, item_hashes, row_hashes, unusual

X = torch.randn(256, 6, generator=torch.Generator().manual_seed(1))
Y = X[:, :2].sum(1, keepdim=True)


class Loop:
    """A regression whose batches a test provides."""

    def __init__(self, log_dir, model=None, loss=None, **options):
        torch.manual_seed(0)
        self.model, self.loss = model or nn.Linear(6, 1), loss or nn.MSELoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05)
        self.exporter = Exporter(message_bus=MessageBus("batches"), log_dir=log_dir, on_error="raise", verbosity=0)
        self.exporter.add_modules(self.model)
        self.exporter.set_loss(self.loss)
        self.exporter.message_bus.register_subscriber(LossSubscriber(backend="null"))
        self.exporter.record_steps(RecorderOptions(burst=0, **options))

    def step(self, *micro_batches, ids=None):
        self.optimizer.zero_grad()
        for x, y in micro_batches:
            if ids is not None:
                self.exporter.rows(ids.pop(0))
            self.loss(self.model(x), y).backward()
        self.optimizer.step()

    def run(self, steps):
        for step in range(steps):
            rows = torch.arange(16 * step, 16 * step + 16) % 256
            self.step((X[rows], Y[rows]))
        return self

    def dump(self):
        path = self.exporter.dump()
        self.exporter.close()
        return read_dump(path)


def batch_of(dump, part=0):
    [batch] = [batch for batch in dump.tensors("batches.pt") if batch["step"] == dump.step]
    return batch["model_calls"][part][0][0], batch["loss_calls"][part][0][0]


@pytest.mark.parametrize("step", [60, 61])
def test_the_dump_of_one_poisoned_sample_holds_the_batch_and_names_the_row(tmp_path, step):
    loop = Loop(tmp_path).run(step)
    x, y = X[:16].clone(), Y[:16].clone()
    x[5] *= 200
    loop.step((x, y), ids=[torch.arange(100, 116)])
    loop.run(3)
    loop.exporter.close()
    [dump] = [read_dump(path) for path in loop.exporter.dumps]
    assert dump.step == step
    assert all(map(torch.equal, batch_of(dump), (x, y)))
    assert dump.reasons[0].startswith("the loss jumped")
    assert dump.reasons[1] == "row 5 of the batch (id '105') has 100 % of its loss"
    rows = dump.arrays("batch_rows.npz")
    own = rows["steps"] == step
    assert rows["ids"][own].tolist() == [str(i) for i in range(100, 116)]
    assert np.array_equal(rows["hashes"][own], row_hashes(x))
    assert int(np.argmax(rows["losses"][own])) == 5
    assert rows["losses"][own].mean() == pytest.approx(dump.losses[step], rel=1e-5)


class ProductOf(nn.Module):
    """A linear layer of a sparse matrix, as that of a graph."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 1)

    def forward(self, x):
        return torch.sparse.mm(x, self.fc.weight.T) + self.fc.bias


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("convert", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_a_sparse_batch_is_left_out(tmp_path, convert):
    loop = Loop(tmp_path, model=ProductOf())
    for batch in ((convert(X[:16]), Y[:16]), (convert(X[16:32]), Y[16:32])):
        loop.step(batch)
    dump = loop.dump()
    assert not dump.has("batches.pt")
    assert "batches of the layout torch.sparse" in dump.facts["left_out"]["batches.pt"]
    assert loop.exporter.health().errors == 0


TORCH_BUFFER, NUMPY_BUFFER = torch.empty(16, 6), np.empty((16, 6), np.float32)


def in_a_torch_buffer(step):
    return TORCH_BUFFER.copy_(X[16 * step % 240 :][:16]), Y[:16].clone()


def in_a_numpy_buffer(step):
    NUMPY_BUFFER[:] = X[16 * step % 240 :][:16].numpy()
    return torch.from_numpy(NUMPY_BUFFER), Y[:16].clone()


@pytest.mark.parametrize("make", [in_a_torch_buffer, in_a_numpy_buffer])
def test_a_loop_that_reuses_its_buffers_gets_copies(tmp_path, make):
    loop = Loop(tmp_path, state_every=2)
    for step in range(8):
        loop.step(make(step))
    make(99)  # the loop has filled the buffer again before the dump is written
    dump = loop.dump()
    assert [batch["step"] for batch in dump.tensors("batches.pt")] == [4, 5, 6, 7]
    for batch in dump.tensors("batches.pt"):
        expected, _ = make(batch["step"])
        assert torch.equal(batch["model_calls"][0][0][0], expected)


def test_a_batch_that_is_changed_after_the_step_is_left_out_and_later_ones_are_copied(tmp_path):
    loop = Loop(tmp_path)
    x = X[:16].clone()
    loop.step((x, Y[:16].clone()))
    x.zero_()
    first = read_dump(loop.exporter.dump())
    assert not first.has("batches.pt")
    assert "the batch of step 0 was changed in place" in first.facts["left_out"]["batches.pt"]
    for _ in range(2):
        x = X[:16].clone()
        loop.step((x, Y[:16].clone()))
        x.zero_()
    assert torch.equal(batch_of(loop.dump())[0], X[:16])


def test_tensors_are_kept_by_reference_and_parts_of_a_large_one_and_shared_ones_are_copied(tmp_path):
    loop = Loop(tmp_path)
    capture = loop.exporter._attachment.recorder._steps._capture
    x, y = X[:16].clone(), Y[:16].clone()
    loop.step((x, y))
    kept = [tensor.tensor.data_ptr() for tensor in capture.steps[-1].kept]
    assert kept[:2] == [x.data_ptr(), y.data_ptr()]
    assert capture.copied == 0
    loop.step((X[32:48], Y[32:48].clone()))
    assert capture.copied == 1
    loop.step((X[:16].clone().share_memory_(), Y[32:48].clone()))
    assert capture.copied == 2
    assert all(tensor.tensor.data_ptr() != X[32:48].data_ptr() for tensor in capture.steps[-2].kept)
    loop.exporter.close()


def test_a_tensor_that_is_input_and_target_is_kept(tmp_path):
    loop = Loop(tmp_path, model=nn.Linear(6, 6))
    for step in range(3):
        x = X[step : step + 16].clone()
        loop.step((x, x))
    assert all(torch.equal(each, X[2:18]) for each in batch_of(loop.dump()))


def test_kept_batches_are_released(tmp_path):
    loop = Loop(tmp_path)
    batches = []
    for _ in range(6):
        x = X[:16].clone()
        batches.append(weakref.ref(x.untyped_storage()))
        loop.step((x, Y[:16].clone()))
    del x
    gc.collect()
    capture = loop.exporter._attachment.recorder._steps._capture
    assert len(capture.steps) == 2
    assert capture._bytes == 2 * (16 * 6 + 16 + 16) * 4
    loop.exporter.close()


def test_memory_stays_within_the_budget(tmp_path, caplog):
    loop = Loop(tmp_path, max_memory=20_000)  # a tenth of it for batches
    capture = loop.exporter._attachment.recorder._steps._capture
    for rows in (16, 32, 16, 200, 16, 16):
        loop.step((X[:rows].clone(), Y[:rows].clone()))
        held = sum(tensor.tensor.nbytes for step in capture.steps for tensor in step.kept)
        assert held == capture._bytes <= 2000
    assert "batches of more than 2000 bytes" in loop.dump().facts["left_out"]["batches.pt"]
    assert "cannot be recorded" not in caplog.text  # the user has not asked for it


def test_rows_in_dumps_can_be_switched_off(tmp_path):
    loop = Loop(tmp_path, record_batches=False).run(3)
    loop.step((X[:16].clone(), Y[:16].clone()), ids=[range(16)])
    dump = loop.dump()
    assert not dump.has("batches.pt")
    assert not dump.has("batch_rows.npz")
    with pytest.raises(ConfigError, match="a replay needs batches"):
        RecorderOptions(record_batches=False, state_every=1)
    with pytest.raises(ConfigError, match="record_batches must be True, False or None"):
        RecorderOptions(record_batches="host")


def test_each_micro_batch_has_its_ids(tmp_path):
    loop = Loop(tmp_path)
    loop.step((X[:4], Y[:4]), (X[4:8], Y[4:8]), ids=[["a", "b", "c", "d"], [4, 5, 6]])
    dump = loop.dump()
    rows = dump.arrays("batch_rows.npz")
    assert rows["parts"].tolist() == [0] * 4 + [1] * 4
    assert rows["ids"].tolist() == ["a", "b", "c", "d", "", "", "", ""]
    assert dump.facts["left_out"]["ids"] == "3 ids were given for the 4 rows of step 0"
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in dump.path.iterdir())


def test_as_many_ids_as_features_are_no_rows(tmp_path):
    loop = Loop(tmp_path)
    loop.step((X[:4], Y[:4]), ids=[range(6)])
    assert loop.dump().facts["left_out"]["ids"] == "6 ids were given for the 4 rows of step 0"


@pytest.mark.parametrize(
    ("ids", "texts"),
    [
        (np.arange(4), "0123"),
        (torch.arange(4)[:, None], "0123"),
        (list(torch.arange(4)), "0123"),
        ([[1] * i for i in range(4)], ["[]", "[1]", "[1, 1]", "[1, 1, 1]"]),
        ([None, 1, "b", (2, 3)], ["None", "1", "b", "(2, 3)"]),
    ],
    ids=["array", "column", "tensors", "lists", "mixed"],
)
def test_ids_of_any_form_become_texts(tmp_path, ids, texts):
    loop = Loop(tmp_path)
    loop.step((X[:4], Y[:4]), ids=[ids])
    assert loop.dump().arrays("batch_rows.npz")["ids"].tolist() == list(texts)


def test_the_number_of_ids_says_which_axis_has_the_rows(tmp_path):
    """Three sequences of eight positions, with the batch as the second axis."""

    class Words(nn.Linear):
        def forward(self, x):
            return super().forward(x).reshape(-1, 1)

    x, y = X[:24].reshape(8, 3, 6), Y[:24].reshape(8, 3, *Y.shape[1:])
    loop = Loop(tmp_path, model=Words(6, 1))
    loop.step((x, y.reshape(24, *Y.shape[1:])), ids=[["a", "b", "c"]])
    dump = loop.dump()
    rows = dump.arrays("batch_rows.npz")
    assert rows["ids"].tolist() == ["a", "b", "c"]
    assert np.array_equal(rows["hashes"], row_hashes(x.movedim(1, 0)))
    [part] = parts_of(dump, dump.tensors("batches.pt")[-1])
    [labels], _ = part.of([1])[1]
    assert torch.equal(labels, y[:, 1])


@pytest.mark.parametrize("ids", ["abc", 5, None, iter([1]), {"id": [1]}, np.array(3), torch.tensor(3)])
def test_ids_that_are_no_collection_are_refused(tmp_path, ids):
    loop = Loop(tmp_path)
    with pytest.raises(ConfigTypeError, match=r"rows\(\) needs a list, an array or a tensor of ids, got"):
        loop.exporter.rows(ids)
    loop.exporter.close()


class OfDict(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 1)

    def forward(self, batch):
        x = batch["x"][0] if isinstance(batch, dict) else next(batch)
        return self.inner(x)


def test_nested_batches_are_kept_and_iterators_are_left_out_and_said(tmp_path):
    loop = Loop(tmp_path / "nested", model=OfDict())
    loop.step(({"x": [X[:8]], "length": 3}, Y[:8]))
    found, _ = batch_of(dump := loop.dump())
    assert torch.equal(found["x"][0], X[:8])
    assert np.array_equal(dump.arrays("batch_rows.npz")["hashes"], row_hashes(X[:8]))
    loop = Loop(tmp_path / "iterator", model=OfDict())
    loop.step((iter([X[:8]]), Y[:8]))
    assert "list_iterator cannot be copied" in loop.dump().facts["left_out"]["batches.pt"]
    assert loop.exporter.health().errors == 0


def test_a_loss_that_is_nan_in_the_first_step_writes_its_batch(tmp_path):
    loop = Loop(tmp_path)
    x = X[:16].clone()
    x[3, 2] = torch.nan
    loop.step((x, Y[:16].clone()))
    dump = loop.dump()
    assert dump.step == 0
    assert dump.reasons[1] == "row 3 of the batch has a loss that is not finite"


# -- rows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64]
)
def test_hashes_differ_if_a_bit_of_a_row_that_is_read_differs(dtype):
    x = torch.randint(0, 2, (50, 3, 5), generator=torch.Generator().manual_seed(0)).to(dtype)
    distinct = {tuple(row.reshape(-1).tolist()) for row in x}
    assert len(set(row_hashes(x).tolist())) == len(distinct)
    assert row_hashes(x[7:8]).tolist() == row_hashes(x)[7:8].tolist()
    assert row_hashes(x[:, :0]).tolist() == row_hashes(x[:1, :0]).tolist() * 50


def test_a_hash_of_a_long_row_reads_1024_elements_from_its_first_to_its_last_part():
    x = torch.zeros(1, 10_240)
    plain = row_hashes(x)[0]
    changes = []
    for place in range(10_240):
        x[0, place] = 1.0
        changes.append(bool(row_hashes(x)[0] != plain))
        x[0, place] = 0.0
    assert [i for i, changed in enumerate(changes) if changed] == list(range(0, 10_240, 10))


def test_items_of_datasets_have_the_hashes_of_their_rows():
    rows = row_hashes(torch.tensor([[1, 2, 3], [4, 5, 6]]))
    assert item_hashes(([1, 2, 3], 7)) == {int(rows[0])}
    assert item_hashes({"tokens": np.array([4, 5, 6]), "text": "x", "more": [torch.tensor([1, 2, 3])]}) == set(
        map(int, rows)
    )
    assert item_hashes("text") == item_hashes([]) == item_hashes(np.array(["a"])) == set()


@pytest.mark.parametrize(
    ("model_call", "loss_call", "count", "second"),
    [
        ([(torch.zeros(5, 3),), {}], [(torch.arange(5),), {}], 5, 1),
        ([(torch.zeros(7, 5, 3),), {}], [(torch.arange(5),), {}], 5, 1),
        ([(torch.zeros(5, 4).long(),), {}], [(torch.arange(20),), {}], 5, [4, 5, 6, 7]),
        ([(), {"x": torch.zeros(5, 2), "mask": torch.ones(3, 3), "flag": True}], [(torch.arange(5),), {}], 5, 1),
        ([(torch.zeros(4, 4),), {}], [(torch.arange(4),), {}], 4, 1),
    ],
)
def test_rows_are_found_along_the_axis_of_the_batch(model_call, loss_call, count, second):
    batch = BatchRows(model_call, loss_call)
    assert batch.count == count
    part, [[labels], _] = batch.of([1])
    assert labels.reshape(-1).tolist() == torch.tensor(second).reshape(-1).tolist()
    assert BatchRows(part, [(labels,), {}]).count == 1
    assert all(torch.equal(a, b) for a, b in zip(batch.of(range(count))[1][0], loss_call[0], strict=True))


def test_a_call_without_tensors_has_no_rows():
    assert BatchRows([(3, "text"), {}]).count == 0
    assert unusual(BatchRows([(3,), {}])) == []


def test_unusual_rows_are_described():
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    x[1, 0], x[2, 3], x[4], x[7] = torch.nan, 900.0, x[9].clone(), x[7] + 40
    labels = torch.arange(32) % 2
    labels[11] = 8
    tokens = torch.randint(1, 9, (32, 20), generator=torch.Generator().manual_seed(0))
    for row in range(32):
        tokens[row, 3 if row == 13 else 18 + row % 2 :] = 0
    found = unusual(BatchRows([(x, tokens), {}], [(labels,), {}]))
    assert {row: texts for row, texts in enumerate(found) if texts}.keys() == {1, 2, 4, 7, 9, 11, 13}
    assert found[1] == ["input has 1 values that are NaN or infinite"]
    assert found[2][0].startswith("input has values up to 900, in the other rows up to 4")
    assert found[4] == ["its content is that of row 9"]
    assert found[7][0].startswith("the mean of input is 4")
    assert found[11] == ["no other row has the value 8 of labels"]
    assert found[13] == ["the length of input is 3, the median of all rows 18"]
