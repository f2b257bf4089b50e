import io
import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from ikkuna.backends.tensorboard import TensorBoardBackend, overview
from ikkuna.store.names import Series, SeriesGroup, series_of_tag
from ikkuna.store.quantity import Quantity
from ikkuna.store.values import Matrix, ModuleEntry

accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

HISTOGRAM = SimpleNamespace(
    min=0.0, max=2.0, num=3, sum=3.0, sum_squares=5.0, bucket_limits=[1.0, 2.0], bucket_counts=[1, 2]
)

HEADLINE = Quantity(is_headline=True)


@pytest.fixture
def backend(tmp_path):
    backend = TensorBoardBackend()
    backend.open(tmp_path)
    yield backend
    assert backend.close()


def load(path):
    accumulator = accumulators.EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0, "histograms": 0})
    return accumulator.Reload()


def points(accumulator, tag):
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def test_tensorboard_reads_what_was_written(backend, tmp_path):
    for step in range(20):
        for module in ("features.0", "features.1", "lstm:1.0"):
            backend.add_scalar(Series("weights_norm2", module), step + len(module), step)
        backend.add_scalar(Series("loss", quantity=HEADLINE), step / 2, step)
        backend.add_scalar(Series("loss", None, "testing", quantity=HEADLINE), float(step), step)
        backend.commit(step)
    assert backend.close(30)
    found = load(tmp_path)
    assert sorted(found.Tags()["scalars"]) == [
        "Dashboard/loss",
        "Dashboard/loss.testing",
        "Network/loss",
        "Network/loss.testing",
        "Overview/weights_norm2_max",
        "Overview/weights_norm2_median",
        "Overview/weights_norm2_min",
        "weights_norm2/features.0",
        "weights_norm2/features.1",
        "weights_norm2/lstm:1.0",
    ]
    assert points(found, "Network/loss") == [(step, step / 2) for step in range(20)]
    assert points(found, "weights_norm2/features.0") == [(step, step + 10) for step in range(20)]
    assert points(found, "Overview/weights_norm2_min") == [(step, step + 8) for step in range(20)]
    times = [event.wall_time for event in found.Scalars("Network/loss")]
    assert times == sorted(times)


@pytest.mark.parametrize("title", [None, "Norm"])
@pytest.mark.parametrize("known", [True, False], ids=["modules known", "modules unknown"])
def test_groups_of_values_are_written_as_single_values(tmp_path, title, known):
    """The same curves, titles and summaries, also if the values of a kind come in several groups, or as one alone."""
    groups = [SeriesGroup("a", ("x", "y", "opt"), title=title), SeriesGroup("a", ("z",), title=title)]
    groups += [SeriesGroup("a", ("x", None), "testing"), SeriesGroup("b", ("y",))]
    found = []
    for name, at_once in (("single", False), ("groups", True)):
        backend = TensorBoardBackend()
        backend.open_later(lambda name=name: tmp_path / name)
        (tmp_path / name).mkdir()
        if known:
            backend.describe([ModuleEntry(module, "Linear") for module in "xyz"])
        for step in range(4):
            for i, group in enumerate(groups[: 2 + step]):
                values = np.array([step + 0.1 * i + j for j in range(len(group.names))])
                values[0] = (values[0], math.nan, 1e300, values[0])[step]
                add = backend.add_group if at_once else super(TensorBoardBackend, backend).add_group
                add(group, values, step)
            backend.add_scalar(Series("a", "w", title=title), 0.5, step)
            backend.commit(step)
        assert backend.close(30)
        assert backend.dropped == 0
        events = load(tmp_path / name)
        points_of = {tag: [(s, str(v)) for s, v in points(events, tag)] for tag in events.Tags()["scalars"]}
        found.append(
            (points_of, events.Tags()["images"], events.SummaryMetadata("a/z").display_name if title else None)
        )
    assert found[0] == found[1]
    assert len(found[0][0]["a/x"]) == 4
    assert "Overview/a_max" in found[0][0]


def test_a_single_module_has_no_overview(backend, tmp_path):
    backend.add_scalar(Series("a", "fc"), 1.0, 0)
    backend.add_scalar(Series("a", "fc"), 2.0, 0)
    backend.commit(0)
    backend.close(30)
    assert load(tmp_path).Tags()["scalars"] == ["a/fc"]


def test_the_overview_is_of_one_step_and_one_pass(backend, tmp_path):
    backend.add_scalar(Series("a", "x"), 1.0, 0)
    backend.commit(0)
    backend.add_scalar(Series("a", "y"), 2.0, 1)
    backend.add_scalar(Series("a", "x", "testing"), 3.0, 1)
    backend.commit(1)
    backend.close(30)
    assert not [tag for tag in load(tmp_path).Tags()["scalars"] if tag.startswith("Overview")]


@pytest.mark.parametrize(
    ("values", "found"),
    [([3.0, 1.0, 2.0], (1, 2, 3)), ([1.0, 2.0], (1, 1.5, 2)), ([math.inf, -math.inf, 0], (-math.inf, 0, math.inf))],
)
def test_the_overview_is_minimum_median_and_maximum(values, found):
    assert overview(np.array([values, values])).tolist() == [list(found)] * 2
    assert all(map(math.isnan, overview(np.array([[*values, math.nan]]))[0]))


def test_titles_texts_histograms_and_pictures_arrive(backend, tmp_path):
    backend.add_scalar(Series("a", "fc", title="Norm of fc"), 1.0, 0)
    backend.add_histogram(Series("weights", "fc"), HISTOGRAM, 0)
    backend.add_text("Model", "| a | b |", 0)
    backend.add_matrix(Series("cosine", "fc"), Matrix(("a", "b"), ("x",), np.array([[1.0], [2.0]])), 0)
    backend.commit(0)
    backend.close(30)
    found = load(tmp_path)
    assert found.SummaryMetadata("a/fc").display_name == "Norm of fc"
    assert found.Histograms("weights/fc")[0].histogram_value.bucket == [1.0, 2.0]
    assert found.Tensors("Text/Model")[0].tensor_proto.string_val[0] == b"| a | b |"
    [image] = found.Images("Matrices/cosine/fc")
    assert Image.open(io.BytesIO(image.encoded_image_string)).size == (image.width, image.height)


def test_nan_and_infinities_arrive(backend, tmp_path):
    for step, value in enumerate((math.nan, math.inf, -math.inf)):
        backend.add_scalar(Series("loss"), value, step)
        backend.commit(step)
    backend.close(30)
    values = [value for _, value in points(load(tmp_path), "Network/loss")]
    assert math.isnan(values[0])
    assert values[1:] == [math.inf, -math.inf]


@pytest.mark.fault(90)
def test_a_run_that_goes_on_replaces_what_came_after_its_checkpoint(tmp_path):
    """The second file begins at step 50; the later steps of the first file are hidden."""
    for begin, end, value in ((0, 100, 1.0), (50, 80, 2.0)):
        backend = TensorBoardBackend()
        backend.open(tmp_path)
        if begin:
            backend.resume(begin)
        for step in range(begin, end):
            backend.add_scalar(Series("loss"), value, step)
            backend.commit(step)
        assert backend.close(30)
    found = points(load(tmp_path), "Network/loss")
    assert found == [(step, 1.0 if step < 50 else 2.0) for step in range(80)]


def test_a_backend_that_begins_later_hides_nothing(tmp_path):
    """A second backend in the directory of a run may get its first value at any step."""
    for begin in (0, 3):
        backend = TensorBoardBackend()
        backend.open(tmp_path)
        for step in range(begin, 6):
            backend.add_scalar(Series(f"from {begin}"), 1.0, step)
            backend.commit(step)
        assert backend.close(30)
    reader = load(tmp_path)
    assert [step for step, _ in points(reader, "Network/from 0")] == [0, 1, 2, 3, 4, 5]
    assert [step for step, _ in points(reader, "Network/from 3")] == [3, 4, 5]


def test_a_value_that_cannot_be_stored_leaves_the_step_whole(backend, tmp_path):
    backend.add_scalar(Series("a"), 1.0, 0)
    with pytest.raises(ValueError, match="could not convert"):
        backend.add_scalar(Series("b"), "x", 0)
    backend.commit(0)
    backend.close(30)
    assert load(tmp_path).Tags()["scalars"] == ["Network/a"]


@pytest.mark.fault(78)
def test_a_file_cut_anywhere_is_read_up_to_there(backend, tmp_path):
    for step in range(5):
        backend.add_scalar(Series("loss"), 1.0, step)
        backend.commit(step)
    backend.close(30)
    whole = backend.path.read_bytes()
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader").RawEventFileLoader
    counts = []
    cut = tmp_path / "events.out.tfevents.cut"
    for size in range(len(whole) + 1):
        cut.write_bytes(whole[:size])
        counts.append(len(list(loader(str(cut)).Load())))
    assert counts == sorted(counts)
    assert set(counts) == set(range(7))


DATA_SERVER = """
import json, sys
from tensorboard import context
from tensorboard.data import server_ingester
from tensorboard.util import grpc_util
import tensorboard_data_server

server = server_ingester.SubprocessServerDataIngester(
    server_binary=server_ingester.ServerBinary(tensorboard_data_server.server_binary(), version="0.7.0"),
    logdir=sys.argv[1],
    reload_interval=0,
    channel_creds_type=grpc_util.ChannelCredsType.LOCAL,
)
server.start()
provider, question = server.data_provider, context.RequestContext()
read = provider.read_scalars(question, experiment_id="", plugin_name="scalars", downsample=100)
texts = provider.list_tensors(question, experiment_id="", plugin_name="text")
with open(sys.argv[2], "w") as file:
    scalars = {tag: [(point.step, point.value) for point in series] for tag, series in read["."].items()}
    json.dump([scalars, sorted(texts["."])], file)
"""


def test_the_fast_reader_of_tensorboard_agrees(backend, tmp_path, child):
    """The data server is another program with another parser."""
    server = pytest.importorskip("tensorboard_data_server")
    if server.server_binary() is None:
        pytest.skip("no data server for this platform")
    for step in range(30):
        for module in ("a", "b:1.0", "größe/%"):
            backend.add_scalar(Series("weights_norm2", module), float(step), step)
        backend.commit(step)
    backend.add_text("Model", "text", 30)
    backend.commit(30)
    backend.close(30)
    answer = tmp_path / "answer.json"
    process = child(DATA_SERVER, tmp_path, answer)
    assert process.wait(60) == 0, process.output.read_text()
    scalars, texts = json.loads(answer.read_text())
    assert set(scalars) == {
        "weights_norm2/a",
        "weights_norm2/b:1.0",
        "weights_norm2/größe/%25",
        "Overview/weights_norm2_min",
        "Overview/weights_norm2_median",
        "Overview/weights_norm2_max",
    }
    assert scalars["weights_norm2/a"] == [[step, step] for step in range(30)]
    assert texts == ["Text/Model"]


def layout_of(path):
    """Return the latest layout of a run: the titles of the charts, with their tags, by category."""
    from tensorboardX.proto.layout_pb2 import Layout

    found = accumulators.EventAccumulator(str(path)).Reload()
    layout = Layout.FromString(found.Tensors("custom_scalars__config__")[-1].tensor_proto.string_val[0])
    return {each.title: {chart.title: chart.multiline.tag[0] for chart in each.chart} for each in layout.category}


@pytest.mark.parametrize(("count", "tag"), [(2, "weights_norm2/m1"), (60, "Overview/weights_norm2_median")])
def test_the_layout_has_one_chart_for_each_kind(tmp_path, count, tag):
    backend = TensorBoardBackend()
    backend.open(tmp_path)
    for step in range(2):
        backend.add_scalar(Series("loss"), 0.5, step)
        for kind in ("weights_norm2", "weights_norm2_ratio")[: step + 1]:
            for i in range(count):
                backend.add_scalar(Series(kind, f"m{i}"), 1.0, step)
        backend.commit(step)
    assert backend.close(30)
    layout = layout_of(tmp_path)
    [title, other] = layout["Layers"]
    assert title.startswith("weights_norm2")
    assert other.startswith("weights_norm2_ratio")
    assert re.search(layout["Layers"][title], tag)
    assert not re.search(layout["Layers"][title], tag.replace("norm2", "norm2_ratio"))
    assert re.search(layout["Network"]["loss"], "Network/loss.testing")


def test_tags_of_rules_that_earlier_versions_wrote_are_read():
    assert series_of_tag("Rules/weights_norm2/a.0") == Series("weights_norm2", "a.0")
    assert series_of_tag("Rules/output_entropy") == Series("output_entropy")
