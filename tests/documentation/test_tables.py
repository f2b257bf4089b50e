"""The generated tables of the documentation are complete."""

import importlib.util
import sys

import pytest
import torch

from ikkuna.backends.backend import GROUP as BACKENDS
from ikkuna.export import subscriber
from ikkuna.metrics.messages.kinds import BUILT_IN
from ikkuna.metrics.subscriber.bases import GROUP as PRESETS
from ikkuna.support.plugins import plugin_names
from tests.faults import FAULTS, LEFT_OUT, SECTIONS
from tests.plugins.children import ROOT


def extension(name):
    pytest.importorskip("sphinx")
    spec = importlib.util.spec_from_file_location(name, ROOT / f"sphinx/source/_ext/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop(name, None)


tables = pytest.fixture(scope="module", name="tables")(lambda: (yield from extension("ikkuna_tables")))
gallery = pytest.fixture(name="gallery")(lambda: (yield from extension("ikkuna_gallery")))


def rows(text):
    """Return the rows of a list-table without its head, each a list of cells."""
    cells = [line[5:].removeprefix("- ") for line in text.splitlines() if line.startswith(("   * - ", "     - "))]
    width = text.split("   * - ")[1].count("\n     - ") + 1
    return [cells[i : i + width] for i in range(width, len(cells), width)]


def test_every_preset_is_described_with_what_it_publishes(tables):
    found = {row[0].strip("`'"): row[1:] for row in rows(tables.presets())}
    assert set(found) == plugin_names(PRESETS)
    assert "``NormSubscriber`` (weights_norm2)" in found["default"][1]
    assert all(description for description, _ in found.values())


def test_every_kind_is_described(tables):
    assert [row[0] for row in rows(tables.kinds())] == [f"``{kind}``" for kind in BUILT_IN]


def test_a_kind_without_a_description_is_an_error(tables, monkeypatch):
    monkeypatch.delitem(tables.KINDS, "loss")
    with pytest.raises(ValueError, match="loss"):
        tables.kinds()


@pytest.mark.parametrize("name", sorted(plugin_names(subscriber.GROUP)))
def test_the_docstring_of_every_metric_states_what_it_takes_and_publishes(tables, name):
    takes, publishes, _ = tables.exchange(getattr(subscriber, name))
    assert takes
    assert publishes.startswith(("``", "nothing"))


def test_a_docstring_that_does_not_state_this_is_an_error(tables):
    class Silent:
        """A metric."""

    with pytest.raises(ValueError, match="the docstring of Silent does not say 'Takes …; publishes …, in …'"):
        tables.exchange(Silent)


def test_the_statement_is_split_into_its_parts(tables):
    class Metric:
        """A metric.

        Some formula.  Takes any kind; publishes ``{kind}_a`` and ``{kind}_b``, in the unit
        of x; more.
        """

    assert tables.exchange(Metric) == ("any kind", "``{kind}_a`` and ``{kind}_b``", "in the unit of x")


def test_every_metric_and_backend_is_in_its_table(tables):
    assert len(rows(tables.metrics())) == len(plugin_names(subscriber.GROUP))
    assert {row[0] for row in rows(tables.backends())} == {f"``'{name}'``" for name in plugin_names(BACKENDS)}


def test_every_loop_of_the_tests_is_in_the_table(tables):
    situations = {row[0]: row for row in rows(tables.loops())}
    assert situations["siamese forwards"][2] == "``test_siamese_forwards``"
    assert len(situations) > 20
    assert len(rows(tables.trainers())) > 5


def test_every_fault_is_listed_and_has_a_test(tables):
    catalogue = {*range(1, 61), *range(67, 92)}
    assert {number for number in FAULTS.keys() | LEFT_OUT.keys() if number < 200} == catalogue
    assert not FAULTS.keys() & LEFT_OUT.keys()
    assert tables.marked_tests().keys() == FAULTS.keys()
    listed = [row for section in SECTIONS for row in rows(tables.faults(section))]
    assert [what for what, _, _ in listed] == [fault.what for fault in FAULTS.values()]
    assert all("``test_" in tests for _, _, tests in listed)


def test_a_fault_without_a_test_is_an_error(tables, monkeypatch):
    monkeypatch.setitem(tables.FAULTS, 999, FAULTS[1])
    with pytest.raises(ValueError, match="999"):
        tables.faults("arguments")


def test_the_gallery_shows_each_picture_above_the_code_that_draws_it(gallery, tmp_path, monkeypatch):
    assert [path.name[:4] for path in gallery.examples("inspection")] == [f"ex{i:02}" for i in range(1, 14)]
    [example] = [path for path in gallery.examples("inspection") if path.stem == "ex12_nan"]
    monkeypatch.setattr(gallery, "examples", lambda topic: [example])
    state = torch.get_rng_state()
    pictures = gallery.draw("inspection", tmp_path)
    assert pictures == {"ex12_nan": [tmp_path / "nan_histogram.png", tmp_path / "nan_heatmap.png"]}
    assert torch.equal(torch.get_rng_state(), state)
    text = gallery.section(example, pictures["ex12_nan"])
    order = [
        text.index(part) for part in ("NaN\n~~~", "yellow", "nan_histogram.png", "nan_heatmap.png", ":pyobject: main")
    ]
    assert order == sorted(order)


def test_pictures_that_are_up_to_date_are_not_drawn_again(gallery, tmp_path, monkeypatch):
    (tmp_path / "pictures.txt").write_text("ex07_last_state last_state.png")
    monkeypatch.setattr(gallery, "_draw", None)
    assert gallery.draw("inspection", tmp_path) == {"ex07_last_state": [tmp_path / "last_state.png"]}


def test_the_cost_of_every_metric_is_listed(tables):
    listed = {row[0].strip("`") for row in rows(tables.costs())}
    assert listed >= {name for name in plugin_names(subscriber.GROUP) if not name.startswith("Example")}


def test_a_metric_that_was_not_measured_is_an_error(tables, monkeypatch):
    known = tables.plugins(subscriber.GROUP)
    monkeypatch.setattr(tables, "plugins", lambda group: {**known, "NewSubscriber": None})
    with pytest.raises(ValueError, match="NewSubscriber"):
        tables.costs()


def test_the_table_of_errors_that_happened_lists_what_finds_each(tables):
    listed = rows(tables.real_errors())
    found = [row for row in listed if row[1] != "—" or row[2] != "—"]
    assert (len(listed), len(found)) == (14, 12)  # the page states both numbers
    assert all("https://" in row[0] for row in listed)
