"""One row of statistics as a record, for tests: of the host, and of a device, which waits for it."""

import numpy as np

from ikkuna.numerics.statistics.device.buffers import KernelRows
from ikkuna.numerics.statistics.device.operators import DeviceRows, ReducedTensor
from ikkuna.numerics.statistics.float_code import merge_codes
from ikkuna.numerics.statistics.host import HostStatistics
from ikkuna.numerics.statistics.record import record_of
from ikkuna.numerics.statistics.table import EMPTY


def row_record(statistics, row, fields):
    """Return the `fields` of a row, and leave the statistics as they are."""
    if isinstance(statistics, HostStatistics):
        return statistics.record(row, fields)
    exact = [found for found in statistics._exact.found if found.row == row]
    reduced, written, kernels, counted = [found for found in statistics._reduced if found.row == row], [], None, []
    if (own := statistics._kernels) is not None:
        for rows in own.written:
            for owner, values in zip(rows.owners, rows.values.split(rows.counts), strict=True):
                if owner == row:
                    written.append(KernelRows((row,), (len(values),), values))
        reduced += (ReducedTensor(row, n, frozenset(("n",)), []) for owner, n in own.sizes if owner == row)
        kernels, counted = own.kernels, [buffer for buffer in own.counts._buffers if any(buffer.owners)]
    taken = DeviceRows(exact, reduced, statistics._imprecise, written, kernels, counted)
    arrays = {name: tensor.cpu().numpy() for name, tensor in taken.tensors.items()}
    _, values = taken.rows({name: array.astype(np.float64) for name, array in arrays.items()})
    record = record_of(values[0] if len(values) else EMPTY, fields)
    codes = taken.codes(arrays)
    merge_codes(codes, {row: {name: counts.cpu().numpy() for name, counts in statistics.codes.get(row, {}).items()}})
    for name, counts in codes[row].items():
        setattr(record, name, counts)
    return record
