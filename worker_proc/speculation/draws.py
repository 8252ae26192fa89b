"""Code shared by the drafters of all methods: which rows of a step are right, and which blocks hold draft keys."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from octavo.protocol.errors import ConfigError
from octavo.worker_proc.batch.inputs import Ints, StepEntries
from octavo.worker_proc.executor.runner import Accepted, Samples
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.runners.rounds import DraftRounds, Drafts, PendingDrafts


class Drafter(Protocol):
    """Drafts tokens for the requests of a batch, after each step of its runner."""

    rounds: DraftRounds
    """Computes the drafts."""

    follows_drafts: bool
    """Whether `draft` accepts `verified`: it can continue from drafts that may be wrong, which the next step
    overwrites."""

    @property
    def cache_buffers(self) -> Sequence[Tensor]:
        """Keys and values of the draft model or head; see `octavo.worker_proc.executor.runner.Runner`."""

    def warm_up(self) -> int:
        """See `octavo.worker_proc.executor.runner.Runner`."""

    def use_model(self, model: Model | None) -> None:
        """Draft for a model with other weights from now on; `None` drops the present model."""

    def draft(
        self,
        entries: StepEntries,
        query_starts: Ints,
        accepted: Accepted | None,
        num_drafts: int,
        verified: Samples | None = None,
    ) -> Drafts | PendingDrafts:
        """Run the drafter on a step, and draft at most `num_drafts` tokens for each of its sampled requests.

        Args:
            entries: entries of the step.
            query_starts: offsets of the requests' rows.
            accepted: number of samples that are tokens, if some verify drafts.
            num_drafts: most drafts per request; 0 for none.
            verified: samples of a step that verifies drafts, if only the device knows their tokens yet.
        """


def num_accepted(entries: StepEntries, sampled_E: Ints, accepted: Accepted | None) -> Ints:
    """Return for each entry of a step the number of positions that follow no wrong draft.

    Args:
        entries: entries of the step.
        sampled_E: requests that sample.
        accepted: `None` if no entry verifies drafts.
    """
    counts_R = entries.counts_R.copy()
    if accepted is not None:
        counts_R[sampled_E] -= entries.num_samples_R[sampled_E] - np.array(accepted.counts, dtype=np.int64)
    return counts_R


def shared_group(model: Model) -> int:
    """Return the cache group of a model whose blocks also hold the keys of its drafter.

    Raises:
        ConfigError: no layer of the model keeps blocks of all tokens of a request.
    """
    for index, group in enumerate(model.cache_groups):
        if group.shape.is_causal and group.shape.window is None:
            return index
    raise ConfigError(
        "speculative_config: drafts need a model with layers that attend to all tokens",
        hint='use {"method": "suffix"}',
    )
