"""A fake model: its "keys and values" and its tokens are pure functions of the tokens before.

The state at a position replaces the KV there: a 64-bit hash chain over all tokens up to it, so that reading a wrong or
stale block, or one of another request, is detected. `worker.py` stores states in blocks, `oracle.py` in lists.
"""

from collections.abc import Sequence

from octavo.protocol.buffers import Buffer
from octavo.protocol.events import PooledOutput, TokenLogprobs
from octavo.protocol.ids import IdArray, pack_ids
from octavo.protocol.params import PoolingSpec, SamplingSpec

_WORD = 2**64 - 1
_MULTIPLIER = 6364136223846793005
_INCREMENT = 1442695040888963407
_GOLDEN = 0x9E3779B97F4A7C15

SALT_MARK = "~"
"""Precedes the cache salt in a request's id, so that a worker detects blocks shared across salts."""

DAMAGED_MARK = "damaged"
"""Begins the digests of adapters that no worker can load."""


ECHO_SEED = 2
"""Requests with this seed, modulo 4, mostly repeat themselves, so that drafts of their tokens are often right."""


def root_state(request_id: str, adapter_digest: str = "") -> int:
    """Return the state before the first position of a request that is computed with an adapter; "": without one."""
    state = _INCREMENT
    for letter in request_id.partition(SALT_MARK)[2] + adapter_digest:
        state = next_state(state, ord(letter))
    return state


def next_state(state: int, token_id: int) -> int:
    """Return the state at the position of a token, from the one before."""
    return (state * _MULTIPLIER + 2 * token_id + _INCREMENT) & _WORD


def extend_states(states: list[int], token_ids: Sequence[int], root: int) -> None:
    """Append the states of those positions that `states` lacks."""
    state = states[-1] if states else root
    for token_id in token_ids[len(states) :]:
        state = (state * _MULTIPLIER + 2 * token_id + _INCREMENT) & _WORD
        states.append(state)


def draw(
    state: int, position: int, num_outputs: int, sampling: SamplingSpec, vocab_size: int, mask: bytes | None
) -> int:
    """Return the token at `position`, whose predecessor has this state.

    Args:
        state: at `position - 1`.
        position: position of the token.
        num_outputs: outputs before it.
        sampling: as in a real worker, the seed matters, and no end token is drawn before `min_tokens`.
        vocab_size: upper bound of tokens, exclusive.
        mask: the tokens that a grammar allows; None: all.
    """
    noise = ((state ^ (sampling.seed * _GOLDEN)) + position * _MULTIPLIER) & _WORD
    first = ((noise ^ noise >> 29) * _GOLDEN & _WORD) >> 33
    banned = (*sampling.eos_token_ids, *sampling.stop_token_ids) if num_outputs < sampling.min_tokens else ()
    if sampling.seed % 4 == ECHO_SEED and state >> 40 & 7:
        first = position % 5 + 1
    for offset in range(vocab_size):
        token_id = (first + offset) % vocab_size
        if token_id not in banned and (mask is None or mask[token_id >> 3] >> (token_id & 7) & 1):
            return token_id
    return first % vocab_size


def draft(
    token_ids: Sequence[int], num_prompt: int, state: int, sampling: SamplingSpec, vocab_size: int, num_drafts: int
) -> IdArray:
    """Return what will be drawn after some tokens, with every seventh position wrong.

    `state`: before the last token.
    """
    drafts = [token_ids[-1]]
    for position in range(len(token_ids), len(token_ids) + num_drafts):
        state = next_state(state, drafts[-1])
        token_id = draw(state, position, position - num_prompt, sampling, vocab_size, None)
        drafts.append((token_id + (position % 7 == 0)) % vocab_size)
    return pack_ids(drafts[1:])


def vector(states: Sequence[int], spec: PoolingSpec) -> PooledOutput:
    """Return the "vector" of a prompt with these states: the last one, or the sum of all."""
    state = states[-1] if spec.pooling == "last" else sum(states) & _WORD
    return PooledOutput(Buffer(state.to_bytes(8, "little")), (2,), "float32")


def logprob(state: int, token_id: int) -> TokenLogprobs:
    """Return the logprobs of a token after a position with this state."""
    value = -float((state >> 40 ^ token_id) % 1000) / 7
    return TokenLogprobs([token_id], [value], rank=1 + state % 5)
