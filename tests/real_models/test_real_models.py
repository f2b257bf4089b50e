"""Models of other projects: training is bit-identical, and every number is that of an independent reference."""

import pytest

from tests.real_models.language_models import LANGUAGE_MODELS
from tests.real_models.other_models import OTHER_MODELS
from tests.real_models.perception_models import PERCEPTION_MODELS
from tests.real_models.training import check

MODELS = {**LANGUAGE_MODELS, **PERCEPTION_MODELS, **OTHER_MODELS}

ORDINARY = (
    *("GPT-2", "Llama, checkpointed", "Mixtral", "ALBERT", "T5", "Mamba", "RoBERTa"),
    *("Swin", "ResNet", "Wav2Vec2", "CLIP", "DETR"),
)
"""The models of the ordinary tests: one of each architecture."""


@pytest.mark.parametrize("name", ORDINARY)
def test_model(name: str) -> None:
    check(MODELS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ORDINARY])
def test_other_model(name: str) -> None:
    check(MODELS[name])
