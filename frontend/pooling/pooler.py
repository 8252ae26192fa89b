"""`Pooler`: computes vectors, classes and scores of any number of prompts on the engines of a client."""

import itertools
import secrets
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec

from octavo.frontend.generation.limits import check_cache_salt
from octavo.frontend.generation.live import LiveRequests
from octavo.frontend.generation.media import has_media
from octavo.frontend.media.prompts import PromptMaker
from octavo.frontend.metrics.call import effective_priority
from octavo.frontend.pooling.batch import CHUNK, WINDOW, PoolingBatch
from octavo.frontend.pooling.inputs import Fields, PoolingInput, PoolingPrompt, PoolingTokenizer
from octavo.frontend.pooling.result import PooledResult
from octavo.frontend.pooling.spec import make_pooling_spec
from octavo.frontend.routing.base import RequestLink
from octavo.frontend.text.threads import TextThreads
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.protocol.adapters import Adapter
from octavo.protocol.alignment import AlignmentSpec
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.ids import pack_ids
from octavo.protocol.media import MediaItem
from octavo.protocol.pooling import PoolingTask
from octavo.protocol.pooling_params import PoolingParams
from octavo.protocol.requests import Submit


class Pooler:
    """Prepares and runs pooling requests for engines of one model.

    Args:
        link: to the engines.
        tokenizer: tokenizer of the model.
        config: configuration of the engines.
        threads: for long texts.
        live: the client's requests.
        check_priority: rejects a priority that has no effect.
        media: makes prompts with media. `None` if the model reads text only.
    """

    def __init__(
        self,
        link: RequestLink,
        tokenizer: Tokenizer,
        config: ResolvedConfig,
        threads: TextThreads,
        live: LiveRequests,
        check_priority: Callable[[int], None],
        media: PromptMaker | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self._link = link
        self.threads, self.media = threads, media
        self._live = live
        self._check_priority = check_priority
        self._prefix = f"p{secrets.token_hex(4)}"
        self._counter = itertools.count()

    # long: a line for each argument
    async def run(
        self,
        prompts: Sequence[PoolingPrompt],
        params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        task: PoolingTask | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: Adapter | None = None,
        fields: Fields = Fields("prompt"),
        add_special_tokens: bool = True,
        window: int = WINDOW,
        on_progress: Callable[[int], object] | None = None,
    ) -> list[PooledResult]:
        """Return one result per prompt, in order.

        Args:
            prompts: texts, token ids, pairs of texts, or prompts with media. They are tokenized, and their media
                processed, shortly before they are sent to the engine.
            params: for all prompts, or one per prompt. `None`: the model's defaults.
            task: task of the caller's method. `None`: the task of `params`, or else the model's default task.
            request_id: shown in the results and accepted by `AsyncClient.abort`.
            priority: as in `AsyncClient.generate`.
            cache_salt: as in `AsyncClient.generate`.
            adapter: the LoRA adapter.
            fields: names of the request fields, for errors.
            add_special_tokens: add the model's special tokens to texts.
            window: maximum number of prompts in the engine.
            on_progress: called with the number of results that have arrived at once.

        Raises:
            InvalidRequestError: a prompt or a parameter is invalid, or the engine generates text.
            OctavoError: the engine rejected a prompt or gave up on it. All prompts of the call were aborted.
        """
        params = params or PoolingParams()
        each = [params] * len(prompts) if isinstance(params, PoolingParams) else list(params)
        specs = {id(one): make_pooling_spec(one, self.config, task) for one in each}
        if not prompts:
            return []
        if self._link.failure:
            raise self._link.failure
        self._check_priority(priority)
        check_cache_salt(cache_salt)
        if adapter is not None and adapter.is_soft_prompt:
            raise InvalidRequestError(f"pooling takes no soft prompt, as {adapter.name!r} is", "model")

        def submit(one: PoolingInput, own: PoolingParams) -> Submit:
            spec = specs[id(own)]
            if one.segment_start:
                spec = msgspec.structs.replace(spec, segment_start=one.segment_start)
            return Submit(
                self._next_id(self._prefix),
                one.token_ids,
                spec,
                effective_priority(priority),
                cache_salt,
                adapter,
                media=list(one.media),
            )

        tokenizer = PoolingTokenizer(
            self.tokenizer,
            self.config,
            self.threads,
            self.media,
            self._link.facts.max_model_len,
            fields,
            add_special_tokens,
            cache_salt,
        )
        chunks = _chunks(prompts, each, tokenizer, submit)
        if any(map(has_media, prompts)):
            window = CHUNK  # processed media take a few megabytes of memory each
        batch = PoolingBatch(
            self._link, self._live, request_id or self._next_id("pool"), chunks, max(window, CHUNK), on_progress
        )
        return await batch.run()

    async def align(self, token_ids: Sequence[int], items: Sequence[MediaItem], spec: AlignmentSpec) -> PooledResult:
        """Compute when the tokens of a text are spoken; see `AlignmentSpec`.

        Args:
            token_ids: token ids of the text.
            items: the audio that the text attends to.
            spec: spec of the alignment.

        Raises:
            OctavoError: the engine rejected the text or gave up on it.
        """
        if self._link.failure:
            raise self._link.failure
        submit = Submit(
            self._next_id(self._prefix),
            pack_ids(token_ids),
            spec,
            effective_priority(0),
            is_continued=True,  # belongs to a request that was already accepted, and takes its place in the queue
            media=list(items),
        )

        async def chunks() -> AsyncIterator[list[Submit]]:
            yield [submit]

        request_id = self._next_id("align")
        batch = PoolingBatch(self._link, self._live, request_id, chunks(), CHUNK, counts_for_call=False)
        (result,) = await batch.run()
        return result

    def _next_id(self, prefix: str) -> str:
        return f"{prefix}:{next(self._counter)}"


async def _chunks(
    prompts: Sequence[PoolingPrompt],
    params: list[PoolingParams],
    tokenizer: PoolingTokenizer,
    submit: Callable[[PoolingInput, PoolingParams], Submit],
) -> AsyncIterator[list[Submit]]:
    """Yield the submissions of a few prompts at a time; prompts with equal parameters are tokenized together."""
    start = 0
    while start < len(prompts):
        own = params[start]
        end = start + 1
        while end < min(len(prompts), start + CHUNK) and params[end] is own:
            end += 1
        yield [submit(one, own) for one in await tokenizer.inputs(prompts[start:end], own, start)]
        start = end
