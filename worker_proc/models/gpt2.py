"""GPT-2."""

from torch import Tensor

from octavo.kernels.embedding import embedding
from octavo.kernels.gelu import gelu
from octavo.kernels.paged_attention import AttentionShape
from octavo.protocol.config.facts import ModelFacts
from octavo.worker_proc.attention.base import Attention
from octavo.worker_proc.models.base import LayeredModel, Residual, Tables
from octavo.worker_proc.models.hf_config import optional, reject_unless, required
from octavo.worker_proc.models.layers.embedding import TokenEmbedding
from octavo.worker_proc.models.layers.linear import Linear
from octavo.worker_proc.models.layers.norm import LayerNorm
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.parallel.placement import Placement


class DecoderLayer:
    """Attention and mlp, each on the norm of the residual stream."""

    def __init__(
        self, parameters: Parameters, index: int, shape: AttentionShape, width: int, mlp_width: int, eps: float
    ) -> None:
        name = f"h.{index}"

        def linear(part: str, inputs: int, outputs: int) -> Linear:
            # The checkpoint stores weights as (inputs, outputs).
            return Linear.new(parameters, f"{name}.{part}", inputs, outputs, bias=True, is_transposed=True)

        self.index = index
        self.shape = shape
        self.attention_norm = LayerNorm.new(parameters, f"{name}.ln_1", width, eps)
        heads_width = shape.num_heads * shape.head_dim
        self.qkv = linear("attn.c_attn", width, 3 * heads_width)
        self.out = linear("attn.c_proj", heads_width, width)
        self.mlp_norm = LayerNorm.new(parameters, f"{name}.ln_2", width, eps)
        self.up = linear("mlp.c_fc", width, mlp_width)
        self.down = linear("mlp.c_proj", mlp_width, width)

    def __call__(self, residual: Residual, tables: Tables, attention: Attention) -> Residual:
        """Return the residual stream after this layer."""
        hidden_TD = residual.hidden_TD
        qkv = self.qkv(self.attention_norm(hidden_TD)).unflatten(1, (3, self.shape.num_heads, self.shape.head_dim))
        q_TNH, k_TKH, v_TKH = qkv.unbind(1)
        hidden_TD = hidden_TD + self.out(attention.run(q_TNH, k_TKH, v_TKH, self.index).flatten(1))
        return Residual(hidden_TD + self.down(gelu(self.up(self.mlp_norm(hidden_TD)), uses_tanh=True)))


class GPT2Model(LayeredModel):
    """Token and position embeddings, layers and norm; the output weight is the token embedding."""

    def __init__(self, parameters: Parameters, facts: ModelFacts, shape: AttentionShape) -> None:
        super().__init__(parameters, [shape] * facts.num_layers)
        config = facts.hf_config
        width = required(config, "n_embd", int)
        mlp_width = optional(config, "n_inner", 4 * width)
        eps = optional(config, "layer_norm_epsilon", 1e-5)
        self._embedding = TokenEmbedding(parameters, "wte.weight", facts.vocab_size, width)
        self._positions_LD = parameters.new("wpe.weight", facts.max_position_embeddings, width)
        self.layers = [
            DecoderLayer(parameters, index, shape, width, mlp_width, eps) for index in range(facts.num_layers)
        ]
        self._norm = LayerNorm.new(parameters, "ln_f", width, eps)
        self._output = None if facts.pooling else Linear.tied(parameters, self._embedding.table_VD)

    def prepare(self, max_model_len: int) -> None:
        """Do nothing: positions are weights."""

    def begin(self, token_ids_T: Tensor, positions_T: Tensor) -> tuple[Residual, Tables]:
        """See `octavo.worker_proc.models.base.LayeredModel`."""
        hidden_TD = self.with_given_rows(self._embedding(token_ids_T), token_ids_T)
        return Residual(hidden_TD + embedding(positions_T, self._positions_LD)), ()

    def end(self, residual: Residual) -> Tensor:
        """See `octavo.worker_proc.models.base.LayeredModel`."""
        return self._norm(residual.hidden_TD)

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """See `octavo.worker_proc.models.base.LayeredModel`."""
        return hidden_RD if self._output is None else self._output(hidden_RD)


def build(facts: ModelFacts, placement: Placement) -> GPT2Model:
    """Make the model that `facts` describes, or one rank's part of it.

    Raises:
        ConfigError: something in its configuration is not supported.
    """
    reject_unless(facts.hf_config, "activation_function", ["gelu_new", "gelu_pytorch_tanh"])
    reject_unless(facts.hf_config, "scale_attn_weights", [True])
    reject_unless(facts.hf_config, "scale_attn_by_inverse_layer_idx", [False])
    reject_unless(facts.hf_config, "add_cross_attention", [False])
    reject_unless(facts.hf_config, "tie_word_embeddings", [True])
    ignored = [r"\.attn\.(bias|masked_bias)$", r"^lm_head\.weight$"]
    return GPT2Model(
        Parameters(placement, prefixes=["transformer."], ignored=ignored),
        facts,
        AttentionShape(facts.num_heads, facts.num_heads, facts.head_dim, facts.head_dim**-0.5),
    )
