"""What a model sees of attention: one call per layer."""

from typing import Protocol

from torch import Tensor

from octavo.kernels.rope_store_kv.rotation import Rotation


class Attention(Protocol):
    """Attention over the past of every request of the step, planned or recorded."""

    def run(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        layer_index: int,
        rotation: Rotation | None = None,
        *,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        """Rotate queries and keys, store the step's keys and values of a layer, then attend; returns out_TNH.

        Without a `rotation`, queries and keys are used as they are. `sinks_N`: see `PagedAttention`.
        """
