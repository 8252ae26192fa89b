"""The Llama family: Llama, Mistral, Qwen2 and Qwen3, one decoder with a configuration for each."""

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


def build(facts: ModelFacts, placement: Placement) -> DecoderModel:
    """Make the member of the family that `facts` describes, or one rank's part of it.

    Raises:
        ConfigError: something in its configuration is not supported.
    """
    config, architecture = facts.hf_config, facts.architecture
    reject_unless(config, "hidden_act", ["silu"])
    reject_unless(config, "use_sliding_window", [False, None])
    if set(optional(config, "layer_types", [])) - {"full_attention"}:
        raise ConfigError("config.json: layer_types other than full_attention are not supported")
    is_tied = optional(config, "tie_word_embeddings", False)
    has_bias = optional(config, "attention_bias", False)
    is_qwen2, is_qwen3 = architecture == "Qwen2ForCausalLM", architecture == "Qwen3ForCausalLM"
    # In Mistral's configuration a missing key means 4096, and null means no window.
    window = config.get("sliding_window", 4096) if architecture == "MistralForCausalLM" else None
    shape = AttentionShape(facts.num_heads, facts.num_kv_heads, facts.head_dim, facts.head_dim**-0.5, window)
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
            shape,
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
        [shape] * facts.num_layers,
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
