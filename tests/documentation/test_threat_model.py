"""The tests that the page on the threat model names exist."""

import ast
import re

import pytest

from tests.plugins.children import ROOT

PAGE = ROOT / "sphinx" / "source" / "threat_model.rst"
NAMED = sorted(set(re.findall(r"``(tests/[\w/]+\.py)::(\w+)``", PAGE.read_text(encoding="utf-8"))))


def test_the_page_names_tests():
    assert len(NAMED) > 10


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_a_named_test_exists(file, name):
    functions = [
        node.name for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body if hasattr(node, "name")
    ]
    assert name in functions
