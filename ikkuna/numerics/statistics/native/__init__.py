"""The statistics kernels in C++: one pass over a tensor instead of one per operator.

They are compiled once per machine, in less than a second, by the compiler that is installed.
Without a compiler `ikkuna.numerics.statistics.eager` computes the same.
"""

from ikkuna.numerics.statistics.native.build import library
from ikkuna.numerics.statistics.native.library import Library

__all__ = ["Library", "library"]
