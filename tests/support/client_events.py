"""The events of a scheduler or a service, one request at a time."""

from collections.abc import Iterable

from octavo.core_proc.scheduler.delivery import ClientEvent
from octavo.protocol.events import RequestEvent, split_events


def by_request(events: Iterable[ClientEvent]) -> list[tuple[bytes, RequestEvent]]:
    """Split the events that stand for several requests."""
    return [(client, one) for client, event in events for one in split_events([event])]
