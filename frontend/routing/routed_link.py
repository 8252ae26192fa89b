"""`RoutedLink`: several engines that look like one. Requests of an engine that is gone move to the others."""

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

import msgspec

from octavo.frontend.link import CoreLink
from octavo.frontend.recovery.downtime import Downtime
from octavo.frontend.request_stream import RequestStream
from octavo.frontend.routing.router import PrefixRouter
from octavo.frontend.wake_event import WakeEvent
from octavo.protocol.errors import EngineDeadError, RequestFailedError
from octavo.protocol.events import BoolResult, EngineFacts, UtilityResult
from octavo.protocol.ids import RequestId
from octavo.protocol.requests import ModelVocabulary, Submit, Utility
from octavo.protocol.stats import EngineStats, total

logger = logging.getLogger(__name__)

MAX_MOVED_AT_ONCE = 64
"""Requests that move in one iteration of the event loop."""


class RoutedLink:
    """Links to engines of the same model. Offers what generations need of a `CoreLink`.

    Args:
        links: to the engines, in their order.
        router: chooses one for each request.
    """

    def __init__(self, links: Sequence[CoreLink], router: PrefixRouter) -> None:
        self._links = links
        self._router = router
        self._is_closing = False
        self.wake_queue = links[0].wake_queue
        for index, link in enumerate(links):
            link.on_lost = partial(self._move, index)
            link.on_up = partial(self._on_up, index)

    @property
    def facts(self) -> EngineFacts:
        """Those of the first engine, with the limits that hold for all."""
        shortest = min(link.facts.max_model_len for link in self._links)
        return msgspec.structs.replace(self._links[0].facts, max_model_len=shortest)

    @property
    def address(self) -> str:
        """The addresses of all engines, separated by commas."""
        return ",".join(link.address for link in self._links)

    @property
    def failure(self) -> EngineDeadError | None:
        """Why no engine serves any more; None while one may."""
        failures = [link.failure for link in self._links]
        return failures[0] if all(failures) else None

    @property
    def downtime(self) -> Downtime | None:
        """Why no engine serves at the moment; None while one does."""
        downtimes = [link.downtime for link in self._links if not link.failure]
        return downtimes[0] if downtimes and all(downtimes) else None

    @property
    def num_lost_requests(self) -> int:
        """Live requests that failed because their engine died."""
        return sum(link.num_lost_requests for link in self._links)

    @property
    def latest_stats(self) -> EngineStats:
        """The latest reports of all engines, added up."""
        return total([link.latest_stats for link in self._links])

    def send_vocabulary(self, vocabulary: ModelVocabulary) -> None:
        """See `CoreLink.send_vocabulary`."""
        for link in self._links:
            if not link.failure:
                link.send_vocabulary(vocabulary)

    def submit(self, submit: Submit, arrived: WakeEvent) -> RequestStream:
        """Send a request to the engine that is best for it. See `CoreLink.submit`.

        Raises:
            EngineDeadError: all engines are gone.
            OverloadedError: too many requests wait for an engine already.
            InvalidRequestError: a live request has the same id, or a value cannot be encoded.
        """
        candidates = self._usable()
        if not candidates:
            assert self.failure is not None, "an engine that has not failed is usable"
            raise self.failure
        link, num_new_tokens = self._choose(submit, candidates)
        return link.submit(submit, arrived, num_new_tokens)

    def abort(self, request_ids: list[RequestId]) -> None:
        """See `CoreLink.abort`."""
        for link in self._links:
            if own := [request_id for request_id in request_ids if request_id in link]:
                link.abort(own)

    async def call(self, utility: Utility, timeout_s: float = 60.0) -> UtilityResult:
        """Make a utility call to every engine that is up, and return one result for all.

        Raises:
            EngineDeadError: all engines are gone.
            RequestFailedError: a call failed, or was not answered in time.
        """
        up = [link for link in self._links if link.is_up]
        if not up:
            raise self.failure or RequestFailedError("all engines are restarting")
        results = await asyncio.gather(*(link.call(utility, timeout_s) for link in up))
        if all(isinstance(result, EngineStats) for result in results):
            return total([result for result in results if isinstance(result, EngineStats)])
        if all(isinstance(result, BoolResult) for result in results):
            return BoolResult(all(result.ok for result in results if isinstance(result, BoolResult)))
        return results[0]

    async def close(self) -> None:
        """Abort all requests and disconnect from all engines."""
        self._is_closing = True
        for link in self._links:
            if link.failure:  # its requests may wait for another engine
                link.fail_rest()
        await asyncio.gather(*(link.close() for link in self._links))

    def _usable(self) -> list[int]:
        """Return the engines that are up; if none is, those that may come back."""
        up = [index for index, link in enumerate(self._links) if link.is_up]
        return up or [index for index, link in enumerate(self._links) if not link.failure]

    def _choose(self, submit: Submit, candidates: Sequence[int]) -> tuple[CoreLink, int]:
        index, num_new_tokens = self._router.choose(
            submit.prompt_token_ids, submit.cache_salt, candidates, lambda engine: self._links[engine].load
        )
        return self._links[index], num_new_tokens

    def _on_up(self, index: int) -> None:
        """Handle the core of an engine that was down: it is probably another one, whose cache is empty, and it can take
        the requests of engines that are still down."""
        self._router.forget(index)
        for other in range(len(self._links)):
            if not self._links[other].is_up:
                self._move(other)

    def _move(self, index: int) -> bool:
        """Move the requests of an engine that is not up to those that are, some in each iteration of the event loop.

        Returns whether there is an engine that takes them, or may take them when it is up again.
        """
        source = self._links[index]
        targets = [other for other, link in enumerate(self._links) if link.is_up]
        if self._is_closing or source.is_up:
            return False
        if self.failure:  # no engine comes back: those that waited for one fail too
            for link in self._links:
                link.fail_rest()
        if not targets:
            return True
        moved = source.release(MAX_MOVED_AT_ONCE)
        for entry, stream in moved:
            link, num_new_tokens = self._choose(entry.submit, targets)
            link.adopt(entry, stream, num_new_tokens)
        if moved:
            logger.info("%d requests of engine %d continue on other engines", len(moved), index)
            asyncio.get_running_loop().call_soon(self._go_on_moving, index)
        elif source.failure:
            source.fail_rest()
        return True

    def _go_on_moving(self, index: int) -> None:
        if not self._move(index) and (source := self._links[index]).failure:
            source.fail_rest()
