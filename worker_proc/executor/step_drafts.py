"""Drafting after each step. A device drafts while the host continues, and the next step reads the drafts there."""

from collections.abc import Callable

import numpy as np

from octavo.kernels.slot_rows import DRAFTED
from octavo.protocol.ids import pack_ids
from octavo.protocol.steps import UNREAD_DRAFT
from octavo.worker_proc.device.stream import DeviceEvent
from octavo.worker_proc.executor.in_flight import InFlightStep
from octavo.worker_proc.executor.runner import Accepted, Samples
from octavo.worker_proc.runners.rounds import Drafts, PendingDrafts
from octavo.worker_proc.speculation.draws import Drafter


class StepDrafts:
    """Runs the drafter after each step, and keeps the latest drafts of each slot until their ids are needed.

    Call `begin` for each step, and `take` and `finish` when its tokens are known.

    Args:
        drafter: drafts tokens; `None` if nothing drafts here.
        num_slots: number of slots of the batch.
        is_ahead: whether the host runs ahead of a device.
    """

    def __init__(self, drafter: Drafter | None, num_slots: int, *, is_ahead: bool) -> None:
        self._drafter, self._is_ahead = drafter, is_ahead
        self._token_ids_SK = np.zeros((num_slots, 0), dtype=np.int64)
        self._pending: PendingDrafts | None = None
        self._sampled: DeviceEvent | None = None
        """Event of the step that the pending drafts follow."""
        self._read: tuple[Drafts, float] = [], 0.0

    @property
    def are_pending(self) -> bool:
        """Whether the device may still be drafting for the step that was finished last."""
        return self._pending is not None

    def begin(self, step: InFlightStep, drain: Callable[[], None]) -> None:
        """Start drafting for a step that the device has not computed yet, if drafting does not need its tokens on the
        host.

        `drain` finishes all earlier steps. It is called if there will be drafts; this method then blocks until they are
        over.
        """
        if self._drafter is None or not self._is_ahead or step.entries is None or step.query_starts is None:
            return
        verified = step.samples if step.samples is not None and step.samples.draft_tokens is not None else None
        # The tokens of draws in rounds are known on the host only.
        if verified is not None and (step.is_known_N is not None or not self._drafter.follows_drafts):
            return
        if step.num_drafts:
            drain()  # a draft model may have to continue from the last token but one
        step.drafts = self._drafter.draft(step.entries, step.query_starts, None, step.num_drafts, verified)

    def take(self) -> tuple[Drafts, float]:
        """Return the drafts of the previously finished step and the seconds that they took; [] if already taken.

        Blocks until the device has made them.
        """
        self._read_pending()
        read, self._read = self._read, ([], 0.0)
        return read

    def finish(self, step: InFlightStep, accepted: Accepted | None) -> Drafts:
        """Return the drafts that the result of a step reports.

        Args:
            step: finished step, whose tokens the batch knows.
            accepted: the samples that became tokens; `None` means all.
        """
        if self._drafter is None or step.entries is None or step.query_starts is None:
            return []
        drafts = step.drafts
        if drafts is None:
            drafts = self._drafter.draft(step.entries, step.query_starts, accepted, step.num_drafts)
        elif accepted is not None and isinstance(drafts, PendingDrafts):
            num_samples_E = step.entries.num_samples_R[step.entries.num_samples_R > 0]
            drafts = drafts.after_wrong(num_samples_E - np.array(accepted.counts))
        if not isinstance(drafts, PendingDrafts):
            return drafts
        self._pending, self._sampled = drafts, step.event
        if step.reads_drafts:
            return self.take()[0]
        slots, counts = drafts.slots_E.tolist(), drafts.counts_E.tolist()
        return [(slot, pack_ids([UNREAD_DRAFT] * count)) for slot, count in zip(slots, counts, strict=True)]

    def fill_token_ids(self, samples: Samples) -> None:
        """Fill in the ids of the drafts that a step verifies if the device made them. Blocks until it has made them."""
        if (drafts := samples.draft_tokens) is None:
            return
        self._read_pending()
        places = (drafts.token_ids_N <= DRAFTED).nonzero()[0]
        drafts.token_ids_N[places] = self._token_ids_SK[samples.slots_N[places], drafts.offsets_N[places]]

    def _read_pending(self) -> None:
        if (pending := self._pending) is None or self._sampled is None:
            return
        pending.event.wait()
        token_ids_EK = pending.token_ids_KE.numpy().T
        num_slots, width = self._token_ids_SK.shape
        if width < token_ids_EK.shape[1]:
            wider = np.zeros((num_slots, token_ids_EK.shape[1] - width), dtype=np.int64)
            self._token_ids_SK = np.concatenate([self._token_ids_SK, wider], axis=1)
        self._token_ids_SK[pending.slots_E, : token_ids_EK.shape[1]] = token_ids_EK
        rows = zip(pending.slots_E.tolist(), pending.counts_E.tolist(), token_ids_EK.tolist(), strict=True)
        drafts = [(slot, pack_ids(token_ids[:count])) for slot, count, token_ids in rows]
        self._read = drafts, pending.event.seconds_since(self._sampled)
        self._pending = self._sampled = None
