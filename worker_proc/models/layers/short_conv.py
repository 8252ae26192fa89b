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
        parameters: parameters of the model.
        name: name of the block; its layers are `in_proj`, `conv` and `out_proj`.
        index: index of the layer.
        width: width of the residual stream; ranks divide the channels of the convolution.
        conv_width: number of inputs of the convolution.
        has_bias: whether the layers have biases.

    Raises:
        ConfigError: see `check_recurrent`.
    """

    def __init__(
        self, parameters: Parameters, name: str, index: int, width: int, conv_width: int, *, has_bias: bool
    ) -> None:
        check_recurrent(parameters)
        self._index = index
        self._num_channels = channels = width // parameters.sharding.size
        self._in = Linear.new(parameters, f"{name}.in_proj", width, 3 * channels, bias=has_bias)
        self._weight_C1W = parameters.new(f"{name}.conv.weight", channels, 1, conv_width)
        self._bias_C = parameters.new(f"{name}.conv.bias", channels) if has_bias else None
        self._out = Linear.new(parameters, f"{name}.out_proj", channels, width, bias=has_bias)

    def __call__(self, x_TD: Tensor, tables: Tables, attention: Attention) -> Tensor:
        """See `octavo.worker_proc.models.layers.decoder.AttentionBlock`."""
        b_TC, c_TC, x_TC = self._in(x_TD).split([self._num_channels] * 3, dim=1)
        state = attention.state(self._index)
        (conv_state,) = state.tensors
        mixed_TC = causal_conv1d(
            multiply(x_TC, b_TC), self._weight_C1W.squeeze(1), self._bias_C, conv_state, state.slots, has_silu=False
        )
        return self._out(multiply(mixed_TC, c_TC))


def short_conv_state(num_channels: int, conv_width: int) -> StateShape:
    """Return the state of a request: the last inputs of the convolution."""
    return StateShape(((conv_width - 1, num_channels),))
