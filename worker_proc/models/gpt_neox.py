"""GPT-NeoX and Pythia, and Phi-1 and Phi-2: parallel blocks, layer norms, and heads that are rotated in part."""

from functools import partial

from octavo.kernels.paged_attention import AttentionShape
from octavo.protocol.config.facts import ModelFacts
from octavo.worker_proc.models.base import Layer
from octavo.worker_proc.models.checkpoint import grouped_qkv, renamed, split_rows
from octavo.worker_proc.models.hf_config import optional, reject_unless, required
from octavo.worker_proc.models.layers.activation import PLAIN, activation
from octavo.worker_proc.models.layers.attention import SelfAttention
from octavo.worker_proc.models.layers.decoder import DecoderModel, ParallelLayer, PreNormLayer, build_decoder
from octavo.worker_proc.models.layers.mlp import Mlp
from octavo.worker_proc.models.layers.norm import LayerNorm
from octavo.worker_proc.models.layers.rotary import rotary_from_config
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.parallel.placement import Placement

_NEOX_NAMES = {
    r"^embed_in\.": "embed_tokens.",
    r"^embed_out\.": "lm_head.",
    r"^final_layer_norm\.": "norm.",
    r"\.attention\.dense\.": ".attention.o_proj.",
    r"\.attention\.": ".self_attn.",
    r"\.mlp\.dense_h_to_4h\.": ".mlp.fc1.",
    r"\.mlp\.dense_4h_to_h\.": ".mlp.fc2.",
}
_PHI_NAMES = {r"\.self_attn\.dense\.": ".self_attn.o_proj.", r"^final_layernorm\.": "norm."}


def build(facts: ModelFacts, placement: Placement) -> DecoderModel:
    """Make the model that `facts` describes, or one rank's part of it.

    Raises:
        ConfigError: something in its configuration is not supported.
    """
    config, is_phi = facts.hf_config, facts.architecture == "PhiForCausalLM"
    reject_unless(config, "qk_layernorm", [False])
    has_bias = is_phi or optional(config, "attention_bias", True)
    is_parallel = is_phi or optional(config, "use_parallel_residual", True)
    width, eps = required(config, "hidden_size", int), optional(config, "layer_norm_eps", 1e-5)
    inner_width = required(config, "intermediate_size", int)
    function = activation(config, "gelu_new" if is_phi else "gelu", PLAIN)
    shape = AttentionShape(facts.num_heads, facts.num_kv_heads, facts.head_dim, facts.head_dim**-0.5)
    ignored = [r"rotary_emb\.inv_freq$", r"\.self_attn\.(masked_)?bias$"]
    rules = [renamed(_PHI_NAMES if is_phi else _NEOX_NAMES)]
    if not is_phi:
        rows = grouped_qkv(*placement.sharding.whole_heads(facts), facts.head_dim)
        rules.append(split_rows("query_key_value", rows))
    parameters = Parameters(placement, prefixes=["model.", "gpt_neox."], ignored=ignored, rules=rules)
    norm = partial(LayerNorm.new, parameters, width=width, eps=eps)

    def layer(index: int, name: str) -> Layer:
        attention_norm = norm(f"{name}.input_layernorm")
        attention = SelfAttention(
            parameters, f"{name}.self_attn", index, shape, width, has_qkv_bias=has_bias, has_output_bias=has_bias
        )
        mlp = Mlp(parameters, f"{name}.mlp", width, inner_width, activation=function, has_bias=True)
        if is_phi:
            return ParallelLayer(attention_norm, attention, None, mlp)
        mlp_norm = norm(f"{name}.post_attention_layernorm")
        make = ParallelLayer if is_parallel else PreNormLayer
        return make(attention_norm, attention, mlp_norm, mlp)

    return build_decoder(
        facts,
        parameters,
        [shape] * facts.num_layers,
        layer,
        width=width,
        norm=norm,
        has_output_bias=is_phi,
        rotaries=[rotary_from_config(config, facts.head_dim, default_partial=0.5 if is_phi else 0.25)],
    )
