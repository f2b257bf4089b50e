"""The statistics kernels in C++: one look at a tensor where operators need one each.

They are compiled once per machine by the compiler that is there, in less than a second; without one `ikkuna.numerics.statistics.eager` does the same.
"""

from ikkuna.numerics.statistics.native.build import library
from ikkuna.numerics.statistics.native.library import Library

__all__ = ["Library", "library"]
