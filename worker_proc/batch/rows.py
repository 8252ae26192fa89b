"""One row of the persistent batch: what the worker remembers of a running request between steps.

Decides nothing: which tokens are computed and when the request ends is the core's business.
"""

from dataclasses import dataclass

from octavo.protocol.steps import Admitted
from octavo.worker_proc.sampling.state import SamplingState


@dataclass(slots=True)
class Row:
    """A running request, without its token ids and block table, which lie in the batch's tables."""

    slot: int
    request_id: str
    num_prompt_tokens: int
    num_known_tokens: int
    """Prompt and outputs; the token being sampled in a step counts once the step is over."""
    num_blocks: int
    sampling: SamplingState

    @classmethod
    def admit(cls, admitted: Admitted, vocab_size: int) -> "Row":
        """Make the row of a request that enters the batch, new or preempted before."""
        prompt = admitted.token_ids[: admitted.num_prompt_tokens]
        output = admitted.token_ids[admitted.num_prompt_tokens :]
        return cls(
            slot=admitted.slot,
            request_id=admitted.request_id,
            num_prompt_tokens=admitted.num_prompt_tokens,
            num_known_tokens=len(admitted.token_ids),
            num_blocks=len(admitted.block_ids),
            sampling=SamplingState.prepare(admitted.sampling, prompt, output, vocab_size),
        )
