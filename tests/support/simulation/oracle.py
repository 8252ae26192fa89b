"""The expected answer to every request of a scenario, computed from the request alone without code of the engine.

Shares two functions of the model with the simulated worker, and nothing with scheduler, cache or grammars.
"""

from dataclasses import dataclass

from octavo.protocol.config import CachePlan
from octavo.protocol.events import FailureKind, FinishReason, PooledOutput, TokenLogprobs
from octavo.protocol.params import PoolingSpec
from octavo.protocol.requests import Submit
from simulation.grammar import WRONG, Language
from simulation.media import seen
from simulation.model import DAMAGED_MARK, draw, extend_states, logprob, next_state, root_state, vector


@dataclass(frozen=True)
class Answer:
    """The undisturbed answer to a request."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs | None] | None
    reason: FinishReason
    stop_token_id: int | None = None
    vector: PooledOutput | None = None


def rejection(submit: Submit, plan: CachePlan) -> FailureKind | None:
    """Return the kind of failure of a request that can never be served, None if it can be served.

    A scenario's cache has room for the longest request that the model can serve.
    """
    num_prompt = len(submit.prompt_token_ids)
    if num_prompt >= plan.max_model_len + isinstance(submit.params, PoolingSpec):  # no output follows a vector
        return FailureKind.INVALID
    if submit.grammar is not None and submit.grammar.text == WRONG:
        return FailureKind.INVALID
    if submit.adapter is not None and submit.adapter.digest.startswith(DAMAGED_MARK):
        return FailureKind.INVALID
    return None


def answer(submit: Submit, vocab_size: int, max_model_len: int) -> Answer:
    """Return the only correct answer to a request that can be served."""
    if not isinstance(submit.params, PoolingSpec):
        return _generated(submit, vocab_size, max_model_len)
    states = list[int]()
    root = root_state(submit.request_id, submit.adapter.digest if submit.adapter else "")
    extend_states(states, seen(submit.request_id, submit.prompt_token_ids), root)
    return Answer([], [], None, FinishReason.STOP, vector=vector(states, submit.params))


def _generated(submit: Submit, vocab_size: int, max_model_len: int) -> Answer:
    sampling, digest = submit.params, submit.adapter.digest if submit.adapter else ""
    root = root_state(submit.request_id, digest)
    num_prompt = len(submit.prompt_token_ids)
    token_ids, states = list(submit.prompt_token_ids), list[int]()
    extend_states(states, seen(submit.request_id, token_ids), root)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    if sampling.prompt_logprobs is not None:
        prompt_logprobs = [None, *(logprob(states[i - 1], token_ids[i]) for i in range(1, num_prompt))]
    language = Language.parse(submit.grammar.text) if submit.grammar is not None else None
    marker = submit.grammar.start_after if submit.grammar is not None else b""
    num_bound = 0 if language is not None and not marker else -1
    """Outputs within the language; -1 while the output is free."""
    ends = (*sampling.eos_token_ids, *sampling.stop_token_ids)
    logprobs: list[TokenLogprobs] = []

    def result(reason: FinishReason, stop_token_id: int | None = None) -> Answer:
        shown = logprobs if sampling.logprobs is not None else []
        return Answer(token_ids[num_prompt:], shown, prompt_logprobs, reason, stop_token_id)

    while True:
        num_outputs = len(token_ids) - num_prompt
        mask = None
        if language is not None and num_bound >= 0:
            mask = _mask(vocab_size, _fitting(language, num_bound, ends, vocab_size))
        elif language is not None:  # free text before the marker, in which nothing ends but by a stop token
            mask = _mask(vocab_size, set(range(vocab_size)).difference(sampling.eos_token_ids))
        token_id = draw(states[-1], len(token_ids), num_outputs, sampling, vocab_size, mask)
        logprobs.append(logprob(states[-1], token_id))
        token_ids.append(token_id)
        states.append(next_state(states[-1], token_id))
        num_outputs += 1
        if num_outputs > sampling.min_tokens and token_id in ends:
            is_stop_token = token_id not in sampling.eos_token_ids
            return result(FinishReason.STOP, token_id if is_stop_token else None)
        if language is not None:
            if num_bound >= 0:
                num_bound += 1
            elif token_id == marker[0]:
                num_bound = 0
            if num_bound == language.high:
                return result(FinishReason.STOP)
        if num_outputs == sampling.max_tokens or len(token_ids) == max_model_len:
            return result(FinishReason.LENGTH)


def _fitting(language: Language, position: int, ends: tuple[int, ...], vocab_size: int) -> set[int]:
    fitting = {token_id for token_id in range(vocab_size) if language.allows(position, token_id)}
    return fitting.union(ends) if position >= language.low else fitting


def _mask(vocab_size: int, allowed: set[int]) -> bytes:
    mask = bytearray(4 * -(-vocab_size // 32))
    for token_id in allowed:
        mask[token_id >> 3] |= 1 << (token_id & 7)
    return bytes(mask)
