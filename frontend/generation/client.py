"""`GenerationClient`: the methods of `AsyncClient` that generate text, and their helpers."""

import contextlib
from collections.abc import AsyncGenerator, Callable
from collections.abc import Sequence as Several
from typing import Any, TypeVar

from octavo.frontend.engine_set import EngineSet
from octavo.frontend.generation.chat_prompt import chat_prompt
from octavo.frontend.generation.live import LiveRequests
from octavo.frontend.generation.preparation import RequestPreparer
from octavo.frontend.generation.prompt import Prompt
from octavo.frontend.generation.scoring import score_tokens
from octavo.frontend.generation.spec import default_params
from octavo.frontend.lora.registry import AdapterRegistry
from octavo.frontend.lora.request import LoRARequest
from octavo.frontend.media.prompts import PromptMaker
from octavo.frontend.outputs import RequestOutput
from octavo.frontend.text.chat_template import ChatTemplate, FormatChoice
from octavo.frontend.text.messages import Message
from octavo.frontend.text.threads import TextThreads
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.protocol.adapters import Adapter
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.params import BeamSearchParams, SamplingParams

T = TypeVar("T")


class GenerationClient:
    """Mixin of `AsyncClient` with the methods that generate text."""

    config: ResolvedConfig
    tokenizer: Tokenizer
    media: PromptMaker | None
    """Makes prompts with media; `None` if the model reads only text."""
    adapters: AdapterRegistry
    """LoRA adapters that requests choose by name or by `LoRARequest`."""
    preparer: RequestPreparer
    """Starts generations whose consumer takes the outputs itself, as the HTTP routes do."""
    engine_set: EngineSet
    _live: LiveRequests
    _text: TextThreads

    @property
    def num_live_requests(self) -> int:
        """Number of running and waiting requests of this client."""
        return len(self._live)

    def chat_template(self, content_format: FormatChoice = "auto", chosen: str | None = None) -> ChatTemplate:
        """Return the template that turns messages into a prompt.

        Args:
            content_format: the format in which the template gets a message's content; auto: detected from the template.
            chosen: a template to use instead of the engine's: a file name, or the Jinja text itself.

        Raises:
            InvalidRequestError: the model has no template and `chosen` is None.
        """
        return ChatTemplate.for_model(chosen or self.config.chat_template, self.tokenizer, content_format)

    async def reset_mm_cache(self) -> None:
        """Drop the cache of processed media (`--mm-processor-cache-gb`) of this client.

        Afterwards a request that names an item only by its uuid is rejected until a request has sent the item again.
        Rows that the workers have encoded stay, because a digest identifies them; `update_weights` and
        `pause_generation` with `clear_cache` drop them.
        """
        if self.media is not None:
            self.media.clear_cache()

    def default_params(self, max_tokens: int | None = 16) -> SamplingParams:
        """Return the model's default parameters."""
        return default_params(self.config, max_tokens)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate for one prompt; yield deltas unless `sampling_params.output_kind` says otherwise.

        Leaving the loop early, or cancelling the task, aborts the request in the engine.

        Args:
            prompt: text, token ids, or a dict with "prompt" or "prompt_token_ids".
            sampling_params: the parameters; None: the model's defaults.
            request_id: id that outputs show and `abort` accepts. It need not be unique, because a proxy may retry a
            request. It also determines the seed of a request without one.
            priority: lower runs earlier; must be 0 without `scheduling_policy="priority"`.
            cache_salt: requests share cached prefixes only with requests of the same salt.
            lora_request: the LoRA adapter to use, loaded when its id is first seen; None: no adapter.

        Raises:
            InvalidRequestError: the request is invalid; the error names the field and the remedy.
            OverloadedError: the queue is full.
            RequestFailedError: the engine gave up on this request.
            EngineDeadError: the engine has died.
        """
        adapter = await self._adapter(lora_request)
        arrived = self.preparer.wake_event()
        with await self.preparer.start(
            prompt,
            sampling_params,
            arrived,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            adapter=adapter,
        ) as generation:
            del prompt, sampling_params  # free them, because a request may wait for long
            await generation.submit()
            while not generation.is_finished:
                await arrived.wait()
                arrived.clear()
                if (output := generation.take()) is not None:
                    yield output

    async def chat(
        self,
        messages: Several[Message],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
        content_format: FormatChoice = "auto",
        **variables: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation, rendered off the event loop by the model's chat template; yield like `generate`.

        Args:
            messages: the conversation.
            sampling_params: as in `generate`.
            request_id: as in `generate`.
            priority: as in `generate`.
            cache_salt: as in `generate`.
            lora_request: as in `generate`.
            content_format: as in `chat_template`.
            **variables: variables of the template, such as `tools` or `continue_final_message`; see
            `ChatTemplate.render`.

        Raises:
            InvalidRequestError: there is no template, or it rejects the messages.
            OctavoError: as in `generate`.
        """
        prompt = await chat_prompt(self, self.chat_template(content_format), messages, **variables)
        outputs = self.generate(
            prompt,
            sampling_params,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            lora_request=lora_request,
        )
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                yield output

    async def beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        logprobs: int | None = None,
        lora_request: "LoRARequest | Adapter | None" = None,
    ) -> RequestOutput:
        """Search for likely continuations of one prompt; the result is sorted, best first.

        Cancelling the task ends the search in the engine. `abort` ends the search and returns what it has found.

        Args:
            prompt: as in `generate`.
            params: width, length and scoring of the search.
            request_id: as in `generate`.
            priority: as in `generate`.
            cache_salt: as in `generate`.
            logprobs: number of alternatives to show per token, as in `SamplingParams`.
            lora_request: as in `generate`.

        Raises:
            OctavoError: as in `generate`.
        """
        adapter = lora_request if isinstance(lora_request, Adapter) else await self._adapter(lora_request)
        generation = await self.preparer.beam_generation(
            prompt, params, request_id, priority, cache_salt, logprobs, adapter
        )
        self._live.add(generation)
        try:
            return await generation.output()
        finally:
            self._live.discard(generation)

    async def score_tokens(
        self,
        prompt: Prompt,
        tokens: Several[int],
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[float]:
        """Return the logprob of each token, given the prompt and the tokens before it; the bits are those of sampling.

        The logprobs depend on nothing else: neither on the batch, nor on the prefix cache, nor on when and by which
        engine with the same weights the tokens were drawn.

        Args:
            prompt: as in `generate`, but not embeddings.
            tokens: the token ids that follow the prompt. They need not be likely.
            priority: as in `generate`.
            cache_salt: as in `generate`.
            lora_request: as in `generate`.

        Raises:
            OctavoError: as in `generate`, or if `--logprobs-mode` is not raw_logprobs.
        """
        return await score_tokens(
            self, prompt, tokens, priority=priority, cache_salt=cache_salt, lora_request=lora_request
        )

    async def tokenize(self, text: str, *, add_special_tokens: bool = True, mark: str | None = None) -> list[int]:
        """Tokenize a text, in a thread if it is long.

        Args:
            text: any string.
            add_special_tokens: whether to add the model's special tokens (such as BOS).
            mark: a text that is treated as one additional token, as in `Tokenizer.marked`.

        Raises:
            PromptTooLongError: the text cannot fit even if all its tokens are the vocabulary's longest.
            InvalidRequestError: there is no tokenizer.
        """
        length = self.engine_set.link.facts.max_model_len
        tokenizer = self.tokenizer
        if mark is not None:
            tokenizer = await self.run_in_thread(lambda: self.tokenizer.marked(mark))
        return await self._text.encode(tokenizer, text, length, add_special_tokens=add_special_tokens)

    async def run_in_thread(self, work: Callable[[], T]) -> T:
        """Run text processing (templates, tokenizing) off the event loop."""
        return await self._text.run(work)

    async def abort(self, request_id: str) -> bool:
        """End all requests of this client with this id (finish reason "abort"). Return False if there is none."""
        return self._live.abort(request_id)

    def abort_all(self) -> None:
        """End every request of this client, with the finish reason "abort"."""
        self._live.abort_all()

    async def _adapter(self, lora_request: LoRARequest | None) -> Adapter | None:
        return None if lora_request is None else await self.adapters.of_request(lora_request)
