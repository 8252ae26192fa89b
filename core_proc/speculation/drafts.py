"""Drafts made by the workers, which run draft layers or a draft model after each step."""

from octavo.core_proc.request import Request, RequestState
from octavo.core_proc.scheduler.delta import StepRecord
from octavo.protocol.ids import IdArray
from octavo.protocol.steps import StepResult


class DraftProposer:
    """Proposes the latest drafts of each request, unless a token has been added after those that they follow."""

    def __init__(self) -> None:
        self._drafts: dict[Request, tuple[int, IdArray]] = {}
        """The number of known tokens at the time of drafting, and the drafts."""

    def keep(self, record: StepRecord, result: StepResult) -> None:
        """Store the drafts of a step whose result was applied."""
        if not result.drafts:
            return
        requests = {scheduled.slot: request for request, scheduled in record.chunks}
        for slot, token_ids in result.drafts:
            request = requests[slot]
            if request.state is RequestState.RUNNING:
                self._drafts[request] = len(request.token_ids), token_ids

    def propose(self, request: Request, num_tokens: int) -> IdArray | None:
        """See `Proposer.propose`."""
        num_known, token_ids = self._drafts.get(request, (0, None))
        return None if token_ids is None or num_known != len(request.token_ids) else token_ids[:num_tokens]

    def forget(self, request: Request) -> None:
        """See `Proposer.forget`."""
        self._drafts.pop(request, None)
