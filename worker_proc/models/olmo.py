"""OLMo 1, 2 and 3. The first has norms without weights; the others normalize outputs of blocks, queries and keys."""

from functools import partial
from typing import Any

from octavo.kernels.paged_attention import AttentionShape
from octavo.protocol.config.facts import ModelFacts
from octavo.worker_proc.models.base import Layer, Norm
from octavo.worker_proc.models.hf_config import full_attention_every, optional, required, windows_of_layers
from octavo.worker_proc.models.layers.activation import GATED, activation
from octavo.worker_proc.models.layers.attention import SelfAttention
from octavo.worker_proc.models.layers.decoder import DecoderModel, PostNormLayer, PreNormLayer, build_decoder
from octavo.worker_proc.models.layers.mlp import GatedMlp
from octavo.worker_proc.models.layers.norm import LayerNorm, RMSNorm
from octavo.worker_proc.models.layers.prenorm import llama_parameters
from octavo.worker_proc.models.layers.rotary import Rotary, rotary_from_config
from octavo.worker_proc.models.layers.row_norms import norms_of_rows
from octavo.worker_proc.parallel.placement import Placement


def build(facts: ModelFacts, placement: Placement) -> DecoderModel:
    """Make the model that `facts` describes, or one rank's part of it.

    Raises:
        ConfigError: something in its configuration is not supported.
    """
    config, member = facts.hf_config, facts.architecture.removesuffix("ForCausalLM")
    is_first, is_third = member == "Olmo", member == "Olmo3"
    has_bias = optional(config, "attention_bias", False)
    clip = float(config["clip_qkv"]) if is_first and config.get("clip_qkv") else None
    width, eps = required(config, "hidden_size", int), 1e-5 if is_first else optional(config, "rms_norm_eps", 1e-5)
    inner_width, function = required(config, "intermediate_size", int), activation(config, "silu", GATED)
    windows: list[int | None] = [None] * facts.num_layers
    if is_third:
        window = config.get("sliding_window", 4096)
        windows = windows_of_layers(config, facts.num_layers, window, full_attention_every(4, facts.num_layers))
    heads = facts.num_heads, facts.num_kv_heads, facts.head_dim
    shapes = [AttentionShape(*heads, facts.head_dim**-0.5, window) for window in windows]
    parameters = llama_parameters(placement)

    def norm(name: str) -> Norm:
        if is_first:
            return LayerNorm.new(parameters, name, width, eps, has_weight=False, has_bias=False)
        return RMSNorm.new(parameters, name, width, eps)

    def layer(index: int, name: str) -> Layer:
        attention = SelfAttention(
            parameters,
            f"{name}.self_attn",
            index,
            shapes[index],
            width,
            rotary=1 if is_third and windows[index] is not None else 0,
            has_qkv_bias=has_bias,
            has_output_bias=has_bias,
            row_norms=None if is_first else norms_of_rows(parameters, f"{name}.self_attn", shapes[index], eps),
            clip=clip,
        )
        mlp = GatedMlp(parameters, f"{name}.mlp", width, inner_width, activation=function)
        attention_norm = norm(f"{name}.input_layernorm" if is_first else f"{name}.post_attention_layernorm")
        if is_first:
            return PreNormLayer(attention_norm, attention, norm(f"{name}.post_attention_layernorm"), mlp)
        return PostNormLayer(attention, attention_norm, mlp, norm(f"{name}.post_feedforward_layernorm"))

    rotaries = _rotaries(facts) if is_third else [rotary_from_config(config, facts.head_dim)]
    return build_decoder(facts, parameters, shapes, layer, width=width, norm=norm, rotaries=rotaries)


def _rotaries(facts: ModelFacts) -> list[Rotary]:
    """Return the angles of layers with full attention, then those of layers with a window, which are not scaled."""
    config = facts.hf_config
    make = partial(rotary_from_config, head_dim=facts.head_dim, default_theta=500000.0)
    rope: dict[str, Any] = optional(config, "rope_parameters", {})
    theta = config.get("rope_theta") or rope.get("rope_theta")
    local = {"rope_theta": theta, "rope_parameters": rope.get("sliding_attention")}
    return [make(config, layer_type="full_attention"), make(local)]
