"""ModernBERT: rotary positions, windows in two layers of three, gated mlps, norms before blocks."""

from functools import partial
from typing import Any

from octavo.kernels.paged_attention import AttentionShape
from octavo.protocol.config.facts import ModelFacts
from octavo.protocol.pooling import Activation
from octavo.worker_proc.models.base import Norm
from octavo.worker_proc.models.checkpoint import renamed, split_rows, stacked
from octavo.worker_proc.models.hf_config import ignore, optional, reject_unless, required, windows_of_layers
from octavo.worker_proc.models.layers.activation import GATED, activation
from octavo.worker_proc.models.layers.attention import SelfAttention
from octavo.worker_proc.models.layers.decoder import DecoderModel, PreNormLayer
from octavo.worker_proc.models.layers.embedding import TokenEmbedding
from octavo.worker_proc.models.layers.encoder import SameNorm, encoder_head, encoder_shape
from octavo.worker_proc.models.layers.mlp import GatedMlp
from octavo.worker_proc.models.layers.norm import LayerNorm
from octavo.worker_proc.models.layers.rotary import Rotary, rotary_from_config
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.parallel.placement import Placement
from octavo.worker_proc.pooling.heads import Dense, HeadLayer, HeadNorm

_NAMES = {
    r"^embeddings\.tok_embeddings": "embed_tokens",
    r"^embeddings\.norm": "embed_norm",
    r"\.attn\.Wo": ".self_attn.o_proj",
    r"\.attn\.([qkv]_proj)": r".self_attn.\1",
    r"\.mlp\.Wo": ".mlp.down_proj",
}


def build(facts: ModelFacts, placement: Placement) -> DecoderModel:
    """Make the model that `facts` describes, or one rank's part of it.

    Raises:
        ConfigError: something in its configuration is not supported.
    """
    config = facts.hf_config
    ignore(
        config, "initializer_cutoff_factor", "deterministic_flash_attn", "reference_compile", "repad_logits_with_grad"
    )
    ignore(config, "sparse_prediction", "sparse_pred_ignore_index", "mlp_dropout", "decoder_bias")
    ignore(config, "classifier_pooling", "classifier_activation", "classifier_bias")  # of the head
    width, inner_width = required(config, "hidden_size", int), required(config, "intermediate_size", int)
    eps, has_norm_bias = optional(config, "norm_eps", 1e-5), optional(config, "norm_bias", False)
    shapes = _shapes(facts)
    rows = {f"{part}_proj": width for part in "qkv"}, {f"{part}_proj": inner_width for part in ("gate", "up")}
    rules = [split_rows("Wqkv", stacked(rows[0])), split_rows("Wi", stacked(rows[1])), renamed(_NAMES)]
    parameters = Parameters(placement, prefixes=["model."], ignored=[r"^decoder\.", r"^head\."], rules=rules)
    norm = partial(LayerNorm.new, parameters, width=width, eps=eps, has_bias=has_norm_bias)
    has_bias, has_mlp_bias = optional(config, "attention_bias", False), optional(config, "mlp_bias", False)
    function = activation(config, "gelu", GATED, key="hidden_activation")

    def layer(index: int) -> PreNormLayer:
        name, shape = f"layers.{index}", shapes[index]
        attention = SelfAttention(
            parameters,
            f"{name}.self_attn",
            index,
            shape,
            width,
            rotary=0 if shape.window is None else 1,
            has_qkv_bias=has_bias,
            has_output_bias=has_bias,
        )
        attention_norm: Norm = norm(f"{name}.attn_norm") if index else SameNorm()  # that of the embeddings comes before
        mlp = GatedMlp(parameters, f"{name}.mlp", width, inner_width, activation=function, has_bias=has_mlp_bias)
        return PreNormLayer(attention_norm, attention, norm(f"{name}.mlp_norm"), mlp)

    model = DecoderModel(
        parameters,
        shapes,
        embedding=TokenEmbedding(parameters, "embed_tokens.weight", facts.vocab_size, width),
        layers=[layer(index) for index in range(facts.num_layers)],
        norm=norm("final_norm"),
        output=None,
        rotaries=_rotaries(facts),
        after_embedding=norm("embed_norm"),
    )
    model.pooling_head = encoder_head(facts, partial(_classifier, parameters, facts, width, eps, has_norm_bias))
    return model


def _shapes(facts: ModelFacts) -> list[AttentionShape]:
    config = facts.hf_config
    period = optional(config, "global_attn_every_n_layers", 3)
    implied = ["sliding_attention" if layer % period else "full_attention" for layer in range(facts.num_layers)]
    windows = windows_of_layers(config, facts.num_layers, optional(config, "local_attention", 128), implied)
    return [encoder_shape(facts, window) for window in windows]


def _rotaries(facts: ModelFacts) -> list[Rotary]:
    """Return the angles of layers with full attention, then those of layers with a window."""
    config = facts.hf_config
    reject_unless(config, "position_embedding_type", ["absolute", "sans_pos", "rope", None])  # a relic; never read
    thetas = {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"}
    defaults = {"full_attention": 160000.0, "sliding_attention": 10000.0}
    ropes: dict[str, Any] = optional(config, "rope_parameters", {})
    return [
        rotary_from_config(
            {"rope_theta": config.get(key), "rope_parameters": ropes.get(kind)},
            facts.head_dim,
            default_theta=defaults[kind],
        )
        for kind, key in thetas.items()
    ]


def _classifier(
    parameters: Parameters, facts: ModelFacts, width: int, eps: float, has_norm_bias: bool, num_labels: int
) -> list[HeadLayer]:
    config = facts.hf_config
    reject_unless(config, "classifier_activation", ["gelu"])
    function: Activation = "gelu"
    has_bias = optional(config, "classifier_bias", False)
    return [
        Dense.new(parameters, "head.dense", width, width, has_bias=has_bias, activation=function),
        HeadNorm.new(parameters, "head.norm", width, eps, has_bias=has_norm_bias),
        Dense.new(parameters, "classifier", width, num_labels, has_bias=True),
    ]
