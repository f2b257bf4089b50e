"""The share of elements near zero."""

import torch

from ikkuna.export.subscriber import Quantity, Subscriber

__all__ = ["NearZeroSubscriber"]


class NearZeroSubscriber(Subscriber):
    """Share of elements with |x| < eps."""

    quantity = Quantity(
        low=0.0, high=1.0, scale="share", zero="good", larger="bad"
    )  # decides colours, axes and comparisons
    merge = "sum"  # over calls, micro-batches, ranks: sum | min | max | last

    def __init__(self, kind, eps=1e-3, **options):  # options: subsample, modules, tag, backend, message_bus …
        super().__init__(kind, publishes=f"{kind}_near_zero", **options)
        self.eps = eps

    def measure(self, message):  # on the device, in the hook
        x = message.data
        near = torch.count_nonzero(x.abs() < self.eps)
        return torch.stack([near, torch.full_like(near, x.numel())])

    def compute(self, message):  # on floats, after the end of the step
        near, n = message.data
        self.emit(message, near / n)
