"""Rounds of drafting: each drafts one more token of every request, after the draft model has computed the last
draft."""

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from octavo.protocol.ids import IdArray, SlotId, pack_ids
from octavo.worker_proc.batch.inputs import Ints, StepEntries, StepInputs
from octavo.worker_proc.batch.state import BatchState
from octavo.worker_proc.device.stream import DeviceEvent
from octavo.worker_proc.executor.runner import Samples
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.models.heads.base import DraftHead
from octavo.worker_proc.runners.host import Forward, HostRunner

Drafts = list[tuple[SlotId, IdArray]]


@dataclass(frozen=True, slots=True, eq=False)
class PendingDrafts:
    """Drafts of E requests that a device is making."""

    slots_E: Ints
    room_E: Ints
    """Positions after the first draft of each request that its blocks have room for; may be negative."""
    token_ids_KE: Tensor
    """Draft tokens in a host buffer, readable when `event` is done."""
    event: DeviceEvent

    @property
    def counts_E(self) -> Ints:
        """Drafts of each request, at least 1. Drafts beyond this number have no room in its blocks."""
        counts_E: Ints = 1 + np.clip(self.room_E, 0, len(self.token_ids_KE) - 1)
        return counts_E

    def after_wrong(self, num_wrong_E: Ints) -> "PendingDrafts":
        """Return these drafts, given how many of the drafts before them were wrong."""
        return replace(self, room_E=self.room_E + num_wrong_E)


class DraftRounds(Protocol):
    """A draft model or head, with its cache."""

    forward: Forward
    """`Forward` of the draft model or head."""

    def use_model(self, model: Model | None) -> None:
        """See `octavo.worker_proc.runners.host.Forward`."""

    def follow_samples(self, samples: Samples) -> None:
        """Let the next step of `forward` read tokens that a device sampled, in place of `DRAFTED` minus the number of
        drafts before a sample."""

    def draft(
        self,
        slots_E: Ints,
        next_E: Ints,
        rows_E: Ints,
        limits_E: Ints,
        num_drafts: int,
        verified: Samples | None = None,
    ) -> Drafts | PendingDrafts:
        """Draft tokens one after another, or enqueue this on a device.

        A draft is drawn with the noise of its position and the parameters of its request. So at any temperature it is
        right if the draft model and the target model agree. The batch is not changed.

        Args:
            slots_E: slots of the requests.
            next_E: first position of each request that is not computed yet.
            rows_E: row in the last step of `forward` that the first draft comes from.
            limits_E: number of positions that each request has room for.
            num_drafts: most drafts of each request; at least 1.
            verified: samples of the step, if only the device knows which of them follow no wrong draft. `next_E` and
                `rows_E` then assume that all drafts were right, and the device corrects them. `None` if the host knows
                the tokens.
        """


def first_draw(model: Model) -> int:
    """Return the distance of the first draft from the first position that is not computed: 1 for a head, 0 for a
    model."""
    return int(isinstance(model, DraftHead))


def over_vocabulary(model: Model, logits_EV: Tensor, vocab_size: int) -> Tensor:
    """Return draft logits over the vocabulary of the model: minus infinity for tokens that are never drafted."""
    if not isinstance(model, DraftHead) or model.token_ids_V is None:
        return logits_EV
    all_EV = logits_EV.new_full((len(logits_EV), vocab_size), float("-inf"))
    return all_EV.index_copy_(1, model.token_ids_V, logits_EV)


def draft_inputs(batch: BatchState, group: int, slots_R: Ints, starts_R: Ints, counts_R: Ints) -> StepInputs:
    """Return the arrays of a step of the draft model, in the blocks of one cache group of the target model."""
    inputs = batch.step_inputs(StepEntries(slots_R, starts_R, counts_R, np.zeros_like(counts_R)))
    inputs.groups, inputs.states, inputs.adapters = (inputs.groups[group],), None, None
    return inputs


class HostRounds:
    """See `DraftRounds`.

    Args:
        model: the draft model or head.
        forward: its `Forward`, over its cache.
        runner: runner of the target model.
        group: cache group of the target model whose block ids are used.
        batch: batch of the requests.
        vocab_size: vocabulary size of the target model.
    """

    def __init__(
        self, model: Model, forward: Forward, runner: HostRunner, group: int, batch: BatchState, vocab_size: int
    ) -> None:
        self._model: Model | None = model
        self.forward = forward
        self._runner, self._group, self._batch, self._vocab_size = runner, group, batch, vocab_size

    def use_model(self, model: Model | None) -> None:
        """See `DraftRounds`."""
        self._model = model
        self.forward.use_model(model)

    def follow_samples(self, samples: Samples) -> None:
        """Never called: the host knows all tokens."""
        raise AssertionError("a host drafts when it knows the tokens of a step")

    def draft(
        self,
        slots_E: Ints,
        next_E: Ints,
        rows_E: Ints,
        limits_E: Ints,
        num_drafts: int,
        verified: Samples | None = None,
    ) -> Drafts:
        """See `DraftRounds`."""
        assert verified is None, "a host drafts when it knows the tokens of a step"
        model, forward = self._model, self.forward
        assert model is not None, "a step was planned for a model without weights"
        drafts: dict[int, list[int]] = {}
        while len(slots_E):
            logits_EV = over_vocabulary(model, forward.logits(rows_E), self._vocab_size)
            drawn = self._runner.draw_drafts(self._batch, logits_EV, slots_E, next_E + first_draw(model))
            tokens_E = np.array(drawn, dtype=np.int64)
            is_drawn_E = tokens_E >= 0
            for slot, token_id in zip(slots_E[is_drawn_E].tolist(), tokens_E[is_drawn_E].tolist(), strict=True):
                drafts.setdefault(slot, []).append(token_id)
            num_drafts -= 1
            is_next_E = is_drawn_E & (next_E < limits_E) & (num_drafts > 0)
            if isinstance(model, DraftHead):
                model.inputs_XD[: is_next_E.sum()] = forward.features[0][torch.from_numpy(rows_E[is_next_E])]
            slots_E, tokens_E, next_E = slots_E[is_next_E], tokens_E[is_next_E], next_E[is_next_E]
            limits_E = limits_E[is_next_E]
            if len(slots_E):
                inputs = draft_inputs(self._batch, self._group, slots_E, next_E, np.ones_like(slots_E))
                inputs.token_ids_T = tokens_E
                forward.run(inputs)
            next_E, rows_E = next_E + 1, np.arange(len(slots_E))
        return [(slot, pack_ids(token_ids)) for slot, token_ids in drafts.items()]
