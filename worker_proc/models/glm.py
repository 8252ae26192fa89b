"""GLM-4: half of each head rotates, in pairs of neighbours; the later version also has norms after its blocks."""

from functools import partial

from octavo.kernels.paged_attention import AttentionShape
from octavo.protocol.config.facts import ModelFacts
from octavo.worker_proc.models.checkpoint import halves_of_pairs, reordered_rows, split_rows, stacked
from octavo.worker_proc.models.hf_config import optional, required
from octavo.worker_proc.models.layers.activation import GATED, activation
from octavo.worker_proc.models.layers.attention import SelfAttention
from octavo.worker_proc.models.layers.decoder import DecoderModel, PreNormLayer, build_decoder
from octavo.worker_proc.models.layers.mlp import GatedMlp
from octavo.worker_proc.models.layers.norm import RMSNorm
from octavo.worker_proc.models.layers.prenorm import llama_parameters
from octavo.worker_proc.models.layers.rotary import rotary_from_config
from octavo.worker_proc.parallel.placement import Placement


def build(facts: ModelFacts, placement: Placement) -> DecoderModel:
    """Make the model that `facts` describes, or one rank's part of it.

    Raises:
        ConfigError: something in its configuration is not supported.
    """
    config, has_four_norms = facts.hf_config, facts.architecture == "Glm4ForCausalLM"
    has_bias = optional(config, "attention_bias", True)
    width, eps = required(config, "hidden_size", int), optional(config, "rms_norm_eps", 1.5625e-7)
    inner_width, function = required(config, "intermediate_size", int), activation(config, "silu", GATED)
    shape = AttentionShape(facts.num_heads, facts.num_kv_heads, facts.head_dim, facts.head_dim**-0.5)
    rotary = rotary_from_config(config, facts.head_dim, default_partial=0.5)
    whole_width = inner_width * placement.sharding.size
    rules = [split_rows("gate_up_proj", stacked({"gate_proj": whole_width, "up_proj": whole_width}))]
    rules += [
        reordered_rows(rf"\.{part}_proj\.", halves_of_pairs(count, facts.head_dim, 2 * rotary.num_pairs))
        for part, count in zip("qk", placement.sharding.whole_heads(facts), strict=True)
    ]
    # A checkpoint may have a layer after the last one, for drafting tokens.
    parameters = llama_parameters(placement, ignored=[rf"^layers\.{facts.num_layers}\."], rules=rules)
    norm = partial(RMSNorm.new, parameters, width=width, eps=eps)

    def layer(index: int, name: str) -> PreNormLayer:
        return PreNormLayer(
            norm(f"{name}.input_layernorm"),
            SelfAttention(parameters, f"{name}.self_attn", index, shape, width, has_qkv_bias=has_bias),
            norm(f"{name}.post_attention_layernorm"),
            GatedMlp(parameters, f"{name}.mlp", width, inner_width, activation=function),
            after_attention=norm(f"{name}.post_self_attn_layernorm") if has_four_norms else None,
            after_mlp=norm(f"{name}.post_mlp_layernorm") if has_four_norms else None,
        )

    shapes = [shape] * facts.num_layers
    return build_decoder(facts, parameters, shapes, layer, width=width, norm=norm, rotaries=[rotary])
