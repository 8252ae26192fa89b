"""Multi-head latent attention (DeepSeek): keys and values of all heads come from one short vector of each token.

The cache holds the keys and values of every head, as for any other attention. A cache of the short vectors would be
many times smaller, and needs attention over heads of 576 numbers.
"""

from torch import Tensor

from octavo.kernels.latent_heads import HeadWidths, latent_heads, latent_values
from octavo.worker_proc.attention.base import Attention
from octavo.worker_proc.models.base import Tables
from octavo.worker_proc.models.layers.devices import require_cpu
from octavo.worker_proc.models.layers.linear import Linear
from octavo.worker_proc.models.layers.norm import RMSNorm
from octavo.worker_proc.models.parameters import Parameters

_EPS = 1e-6
"""Of the norms of the short vectors, whatever the configuration says."""


class LatentAttention:
    """Projects rows to short vectors and these to heads, attends, and projects the outputs.

    Args:
        parameters: of the model.
        name: of the block in the checkpoint.
        index: of the layer.
        widths: of the parts of a head.
        num_heads: of this rank.
        width: of the residual stream.
        query_rank: length of the short vector of queries; None: queries are projected at once.
        key_value_rank: length of the short vector of keys and values.
        has_bias: of the projections to short vectors, and of the output.

    Raises:
        ConfigError: the model is on a GPU.
    """

    def __init__(
        self,
        parameters: Parameters,
        name: str,
        index: int,
        widths: HeadWidths,
        num_heads: int,
        width: int,
        *,
        query_rank: int | None,
        key_value_rank: int,
        has_bias: bool,
    ) -> None:
        require_cpu(parameters, "latent attention")
        self._index = index
        self._widths = widths
        query_width = num_heads * widths.head
        self._key_value_rank = key_value_rank
        self._query_norm = None
        if query_rank is None:
            self._query = Linear.new(parameters, f"{name}.q_proj", width, query_width, bias=False)
        else:
            self._query_down = Linear.new(parameters, f"{name}.q_a_proj", width, query_rank, bias=has_bias)
            self._query_norm = RMSNorm.new(parameters, f"{name}.q_a_layernorm", query_rank, _EPS)
            self._query = Linear.new(parameters, f"{name}.q_b_proj", query_rank, query_width, bias=False)
        self._key_value_down = Linear.new(
            parameters, f"{name}.kv_a_proj_with_mqa", width, key_value_rank + widths.rotary, bias=has_bias
        )
        self._key_value_norm = RMSNorm.new(parameters, f"{name}.kv_a_layernorm", key_value_rank, _EPS)
        self._key_value = Linear.new(
            parameters, f"{name}.kv_b_proj", key_value_rank, num_heads * (widths.plain + widths.value), bias=False
        )
        self._out = Linear.new(parameters, f"{name}.o_proj", num_heads * widths.value, width, bias=has_bias)

    def __call__(self, x_TD: Tensor, tables: Tables, attention: Attention) -> Tensor:
        """See `octavo.worker_proc.models.layers.decoder.AttentionBlock`."""
        query_TP = x_TD if self._query_norm is None else self._query_norm(self._query_down(x_TD))
        key_value_TP, key_rotary_TR = self._key_value_down(x_TD).split(
            [self._key_value_rank, self._widths.rotary], dim=1
        )
        key_value_TP = self._key_value(self._key_value_norm(key_value_TP))
        cos_TC, sin_TC = tables
        heads = latent_heads(self._query(query_TP), key_value_TP, key_rotary_TR, cos_TC, sin_TC, self._widths)
        return self._out(latent_values(attention.run(*heads, self._index), self._widths))
