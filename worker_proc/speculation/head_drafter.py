"""`HeadDrafter`: runs a model's head after every step, and drafts the tokens after the sampled ones.

The head has its own keys and values, in the blocks of the model's first cache group without a window. They are found,
shared and copied together with the model's. A later step verifies each draft, so a draft may depend on anything.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.slot_rows import DRAFTED
from octavo.protocol.config import ResolvedConfig
from octavo.worker_proc.batch.inputs import Ints, StepEntries
from octavo.worker_proc.batch.state import BatchState
from octavo.worker_proc.device.stream import Stream
from octavo.worker_proc.executor.runner import Accepted, Runner, Samples
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.models.heads.base import DraftHead
from octavo.worker_proc.runners.registry import open_rounds
from octavo.worker_proc.runners.rounds import DraftRounds, Drafts, PendingDrafts, draft_inputs
from octavo.worker_proc.speculation.draws import num_accepted, shared_group


class HeadDrafter:
    """Drafts tokens for the requests of a batch, after each step of its runner.

    Args:
        head: head with loaded weights.
        rounds: rounds of the head, over its cache.
        runner: runner of the model.
        group: cache group of the model whose blocks the head uses.
        batch: batch of the requests.
        max_model_len: longest request, in tokens.
    """

    follows_drafts = True

    def __init__(
        self, head: DraftHead, rounds: DraftRounds, runner: Runner, group: int, batch: BatchState, max_model_len: int
    ) -> None:
        self._head: DraftHead | None = head
        self.rounds, self._forward, self._runner = rounds, rounds.forward, runner
        self._group, self._batch, self._max_model_len = group, batch, max_model_len

    @property
    def cache_buffers(self) -> Sequence[Tensor]:
        """Keys and values of the head; see `octavo.worker_proc.executor.runner.Runner`."""
        return self._forward.cache_buffers

    def warm_up(self) -> int:
        """See `Drafter.warm_up`."""
        return self._forward.warm_up()

    def use_model(self, model: Model | None) -> None:
        """See `Drafter.use_model`. The model's head computes over the same cache."""
        head = None if model is None else model.head
        assert head is None or isinstance(head, DraftHead), "the head of a model stays of its kind"
        self._head = head  # `None` frees its memory for the next head
        self.rounds.use_model(head)

    def draft(
        self,
        entries: StepEntries,
        query_starts: Ints,
        accepted: Accepted | None,
        num_drafts: int,
        verified: Samples | None = None,
    ) -> Drafts | PendingDrafts:
        """Run the head on a step, and draft at most `num_drafts` tokens for each of its sampled requests.

        Args:
            entries: entries of the step.
            query_starts: offsets of the requests' rows.
            accepted: number of samples that are tokens, if some verify drafts.
            num_drafts: most drafts per request; 0: only run the head.
            verified: see `Drafter.draft`.
        """
        sampled_E = (entries.num_samples_R > 0).nonzero()[0]
        # Keys of rejected drafts would be wrong; the next step stores the right ones.
        counts_R = num_accepted(entries, sampled_E, accepted)
        starts_R, offsets_R = entries.starts_R, counts_R.cumsum() - counts_R
        inputs = draft_inputs(self._batch, self._group, entries.slots_R, starts_R, counts_R)
        inputs.token_ids_T = self._batch.tokens_at(inputs.slots_T, inputs.positions_T + 1)
        if verified is not None and verified.draft_tokens is not None:
            self.rounds.follow_samples(verified)
            inputs.token_ids_T[verified.indices_N] = DRAFTED - verified.draft_tokens.offsets_N
        (features_TD,) = self._runner.features
        if accepted is None:
            features_TD = features_TD[: len(inputs.token_ids_T)]  # a view: the host may be ahead of the device
        else:
            rows_T = np.arange(counts_R.sum()) + np.repeat(query_starts[:-1] - offsets_R, counts_R)
            features_TD = features_TD[torch.from_numpy(rows_T).to(features_TD.device)]
        assert self._head is not None, "a step was planned for a model without weights"
        self._head.inputs_XD[: len(features_TD)] = features_TD
        self._forward.run(inputs)
        if not num_drafts or not len(sampled_E):
            return []
        slots_E, next_E = entries.slots_R[sampled_E], (starts_R + counts_R)[sampled_E]
        rows_E = (offsets_R + counts_R - 1)[sampled_E]
        # The head's cache ends with the blocks of the request.
        limits_E = np.minimum(self._batch.columns.capacity_S[slots_E], self._max_model_len)
        return self.rounds.draft(slots_E, next_E, rows_E, limits_E, num_drafts, verified)


def open_head_drafter(
    model: Model,
    head: DraftHead,
    config: ResolvedConfig,
    runner: Runner,
    stream: Stream | None,
    batch: BatchState,
    *,
    num_blocks: int,
    max_model_len: int,
) -> HeadDrafter:
    """Make the cache of a head, and the drafter that computes with both.

    Args:
        model: target model.
        head: head with loaded weights.
        config: engine configuration.
        runner: runner of the model.
        stream: stream of the device; `None` if the host computes.
        batch: batch of the runner.
        num_blocks: number of blocks of the cache.
        max_model_len: longest request, in tokens.

    Raises:
        ConfigError: no layer of the model keeps blocks of all tokens of a request.
        MemoryError, RuntimeError: not enough memory for the cache.
    """
    group = shared_group(model)
    sizes = {"group": group, "num_blocks": num_blocks, "max_model_len": max_model_len}
    rounds = open_rounds(head, config, runner, stream, batch, **sizes)
    return HeadDrafter(head, rounds, runner, group, batch, max_model_len)
