"""`AsyncClient`: text in, text out, on engines that this process starts or joins."""

# long: the public API of one class, whose methods are thin

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from collections.abc import Sequence as Several
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from octavo.frontend.connected_engine import ConnectedEngine
from octavo.frontend.engine_connection import (
    CONNECT_TIMEOUT_S,
    RECONNECT_TIMEOUT_S,
    EngineConnection,
    follow_engines,
    join_engines,
    launch_engines,
    model_tokenizer,
)
from octavo.frontend.engine_set import EngineSet
from octavo.frontend.engine_state import EngineState
from octavo.frontend.generation.grammar_maker import GrammarMaker
from octavo.frontend.generation.live import LiveRequests
from octavo.frontend.generation.preparation import RequestPreparer
from octavo.frontend.generation.prompt import Prompt, conversation_prompt
from octavo.frontend.generation.scoring import score_tokens
from octavo.frontend.generation.spec import default_params
from octavo.frontend.health import STALL_DEADLINE_S, EngineReport, Health
from octavo.frontend.launch import LaunchedEngine, ProgressCallback
from octavo.frontend.live_weights import LiveWeights, Weights
from octavo.frontend.lora.registry import AdapterRegistry
from octavo.frontend.lora.request import LoRARequest
from octavo.frontend.metrics.observer import Observer
from octavo.frontend.outputs import RequestOutput
from octavo.frontend.pooling.client import PoolingClient
from octavo.frontend.pooling.pooler import Pooler
from octavo.frontend.recovery.downtime import Resumption
from octavo.frontend.recovery.replacement import require_same_number, require_same_tokens
from octavo.frontend.routing.model_link import ModelLink
from octavo.frontend.spawn import SpawnedEngine, Timeline, read_config
from octavo.frontend.starting import Starting
from octavo.frontend.text.chat_template import ChatTemplate, FormatChoice
from octavo.frontend.text.messages import Message
from octavo.frontend.text.threads import TextThreads
from octavo.protocol.adapters import Adapter
from octavo.protocol.code import take_code
from octavo.protocol.config import EngineConfig
from octavo.protocol.config.sources import engine_config
from octavo.protocol.curve import read_client_keys
from octavo.protocol.errors import EngineDeadError
from octavo.protocol.events import BoolResult, EngineFacts
from octavo.protocol.params import BeamSearchParams, SamplingParams
from octavo.protocol.requests import GetSnapshot, GetStats, ResetPrefixCache, StartProfile, StopProfile, Utility
from octavo.protocol.snapshot import EngineSnapshot
from octavo.protocol.stats import EngineStats
from octavo.protocol.weights import InFlightMode, PauseMode, TransferGroup, WakeTag, WeightsStatus

T = TypeVar("T")


class AsyncClient(PoolingClient):
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
        self.tokenizer = connections[0].tokenizer
        first = dict(zip(range(len(connections)) if indices is None else indices, connections, strict=True))
        self.engine_set = EngineSet(first, self, self._live.has_users)
        """The engines; `octavo admin` adds, drains and removes them."""
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
        **settings: Any,
    ) -> "Starting[AsyncClient]":
        """Start an engine that this client owns; use `async with`, or await it and `close` it later.

        Args:
            model: directory, .gguf file or hub id; or give a whole `config`.
            config: the engine's configuration, instead of `model` and `settings`.
            address: `ipc://` address on which other applications may join.
            on_progress: called with the engine's progress while it starts.
            allow_code: let `logits_processors` hold classes and functions besides names; workers run them.
            settings: any engine flag by its name: `max_num_seqs=8`.

        Raises:
            StartupError: the root cause.
        """
        code = take_code(settings, is_allowed=allow_code)
        given = config or engine_config({"model": model, **settings})
        given = msgspec.structs.replace(given, processor_code=[*given.processor_code, *code])
        return Starting(lambda: cls._on(launch_engines(given, address, on_progress)))

    @classmethod
    async def follow(
        cls, spawned: Several[SpawnedEngine], *, on_progress: ProgressCallback | None = None
    ) -> "AsyncClient":
        """Wait for engines that were spawned on this thread, and join them; the client will end them.

        Raises:
            StartupError: the root cause; all of them have been ended.
        """
        return await cls._on(follow_engines(spawned, on_progress))

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        reconnect_timeout_s: float = RECONNECT_TIMEOUT_S,
        client_secret_key_file: str | None = None,
        engine_public_key_file: str | None = None,
    ) -> "Starting[AsyncClient]":
        """Join an engine that another process runs; use `async with`, or await it and `close` it later.

        Args:
            address: of the engine; those of several engines of the same model are separated by commas.
            connect_timeout_s: how long to wait for it to answer; it may still be loading, or restarting.
            reconnect_timeout_s: if the engine dies, how long requests wait for another one at the same address; 0: they
                fail at once.
            client_secret_key_file: this client's key, for an engine on another machine (`octavo keygen`).
            engine_public_key_file: the key of that engine. Both files must be given.

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
        return Starting(lambda: cls._on(joining()))

    @classmethod
    async def _on(cls, connecting: Awaitable[Several[EngineConnection]]) -> "AsyncClient":
        return cls(*await connecting)

    @property
    def observer(self) -> Observer | None:
        """Receives latencies and finished requests, for the metrics."""
        return self._live.observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self._live.observer = observer

    @property
    def facts(self) -> EngineFacts:
        """What the engine reported when it was joined."""
        return self._link.facts

    @property
    def address(self) -> str:
        """Where other applications can `connect`."""
        return self._link.address

    @property
    def engine(self) -> LaunchedEngine | None:
        """The process behind a launched client, the first one of several; None after `connect`."""
        return self.engines[0].process

    @property
    def engines(self) -> list[ConnectedEngine]:
        """All engines, by index."""
        return self.engine_set.all

    def facts_by_engine(self) -> dict[int, EngineFacts]:
        """Return what each engine reported about itself, by index."""
        return {engine.index: engine.link.facts for engine in self.engines}

    def stats_by_engine(self) -> dict[int, EngineStats]:
        """Return the last report of each engine, by index."""
        return {engine.index: engine.link.latest_stats for engine in self.engines}

    @property
    def failure(self) -> EngineDeadError | None:
        """Why no request can be served any more; None while the engine lives."""
        return self._link.failure

    @property
    def num_lost_requests(self) -> int:
        """Live requests that failed because the engine died."""
        return self._link.num_lost_requests

    @property
    def latest_stats(self) -> EngineStats:
        """The engine's last report, at most about a second old while it works."""
        return self._link.latest_stats

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
        template = self.chat_template(content_format)
        prompt = await self.run_in_thread(lambda: conversation_prompt(template, self.tokenizer, messages, **variables))
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

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenize, off the event loop when the text is long.

        Raises:
            PromptTooLongError: the text cannot fit even if all its tokens are the longest of the vocabulary.
            InvalidRequestError: there is no tokenizer.
        """
        length = self.facts.max_model_len
        return await self._text.encode(self.tokenizer, text, length, add_special_tokens=add_special_tokens)

    async def run_in_thread(self, work: Callable[[], T]) -> T:
        """Run text work (templates, tokenizing) off the event loop."""
        return await self._text.run(work)

    async def abort(self, request_id: str) -> bool:
        """End all requests of this client with this id, finish reason "abort"; False when there is none."""
        return self._live.abort(request_id)

    def abort_all(self) -> None:
        """End every request of this client with finish reason "abort"."""
        self._live.abort_all()

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False while blocks are in use."""
        return await self._call_bool(ResetPrefixCache())

    async def pause_generation(
        self, *, mode: PauseMode = "abort", wait_for_inflight_requests: bool = False, clear_cache: bool = True
    ) -> None:
        """Draw no more tokens until `resume_generation`; new requests wait. Requests of all clients are affected.

        Blocks until: no step is in flight, and the requests that `mode` ends have ended.

        Args:
            mode: what happens to live requests: "abort" ends them, "wait" lets them finish, "keep" stops them where
                they are, and they continue later.
            wait_for_inflight_requests: the same as mode="wait"; vLLM's older name.
            clear_cache: forget cached prefixes; requests that are kept are computed again.

        Raises:
            RequestFailedError: an engine could not; the message says which.
        """
        await self._weights.pause("wait" if wait_for_inflight_requests else mode, clear_cache=clear_cache)

    async def resume_generation(self) -> None:
        """End a pause."""
        await self._weights.resume()

    async def is_paused(self) -> bool:
        """Return whether an engine is paused, or asleep."""
        return any(status.is_paused for status in (await self._weights.status()).values())

    def get_world_size(self) -> int:
        """Return the number of workers of all engines."""
        return self._weights.world_size

    async def init_weight_transfer_engine(self, group: TransferGroup) -> None:
        """Make all workers join a group of torch.distributed, whose rank 0 is a trainer; `WeightSender.open` does it.

        Blocks until: all ranks have joined.

        Args:
            group: its `rank_offset` is the rank of the first worker of the first engine; the others follow.

        Raises:
            RequestFailedError: an engine could not join; the message says why.
            InvalidRequestError: the group has not enough ranks.
        """
        await self._weights.join(group)

    async def update_weights(
        self,
        weights: Weights,
        *,
        label: str = "",
        is_partial: bool = False,
        in_flight: InFlightMode = "recompute",
        is_kept: bool = True,
    ) -> int:
        """Exchange the weights of all engines, which go on serving; see docs/weight-updates.md.

        Blocks until: all engines compute with the new weights.

        Args:
            weights: a checkpoint on the engines' machine (a folder or a file), or named tensors of this process: a
                dict, or an iterator of pairs, which go through shared memory; or a `Transfer`, what rank 0 broadcasts.
            label: what to call them.
            is_partial: tensors may be missing, and stay as they are.
            in_flight: "recompute": requests that have begun compute keys and values again, with the new weights;
                "continue": they keep those of the old ones. Their outputs stay in both cases, and say which weights
                drew which tokens.
            is_kept: keep sent tensors in shared memory, so that a worker or core that dies comes back with them. False:
                the engine then refuses requests until all weights are updated again.

        Returns:
            The version of the new weights.

        Raises:
            RequestFailedError: an engine has refused them, and still has the old ones; or it failed in the middle, and
                rejects requests until all weights are updated. The message says which engines did not change.
            InvalidRequestError: an argument is invalid, or shared memory does not suffice.
        """
        return await self._weights.update(
            weights, label=label, is_partial=is_partial, in_flight=in_flight, is_kept=is_kept
        )

    async def sleep(self, level: int = 1, *, mode: PauseMode = "abort") -> None:
        """Pause, and free the memory of the KV cache and of weights. Requests wait until `wake_up`.

        Args:
            level: 1: weights move to host memory (on CPUs they stay there), 2: they are dropped, and must be updated
                after `wake_up`.
            mode: what happens to live requests; see `pause_generation`.
        """
        await self._weights.sleep(level, mode)

    async def wake_up(self, tags: Several[WakeTag] | None = None) -> None:
        """Take memory again.

        Args:
            tags: "weights", "kv_cache"; None: both. Requests continue once both are back.
        """
        await self._weights.wake_up(tags)

    async def is_sleeping(self) -> bool:
        """Return whether an engine lacks anything that `wake_up` brings back."""
        return any(status.asleep for status in (await self._weights.status()).values())

    async def weights_status(self) -> dict[int, WeightsStatus]:
        """Return the version of the weights of each engine, by index, and whether it is paused or asleep."""
        return await self._weights.status()

    async def start_profile(self, directory: str) -> bool:
        """Start the torch profiler on every worker."""
        return await self._call_bool(StartProfile(directory))

    async def stop_profile(self) -> bool:
        """Stop the profiler and write one trace per worker."""
        return await self._call_bool(StopProfile())

    async def engine_stats(self) -> EngineStats:
        """Return the engine's counters."""
        result = await self._link.call(GetStats())
        assert isinstance(result, EngineStats)
        return result

    async def snapshot(self, engine: int | None = None) -> EngineSnapshot:
        """Return the requests, blocks and latest steps of an engine, by default the first that serves."""
        shown = self.engine_set.lead if engine is None else self.engine_set[engine]
        result = await shown.link.call(GetSnapshot())
        assert isinstance(result, EngineSnapshot)
        return result

    def health(self, deadline_s: float = STALL_DEADLINE_S) -> Health:
        """Return whether an engine is alive and makes progress, without sending it a message.

        Args:
            deadline_s: how long it may have work without finishing a step or taking up a request.
        """
        states = [engine.health(deadline_s) for engine in self.engines if engine.state is EngineState.SERVING]
        return next((state for state in states if state.ok), states[0])

    def engine_reports(self, deadline_s: float = STALL_DEADLINE_S) -> list[EngineReport]:
        """Return how each engine is, also those that start or drain."""
        return [engine.report(deadline_s) for engine in self.engines]

    async def restart(self, config: EngineConfig) -> None:
        """Replace the engine with one of another configuration, or reload its weights; live requests continue.

        The new core starts beside the old one and takes over when it is ready; requests pause for a moment and
        continue there. Memory must be large enough for both.

        Args:
            config: of the new engine; its model must have the same tokens.

        Raises:
            StartupError: a new engine cannot start, with the root cause; the old one continues, and says which others
                were replaced already.
        """
        resolved = await asyncio.to_thread(read_config, config, Timeline())
        if self.engine:
            require_same_number(self.config, resolved)
        tokenizer = await asyncio.to_thread(model_tokenizer, resolved.model)
        await self.run_in_thread(lambda: require_same_tokens(self.config, self.tokenizer, resolved, tokenizer))
        await self.engine_set.replace(resolved)

    async def close(self) -> None:
        """Abort live requests, disconnect, and stop the engine if we started it. Idempotent."""
        try:
            await self._link.close()
            await asyncio.gather(*(engine.close() for engine in self.engines))
        finally:
            self._text.close()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _adapter(self, lora_request: LoRARequest | None) -> Adapter | None:
        return None if lora_request is None else await self.adapters.of_request(lora_request)

    async def _call_bool(self, utility: Utility) -> bool:
        result = await self._link.call(utility)
        assert isinstance(result, BoolResult)
        return result.ok

    def on_stats(self, engine: int, stats: EngineStats) -> None:
        """See `EngineListener`."""
        if self.observer:
            self.observer.on_engine_stats(stats, engine)

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
        self.preparer = RequestPreparer(link, self.tokenizer, self.config, grammars, self.tokenize, self._live)
        """Starts generations whose consumer takes the outputs itself, as the HTTP routes do."""
        self.pooler = Pooler(link, self.tokenizer, self.config, self._text, self._live, self.preparer.check_priority)
