"""The interface of connectors in which requests wait for blocks from elsewhere before the scheduler receives them."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from octavo.core_proc.request_map import RequestKey
from octavo.core_proc.scheduler.delivery import ClientEvent
from octavo.protocol.events import Failed, FailureKind
from octavo.protocol.ids import RequestId
from octavo.protocol.kv_transfer import PARAMS
from octavo.protocol.requests import Submit


class RequestConnector(Protocol):
    """Receives every request before the scheduler does."""

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait here."""

    def is_waiting(self, key: RequestKey) -> bool:
        """Return whether this request waits here."""

    def submit(self, client: bytes, submit: Submit) -> Submit | list[ClientEvent]:
        """Look up the blocks of a request that are stored elsewhere.

        Returns:
            The request if the scheduler should receive it now. Otherwise events: of its end, or none if it waits here.
        """

    def abort(self, client: bytes, request_ids: Sequence[RequestId]) -> list[ClientEvent]:
        """Abort requests that wait here. Other ids are ignored."""

    def take_ready(self) -> list[tuple[bytes, Submit]]:
        """Return the requests that have finished waiting. Never blocks."""

    def note_ended(self, request_ids: Sequence[RequestId]) -> None:
        """Note which requests have finished, failed or were aborted, wherever they were."""

    def close(self) -> None:
        """End the threads."""


class NoConnector(RequestConnector):
    """The connector of an engine that exchanges no blocks: no request waits."""

    num_waiting = 0
    """Always 0."""

    def is_waiting(self, key: RequestKey) -> bool:
        """Return False."""
        return False

    def submit(self, client: bytes, submit: Submit) -> Submit | list[ClientEvent]:
        """Pass requests on, but reject those that ask for a transfer of blocks.

        A continued request was accepted by another engine, which has died, so it is computed here without a transfer.
        """
        if submit.kv_transfer is None:
            return submit
        if submit.is_continued:
            return msgspec.structs.replace(submit, kv_transfer=None)
        message = f"{PARAMS}: this engine exchanges no KV blocks: start it with --kv-transfer-config"
        return [(client, Failed(submit.request_id, FailureKind.INVALID, message, PARAMS))]

    def abort(self, client: bytes, request_ids: Sequence[RequestId]) -> list[ClientEvent]:
        """Return no events."""
        return []

    def take_ready(self) -> list[tuple[bytes, Submit]]:
        """Return no requests."""
        return []

    def note_ended(self, request_ids: Sequence[RequestId]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
