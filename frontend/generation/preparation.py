"""`RequestPreparer`: turns a prompt and parameters into a generation that is ready to start."""

import asyncio
import dataclasses
import functools
import itertools
import secrets
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any

import msgspec

from octavo.frontend.generation.beam_generation import BeamGeneration
from octavo.frontend.generation.beam_search import BeamSearch
from octavo.frontend.generation.chat_embeds import MARK, PARTS, EmbedsPart, with_rows
from octavo.frontend.generation.embeds import decode_embeds, embeds_of, require_embeds
from octavo.frontend.generation.fanout import SEQUENCES_AT_ONCE, Generation
from octavo.frontend.generation.grammar_maker import GrammarMaker
from octavo.frontend.generation.interval import stream_interval
from octavo.frontend.generation.limits import check_cache_salt, check_volume
from octavo.frontend.generation.live import LiveRequests
from octavo.frontend.generation.media import has_media, make_prompt
from octavo.frontend.generation.prompt import Prompt, TokenizedPrompt, packed_prompt, parts_of
from octavo.frontend.generation.sequence import Sequence
from octavo.frontend.generation.soft_prompt import SoftPrompts
from octavo.frontend.generation.spec import (
    child_seed,
    default_params,
    make_beam_spec,
    make_spec,
    output_kind,
    request_seed,
)
from octavo.frontend.media.prompts import PromptMaker
from octavo.frontend.media.sources import FIELD
from octavo.frontend.metrics.call import effective_priority
from octavo.frontend.pooling.spec import require_generation
from octavo.frontend.routing.base import PrefillingLink
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.frontend.wake_event import WakeEvent
from octavo.protocol.adapters import Adapter
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.ids import pack_ids
from octavo.protocol.kv_transfer import PARAMS, KVTransfer, read_transfer_params
from octavo.protocol.params import BeamSearchParams, OutputKind, SamplingParams, SamplingSpec
from octavo.protocol.prompt_embeds import PromptEmbeds
from octavo.protocol.requests import Submit
from octavo.protocol.structured import GrammarSpec

MANY_TOKEN_IDS = 4096
"""Requests with more token ids are prepared in a thread: sorting and checking the ids takes milliseconds."""

NO_PROMPT_LOGPROBS = (
    "prompt_logprobs, prompt_logprob_token_ids and echo need tokens, which prompt_embeds and soft prompts have not: "
    "leave them out"
)


class RequestPreparer:
    """Validates requests for one engine, and assigns ids, seeds and specs.

    Args:
        link: connection to the engine.
        tokenizer: the model's tokenizer.
        config: the engine's configuration.
        grammars: builds the grammars of structured outputs.
        encode: tokenizes a text, in a thread if it is long: see `AsyncClient.tokenize`.
        live: the client's live requests; a generation is one of them while its context is entered.
        media: makes prompts with media; None: the model reads only text.
        media_adapter: returns the model's own adapter for a prompt with some kinds of media; None: the model has no
        adapter.
    """

    def __init__(
        self,
        link: PrefillingLink,
        tokenizer: Tokenizer,
        config: ResolvedConfig,
        grammars: GrammarMaker,
        encode: Callable[..., Awaitable[list[int]]],
        live: LiveRequests,
        media: PromptMaker | None = None,
        media_adapter: Callable[[Collection[str]], Awaitable[Adapter | None]] | None = None,
    ) -> None:
        self._link = link
        self._tokenizer = tokenizer
        self._config = config
        self._grammars = grammars
        self._encode = encode
        self._live = live
        self._media, self._media_adapter = media, media_adapter
        self._soft_prompts = SoftPrompts(config)
        self._prefix = secrets.token_hex(4)
        self._request_counter = itertools.count()
        self._child_counter = itertools.count()

    def wake_event(self) -> WakeEvent:
        """Return an event for one consumer, which may `start` several generations."""
        return WakeEvent(self._link.wake_queue)

    async def start(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        arrived: WakeEvent,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: Adapter | None = None,
    ) -> Generation:
        """Return a generation for one prompt, whose context must be entered at once.

        Args:
            prompt: as in `AsyncClient.generate`.
            params: as in `AsyncClient.generate`.
            arrived: set whenever the generation may have an output to take.
            request_id: as in `AsyncClient.generate`.
            priority: as in `AsyncClient.generate`.
            cache_salt: as in `AsyncClient.generate`.
            adapter: the LoRA adapter or soft prompt to use.

        Raises:
            InvalidRequestError: the request is invalid; the error names the field and the remedy.
            EngineDeadError: the engine has died.
        """
        params = params or default_params(self._config, SamplingParams().max_tokens)
        if not isinstance(prompt, TokenizedPrompt):  # otherwise the server has just verified them
            params.verify()
        tokenized, cache_salt = await self.check_prompt(prompt, priority, cache_salt)
        if adapter is not None and adapter.is_soft_prompt:
            tokenized, adapter = await self._soft_prompts.prepend(tokenized, adapter), None
        adapter = adapter or await self._own_adapter(tokenized)
        num_prompt_tokens = len(tokenized.token_ids)
        check_volume(params, num_prompt_tokens, 1, self._config)
        for name in ("prompt_logprobs", "prompt_logprob_token_ids"):
            if tokenized.embeds is not None and getattr(params, name) is not None:
                raise InvalidRequestError(NO_PROMPT_LOGPROBS, name)
        request_id = request_id or self._next_request_id()
        seed = request_seed(self._config.seed, request_id) if params.seed is None else params.seed
        spec = await self._spec(params, num_prompt_tokens, child_seed(seed, 0))
        grammar = None if params.structured_outputs is None else await self._grammars.make(params.structured_outputs)
        kind = output_kind(params, OutputKind.DELTA)
        interval = stream_interval(params, kind, self._config)
        transfer = read_transfer_params((params.extra_args or {}).get(PARAMS))
        if transfer is not None and transfer.leaves and params.num_sequences > 1:
            raise InvalidRequestError(f"{PARAMS}: do_remote_decode is for one sequence: leave out n", PARAMS)
        children = []
        for index in range(params.num_sequences):
            if index and index % SEQUENCES_AT_ONCE == 0:
                await asyncio.sleep(0)
            own_spec = msgspec.structs.replace(spec, seed=child_seed(seed, index)) if index else spec
            submit = self._submission(tokenized, own_spec, priority, cache_salt, adapter, interval, grammar, transfer)
            keeps_all = kind is not OutputKind.DELTA
            sequence = Sequence(index, self._tokenizer, tokenized.tokens, params, own_spec, keeps_all=keeps_all)
            children.append((submit, sequence))
        moved = await self._link.prefill(children[0][0])
        if moved is not None:
            children = [(msgspec.structs.replace(one, kv_transfer=moved), sequence) for one, sequence in children]
        return Generation(self._link, request_id, tokenized.text, params, children, kind, arrived, self._live)

    async def beam_generation(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        request_id: str | None,
        priority: int,
        cache_salt: str | None,
        logprobs: int | None,
        adapter: Adapter | None = None,
    ) -> BeamGeneration:
        """Return a beam search for one prompt; see `AsyncClient.beam_search`.

        Raises:
            InvalidRequestError: the request is invalid; the error names the field and the remedy.
            EngineDeadError: the engine has died.
        """
        params.verify()
        tokenized, cache_salt = await self.check_prompt(prompt, priority, cache_salt)
        if tokenized.embeds is not None:
            raise InvalidRequestError("a beam search takes no prompt_embeds: send text or token ids", "prompt_embeds")
        if tokenized.media:
            raise InvalidRequestError("a beam search takes no media: leave them out", FIELD)
        if adapter is not None and adapter.is_soft_prompt:
            raise InvalidRequestError(f"a beam search takes no soft prompt, as {adapter.name!r} is", "model")
        search = BeamSearch(params, () if params.ignore_eos else self._config.model.eos_token_ids)
        spec = make_beam_spec(
            params,
            num_candidates=search.num_candidates,
            num_logprobs=logprobs,
            num_prompt_tokens=len(tokenized.token_ids),
            max_model_len=self._link.facts.max_model_len,
            config=self._config,
            tokenizer=self._tokenizer,
        )
        return BeamGeneration(
            self._link,
            request_id or self._next_request_id(),
            tokenized.text,
            list(tokenized.token_ids),
            params,
            search,
            lambda token_ids, is_continued: self._submission(
                TokenizedPrompt(None, pack_ids(token_ids), is_continued=is_continued),
                spec,
                priority,
                cache_salt,
                adapter,
            ),
            self._tokenizer,
            logprobs if logprobs != -1 else self._config.model.vocab_size,
            self._live.observer,
        )

    async def _spec(self, params: SamplingParams, num_prompt_tokens: int, seed: int) -> SamplingSpec:
        """Return the spec of a request; process long lists of token ids in a thread."""
        make = functools.partial(
            make_spec,
            params,
            num_prompt_tokens=num_prompt_tokens,
            max_model_len=self._link.facts.max_model_len,
            seed=seed,
            config=self._config,
            tokenizer=self._tokenizer,
        )
        return make() if params.num_token_ids <= MANY_TOKEN_IDS else await asyncio.to_thread(make)

    async def _own_adapter(self, prompt: TokenizedPrompt) -> Adapter | None:
        """Return the model's own adapter for the prompt's media, if the request names none; `None` if there is none."""
        if not prompt.media or self._media_adapter is None:
            return None
        return await self._media_adapter({item.kind for item in prompt.media})

    async def check_prompt(
        self, prompt: Prompt, priority: int, cache_salt: str | None
    ) -> tuple[TokenizedPrompt, str | None]:
        """Return the checked prompt, the text that its outputs show, and its salt."""
        if self._link.failure:
            raise self._link.failure
        self.check_priority(priority)
        require_generation(self._config)
        if isinstance(prompt, dict):
            cache_salt = cache_salt or prompt.get("cache_salt")
        check_cache_salt(cache_salt)
        if isinstance(prompt, TokenizedPrompt):
            return dataclasses.replace(prompt, text=None), cache_salt
        if isinstance(prompt, dict) and prompt.get("prompt_embeds") is not None:
            return await self.embeds_prompt(prompt["prompt_embeds"]), cache_salt
        if isinstance(prompt, dict) and prompt.get(PARTS):
            return await self.prompt_with_embeds(prompt["prompt"], prompt[PARTS]), cache_salt
        if isinstance(prompt, dict) and has_media(prompt):
            return await self.media_prompt(prompt, cache_salt), cache_salt
        text, token_ids = parts_of(prompt, self._config.model.vocab_size)
        if token_ids is None:
            token_ids = packed_prompt(await self._encode(text or ""), self._config.model.vocab_size)
        return TokenizedPrompt(text, token_ids), cache_salt

    async def media_prompt(self, prompt: dict[str, Any], cache_salt: str | None = None) -> TokenizedPrompt:
        """Return a prompt with media, tokenized from its text if it has one.

        Raises:
            InvalidRequestError: the model reads only text, or an item cannot be used.
            OverloadedError: live requests already use all memory allowed for media.
        """
        vocab_size = self._config.model.vocab_size
        text, made = await make_prompt(self._media, prompt, vocab_size, cache_salt)
        return TokenizedPrompt(text, packed_prompt(made.token_ids, vocab_size), media=made.items)

    async def embeds_prompt(self, value: object) -> TokenizedPrompt:
        """Return the prompt for embeddings: a tensor, or base64 of a file with one.

        Raises:
            InvalidRequestError: the engine does not accept embeddings, or these are invalid.
        """
        require_embeds(self._config)
        max_model_len = self._link.facts.max_model_len

        def read() -> PromptEmbeds:
            tensor = decode_embeds(value, self._config, max_model_len) if isinstance(value, str) else value
            return embeds_of(tensor, self._config, max_model_len)

        return TokenizedPrompt.of_embeds(await asyncio.to_thread(read))

    async def prompt_with_embeds(
        self, text: str, parts: Iterable[EmbedsPart], *, adds_special_tokens: bool = False
    ) -> TokenizedPrompt:
        """Return the prompt for a text that has a mark for each part; see `take_embeds`.

        Raises:
            InvalidRequestError: the engine does not accept embeddings, or a part is invalid; `param` is its path.
        """
        parts, rows = list(parts), []
        for part in parts:
            try:
                prompt = await self.embeds_prompt(part.value)
            except InvalidRequestError as error:
                raise InvalidRequestError(f"{part.path}: {error.message}", part.path) from None
            assert prompt.embeds is not None
            rows.append(prompt.embeds)
        token_ids = await self._encode(text, add_special_tokens=adds_special_tokens, mark=MARK)
        mark_id = self._tokenizer.marked(MARK).token_id(MARK)
        assert mark_id is not None
        return with_rows(token_ids, mark_id, rows, parts)

    def _next_request_id(self) -> str:
        return f"{self._prefix}-{next(self._request_counter)}"

    def _submission(
        self,
        prompt: TokenizedPrompt,
        spec: SamplingSpec,
        priority: int,
        cache_salt: str | None,
        adapter: Adapter | None,
        interval: int = 1,
        grammar: GrammarSpec | None = None,
        kv_transfer: KVTransfer | None = None,
    ) -> Submit:
        # Several frontends may share a core, so these ids must not depend on ids that callers choose.
        child_id = f"{self._prefix}:{next(self._child_counter)}"
        return Submit(
            child_id,
            prompt.token_ids,
            spec,
            effective_priority(priority),
            cache_salt,
            adapter,
            stream_interval=interval,
            grammar=grammar,
            is_continued=prompt.is_continued,
            prompt_embeds=prompt.embeds,
            kv_transfer=kv_transfer,
            media=list(prompt.media),
        )

    def check_priority(self, priority: int) -> None:
        """Reject a priority that has no effect.

        Raises:
            InvalidRequestError: the priority has no effect; `param` names the field.
        """
        if isinstance(priority, bool) or not isinstance(priority, int) or not -(2**63) <= priority < 2**63:
            raise InvalidRequestError(f"priority must be an integer of 64 bits, got {priority!r}", "priority")
        if priority and self._config.scheduling_policy != "priority":
            raise InvalidRequestError(
                f"priority {priority} has no effect on this engine, whose policy is "
                f"{self._config.scheduling_policy}: start it with --scheduling-policy priority, or leave it out",
                "priority",
            )
