"""From what a step computed to the `StepResult` that the core receives."""

from octavo.kernels.logprobs import RowLogprobs
from octavo.protocol.events import TokenLogprobs
from octavo.protocol.steps import StepResult


def token_logprobs(token_id: int, row: RowLogprobs) -> TokenLogprobs:
    """Return the message form of one position's logprobs: the token first, then the top ones."""
    return TokenLogprobs(
        token_ids=[token_id, *row.top_token_ids],
        logprobs=[row.token_logprob, *row.top_logprobs],
        rank=row.rank,
    )


def step_result(
    sequence: int,
    sampled: list[int],
    logprobs: list[TokenLogprobs | None],
    prompt_logprobs: list[tuple[int, list[TokenLogprobs]]],
    elapsed_s: float,
) -> StepResult:
    """Return the answer to a plan; `logprobs` is left out when nobody asked for any."""
    asked = any(entry is not None for entry in logprobs)
    return StepResult(
        sequence=sequence,
        sampled=sampled,
        logprobs=logprobs if asked else [],
        prompt_logprobs=prompt_logprobs,
        elapsed_s=elapsed_s,
    )
