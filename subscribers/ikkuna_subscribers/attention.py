"""The entropy and the largest logit of attention heads."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from ikkuna.errors import ConfigError
from ikkuna.export.messages import ModuleMessage, NetworkMessage
from ikkuna.export.subscriber import PlotSubscriber, Quantity, name_results
from ikkuna.numerics.attention import AttentionRow, attention_means, attention_row, scores_row
from ikkuna.numerics.elements import has_numbers
from ikkuna.support.modules import class_name, named_modules
from ikkuna.support.undisturbed import gradients, switched
from ikkuna_subscribers._helpers import ProbeSubscriber, require_integers


class AttentionCall(NamedTuple):
    """The arguments of `ikkuna.numerics.attention.attention_row` for one call of an attention."""

    query: Tensor
    key: Tensor
    mask: Tensor | None = None
    is_causal: bool = False
    scale: float | None = None


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Return ``(batch, length, heads * dim)`` as ``(batch, heads, length, dim)``.

    Examples
    --------
    >>> split_heads(torch.zeros(2, 5, 12), 3).shape
    torch.Size([2, 3, 5, 4])
    """
    parts: Tensor = x.unflatten(-1, (heads, -1))
    return parts.transpose(-3, -2)


def queries_and_keys(module: nn.MultiheadAttention, args: Any, kwargs: Any) -> AttentionCall:
    """Return the queries and keys of each head, with the union of both kinds of masks.

    Examples
    --------
    >>> x = torch.ones(2, 5, 12)
    >>> queries_and_keys(nn.MultiheadAttention(12, 3, batch_first=True), (x, x, x), {}).query.shape
    torch.Size([2, 3, 5, 4])
    """
    given = signature(nn.MultiheadAttention.forward).bind(module, *args, **kwargs)
    given.apply_defaults()
    query, key, padding, mask = (given.arguments[name] for name in ("query", "key", "key_padding_mask", "attn_mask"))
    q, k = switched([gradients(False)], _projected, module, query, key)
    heads = module.num_heads
    allowed = _allowed(mask, padding, (len(q), heads, q.shape[1], k.shape[1]))
    return AttentionCall(split_heads(q, heads), split_heads(k, heads), allowed)


def _projected(module: nn.MultiheadAttention, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    q, k = (_batch_first(module, x) @ w.mT for x, w in zip((query, key), _weights(module), strict=True))
    if module.in_proj_bias is not None:
        q_bias, k_bias, _ = module.in_proj_bias.chunk(3)
        q, k = q + q_bias, k + k_bias
    return q, _extended(module, k)


def _batch_first(module: nn.MultiheadAttention, x: Tensor) -> Tensor:
    x = x.detach()
    if x.ndim == 2:
        return x.unsqueeze(0)
    return x if module.batch_first else x.transpose(0, 1)


def _weights(module: nn.MultiheadAttention) -> tuple[Tensor, Tensor]:
    if not module._qkv_same_embed_dim:
        return module.q_proj_weight, module.k_proj_weight
    q, k, _ = module.in_proj_weight.chunk(3)
    return q, k


def _extended(module: nn.MultiheadAttention, k: Tensor) -> Tensor:
    """Append the keys that the module adds with ``add_bias_kv`` and ``add_zero_attn``."""
    if module.bias_k is not None:
        k = torch.cat([k, module.bias_k.expand(len(k), 1, -1)], dim=1)
    return torch.cat([k, k.new_zeros(len(k), 1, k.shape[2])], dim=1) if module.add_zero_attn else k


def _allowed(mask: Tensor | None, padding: Tensor | None, shape: tuple[int, int, int, int]) -> Tensor | None:
    """Merge both masks into one bias, or into one boolean mask in which True allows attention.

    In the masks of the module, True or minus infinity forbids attention.
    """
    batch, heads, _, keys = shape
    parts = []
    if mask is not None:
        parts.append(mask.detach().unflatten(0, (batch, heads)) if mask.ndim == 3 else mask.detach())
    if padding is not None:
        padding = padding.detach() if padding.ndim == 2 else padding.detach().unsqueeze(0)
        parts.append(padding[:, None, None, :])
    if not parts:
        return None
    parts = [
        nn.functional.pad(part, (0, keys - part.shape[-1])) for part in parts
    ]  # keys that the module appends are allowed
    if all(part.dtype is torch.bool for part in parts):
        return ~parts[0] if len(parts) == 1 else ~(parts[0] | parts[1])
    bias = [
        torch.zeros_like(p, dtype=torch.float32).masked_fill(p, -torch.inf) if p.dtype is torch.bool else p
        for p in parts
    ]
    return bias[0] if len(bias) == 1 else bias[0] + bias[1]


Visit = Callable[[str, AttentionCall], object]


@dataclass(frozen=True)
class NamedProjections:
    """The modules that compute queries and keys, for attention that does not use the functions of torch.

    Parameters
    ----------
    query, key : str
        Globs of module names; the matches are paired in order.
    heads, key_heads : int
        The numbers of heads that their outputs ``(batch, length, heads * dim)`` are split into.
    is_causal : bool
        Whether a query attends only to keys at its own position and before.
    """

    query: str
    key: str
    heads: int
    key_heads: int
    is_causal: bool = False

    def pairs(self, model: nn.Module) -> list[tuple[str, nn.Module, nn.Module]]:
        """Return the name of the parent module, the query module and the key module of each pair."""
        queries, keys = (
            [(name, module) for name, module in named_modules(model) if fnmatchcase(name, pattern)]
            for pattern in (self.query, self.key)
        )
        if not queries or len(queries) != len(keys):
            raise ConfigError(
                f"query={self.query!r} matches {len(queries)} modules and key={self.key!r} matches {len(keys)}; "
                f"the numbers must be equal and at least 1"
            )
        return [(name.rpartition(".")[0] or name, q, k) for (name, q), (_, k) in zip(queries, keys, strict=True)]


@contextmanager
def capture_attention(model: nn.Module, visit: Visit, named: NamedProjections | None = None) -> Iterator[None]:
    """Call `visit` with the module name and the queries and keys of every attention that runs inside a ``with`` block.

    This covers `torch.nn.MultiheadAttention` and calls of ``scaled_dot_product_attention``; with `named`, its modules instead.
    """
    with ExitStack() as stack:
        if named is not None:
            for name, q, k in named.pairs(model):
                _hook_projections(stack, name, q, k, named, visit)
            yield
            return
        running = [(class_name(model).lower(), nn.Module())]  # a function that calls the model may attend by itself
        for name, module in named_modules(model):
            _hook_module(stack, name or class_name(module).lower(), module, running, visit)
        stack.enter_context(_CapturedCalls(running, visit))  # this also disables the fast path of nn.Transformer
        yield


def _hook_module(
    stack: ExitStack, name: str, module: nn.Module, running: list[tuple[str, nn.Module]], visit: Visit
) -> None:
    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        running.append((name, module))
        if isinstance(module, nn.MultiheadAttention):
            visit(name, queries_and_keys(module, args, kwargs))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        running.pop()

    stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
    stack.callback(module.register_forward_hook(leave).remove)


def _hook_projections(
    stack: ExitStack, name: str, query: nn.Module, key: nn.Module, named: NamedProjections, visit: Visit
) -> None:
    outputs: dict[str, Tensor] = {}

    def store(which: str, heads: int) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            if output.shape[-1] % heads:
                raise ConfigError(f"{name}: {output.shape[-1]} features cannot be split into {heads} heads")
            outputs[which] = split_heads(output.detach().clone(), heads)
            if len(outputs) == 2:
                visit(name, AttentionCall(outputs.pop("query"), outputs.pop("key"), is_causal=named.is_causal))

        return hook

    stack.callback(query.register_forward_hook(store("query", named.heads)).remove)
    stack.callback(key.register_forward_hook(store("key", named.key_heads)).remove)


class _CapturedCalls(TorchFunctionMode):
    """Visits the calls of ``scaled_dot_product_attention``, except those inside a `MultiheadAttention`."""

    def __init__(self, running: list[tuple[str, nn.Module]], visit: Visit) -> None:
        super().__init__()
        self._running = running
        self._visit = visit

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            name, module = self._running[-1]
            if not isinstance(module, nn.MultiheadAttention):
                self._visit(name, _attention_call(*args, **kwargs))
        return func(*args, **kwargs)


def _attention_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> AttentionCall:
    """Return the queries and keys of a call with the signature of ``scaled_dot_product_attention``."""
    return AttentionCall(query, key, attn_mask, is_causal, scale)


class AttentionSubscriber(ProbeSubscriber):
    r"""The entropy of attention and its largest logit, for each head, on a fixed probe set.

    With logits :math:`s_{ij} = c\, q_i^\top k_j` and weights :math:`p_i = \operatorname{softmax} s_i`,
    the entropy :math:`H_i = -\sum_j p_{ij} \ln p_{ij}` is averaged over queries and inputs.
    The *evenness* :math:`H_i / \ln n_i`, with :math:`n_i` the number of keys that query i may attend to, is averaged over
    the queries with at least two keys.
    Logits are computed from queries and keys for a block of queries at a time, so that the whole matrix never exists.
    This also works with fused kernels, which do not return weights.

    Every `torch.nn.MultiheadAttention` is measured, and every call of ``torch.nn.functional.scaled_dot_product_attention`` in a module,
    with the masks, grouped queries and rotations of the model.
    For attention that uses neither, name the modules that compute queries and keys with `query` and `key`.
    Then the only mask is `is_causal`, and later changes of queries and keys, such as rotary embeddings, are not seen.

    Takes ``epoch_finished`` or ``batch_finished``; publishes ``attention_entropy`` in nats, ``attention_evenness`` between 0 and 1,
    and ``attention_max_logit``, without unit, each as ``{module}:head_{i}``.
    A head with a NaN among its queries or keys has NaN; so has the entropy without queries.
    An evaluation costs one more product of queries and keys, and 64 MiB.

    Look for: evenness that falls to 0 while the largest logit grows.  This *entropy collapse* accompanies unstable training;
    logits above about 50 are an early sign of it.

    Parameters
    ----------
    dataset : torch.utils.data.Dataset or Tensor
        Inputs, or pairs (input, label); see `ProbeSubscriber`.  Items may be dicts of arguments of the model.
    query, key : str, optional
        Globs of module names, such as ``"*.self.query"``.
    heads, key_heads : int, optional
        With `query` and `key`: the number of heads, and of heads of keys if it is smaller.
    is_causal : bool
        With `query` and `key`: whether a query attends only to keys at its own position and before.
    **options : Any
        ``samples``, ``batch_size``, ``every``, ``forward`` as for `ProbeSubscriber`, and those of `Subscriber`;
        ``modules=`` selects the modules that contain attention.

    Raises
    ------
    ConfigError
        If arguments contradict each other, the probe set is empty, or no attention is found in the model.

    References
    ----------
    S. Zhai et al., Stabilizing transformer training by preventing attention entropy collapse, 2023.

    Examples
    --------
    >>> AttentionSubscriber(torch.randn(8, 5, 16)).publishes
    ('attention_entropy', 'attention_evenness', 'attention_max_logit')
    """

    quantity = (
        Quantity("nats", low=0.0),
        Quantity(low=0.0, high=1.0, scale="share"),
        Quantity(scale="signed"),
    )

    def __init__(
        self,
        dataset: Any,
        *,
        query: str | None = None,
        key: str | None = None,
        heads: int | None = None,
        key_heads: int | None = None,
        is_causal: bool = False,
        **options: Any,
    ) -> None:
        self.named = _named(query, key, heads, key_heads, is_causal)
        name_results(options, "attention_entropy", "attention_evenness", "attention_max_logit")
        super().__init__(dataset, **options)

    def evaluate_and_emit(self, message: NetworkMessage | None) -> None:
        """Sum over the batches and emit the values of each head."""
        rows: dict[str, AttentionRow] = {}

        def add(name: str, call: AttentionCall) -> None:
            if self.subscription.matches(name) and call.query.layout is torch.strided:
                row = attention_row(*call)
                rows[name] = _merged(rows[name], row) if name in rows else row

        self.run_model(around=lambda model: capture_attention(model, add, self.named))
        if not rows:
            raise ConfigError(
                "AttentionSubscriber found no attention: no MultiheadAttention and no call of scaled_dot_product_attention "
                f"in modules that modules={self.subscription.modules!r} matches; name the modules with query= and key="
            )
        if message is not None:
            self.conclude(message, lambda: {name: _values(row) for name, row in rows.items()}, self._emit_all)

    def _emit_all(self, message: NetworkMessage, found: dict[str, list[tuple[float, ...]]]) -> None:
        for name, values in found.items():
            for head, of_head in enumerate(values):
                for kind, value in zip(self.publishes, of_head, strict=True):
                    known = math.nan if value == -math.inf else value
                    reason = "no query had a key, or one was not finite"
                    self.emit_module(message, name, known, kind, f"head_{head}", reason)


def _values(row: AttentionRow) -> list[tuple[float, ...]]:
    return list(zip(*(x.tolist() for x in (*attention_means(row.sums), row.max_logit)), strict=True))


def _merged(one: AttentionRow, other: AttentionRow) -> AttentionRow:
    return AttentionRow(one.sums + other.sums, torch.maximum(one.max_logit, other.max_logit))


def _named(
    query: str | None, key: str | None, heads: int | None, key_heads: int | None, is_causal: bool
) -> NamedProjections | None:
    if query is None and key is None and heads is None and key_heads is None and not is_causal:
        return None
    if query is None or key is None or heads is None:
        raise ConfigError(
            "AttentionSubscriber takes query=, key= and heads= together, and only with them key_heads= and is_causal=; "
            f"got query={query!r}, key={key!r}, heads={heads!r}"
        )
    key_heads = heads if key_heads is None else key_heads
    require_integers("AttentionSubscriber", heads=heads, key_heads=key_heads)
    if heads % key_heads:
        raise ConfigError(f"AttentionSubscriber needs key_heads that divide heads, got {key_heads} and {heads}")
    return NamedProjections(query, key, heads, key_heads, is_causal)


class AttentionScoresSubscriber(PlotSubscriber):
    r"""The largest attention score of each head, :math:`\max_{ij} s_{ij}`, and the mean entropy of its attention weights.

    The entropy of a query is :math:`H_i = -\sum_j p_{ij} \ln p_{ij}` with :math:`p_i = \operatorname{softmax} s_i`, in nats.
    The model passes its scores to ``ikkuna.observe(name, scores)`` before the softmax; kernels such as those of
    ``scaled_dot_product_attention`` compute none, and `AttentionSubscriber` measures them on a probe set.

    Takes ``observed``, tensors (…, heads, queries, keys) whose names contain ``scores``, or match ``modules=``;
    scores at or below half of the least number of their dtype, such as minus infinity, are masked.
    Publishes ``scores_max`` in the unit of the scores and ``scores_entropy`` in nats, between 0 and ln(keys), for each head
    as ``{name}:head_{number}``.
    Over several calls, micro-batches and ranks the largest score and the smallest mean entropy count.
    A head with a NaN has NaN; a head without an unmasked score publishes NaN.  Tensors with fewer axes publish nothing.
    It costs about ten passes over the scores, and memory for the scores of one sample.

    Look for: a ``scores_max`` beyond 50 that grows, while ``scores_entropy`` falls towards 0: attention collapses on single keys,
    and training becomes unstable.

    Parameters
    ----------
    **options : Any
        See `Subscriber`.

    References
    ----------
    S. Zhai et al., Stabilizing transformer training by preventing attention entropy collapse, 2023.
    M. Dehghani et al., Scaling vision transformers to 22 billion parameters, 2023 (growth of attention logits).

    Examples
    --------
    >>> AttentionScoresSubscriber(every=10).publishes
    ('scores_max', 'scores_entropy')
    """

    quantity = (
        Quantity(scale="signed"),
        Quantity("nats", low=0.0),
    )
    merge = "max"

    def __init__(self, **options: Any) -> None:
        name_results(options, "scores_max", "scores_entropy")
        options.setdefault("modules", "*scores*")
        super().__init__("observed", **options)

    def measure(self, message: ModuleMessage) -> Tensor | None:
        """Return the largest score and the negative mean entropy of each head."""
        x: Tensor = message.data
        if x.ndim < 3 or not x.numel() or not x.is_floating_point() or x.element_size() == 1 or not has_numbers(x):
            return None
        return scores_row(x)

    def compute(self, message: ModuleMessage) -> None:
        """Emit both values of each head."""
        for head, (largest, negative_entropy) in enumerate(message.data.tolist()):
            path = f"head_{head}"
            name = f"{message.series_name}:{path}"
            source = ModuleMessage(message.stamp, message.kind, module=message.module, path=path, name=name)
            self.emit(source, largest if largest > -math.inf else math.nan, self.publishes[0])
            self.emit(source, -negative_entropy, self.publishes[1])
