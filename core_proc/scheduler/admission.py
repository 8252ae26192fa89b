"""Which requests are accepted at all: what can never be served is refused before it is queued.

Does not decide when an accepted request runs.
"""

import sys

from octavo.core_proc.scheduler.policy import OrderedRequests
from octavo.protocol.config import CachePlan, ResolvedConfig
from octavo.protocol.events import Failed, FailureKind
from octavo.protocol.requests import Submit

_LARGEST = sys.float_info.max

_RANGES: dict[str, tuple[float, float]] = {
    "seed": (0, 2**64 - 1),
    "temperature": (0.0, _LARGEST),
    "top_k": (0, 2**63 - 1),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-_LARGEST, _LARGEST),
    "frequency_penalty": (-_LARGEST, _LARGEST),
    "repetition_penalty": (sys.float_info.min, _LARGEST),
    "min_tokens": (0, 2**63 - 1),
}
"""What a worker can compute with; not a number is in none of them."""


class Admission:
    """The limits of this engine, as a request meets them."""

    def __init__(self, config: ResolvedConfig, plan: CachePlan) -> None:
        self._vocab_size = config.model.vocab_size
        self._max_num_queued_reqs = config.max_num_queued_reqs
        self._max_num_queued_tokens = config.max_num_queued_tokens
        self._max_model_len = plan.max_model_len
        self._num_cache_tokens = plan.num_tokens

    def refusal(self, submit: Submit, waiting: OrderedRequests) -> Failed | None:
        """Return why the request is refused, None when it is accepted."""
        if overload := self._overload(submit, waiting):
            message, limit = overload
            return Failed(submit.request_id, FailureKind.OVERLOADED, message + "; try again later", limit)
        fault = self._prompt_fault(submit) or self._sampling_fault(submit)
        return fault and Failed(submit.request_id, FailureKind.INVALID, fault[0], fault[1])

    def _overload(self, submit: Submit, waiting: OrderedRequests) -> tuple[str, str] | None:
        """Return which limit of the queue is reached, in words and by its name."""
        if submit.is_continued:
            return None
        if self._max_num_queued_reqs and len(waiting) >= self._max_num_queued_reqs:
            message = f"{len(waiting)} requests are waiting, which is the limit (--max-num-queued-reqs)"
            return message, "max_num_queued_reqs"
        # One that would wait alone is accepted however long it is: else it never could be.
        num_tokens = waiting.num_prompt_tokens + len(submit.prompt_token_ids)
        if waiting.first and 0 < self._max_num_queued_tokens < num_tokens:
            message = (
                f"{waiting.num_prompt_tokens} prompt tokens wait, and with the {len(submit.prompt_token_ids)} of "
                f"this request there would be more than {self._max_num_queued_tokens} (--max-num-queued-tokens)"
            )
            return message, "max_num_queued_tokens"
        return None

    def _prompt_fault(self, submit: Submit) -> tuple[str, str] | None:
        tokens = submit.prompt_token_ids
        if not tokens:
            return "the prompt is empty: at least one token is needed", "prompt"
        if not 0 <= min(tokens) <= max(tokens) < self._vocab_size:
            return f"prompt token ids must be from 0 to {self._vocab_size - 1}", "prompt"
        resumed = submit.resume_output_token_ids
        if resumed and not 0 <= min(resumed) <= max(resumed) < self._vocab_size:
            return f"output token ids must be from 0 to {self._vocab_size - 1}", "resume_output_token_ids"
        if len(tokens) >= self._max_model_len:
            return (
                f"the prompt has {len(tokens)} tokens, and at least one output token must follow, but the model's "
                f"length limit is {self._max_model_len} (--max-model-len)",
                "prompt",
            )
        # The last token of a sequence is never computed, so it needs no place in the cache.
        num_held = min(len(tokens) + submit.sampling.max_tokens, self._max_model_len) - 1
        if num_held > self._num_cache_tokens:
            return (
                f"prompt and max_tokens together need {num_held} tokens of KV cache, "
                f"which holds {self._num_cache_tokens} in all",
                "max_tokens",
            )
        return None

    def _sampling_fault(self, submit: Submit) -> tuple[str, str] | None:
        """Find what frontends refuse too: whatever slips through would end every request, not just this one."""
        sampling = submit.sampling
        if sampling.max_tokens < 1:
            return f"max_tokens must be at least 1, got {sampling.max_tokens}", "max_tokens"
        for name, (low, high) in _RANGES.items():
            if not low <= getattr(sampling, name) <= high:
                return f"{name} must be from {low:g} to {high:g}, got {getattr(sampling, name)}", name
        for name, value in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
            # --max-logprobs binds callers, not frontends, whose beam searches need as many as they are wide.
            if value is not None and not 0 <= value <= self._vocab_size:
                return f"{name} must be from 0 to {self._vocab_size}, got {value}", name
        if sampling.prompt_logprobs is not None and not sampling.skip_reading_prefix_cache:
            return (
                "prompt_logprobs needs skip_reading_prefix_cache: cached positions have no logits",
                "skip_reading_prefix_cache",
            )
        if sampling.repetition is not None and (fault := sampling.repetition.fault):
            return f"repetition_detection: {fault}", "repetition_detection"
        biased = [token_id for token_id, _ in sampling.logit_bias]
        for name, token_ids in (
            ("logit_bias", biased),
            ("stop_token_ids", sampling.stop_token_ids),
            ("allowed_token_ids", sampling.allowed_token_ids),
            ("logprob_token_ids", sampling.logprob_token_ids),
            ("bad_words", [token_id for word in sampling.bad_words for token_id in word or (-1,)]),
        ):
            if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
                return f"the token ids of {name} must be from 0 to {self._vocab_size - 1}", name
        return None
