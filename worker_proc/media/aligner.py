"""`Aligner`: finds when the tokens of a text are spoken in the audio clip that they attend to."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from octavo.kernels.native.library import NativeLibrary
from octavo.protocol.alignment import AlignmentSpec
from octavo.protocol.buffers import Buffer
from octavo.protocol.events import PooledOutput
from octavo.protocol.steps import POOLED, Scheduled
from octavo.worker_proc.batch.inputs import StepInputs
from octavo.worker_proc.batch.rows import Row
from octavo.worker_proc.batch.state import BatchState
from octavo.worker_proc.cache.cross import CrossCache
from octavo.worker_proc.executor.runner import Samples
from octavo.worker_proc.media.time_warping import first_rows
from octavo.worker_proc.runners.host import Forward

Floats = npt.NDArray[np.float32]


class Alignments:
    """Alignments of a step: the results of the requests whose texts end in it."""

    def __init__(self) -> None:
        self._by_slot: dict[int, PooledOutput] = {}

    def add(self, slot: int, output: PooledOutput) -> None:
        """Add a result."""
        self._by_slot[slot] = output

    def put_into(self, token_ids: list[int], samples: Samples) -> list[PooledOutput]:
        """Replace the sampled tokens of these requests by `POOLED`. Return the results in this order."""
        places = [place for place, slot in enumerate(samples.slots_N.tolist()) if slot in self._by_slot]
        for place in places:
            token_ids[place] = POOLED
        return [self._by_slot[samples.slots_N[place]] for place in places]


class Aligner:
    """Aligns texts of one model.

    Args:
        forward: `Forward` of the model.
        cache: cross-attention cache, which holds the keys of audio clips.
        library: native kernels; `None` if torch computes.
    """

    def __init__(self, forward: Forward, cache: CrossCache, library: NativeLibrary | None) -> None:
        self._forward, self._cache, self._library = forward, cache, library

    def align(self, scheduled: Sequence[Scheduled], inputs: StepInputs, batch: BatchState) -> Alignments:
        """Collect the queries of a finished step in which some requests have an `AlignmentSpec`."""
        queries = self._forward.cross_queries
        found = Alignments()
        for entry, first in zip(scheduled, inputs.query_starts.tolist(), strict=False):
            row = batch.rows[entry.slot]
            if (spec := row.alignment) is None:
                continue
            end = first + entry.num_tokens
            head_dim = self._cache.shape.head_dim
            chosen = [queries[layer][first:end].flatten(1) for layer, _ in spec.heads]
            parts = [one[:, head * head_dim :][:, :head_dim] for one, (_, head) in zip(chosen, spec.heads, strict=True)]
            row.collected.add(np.concatenate([one.numpy() for one in parts], axis=1), keeps_all=True)
            if entry.num_samples:
                rows_T = self._aligned(spec, row, int(batch.columns.attended_S[entry.slot]))
                found.add(entry.slot, PooledOutput(Buffer(rows_T.tobytes()), rows_T.shape, "float32"))
        return found

    def _aligned(self, spec: AlignmentSpec, row: Row, place: int) -> Floats:
        """Return the first row of the audio clip for each token."""
        queries_TC = np.concatenate(row.collected.chunks)[spec.first :]
        queries_HTD = queries_TC.reshape(len(queries_TC), len(spec.heads), -1).transpose(1, 0, 2)
        weights = np.empty((len(spec.heads), len(queries_TC), self._cache.num_keys), dtype=np.float32)
        keys = {layer: self._cache.keys(layer, place).numpy() for layer, _ in spec.heads}
        for scores_TS, queries_TD, (layer, head) in zip(weights, queries_HTD, spec.heads, strict=True):
            np.matmul(queries_TD * self._cache.shape.scale, keys[layer][:, head].T, out=scores_TS)
            np.exp(scores_TS - scores_TS.max(axis=1, keepdims=True), out=scores_TS)
            scores_TS /= scores_TS.sum(axis=1, keepdims=True)
        num_threads = self._forward.choose_threads(weights.size * spec.filter_width**2)
        return first_rows(weights[..., : spec.num_rows], spec.filter_width, self._library, num_threads)
