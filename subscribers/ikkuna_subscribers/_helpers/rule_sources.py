"""The subscribers that publish what rules need, as texts for the reader of a report."""

__all__ = ["sources"]

_STATISTICS = {
    "norm2": "NormSubscriber",
    "mean": "MeanSubscriber",
    "variance": "VarianceSubscriber",
    "sparsity": "SparsitySubscriber",
    "nonfinite": "NonFiniteSubscriber",
    "min": "MinMaxSubscriber",
    "max": "MinMaxSubscriber",
}
_OTHERS = {
    "loss": "LossSubscriber() after set_loss()",
    "weight_updates_weights_ratio": 'RatioSubscriber(["weight_updates", "weights"])',
    "activations_dead": "DeadUnitsSubscriber() for modules such as nn.ReLU; functions such as torch.relu are not seen",
    "learning_rate": "LearningRateSubscriber()",
    "evaluation_mode": "ModuleStateSubscriber()",
    "weight_requires_grad": "ModuleStateSubscriber()",
    "untied_weights": "ModuleStateSubscriber()",
    "train_accuracy": "TrainAccuracySubscriber()",
    "test_accuracy": "TestAccuracySubscriber(data)",
    "nonfinite_producer": "NonFiniteSubscriber()",
    "activations_dimension": "DimensionSubscriber() for the layers with weights",
    "attention_evenness": "AttentionSubscriber(dataset)",
    "dead_experts": "RouterSubscriber(top_k)",
    "window_load_max": "RouterSubscriber(top_k)",
    "running_mean_distance": "RunningStatisticsSubscriber() for the batch norms",
    "running_variance_distance": "RunningStatisticsSubscriber() for the batch norms",
    "weights_ranks_norm2_min": 'RankSpreadSubscriber("weights", "norm2")',
    "weights_ranks_norm2_max": 'RankSpreadSubscriber("weights", "norm2")',
    "weight_state_step_mean": 'OptimizerStateSubscriber("step", "mean")',
    "optimizer_closure": "rules while the model trains",
    "unowned_parameters": "rules while the model trains",
    "step_skipped": "rules while the model trains",
}


def sources(*kinds: str) -> dict[str, str]:
    """Return the subscriber that publishes each of some kinds, as a call of its constructor.

    Examples
    --------
    >>> sources("weights_norm2", "output_dependence")
    {'weights_norm2': 'NormSubscriber("weights")', 'output_dependence': 'PredictionSubscriber()'}
    """
    return {kind: _source(kind) for kind in kinds}


def _source(kind: str) -> str:
    if kind in _OTHERS:
        return _OTHERS[kind]
    tensor, _, statistic = kind.rpartition("_")
    if kind.startswith(("output_", "prediction_", "label_")):
        return "PredictionSubscriber()"
    return f'{_STATISTICS[statistic]}("{tensor}")'
