"""The Llama family: Llama, Mistral, Qwen2 and Qwen3, one decoder with a configuration for each."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from octavo.kernels.embedding import embeddings
from octavo.kernels.paged_attention import AttentionShape
from octavo.kernels.rope_store_kv.rotation import QKNorm, Rotation
from octavo.protocol.config.facts import ModelFacts
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.attention.base import Attention
from octavo.worker_proc.models.base import Model, Residual, Tables
from octavo.worker_proc.models.hf_config import optional, reject_unless, required
from octavo.worker_proc.models.layers.embedding import TokenEmbedding
from octavo.worker_proc.models.layers.linear import Linear
from octavo.worker_proc.models.layers.norm import RMSNorm
from octavo.worker_proc.models.layers.rotary import Rotary, rotary_from_config
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.parallel.placement import Placement


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The differences between the members of the family."""

    hidden_size: int
    intermediate_size: int
    rms_norm_eps: float
    is_tied: bool
    """The output weight is the embedding."""
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    """Queries and keys are normalized per head, before the rotation."""
    window: int | None

    @classmethod
    def read(cls, architecture: str, config: dict[str, Any]) -> "LlamaConfig":
        """Read `config.json`, with the defaults of its architecture.

        Raises:
            ConfigError: a value is missing or not supported.
        """
        reject_unless(config, "hidden_act", ["silu"])
        reject_unless(config, "use_sliding_window", [False, None])
        if set(optional(config, "layer_types", [])) - {"full_attention"}:
            raise ConfigError("config.json: layer_types other than full_attention are not supported")
        has_bias = optional(config, "attention_bias", False)
        return cls(
            hidden_size=required(config, "hidden_size", int),
            intermediate_size=required(config, "intermediate_size", int),
            rms_norm_eps=optional(config, "rms_norm_eps", 1e-6),
            is_tied=optional(config, "tie_word_embeddings", False),
            has_qkv_bias=architecture == "Qwen2ForCausalLM" or has_bias,
            has_output_bias=architecture != "Qwen2ForCausalLM" and has_bias,
            has_mlp_bias=optional(config, "mlp_bias", False),
            has_qk_norm=architecture == "Qwen3ForCausalLM",
            # In Mistral's configuration a missing key means 4096, and null means no window.
            window=config.get("sliding_window", 4096) if architecture == "MistralForCausalLM" else None,
        )


class DecoderLayer:
    """Attention and mlp, each on the norm of the residual stream."""

    def __init__(self, parameters: Parameters, index: int, config: LlamaConfig, shape: AttentionShape) -> None:
        name, width, eps = f"layers.{index}", config.hidden_size, config.rms_norm_eps
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        self.index = index
        self.shape = shape
        self.query_width, self.key_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        qkv_parts = {
            f"{attention}.q_proj": self.query_width,
            f"{attention}.k_proj": self.key_width,
            f"{attention}.v_proj": self.key_width,
        }
        gate_up_parts = {f"{mlp}.{part}_proj": config.intermediate_size for part in ("gate", "up")}
        self.input_norm = RMSNorm.new(parameters, f"{name}.input_layernorm", width, eps)
        self.qkv = Linear.stacked(parameters, f"{attention}.qkv_proj", qkv_parts, width, bias=config.has_qkv_bias)
        self.qk_norm = None
        if config.has_qk_norm:
            q_weight_H, k_weight_H = (
                parameters.new(f"{attention}.{part}_norm.weight", shape.head_dim) for part in ("q", "k")
            )
            self.qk_norm = QKNorm(q_weight_H, k_weight_H, eps)
        self.out = Linear.new(parameters, f"{attention}.o_proj", self.query_width, width, bias=config.has_output_bias)
        self.mlp_norm = RMSNorm.new(parameters, f"{name}.post_attention_layernorm", width, eps)
        self.gate_up = Linear.stacked(parameters, f"{mlp}.gate_up_proj", gate_up_parts, width, bias=config.has_mlp_bias)
        self.down = Linear.new(
            parameters, f"{mlp}.down_proj", config.intermediate_size, width, bias=config.has_mlp_bias
        )

    def __call__(self, residual: Residual, tables: Tables, attention: Attention) -> Residual:
        """Return the residual stream before the mlp, and what the mlp adds."""
        hidden_TD = residual.hidden_TD
        if residual.update_TD is None:
            x_TD = self.input_norm(hidden_TD)
        else:
            hidden_TD, x_TD = self.input_norm.fused_add_norm(hidden_TD, residual.update_TD)
        hidden_TD, x_TD = self.mlp_norm.fused_add_norm(hidden_TD, self._attend(x_TD, tables, attention))
        return Residual(hidden_TD, self.down(self.gate_up.silu_and_mul(x_TD)))

    def _attend(self, x_TD: Tensor, tables: Tables, attention: Attention) -> Tensor:
        cos_TC, sin_TC = tables
        q, k, v = self.qkv(x_TD).split([self.query_width, self.key_width, self.key_width], dim=1)
        q_TNH = q.unflatten(1, (-1, self.shape.head_dim))
        k_TKH = k.unflatten(1, (-1, self.shape.head_dim))
        v_TKH = v.unflatten(1, (-1, self.shape.head_dim))
        rotation = Rotation(cos_TC, sin_TC, self.qk_norm)
        return self.out(attention.run(q_TNH, k_TKH, v_TKH, self.index, rotation).flatten(1))


class LlamaModel(Model):
    """Embedding, layers, norm and output weight."""

    carries_update = True

    def __init__(
        self, parameters: Parameters, facts: ModelFacts, config: LlamaConfig, shape: AttentionShape, rotary: Rotary
    ) -> None:
        super().__init__(parameters, facts.num_layers, shape)
        self._rotary = rotary
        self._embedding = TokenEmbedding(parameters, "embed_tokens.weight", facts.vocab_size, config.hidden_size)
        self.layers = [DecoderLayer(parameters, index, config, shape) for index in range(facts.num_layers)]
        self._norm = RMSNorm.new(parameters, "norm", config.hidden_size, config.rms_norm_eps)
        self._output = (
            Linear.tied(parameters, self._embedding.table_VD)
            if config.is_tied
            else Linear.new(parameters, "lm_head", config.hidden_size, facts.vocab_size, bias=False)
        )

    def prepare(self, max_model_len: int) -> None:
        """See `octavo.worker_proc.models.base.Model`."""
        self._rotary.prepare(max_model_len, self.device)

    def begin(self, token_ids_T: Tensor, positions_T: Tensor) -> tuple[Residual, Tables]:
        """See `octavo.worker_proc.models.base.Model`."""
        hidden_TD, *tables = self._embedding.with_others(token_ids_T, *self._rotary.lookups(positions_T))
        return Residual(hidden_TD), tuple(tables)

    def tables(self, positions_T: Tensor) -> Tables:
        """See `octavo.worker_proc.models.base.Model`."""
        return embeddings(*self._rotary.lookups(positions_T))

    def end(self, residual: Residual) -> Tensor:
        """See `octavo.worker_proc.models.base.Model`."""
        hidden_TD, update_TD = residual.hidden_TD, residual.update_TD
        return self._norm(hidden_TD) if update_TD is None else self._norm.fused_add_norm(hidden_TD, update_TD)[1]

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """See `octavo.worker_proc.models.base.Model`."""
        return self._output(hidden_RD)


def build(facts: ModelFacts, placement: Placement) -> LlamaModel:
    """Make the member of the family that `facts` describes, or one rank's part of it.

    Raises:
        ConfigError: something in its configuration is not supported.
    """
    config = LlamaConfig.read(facts.architecture, facts.hf_config)
    ignored = [r"rotary_emb\.inv_freq$"] + ([r"^lm_head\.weight$"] if config.is_tied else [])
    return LlamaModel(
        Parameters(placement, prefixes=["model."], ignored=ignored),
        facts,
        config,
        AttentionShape(facts.num_heads, facts.num_kv_heads, facts.head_dim, facts.head_dim**-0.5, config.window),
        rotary_from_config(facts.hf_config, facts.head_dim),
    )
