"""Divides the prompt tokens of one step among prompts. Pure arithmetic, without requests."""

import math


def fair_share(num_tokens: int, num_requests: int, block_size: int) -> int:
    """Return the share of `num_tokens` for each of `num_requests` prefilling requests.

    A share is a whole number of blocks, so that the next chunk starts at a block boundary and can hit the prefix cache.
    """
    return max(block_size, num_tokens // num_requests // block_size * block_size)


def first_chunk(start: int, num_uncomputed: int, share: int, limit: int, block_size: int) -> int:
    """Return how many tokens a request computes from position `start` within its share.

    Args:
        start: first position to compute.
        num_uncomputed: tokens of the request left to compute.
        share: the request's share of the step.
        limit: tokens left in the step, or a cap on one request. The smaller of `share` and `limit` applies.
        block_size: a chunk that is not the last one ends at a block boundary if possible.
    """
    chunk = min(num_uncomputed, share, limit)
    if chunk < num_uncomputed:
        aligned = (start + chunk) // block_size * block_size - start
        chunk = aligned if aligned > 0 else chunk
    return chunk


class PromptBudget:
    """The prompt tokens of one step. First every prompt claims, then each one gets its share, both in order.

    A prompt that fits into one step ("short") is computed completely, in order of arrival. If several short prompts
    shared a step, all would finish as late as the last one. A long prompt gets a fair share of every step. So neither
    kind waits for the other to finish.

    Args:
        num_tokens: the step's tokens for prompts.
        block_size: tokens per block; shares are whole blocks.
        full_step_tokens: most tokens of all short prompts in one step; 0: no limit.
        max_chunk: most tokens of one prompt in one step; 0: no limit.
    """

    def __init__(self, num_tokens: int, block_size: int, full_step_tokens: int, max_chunk: int) -> None:
        self._num_tokens = num_tokens
        self._block_size = block_size
        self._full_step_tokens = full_step_tokens or math.inf
        self._max_chunk = max_chunk
        self._num_prompts = 0
        self._num_long = 0
        self._num_claimed = 0
        """Tokens claimed by short prompts."""
        self._num_given = 0
        """Tokens given to short prompts."""
        self._is_full = False

    def is_short(self, num_uncomputed: int) -> bool:
        """Return whether one step can compute this many tokens, or `max_chunk` of them if that is fewer."""
        return self._capped(num_uncomputed) <= self._num_tokens

    def has_room(self, num_uncomputed: int) -> bool:
        """Return whether another prompt would get any tokens in addition to those already claimed."""
        if not self._num_prompts:
            return self._num_tokens > 0
        num_short = self._num_claimed + (self._capped(num_uncomputed) if self.is_short(num_uncomputed) else 0)
        if num_short > self._full_step_tokens and self._num_claimed:
            return False
        # One block for each long prompt, and one for this prompt.
        return self._num_claimed + (self._num_long + 1) * self._block_size <= self._num_tokens

    def claim(self, num_uncomputed: int) -> None:
        """Count a prompt with this many uncomputed tokens."""
        self._num_prompts += 1
        if self.is_short(num_uncomputed):
            self._num_claimed += self._capped(num_uncomputed)
        else:
            self._num_long += 1

    def share(self, num_uncomputed: int, num_left: int, *, is_short: bool) -> int:
        """Return how many tokens the next prompt in order may compute.

        Args:
            num_uncomputed: its uncomputed tokens now; may be fewer than it claimed.
            num_left: tokens left in the step.
            is_short: whether the prompt was short when it claimed.
        """
        fair = fair_share(self._num_tokens, self._num_prompts, self._block_size)
        if not is_short:
            self._num_long -= 1
            return fair
        num_wanted = self._capped(num_uncomputed)
        if self._num_given and self._num_given + num_wanted > self._full_step_tokens:
            self._is_full = True
        if self._is_full:
            return 0
        num_given = min(num_wanted, max(0, num_left - fair * self._num_long))
        self._num_given += num_given
        return num_given

    def has_leftover(self, num_left: int) -> bool:
        """Return whether a second pass should distribute the remaining tokens, in order."""
        num_computed = self._num_tokens - num_left
        return num_left > 0 and not self._is_full and num_computed < self._full_step_tokens

    def _capped(self, num_uncomputed: int) -> int:
        return min(num_uncomputed, self._max_chunk) if self._max_chunk else num_uncomputed
