"""The Llama family: Llama, Mistral, Qwen2 and Qwen3, one decoder with a configuration for each."""

from collections.abc import Mapping
from typing import Any

from octavo.kernels.paged_attention import AttentionShape
from octavo.protocol.config.facts import ModelFacts
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.hf_config import optional, reject_unless, required
from octavo.worker_proc.models.layers.attention import SelfAttention, head_norm
from octavo.worker_proc.models.layers.decoder import DecoderModel, PreNormLayer
from octavo.worker_proc.models.layers.embedding import TokenEmbedding
from octavo.worker_proc.models.layers.linear import Linear
from octavo.worker_proc.models.layers.mlp import GatedMlp
from octavo.worker_proc.models.layers.norm import RMSNorm
from octavo.worker_proc.models.layers.rotary import rotary_from_config
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.parallel.placement import Placement


def _windows(architecture: str, config: Mapping[str, Any], num_layers: int) -> list[int | None]:
    """Return the window of each layer's attention, None where there is none.

    Raises:
        ConfigError: the keys that describe windows contradict each other.
    """
    types: list[str] = optional(config, "layer_types", [])
    if unknown := set(types) - {"full_attention", "sliding_attention"}:
        raise ConfigError(f"config.json: 'layer_types' has {sorted(unknown)}, which are not supported")
    if types and len(types) != num_layers:
        raise ConfigError(f"config.json: 'layer_types' has {len(types)} entries for {num_layers} layers")
    if architecture == "MistralForCausalLM":
        # A missing key means 4096, and null means no window.
        window = config.get("sliding_window", 4096)
        types = types or ["sliding_attention"] * num_layers
    else:
        window = config.get("sliding_window") if optional(config, "use_sliding_window", False) else None
        num_full = optional(config, "max_window_layers", num_layers)
        types = types or ["sliding_attention" if index >= num_full else "full_attention" for index in range(num_layers)]
        if window is None and "sliding_attention" in optional(config, "layer_types", []):
            raise ConfigError("config.json: 'layer_types' has sliding_attention, but there is no sliding_window")
    return [window if kind == "sliding_attention" else None for kind in types]


def build(facts: ModelFacts, placement: Placement) -> DecoderModel:
    """Make the member of the family that `facts` describes, or one rank's part of it.

    Raises:
        ConfigError: something in its configuration is not supported.
    """
    config, architecture = facts.hf_config, facts.architecture
    reject_unless(config, "hidden_act", ["silu"])
    is_tied = optional(config, "tie_word_embeddings", False)
    has_bias = optional(config, "attention_bias", False)
    is_qwen2, is_qwen3 = architecture == "Qwen2ForCausalLM", architecture == "Qwen3ForCausalLM"
    shapes = [
        AttentionShape(facts.num_heads, facts.num_kv_heads, facts.head_dim, facts.head_dim**-0.5, window)
        for window in _windows(architecture, config, facts.num_layers)
    ]
    width, eps = required(config, "hidden_size", int), optional(config, "rms_norm_eps", 1e-6)
    inner_width = required(config, "intermediate_size", int)
    has_mlp_bias = optional(config, "mlp_bias", False)
    ignored = [r"rotary_emb\.inv_freq$"] + ([r"^lm_head\.weight$"] if is_tied else [])
    parameters = Parameters(placement, prefixes=["model."], ignored=ignored)

    def layer(index: int) -> PreNormLayer:
        name = f"layers.{index}"
        attention = SelfAttention(
            parameters,
            f"{name}.self_attn",
            index,
            shapes[index],
            width,
            has_qkv_bias=is_qwen2 or has_bias,
            has_output_bias=not is_qwen2 and has_bias,
            qk_norm=head_norm(parameters, f"{name}.self_attn", facts.head_dim, eps) if is_qwen3 else None,
        )
        return PreNormLayer(
            RMSNorm.new(parameters, f"{name}.input_layernorm", width, eps),
            attention,
            RMSNorm.new(parameters, f"{name}.post_attention_layernorm", width, eps),
            GatedMlp(parameters, f"{name}.mlp", width, inner_width, has_bias=has_mlp_bias),
        )

    embedding = TokenEmbedding(parameters, "embed_tokens.weight", facts.vocab_size, width)
    return DecoderModel(
        parameters,
        shapes,
        embedding=embedding,
        layers=[layer(index) for index in range(facts.num_layers)],
        norm=RMSNorm.new(parameters, "norm", width, eps),
        output=(
            Linear.tied(parameters, embedding.table_VD)
            if is_tied
            else Linear.new(parameters, "lm_head", width, facts.vocab_size, bias=False)
        ),
        rotaries=[rotary_from_config(config, facts.head_dim)],
    )
