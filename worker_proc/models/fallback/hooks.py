"""The function that `transformers` calls as its attention. It delegates to the module's attribute `octavo`.

While a model is probed, masks record which keys they show. Later there are no masks.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import causal_mask_function

PROBE = "octavo_probe"
"""Name of the attention implementation while a model is probed."""
SERVE = "octavo"
"""Name of the attention implementation afterwards. It has no masks."""


_PRESERVING = ("__getitem__", "to", "type", "float", "expand", "contiguous", "clone", "unsqueeze", "__get__")
"""Functions whose result shows the same keys."""


class AttentionHook(Protocol):
    """Attention of one module."""

    def __call__(
        self, module: nn.Module, q_BNTH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, mask: Any, arguments: dict[str, Any]
    ) -> Tensor:
        """Return out_BTNH.

        `arguments`: all keyword arguments of the module.
        """


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **arguments: Any
) -> tuple[Tensor, None]:
    hook: AttentionHook = module.octavo  # type: ignore[assignment]
    return hook(module, query, key, value, attention_mask, arguments), None


def _scaled_by(name: str) -> Callable[[nn.Module], dict[str, Any]]:
    """Return a function that gets the arguments of modules that divide scores by an attribute."""
    return lambda module: {"scaling": 1.0 / getattr(module, name)}


def _gpt_neo(module: nn.Module) -> dict[str, Any]:
    config: Any = module.config
    window = config.window_size if module.attention_type == "local" else None
    return {"scaling": 1.0, "sliding_window": window}


OWN_METHODS: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "CodeGenAttention": _scaled_by("scale_attn"),
    "GPTJAttention": _scaled_by("scale_attn"),
    "GPTNeoSelfAttention": _gpt_neo,
    "GPTNeoXJapaneseAttention": _scaled_by("norm_factor"),
}
"""Modules older than the attention interface: the arguments of their method `_attn(q, k, v, mask)`.

Later releases of `transformers` move them to the interface, and then they have no such method.
"""


def use_attention(model: PreTrainedModel, name: str) -> None:
    """Select the attention implementation of a model, also for modules with their own."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None:
            config._attn_implementation = name
        arguments = OWN_METHODS.get(type(module).__name__)
        if arguments is not None and hasattr(module, "_attn"):
            module._attn = partial(_attend_in_method, module, arguments(module))


def _attend_in_method(
    module: nn.Module, arguments: dict[str, Any], query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None
) -> tuple[Tensor, None]:
    is_causal = isinstance(attention_mask, ProbedMask) and attention_mask.is_known and attention_mask.window is None
    mask = None if is_causal else attention_mask  # the arguments contain the window
    out_BTNH, _ = _attend(module, query.to(value.dtype), key.to(value.dtype), value, mask, **arguments)
    return out_BTNH.transpose(1, 2), None


class ProbedMask(Tensor):
    """A four-dimensional mask that records which keys it shows; its slices and copies do, too."""

    window: int | None = None
    """Window of keys that the mask shows; `None` means all keys up to the query's."""
    is_chunked = False
    is_known = False
    """False for a mask that shows other keys than those of a window, those of a chunk, or all."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, and copy the attributes to its result."""
        result = super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        source = next((arg for arg in args if isinstance(arg, ProbedMask)), None)
        if source is not None and isinstance(result, ProbedMask):
            result.window, result.is_chunked = source.window, source.is_chunked
            result.is_known = source.is_known and function.__name__ in _PRESERVING
        return result


def _probed_mask(
    batch_size: int, q_length: int, kv_length: int, mask_function: Any, local_size: int | None = None, **_: Any
) -> ProbedMask:
    mask: ProbedMask = torch.zeros(batch_size, 1, q_length, kv_length).as_subclass(ProbedMask)
    mask.window, mask.is_chunked, mask.is_known = None, False, mask_function is causal_mask_function
    if local_size is not None and not mask.is_known:
        mask.window = local_size
        edges = (0, local_size, 2 * local_size, 3 * local_size)
        keys = torch.tensor(sorted({edge + offset for edge in edges for offset in range(-2, 3) if edge + offset >= 0}))
        queries = keys[:, None]
        first = torch.zeros((), dtype=torch.long)
        shown = mask_function(first, first, queries, keys).expand(len(keys), len(keys))
        in_window = (keys <= queries) & (keys > queries - local_size)
        in_chunk = (keys <= queries) & (keys // local_size == queries // local_size)
        mask.is_chunked = not torch.equal(shown, in_window)
        mask.is_known = not mask.is_chunked or torch.equal(shown, in_chunk)
    return mask


AttentionInterface.register(PROBE, _attend)
AttentionInterface.register(SERVE, _attend)
AttentionMaskInterface.register(PROBE, _probed_mask)
