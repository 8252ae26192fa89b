"""NomicBERT and GTE: BERT with rotary positions and gated mlps. Reads their own config keys and transformers' ones."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from octavo.protocol.config.facts import ModelFacts
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.checkpoint import renamed, split_rows, stacked
from octavo.worker_proc.models.hf_config import ignore, optional, reject_unless, required
from octavo.worker_proc.models.layers.activation import GATED, activation
from octavo.worker_proc.models.layers.attention import SelfAttention
from octavo.worker_proc.models.layers.embedding import TokenEmbedding
from octavo.worker_proc.models.layers.encoder import (
    EncoderModel,
    PlaceEmbedding,
    SumNormLayer,
    encoder_head,
    encoder_shape,
)
from octavo.worker_proc.models.layers.mlp import GatedMlp
from octavo.worker_proc.models.layers.norm import LayerNorm
from octavo.worker_proc.models.layers.rotary import Rotary, rotary_from_config
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.parallel.placement import Placement
from octavo.worker_proc.pooling.heads import Dense, HeadLayer

_NAMES = {
    r"^embeddings\.word_embeddings": "embed_tokens",
    r"^embeddings\.token_type_embeddings": "embed_segments",
    r"^(embeddings\.LayerNorm|emb_ln)": "embed_norm",
    r"^encoder\.layers?\.": "layers.",
    r"\.attn\.out_proj": ".self_attn.o_proj",
    r"\.(attn|attention)\.([qkvo]_proj)": r".self_attn.\2",
    r"\.mlp\.fc11": ".mlp.up_proj",
    r"\.mlp\.fc12": ".mlp.gate_proj",
    r"\.mlp\.fc2": ".mlp.down_proj",
    r"\.(norm1|attn_ln|post_attention_layernorm)": ".attention_norm",
    r"\.(norm2|mlp_ln|post_mlp_layernorm)": ".mlp_norm",
}
_UNUSED = (r"^(cls|lm_head|pooler)\.", r"inv_freq$", r"^embeddings\.position_ids$")


@dataclass(frozen=True, slots=True)
class RotaryBertConfig:
    """The differences between these models."""

    width: int
    inner_width: int
    activation: str
    eps: float
    num_segments: int
    has_qkv_bias: bool
    has_output_bias: bool
    has_up_bias: bool
    """Whether ups and gates have biases."""
    has_down_bias: bool
    rotary: Rotary

    @classmethod
    def read(cls, facts: ModelFacts) -> "RotaryBertConfig":
        """Read `config.json`.

        Raises:
            ConfigError: a value is missing or not supported.
        """
        if "n_embd" in facts.hf_config:
            return cls._of_nomic(facts)
        is_nomic, config = facts.architecture.startswith("Nomic"), facts.hf_config
        reject_unless(config, "position_embedding_type", ["rope", "absolute", None])  # transformers writes "absolute"
        reject_unless(config, "layer_norm_type", ["layer_norm"])
        reject_unless(config, "logn_attention_scale", [False])
        ignore(config, "pack_qkv", "unpad_inputs", "use_memory_efficient_attention", "logn_attention_clip1")
        return cls(
            width=required(config, "hidden_size", int),
            inner_width=required(config, "intermediate_size", int),
            activation=activation(config, "silu" if is_nomic else "gelu", GATED),
            eps=optional(config, "layer_norm_eps", 1e-12),
            num_segments=optional(config, "type_vocab_size", 2 if is_nomic else 1),
            has_qkv_bias=not is_nomic,
            has_output_bias=not is_nomic,
            has_up_bias=False,
            has_down_bias=not is_nomic,
            rotary=_rotary(config, facts.head_dim, default_theta=1000.0 if is_nomic else 160000.0),
        )

    @classmethod
    def _of_nomic(cls, facts: ModelFacts) -> "RotaryBertConfig":
        """Read the config keys of nomic-embed-text-v1.5."""
        config = facts.hf_config
        for key, value in (("prenorm", False), ("parallel_block", False), ("use_rms_norm", False), ("causal", False)):
            reject_unless(config, key, [value, None])
        reject_unless(config, "rotary_emb_interleaved", [False, None])
        reject_unless(config, "rotary_emb_scale_base", [None])
        reject_unless(config, "rotary_scaling_factor", [None])
        reject_unless(config, "scale_attn_by_inverse_layer_idx", [False, None])
        reject_unless(config, "scale_attn_weights", [True, None])
        ignore(config, "dense_seq_output", "fused_bias_fc", "fused_dropout_add_ln", "max_trained_positions")
        ignore(config, "pad_vocab_size_multiple", "parallel_block_tied_norm", "use_xentropy")
        function = required(config, "activation_function", str)
        names = {"swiglu": "silu", "geglu": "gelu"}
        if function not in names:
            raise ConfigError(f"config.json: 'activation_function' is {function!r}; only swiglu, geglu is supported")
        width = required(config, "n_embd", int)
        return cls(
            width=width,
            inner_width=optional(config, "n_inner", 4 * width),
            activation=names[function],
            eps=optional(config, "layer_norm_epsilon", 1e-12),
            num_segments=optional(config, "type_vocab_size", 2),
            has_qkv_bias=optional(config, "qkv_proj_bias", False),
            has_output_bias=optional(config, "qkv_proj_bias", False),
            has_up_bias=optional(config, "mlp_fc1_bias", False),
            has_down_bias=optional(config, "mlp_fc2_bias", False),
            rotary=rotary_from_config(
                {"rope_theta": float(optional(config, "rotary_emb_base", 10000))},
                facts.head_dim,
                default_partial=float(optional(config, "rotary_emb_fraction", 1.0)),
            ),
        )


def _rotary(config: dict[str, Any], head_dim: int, *, default_theta: float) -> Rotary:
    """Make the angles. GTE's scaling "ntk" multiplies the base by its factor, and divides all frequencies by
    factor ** (2 / head_dim)."""
    scaling = config.get("rope_scaling")
    if not isinstance(scaling, dict) or scaling.get("type") != "ntk":
        return rotary_from_config(config, head_dim, default_theta=default_theta)
    if unknown := sorted(set(scaling) - {"type", "factor"}):
        raise ConfigError(f"config.json: the rope scaling 'ntk' with {', '.join(map(repr, unknown))} is not supported")
    factor, theta = float(required(scaling, "factor", float)), float(optional(config, "rope_theta", default_theta))
    exponents_C = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return Rotary(1.0 / (theta * factor) ** exponents_C / factor ** (2 / head_dim))


def build(facts: ModelFacts, placement: Placement) -> EncoderModel:
    """Make the model that `facts` describes, or one rank's part of it.

    Raises:
        ConfigError: something in its configuration is not supported.
    """
    config, shape = RotaryBertConfig.read(facts), encoder_shape(facts)
    width, inner_width = config.width, config.inner_width
    qkv = stacked({f"{part}_proj": width for part in "qkv"})
    rules = [
        split_rows("Wqkv", qkv),
        split_rows("qkv_proj", qkv),
        split_rows("up_gate_proj", stacked({f"{part}_proj": inner_width for part in ("up", "gate")})),
        renamed(_NAMES),
    ]
    parameters = Parameters(placement, prefixes=["new.", "gte.", "nomic_bert.", "bert."], ignored=_UNUSED, rules=rules)
    norm = partial(LayerNorm.new, parameters, width=width, eps=config.eps)

    def layer(index: int) -> SumNormLayer:
        name = f"layers.{index}"
        return SumNormLayer(
            SelfAttention(
                parameters,
                f"{name}.self_attn",
                index,
                shape,
                width,
                has_qkv_bias=config.has_qkv_bias,
                has_output_bias=config.has_output_bias,
            ),
            norm(f"{name}.attention_norm"),
            _mlp(parameters, f"{name}.mlp", config),
            norm(f"{name}.mlp_norm"),
        )

    model = EncoderModel(
        parameters,
        [shape] * facts.num_layers,
        embedding=TokenEmbedding(parameters, "embed_tokens.weight", facts.vocab_size, width),
        place=PlaceEmbedding(parameters, width, num_segments=config.num_segments) if config.num_segments else None,
        norm=norm("embed_norm"),
        layers=[layer(index) for index in range(facts.num_layers)],
        rotaries=[config.rotary],
    )
    model.pooling_head = encoder_head(facts, partial(_classifier, parameters, facts.architecture, width))
    return model


def _mlp(parameters: Parameters, name: str, config: RotaryBertConfig) -> GatedMlp:
    return GatedMlp(
        parameters,
        name,
        config.width,
        config.inner_width,
        activation=config.activation,
        has_bias=config.has_up_bias,
        has_output_bias=config.has_down_bias,
    )


def _classifier(parameters: Parameters, architecture: str, width: int, num_labels: int) -> list[HeadLayer]:
    classifier = Dense.new(parameters, "classifier", width, num_labels, has_bias=True)
    if architecture.endswith("ForTokenClassification"):
        return [classifier]
    return [Dense.new(parameters, "pooler.dense", width, width, has_bias=True, activation="tanh"), classifier]
