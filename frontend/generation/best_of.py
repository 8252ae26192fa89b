"""Chooses which of several finished sequences are returned."""

from dataclasses import replace

from octavo.frontend.outputs import CompletionOutput
from octavo.protocol.params import SamplingParams


def choose_best(outputs: list[CompletionOutput], params: SamplingParams) -> tuple[list[CompletionOutput], int]:
    """Return the `n` sequences with the highest cumulative logprob, best first, and the number of tokens of the others.

    The earlier sequence wins a tie. Logprobs that were not requested are removed.

    Args:
        outputs: all `best_of` sequences, with their cumulative logprobs.
        params: the parameters of their request.
    """
    ranked = sorted(outputs, key=lambda output: -(output.cumulative_logprob or 0.0))
    best = [
        replace(output, index=index, logprobs=output.logprobs if params.shows_logprobs else None)
        for index, output in enumerate(ranked[: params.n])
    ]
    return best, sum(len(output.token_ids) for output in ranked[params.n :])
