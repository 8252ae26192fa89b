"""Attention of a model that is being recorded. Does not own the blocks, and computes nothing itself."""

from dataclasses import dataclass

from torch import Tensor

from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.native.memory import allocate
from octavo.kernels.native.recorder import ProgramRecorder
from octavo.kernels.paged_attention import AttentionShape, record
from octavo.kernels.paged_attention.layout import CacheLayout
from octavo.kernels.paged_attention.native import ShapeArguments, workspace_bytes
from octavo.kernels.rope_store_kv import record as rope_store_kv
from octavo.kernels.rope_store_kv.rotation import Rotation
from octavo.kernels.store_kv import record as store_kv


@dataclass(frozen=True, slots=True)
class StepBounds:
    """What no step exceeds: memory is planned for it."""

    max_rows: int
    max_context: int
    """Keys of a request."""
    max_logits: int
    """Rows whose logits are computed at once."""
    num_threads: int


class RecordedAttention:
    """The `Attention` of a program, over a native cache of `num_blocks` blocks for each layer.

    Args:
        library: where the operations are.
        recorder: of the program whose layers attend.
        shape: heads, scale and window.
        layout: of the cache.
        num_layers: of the model.
        num_blocks: of the cache.
        bounds: of the steps, for the workspace.
    """

    def __init__(
        self,
        library: NativeLibrary,
        recorder: ProgramRecorder,
        shape: AttentionShape,
        layout: CacheLayout,
        *,
        num_layers: int,
        num_blocks: int,
        bounds: StepBounds,
    ) -> None:
        self._layout = layout
        self._caches = [layout.allocate(num_blocks) for _ in range(num_layers)]
        arguments = ShapeArguments.of(shape, layout)
        self.workspace_bytes = workspace_bytes(
            library, arguments, bounds.max_rows, bounds.max_context, bounds.num_threads
        )
        self._workspace = record.Workspace(arguments, allocate(self.workspace_bytes), bounds.max_context)
        record.record_plan(recorder, self._workspace)

    @property
    def caches(self) -> list[tuple[Tensor, Tensor]]:
        """The buffers of keys and values, layer by layer."""
        return self._caches

    def run(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layer_index: int, rotation: Rotation | None = None
    ) -> Tensor:
        """Record the rotation and storing of a layer's keys and values, and its attention."""
        k_cache, v_cache = self._caches[layer_index]
        if rotation is None:
            store_kv.record(k_TKH, v_TKH, k_cache, v_cache, self._layout)
        else:
            q_TNH = rope_store_kv.record(q_TNH, k_TKH, v_TKH, rotation, k_cache, v_cache, self._layout)
        return record.record(q_TNH, k_cache, v_cache, self._workspace)
