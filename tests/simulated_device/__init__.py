"""A simulated accelerator, the device ``"sim"``: it runs models without a GPU, and counts what a GPU would have to do.

The device uses the dispatch key that torch reserves for other accelerators (PrivateUse1), so its tensors are plain `torch.Tensor`
objects with torch's own autograd, views and version counters, and backward runs in a thread of its own, as on CUDA.
A storage of the device has an address that the host cannot read, and refers to a host storage; kernels are those of the CPU.

- `recorded` lists launches, bytes, copies and synchronisations.
- A copy to pinned memory with ``non_blocking=True`` fills it with NaN; the data arrive when the host has waited, or has asked an event
  `transfers.LATENCY` times.  New device memory is NaN as well.
- A kernel that reads what another stream has written, without having waited for it, raises an error.
- `memory.limit` bounds the memory of the device.
- The exception of a hook of a tensor is raised at the end of the backward, which goes on until then (see `hooks`).
- Without `features.has_float64`, a tensor of float64 on the device raises the `TypeError` of ``mps``.

Time, the caching allocator, CUDA graphs, and sparse tensors are not simulated.
"""

from tests.simulated_device import streams
from tests.simulated_device.device import install, provide_pinned_memory
from tests.simulated_device.log import Entry, recorded
from tests.simulated_device.storage import features, memory, memory_of
from tests.simulated_device.streams import Event, Stream

__all__ = [
    "Entry",
    "Event",
    "Stream",
    "features",
    "install",
    "memory",
    "memory_of",
    "provide_pinned_memory",
    "recorded",
    "streams",
]
