"""All models of other projects, by name."""

from tests.real_models.language_models import LANGUAGE_MODELS
from tests.real_models.more_diffusion import MORE_DIFFUSION
from tests.real_models.more_graphs import MORE_GRAPHS
from tests.real_models.more_pictures import MORE_PICTURES
from tests.real_models.more_transformers import MORE_TRANSFORMERS
from tests.real_models.other_models import OTHER_MODELS
from tests.real_models.perception_models import PERCEPTION_MODELS

__all__ = ["MODELS"]

MODELS = {
    **LANGUAGE_MODELS,
    **PERCEPTION_MODELS,
    **OTHER_MODELS,
    **MORE_TRANSFORMERS,
    **MORE_PICTURES,
    **MORE_GRAPHS,
    **MORE_DIFFUSION,
}
