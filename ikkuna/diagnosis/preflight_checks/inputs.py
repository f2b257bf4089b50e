"""Check of the scale of inputs and labels."""

from collections.abc import Iterator

from torch import Tensor

from ikkuna.diagnosis.finding import Finding
from ikkuna.diagnosis.preflight_checks.forward_record import widened
from ikkuna.diagnosis.preflight_checks.trial import Trial

__all__ = ["input_scale"]

_LARGEST = 10.0


def input_scale(trial: Trial) -> Iterator[Finding]:
    """Find floating-point inputs and labels whose mean or standard deviation is 10 or more."""
    for what, tensors in (("inputs", trial.batch.tensors), ("labels", [trial.batch.labels])):
        for tensor in tensors:
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.numel() < 2:
                continue
            values = widened(tensor)
            mean, deviation = float(values.mean()), float(values.std(correction=0))
            if max(abs(mean), deviation) >= _LARGEST:
                message = f"The {what} have the mean {mean:.3g} and the standard deviation {deviation:.3g}."
                advice = "normalise them to a mean near 0 and a standard deviation near 1"
                yield Finding("input_scale", "info", message, value=max(abs(mean), deviation), advice=advice)
                break
