"""`PromptScores`: the logprobs of tokens that a caller names for each position of its prompt."""

import math
from collections.abc import Sequence

import msgspec

from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.events import TokenLogprobs
from octavo.protocol.params import PADDING, SamplingParams, SamplingSpec


class PromptScores:
    """Separates the scores of one request from the prompt logprobs that the engine reports.

    Args:
        params: parameters with `prompt_logprob_token_ids`.
        spec: the spec made from the parameters.
    """

    def __init__(self, params: SamplingParams, spec: SamplingSpec) -> None:
        self._rows = params.prompt_logprob_token_ids or []
        self._width = max(map(len, self._rows))
        self._spec = spec
        self.hides_prompt_logprobs = params.prompt_logprobs is None
        """Whether the caller requested only the scores."""

    def split(self, entries: Sequence[TokenLogprobs | None]) -> tuple[list[TokenLogprobs | None], list[list[float]]]:
        """Return the entries without the named tokens, and a row of scores for each row of named tokens.

        Args:
            entries: one per prompt token, the first None; the named tokens come last in each.
        """
        rest: list[TokenLogprobs | None] = []
        scores: list[list[float]] = []
        for position, entry in enumerate(entries):
            count = len(self._spec.named_at(position))
            if entry is not None and count:
                found, ids = entry.logprobs[-count:], entry.token_ids[:-count]
                rest.append(msgspec.structs.replace(entry, token_ids=ids, logprobs=entry.logprobs[:-count]))
            else:
                found = []
                rest.append(entry)
            if position > self._spec.prompt_logprob_start:
                scores.append(self._padded(self._rows[len(scores)], found))
        return rest, scores

    def _padded(self, row: Sequence[int], found: Sequence[float]) -> list[float]:
        remaining = iter(found)
        scores = [-math.inf if token_id == PADDING else next(remaining) for token_id in row]
        return scores + [-math.inf] * (self._width - len(row))


def named_rows(params: SamplingParams, num_prompt_tokens: int, max_logprobs: int) -> tuple[tuple[int, ...], ...]:
    """Return the token ids that a caller names for each position of its prompt, without padding.

    Args:
        params: the caller's parameters, already verified.
        num_prompt_tokens: length of the prompt.
        max_logprobs: maximum number of tokens at one position; -1: no limit.

    Raises:
        InvalidRequestError: the rows do not fit the prompt, or one is too long.
    """
    rows, name = params.prompt_logprob_token_ids, "prompt_logprob_token_ids"
    if rows is None:
        return ()
    num_scored = max(0, num_prompt_tokens - 1 - (params.prompt_logprob_start or 0))
    if len(rows) != num_scored:
        raise InvalidRequestError(
            f"{name} has {len(rows)} rows, but the prompt has {num_scored} scored rows: one for each of its tokens "
            "after the first one and after prompt_logprob_start",
            name,
        )
    longest = max(map(len, rows))
    if max_logprobs != -1 and longest > max_logprobs:
        raise InvalidRequestError(f"{name}: a row has {longest} tokens, at most {max_logprobs} (--max-logprobs)", name)
    return tuple([tuple([token_id for token_id in row if token_id != PADDING]) for row in rows])
