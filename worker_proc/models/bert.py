"""BERT, RoBERTa and XLM-RoBERTa, and DistilBERT, which has the same layers under other names."""

from dataclasses import dataclass
from functools import partial

from octavo.protocol.config.facts import ModelFacts
from octavo.protocol.pooling import Activation
from octavo.worker_proc.models.checkpoint import renamed
from octavo.worker_proc.models.hf_config import ignore, optional, reject_unless, required
from octavo.worker_proc.models.layers.activation import PLAIN, activation
from octavo.worker_proc.models.layers.attention import SelfAttention
from octavo.worker_proc.models.layers.embedding import TokenEmbedding
from octavo.worker_proc.models.layers.encoder import (
    EncoderModel,
    PlaceEmbedding,
    SumNormLayer,
    encoder_head,
    encoder_shape,
)
from octavo.worker_proc.models.layers.mlp import Mlp
from octavo.worker_proc.models.layers.norm import LayerNorm
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.parallel.placement import Placement
from octavo.worker_proc.pooling.heads import Dense, HeadLayer

_NAMES = {
    r"\bLayerNorm\.gamma$": "LayerNorm.weight",
    r"\bLayerNorm\.beta$": "LayerNorm.bias",
    r"^embeddings\.word_embeddings": "embed_tokens",
    r"^embeddings\.position_embeddings": "embed_positions",
    r"^embeddings\.token_type_embeddings": "embed_segments",
    r"^embeddings\.LayerNorm": "embed_norm",
    r"^encoder\.layer\.": "layers.",
    r"\.attention\.self\.query": ".self_attn.q_proj",
    r"\.attention\.self\.key": ".self_attn.k_proj",
    r"\.attention\.self\.value": ".self_attn.v_proj",
    r"\.attention\.output\.dense": ".self_attn.o_proj",
    r"\.attention\.output\.LayerNorm": ".attention_norm",
    r"\.intermediate\.dense": ".mlp.fc1",
    r"\.output\.dense": ".mlp.fc2",
    r"\.output\.LayerNorm": ".mlp_norm",
    r"^classifier\.out_proj": "classifier.output",
    # DistilBERT
    r"^transformer\.layer\.": "layers.",
    r"\.attention\.([qkv])_lin": r".self_attn.\1_proj",
    r"\.attention\.out_lin": ".self_attn.o_proj",
    r"\.sa_layer_norm": ".attention_norm",
    r"\.ffn\.lin([12])": r".mlp.fc\1",
    r"\.output_layer_norm": ".mlp_norm",
}
_UNUSED = (r"^embeddings\.(position_ids|token_type_ids)$", r"^(cls|lm_head|pooler|vocab_\w+)\.")
"""Tensors of the output layer of pre-training, and of the pooler of models without a head."""


@dataclass(frozen=True, slots=True)
class BertConfig:
    """The differences between these models."""

    width: int
    inner_width: int
    activation: str
    eps: float
    first_position: int
    """Row of the first token in the position table. RoBERTa's table begins with rows for padding."""
    num_segments: int

    @classmethod
    def read(cls, facts: ModelFacts) -> "BertConfig":
        """Read `config.json`.

        Raises:
            ConfigError: a value is missing or not supported.
        """
        config = facts.hf_config
        reject_unless(config, "position_embedding_type", ["absolute", None])
        reject_unless(config, "is_decoder", [False, None])
        reject_unless(config, "add_cross_attention", [False, None])
        if facts.architecture.startswith("DistilBert"):
            ignore(config, "sinusoidal_pos_embds", "tie_weights_", "qa_dropout", "seq_classif_dropout")
            return cls(
                width=required(config, "dim", int),
                inner_width=required(config, "hidden_dim", int),
                activation=activation(config, "gelu", PLAIN, key="activation"),
                eps=1e-12,
                first_position=0,
                num_segments=0,
            )
        has_padding = "Roberta" in facts.architecture or "Camembert" in facts.architecture
        return cls(
            width=required(config, "hidden_size", int),
            inner_width=required(config, "intermediate_size", int),
            activation=activation(config, "gelu", PLAIN),
            eps=optional(config, "layer_norm_eps", 1e-5 if has_padding else 1e-12),
            first_position=optional(config, "pad_token_id", 1) + 1 if has_padding else 0,
            num_segments=optional(config, "type_vocab_size", 1 if has_padding else 2),
        )


def build(facts: ModelFacts, placement: Placement) -> EncoderModel:
    """Make the model that `facts` describes, or one rank's part of it.

    Raises:
        ConfigError: something in its configuration is not supported.
    """
    assert facts.pooling is not None, "an encoder pools"
    config, shape = BertConfig.read(facts), encoder_shape(facts)
    prefixes = ["bert.", "roberta.", "distilbert."]
    parameters = Parameters(placement, prefixes=prefixes, ignored=_UNUSED, rules=[renamed(_NAMES)])
    norm = partial(LayerNorm.new, parameters, width=config.width, eps=config.eps)

    def layer(index: int) -> SumNormLayer:
        name = f"layers.{index}"
        return SumNormLayer(
            SelfAttention(
                parameters,
                f"{name}.self_attn",
                index,
                shape,
                config.width,
                rotary=None,
                has_qkv_bias=True,
                has_output_bias=True,
            ),
            norm(f"{name}.attention_norm"),
            Mlp(
                parameters,
                f"{name}.mlp",
                config.width,
                config.inner_width,
                activation=config.activation,
                has_bias=True,
            ),
            norm(f"{name}.mlp_norm"),
        )

    model = EncoderModel(
        parameters,
        [shape] * facts.num_layers,
        embedding=TokenEmbedding(parameters, "embed_tokens.weight", facts.vocab_size, config.width),
        place=PlaceEmbedding(
            parameters,
            config.width,
            num_positions=required(facts.hf_config, "max_position_embeddings", int),
            first_position=config.first_position,
            num_segments=config.num_segments,
            used_segments=facts.pooling.num_segments,
        ),
        norm=norm("embed_norm"),
        layers=[layer(index) for index in range(facts.num_layers)],
    )
    model.pooling_head = encoder_head(facts, partial(_classifier, parameters, facts.architecture, config.width))
    return model


def _classifier(parameters: Parameters, architecture: str, width: int, num_labels: int) -> list[HeadLayer]:
    def dense(name: str, num_outputs: int = num_labels, activation: Activation = "identity") -> Dense:
        return Dense.new(parameters, name, width, num_outputs, has_bias=True, activation=activation)

    if architecture.endswith("ForTokenClassification"):
        return [dense("classifier")]
    if architecture.startswith("DistilBert"):
        return [dense("pre_classifier", width, "relu"), dense("classifier")]
    if architecture.startswith("Bert"):
        return [dense("pooler.dense", width, "tanh"), dense("classifier")]
    return [dense("classifier.dense", width, "tanh"), dense("classifier.output")]
