"""A client without an engine: scripted replies, with a real tokenizer and chat template.

It implements the part of `AsyncClient` that the HTTP server uses. Tokens are bytes, so that text, tokens and logprobs
of an answer can be written by hand.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from pooling_link import PoolingLink, pooler_on
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from octavo.frontend.generation.prompt import TokenizedPrompt
from octavo.frontend.health import EngineReport, Health
from octavo.frontend.lora.registry import AdapterRegistry
from octavo.frontend.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from octavo.frontend.text.chat_template import ChatTemplate, FormatChoice
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.frontend.wake_event import WakeEvent, WakeQueue
from octavo.protocol.adapters import Adapter
from octavo.protocol.config import ModelFacts, ResolvedConfig
from octavo.protocol.errors import InvalidRequestError, OctavoError, PromptTooLongError
from octavo.protocol.events import EngineFacts
from octavo.protocol.params import BeamSearchParams, OutputKind, SamplingParams
from octavo.protocol.stats import EngineStats, RequestTimings

T = TypeVar("T")

MODEL = "org/fake"
MAX_MODEL_LEN = 256
BOS, EOS = 256, 257
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{{ suffix }}"
)


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer whose token ids are the bytes of the text, and two special tokens."""
    from octavo.frontend.text.token_bytes import byte_characters

    vocabulary = {character: byte for byte, character in byte_characters().items()}
    fast = FastTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken("<bos>", special=True), AddedToken("<eos>", special=True)])
    return Tokenizer(fast, {"bos_token": "<bos>", "eos_token": "<eos>"}, {"default": TEMPLATE})


def resolved_config(**changes: Any) -> ResolvedConfig:
    """Return a plausible configuration of a small engine."""
    facts = ModelFacts(
        model_path="/models/fake",
        tokenizer_path="/models/fake",
        load_format="dummy",
        architecture="LlamaForCausalLM",
        hf_config=changes.pop("hf_config", {}),
        vocab_size=258,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=4,
        max_position_embeddings=MAX_MODEL_LEN,
        checkpoint_dtype="float32",
        eos_token_ids=[EOS],
        generation_defaults=changes.pop("generation_defaults", {}),
        pooling=changes.pop("pooling", None),
    )
    from octavo.protocol.config import resolve
    from octavo.protocol.config.sources import engine_config

    config = engine_config({"model": "/models/fake", "served_model_name": [MODEL, "alias"], **changes})
    return resolve(config, facts, device="cpu", num_cores=1)


def engine_facts(served_model_names: list[str], **changes: Any) -> EngineFacts:
    """Return what a small engine tells of itself."""
    values: dict[str, Any] = {
        "epoch": 1,
        "model": "/models/fake",
        "served_model_names": served_model_names,
        "max_model_len": MAX_MODEL_LEN,
        "vocab_size": 258,
        "block_size": 16,
        "num_blocks": 64,
        "max_num_seqs": 8,
        "max_logprobs": 20,
        "dtype": "float32",
        "device": "cpu",
        "config": b"",
    }
    return EngineFacts(**{**values, **changes})


class FakeClient:
    """Answers every request with `reply`, one token per output, unless configured otherwise."""

    def __init__(self, reply: str = "Hello!", **config: Any) -> None:
        self.reply = reply
        self.config = resolved_config(**config)
        self.tokenizer = byte_tokenizer()
        self.facts = engine_facts(self.config.served_model_names)
        self.adapters = AdapterRegistry(lambda: self.config, self.run_in_thread)
        self.media = None
        """It reads text only."""
        self.requests: list[dict[str, Any]] = []
        """Calls of `generate`, in order."""
        self.ended_early: list[str] = []
        """Requests whose caller left before they finished."""
        self.error: OctavoError | None = None
        """Raised by `generate` after `error_after` tokens."""
        self.error_after = 0
        self.pause_after: int | None = None
        """Generate this many tokens, then hang."""
        self.gate: asyncio.Event | None = None
        """Must be set before the first token is generated."""
        self.num_cached_tokens = 0
        self.state = Health(ok=True)
        self.latest_stats = EngineStats()
        self.observer = None
        self.failure = None
        self._wake_queue: WakeQueue | None = None
        self.profiled: list[str] = []
        """Directories of the recordings that were started; "" for one that was ended."""
        self._aborted = asyncio.Event()
        self.pooling_link = PoolingLink(engine_facts(self.config.served_model_names))
        self.pooler = pooler_on(self.pooling_link, self.config, self.tokenizer)

    def facts_by_engine(self) -> dict[int, EngineFacts]:
        return {0: self.facts}

    def stats_by_engine(self) -> dict[int, EngineStats]:
        return {0: self.latest_stats}

    @property
    def num_live_requests(self) -> int:
        return len(self.requests)

    def abort_all(self) -> None:
        self._aborted.set()

    async def reset_prefix_cache(self) -> bool:
        return not self.latest_stats.num_running

    async def start_profile(self, directory: str) -> bool:
        self.profiled.append(directory)
        return True

    async def stop_profile(self) -> bool:
        self.profiled.append("")
        return True

    def health(self, deadline_s: float = 30.0) -> Health:
        return self.state

    def engine_reports(self, deadline_s: float = 30.0) -> list[EngineReport]:
        return [EngineReport(0, "up" if self.state.ok else "down", self.state.reason)]

    def chat_template(self, content_format: FormatChoice = "auto") -> ChatTemplate:
        return ChatTemplate.for_model(self.config.chat_template, self.tokenizer, content_format)

    def default_params(self, max_tokens: int | None = 16) -> SamplingParams:
        from octavo.frontend.generation.spec import default_params

        return default_params(self.config, max_tokens)

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.tokenizer.require("prompt")
        return ([BOS] if add_special_tokens else []) + self.tokenizer.encode(text, add_special_tokens=False)

    async def run_in_thread(self, work: Callable[[], T]) -> T:
        return work()

    async def generate(
        self,
        tokenized: TokenizedPrompt,
        sampling_params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: Adapter | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        prompt = _noted(tokenized)
        noted = {"prompt": prompt, "params": sampling_params, "id": request_id, "priority": priority}
        self.requests.append({**noted, "salt": cache_salt, "adapter": adapter})
        finished = False
        try:
            async for output in self._outputs(prompt, sampling_params, request_id):
                finished = output.finished
                yield output
        finally:
            if not finished:
                self.ended_early.append(request_id)

    @property
    def preparer(self) -> "FakeClient":
        return self

    def wake_event(self) -> WakeEvent:
        self._wake_queue = self._wake_queue or WakeQueue()
        return WakeEvent(self._wake_queue)

    async def start(
        self, tokenized: TokenizedPrompt, sampling_params: SamplingParams, arrived: WakeEvent, **options: Any
    ) -> "FakeGeneration":
        return FakeGeneration(self.generate(tokenized, sampling_params, **options), arrived)

    async def beam_search(
        self,
        tokenized: TokenizedPrompt,
        params: BeamSearchParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
        logprobs: int | None = None,
        lora_request: Adapter | None = None,
    ) -> RequestOutput:
        """Find the reply, and its beginnings from one letter less on."""
        prompt = _noted(tokenized)
        self.requests.append(
            {"prompt": prompt, "params": params, "id": request_id, "priority": priority, "salt": cache_salt}
        )
        asked = SamplingParams(logprobs=logprobs)
        reply = list(self.reply.encode())[: params.max_tokens]
        outputs = [
            self._choice(index, asked, reply[: len(reply) - index], "length") for index in range(params.beam_width)
        ]
        return self._output(request_id, prompt, asked, outputs, finished=True)

    async def _outputs(
        self, prompt: dict[str, Any], params: SamplingParams, request_id: str
    ) -> AsyncGenerator[RequestOutput]:
        token_ids = prompt["prompt_token_ids"]
        if not token_ids:
            raise InvalidRequestError("the prompt is empty", "prompt")
        if len(token_ids) >= MAX_MODEL_LEN:
            raise PromptTooLongError("the prompt is too long", "prompt")
        reply = list(self.reply.encode())
        limit = params.max_tokens or MAX_MODEL_LEN
        reason = "length" if limit < len(reply) else "stop"
        reply = reply[:limit]
        steps = [(place, token) for place, token in enumerate(reply)]
        if params.output_kind is OutputKind.FINAL_ONLY:
            await self._wait(len(reply))
            outputs = [self._choice(index, params, reply, reason) for index in range(params.n)]
            yield self._output(request_id, prompt, params, outputs, finished=True)
            return
        for place, token in steps:
            await self._wait(place)
            if self._aborted.is_set():
                outputs = [self._choice(index, params, [], "abort") for index in range(params.n)]
                yield self._output(request_id, prompt, params, outputs, finished=True)
                return
            is_last = place == len(reply) - 1
            outputs = [self._choice(index, params, [token], reason if is_last else None) for index in range(params.n)]
            yield self._output(request_id, prompt, params, outputs, finished=is_last)

    async def _wait(self, num_tokens: int) -> None:
        await asyncio.sleep(0)
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None and num_tokens >= self.error_after:
            raise self.error
        if self.pause_after is not None and num_tokens >= self.pause_after:
            await self._aborted.wait()

    def _choice(self, index: int, params: SamplingParams, token_ids: list[int], reason: str | None) -> CompletionOutput:
        logprobs = None if params.logprobs is None else [_position(token, params.logprobs) for token in token_ids]
        if named := params.logprob_token_ids:
            logprobs = [{token: Logprob(-1.5, 2, _text(token)), **_named(named)} for token in token_ids]
        return CompletionOutput(
            index, bytes(token_ids).decode("utf-8", "replace"), token_ids, None, logprobs, finish_reason=reason
        )

    def _output(
        self,
        request_id: str,
        prompt: dict[str, Any],
        params: SamplingParams,
        outputs: list[CompletionOutput],
        *,
        finished: bool,
    ) -> RequestOutput:
        token_ids = prompt["prompt_token_ids"]
        prompt_logprobs: list[PositionLogprobs | None] | None = None
        if params.prompt_logprobs is not None:
            prompt_logprobs = [None, *[_position(token, params.prompt_logprobs) for token in token_ids[1:]]]
        return RequestOutput(
            request_id=request_id,
            prompt=prompt["prompt"],
            prompt_token_ids=token_ids,
            outputs=outputs,
            finished=finished,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=self.num_cached_tokens,
            timings=[RequestTimings(time.monotonic())] if finished else [],
        )


class FakeGeneration:
    """Runs a generator in a task, and hands out each of its outputs."""

    def __init__(self, outputs: AsyncGenerator[RequestOutput], arrived: WakeEvent) -> None:
        self._outputs = outputs
        self._arrived = arrived
        self._taken = asyncio.Event()
        self._output: RequestOutput | Exception | None = None
        self._task: asyncio.Task[None] | None = None

    def __enter__(self) -> "FakeGeneration":
        return self

    def __exit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()

    async def submit(self) -> None:
        self._task = asyncio.create_task(self._run())

    def take(self) -> RequestOutput | None:
        output, self._output = self._output, None
        self._taken.set()
        if isinstance(output, Exception):
            raise output
        return output

    async def _run(self) -> None:
        try:
            async with aclosing(self._outputs) as outputs:
                async for output in outputs:
                    await self._hand_out(output)
        except Exception as error:
            await self._hand_out(error)

    async def _hand_out(self, output: RequestOutput | Exception) -> None:
        self._output = output
        self._taken.clear()
        self._arrived.set()
        await self._taken.wait()


def _noted(prompt: TokenizedPrompt) -> dict[str, Any]:
    return {"prompt": prompt.text, "prompt_token_ids": list(prompt.token_ids)}


def _named(token_ids: list[int]) -> PositionLogprobs:
    return {token_id: Logprob(-4.0 - place, None, _text(token_id)) for place, token_id in enumerate(token_ids)}


def _position(token_id: int, num_top: int) -> PositionLogprobs:
    """Give the token rank 2, behind "?", and fill up with the letters from "A"."""
    position = {token_id: Logprob(-1.5, 2, _text(token_id))}
    others = [ord("?"), *range(ord("A"), ord("Z"))]
    for place, other in enumerate(others[: max(0, num_top - 1)]):
        position[other] = Logprob(-0.5 if place == 0 else -2.0 - place, place + 1 if place == 0 else place + 2)
    return position


def _text(token_id: int) -> str:
    return chr(token_id) if token_id < 128 else "\ufffd"
