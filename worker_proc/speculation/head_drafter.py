"""`HeadDrafter`: follows every step of a model with its head, and drafts what comes after the sampled tokens.

The head has keys and values of its own, in the blocks of the model's first cache group without a window. So they are
found, shared and copied with the model's. A later step verifies each draft, so it may depend on anything.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.protocol.config import ResolvedConfig
from octavo.protocol.ids import pack_ids
from octavo.worker_proc.batch.inputs import Ints, StepEntries, StepInputs
from octavo.worker_proc.batch.state import BatchState
from octavo.worker_proc.device.stream import Stream
from octavo.worker_proc.executor.runner import Accepted, Runner
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.models.heads.base import DraftHead
from octavo.worker_proc.runners.host import Forward
from octavo.worker_proc.runners.registry import open_forward
from octavo.worker_proc.speculation.draws import Drafts, num_accepted, shared_group


class HeadDrafter:
    """Drafts for the requests of a batch, after each step of its runner.

    The noise of a draft is that of the token it drafts, so at any temperature it is right if head and model agree.

    Args:
        head: with its weights.
        forward: of the head, over its cache.
        runner: of the model.
        group: the cache group of the model whose blocks the head uses.
        batch: of the requests.
        vocab_size: of the model.
        max_model_len: longest request, in tokens.
    """

    def __init__(
        self,
        head: DraftHead,
        forward: Forward,
        runner: Runner,
        group: int,
        batch: BatchState,
        vocab_size: int,
        max_model_len: int,
    ) -> None:
        self._head: DraftHead | None = head
        self._forward, self._runner = forward, runner
        self._group, self._batch, self._vocab_size = group, batch, vocab_size
        self._max_model_len = max_model_len

    @property
    def cache_buffers(self) -> Sequence[Tensor]:
        """The head's keys and values, as those of `octavo.worker_proc.executor.runner.Runner`."""
        return self._forward.cache_buffers

    def warm_up(self) -> int:
        """See `Drafter.warm_up`."""
        return self._forward.warm_up()

    def use_model(self, model: Model | None) -> None:
        """See `Drafter.use_model`. The head of the model computes over the same cache."""
        head = None if model is None else model.head
        assert head is None or isinstance(head, DraftHead), "the head of a model stays of its kind"
        self._head = head  # None: its memory is free for the next one
        self._forward.use_model(head)

    def draft(self, entries: StepEntries, query_starts: Ints, accepted: Accepted | None, num_drafts: int) -> Drafts:
        """Follow a step whose tokens the batch knows, and draft at most `num_drafts` tokens for each of its samples.

        Args:
            entries: of the step.
            query_starts: of its rows.
            accepted: how many of them are tokens, if some verify drafts.
            num_drafts: 0: only follow.
        """
        sampled_E = (entries.num_samples_R > 0).nonzero()[0]
        # Keys of rejected drafts would be wrong, and the next step stores the right ones.
        counts_R = num_accepted(entries, sampled_E, accepted)
        starts_R, offsets_R = entries.starts_R, counts_R.cumsum() - counts_R
        rows_T = np.arange(counts_R.sum()) + np.repeat(query_starts[:-1] - offsets_R, counts_R)
        self._run(entries.slots_R, starts_R, counts_R, _rows(self._runner.features, rows_T), None)
        if not num_drafts or not len(sampled_E):
            return []
        slots_E, next_E = entries.slots_R[sampled_E], (starts_R + counts_R)[sampled_E]
        return self._rounds(slots_E, next_E, (offsets_R + counts_R - 1)[sampled_E], num_drafts)

    def _rounds(self, slots_E: Ints, next_E: Ints, rows_E: Ints, num_drafts: int) -> Drafts:
        """Draft tokens one after another.

        Args:
            slots_E: of the requests.
            next_E: the position of the last token of each, which the next row of the head would follow.
            rows_E: the row in the head's last step that the first draft comes from.
            num_drafts: at most, for each request.
        """
        drafts: dict[int, list[int]] = {slot: [] for slot in slots_E.tolist()}
        columns, batch = self._batch.columns, self._batch
        for index in range(num_drafts):
            tokens_E = np.array(self._draw(slots_E, next_E + 1, rows_E), dtype=np.int64)
            for slot, token_id in zip(slots_E.tolist(), tokens_E.tolist(), strict=True):
                if token_id >= 0:
                    drafts[slot].append(token_id)
            # The head's cache ends with the blocks of the request.
            ends_E = np.minimum(columns.capacity_S[slots_E], self._max_model_len)
            is_next_E = (tokens_E >= 0) & (next_E < ends_E)
            if index + 1 == num_drafts or not is_next_E.any():
                break
            features_ED = _rows(self._forward.features, rows_E[is_next_E])
            slots_E, tokens_E, next_E = slots_E[is_next_E], tokens_E[is_next_E], next_E[is_next_E]
            self._run(slots_E, next_E, np.ones_like(slots_E), features_ED, tokens_E)
            next_E, rows_E = next_E + 1, np.arange(len(slots_E))
        return [(slot, pack_ids(token_ids)) for slot, token_ids in drafts.items() if token_ids and slot in batch.rows]

    def _run(self, slots_R: Ints, starts_R: Ints, counts_R: Ints, features_TD: Tensor, tokens_T: Ints | None) -> None:
        """Compute some positions; `tokens_T`: the tokens after them, None: those that the batch knows."""
        inputs = self._batch.step_inputs(StepEntries(slots_R, starts_R, counts_R, np.zeros_like(counts_R)))
        if tokens_T is None:
            tokens_T = self._batch.tokens_at(inputs.slots_T, inputs.positions_T + 1)
        assert self._head is not None, "a step was planned for a model without weights"
        self._head.inputs_XD[: len(features_TD)] = features_TD
        self._forward.run(
            StepInputs(
                token_ids_T=tokens_T,
                positions_T=inputs.positions_T,
                query_starts=inputs.query_starts,
                context_lens=inputs.context_lens,
                slots_T=inputs.slots_T,
                groups=(inputs.groups[self._group],),
            )
        )

    def _draw(self, slots_E: Ints, positions_E: Ints, rows_E: Ints) -> list[int]:
        """Return a token for each of some rows of the head's last step, with the noise of its position."""
        logits_EV = self._forward.logits(rows_E)
        assert self._head is not None, "a step was planned for a model without weights"
        if (token_ids_V := self._head.token_ids_V) is not None:
            all_EV = logits_EV.new_full((len(rows_E), self._vocab_size), -torch.inf)
            logits_EV = all_EV.index_copy_(1, token_ids_V, logits_EV)
        return self._runner.draw_drafts(self._batch, logits_EV, slots_E, positions_E)


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
        model: that it drafts for.
        head: with its weights.
        config: of the engine.
        runner: of the model.
        stream: of the device; None: the host computes.
        batch: of the runner.
        num_blocks: of the cache.
        max_model_len: longest request, in tokens.

    Raises:
        ConfigError: no layer of the model keeps blocks of all tokens of a request.
        MemoryError, RuntimeError: there is no memory for the cache.
    """
    group = shared_group(model)
    sizes = {"num_blocks": num_blocks, "max_model_len": max_model_len}
    forward = open_forward(head, config, runner, stream, group=group, **sizes)
    return HeadDrafter(head, forward, runner, group, batch, config.model.vocab_size, max_model_len)


def _rows(features: Sequence[Tensor], rows: Ints) -> Tensor:
    (features_TD,) = features
    return features_TD[torch.from_numpy(rows).to(features_TD.device)]
