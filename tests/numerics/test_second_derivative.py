"""Cheap second derivatives against torch's own."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import batch_norm, conv2d, cross_entropy, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ikkuna.numerics.curvature import HessianProduct
from ikkuna.numerics.curvature.second_derivative import twice_differentiable

DOUBLE = torch.float64


@pytest.fixture(autouse=True)
def one_thread():
    """So many small derivatives wait for a second thread longer than it helps."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def prepared(*modules):
    """A network in float64 and evaluation mode, with weights and statistics that nothing can be confused with."""
    net = nn.Sequential(*modules).double().eval()
    with torch.no_grad():
        for i, tensor in enumerate([*net.parameters(), *(b for b in net.buffers() if b.is_floating_point())]):
            tensor.copy_(random(*tensor.shape, seed=i + 1).mul(0.5))
        for module in net.modules():
            if getattr(module, "running_var", None) is not None:
                module.running_var.copy_(random(len(module.running_var), seed=99).square() + 0.1)
    return net


def own_hessian(loss, parameters):
    """Row by row, by torch's own derivatives."""
    gradients = torch.autograd.grad(loss(), parameters, create_graph=True)
    rows = []
    for entry in torch.cat([g.flatten() for g in gradients]):
        row = torch.autograd.grad(entry, parameters, retain_graph=True, materialize_grads=True)
        rows.append(torch.cat([r.flatten() for r in row]))
    return torch.stack(rows)


def hessian(loss, parameters):
    product = HessianProduct(loss, parameters)
    return torch.stack([product(row) for row in torch.eye(product.size, dtype=DOUBLE)])


def check(loss, parameters):
    parameters = [p for p in parameters if p.requires_grad]
    expected = own_hessian(loss, parameters)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(hessian(loss, parameters), expected, rtol=1e-10, atol=1e-11)
    with twice_differentiable():
        value = loss()
        gradients = torch.autograd.grad(value, parameters)
    assert torch.equal(value, loss())
    torch.testing.assert_close(gradients, torch.autograd.grad(loss(), parameters), rtol=1e-12, atol=1e-14)


NETWORKS = {
    "batch norm of rows": lambda: (nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)),
    "batch norm of the input": lambda: (nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)),
    "no affine": lambda: (nn.Linear(4, 5), nn.BatchNorm1d(5, affine=False), nn.Tanh(), nn.Linear(5, 3)),
    "no statistics": lambda: (nn.Linear(4, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Tanh()),
    "1d": lambda: (
        *(nn.Unflatten(1, (2, 2)), nn.Conv1d(2, 3, 3, padding=2), nn.BatchNorm1d(3), nn.Tanh()),
        *(nn.Conv1d(3, 2, 2, stride=2), nn.Flatten()),
    ),
    "2d": lambda: (
        *(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 4, 3, padding=(2, 1)), nn.BatchNorm2d(4), nn.Tanh()),
        *(nn.Conv2d(4, 4, (2, 1), stride=(2, 1), dilation=(2, 1), groups=2, bias=False), nn.Tanh(), nn.Flatten()),
    ),
    "3d": lambda: (
        *(nn.Unflatten(1, (1, 1, 2, 2)), nn.Conv3d(1, 3, 2, padding=1), nn.BatchNorm3d(3, eps=0.3), nn.Tanh()),
        *(nn.Conv3d(3, 2, (2, 3, 3)), nn.Flatten()),
    ),
    "left to torch": lambda: (
        *(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 2, 3, padding="same"), nn.Tanh(), nn.ConvTranspose2d(2, 2, 2)),
        *(nn.Tanh(), nn.Conv2d(2, 1, 2, padding=1, padding_mode="circular"), nn.Flatten()),
    ),
    "unbatched": lambda: (nn.Unflatten(1, (2, 2)), nn.Conv2d(6, 2, 2), nn.Tanh()),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_hessians_are_those_of_torch(name):
    net = prepared(*NETWORKS[name]())
    x = random(6, 4)
    if name == "unbatched":
        return check(lambda: net(x).square().sum(), net.parameters())
    return check(lambda: cross_entropy(net(x), torch.arange(6) % 2), net.parameters())


@pytest.mark.parametrize("frozen", ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"])
def test_frozen_parameters(frozen):
    net = prepared(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.Tanh(), nn.Conv2d(2, 2, 2), nn.Flatten())
    net.get_parameter(frozen).requires_grad_(False)
    x = random(5, 1, 3, 3)
    check(lambda: cross_entropy(net(x), torch.arange(5) % 2), net.parameters())


def test_biases_alone():
    net = prepared(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.Tanh(), nn.Conv2d(2, 2, 2), nn.BatchNorm2d(2), nn.Tanh())
    x = random(5, 1, 3, 3)
    check(lambda: net(x).square().sum(), [p for name, p in net.named_parameters() if "bias" in name])


def test_a_loss_of_gradients_has_a_hessian():
    """Which takes the third derivative."""
    net = prepared(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.Tanh(), nn.Conv2d(2, 1, 2))
    x = random(4, 1, 3, 3).requires_grad_()

    def loss():
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
            return slope.square().sum(dim=(1, 2, 3)).sqrt().sub(1).square().mean()

    check(loss, net.parameters())


class Attending(nn.Module):
    """Attention by the fused kernel, if torch takes that."""

    def forward(self, x):
        rows = x.flatten(2).transpose(1, 2)
        return scaled_dot_product_attention(rows, rows, rows)


@pytest.mark.parametrize("first", [nn.BatchNorm2d, Attending])
def test_a_checkpoint_computes_what_it_did(first):
    net = prepared(nn.Conv2d(1, 2, 2), first(2) if first is nn.BatchNorm2d else first(), nn.Tanh(), nn.Flatten())
    x, labels = random(5, 1, 3, 3), torch.arange(5) % 2
    with sdpa_kernel(SDPBackend.MATH):
        expected = own_hessian(lambda: cross_entropy(net(x), labels), list(net.parameters()))
    found = hessian(lambda: cross_entropy(checkpoint(net, x, use_reentrant=False), labels), net.parameters())
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


def test_statistics_that_are_learnt_are_refused_as_by_torch():
    ones = torch.ones(1, requires_grad=True)
    with (
        twice_differentiable(),
        pytest.raises(RuntimeError, match="not differentiable with respect to argument 'running_var'"),
    ):
        batch_norm(torch.ones(2, 1), torch.zeros(1), ones)


def test_what_is_unusual_is_left_to_torch():
    w = random(2, 1, 2, 2).float().requires_grad_()
    x, mean = random(3, 1, 3, 3).float(), torch.zeros(1)
    calls = {
        "half": lambda: conv2d(x.bfloat16(), w.bfloat16()),
        "autocast": lambda: conv2d(x, w),
        "vmap": lambda: torch.func.vmap(lambda row: conv2d(row[None], w))(x),
        "jvp": lambda: torch.func.jvp(lambda rows: conv2d(rows, w), (x,), (x,))[1],
        "statistics": lambda: batch_norm(x * w[0, 0, 0, 0], mean.clone(), mean + 1, training=True),
        "no images": lambda: batch_norm(x[:0] * w[0, 0, 0, 0], mean, mean + 1),
    }
    for name, call in calls.items():
        with torch.autocast("cpu", torch.bfloat16, enabled=name == "autocast"), twice_differentiable():
            output = call()
            nodes, seen = [output.grad_fn], []
            while nodes:
                node = nodes.pop()
                seen.append(node.name())
                nodes += [after for after, _ in node.next_functions if after is not None]
        assert not [node for node in seen if node.startswith("_")], name
        assert torch.isfinite(output).all()


class Counting(TorchDispatchMode):
    """Counts the operators that are called."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_a_product_takes_six_convolutions_a_layer_and_few_passes():
    """A gradient takes three; those that the first layer's input has no use for are left out."""
    net = prepared(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Tanh(), nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2), nn.Flatten()
    )
    x = random(2, 1, 9, 9)
    product = HessianProduct(lambda: net(x).square().sum(), net.parameters())
    with Counting() as counting:
        product(random(product.size))
    assert counting.counts["convolution"] == 3  # x * v_1; v_x * w_2, x_2 * v_2
    assert counting.counts["convolution_backward"] == 1 + 3  # each gives two gradients or one
    assert counting.counts["native_batch_norm"] == 2
    assert counting.counts["native_batch_norm_backward"] == 4
    assert sum(counting.counts[name] for name in ("mul", "sub", "div", "sum")) <= 20
