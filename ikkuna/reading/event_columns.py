"""The values of an event file as arrays."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["KIND_HISTOGRAM", "KIND_TENSOR", "OTHER_FIELDS", "START_FIELDS", "EventColumns"]

KIND_HISTOGRAM, KIND_TENSOR = 5, 8
"""The numbers of fields of ``Summary.Value``."""
OTHER_FIELDS, START_FIELDS = 5, 3


class EventColumns(NamedTuple):
    """The values of an event file.

    Parameters
    ----------
    steps : ndarray (events,)
        The step of each event that has a value.
    times : ndarray (events,)
        The time of each event, in seconds since 1970.
    tags : list of str
        The tags.
    tag, event : ndarray (scalars,)
        For each scalar the number of its tag and that of its event.
    value : ndarray (scalars,)
        The scalars, in single precision.
    others : ndarray (values, 5)
        For each other value the number of its tag, that of its event, the field of ``Summary.Value`` that has it, and the
        position and size of the ``Summary.Value`` in the file.
    starts : ndarray (sessions, 3)
        For each ``SessionLog.START`` the step from which on it replaces earlier values, and how many scalars and other values
        are before it.
    lost : int
        Number of damaged bytes.
    """

    steps: NDArray[np.int64]
    times: NDArray[np.float64]
    tags: list[str]
    tag: NDArray[np.int32]
    event: NDArray[np.int32]
    value: NDArray[np.floating[Any]]
    others: NDArray[np.int64]
    starts: NDArray[np.int64]
    lost: int
