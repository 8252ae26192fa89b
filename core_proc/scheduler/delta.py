"""The step under construction, and its two results: the `StepPlan` for the workers, the record for `commit()`."""

from dataclasses import dataclass

from octavo.core_proc.request import Request, RequestKey
from octavo.protocol.ids import SlotId
from octavo.protocol.steps import Admitted, Appended, Scheduled, StepPlan


@dataclass(slots=True)
class Part:
    """What a step computes of one request."""

    request: Request
    slot: SlotId
    start: int
    num_tokens: int
    samples: bool = False


@dataclass(slots=True)
class StepRecord:
    """What `commit()` must know of a step in flight."""

    sequence: int
    parts: list[Part]
    awaits_masks: bool
    """True until the workers have the masks for it."""
    num_tokens: int
    """Of all parts."""


class StepDraft:
    """One step while the stages of `plan()` fill it."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens_left = num_tokens
        self.decoding: list[Request] = []
        """Running requests that lack one token."""
        self.num_decodes = 0
        """Of them, those that the step computes."""
        self.prefilling: list[Request] = []
        """Running requests that lack more than one token, those that start in this step included."""
        self.admitted: list[Request] = []
        self.has_preempted = False
        self.num_spare_blocks = 0
        """Free blocks that no running request will need for the tokens it has; counted by admission."""
        self._parts: dict[RequestKey, Part] = {}

    @property
    def is_empty(self) -> bool:
        """True while nothing is computed."""
        return not self._parts

    def num_tokens_of(self, request: Request) -> int:
        """Return how many tokens of the request this step computes so far."""
        part = self._parts.get(request.key)
        return part.num_tokens if part else 0

    def compute(self, request: Request, num_tokens: int) -> None:
        """Compute the next `num_tokens` tokens of a request, after those it computes already."""
        assert request.slot is not None
        part = self._parts.get(request.key)
        if part is None:
            part = Part(request, request.slot, request.num_computed_tokens, 0)
            self._parts[request.key] = part
        part.num_tokens += num_tokens
        request.num_computed_tokens += num_tokens
        self.num_tokens_left -= num_tokens

    def finish(self, sequence: int, released: list[SlotId], running: list[Request]) -> tuple[StepPlan, StepRecord]:
        """Return the plan and its record, and count the step as in flight.

        Args:
            sequence: the step's number.
            released: slots given back since the plan before.
            running: every running request; the blocks that are new since the plan before are announced.
        """
        parts = list(self._parts.values())
        awaits_masks = False
        for part in parts:
            request = part.request
            part.samples = request.num_uncomputed_tokens == 0
            request.num_pending_tokens += part.samples
            awaits_masks |= part.samples and request.is_constrained
            request.num_in_flight += 1
        plan = StepPlan(
            sequence=sequence,
            released=released,
            admitted=[_admitted(request) for request in self.admitted],
            appended=_appended(running),
            scheduled=[Scheduled(part.slot, part.start, part.num_tokens, part.samples) for part in parts],
            awaits_masks=awaits_masks,
        )
        return plan, StepRecord(sequence, parts, awaits_masks, sum(part.num_tokens for part in parts))


def _admitted(request: Request) -> Admitted:
    assert request.slot is not None
    request.num_announced_blocks = len(request.block_ids)
    return Admitted(
        slot=request.slot,
        request_id=request.request_id,
        token_ids=list(request.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        block_ids=list(request.block_ids),
        sampling=request.sampling,
    )


def _appended(running: list[Request]) -> list[Appended]:
    appended = []
    for request in running:
        if request.num_announced_blocks < len(request.block_ids):
            assert request.slot is not None
            appended.append(Appended(request.slot, request.block_ids[request.num_announced_blocks :]))
            request.num_announced_blocks = len(request.block_ids)
    return appended
