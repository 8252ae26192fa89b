"""`AsyncClient`: text in, text out, on engines that this process starts or joins."""

# long: one method of the public interface after another

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from collections.abc import Sequence as Several
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from octavo.frontend.calls.trace_observer import TraceObserver, traces_to
from octavo.frontend.connected_engine import ConnectedEngine
from octavo.frontend.engine_connection import (
    CONNECT_TIMEOUT_S,
    RECONNECT_TIMEOUT_S,
    EngineConnection,
    follow_engines,
    join_engines,
    launch_engines,
)
from octavo.frontend.engine_set import EngineSet
from octavo.frontend.engine_state import EngineState
from octavo.frontend.engines_client import EnginesClient
from octavo.frontend.generation.chat_prompt import chat_prompt
from octavo.frontend.generation.grammar_maker import GrammarMaker
from octavo.frontend.generation.live import LiveRequests
from octavo.frontend.generation.media import open_media
from octavo.frontend.generation.preparation import RequestPreparer
from octavo.frontend.generation.prompt import Prompt
from octavo.frontend.generation.scoring import score_tokens
from octavo.frontend.generation.spec import default_params
from octavo.frontend.launch import ProgressCallback
from octavo.frontend.live_weights import LiveWeights
from octavo.frontend.lora.registry import AdapterRegistry
from octavo.frontend.lora.request import LoRARequest
from octavo.frontend.media.prompts import PromptMaker
from octavo.frontend.outputs import RequestOutput
from octavo.frontend.pooling.client import PoolingClient
from octavo.frontend.pooling.pooler import Pooler
from octavo.frontend.recovery.downtime import Resumption
from octavo.frontend.routing.model_link import ModelLink
from octavo.frontend.spawn import SpawnedEngine
from octavo.frontend.starting import Starting
from octavo.frontend.text.chat_template import ChatTemplate, FormatChoice
from octavo.frontend.text.messages import Message
from octavo.frontend.text.threads import TextThreads
from octavo.frontend.weights_client import WeightsClient
from octavo.protocol.adapters import Adapter
from octavo.protocol.code import take_code
from octavo.protocol.config import EngineConfig
from octavo.protocol.config.sources import engine_config
from octavo.protocol.curve import read_client_keys
from octavo.protocol.params import BeamSearchParams, SamplingParams

T = TypeVar("T")


class AsyncClient(PoolingClient, WeightsClient, EnginesClient):
    """A client of one engine, for one event loop.

    Create it with `launch` or `connect`; close it with `close` or `async with`.
    """

    def __init__(self, *connections: EngineConnection, indices: Several[int] | None = None) -> None:
        """Use one engine, or several of the same model, each of which may get any request.

        Args:
            connections: to the engines.
            indices: of the engines; None: in order, from 0.
        """
        self._text = TextThreads()
        self._live = LiveRequests()
        self.media: PromptMaker | None = None
        """Makes prompts with media; None: the model reads text only."""
        self.tokenizer = connections[0].tokenizer
        first = dict(zip(range(len(connections)) if indices is None else indices, connections, strict=True))
        self.engine_set = EngineSet(first, self, self._live.has_users)
        self._weights = LiveWeights(self.engine_set)
        self._link = self.engine_set.link
        self.adapters = AdapterRegistry(lambda: self.config, self.run_in_thread)
        """LoRA adapters that requests choose by name or by `LoRARequest`."""
        self.engine_set.set_states(dict.fromkeys(first, EngineState.SERVING))

    @classmethod
    def launch(
        cls,
        model: str | None = None,
        *,
        config: EngineConfig | None = None,
        address: str | None = None,
        on_progress: ProgressCallback | None = None,
        allow_code: bool = False,
        otlp_traces_endpoint: str | None = None,
        **settings: Any,
    ) -> "Starting[AsyncClient]":
        """Start an engine that this client owns; use `async with`, or await it and `close` it later.

        Args:
            model: directory, .gguf file or hub id; or give a whole `config`.
            config: the engine's configuration, instead of `model` and `settings`.
            address: `ipc://` address on which other applications may join.
            on_progress: called with the engine's progress while it starts.
            allow_code: let `logits_processors` hold classes and functions besides names; workers run them.
            otlp_traces_endpoint: URL of an OpenTelemetry collector that gets the spans of requests; needs octavo[otel].
            settings: any engine flag by its name: `max_num_seqs=8`.

        Raises:
            StartupError: the root cause.
        """
        code = take_code(settings, is_allowed=allow_code)
        given = config or engine_config({"model": model, **settings})
        given = msgspec.structs.replace(given, processor_code=[*given.processor_code, *code])
        traces = traces_to(otlp_traces_endpoint)
        return Starting(lambda: cls._on(launch_engines(given, address, on_progress), traces))

    @classmethod
    async def follow(
        cls, spawned: Several[SpawnedEngine], *, on_progress: ProgressCallback | None = None
    ) -> "AsyncClient":
        """Wait for engines that were spawned on this thread, and join them; the client will end them.

        Raises:
            StartupError: the root cause; all of them have been ended.
        """
        return await cls._on(follow_engines(spawned, on_progress), None)

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        reconnect_timeout_s: float = RECONNECT_TIMEOUT_S,
        client_secret_key_file: str | None = None,
        engine_public_key_file: str | None = None,
        otlp_traces_endpoint: str | None = None,
    ) -> "Starting[AsyncClient]":
        """Join an engine that another process runs; use `async with`, or await it and `close` it later.

        Args:
            address: of the engine; those of several engines of the same model are separated by commas.
            connect_timeout_s: how long to wait for it to answer; it may still be loading, or restarting.
            reconnect_timeout_s: if the engine dies, how long requests wait for another one at the same address; 0: they
                fail at once.
            client_secret_key_file: this client's key, for an engine on another machine (`octavo keygen`).
            engine_public_key_file: the key of that engine. Both files must be given.
            otlp_traces_endpoint: as for `launch`.

        Raises:
            StartupError: no engine answers on `address`.
            ConfigError: the address needs keys, one of two is missing, or they cannot be read; or the engines serve
                different models.
        """
        keys = read_client_keys(client_secret_key_file, engine_public_key_file)
        joining = partial(
            join_engines,
            address.split(","),
            reconnect_timeout_s=reconnect_timeout_s,
            keys=keys,
            connect_timeout_s=connect_timeout_s,
        )
        traces = traces_to(otlp_traces_endpoint)
        return Starting(lambda: cls._on(joining(), traces))

    @classmethod
    async def _on(cls, connecting: Awaitable[Several[EngineConnection]], traces: TraceObserver | None) -> "AsyncClient":
        return cls(*await connecting).traced_by(traces)

    @property
    def num_live_requests(self) -> int:
        """Running and waiting requests of this client."""
        return len(self._live)

    def chat_template(self, content_format: FormatChoice = "auto", chosen: str | None = None) -> ChatTemplate:
        """Return the template that turns messages into a prompt.

        Args:
            content_format: the form in which it gets a message's content; auto: detected from the template.
            chosen: a template to use instead of the engine's: a file, or the Jinja text itself.

        Raises:
            InvalidRequestError: the model has none and none was given.
        """
        return ChatTemplate.for_model(chosen or self.config.chat_template, self.tokenizer, content_format)

    def default_params(self, max_tokens: int | None = 16) -> SamplingParams:
        """Return the model's own default parameters."""
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
        """Generate for one prompt; yields deltas unless `sampling_params.output_kind` says otherwise.

        Leaving the loop early, or cancelling the task, aborts the request in the engine.

        Args:
            prompt: text, token ids, or a dict with "prompt" or "prompt_token_ids".
            sampling_params: None: the model's own defaults.
            request_id: shown in the outputs and accepted by `abort`. It need not be unique, as a proxy may send a
                request again. It also determines the seed of a request without one.
            priority: lower runs earlier; other than 0 only with `scheduling_policy="priority"`.
            cache_salt: cached prompt prefixes are shared only among requests of equal salt.
            lora_request: the LoRA adapter to use, read when its id comes first; None: the model alone.

        Raises:
            InvalidRequestError: names the field and the remedy.
            OverloadedError: the queue is full.
            RequestFailedError: the engine gave up on this request.
            EngineDeadError: the engine is gone.
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
            del prompt, sampling_params  # a request may wait for long
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
        """Answer a conversation, rendered by the model's chat template off the event loop; yields as `generate` does.

        Args:
            messages: the conversation.
            sampling_params: as in `generate`.
            request_id: as in `generate`.
            priority: as in `generate`.
            cache_salt: as in `generate`.
            lora_request: as in `generate`.
            content_format: as in `chat_template`.
            **variables: of the template, such as `tools` and `continue_final_message`; see `ChatTemplate.render`.

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
        """Search for likely continuations of one prompt; the best come first.

        Cancelling the task ends the search in the engine; `abort` ends it and returns what it has found.

        Args:
            prompt: as in `generate`.
            params: width and length of the search.
            request_id: as in `generate`.
            priority: as in `generate`.
            cache_salt: as in `generate`.
            logprobs: alternatives to show per token, as in `SamplingParams`.
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
        """Return the logprob of each token after the prompt and the tokens before it: the bits that sampling reports.

        They depend on nothing else, such as the batch, the prefix cache, or when and by which engine of the same
        weights the tokens were drawn.

        Args:
            prompt: as in `generate`, but not embeddings.
            tokens: which follow the prompt; any, not only likely ones.
            priority: as in `generate`.
            cache_salt: as in `generate`.
            lora_request: as in `generate`.

        Raises:
            OctavoError: as in `generate`, or `--logprobs-mode` is not raw_logprobs.
        """
        return await score_tokens(
            self, prompt, tokens, priority=priority, cache_salt=cache_salt, lora_request=lora_request
        )

    async def tokenize(self, text: str, *, add_special_tokens: bool = True, mark: str | None = None) -> list[int]:
        """Tokenize, off the event loop when the text is long.

        Args:
            text: any string.
            add_special_tokens: put the model's own tokens (such as BOS) around the text.
            mark: a text that becomes one token more, as in `Tokenizer.marked`.

        Raises:
            PromptTooLongError: the text cannot fit even if all its tokens are the longest of the vocabulary.
            InvalidRequestError: there is no tokenizer.
        """
        length = self.facts.max_model_len
        tokenizer = self.tokenizer
        if mark is not None:
            tokenizer = await self.run_in_thread(lambda: self.tokenizer.marked(mark))
        return await self._text.encode(tokenizer, text, length, add_special_tokens=add_special_tokens)

    async def run_in_thread(self, work: Callable[[], T]) -> T:
        """Run text work (templates, tokenizing) off the event loop."""
        return await self._text.run(work)

    async def abort(self, request_id: str) -> bool:
        """End all requests of this client with this id, finish reason "abort"; False when there is none."""
        return self._live.abort(request_id)

    def abort_all(self) -> None:
        """End every request of this client with finish reason "abort"."""
        self._live.abort_all()

    async def close(self) -> None:
        """Abort live requests, disconnect, and stop the engine if we started it. Idempotent."""
        try:
            await self._link.close()
            if self.media is not None:
                await self.media.close()
            await asyncio.gather(*(engine.close() for engine in self.engines))
        finally:
            self._text.close()
            await self.close_traces()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _adapter(self, lora_request: LoRARequest | None) -> Adapter | None:
        return None if lora_request is None else await self.adapters.of_request(lora_request)

    def _on_media_query(self, is_hit: bool) -> None:
        if self.observer:
            self.observer.on_media_query(is_hit=is_hit)

    def on_resumed(self, engine: ConnectedEngine, resumption: Resumption) -> None:
        """See `EngineListener`."""
        if engine is self.engine_set.lead and engine.config != self.config:
            self.on_model_changed()
        if self.observer:
            self.observer.on_restart(resumption.kind, resumption.num_requests, resumption.pause_s, engine.index)

    def on_model_changed(self) -> None:
        """See `EngineListener`. Live requests go on as they were prepared."""
        lead = self.engine_set.lead
        self.config, self.tokenizer = lead.config, lead.tokenizer
        link = ModelLink(self._link, self._link.identity)
        grammars = GrammarMaker(link, self.tokenizer, self.config, self.run_in_thread)
        if self.media is None and self.config.media is not None:
            self.media = open_media(self.config, self.tokenize, self._on_media_query)
        self.preparer = RequestPreparer(
            link,
            self.tokenizer,
            self.config,
            grammars,
            self.tokenize,
            self._live,
            self.media,
            self.adapters.of_media,
        )
        """Starts generations whose consumer takes the outputs itself, as the HTTP routes do."""
        self.pooler = Pooler(
            link, self.tokenizer, self.config, self._text, self._live, self.preparer.check_priority, self.media
        )
