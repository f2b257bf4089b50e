"""Graph networks of two layers of each kind of convolution in PyTorch Geometric."""

from collections.abc import Callable

import torch
from torch import nn

from tests.real_models.training import RealModel

__all__ = ["MORE_GRAPHS"]


class _Network(nn.Module):
    """Two convolutions of one kind."""

    def __init__(self, make):
        super().__init__()
        self.first, self.second = make(), make()

    def forward(self, **inputs):
        inputs["x"] = torch.relu(self.first(**inputs))
        return self.second(**inputs)


def _convolution(name, *arguments, edges=(), **options) -> RealModel:
    def make():
        from torch_geometric import nn as geometric

        made = [argument() if callable(argument) else argument for argument in arguments]
        return getattr(geometric, name)(*made, **options)

    def batch():
        # ring and chords, so that each node has edges, in the order that recurrent aggregations need
        target, source = torch.meshgrid(torch.arange(8), torch.tensor([1, 3]), indexing="ij")
        pairs = torch.stack([(target + source).flatten() % 8, target.flatten()])
        return {"x": torch.randn(8, 6), "edge_index": pairs} | {key: value() for key, value in edges}

    return RealModel(lambda: _Network(make), batch, needs=("torch_geometric",), steps=1)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))


def _pair_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 6))


_weights: Callable[[], torch.Tensor] = lambda: torch.rand(16)  # noqa: E731
_attributes: Callable[[], torch.Tensor] = lambda: torch.rand(16, 2)  # noqa: E731
_types: Callable[[], torch.Tensor] = lambda: torch.arange(16) % 3  # noqa: E731

MORE_GRAPHS: dict[str, RealModel] = {
    f"graph {name}": _convolution(name, *arguments, edges=edges, **options)
    for name, arguments, edges, options in (
        ("GCNConv", (6, 6), (("edge_weight", _weights),), {}),
        ("ChebConv", (6, 6, 2), (), {}),
        ("SAGEConv", (6, 6), (), {}),
        ("GraphConv", (6, 6), (("edge_weight", _weights),), {}),
        ("GatedGraphConv", (6, 2), (), {}),
        ("ResGatedGraphConv", (6, 6), (), {}),
        ("GATConv", (6, 6), (), {}),
        ("GATv2Conv", (6, 6), (("edge_attr", _attributes),), {"edge_dim": 2}),
        ("TransformerConv", (6, 6), (), {}),
        ("AGNNConv", (), (), {}),
        ("TAGConv", (6, 6), (), {}),
        ("GINConv", (_mlp,), (), {"train_eps": True}),
        ("GINEConv", (_mlp,), (("edge_attr", _attributes),), {"edge_dim": 2}),
        ("ARMAConv", (6, 6), (), {}),
        ("SGConv", (6, 6), (), {}),
        ("SSGConv", (6, 6, 0.1), (), {}),
        ("MFConv", (6, 6), (), {}),
        ("RGCNConv", (6, 6, 3), (("edge_type", _types),), {}),
        ("FastRGCNConv", (6, 6, 3), (("edge_type", _types),), {}),
        ("CGConv", (6,), (), {}),
        ("EdgeConv", (_pair_mlp,), (), {}),
        ("FeaStConv", (6, 6), (), {}),
        ("LEConv", (6, 6), (), {}),
        ("ClusterGCNConv", (6, 6), (), {}),
        ("GENConv", (6, 6), (), {}),
        ("FiLMConv", (6, 6), (), {}),
        ("SuperGATConv", (6, 6), (), {}),
        ("EGConv", (6, 6), (), {"num_heads": 2}),
        ("GeneralConv", (6, 6), (), {}),
        ("AntiSymmetricConv", (6,), (), {}),
        ("GMMConv", (6, 6), (("edge_attr", _attributes),), {"dim": 2, "kernel_size": 3}),
        ("PDNConv", (6, 6), (("edge_attr", _attributes),), {"edge_dim": 2, "hidden_channels": 4}),
    )
}
