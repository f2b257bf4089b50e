"""Check of weights that should be one tensor."""

from collections.abc import Iterator

from torch import nn

from ikkuna.diagnosis.finding import Finding
from ikkuna.diagnosis.preflight_checks.trial import Trial
from ikkuna.diagnosis.tied_weights import embedding_pairs, have_same_values

__all__ = ["untied_weights"]


def untied_weights(trial: Trial) -> Iterator[Finding]:
    """Find an embedding and an output layer that were one tensor and are two now.

    Either the model's configuration says that they are tied, or two tensors have the same values by construction.
    """
    trial.require_values()
    configured = _configured(trial)
    modules = ((name, module) for module, name in trial.names.items())
    for name, embedding, other, layer in embedding_pairs(modules):
        a, b = embedding._parameters["weight"], layer._parameters["weight"]
        if a is None or b is None or a is b:
            continue
        if (embedding, layer) == configured or have_same_values(a, b):
            message = f"The weights of {name} and {other} are two tensors, but they should be tied."
            advice = f"assign {other}.weight = {name}.weight again (in transformers: model.tie_weights())"
            yield Finding("untied_weights", "error", message, other, advice=advice)


def _configured(trial: Trial) -> tuple[nn.Module | None, nn.Module | None] | None:
    """Return the input and the output layer that the configuration of a model of transformers ties."""
    config = getattr(trial.model, "config", None)
    text_config = getattr(config, "get_text_config", None)
    if not callable(text_config) or not getattr(text_config(decoder=True), "tie_word_embeddings", False):
        return None
    try:
        return trial.model.get_input_embeddings(), trial.model.get_output_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return None
