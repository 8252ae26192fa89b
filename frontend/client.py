"""`AsyncClient`: text in, text out, on the engine of this process's own or on one that runs already."""

import asyncio
import contextlib
import itertools
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator
from collections.abc import Sequence as Several
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import zmq

from octavo.frontend.generation.beam_generation import BeamGeneration
from octavo.frontend.generation.beam_search import BeamSearch
from octavo.frontend.generation.fanout import Generation
from octavo.frontend.generation.grammar_maker import GrammarMaker
from octavo.frontend.generation.interval import stream_interval
from octavo.frontend.generation.prompt import Prompt, conversation_prompt, parts_of
from octavo.frontend.generation.sequence import Sequence
from octavo.frontend.generation.spec import (
    check_cache_salt,
    child_seed,
    default_params,
    make_beam_spec,
    make_spec,
    output_kind,
    request_seed,
)
from octavo.frontend.launch import LaunchedEngine, ProgressCallback, follow_start
from octavo.frontend.link import CoreLink
from octavo.frontend.metrics.observer import Observer
from octavo.frontend.outputs import RequestOutput
from octavo.frontend.spawn import SpawnedEngine, Timeline, read_config, spawn_engine
from octavo.frontend.text.chat_template import ChatTemplate, FormatChoice
from octavo.frontend.text.messages import Message
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.protocol.config import EngineConfig, ResolvedConfig
from octavo.protocol.config.sources import engine_config
from octavo.protocol.errors import EngineDeadError, InvalidRequestError
from octavo.protocol.events import BoolResult, EngineFacts
from octavo.protocol.params import BeamSearchParams, OutputKind, SamplingParams, SamplingSpec
from octavo.protocol.pulse import PulseReader
from octavo.protocol.requests import GetSnapshot, GetStats, ResetPrefixCache, StartProfile, StopProfile, Submit, Utility
from octavo.protocol.snapshot import EngineSnapshot
from octavo.protocol.stats import EngineStats
from octavo.protocol.structured import GrammarSpec

T = TypeVar("T")

CONNECT_TIMEOUT_S = 10.0

STALL_DEADLINE_S = 30.0
"""A core that has work and has not finished a step for this long is not healthy."""

SHORT_TEXT_CHARS = 2_000
"""Shorter prompts are tokenized in less time than a thread switch takes to pay off."""


@dataclass(frozen=True)
class Health:
    """Whether the engine can be expected to answer, and why not."""

    ok: bool
    reason: str = ""


class AsyncClient:
    """An engine, seen from one event loop.

    Make one with `launch` or `connect`; leave it with `close` or `async with`.
    """

    def __init__(
        self,
        link: CoreLink,
        tokenizer: Tokenizer,
        context: "zmq.Context[zmq.Socket[bytes]]",
        engine: LaunchedEngine | None,
    ) -> None:
        self.tokenizer = tokenizer
        self.observer: Observer | None = None
        """Told of latencies and finished requests: the metrics."""
        self.config = msgspec.msgpack.decode(link.facts.config, type=ResolvedConfig)
        self._link = link
        self._context = context
        self._engine = engine
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="octavo text")
        self._grammars = GrammarMaker(link, tokenizer, self.config, self.run_in_thread)
        self._prefix = secrets.token_hex(4)
        self._request_counter = itertools.count()
        self._child_counter = itertools.count()
        self._live: set[Generation | BeamGeneration] = set()
        self._pulse = PulseReader(Path(link.facts.pulse_path)) if Path(link.facts.pulse_path).is_file() else None
        link.on_stats = self._on_stats
        if engine:
            engine.watch(link.fail)

    @classmethod
    def launch(
        cls,
        model: str | None = None,
        *,
        config: EngineConfig | None = None,
        address: str | None = None,
        on_progress: ProgressCallback | None = None,
        **settings: Any,
    ) -> "Starting":
        """Start an engine of our own; `async with` it, or await it and `close` it later.

        Args:
            model: directory, .gguf file or hub id; or give a whole `config`.
            config: the engine's configuration, instead of `model` and `settings`.
            address: `ipc://` address on which other applications may join.
            on_progress: told what the engine is doing while it starts.
            settings: any engine flag by its name: `max_num_seqs=8`.

        Raises:
            StartupError: the root cause.
        """
        return Starting(
            lambda: cls._launch(config or engine_config({"model": model, **settings}), address, on_progress)
        )

    @classmethod
    async def _launch(
        cls, config: EngineConfig, address: str | None, on_progress: ProgressCallback | None
    ) -> "AsyncClient":
        timeline = Timeline()
        resolved = await asyncio.to_thread(read_config, config, timeline)
        # On this thread, not on that one: the core dies with the thread that spawned it.
        return await cls.follow(spawn_engine(resolved, timeline, address), on_progress=on_progress)

    @classmethod
    async def follow(cls, spawned: SpawnedEngine, *, on_progress: ProgressCallback | None = None) -> "AsyncClient":
        """Wait for an engine that was spawned on this thread, and join it; the client will end it.

        Raises:
            StartupError: the root cause; the engine has been ended.
        """
        start = time.monotonic()
        try:
            tokenizer = await asyncio.to_thread(_load_tokenizer, spawned.config)
        except BaseException:
            spawned.end()
            raise
        spawned.timeline.add("Frontend", "loading the tokenizer", time.monotonic() - start)
        engine = await follow_start(spawned, on_progress)
        try:
            return await cls._join(engine.address, engine, tokenizer)
        except BaseException:
            await engine.stop()
            raise

    @classmethod
    def connect(cls, address: str) -> "Starting":
        """Join an engine that another process runs; `async with` it, or await it and `close` it later.

        Raises:
            StartupError: no engine answers on `address`.
        """
        return Starting(lambda: cls._join(address, None, None))

    @classmethod
    async def _join(cls, address: str, engine: LaunchedEngine | None, tokenizer: Tokenizer | None) -> "AsyncClient":
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            link = await CoreLink.connect(context, address, CONNECT_TIMEOUT_S)
            try:
                if tokenizer is None:
                    config = msgspec.msgpack.decode(link.facts.config, type=ResolvedConfig)
                    tokenizer = await asyncio.to_thread(Tokenizer.load, Path(config.model.tokenizer_path))
                return cls(link, tokenizer, context, engine)
            except BaseException:
                await link.close()
                raise
        except BaseException:
            context.destroy(linger=0)  # unlike term(), it cannot wait for a socket that was left open
            raise

    @property
    def facts(self) -> EngineFacts:
        """What the engine said of itself."""
        return self._link.facts

    @property
    def address(self) -> str:
        """Where other applications can `connect`."""
        return self._link.address

    @property
    def engine(self) -> LaunchedEngine | None:
        """The process behind a launched client; None after `connect`."""
        return self._engine

    @property
    def failure(self) -> EngineDeadError | None:
        """Why no request can be served any more; None while the engine lives."""
        return self._link.failure

    @property
    def latest_stats(self) -> EngineStats:
        """What the engine last reported, about a second old at most while it works."""
        return self._link.latest_stats

    @property
    def num_live_requests(self) -> int:
        """Requests of this client that run or wait."""
        return len(self._live)

    def chat_template(self, content_format: FormatChoice = "auto") -> ChatTemplate:
        """Return the template that turns messages into a prompt.

        Args:
            content_format: what it gets as a message's content; auto: what its loops tell.

        Raises:
            InvalidRequestError: the model has none and none was given.
        """
        return ChatTemplate.for_model(self.config.chat_template, self.tokenizer, content_format)

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
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate for one prompt; yields deltas unless `sampling_params.output_kind` says otherwise.

        Leaving the loop early, or cancelling the task, aborts the request in the engine.

        Args:
            prompt: text, token ids, or a dict with "prompt" or "prompt_token_ids".
            sampling_params: None: the model's own defaults.
            request_id: shown in the outputs, and what `abort` goes by; need not be unique, as a proxy may send
                a request again. Also decides the seed of a request without one.
            priority: lower runs earlier; other than 0 only with `scheduling_policy="priority"`.
            cache_salt: cached prompt prefixes are shared only among requests of equal salt.

        Raises:
            InvalidRequestError: names the field and the remedy.
            OverloadedError: the queue is full.
            RequestFailedError: the engine gave up on this request.
            EngineDeadError: the engine is gone.
        """
        generation = await self._start(prompt, sampling_params, request_id, priority, cache_salt)
        with self._alive(generation):
            outputs = generation.outputs()
            try:
                async for output in outputs:
                    yield output
            finally:
                # Not left to the garbage collector: the engine must hear of it now.
                await outputs.aclose()

    async def chat(
        self,
        messages: Several[Message],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
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
            content_format: as in `chat_template`.
            **variables: of the template, such as `tools` and `continue_final_message`; see `ChatTemplate.render`.

        Raises:
            InvalidRequestError: there is no template, or it refuses the messages.
            OctavoError: as in `generate`.
        """
        template = self.chat_template(content_format)
        prompt = await self.run_in_thread(lambda: conversation_prompt(template, self.tokenizer, messages, **variables))
        outputs = self.generate(
            prompt, sampling_params, request_id=request_id, priority=priority, cache_salt=cache_salt
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
    ) -> RequestOutput:
        """Search for likely continuations of one prompt; the best come first.

        Being cancelled ends the search in the engine; `abort` ends it with what it has found.

        Args:
            prompt: as in `generate`.
            params: how wide and how long to search.
            request_id: as in `generate`.
            priority: as in `generate`.
            cache_salt: as in `generate`.
            logprobs: alternatives to show per token, as in `SamplingParams`.

        Raises:
            OctavoError: as in `generate`.
        """
        params.verify()
        text, token_ids, cache_salt = await self._prepare(prompt, priority, cache_salt)
        search = BeamSearch(params, () if params.ignore_eos else self.config.model.eos_token_ids)
        spec = make_beam_spec(
            params,
            num_candidates=search.num_candidates,
            num_logprobs=logprobs,
            num_prompt_tokens=len(token_ids),
            max_model_len=self.facts.max_model_len,
            config=self.config,
            tokenizer=self.tokenizer,
        )
        generation = BeamGeneration(
            self._link,
            request_id or self._next_request_id(),
            text,
            token_ids,
            params,
            search,
            lambda token_ids: self._submission(token_ids, spec, priority, cache_salt),
            self.tokenizer,
            logprobs if logprobs != -1 else self.config.model.vocab_size,
            self.observer,
        )
        with self._alive(generation):
            return await generation.output()

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenize, off the event loop when the text is long."""
        if len(text) <= SHORT_TEXT_CHARS:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await self.run_in_thread(lambda: self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    async def run_in_thread(self, work: Callable[[], T]) -> T:
        """Run text work (templates, tokenizing) off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def abort(self, request_id: str) -> bool:
        """End all requests of this client with this id, finish reason "abort"; False when there is none."""
        found = [generation for generation in self._live if generation.request_id == request_id]
        for generation in found:
            generation.abort()
        return bool(found)

    def abort_all(self) -> None:
        """End every request of this client with finish reason "abort"."""
        for generation in self._live:
            generation.abort()

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False while blocks are in use."""
        return await self._call_bool(ResetPrefixCache())

    async def start_profile(self, directory: str) -> bool:
        """Start the torch profiler on every worker."""
        return await self._call_bool(StartProfile(directory))

    async def stop_profile(self) -> bool:
        """Stop it and write one trace per worker."""
        return await self._call_bool(StopProfile())

    async def engine_stats(self) -> EngineStats:
        """Ask the engine for its counters."""
        result = await self._link.call(GetStats())
        assert isinstance(result, EngineStats)
        return result

    async def snapshot(self) -> EngineSnapshot:
        """Ask the engine for its requests, blocks and latest steps, for showing."""
        result = await self._link.call(GetSnapshot())
        assert isinstance(result, EngineSnapshot)
        return result

    def health(self) -> Health:
        """Tell whether the engine lives and its step loop moves, without asking it."""
        if self._link.failure:
            return Health(ok=False, reason=str(self._link.failure))
        if self._pulse and (pulse := self._pulse.read()).is_stalled(STALL_DEADLINE_S):
            return Health(ok=False, reason=f"the engine has not finished a step for {pulse.age_s:.0f} s")
        return Health(ok=True)

    async def close(self) -> None:
        """Abort what runs, disconnect, and end the engine if it is ours; harmless the second time."""
        try:
            await self._link.close()
        finally:
            if self._engine:
                await self._engine.stop()
        if self._pulse:
            self._pulse.close()
            self._pulse = None
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._context.term()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _start(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        cache_salt: str | None,
    ) -> Generation:
        params = params or self.default_params()
        params.verify()
        text, token_ids, cache_salt = await self._prepare(prompt, priority, cache_salt)
        request_id = request_id or self._next_request_id()
        seed = request_seed(self.config.seed, request_id) if params.seed is None else params.seed
        spec = make_spec(
            params,
            num_prompt_tokens=len(token_ids),
            max_model_len=self.facts.max_model_len,
            seed=child_seed(seed, 0),
            config=self.config,
            tokenizer=self.tokenizer,
        )
        grammar = None if params.structured_outputs is None else await self._grammars.make(params.structured_outputs)
        kind = output_kind(params, OutputKind.DELTA)
        interval = stream_interval(params, kind, self.config)
        children = []
        for index in range(params.num_sequences):
            own_spec = msgspec.structs.replace(spec, seed=child_seed(seed, index))
            submit = self._submission(token_ids, own_spec, priority, cache_salt, interval, grammar)
            children.append((submit, Sequence(index, self.tokenizer, token_ids, params, own_spec)))
        return Generation(self._link, request_id, text, params, children, kind, self.observer)

    async def _prepare(
        self, prompt: Prompt, priority: int, cache_salt: str | None
    ) -> tuple[str | None, list[int], str | None]:
        """Return a prompt's text, if there is one, its tokens and its salt, all checked."""
        if self._link.failure:
            raise self._link.failure
        self._check_priority(priority)
        if isinstance(prompt, dict):
            cache_salt = cache_salt or prompt.get("cache_salt")
        check_cache_salt(cache_salt)
        text, token_ids = parts_of(prompt, self.config.model.vocab_size)
        return text, await self.encode(text or "") if token_ids is None else token_ids, cache_salt

    def _next_request_id(self) -> str:
        return f"{self._prefix}-{next(self._request_counter)}"

    def _submission(
        self,
        token_ids: list[int],
        spec: SamplingSpec,
        priority: int,
        cache_salt: str | None,
        interval: int = 1,
        grammar: GrammarSpec | None = None,
    ) -> Submit:
        # Several frontends share a core: their ids must differ whatever their callers chose.
        child_id = f"{self._prefix}:{next(self._child_counter)}"
        return Submit(child_id, token_ids, spec, priority, cache_salt, stream_interval=interval, grammar=grammar)

    @contextlib.contextmanager
    def _alive(self, generation: Generation | BeamGeneration) -> Iterator[None]:
        """Let `abort` find a generation while it runs."""
        self._live.add(generation)
        self._tell_load()
        try:
            yield
        finally:
            self._live.discard(generation)
            self._tell_load()

    def _check_priority(self, priority: int) -> None:
        if priority and self.config.scheduling_policy != "priority":
            raise InvalidRequestError(
                f"priority {priority} means nothing to this engine, whose policy is "
                f"{self.config.scheduling_policy}: start it with --scheduling-policy priority, or leave it out",
                "priority",
            )

    async def _call_bool(self, utility: Utility) -> bool:
        result = await self._link.call(utility)
        assert isinstance(result, BoolResult)
        return result.ok

    def _tell_load(self) -> None:
        if self.observer:
            self.observer.on_live_requests(len(self._live))

    def _on_stats(self, stats: EngineStats) -> None:
        if self.observer:
            self.observer.on_engine_stats(stats)


def _load_tokenizer(config: ResolvedConfig) -> Tokenizer:
    """Load what turns text into tokens and back; its chat template is compiled now, while the engine loads."""
    tokenizer = Tokenizer.load(Path(config.model.tokenizer_path))
    with contextlib.suppress(InvalidRequestError):  # a model need not have one
        ChatTemplate.for_model(config.chat_template, tokenizer)
    return tokenizer


class Starting:
    """A client on its way: `await` it, or enter it with `async with`."""

    def __init__(self, start: Callable[[], Awaitable[AsyncClient]]) -> None:
        self._start = start
        self._client: AsyncClient | None = None

    def __await__(self) -> Generator[Any, None, AsyncClient]:
        return self._start().__await__()

    async def __aenter__(self) -> AsyncClient:
        self._client = await self._start()
        return self._client

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._client:
            await self._client.close()
