"""`RoutedLink`: several engines behind the interface of one. Requests of an engine that is gone move to others."""

import asyncio
import logging
from collections.abc import Callable, Collection
from functools import partial

import msgspec

from octavo.frontend.link import CoreLink
from octavo.frontend.recovery.downtime import Downtime
from octavo.frontend.request_stream import RequestStream
from octavo.frontend.routing.router import PrefixRouter
from octavo.frontend.wake_event import WakeEvent, WakeQueue
from octavo.protocol.config.kv_transfer import KVRole
from octavo.protocol.errors import EngineDeadError, InvalidRequestError, RequestFailedError
from octavo.protocol.events import BoolResult, CacheUpdate, EngineFacts, UtilityResult
from octavo.protocol.ids import RequestId
from octavo.protocol.prefix_hash import extra_keys_of
from octavo.protocol.requests import ModelVocabulary, Submit, Utility
from octavo.protocol.stats import EngineStats, total

logger = logging.getLogger(__name__)

MAX_MOVED_AT_ONCE = 64
"""Number of requests that move per iteration of the event loop."""


class RoutedLink:
    """Links to engines, by engine index. New requests go to the serving engines, which have one identity.

    Other engines finish the requests that they have. A request moves only between engines of the same identity, which
    compute the same bits (`protocol/identity.py`).

    Args:
        router: chooses an engine for each request.
        on_model_changed: called when other weights or settings serve.
    """

    def __init__(self, router: PrefixRouter, on_model_changed: Callable[[], None] = lambda: None) -> None:
        self.wake_queue = WakeQueue()
        self.identity = ""
        """Identity of the serving engines."""
        self._links: dict[int, CoreLink] = {}
        self._serving: frozenset[int] = frozenset()
        self.prefilling: set[int] = set()
        """Prefill engines: they compute prompts for others, and generate only if no other engine can."""
        self._taking: set[int] = set()
        """Engines that can fetch the KV blocks of these prompts."""
        self._leaving: set[int] = set()
        """Engines whose requests move away although they could finish there."""
        self._link_of: dict[RequestId, CoreLink] = {}
        """Link of each live request."""
        self._facts: dict[str, EngineFacts] = {}
        """Results of `facts_of` since the last change of an engine."""
        self._usable: dict[str, tuple[int, ...]] = {}
        """Results of `_find_usable` since the last change of an engine."""
        self._calls: dict[int, set[asyncio.Task[UtilityResult]]] = {}
        self._router = router
        self._on_model_changed = on_model_changed
        self._vocabulary: ModelVocabulary | None = None
        self._is_closing = False

    @property
    def facts(self) -> EngineFacts:
        """Facts of the serving engines."""
        return self.facts_of(self.identity)

    def facts_of(self, identity: str) -> EngineFacts:
        """Return the facts of the first engine of an identity, with limits that hold for all engines of it.

        If none is left, return the facts of the serving engines.
        """
        if (known := self._facts.get(identity)) is not None:
            return known
        found = [link.facts for link in self._links.values() if link.facts.identity == identity]
        if not found:
            assert identity != self.identity, "an engine serves"
            return self.facts
        if len(found) > 1:
            found[0] = msgspec.structs.replace(found[0], max_model_len=min([facts.max_model_len for facts in found]))
        self._facts[identity] = found[0]
        return found[0]

    @property
    def address(self) -> str:
        """Addresses of the serving engines, separated by commas."""
        return ",".join(self._links[index].address for index in sorted(self._serving))

    @property
    def failure(self) -> EngineDeadError | None:
        """Why no engine serves any more. `None` while one may."""
        failure = None
        for index in self._serving:
            if (failure := self._links[index].failure) is None:
                return None
        return failure

    @property
    def downtime(self) -> Downtime | None:
        """Why no engine serves at the moment. `None` while one does."""
        links = [self._links[index] for index in self._serving]
        downtimes = [link.downtime for link in links if not link.failure]
        return downtimes[0] if downtimes and all(downtimes) else None

    @property
    def num_lost_requests(self) -> int:
        """Number of live requests that failed because their engine died."""
        return sum(link.num_lost_requests for link in self._links.values())

    @property
    def latest_stats(self) -> EngineStats:
        """Sum of the latest reports of all engines."""
        return total([link.latest_stats for link in self._links.values()])

    def add(self, index: int, link: CoreLink, kv_role: KVRole | None = None) -> None:
        """Add an engine. It gets no requests until `serve` names it."""
        assert index not in self._links, "an index belongs to one engine"
        self._links[index] = link
        if kv_role == "kv_producer":
            self.prefilling.add(index)
        elif kv_role is not None:
            self._taking.add(index)
        link.index = index
        link.link_of = self._link_of
        link.on_load = partial(self._on_load, index)
        link.on_down = self._on_change
        link.on_lost = partial(self._on_lost, index)
        link.on_up = partial(self._on_up, index)
        link.on_facts = self._on_facts
        self._on_load(index)
        self._on_change()
        if self._vocabulary is not None:
            link.send_vocabulary(self._vocabulary)
        if len(self._links) > 1:
            for other in [index] if len(self._links) > 2 else list(self._links):
                self._watch_cache(other)

    def serve(self, indices: Collection[int]) -> None:
        """Send new requests to these engines from now on, and to no others."""
        assert indices, "an engine must serve"
        self._serving = frozenset(indices)
        self._on_change()
        self._leaving -= self._serving
        self._update_identity()

    def move_away(self, index: int) -> None:
        """Move the requests of a non-serving engine to serving engines of its identity.

        Requests stay where they are if there is none.
        """
        assert index not in self._serving, "new requests would come"
        self._leaving.add(index)
        self._move(index)

    def remove(self, index: int) -> None:
        """Forget an idle engine that does not serve; the caller closes its link."""
        assert index not in self._serving, "new requests would come"
        link = self._links.pop(index)
        assert not link.num_live_requests, "its requests would be lost"
        link.on_lost, link.on_cache_update = lambda: False, None
        link.on_up = link.on_down = link.on_load = link.on_facts = lambda: None
        self._on_change()
        self._leaving.discard(index)
        self.prefilling.discard(index)
        self._taking.discard(index)
        self._router.forget(index)
        if len(self._links) == 1:  # with a single engine there is no choice, so it need not report its cache
            (last,) = self._links
            self._links[last].watch_cache(None)
            self._router.forget(last)
        for other in [other for other, link in self._links.items() if link.failure]:
            self._move(other)  # its requests may have waited for this engine

    def send_vocabulary(self, vocabulary: ModelVocabulary) -> None:
        """See `CoreLink.send_vocabulary`."""
        self._vocabulary = vocabulary
        for link in self._links.values():
            if not link.failure:
                link.send_vocabulary(vocabulary)

    def submit(
        self, submit: Submit, arrived: WakeEvent, identity: str, sibling: RequestId | None = None
    ) -> RequestStream:
        """Send a request to the most suitable engine. See `CoreLink.submit`.

        Args:
            submit: the request.
            arrived: see `CoreLink.submit`.
            identity: identity of the engines for which the request was prepared. Others get the request only if none of
                these is left.
            sibling: id of a live request with the same prompt, whose engine gets this request, too.

        Raises:
            EngineDeadError: all engines are gone for good.
            OverloadedError: too many requests already wait for an engine.
            InvalidRequestError: a live request has the same id, or a value cannot be encoded.
        """
        if len(self._links) == 1:  # perf: nothing to choose
            return next(iter(self._links.values())).submit(submit, arrived)
        if submit.request_id in self._link_of:
            raise InvalidRequestError(f"request_id {submit.request_id!r} is in use", "request_id")
        if sibling is not None and (link := self._link_of.get(sibling)) is not None and not link.failure:
            return link.submit(submit, arrived)
        if (candidates := self._usable.get(identity)) is None:
            candidates = self._usable[identity] = self._find_usable(identity) or self._find_usable(self.identity)
        if not candidates:
            assert self.failure is not None, "an engine that has not failed is usable"
            raise self.failure
        index, num_new_tokens = self.choose(submit, candidates)
        return self._links[index].submit(submit, arrived, num_new_tokens)

    def abort(self, request_ids: list[RequestId]) -> None:
        """See `CoreLink.abort`."""
        own: dict[CoreLink, list[RequestId]] = {}
        for request_id in request_ids:
            if (link := self._link_of.get(request_id)) is not None:
                own.setdefault(link, []).append(request_id)
        for link, ids in own.items():
            link.abort(ids)

    async def call(self, utility: Utility, timeout_s: float = 60.0) -> UtilityResult:
        """Make a utility call to every engine that is up, and return one combined result.

        An engine that dies meanwhile is left out, unless it is the only one.

        Raises:
            EngineDeadError: all engines are gone for good.
            RequestFailedError: a call failed, or no reply came in time.
        """
        tasks = [
            self._calling(index, utility, timeout_s)
            for index, link in self._links.items()
            if link.is_up or (len(self._links) == 1 and not link.failure)
        ]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        answers = [result for result in results if not isinstance(result, BaseException)]
        for result in results:
            has_died = isinstance(result, asyncio.CancelledError | EngineDeadError)
            if isinstance(result, BaseException) and not (has_died and answers):
                raise result
        if not answers:
            raise self.failure or RequestFailedError("all engines are restarting")
        if all(isinstance(result, EngineStats) for result in answers):
            return total([result for result in answers if isinstance(result, EngineStats)])
        if all(isinstance(result, BoolResult) for result in answers):
            return BoolResult(all(result.ok for result in answers if isinstance(result, BoolResult)))
        return answers[0]

    async def close(self) -> None:
        """Abort all requests and disconnect from all engines."""
        self._is_closing = True
        for link in self._links.values():
            if link.failure:  # its requests may wait for another engine
                link.fail_rest()
        await asyncio.gather(*(link.close() for link in self._links.values()))

    def _calling(self, index: int, utility: Utility, timeout_s: float) -> "asyncio.Task[UtilityResult]":
        """Return a task that calls one engine; it is cancelled if another engine can reply instead."""
        task = asyncio.create_task(self._links[index].call(utility, timeout_s))
        tasks = self._calls.setdefault(index, set())
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    def _members(self, identity: str) -> list[int]:
        """Return the engines of an identity that may get its requests: the serving ones, or else all that are left."""
        own = [index for index, link in self._links.items() if link.facts.identity == identity]
        members = [index for index in own if index in self._serving] if identity == self.identity else own
        generating = [index for index in members if index not in self.prefilling]
        return generating if any(not self._links[index].failure for index in generating) else members

    def by_role(self, identity: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the engines that may fetch blocks for requests of an identity, and those that may provide blocks."""
        taking = tuple([index for index in self._find_usable(identity) if index not in self.prefilling])
        links = [(index, self._links[index]) for index in sorted(self.prefilling & self._serving)]
        giving = tuple([index for index, link in links if link.is_up and link.facts.identity == identity])
        return (taking if self._taking.issuperset(taking) else ()), giving

    def submit_to(self, index: int, submit: Submit, arrived: WakeEvent) -> RequestStream:
        """Send a request to one engine. See `CoreLink.submit`."""
        return self._links[index].submit(submit, arrived, len(submit.prompt_token_ids))

    def _find_usable(self, identity: str) -> tuple[int, ...]:
        """Return the engines of an identity that are up; if none is up, those that may come back."""
        members = sorted(self._members(identity))
        is_up = [index for index in members if self._links[index].is_up]
        return tuple(is_up or [index for index in members if not self._links[index].failure])

    def choose(self, submit: Submit, candidates: tuple[int, ...]) -> tuple[int, int]:
        """See `PrefixRouter.choose`."""
        return self._router.choose(submit.prompt_token_ids, extra_keys_of(submit), candidates)

    def _on_load(self, index: int) -> None:
        self._router.set_load(index, *self._links[index].load)

    def _on_change(self) -> None:
        """Drop all results that depend on the set of engines, their states and their facts."""
        self._usable.clear()
        self._facts.clear()

    def _update_identity(self) -> None:
        """Serve with the identity of the first engine if no engine serves with the current identity."""
        identities = [self._links[index].facts.identity for index in sorted(self._serving)]
        if self.identity not in identities:
            self.identity = identities[0]
            self._on_model_changed()

    def _watch_cache(self, index: int) -> None:
        """Learn an engine's cache contents, if the router uses the same block size."""
        link = self._links[index]
        if link.facts.block_size == self._router.block_size:
            link.watch_cache(partial(self._on_cache_update, index))

    def _on_cache_update(self, index: int, update: CacheUpdate) -> None:
        if not self._router.view.apply(index, update):
            logger.warning("missed cache updates of engine %d before %d: requesting all", index, update.sequence)
            self._watch_cache(index)

    def _on_up(self, index: int) -> None:
        """Handle a new core of an engine: its cache is probably empty, and it can take requests of lost engines."""
        self._router.forget(index)
        self._on_change()
        if self._serving:
            self._update_identity()
        if index in self._serving and self._links[index].facts.identity != self.identity:
            logger.warning(
                "engine %d is back with other weights or settings than those that serve: it gets no requests. "
                "Replace or remove it",
                index,
            )
        for other in list(self._links):
            if not self._links[other].is_up or other in self._leaving:
                self._move(other)

    def _on_facts(self) -> None:
        """Handle other weights in an engine: the other engines get the new requests until all have these weights."""
        self._on_change()
        if self._serving:
            self._update_identity()

    def _on_lost(self, index: int) -> bool:
        """Handle the loss of a core: drop its pending calls, and move its requests.

        Return whether an engine takes the requests now, or may take them once it is up again.
        """
        if any(link.is_up for link in self._links.values()):
            for task in list(self._calls.get(index, ())):
                task.cancel()
        return self._move(index)

    def _move(self, index: int) -> bool:
        """Move the requests of an engine that is down or leaving, some per iteration of the event loop.

        Returns as `_on_lost`.
        """
        source = self._links[index]
        if self._is_closing or (source.is_up and index not in self._leaving):
            return False
        identity = source.facts.identity
        same = [link for link in self._links.values() if link.facts.identity == identity]
        if all(link.failure for link in same):  # no engine will come back: requests that waited for one fail, too
            for link in same:
                link.fail_rest()
        targets = self._targets(index)
        if not targets:
            return True
        moved = source.release(MAX_MOVED_AT_ONCE)
        for entry, stream in moved:
            target, num_new_tokens = self.choose(entry.submit, targets)
            self._links[target].adopt(entry, stream, num_new_tokens)
        if moved:
            logger.info("%d requests of engine %d continue on other engines", len(moved), index)
            asyncio.get_running_loop().call_soon(self._retry_move, index)
        elif source.failure:
            source.fail_rest()
        return True

    def _targets(self, index: int) -> tuple[int, ...]:
        """Return the engines that can take over the requests of another one."""
        source = self._links[index]
        members = set(self._members(source.facts.identity)) - self._leaving - {index}
        if targets := [other for other in members if self._links[other].is_up]:
            return tuple(sorted(targets))
        if source.is_up:
            return ()
        # A draining engine then drains longer, which is better than waiting for a core.
        same = [other for other, link in self._links.items() if link.facts.identity == source.facts.identity]
        return tuple(sorted([other for other in same if other != index and self._links[other].is_up]))

    def _retry_move(self, index: int) -> None:
        source = self._links.get(index)
        if source is not None and not self._move(index) and source.failure:
            source.fail_rest()
