"""GLM-4.5: dense layers first, then mixtures with shared experts; a part of each head is rotated."""

from octavo.kernels.paged_attention import AttentionShape
from octavo.protocol.config.facts import ModelFacts
from octavo.worker_proc.models.hf_config import optional, reject_unless, required
from octavo.worker_proc.models.layers.attention import SelfAttention, head_norm
from octavo.worker_proc.models.layers.decoder import DecoderModel, MlpBlock
from octavo.worker_proc.models.layers.experts import Experts, SharedExpert, grouped_sigmoid_rule
from octavo.worker_proc.models.layers.mlp import GatedMlp
from octavo.worker_proc.models.layers.prenorm import llama_parameters, prenorm_decoder
from octavo.worker_proc.models.layers.rotary import rotary_from_config
from octavo.worker_proc.parallel.placement import Placement


def build(facts: ModelFacts, placement: Placement) -> DecoderModel:
    """Make the model that `facts` describes, or one rank's part of it.

    Raises:
        ConfigError: something in its configuration is not supported.
    """
    config = facts.hf_config
    reject_unless(config, "hidden_act", ["silu"])
    shape = AttentionShape(facts.num_heads, facts.num_kv_heads, facts.head_dim, facts.head_dim**-0.5)
    width, eps = required(config, "hidden_size", int), optional(config, "rms_norm_eps", 1e-5)
    inner_width = required(config, "moe_intermediate_size", int)
    dense_width = required(config, "intermediate_size", int)
    rule, num_dense = grouped_sigmoid_rule(config), optional(config, "first_k_dense_replace", 1)
    num_shared = optional(config, "n_shared_experts", 1)
    has_bias, has_norm = optional(config, "attention_bias", False), optional(config, "use_qk_norm", False)
    # Layers after the last one predict further tokens, for speculative decoding.
    extra = range(facts.num_layers, facts.num_layers + optional(config, "num_nextn_predict_layers", 0))
    parameters = llama_parameters(placement, ignored=[rf"^layers\.{layer}\." for layer in extra])

    def attention(index: int, name: str) -> SelfAttention:
        block = f"{name}.self_attn"
        norm = head_norm(parameters, block, facts.head_dim, eps) if has_norm else None
        return SelfAttention(parameters, block, index, shape, width, has_qkv_bias=has_bias, qk_norm=norm)

    def mlp(index: int, name: str) -> MlpBlock:
        block = f"{name}.mlp"
        if index < num_dense:
            return GatedMlp(parameters, block, width, dense_width)
        routed = Experts(parameters, block, rule, width, inner_width, choice_bias="gate.e_score_correction_bias")
        if not num_shared:
            return routed
        return SharedExpert(routed, GatedMlp(parameters, f"{block}.shared_experts", width, num_shared * inner_width))

    return prenorm_decoder(
        facts,
        parameters,
        [shape] * facts.num_layers,
        attention,
        mlp,
        eps=eps,
        rotaries=[rotary_from_config(config, facts.head_dim, default_partial=0.5)],
    )
