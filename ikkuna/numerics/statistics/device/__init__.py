"""Statistics of tensors on accelerators: computed there, copied to the host once, never waited for."""

from ikkuna.numerics.statistics.device.buffers import ImpreciseRows
from ikkuna.numerics.statistics.device.operators import DeviceRows
from ikkuna.numerics.statistics.device.statistics import DeviceStatistics
from ikkuna.numerics.statistics.device.triton_launcher import warm_up

__all__ = ["DeviceRows", "DeviceStatistics", "ImpreciseRows", "warm_up"]
