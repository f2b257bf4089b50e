"""The page on the life of an activation shows what runs, and the way from the hook to the file is short."""

import sys
from itertools import chain
from xml.etree import ElementTree

import pytest

from tests.documentation.tracing import files, trace, tree, way
from tests.plugins.children import ROOT

EXTENSIONS = ROOT / "sphinx" / "source" / "_ext"


@pytest.fixture(scope="module")
def calls():
    return trace()


@pytest.fixture
def life(monkeypatch):
    pytest.importorskip("sphinx")
    monkeypatch.syspath_prepend(str(EXTENSIONS))
    import ikkuna_life

    yield ikkuna_life
    for name in ("ikkuna_life", "ikkuna_tables"):
        sys.modules.pop(name)


def test_the_way_of_the_activation_is_short(calls):
    handled = list(chain(*way(calls).values()))
    assert len(files(handled)) <= 20
    assert len(handled) <= 66
    assert len(way(calls)["delivery"]) <= 46


def test_a_step_is_short(calls):
    assert len(files(calls)) <= 33
    assert len(calls) <= 167


def test_the_way_begins_in_a_hook_and_ends_in_a_file(calls):
    assert files(calls)[0].startswith("ikkuna/observation/hooks/")
    assert calls[0].thread == "training"
    assert calls[-1].thread == "writer"
    assert calls[-1].file.startswith("ikkuna/store/")
    assert any(call.file == "ikkuna_subscribers/moments.py" for call in calls)


def test_every_step_runs_the_same_functions(calls):
    assert trace() == calls


def test_the_table_lists_the_traced_files_in_order(life, calls):
    cells = [line.strip(" -`") for line in life.file_table(calls).splitlines()]
    assert [cell for cell in cells if cell.endswith((".py", ".cpp"))] == files(calls)


def test_the_drawing_shows_every_file_in_its_folder(life, calls):
    drawn = [node.text for node in ElementTree.fromstring(life.draw(calls)).iter() if node.text]
    for (thread, folder), names in life.rooms(calls).items():
        below = " ".join(drawn[drawn.index(f"{folder} · {thread} thread") + 1 :])
        assert ", ".join(names) in below


def test_every_file_has_a_summary(life, calls):
    assert all(life.summary(file) for file in files(calls))


def test_the_tree_shows_each_call_below_its_caller(calls):
    lines = tree(calls)
    [compute] = [
        i for i, line in enumerate(lines) if line.strip().startswith("SharedStatisticSubscriber.compute_batch ")
    ]
    assert "Subscriber.emit_batch" in "".join(lines[compute:])
    assert not lines[0].startswith(" ")


def test_the_activation_is_handled_in_a_hook_in_the_delivery_and_in_the_writer_thread(calls):
    hook, delivery, writer = way(calls).values()
    assert any(call.file.startswith("ikkuna/numerics/statistics/") for call in hook)
    assert any(call.function == "NormSubscriber.values" for call in delivery)
    assert {call.thread for call in writer} == {"writer"}
