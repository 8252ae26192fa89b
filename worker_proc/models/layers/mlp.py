"""The mlp blocks of dense decoders."""

from torch import Tensor

from octavo.worker_proc.models.layers.linear import Linear
from octavo.worker_proc.models.parameters import Parameters


class GatedMlp:
    """`down(silu(gate(x)) * up(x))`.

    Args:
        parameters: of the model.
        name: of the block in the checkpoint; its layers are `gate_proj`, `up_proj` and `down_proj`.
        width: of the residual stream.
        inner_width: of the activation.
        has_bias: of all three layers.
    """

    def __init__(
        self, parameters: Parameters, name: str, width: int, inner_width: int, *, has_bias: bool = False
    ) -> None:
        parts = {f"{name}.{part}_proj": inner_width for part in ("gate", "up")}
        self._gate_up = Linear.stacked(parameters, f"{name}.gate_up_proj", parts, width, bias=has_bias)
        self._down = Linear.new(parameters, f"{name}.down_proj", inner_width, width, bias=has_bias)

    def __call__(self, x_TD: Tensor) -> Tensor:
        """See `octavo.worker_proc.models.layers.decoder.MlpBlock`."""
        return self._down(self._gate_up.silu_and_mul(x_TD))
