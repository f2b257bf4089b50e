"""Capture the queries and keys of every attention in a model while it runs."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from ikkuna.errors import ConfigError
from ikkuna.modules import class_name, named_modules
from ikkuna_subscribers._helpers.multihead_attention import AttentionCall, queries_and_keys, split_heads

__all__ = ["NamedProjections", "capture_attention"]

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
