"""The mlp blocks of dense decoders."""

from torch import Tensor

from octavo.kernels.multiply import multiply
from octavo.kernels.pointwise import scale
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.layers.activation import GATED, PLAIN
from octavo.worker_proc.models.layers.linear import Linear
from octavo.worker_proc.models.parameters import Parameters


class GatedMlp:
    """`down(activation(gate(x)) * up(x))`.

    Args:
        parameters: parameters of the model.
        name: name of the block; its layers are `gate_proj`, `up_proj` and `down_proj`.
        width: width of the residual stream.
        inner_width: width of the activation.
        activation: a name in `GATED`.
        has_bias: whether the three layers have biases.
        has_output_bias: whether `down_proj` has a bias; `None` means the same as `has_bias`.
        gate_factor: factor of the gates, before the activation.

    Raises:
        ConfigError: there is a factor, and the activation function is not silu.
    """

    def __init__(
        self,
        parameters: Parameters,
        name: str,
        width: int,
        inner_width: int,
        *,
        activation: str = "silu",
        has_bias: bool = False,
        has_output_bias: bool | None = None,
        gate_factor: float = 1.0,
    ) -> None:
        parts = {f"{name}.{part}_proj": inner_width for part in ("gate", "up")}
        self._gate_up = Linear.stacked(parameters, f"{name}.gate_up_proj", parts, width, bias=has_bias)
        has_output_bias = has_bias if has_output_bias is None else has_output_bias
        self._down = Linear.new(parameters, f"{name}.down_proj", inner_width, width, bias=has_output_bias)
        self._activation = GATED[activation]
        self._is_fused = activation == "silu"
        self._gate_factor = gate_factor
        self._inner_width = inner_width
        if gate_factor != 1.0 and not self._is_fused:
            raise ConfigError(f"config.json: a factor of the gates of {activation!r} is not supported")

    def __call__(self, x_TD: Tensor) -> Tensor:
        """See `octavo.worker_proc.models.layers.decoder.MlpBlock`."""
        if self._gate_factor != 1.0:
            gate_TF, up_TF = self._gate_up(x_TD).split([self._inner_width] * 2, dim=1)
            return self._down(multiply(up_TF, scale(gate_TF, self._gate_factor), has_silu=True))
        if self._is_fused:  # some products apply the activation before they store their results
            return self._down(self._gate_up.silu_and_mul(x_TD))
        return self._down(self._activation(self._gate_up(x_TD)))


class Mlp:
    """`down(activation(up(x)))`.

    Args:
        parameters: parameters of the model.
        name: name of the block; its layers are `fc1` and `fc2`.
        width: width of the residual stream.
        inner_width: width of the activation.
        activation: a name in `PLAIN`.
        has_bias: whether both layers have biases.
        num_outputs: output width of the block; `None` means `width`.
    """

    def __init__(
        self,
        parameters: Parameters,
        name: str,
        width: int,
        inner_width: int,
        *,
        activation: str,
        has_bias: bool,
        num_outputs: int | None = None,
    ) -> None:
        self._up = Linear.new(parameters, f"{name}.fc1", width, inner_width, bias=has_bias)
        self._down = Linear.new(parameters, f"{name}.fc2", inner_width, num_outputs or width, bias=has_bias)
        self._activation = PLAIN[activation]

    def __call__(self, x_TD: Tensor) -> Tensor:
        """See `octavo.worker_proc.models.layers.decoder.MlpBlock`."""
        return self._down(self._activation(self._up(x_TD)))
