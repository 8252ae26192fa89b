"""Qwen2-MoE and Qwen3-MoE: Qwen with mixtures of experts in all layers, or in some."""

from octavo.kernels.paged_attention import AttentionShape
from octavo.protocol.config.facts import ModelFacts
from octavo.worker_proc.models.hf_config import ignore, optional, reject_unless, required, windows_of_layers
from octavo.worker_proc.models.layers.attention import SelfAttention, head_norm
from octavo.worker_proc.models.layers.decoder import DecoderModel, MlpBlock
from octavo.worker_proc.models.layers.experts import Experts, SharedExpert, num_experts, routing_rule
from octavo.worker_proc.models.layers.linear import Linear
from octavo.worker_proc.models.layers.mlp import GatedMlp
from octavo.worker_proc.models.layers.prenorm import llama_parameters, prenorm_decoder
from octavo.worker_proc.parallel.placement import Placement


def build(facts: ModelFacts, placement: Placement) -> DecoderModel:
    """Make the member of the family that `facts` describes, or one rank's part of it.

    Raises:
        ConfigError: something in its configuration is not supported.
    """
    config, is_qwen2 = facts.hf_config, facts.architecture == "Qwen2MoeForCausalLM"
    reject_unless(config, "hidden_act", ["silu"])
    reject_unless(config, "use_sliding_window", [False, None])
    ignore(config, "sliding_window", "max_window_layers", "intermediate_size")  # used by some of the models
    if not is_qwen2:  # Qwen3-Coder names features of other Qwen models
        reject_unless(config, "qkv_bias", [optional(config, "attention_bias", False), None])
        reject_unless(config, "use_qk_norm", [True, None])
        reject_unless(config, "shared_expert_intermediate_size", [0, None])
    windows_of_layers(config, facts.num_layers, None, ["full_attention"] * facts.num_layers)
    shape = AttentionShape(facts.num_heads, facts.num_kv_heads, facts.head_dim, facts.head_dim**-0.5)
    width, eps = required(config, "hidden_size", int), optional(config, "rms_norm_eps", 1e-6)
    has_bias = not is_qwen2 and optional(config, "attention_bias", False)
    rule = routing_rule(
        num_experts(config),
        required(config, "num_experts_per_tok", int),
        is_normalized=optional(config, "norm_topk_prob", False),
    )
    dense_layers: list[int] = optional(config, "mlp_only_layers", [])
    step = optional(config, "decoder_sparse_step", 1)
    parameters = llama_parameters(placement)

    def attention(index: int, name: str) -> SelfAttention:
        return SelfAttention(
            parameters,
            f"{name}.self_attn",
            index,
            shape,
            width,
            has_qkv_bias=optional(config, "qkv_bias", True) if is_qwen2 else has_bias,
            has_output_bias=has_bias,
            qk_norm=None if is_qwen2 else head_norm(parameters, f"{name}.self_attn", facts.head_dim, eps),
        )

    def mlp(index: int, name: str) -> MlpBlock:
        if index in dense_layers or (index + 1) % step:
            return GatedMlp(parameters, f"{name}.mlp", width, required(config, "intermediate_size", int))
        routed = Experts(parameters, f"{name}.mlp", rule, width, required(config, "moe_intermediate_size", int))
        if not is_qwen2:
            return routed
        shared_width = required(config, "shared_expert_intermediate_size", int)
        shared = GatedMlp(parameters, f"{name}.mlp.shared_expert", width, shared_width)
        return SharedExpert(
            routed, shared, Linear.new(parameters, f"{name}.mlp.shared_expert_gate", width, 1, bias=False)
        )

    return prenorm_decoder(facts, parameters, [shape] * facts.num_layers, attention, mlp, eps=eps)
