"""Mistral's own format: other names than Hugging Face's, and rows of queries and keys for pairs of neighbours.

Source: the model and its conversion in the public `mistral-inference` and `transformers` packages.
"""

import re
from collections.abc import Callable, Iterator

from torch import Tensor

from octavo.protocol.config import ModelFacts
from octavo.protocol.errors import ConfigError
from octavo.protocol.weight_files import WeightFiles
from octavo.worker_proc.weights.rope_order import undo_rope_order
from octavo.worker_proc.weights.safetensors import read_safetensors

SUPPORTED_ARCHITECTURES = frozenset({"MistralForCausalLM", "MixtralForCausalLM"})
"""Architectures of `config.json` whose models are published in this format."""

_TOP = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_MODULES = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.gate": "block_sparse_moe.gate",
}
_IN_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)")
_EXPERT = re.compile(r"feed_forward\.(experts\.\d+\.w[123])")


def read_mistral(
    checkpoint: WeightFiles, facts: ModelFacts, wants: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, Tensor, int]]:
    """Yield every wanted tensor as (Hugging Face name, tensor, its bytes).

    Raises:
        ConfigError: see `read_safetensors`; or a tensor is unknown in this format.
    """
    for name, tensor, num_bytes in read_safetensors(checkpoint, lambda name: wants(hf_name(name))):
        if ".attention.wq." in name:
            tensor = undo_rope_order(tensor, facts.num_heads)
        elif ".attention.wk." in name:
            tensor = undo_rope_order(tensor, facts.num_kv_heads)
        yield hf_name(name), tensor, num_bytes


def hf_name(name: str) -> str:
    """Return Hugging Face's name of a tensor.

    Raises:
        ConfigError: the tensor is unknown.
    """
    if name in _TOP:
        return _TOP[name]
    if match := _IN_LAYER.fullmatch(name):
        layer, module, kind = match.groups()
        if expert := _EXPERT.fullmatch(module):
            return f"model.layers.{layer}.block_sparse_moe.{expert[1]}.{kind}"
        if module in _MODULES:
            return f"model.layers.{layer}.{_MODULES[module]}.{kind}"
    raise ConfigError(
        f"tensor {name!r} is unknown in Mistral's format", hint="use the model's files in Hugging Face layout"
    )
