"""Models of other projects: training is bit-identical, and every number is that of an independent reference."""

import json
from pathlib import Path

import pytest

from tests.real_models.table import MODELS
from tests.real_models.training import check

ORDINARY = (
    *("GPT-2", "Llama, checkpointed", "Mixtral", "ALBERT", "T5", "Mamba", "RoBERTa"),
    *("Swin", "ResNet", "Wav2Vec2", "CLIP", "DETR"),
)
"""The models of the ordinary tests: one of each architecture."""


@pytest.mark.parametrize("name", ORDINARY)
def test_model(name: str) -> None:
    check(MODELS[name])


def test_the_readme_states_the_number_of_model_classes_that_are_right():
    """Results are stored by ``python -m tests.real_models``."""
    stored = json.loads(Path(__file__).with_name("results.json").read_text(encoding="utf-8"))
    assert {name: result["wrong"] for name, result in stored.items() if result["wrong"]} == {}
    classes = {result["class"] for result in stored.values()}
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert f"{len(classes)} classes of models of other projects" in readme


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ORDINARY])
def test_other_model(name: str) -> None:
    check(MODELS[name])
