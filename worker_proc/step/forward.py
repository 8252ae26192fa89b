"""Runs a model over a step, in one of two ways: eagerly through torch, or as a recorded native program.

Knows no request and samples nothing: arrays go in, the logits of chosen rows come out.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.kernels.native.arguments import StepArguments
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.native.passes import fuse
from octavo.kernels.native.program import Program
from octavo.kernels.native.recorder import ProgramRecorder
from octavo.kernels.native.split import split, with_gathered_rows
from octavo.kernels.native.threads import ThreadPolicy
from octavo.kernels.native.value import as_tensor, value_of
from octavo.kernels.paged_attention.layout import CacheLayout
from octavo.protocol.config import ResolvedConfig
from octavo.worker_proc.attention.paged import PagedCacheAttention
from octavo.worker_proc.attention.recorded import RecordedAttention, StepBounds
from octavo.worker_proc.batch.inputs import Ints, StepInputs
from octavo.worker_proc.cache.layout import cache_layout, torch_storage
from octavo.worker_proc.models.base import Model


class Forward(Protocol):
    """A model with its cache, ready for steps."""

    @property
    def cache_buffers(self) -> Sequence[Tensor]:
        """The cache as bytes whose pages come with their first use; each is divided evenly among all blocks."""

    def run(self, inputs: StepInputs) -> None:
        """Compute the hidden states of all rows and put their keys and values into the cache."""

    def logits(self, rows: Ints) -> Tensor:
        """Return logits_RV in float32 for rows of the last step; overwritten by the next call."""

    def choose_threads(self, work: int) -> int:
        """Return the number of threads for native work between two runs: see `ThreadPolicy.choose`."""


class TorchForward:
    """Operation by operation, as Python comes to them."""

    def __init__(self, model: Model, attention: PagedCacheAttention) -> None:
        self._model = model
        self._attention = attention
        self._hidden_TD: Tensor | None = None

    @property
    def cache_buffers(self) -> Sequence[Tensor]:
        """Return none: torch's memory has no huge pages, and so no step that waits for many of them."""
        return ()

    def run(self, inputs: StepInputs) -> None:
        """See `Forward`."""
        self._attention.plan(inputs)
        token_ids_T, positions_T = torch.from_numpy(inputs.token_ids_T), torch.from_numpy(inputs.positions_T)
        self._hidden_TD = self._model.forward(token_ids_T, positions_T, self._attention)

    def logits(self, rows: Ints) -> Tensor:
        """See `Forward`."""
        assert self._hidden_TD is not None, "run() comes before logits()"
        return self._model.logits(self._hidden_TD[torch.from_numpy(rows)])

    def choose_threads(self, work: int) -> int:
        """Return one: there is no native work here."""
        return 1


class NativeForward:
    """Two programs: up to the last attention over all rows of a step, and the rest over rows whose logits are wanted.

    Args:
        library: where the operations are.
        model: recorded here.
        cache: its layout.
        num_blocks: of the cache.
        bounds: of the steps.
    """

    def __init__(
        self, library: NativeLibrary, model: Model, cache: CacheLayout, num_blocks: int, bounds: StepBounds
    ) -> None:
        self._threads = ThreadPolicy(library, bounds.num_threads)
        recorder = ProgramRecorder(model.dtype)
        self.attention = RecordedAttention(
            library,
            recorder,
            model.attention_shape,
            cache,
            num_layers=model.num_layers,
            num_blocks=num_blocks,
            bounds=bounds,
        )
        hidden = model.forward(as_tensor(recorder.token_ids), as_tensor(recorder.positions), self.attention)
        logits = value_of(model.logits(hidden))
        halves = split(fuse(recorder.nodes, [logits]))
        self.layers = Program(library, halves.all_rows, halves.passed, bounds.max_rows)
        chosen = with_gathered_rows(halves, self.layers.results, recorder)
        self.head = Program(library, chosen, [logits], bounds.max_logits)
        (self._logits_RV,) = self.head.results

    @property
    def programs(self) -> tuple[Program, ...]:
        """Both, in the order in which a step runs them."""
        return self.layers, self.head

    @property
    def cache_buffers(self) -> Sequence[Tensor]:
        """See `Forward`."""
        return [buffer for pair in self.attention.caches for buffer in pair]

    @property
    def num_bytes(self) -> int:
        """Bytes of all activations, if every row is used."""
        return self.layers.num_bytes + self.head.num_bytes + self.attention.workspace_bytes

    def run(self, inputs: StepInputs) -> None:
        """See `Forward`."""
        self.layers.run(step_arguments(inputs), self._threads.choose(self.layers.work * len(inputs.token_ids_T)))

    def logits(self, rows: Ints) -> Tensor:
        """See `Forward`."""
        step = StepArguments(num_rows=len(rows), token_ids=_address(rows))
        self.head.run(step, self._threads.choose(self.head.work * len(rows)))
        return self._logits_RV[: len(rows)]

    def choose_threads(self, work: int) -> int:
        """See `Forward`."""
        return self._threads.choose(work)


def build_forward(
    model: Model, config: ResolvedConfig, *, num_blocks: int, max_model_len: int, max_logits: int
) -> Forward:
    """Make the cache of a loaded model, and what computes with both.

    Args:
        model: shared, not copied.
        config: sizes of a step and of a block, types, threads.
        num_blocks: of the cache.
        max_model_len: longest request, in tokens.
        max_logits: rows of one call of `logits`, if these are more than `max_num_seqs`.

    Raises:
        MemoryError, RuntimeError: there is no memory for the cache.
    """
    model.prepare(max_model_len)
    if model.library is None:
        return TorchForward(model, PagedCacheAttention(torch_storage(config, num_blocks), model.attention_shape))
    bounds = StepBounds(
        max_rows=config.max_num_batched_tokens,
        max_context=max_model_len,
        max_logits=max(config.max_num_seqs, max_logits),
        num_threads=config.num_threads,
    )
    return NativeForward(model.library, model, cache_layout(config), num_blocks, bounds)


def step_arguments(inputs: StepInputs) -> StepArguments:
    """Return the step as C++ reads it; the arrays must outlive it."""
    assert inputs.block_table_RP.dtype == np.int32
    return StepArguments(
        num_rows=len(inputs.token_ids_T),
        token_ids=_address(inputs.token_ids_T),
        positions=_address(inputs.positions_T),
        slots=_address(inputs.slot_mapping_T),
        num_requests=len(inputs.context_lens),
        query_starts=_address(inputs.query_starts),
        context_lens=_address(inputs.context_lens),
        block_table=_address(inputs.block_table_RP),
        block_table_width=inputs.block_table_RP.shape[1],
    )


def _address(array: npt.NDArray[Any]) -> int:
    """Return where a contiguous array lies.

    perf: `array.ctypes.data` runs through half a page of Python, seven times a step.
    """
    assert array.flags.c_contiguous
    return ctypes.addressof(ctypes.c_char.from_buffer(array.data))
