"""The interface of what requests wait for before the scheduler gets them, because blocks of theirs are elsewhere."""

from collections.abc import Sequence
from typing import Protocol

from octavo.core_proc.request_map import RequestKey
from octavo.core_proc.scheduler.delivery import ClientEvent
from octavo.protocol.ids import RequestId
from octavo.protocol.requests import Submit


class RequestConnector(Protocol):
    """Sees every request before the scheduler does."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait here."""

    def is_waiting(self, key: RequestKey) -> bool:
        """Return whether this request waits here."""

    def submit(self, client: bytes, submit: Submit) -> Submit | list[ClientEvent]:
        """Find what there is of a request elsewhere.

        Returns:
            The request that the scheduler gets now; or that it has ended, or none if it waits here.
        """

    def abort(self, client: bytes, request_ids: Sequence[RequestId]) -> list[ClientEvent]:
        """End requests that wait here; others are not known here."""

    def take_ready(self) -> list[tuple[bytes, Submit]]:
        """Return the requests that wait no longer. Never blocks."""

    def note_ended(self, request_ids: Sequence[RequestId]) -> None:
        """Learn which requests have finished, failed or were aborted, wherever they were."""

    def close(self) -> None:
        """End the threads."""
