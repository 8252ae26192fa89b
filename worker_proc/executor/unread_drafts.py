"""Drafts that a device makes while the host goes on: the next step verifies them before anybody has read them."""

import numpy as np

from octavo.kernels.slot_rows import DRAFTED
from octavo.protocol.ids import pack_ids
from octavo.protocol.steps import UNREAD_DRAFT
from octavo.worker_proc.device.stream import DeviceEvent
from octavo.worker_proc.executor.runner import Samples
from octavo.worker_proc.runners.rounds import Drafts, PendingDrafts


class UnreadDrafts:
    """The latest drafts of each slot: those that are being made, and the ids of the others.

    Args:
        num_slots: of the batch.
    """

    def __init__(self, num_slots: int) -> None:
        self._token_ids_SK = np.zeros((num_slots, 0), dtype=np.int64)
        self._pending: PendingDrafts | None = None
        self._sampled: DeviceEvent | None = None
        """After the step that the pending ones follow."""
        self._read: tuple[Drafts, float] = [], 0.0

    @property
    def is_pending(self) -> bool:
        """Whether the device may still be making drafts."""
        return self._pending is not None

    def keep(self, drafts: Drafts | PendingDrafts, sampled: DeviceEvent, *, reads: bool) -> Drafts:
        """Return what a result says of the drafts that follow it; keep those that are being made until they are needed.

        Args:
            drafts: of the newest step; those of the step before were taken.
            sampled: done when this step was.
            reads: wait for them, and return their ids.
        """
        if not isinstance(drafts, PendingDrafts):
            return drafts
        self._pending, self._sampled = drafts, sampled
        if reads:
            return self.take()[0]
        slots, counts = drafts.slots_E.tolist(), drafts.counts_E.tolist()
        return [(slot, pack_ids([UNREAD_DRAFT] * count)) for slot, count in zip(slots, counts, strict=True)]

    def take(self) -> tuple[Drafts, float]:
        """Return the drafts that were kept last, and the seconds that they took; [] if they were taken before.

        Blocks until: the device has made them.
        """
        self._read_pending()
        read, self._read = self._read, ([], 0.0)
        return read

    def reveal(self, samples: Samples) -> None:
        """Put ids into the drafts that a step verifies, which come from the device. Blocks until: it has made them."""
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
