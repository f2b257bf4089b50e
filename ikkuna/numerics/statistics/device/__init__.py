"""Statistics of tensors on accelerators: computed there, copied to the host once, never waited for."""

from ikkuna.numerics.statistics.device.buffers import Doubts
from ikkuna.numerics.statistics.device.operators import Taken
from ikkuna.numerics.statistics.device.statistics import DeviceStatistics
from ikkuna.numerics.statistics.device.triton_launcher import warm_up

__all__ = ["DeviceStatistics", "Doubts", "Taken", "warm_up"]
