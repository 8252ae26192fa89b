"""Decides what one step computes for prefilling requests: their shares of the budget, their blocks, and the
counters."""

from octavo.core_proc.cache.prefix import PrefixCache
from octavo.core_proc.encoder_schedule import EncoderSchedule
from octavo.core_proc.request import Request
from octavo.core_proc.scheduler.batch import RunningBatch
from octavo.core_proc.scheduler.budget import PromptBudget, first_chunk
from octavo.core_proc.scheduler.delta import StepBuilder
from octavo.protocol.stats import EngineStats


class Prefill:
    """Computes prompts, and tokens whose KV was lost in a preemption.

    Args:
        cache: allocates blocks.
        batch: the running requests.
        counters: token counters; updated.
        max_chunk: most tokens of one request in one step; 0: no limit.
        is_whole: whether each prompt must be computed in one step, because its tokens attend to later ones.
        encoder: schedules media encoding. None if the model reads only tokens.
        max_step_tokens: most tokens of a step, independent of the builder's remaining budget.
    """

    def __init__(
        self,
        cache: PrefixCache,
        batch: RunningBatch,
        counters: EngineStats,
        max_chunk: int,
        *,
        is_whole: bool = False,
        encoder: EncoderSchedule | None = None,
        max_step_tokens: int = 0,
    ) -> None:
        self._cache = cache
        self._batch = batch
        self._counters = counters
        self._max_chunk = max_chunk
        self._is_whole = is_whole
        self._encoder = encoder
        self._max_step_tokens = max_step_tokens
        self._max_windows = sum([group.max_held for group in cache.groups.windowed])
        """Most blocks of one request that sliding windows hold. A started request gets hits only while this many blocks
        are spare: hits may occupy blocks reserved for later tokens, whose windows will need them again."""

    def run(self, builder: StepBuilder, prompts: PromptBudget) -> None:
        """Give every request its share of the budget, then distribute the remaining tokens in order."""
        requests = list(self._batch.prefilling)
        are_short = [prompts.is_short(request.num_uncomputed_tokens) for request in requests]
        has_windows, num_spare = self._cache.has_windows, None
        for request, is_short in zip(requests, are_short, strict=True):
            if not has_windows or not request.num_blocks:
                self.attach_hits(request)
            else:
                # perf: computing tokens only consumes reserved blocks, so this number changes only with hits.
                num_spare = self._num_spare_blocks() if num_spare is None else num_spare
                if num_spare >= self._max_windows and self.attach_hits(request):
                    num_spare = None
            num_uncomputed = request.num_uncomputed_tokens
            chunk = first_chunk(
                request.num_computed_tokens,
                num_uncomputed,
                prompts.share(num_uncomputed, builder.num_tokens_left, is_short=is_short),
                self._limit(builder, request),
                self._cache.block_size,
            )
            self._compute(builder, request, chunk)
        if prompts.has_leftover(builder.num_tokens_left):
            for request in requests:
                self._compute(builder, request, min(request.num_uncomputed_tokens, self._limit(builder, request)))

    def can_complete(self, request: Request, num_tokens: int) -> bool:
        """Return whether one step with this many prompt tokens can complete the request."""
        most = self._cache.max_chunk(request, request.num_computed_tokens)
        limit = min(num_tokens, self._max_chunk or num_tokens, num_tokens if most is None else most)
        return request.num_uncomputed_tokens <= limit

    def _num_spare_blocks(self) -> int:
        """Return how many free blocks are not needed by the tokens of running requests."""
        return self._cache.pool.num_free - self._batch.num_reserved_blocks

    def attach_hits(self, request: Request) -> bool:
        """Attach cached blocks, including blocks that other requests have computed since this one started.

        Returns:
            Whether any were attached.
        """
        start = request.num_computed_tokens
        num_tokens = self._cache.attach_hits(request)
        if not num_tokens:
            return False
        self._batch.grown[request] = None
        if request.is_first_run:
            num_prompt_tokens = max(0, min(start + num_tokens, request.num_prompt_tokens) - start)
            request.num_cached_tokens += num_prompt_tokens
            num_loaded = min(self._cache.num_loaded_tokens, num_prompt_tokens)
            self._counters.prefix_cache_hits += num_prompt_tokens - num_loaded
            self._counters.external_prefix_cache_hits += num_loaded
            self._counters.prompt_tokens += num_prompt_tokens
        return True

    def _limit(self, builder: StepBuilder, request: Request) -> int:
        """Return how many more tokens of the request this step may compute."""
        limit, num_planned = builder.num_tokens_left, builder.num_tokens_of(request)
        most = self._cache.max_chunk(request, request.num_computed_tokens - num_planned)
        if most is not None:
            limit = min(limit, most)
        return min(limit, self._max_chunk - num_planned) if self._max_chunk else limit

    def _compute(self, builder: StepBuilder, request: Request, num_tokens: int) -> None:
        """Add tokens of a request to the step and allocate their blocks."""
        if num_tokens <= 0 or (self._is_whole and num_tokens < request.num_uncomputed_tokens):
            return
        if request.media and self._encoder is not None:
            num_tokens = self._with_whole_spans(builder, request, num_tokens)
            num_tokens = self._encoder.admit(request, num_tokens) if num_tokens else 0
            if num_tokens == 0:
                return
        start, end = request.num_computed_tokens, request.num_computed_tokens + num_tokens
        self._cache.extend(request, end)
        self._batch.grown[request] = None
        if request.is_first_run:
            self._counters.prompt_tokens += max(0, min(end, request.num_prompt_tokens) - start)
        self._counters.num_recomputed_tokens += max(0, min(end, request.num_lost_tokens) - start)
        builder.compute(request, num_tokens)
        self._cache.cache_full_blocks(request)

    def _with_whole_spans(self, builder: StepBuilder, request: Request, num_tokens: int) -> int:
        """Return how many tokens to compute so that no bidirectionally attending span is split.

        A span may exceed the request's share and the builder's remaining budget. Shares are only goals: a request with
        a longer span would otherwise wait forever.
        """
        start = request.num_computed_tokens
        spans = [span for item in request.media if item.is_both_ways for span in item.spans]
        for position, num_rows in spans:
            if position < start + num_tokens < position + num_rows:
                num_whole, num_left = position + num_rows - start, self._max_step_tokens - builder.num_tokens
                if self._max_chunk:
                    num_left = min(num_left, self._max_chunk - builder.num_tokens_of(request))
                return num_whole if num_whole <= num_left else max(0, position - start)
        return num_tokens
