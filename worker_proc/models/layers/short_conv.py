"""The short convolution of LFM2, between two gates."""

from torch import Tensor

from octavo.kernels.causal_conv1d import causal_conv1d
from octavo.kernels.multiply import multiply
from octavo.worker_proc.attention.base import Attention
from octavo.worker_proc.cache.groups import StateShape
from octavo.worker_proc.models.base import Tables
from octavo.worker_proc.models.layers.devices import check_recurrent
from octavo.worker_proc.models.layers.linear import Linear
from octavo.worker_proc.models.parameters import Parameters


class ShortConv:
    """`out(c * convolution(b * x))`, where b, c and x are projections of a row.

    Args:
        parameters: of the model.
        name: of the block; its layers are `in_proj`, `conv` and `out_proj`.
        index: of the layer.
        width: of the residual stream.
        conv_width: inputs of the convolution.
        has_bias: of all layers.

    Raises:
        ConfigError: see `check_recurrent`.
    """

    def __init__(
        self, parameters: Parameters, name: str, index: int, width: int, conv_width: int, *, has_bias: bool
    ) -> None:
        check_recurrent(parameters)
        self._index = index
        self._width = width
        self._in = Linear.new(parameters, f"{name}.in_proj", width, 3 * width, bias=has_bias)
        self._weight_D1W = parameters.new(f"{name}.conv.weight", width, 1, conv_width)
        self._bias_D = parameters.new(f"{name}.conv.bias", width) if has_bias else None
        self._out = Linear.new(parameters, f"{name}.out_proj", width, width, bias=has_bias)

    def __call__(self, x_TD: Tensor, tables: Tables, attention: Attention) -> Tensor:
        """See `octavo.worker_proc.models.layers.decoder.AttentionBlock`."""
        b_TD, c_TD, x_TD = self._in(x_TD).split([self._width] * 3, dim=1)
        state = attention.state(self._index)
        (conv_state,) = state.tensors
        mixed_TD = causal_conv1d(
            multiply(x_TD, b_TD), self._weight_D1W.squeeze(1), self._bias_D, conv_state, state.slots, has_silu=False
        )
        return self._out(multiply(mixed_TD, c_TD))


def short_conv_state(width: int, conv_width: int) -> StateShape:
    """Return what a request keeps: the last inputs of the convolution."""
    return StateShape(((conv_width - 1, width),))
