"""The way of one activation from the hook to the file is short."""

import pytest

from tests.documentation.tracing import files, trace


@pytest.fixture(scope="module")
def calls():
    return trace()


def test_the_way_from_the_hook_to_the_file_is_short(calls):
    assert len(files(calls)) <= 40
    assert len(calls) <= 200


def test_the_way_begins_in_a_hook_and_ends_in_a_file(calls):
    assert files(calls)[0].startswith("ikkuna/export/hooks/")
    assert calls[0].thread == "training"
    assert calls[-1].thread == "writer"
    order = [files(calls).index(f"ikkuna/visualization/{file}.py") for file in ("tensorboard", "files/append_file")]
    assert order == sorted(order)
