"""Docstrings, comments, errors and log lines are plain technical English, and parameters have types."""

import pytest

from tests.language import offenders
from tests.test_structure import PACKAGED, ROOT, each

WRITTEN = [
    path for folder in ("tests", "benchmarks", "examples", "sphinx") for path in sorted((ROOT / folder).rglob("*.py"))
]


@each([*PACKAGED, *WRITTEN])
def test_texts_are_plain_technical_english(path):
    assert offenders(path) == []


DOCSTRING = '''"""{summary}

Parameters
----------
{entry}
    The meaning.
"""
'''


@pytest.mark.parametrize(
    "entry",
    [
        "x : Tensor",
        "x, y : Tensor or array, optional",
        "p : float, default 2",
        "kinds : str or list of str",
        "shape : tuple of int",
        "weight : Tensor of shape (out, in)",
        "mode : {'sum', 'mean'}",
        "norm : 'auto', None or (float, float)",
        "make : callable",
        "model : nn.Module",
        "by_name : dict[str, list[int]]",
        "modules : str, Pattern, callable, sequence of them, or None",
        "**options",
        "**options : Any",
    ],
)
def test_types_are_accepted(entry, tmp_path):
    (tmp_path / "module.py").write_text(DOCSTRING.format(summary="A summary.", entry=entry))
    assert offenders(tmp_path / "module.py") == []


@pytest.mark.parametrize(
    "entry",
    ["x", "x : the input", "x : (rows, columns)", "x : ``(rows,)``, one of each", "steps : training steps seen", "the input : Tensor"],
)  # fmt: skip
def test_meanings_in_the_place_of_a_type_are_found(entry, tmp_path):
    (tmp_path / "module.py").write_text(DOCSTRING.format(summary="A summary.", entry=entry))
    assert len(offenders(tmp_path / "module.py")) == 1


@pytest.mark.parametrize(
    "code",
    [
        '"""Tell what is wrong."""',
        '"""Takes a tensor."""',
        '"""Look at the model."""',
        '"""What a step computes."""',
        '"""Of several values the last one counts."""',
        '"""A value for nobody."""',
        "x = 1  # for whoever asks",
        'raise ValueError(f"somebody took {1}")',
        'log.warning("%s is to be had", 1)',
        f'"""{121 * "x"}"""',
    ],
)
def test_other_sentences_are_found(code, tmp_path):
    (tmp_path / "module.py").write_text(code)
    assert len(offenders(tmp_path / "module.py")) == 1


def test_plain_sentences_are_accepted(tmp_path):
    (tmp_path / "module.py").write_text('"""Look up a name, and return it."""\nx = 1  # a reason')
    assert offenders(tmp_path / "module.py") == []
