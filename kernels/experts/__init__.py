"""A mixture of experts: every token is multiplied only with the weights of its experts. Does not choose experts.

The outputs of a token's experts are added in the order of the experts, so a row has the same bits in any batch. The
weights of an expert without tokens are not read. On a CPU they are read once for all tokens of a step.
"""

from collections.abc import Callable

from torch import Tensor

from octavo.kernels.dispatch import choose, lazy, require
from octavo.kernels.experts import cpu, record
from octavo.kernels.experts.adapters import ExpertAdapters as ExpertAdapters
from octavo.kernels.experts.exchange import ExpertExchange as ExpertExchange
from octavo.kernels.experts.weights import ACTIVATIONS as ACTIVATIONS
from octavo.kernels.experts.weights import Activation as Activation
from octavo.kernels.experts.weights import PackedExperts as PackedExperts
from octavo.kernels.routing import Routing

_IMPLEMENTATIONS = {"cpu": cpu.experts, "cuda": lazy("octavo.kernels.experts.gpu", cpu.experts)}


def experts(
    x_TD: Tensor,
    routing: Routing,
    packed: PackedExperts,
    exchange: Callable[[Tensor], Tensor] | None = None,
    engines: ExpertExchange | None = None,
    adapters: ExpertAdapters | None = None,
) -> Tensor:
    """Return the weighted sum of the outputs of each token's experts, shape TD, in the dtype of `x`.

    An expert's output is `down(activation(gate(x), up(x))) + down_bias`; some activations have no gate.

    Args:
        x_TD: hidden states.
        routing: the experts of every token; no expert occurs twice for a token.
        packed: weights of the experts, or the part of them that this rank holds.
        exchange: sums the ranks' parts of the outputs, one row per token; `None` if the outputs are complete.
        engines: the ranks that hold the other experts, if each engine has its own tokens; `None` if all ranks have the
            same tokens. In programs only, and without `exchange`.
        adapters: LoRA adapters of tokens; not with `engines`. `None` if no token has an adapter.

    Raises:
        ShapeError: the shapes do not match.
        UnsupportedDevice: no implementation for the device.
    """
    require(
        x_TD.ndim == 2 and x_TD.shape[1] == packed.width and routing.expert_TK.shape[0] == x_TD.shape[0],
        f"experts: {tuple(x_TD.shape)} hidden states with experts for {packed.width} numbers",
    )
    if x_TD.device.type == "recorded":
        return record.record(x_TD, routing, packed, exchange, engines, adapters)
    require(engines is None, "experts: engines exchange tokens in native programs only")
    return choose("experts", _IMPLEMENTATIONS, x_TD.device)(x_TD, routing, packed, exchange, adapters)
