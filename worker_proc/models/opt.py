"""OPT."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from octavo.kernels.embedding import embedding
from octavo.kernels.paged_attention import AttentionShape
from octavo.kernels.relu import relu
from octavo.protocol.config.facts import ModelFacts
from octavo.worker_proc.attention.base import Attention
from octavo.worker_proc.models.base import LayeredModel, Residual, Tables
from octavo.worker_proc.models.hf_config import optional, reject_unless, required
from octavo.worker_proc.models.layers.embedding import TokenEmbedding
from octavo.worker_proc.models.layers.linear import Linear
from octavo.worker_proc.models.layers.norm import LayerNorm
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.parallel.placement import Placement

_POSITION_OFFSET = 2
"""The position table starts with two unused rows."""
_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class OPTConfig:
    """Settings that differ between the models of the OPT family."""

    hidden_size: int
    mlp_size: int
    embedding_size: int
    """Width of the embeddings. If it differs from `hidden_size`, they are projected to and from it (the 350M model)."""
    is_prenorm: bool
    """Whether norms come before attention and mlp; otherwise after (the 350M model)."""
    has_final_norm: bool
    has_bias: bool

    @classmethod
    def read(cls, config: dict[str, Any]) -> "OPTConfig":
        """Read `config.json`.

        Raises:
            ConfigError: a value is missing or not supported.
        """
        reject_unless(config, "activation_function", ["relu"])
        reject_unless(config, "layer_norm_elementwise_affine", [True])
        reject_unless(config, "tie_word_embeddings", [True])
        hidden_size = required(config, "hidden_size", int)
        is_prenorm = optional(config, "do_layer_norm_before", True)
        return cls(
            hidden_size=hidden_size,
            mlp_size=required(config, "ffn_dim", int),
            embedding_size=optional(config, "word_embed_proj_dim", hidden_size),
            is_prenorm=is_prenorm,
            has_final_norm=not optional(config, "_remove_final_layer_norm", False) and is_prenorm,
            has_bias=optional(config, "enable_bias", True),
        )


class DecoderLayer:
    """Attention and mlp, each with a norm before or after it."""

    def __init__(self, parameters: Parameters, index: int, config: OPTConfig, shape: AttentionShape) -> None:
        name, width, bias = f"layers.{index}", config.hidden_size, config.has_bias
        heads_width = shape.num_heads * shape.head_dim
        qkv_parts = {f"{name}.self_attn.{part}_proj": heads_width for part in "qkv"}
        self.index = index
        self.shape = shape
        self.is_prenorm = config.is_prenorm
        self.qkv = Linear.stacked(parameters, f"{name}.self_attn.qkv_proj", qkv_parts, width, bias=bias)
        self.out = Linear.new(parameters, f"{name}.self_attn.out_proj", heads_width, width, bias=bias)
        self.attention_norm = LayerNorm.new(parameters, f"{name}.self_attn_layer_norm", width, _EPS)
        self.up = Linear.new(parameters, f"{name}.fc1", width, config.mlp_size, bias=bias)
        self.down = Linear.new(parameters, f"{name}.fc2", config.mlp_size, width, bias=bias)
        self.mlp_norm = LayerNorm.new(parameters, f"{name}.final_layer_norm", width, _EPS)

    def __call__(self, residual: Residual, tables: Tables, attention: Attention) -> Residual:
        """Return the residual stream after this layer."""
        hidden_TD = residual.hidden_TD
        if self.is_prenorm:
            hidden_TD = hidden_TD + self._attend(self.attention_norm(hidden_TD), attention)
            return Residual(hidden_TD + self._mlp(self.mlp_norm(hidden_TD)))
        hidden_TD = self.attention_norm(hidden_TD + self._attend(hidden_TD, attention))
        return Residual(self.mlp_norm(hidden_TD + self._mlp(hidden_TD)))

    def _attend(self, x_TD: Tensor, attention: Attention) -> Tensor:
        qkv = self.qkv(x_TD).unflatten(1, (3, self.shape.num_heads, self.shape.head_dim))
        q_TNH, k_TKH, v_TKH = qkv.unbind(1)
        return self.out(attention.run(q_TNH, k_TKH, v_TKH, self.index).flatten(1))

    def _mlp(self, x_TD: Tensor) -> Tensor:
        return self.down(relu(self.up(x_TD)))


class OPTModel(LayeredModel):
    """Token and position embeddings, layers and norm; the output weight is the token embedding."""

    def __init__(self, parameters: Parameters, facts: ModelFacts, config: OPTConfig, shape: AttentionShape) -> None:
        super().__init__(parameters, [shape] * facts.num_layers)
        width, embedding_width = config.hidden_size, config.embedding_size
        num_positions = facts.max_position_embeddings + _POSITION_OFFSET
        self._embedding = TokenEmbedding(parameters, "embed_tokens.weight", facts.vocab_size, embedding_width)
        self._positions_LD = parameters.new("embed_positions.weight", num_positions, width)
        self._project_in = self._project_out = None
        if embedding_width != width:
            self._project_in = Linear.new(parameters, "project_in", embedding_width, width, bias=False)
            self._project_out = Linear.new(parameters, "project_out", width, embedding_width, bias=False)
        self.layers = [DecoderLayer(parameters, index, config, shape) for index in range(facts.num_layers)]
        self._norm = LayerNorm.new(parameters, "final_layer_norm", width, _EPS) if config.has_final_norm else None
        self._output = None if facts.pooling else Linear.tied(parameters, self._embedding.table_VD)

    def prepare(self, max_model_len: int) -> None:
        """Do nothing: positions are weights."""

    def begin(self, token_ids_T: Tensor, positions_T: Tensor) -> tuple[Residual, Tables]:
        """See `octavo.worker_proc.models.base.LayeredModel`."""
        hidden_TD = self.with_given_rows(self._embedding(token_ids_T), token_ids_T)
        if self._project_in is not None:
            hidden_TD = self._project_in(hidden_TD)
        return Residual(hidden_TD + embedding(positions_T + _POSITION_OFFSET, self._positions_LD)), ()

    def end(self, residual: Residual) -> Tensor:
        """See `octavo.worker_proc.models.base.LayeredModel`."""
        return residual.hidden_TD if self._norm is None else self._norm(residual.hidden_TD)

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """See `octavo.worker_proc.models.base.LayeredModel`."""
        hidden_RD = hidden_RD if self._project_out is None else self._project_out(hidden_RD)
        return hidden_RD if self._output is None else self._output(hidden_RD)


def build(facts: ModelFacts, placement: Placement) -> OPTModel:
    """Make the model that `facts` describes, or one rank's part of it.

    Raises:
        ConfigError: something in its configuration is not supported.
    """
    return OPTModel(
        Parameters(placement, prefixes=["model.decoder.", "decoder."], ignored=[r"^lm_head\.weight$"]),
        facts,
        OPTConfig.read(facts.hf_config),
        AttentionShape(facts.num_heads, facts.num_heads, facts.head_dim, facts.head_dim**-0.5),
    )
