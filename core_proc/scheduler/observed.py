"""A scheduler that reports every call to observers: the recorder and the invariant checker."""

from collections.abc import Callable, Collection, Sequence

from octavo.core_proc.cache.exchange import ReceivedContents
from octavo.core_proc.log_entries import (
    Aborted,
    BlocksTaken,
    CacheReset,
    Committed,
    Drafted,
    Ended,
    FilesChanged,
    LoadFinished,
    LogEntry,
    Planned,
    Restricted,
    Submitted,
    WeightsSet,
    WorkersLost,
)
from octavo.core_proc.queued_request import LiveRequest
from octavo.core_proc.request import Request
from octavo.core_proc.request_map import RequestKey
from octavo.core_proc.scheduler.delivery import ClientEvent
from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.protocol.config import CachePlan, ResolvedConfig
from octavo.protocol.ids import BlockId, IdArray, RequestId
from octavo.protocol.requests import Submit
from octavo.protocol.steps import StepPlan, StepResult

Observer = Callable[[Scheduler, LogEntry], None]
"""Called after each call that can change the scheduler, with its arguments and, for `plan()`, the result."""


class ObservedScheduler(Scheduler):
    """Behaves as a `Scheduler` does."""

    def __init__(
        self, config: ResolvedConfig, cache_plan: CachePlan, clock: Callable[[], float], observers: Sequence[Observer]
    ) -> None:
        super().__init__(config, cache_plan, clock)
        self._observers = observers

    def submit(self, client: bytes, submit: Submit) -> list[ClientEvent]:
        """Queue a request."""
        events = super().submit(client, submit)
        self._show(Submitted(client, submit))
        return events

    def abort(self, client: bytes, request_ids: list[RequestId]) -> list[ClientEvent]:
        """End requests."""
        events = super().abort(client, request_ids)
        self._show(Aborted(client, request_ids))
        return events

    def conclude(self, request: LiveRequest) -> list[ClientEvent]:
        """End a request whose output is complete."""
        events = super().conclude(request)
        self._show(Ended(request.client, request.request_id))
        return events

    def reject(self, request: LiveRequest, message: str, param: str) -> list[ClientEvent]:
        """End a request that cannot be served."""
        events = super().reject(request, message, param)
        self._show(Ended(request.client, request.request_id))
        return events

    def fail(self, request: LiveRequest, message: str) -> list[ClientEvent]:
        """End a request that cannot be computed."""
        events = super().fail(request, message)
        self._show(Ended(request.client, request.request_id))
        return events

    def lose_workers(self) -> None:
        """Forget what was in the workers' memory."""
        super().lose_workers()
        self._show(WorkersLost())

    def restrict(self, keys: frozenset[RequestKey] | None) -> None:
        """Run these requests alone."""
        super().restrict(keys)
        self._show(Restricted(None if keys is None else sorted(keys)))

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks."""
        done = super().reset_prefix_cache()
        self._show(CacheReset())
        return done

    def take_blocks(self, client: bytes, submit: Submit, keys: list[bytes]) -> ReceivedContents:
        """Make room for contents from elsewhere."""
        taken = super().take_blocks(client, submit, keys)
        self._show(BlocksTaken(client, submit, keys))
        return taken

    def set_weights(self, version: int, *, recomputes: bool) -> list[ClientEvent]:
        """Note that later steps compute with other weights."""
        events = super().set_weights(version, recomputes=recomputes)
        self._show(WeightsSet(version, recomputes))
        return events

    def plan(self) -> StepPlan | None:
        """Decide the next step."""
        if not self.has_requests:
            return None  # an idle iteration changes nothing and is not worth showing
        plan = super().plan()
        self._show(Planned(plan))
        return plan

    def commit(self, result: StepResult) -> list[ClientEvent]:
        """Take the result of the oldest step in flight."""
        events = super().commit(result)
        self._show(Committed(result))
        return events

    def draft(self, draft_tokens: Sequence[tuple[Request, IdArray]]) -> None:
        """Take drafts."""
        super().draft(draft_tokens)
        self._show(Drafted([(*request.key, token_ids) for request, token_ids in draft_tokens]))

    def finish_load(
        self,
        number: int,
        missing: Collection[BlockId],
        elapsed_s: float = 0.0,
        missing_states: Collection[BlockId] = (),
    ) -> None:
        """Take the end of a load."""
        super().finish_load(number, missing, elapsed_s, missing_states)
        self._show(LoadFinished(number, sorted(missing), elapsed_s, sorted(missing_states)))

    def change_files(self, added: Collection[bytes], removed: Collection[bytes]) -> None:
        """Note which files there are."""
        super().change_files(added, removed)
        self._show(FilesChanged(list(added), list(removed)))

    def _show(self, entry: LogEntry) -> None:
        for observer in self._observers:
            observer(self, entry)
