"""Selects the weights of a checkpoint to quantize: those of the linear layers of its blocks.

Embeddings, the output layer, norms and expert routers are not quantized: they are small and affect the output much.
"""

import re
from typing import Any

import torch
from torch import nn

from octavo.protocol.errors import ConfigError

_EXPERT = re.compile(r"\.experts\.\d+\.\w+\.weight$")
"""Weight of one expert. transformers stacks them when it loads a checkpoint, so its modules have other names."""
_ROUTER = re.compile(r"\.(gate|router|shared_expert_gate)$")
_OUTPUT = "lm_head"


def skeleton(config: dict[str, Any], path: str) -> nn.Module:
    """Return the model without weights.

    Raises:
        ConfigError: transformers cannot build it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    except (ValueError, KeyError, OSError) as error:
        name = ", ".join(config.get("architectures") or ["an unknown architecture"])
        raise ConfigError(f"transformers cannot build {name}: {error}") from error
    return model


def linear_layers(model: nn.Module) -> tuple[set[str], list[str]]:
    """Return the names of the linear layers to quantize, and the names of those to leave unquantized."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    kept = [name for name in names if name == _OUTPUT or name.endswith(f".{_OUTPUT}") or _ROUTER.search(name)]
    return set(names) - set(kept), kept


def layer_of(tensor: str, linears: set[str]) -> str | None:
    """Return the layer to quantize whose weight is this checkpoint tensor; `None` if there is none."""
    layer = tensor.removesuffix(".weight")
    return layer if layer != tensor and (layer in linears or _EXPERT.search(tensor)) else None
