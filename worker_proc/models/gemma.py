"""Gemma 1, 2 and 3 (text): norm scales are stored as the difference from 1, and embeddings are scaled."""

from functools import partial
from typing import Any

import torch

from octavo.kernels.paged_attention import AttentionShape
from octavo.kernels.pointwise import scale, soft_cap
from octavo.protocol.config.facts import ModelFacts
from octavo.protocol.config.pooling import is_computed_whole
from octavo.worker_proc.models.checkpoint import one_added
from octavo.worker_proc.models.hf_config import (
    full_attention_every,
    optional,
    reject_unless,
    required,
    windows_of_layers,
)
from octavo.worker_proc.models.layers.activation import GATED, activation
from octavo.worker_proc.models.layers.attention import SelfAttention, head_norm
from octavo.worker_proc.models.layers.decoder import DecoderModel, PreNormLayer, build_decoder
from octavo.worker_proc.models.layers.mlp import GatedMlp
from octavo.worker_proc.models.layers.norm import RMSNorm
from octavo.worker_proc.models.layers.prenorm import llama_parameters
from octavo.worker_proc.models.layers.rotary import Rotary, rotary_from_config
from octavo.worker_proc.parallel.placement import Placement


def build(facts: ModelFacts, placement: Placement) -> DecoderModel:
    """Make the member of the family that `facts` describes, or one rank's part of it.

    Raises:
        ConfigError: something in its configuration is not supported.
    """
    config, member = facts.hf_config, facts.architecture.removesuffix("ForCausalLM")
    reject_unless(config, "use_bidirectional_attention", [is_computed_whole(facts), None])
    function = activation(config, "gelu_pytorch_tanh", GATED, key="hidden_activation")
    # Gemma 1's `hidden_act` says "gelu", but its weights were trained with the tanh approximation.
    reject_unless(config, "hidden_act", ["gelu", function])
    has_bias = optional(config, "attention_bias", False)
    width, eps = required(config, "hidden_size", int), optional(config, "rms_norm_eps", 1e-6)
    inner_width = required(config, "intermediate_size", int)
    has_four_norms, shapes = member != "Gemma", _shapes(facts, member)
    parameters = llama_parameters(placement, rules=[one_added(r"norm\.weight$")])
    norm = partial(RMSNorm.new, parameters, width=width, eps=eps, dtype=torch.float32)

    def layer(index: int, name: str) -> PreNormLayer:
        attention = SelfAttention(
            parameters,
            f"{name}.self_attn",
            index,
            shapes[index],
            width,
            rotary=0 if member != "Gemma3" or shapes[index].window is None else 1,
            has_qkv_bias=has_bias,
            has_output_bias=has_bias,
            qk_norm=head_norm(parameters, f"{name}.self_attn", facts.head_dim, eps, dtype=torch.float32)
            if member == "Gemma3"
            else None,
        )
        return PreNormLayer(
            norm(f"{name}.input_layernorm"),
            attention,
            norm(f"{name}.pre_feedforward_layernorm" if has_four_norms else f"{name}.post_attention_layernorm"),
            GatedMlp(parameters, f"{name}.mlp", width, inner_width, activation=function),
            after_attention=norm(f"{name}.post_attention_layernorm") if has_four_norms else None,
            after_mlp=norm(f"{name}.post_feedforward_layernorm") if has_four_norms else None,
        )

    logit_cap = config.get("final_logit_softcapping", 30.0 if member == "Gemma2" else None)
    return build_decoder(
        facts,
        parameters,
        shapes,
        layer,
        width=width,
        norm=norm,
        is_tied=optional(config, "tie_word_embeddings", True),
        rotaries=_rotaries(facts, member),
        after_embedding=partial(scale, factor=_embedding_factor(width, placement.dtype)),
        is_embedding_scaled=True,
        after_output=None if logit_cap is None else partial(soft_cap, cap=float(logit_cap)),
    )


def _embedding_factor(width: int, dtype: torch.dtype) -> float:
    """Return the factor of the embeddings, rounded to the precision of the model as in the original."""
    return float(torch.tensor(width**0.5, dtype=dtype))


def _shapes(facts: ModelFacts, member: str) -> list[AttentionShape]:
    config, num_layers = facts.hf_config, facts.num_layers
    heads = facts.num_heads, facts.num_kv_heads, facts.head_dim
    is_causal = not is_computed_whole(facts)
    if member == "Gemma":
        return [AttentionShape(*heads, facts.head_dim**-0.5, is_causal=is_causal)] * num_layers
    period = optional(config, "_sliding_window_pattern", 2 if member == "Gemma2" else 6)
    period = optional(config, "sliding_window_pattern", period)
    window = config.get("sliding_window", 4096)
    cap = config.get("attn_logit_softcapping", 50.0 if member == "Gemma2" else None)
    factor = float(optional(config, "query_pre_attn_scalar", 256)) ** -0.5
    windows = windows_of_layers(config, num_layers, window, full_attention_every(period, num_layers))
    # Without is_causal, the window is divided into two halves, one on each side, as in transformers.
    cap = None if cap is None else float(cap)
    return [AttentionShape(*heads, factor, window, cap, is_causal=is_causal) for window in windows]


def _rotaries(facts: ModelFacts, member: str) -> list[Rotary]:
    """Return the angles of all layers. For Gemma 3: those of full attention, then those of layers with a window."""
    config = facts.hf_config
    if member != "Gemma3":
        return [rotary_from_config(config, facts.head_dim)]
    rope: dict[str, Any] = optional(config, "rope_parameters", {})
    local_theta = optional(config, "rope_local_base_freq", 10000.0)
    local_config = {"rope_theta": local_theta, "rope_parameters": rope.get("sliding_attention")}
    return [
        rotary_from_config(config, facts.head_dim, default_theta=1000000.0, layer_type="full_attention"),
        rotary_from_config(local_config, facts.head_dim),
    ]
