"""GLM-4: half of each head rotates, in pairs of neighbours; the later version also has norms after its blocks."""

from octavo.kernels.paged_attention import AttentionShape
from octavo.protocol.config.facts import ModelFacts
from octavo.worker_proc.models.checkpoint import halves_of_pairs, reordered_rows, split_rows, stacked
from octavo.worker_proc.models.hf_config import optional, required
from octavo.worker_proc.models.layers.activation import GATED, activation
from octavo.worker_proc.models.layers.attention import SelfAttention
from octavo.worker_proc.models.layers.decoder import DecoderModel, PreNormLayer, embedding_and_output
from octavo.worker_proc.models.layers.mlp import GatedMlp
from octavo.worker_proc.models.layers.norm import RMSNorm
from octavo.worker_proc.models.layers.rotary import rotary_from_config
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.parallel.placement import Placement


def build(facts: ModelFacts, placement: Placement) -> DecoderModel:
    """Make the model that `facts` describes, or one rank's part of it.

    Raises:
        ConfigError: something in its configuration is not supported.
    """
    config, has_four_norms = facts.hf_config, facts.architecture == "Glm4ForCausalLM"
    is_tied = optional(config, "tie_word_embeddings", False)
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
    ignored = [r"rotary_emb\.inv_freq$"] + ([r"^lm_head\.weight$"] if is_tied else [])
    # A checkpoint may have a layer after the last one, for drafting tokens.
    ignored.append(rf"^layers\.{facts.num_layers}\.")
    parameters = Parameters(placement, prefixes=["model."], ignored=ignored, rules=rules)

    def layer(index: int) -> PreNormLayer:
        name = f"layers.{index}"

        def norm(part: str) -> RMSNorm:
            return RMSNorm.new(parameters, f"{name}.{part}_layernorm", width, eps)

        return PreNormLayer(
            norm("input"),
            SelfAttention(parameters, f"{name}.self_attn", index, shape, width, has_qkv_bias=has_bias),
            norm("post_attention"),
            GatedMlp(parameters, f"{name}.mlp", width, inner_width, activation=function),
            after_attention=norm("post_self_attn") if has_four_norms else None,
            after_mlp=norm("post_mlp") if has_four_norms else None,
        )

    embedding, output = embedding_and_output(parameters, facts, width, is_tied=is_tied)
    return DecoderModel(
        parameters,
        [shape] * facts.num_layers,
        embedding=embedding,
        layers=[layer(index) for index in range(facts.num_layers)],
        norm=RMSNorm.new(parameters, "norm", width, eps),
        output=output,
        rotaries=[rotary],
    )
