"""Triton kernels that read a tensor once and write rows of statistics, and one that merges rows.

The columns of a row are those of `ikkuna.numerics.statistics.table`, in float64.  A program reads one chunk of a tensor, tile by tile.
Powers are taken of numbers that were scaled by a power of two and centred about the mean of their own tile.  So nothing overflows,
vanishes or cancels, whatever the magnitude; tiles and rows are merged in float64 (Chan, Golub & LeVeque 1979, Pébay 2008).
Only counts of float codes use atomic operations, on integers, whose order does not matter: the same data give the same bits.
Arguments that are numbers have one type and no specialisations: Triton would compile others when they first occur, within a step.

This package needs Triton, which the CUDA and ROCm builds of torch contain.
"""

from ikkuna.numerics.statistics.device.kernels.measure import (
    measure_list,
    measure_one,
    merge_codes,
    merge_rows,
    sample_list,
    sample_one,
)

__all__ = ["measure_list", "measure_one", "merge_codes", "merge_rows", "sample_list", "sample_one"]
