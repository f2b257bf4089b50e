"""The statistics kernels in C++: one pass over a tensor instead of one per operator.

They are compiled once per machine, in less than a second, by the compiler that is installed.
Without a compiler `ikkuna.numerics.statistics.host` computes the same.
"""

from ikkuna.numerics.statistics.native.kernels import Library, library

__all__ = ["Library", "library"]
