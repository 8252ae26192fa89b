"""Decides which requests are rejected at once: those that can never be served, and those for which the queue is full.

`rules.py` decides when an accepted request starts.
"""

from octavo.core_proc.cache.groups import CacheGroups
from octavo.core_proc.scheduler.waiting_queue import WaitingQueue
from octavo.protocol.adapters import Adapter
from octavo.protocol.alignment import MAX_FILTER_WIDTH, AlignmentSpec, is_filter_width
from octavo.protocol.config import CachePlan, ResolvedConfig
from octavo.protocol.events import Failed, FailureKind
from octavo.protocol.ids import are_below
from octavo.protocol.media import MediaItem, given_fault, media_fault
from octavo.protocol.params import PoolingSpec, SamplingSpec
from octavo.protocol.pooling import TOKEN_TASKS
from octavo.protocol.prompt_embeds import PromptEmbeds
from octavo.protocol.requests import Submit
from octavo.protocol.sampling_table import ROWS

_ROWS = [row for row in ROWS if row.engine_range is not None or row.token_ids is not None]
"""Parameters with values that no worker could compute with."""


class RejectionRules:
    """The fixed limits of this engine, and the limits of its queue."""

    def __init__(self, config: ResolvedConfig, cache_plan: CachePlan, groups: CacheGroups) -> None:
        self._vocab_size = config.model.vocab_size
        self._pooling = config.model.pooling
        self._lora = config.lora
        self._max_num_queued_reqs = config.max_num_queued_reqs
        self._max_num_queued_tokens = config.max_num_queued_tokens
        self._max_model_len = cache_plan.max_model_len
        self._embedding_bytes = config.embedding_bytes if config.enable_prompt_embeds else 0
        self._media, self._num_heads = config.media, config.model.num_heads
        self._dtype = config.dtype
        self._given_width = config.media_row_width if config.media is not None and config.media.takes_embeds else 0
        self._num_cache_tokens = groups.longest_request(cache_plan.num_blocks, cache_plan.max_model_len)

    def rejection(self, submit: Submit, waiting: WaitingQueue) -> Failed | None:
        """Return why the request is rejected. Return None if it is accepted."""
        if overload := self._overload(submit, waiting):
            message, limit = overload
            return Failed(submit.request_id, FailureKind.OVERLOADED, message + "; try again later", limit)
        if isinstance(submit.params, SamplingSpec):
            fault = self._generation_fault(submit, submit.params)
        elif isinstance(submit.params, PoolingSpec):
            fault = self._pooling_fault(submit, submit.params)
        else:
            fault = self._alignment_fault(submit, submit.params)
        fault = fault or self._adapter_fault(submit.adapter)
        return fault and Failed(submit.request_id, FailureKind.INVALID, fault[0], fault[1])

    def _overload(self, submit: Submit, waiting: WaitingQueue) -> tuple[str, str] | None:
        """Return the error message and the name of the queue limit that is reached. Return None if there is room."""
        if submit.is_continued:
            return None
        if self._max_num_queued_reqs and len(waiting) >= self._max_num_queued_reqs:
            message = f"{len(waiting)} requests are waiting, which is the limit (--max-num-queued-reqs)"
            return message, "max_num_queued_reqs"
        # An empty queue takes a request of any length, because it could never be accepted otherwise.
        num_tokens = waiting.num_prompt_tokens + len(submit.prompt_token_ids)
        if waiting and 0 < self._max_num_queued_tokens < num_tokens:
            message = (
                f"{waiting.num_prompt_tokens} prompt tokens wait, and with the {len(submit.prompt_token_ids)} of "
                f"this request there would be more than {self._max_num_queued_tokens} (--max-num-queued-tokens)"
            )
            return message, "max_num_queued_tokens"
        return None

    def _generation_fault(self, submit: Submit, sampling: SamplingSpec) -> tuple[str, str] | None:
        if self._pooling is not None:
            tasks = ", ".join(self._pooling.tasks)
            return f"this engine generates no tokens: its model is for {tasks} (--runner pooling)", "task"
        tokens = submit.prompt_token_ids
        if prompt_fault := self._prompt_fault(submit):
            return prompt_fault
        if len(tokens) >= self._max_model_len:
            return (
                f"the prompt has {len(tokens)} tokens, and at least one output token must follow, but the model's "
                f"length limit is {self._max_model_len} (--max-model-len)",
                "prompt",
            )
        if not are_below(submit.resume_output_token_ids, self._vocab_size):
            return f"output token ids must be from 0 to {self._vocab_size - 1}", "resume_output_token_ids"
        if submit.prompt_embeds is not None and (fault := self._embeds_fault(submit.prompt_embeds, submit)):
            return fault, "prompt_embeds"
        has_media = submit.media or (self._media is not None and self._media.attended_rows)
        if has_media and (fault := self._media_fault(submit.media, submit)):
            return fault, "multi_modal_data"
        # The last token of a sequence is never computed, so it needs no place in the cache.
        num_held = min(len(tokens) + sampling.max_tokens, self._max_model_len) - 1
        if num_held > self._num_cache_tokens:
            return (
                f"prompt and max_tokens together need {num_held} tokens of KV cache, "
                f"which holds {self._num_cache_tokens} in all",
                "max_tokens",
            )
        return self._sampling_fault(sampling)

    def _pooling_fault(self, submit: Submit, spec: PoolingSpec) -> tuple[str, str] | None:
        facts, num_tokens = self._pooling, len(submit.prompt_token_ids)
        if facts is None or spec.task not in facts.tasks:
            tasks = "generates tokens" if facts is None else f"is for {' and '.join(facts.tasks)}"
            return f"the model of this engine {tasks}, and has no task {spec.task!r}", "task"
        if fault := self._prompt_fault(submit):
            return fault
        limit = min(self._max_model_len, self._num_cache_tokens)
        if num_tokens > limit:
            return f"the prompt has {num_tokens} tokens, and the limit is {limit} (--max-model-len)", "prompt"
        is_by_token = spec.task in TOKEN_TASKS
        if is_by_token != (spec.pooling in ("all", "step")):
            return f"the task {spec.task} cannot be pooled by {spec.pooling!r}", "pooling"
        if not 0 <= spec.segment_start < num_tokens or (spec.segment_start and facts.num_segments < 2):
            return f"segment_start must be below the {num_tokens} tokens of the prompt", "segment_start"
        if not all(0 <= index < facts.num_labels for index in spec.returned_token_ids):
            return f"returned_token_ids must be from 0 to {facts.num_labels - 1}", "returned_token_ids"
        if spec.dimensions < 0:
            return f"dimensions must not be negative, got {spec.dimensions}", "dimensions"
        if not (spec.skip_reading_prefix_cache or spec.pooling == "last"):
            message = f"{spec.pooling!r} needs the hidden states of all tokens, which the prefix cache does not have"
            return message, "skip_reading_prefix_cache"
        if submit.media and (media_fault := self._pooled_media_fault(submit, spec)):
            return media_fault, "multi_modal_data"
        return _output_fault(submit)

    def _pooled_media_fault(self, submit: Submit, spec: PoolingSpec) -> str | None:
        if message := self._media_fault(submit.media, submit):
            return message
        is_alone = len(submit.media) == 1 and submit.media[0].num_rows == len(submit.prompt_token_ids) == 1
        if self._media is not None and self._media.vector_width and (not is_alone or spec.task != "embed"):
            return "an image has one vector of its own: send it alone, with the task embed"
        return None

    def _alignment_fault(self, submit: Submit, spec: AlignmentSpec) -> tuple[str, str] | None:
        if self._media is None or not self._media.attended_rows:
            return "the model of this engine has no cross-attention to audio, so it cannot align text", "model"
        if fault := self._prompt_fault(submit):
            return fault
        num_tokens, limit = len(submit.prompt_token_ids), min(self._max_model_len, self._num_cache_tokens)
        if num_tokens > limit:
            return f"the text has {num_tokens} tokens, and the limit is {limit} (--max-model-len)", "prompt"
        layers = self._media.aligned_layers
        are_there = [layer in layers and 0 <= head < self._num_heads for layer, head in spec.heads]
        if not are_there or not all(are_there):
            return f"heads must be of the layers {layers} with {self._num_heads} heads each", "heads"
        if not 0 <= spec.first < num_tokens:
            return f"first must be below the {num_tokens} tokens of the text", "first"
        if not 0 < spec.num_rows <= self._media.attended_rows:
            return f"num_rows must be from 1 to {self._media.attended_rows}", "num_rows"
        if not is_filter_width(spec.filter_width):
            return f"filter_width must be odd, and at most {MAX_FILTER_WIDTH}", "filter_width"
        if message := self._media_fault(submit.media, submit):
            return message, "multi_modal_data"
        return _output_fault(submit)

    def _prompt_fault(self, submit: Submit) -> tuple[str, str] | None:
        if not submit.prompt_token_ids:
            return "the prompt is empty: at least one token is needed", "prompt"
        if not are_below(submit.prompt_token_ids, self._vocab_size):
            return f"prompt token ids must be from 0 to {self._vocab_size - 1}", "prompt"
        return None

    def _adapter_fault(self, adapter: Adapter | None) -> tuple[str, str] | None:
        if adapter is None:
            return None
        if self._lora is None:
            return f"this engine serves no LoRA adapters, so not {adapter.name!r}: start it with --enable-lora", "model"
        if not 0 < adapter.rank <= self._lora.max_rank:
            limit = f"the limit is {self._lora.max_rank} (--max-lora-rank)"
            return f"the adapter {adapter.name!r} has rank {adapter.rank}, but {limit}", "model"
        return None

    def _embeds_fault(self, embeds: PromptEmbeds, submit: Submit) -> str | None:
        if not self._embedding_bytes:
            return "this engine takes no prompt_embeds: start it with --enable-prompt-embeds"
        if isinstance(submit.params, SamplingSpec) and submit.params.prompt_logprobs is not None:
            return "prompt_logprobs cannot be computed for prompt_embeds, which have no tokens: leave one of them out"
        return embeds.fault(len(submit.prompt_token_ids), self._embedding_bytes)

    def _media_fault(self, items: list[MediaItem], submit: Submit) -> str | None:
        if self._media is None:
            return "the model of this engine reads text only"
        if submit.prompt_embeds is not None:
            return "a prompt has prompt_embeds or media, not both"
        most = self._media.max_item_tokens
        if (largest := max([item.num_rows for item in items], default=0)) > most:
            return f"an item has {largest} rows, and the limit is {most} (--max-num-encoder-tokens)"
        fault = media_fault(items, len(submit.prompt_token_ids), self._media.limits, self._media.attended_rows)
        return fault or given_fault(items, self._dtype, self._given_width)

    def _sampling_fault(self, sampling: SamplingSpec) -> tuple[str, str] | None:
        """Check what frontends check too: one bad value would fail every request of its step."""
        if sampling.max_tokens < 1:
            return f"max_tokens must be at least 1, got {sampling.max_tokens}", "max_tokens"
        for row in _ROWS:
            if fault := row.engine_fault(getattr(sampling, row.name), self._vocab_size):
                return fault, row.name
        if min(sampling.eos_token_ids, default=0) < 0:  # ids beyond the vocabulary are never sampled and do no harm
            return "the token ids of eos_token_ids must not be negative", "eos_token_ids"
        for name, value in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
            # --max-logprobs limits callers. A frontend's beam search may need more: as many as its beam width.
            if value is not None and not 0 <= value <= self._vocab_size:
                return f"{name} must be from 0 to {self._vocab_size}, got {value}", name
        if sampling.prompt_logprobs is not None and not sampling.skip_reading_prefix_cache:
            return (
                "prompt_logprobs needs skip_reading_prefix_cache: cached positions have no logits",
                "skip_reading_prefix_cache",
            )
        if sampling.prompt_logprob_token_ids and sampling.prompt_logprobs is None:
            return "prompt_logprob_token_ids needs prompt_logprobs", "prompt_logprob_token_ids"
        if sampling.repetition is not None and (fault := sampling.repetition.fault):
            return f"repetition_detection: {fault}", "repetition_detection"
        return None


def _output_fault(submit: Submit) -> tuple[str, str] | None:
    if submit.grammar is not None or submit.prompt_embeds is not None or submit.resume_output_token_ids:
        return "a request without output tokens has no grammar, no prompt embeddings and no outputs", "prompt"
    return None
