"""The values of one step, by their tags."""

from dataclasses import dataclass, field
from typing import Any

from ikkuna.visualization.matrix import Matrix
from ikkuna.visualization.run_config import ConfigValue

__all__ = ["StepValues"]


@dataclass(slots=True)
class StepValues:
    """The values of one step.

    Parameters
    ----------
    step : int
        The step.
    scalars : dict of str to float
        Numbers by their tags; they may be NaN or infinite.
    histograms : dict of str to HistogramLike
        Histograms by their tags.
    matrices : dict of str to Matrix
        Matrices by their tags.
    texts : dict of str to str
        Pages of Markdown by their titles.
    config : dict
        The hyper-parameters, if they were added at this step.
    """

    step: int = 0
    scalars: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, Any] = field(default_factory=dict)
    matrices: dict[str, Matrix] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    config: dict[str, ConfigValue] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Number of values, without hyper-parameters."""
        return len(self.scalars) + len(self.histograms) + len(self.matrices) + len(self.texts)
