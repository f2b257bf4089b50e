"""Finds the attention in a model while it runs."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from ikkuna.errors import ConfigError
from ikkuna_subscribers._helpers.multihead import Attention, queries_and_keys, split_heads

__all__ = ["NamedProjections", "watch_attention"]

Take = Callable[[str, Attention], object]


@dataclass(frozen=True)
class NamedProjections:
    """The modules that make queries and keys, where attention is not one of torch's own.

    Parameters
    ----------
    query, key : globs of module names; what they match is paired in order
    heads, key_heads : into how many heads their outputs ``(batch, length, heads * dim)`` are split
    is_causal : whether a query looks at keys up to itself only
    """

    query: str
    key: str
    heads: int
    key_heads: int
    is_causal: bool = False

    def pairs(self, model: nn.Module) -> list[tuple[str, nn.Module, nn.Module]]:
        """Return query and key modules, under the name of the module they are in."""
        found = [
            [(name, module) for name, module in model.named_modules() if fnmatchcase(name, pattern)]
            for pattern in (self.query, self.key)
        ]
        queries, keys = found
        if not queries or len(queries) != len(keys):
            raise ConfigError(
                f"query={self.query!r} matches {len(queries)} modules and key={self.key!r} {len(keys)}; "
                f"attention needs as many, and at least one"
            )
        return [(name.rpartition(".")[0] or name, q, k) for (name, q), (_, k) in zip(queries, keys, strict=True)]


@contextmanager
def watch_attention(model: nn.Module, take: Take, named: NamedProjections | None = None) -> Iterator[None]:
    """Hand every attention that happens inside to `take`, with the name of its module.

    Seen are `torch.nn.MultiheadAttention` and calls of ``scaled_dot_product_attention``; with `named`, its modules instead.
    """
    with ExitStack() as stack:
        if named is not None:
            for name, q, k in named.pairs(model):
                _watch_projections(stack, name, q, k, named, take)
            yield
            return
        running = [(type(model).__name__.lower(), nn.Module())]  # a function that calls the model may attend by itself
        for name, module in model.named_modules():
            _watch_module(stack, name or type(module).__name__.lower(), module, running, take)
        stack.enter_context(_Calls(running, take))  # under it transformers do not take their fast path past the modules
        yield


def _watch_module(
    stack: ExitStack, name: str, module: nn.Module, running: list[tuple[str, nn.Module]], take: Take
) -> None:
    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        running.append((name, module))
        if isinstance(module, nn.MultiheadAttention):
            take(name, queries_and_keys(module, args, kwargs))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        running.pop()

    stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
    stack.callback(module.register_forward_hook(leave).remove)


def _watch_projections(
    stack: ExitStack, name: str, query: nn.Module, key: nn.Module, named: NamedProjections, take: Take
) -> None:
    made: dict[str, Tensor] = {}

    def keep(which: str, heads: int) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            if output.shape[-1] % heads:
                raise ConfigError(f"{name}: {output.shape[-1]} features cannot be split into {heads} heads")
            made[which] = split_heads(output.detach().clone(), heads)
            if len(made) == 2:
                take(name, Attention(made.pop("query"), made.pop("key"), is_causal=named.is_causal))

        return hook

    stack.callback(query.register_forward_hook(keep("query", named.heads)).remove)
    stack.callback(key.register_forward_hook(keep("key", named.key_heads)).remove)


class _Calls(TorchFunctionMode):
    """Sees the calls of ``scaled_dot_product_attention``, but for those that a `MultiheadAttention` makes."""

    def __init__(self, running: list[tuple[str, nn.Module]], take: Take) -> None:
        super().__init__()
        self._running = running
        self._take = take

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            name, module = self._running[-1]
            if not isinstance(module, nn.MultiheadAttention):
                self._take(name, _of_call(*args, **kwargs))
        return func(*args, **kwargs)


def _of_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Attention:
    return Attention(query, key, attn_mask, is_causal, scale)
