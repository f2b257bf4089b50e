"""Statistics of tensors on accelerators: computed there, copied to the host once, never waited for."""

from ikkuna.numerics.statistics.device.doubts import Doubts
from ikkuna.numerics.statistics.device.statistics import DeviceStatistics, Taken
from ikkuna.numerics.statistics.device.triton_launcher import warm_up

__all__ = ["DeviceStatistics", "Doubts", "Taken", "warm_up"]
