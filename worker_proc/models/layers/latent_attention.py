"""Multi-head latent attention (DeepSeek): keys and values of all heads come from one short vector per token.

The cache holds this vector and a rotated part of the key, shared by all heads. Keys and values of heads are never
computed: queries are multiplied with the weights that would produce keys, and outputs with those that would produce
values (arXiv 2405.04434, 2.1.2). Prompts and single tokens take the same path, so they have the same bits:
docs/adr/0036.
"""

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from octavo.kernels.head_linear import head_linear
from octavo.kernels.latent_heads import LatentWidths, latent_heads
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.attention.base import Attention
from octavo.worker_proc.models.base import Tables
from octavo.worker_proc.models.layers.linear import Linear
from octavo.worker_proc.models.layers.norm import RMSNorm
from octavo.worker_proc.models.linear_weight import LinearWeight, QuantizedMatrix
from octavo.worker_proc.models.parameters import Parameters

_EPS = 1e-6
"""Epsilon of the norms of the short vectors; configurations do not change it."""


class LatentAttention:
    """Projects rows to short vectors and queries, attends over the vectors, and projects the outputs.

    Args:
        parameters: parameters of the model.
        name: name of the block in the checkpoint.
        index: index of the layer.
        widths: widths of the parts of queries and keys.
        num_heads: number of heads of this rank.
        width: width of the residual stream.
        query_rank: length of the short vector of queries; `None` if rows are projected directly to queries.
        has_bias: whether the projections to short vectors and the output projection have biases.
    """

    def __init__(
        self,
        parameters: Parameters,
        name: str,
        index: int,
        widths: LatentWidths,
        num_heads: int,
        width: int,
        *,
        query_rank: int | None,
        has_bias: bool,
    ) -> None:
        self._index = index
        self._widths = widths
        query_width = num_heads * widths.query
        self._query_norm = None
        if query_rank is None:
            self._query = Linear.new(parameters, f"{name}.q_proj", width, query_width, bias=False)
        else:
            self._query_down = Linear.new(parameters, f"{name}.q_a_proj", width, query_rank, bias=has_bias)
            self._query_norm = RMSNorm.new(parameters, f"{name}.q_a_layernorm", query_rank, _EPS)
            self._query = Linear.new(parameters, f"{name}.q_b_proj", query_rank, query_width, bias=False)
        self._latent = Linear.new(parameters, f"{name}.kv_a_proj_with_mqa", width, widths.key, bias=has_bias)
        self._latent_norm = RMSNorm.new(parameters, f"{name}.kv_a_layernorm", widths.latent, _EPS)
        first, num_all = parameters.sharding.rank * num_heads, parameters.sharding.size * num_heads

        def heads(part: str, inputs: int, outputs: int) -> list[LinearWeight]:
            own = range(first, first + num_heads)
            names = [f"{name}.{part}.{head}" for head in range(num_all)]
            weights = [
                parameters.linear(layer, {layer: outputs}, inputs, bias=False, is_quantizable=False, is_own=head in own)
                for head, layer in enumerate(names)
            ]
            for weight in weights:
                weight.is_grouped = True
            return weights[first : first + num_heads]

        self._keys = heads("key_heads", widths.plain, widths.latent)
        self._values = heads("value_heads", widths.latent, widths.value)
        parts = [f"{name}.{part}.{head}.weight" for part in ("key_heads", "value_heads") for head in range(num_all)]
        parameters.names.add_split([f"{name}.kv_b_proj.weight"], partial(_heads_of, name, widths, num_all), parts)
        self._out = Linear.new(parameters, f"{name}.o_proj", num_heads * widths.value, width, bias=has_bias)

    def __call__(self, x_TD: Tensor, tables: Tables, attention: Attention) -> Tensor:
        """See `octavo.worker_proc.models.layers.decoder.AttentionBlock`."""
        widths = self._widths
        query_TP = self._query(x_TD if self._query_norm is None else self._query_norm(self._query_down(x_TD)))
        q_TNP = query_TP.unflatten(1, (len(self._keys), widths.query))
        latent_TL, k_rotary_TR = self._latent(x_TD).split([widths.latent, widths.rotary], dim=1)
        q_latent_TM = head_linear(q_TNP, [weight.packed for weight in self._keys])
        cos_TC, sin_TC = tables
        q_TNH, k_T1H = latent_heads(
            q_TNP, q_latent_TM, self._latent_norm(latent_TL), k_rotary_TR, cos_TC, sin_TC, widths
        )
        out_TNL = attention.run(q_TNH, k_T1H, None, self._index)
        return self._out(head_linear(out_TNL, [weight.packed for weight in self._values]))


def _heads_of(
    name: str, widths: LatentWidths, num_heads: int, full_name: str, values: Tensor | QuantizedMatrix
) -> Iterator[tuple[str, Tensor]]:
    """Yield for each head the weight for its query, and the weight for its output.

    The checkpoint's weight maps a latent vector to keys and values of all heads: for each head the part of the key that
    is not rotated, then the value.

    Raises:
        ConfigError: the weight has another shape.
    """
    expected = num_heads * (widths.plain + widths.value), widths.latent
    if tuple(values.shape) != expected:
        raise ConfigError(
            f"{full_name!r} has shape {tuple(values.shape)} in the checkpoint; its config.json asks for {expected}"
        )
    weight = values if isinstance(values, Tensor) else values.dequantized()
    for head, rows in enumerate(weight.split(widths.plain + widths.value)):
        key, value = rows.split([widths.plain, widths.value])
        yield f"{name}.key_heads.{head}.weight", key.t()
        yield f"{name}.value_heads.{head}.weight", value
