"""`LLM`: offline batches, for programs without an event loop."""

import asyncio
import itertools
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, overload

from tqdm import tqdm

from octavo.frontend.client import AsyncClient
from octavo.frontend.generation.chat_prompt import chat_prompt
from octavo.frontend.generation.prompt import Prompt
from octavo.frontend.load_bar import LoadBar
from octavo.frontend.loop_thread import close_client, stop_loop
from octavo.frontend.lora.request import LoRARequest
from octavo.frontend.outputs import BeamSearchOutput, RequestOutput, as_beam_search_output
from octavo.frontend.pooling.llm import PoolingLLM, as_prompts, one_per_prompt
from octavo.frontend.text.chat_template import FormatChoice
from octavo.frontend.text.messages import Message
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.frontend.weights_llm import WeightsLLM
from octavo.protocol.errors import EngineDeadError, InvalidRequestError
from octavo.protocol.params import BeamSearchParams, OutputKind, SamplingParams
from octavo.protocol.snapshot import EngineSnapshot
from octavo.protocol.stats import EngineStats

T = TypeVar("T")

MAX_IN_FLIGHT = 1024
"""Maximum number of sequences in flight: enough to fill every batch, and below the engine's queue limit."""


class LLM(PoolingLLM, WeightsLLM):
    """An engine, and the thread that communicates with it.

    Close it with `close` or a `with` statement; a garbage-collected `LLM` is closed, too. All methods block until their
    result is complete, and may be called from several threads.

    Args:
        model: directory, .gguf file or hub id.
        settings: any engine flag by name: `LLM(path, max_num_seqs=8, dtype="float32")`.

    Raises:
        ConfigError: a setting is invalid.
        StartupError: the engine could not start. The error names the root cause.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        self._loop = asyncio.new_event_loop()
        # The engine's process is killed when this thread ends: see `Child.spawn`.
        self._thread = threading.Thread(target=self._loop.run_forever, name="octavo LLM", daemon=True)
        self._thread.start()
        self._request_counter = itertools.count()
        try:
            # Offline batches do not stream, so throughput matters more than the latency of a step.
            batch_settings = {"step_time_target": 0.0, **settings}
            with LoadBar() as bar:
                launched = AsyncClient.launch(model, **{"on_progress": bar, **batch_settings})
                self.client: AsyncClient = self._run(_await(launched))
        except BaseException:
            stop_loop(self._loop, self._thread)
            raise
        self._finalizer = weakref.finalize(self, close_client, self.client, self._loop, self._thread)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Generate text for every prompt.

        Args:
            prompts: one prompt or several; see `Prompt`.
            sampling_params: one for all prompts, or one per prompt. `None`: the model's defaults.
            use_tqdm: show a progress bar.
            priority: one for all prompts, or one per prompt. Lower values run earlier; needs
                `scheduling_policy="priority"`.
            lora_request: one LoRA adapter for all prompts, or one per prompt; needs `enable_lora=True`.

        Returns:
            One complete output per prompt, in the order of the prompts.

        Raises:
            InvalidRequestError: a prompt or a parameter is invalid. All requests of the call were aborted.
            RequestFailedError: the engine gave up on a request.
            EngineDeadError: the engine has died or was closed.
        """
        several = as_prompts(prompts)
        params = one_per_prompt("sampling_params", sampling_params, len(several))
        priorities = one_per_prompt("priority", 0 if priority is None else priority, len(several))
        adapters = one_per_prompt("lora_request", lora_request, len(several))
        return self._run(self._generate_all(several, params, priorities, adapters, use_tqdm=use_tqdm))

    def chat(
        self,
        messages: list[Message] | Sequence[list[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        chat_template_content_format: FormatChoice = "auto",
        tools: list[dict[str, Any]] | None = None,
    ) -> list[RequestOutput]:
        """Generate the next message of one conversation or several, rendered with the model's chat template.

        Args:
            messages: one conversation (a list of messages) or a list of conversations.
            sampling_params: as for `generate`.
            use_tqdm: show a progress bar.
            lora_request: as for `generate`.
            priority: as for `generate`.
            add_generation_prompt: end each prompt with the header of an assistant message.
            continue_final_message: continue the last message instead of starting a new one.
            chat_template: a file or the Jinja source, instead of the engine's template.
            chat_template_kwargs: further variables for the template.
            chat_template_content_format: how the template expects the content of messages: "string", "openai", or
                "auto" to detect it from the template.
            tools: functions that the template shows the model, in the format of the HTTP API. Tool calls are not parsed
                from the output text.

        Returns:
            One output per conversation, in their order.

        Raises:
            InvalidRequestError: the model has no chat template, the template rejects the messages, or as for
                `generate`.
            RequestFailedError: the engine gave up on a request.
            EngineDeadError: the engine has died or was closed.
        """
        variables = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            **(chat_template_kwargs or {}),
        }
        prompts = self._conversation_prompts(messages, chat_template, chat_template_content_format, variables)
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request, priority=priority)

    def _conversation_prompts(
        self,
        messages: list[Message] | Sequence[list[Message]],
        chat_template: str | None,
        content_format: FormatChoice,
        variables: dict[str, Any],
    ) -> list[Prompt]:
        several: list[Any] = list(messages)
        conversations: list[list[Message]] = [several] if several and isinstance(several[0], dict) else several
        template = self.client.chat_template(content_format, chat_template)

        async def rendered() -> list[Prompt]:
            return [await chat_prompt(self.client, template, one, **variables) for one in conversations]

        return self._run(rendered())

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[BeamSearchOutput]:
        """Run a beam search for every prompt.

        Args:
            prompts: one prompt or several; see `Prompt`.
            params: beam width, length limit and scoring.
            use_tqdm: show a progress bar.
            concurrency_limit: maximum number of prompts searched at once. `None`: as many as the engine accepts.
            lora_request: as for `generate`.

        Returns:
            One output per prompt, in the order of the prompts; its sequences are sorted by score, best first.

        Raises:
            InvalidRequestError: a prompt or a parameter is invalid. All requests of the call were aborted.
            RequestFailedError: the engine gave up on a request.
            EngineDeadError: the engine has died or was closed.
        """
        several = as_prompts(prompts)
        adapters = one_per_prompt("lora_request", lora_request, len(several))
        return self._run(self._search_all(several, params, adapters, concurrency_limit, use_tqdm=use_tqdm))

    @overload
    def score_tokens(
        self, prompts: Prompt, tokens: Sequence[int], *, lora_request: LoRARequest | None = None
    ) -> list[float]: ...

    @overload
    def score_tokens(
        self,
        prompts: Sequence[Prompt],
        tokens: Sequence[Sequence[int]],
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[list[float]]: ...

    def score_tokens(self, prompts: Any, tokens: Any, *, lora_request: Any = None) -> Any:
        """Return the logprobs of given tokens after a prompt, bit-identical to the logprobs that sampling reports.

        Args:
            prompts: one prompt, or several.
            tokens: token ids that continue the prompt; one list of ids per prompt if there are several prompts.
            lora_request: as for `generate`.

        Returns:
            One logprob per token of `tokens`; one list per prompt if there are several prompts.

        Raises:
            InvalidRequestError: a prompt or a token is invalid, or `--logprobs-mode` is not raw_logprobs.
            EngineDeadError: the engine has died or was closed.
        """
        if all(isinstance(token, int) for token in tokens):
            return self._run(self.client.score_tokens(prompts, tokens, lora_request=lora_request))
        several = one_per_prompt("tokens", tokens, len(prompts))
        adapters = one_per_prompt("lora_request", lora_request, len(prompts))
        works = [
            partial(self.client.score_tokens, prompt, each, lora_request=adapter)
            for prompt, each, adapter in zip(prompts, several, adapters, strict=True)
        ]
        return self._run(_each(works, MAX_IN_FLIGHT, use_tqdm=False))

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer, with `encode` and `decode`.

        Raises:
            InvalidRequestError: the engine runs without a tokenizer.
        """
        self.client.tokenizer.require("get_tokenizer")
        return self.client.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the model's default sampling parameters, which apply to requests without their own."""
        return self.client.default_params()

    def start_profile(self, directory: str) -> None:
        """Start recording a torch profiler trace in every worker.

        Args:
            directory: where `stop_profile` writes the traces.

        Raises:
            RequestFailedError: the directory cannot be created or written.
        """
        self._run(self.client.start_profile(str(Path(directory).resolve())))

    def stop_profile(self) -> None:
        """Stop recording; each worker writes its trace into the directory given to `start_profile`."""
        self._run(self.client.stop_profile())

    def stats(self) -> EngineStats:
        """Return the engine's counters."""
        return self._run(self.client.engine_stats())

    def snapshot(self) -> EngineSnapshot:
        """Return the engine's requests, blocks and latest steps, for display."""
        return self._run(self.client.snapshot())

    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes. Return `False`, and drop nothing, if blocks are in use."""
        return self._run(self.client.reset_prefix_cache())

    def reset_mm_cache(self) -> None:
        """Drop the cache of processed media; see `AsyncClient.reset_mm_cache`."""
        self._run(self.client.reset_mm_cache())

    def close(self) -> None:
        """Stop the engine. Safe to call twice."""
        self._finalizer()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def _generate_all(
        self,
        prompts: list[Prompt],
        params: Sequence[SamplingParams | None],
        priorities: Sequence[int],
        adapters: Sequence[LoRARequest | None],
        *,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        ids = [str(next(self._request_counter)) for _ in prompts]
        widest = max((param.num_sequences for param in params if param), default=1)
        return await _each(
            [
                partial(self._generate_one, *each)
                for each in zip(prompts, params, priorities, adapters, ids, strict=True)
            ],
            max(1, MAX_IN_FLIGHT // widest),
            use_tqdm=use_tqdm,
        )

    async def _search_all(
        self,
        prompts: list[Prompt],
        params: BeamSearchParams,
        adapters: Sequence[LoRARequest | None],
        limit: int | None,
        *,
        use_tqdm: bool,
    ) -> list[BeamSearchOutput]:
        if limit is not None and limit < 1:
            raise InvalidRequestError(f"concurrency_limit must be at least 1, got {limit}", "concurrency_limit")
        widest = max(1, MAX_IN_FLIGHT // params.beam_width)
        return await _each(
            [partial(self._search_one, prompt, params, one) for prompt, one in zip(prompts, adapters, strict=True)],
            min(limit or widest, widest),
            use_tqdm=use_tqdm,
        )

    async def _search_one(
        self, prompt: Prompt, params: BeamSearchParams, lora_request: LoRARequest | None
    ) -> BeamSearchOutput:
        # Like vLLM, return 2 * beam_width logprobs, but at most `max_logprobs`.
        allowed = self.client.config.max_logprobs
        num_logprobs = 2 * params.beam_width if allowed == -1 else min(2 * params.beam_width, allowed)
        output = await self.client.beam_search(
            prompt,
            params,
            request_id=str(next(self._request_counter)),
            logprobs=num_logprobs,
            lora_request=lora_request,
        )
        return as_beam_search_output(output, self.client.tokenizer.decode(output.prompt_token_ids))

    async def _generate_one(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        priority: int,
        lora_request: LoRARequest | None,
        request_id: str,
    ) -> RequestOutput:
        final = (params or self.client.default_params()).clone(output_kind=OutputKind.FINAL_ONLY)
        async for output in self.client.generate(
            prompt, final, request_id=request_id, priority=priority, lora_request=lora_request
        ):
            return output
        raise AssertionError("a request ended without an output")

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the engine's thread. Ctrl-C in the calling thread cancels it."""
        if self._loop.is_closed():
            work.close()
            raise EngineDeadError("this LLM was closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except ExceptionGroup as group:  # a task group wraps even a single failure
            raise _first_leaf(group) from None
        except BaseException:
            future.cancel()
            raise


async def _each(works: Sequence[Callable[[], Awaitable[T]]], limit: int, *, use_tqdm: bool) -> list[T]:
    """Run all callables, at most `limit` at a time; results are in the order of `works`."""
    semaphore = asyncio.Semaphore(limit)
    with tqdm(total=len(works), desc="Processed prompts", unit="prompt", disable=not use_tqdm) as bar:

        async def run(work: Callable[[], Awaitable[T]]) -> T:
            async with semaphore:
                result = await work()
            bar.update()
            return result

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(work)) for work in works]
    return [task.result() for task in tasks]


async def _await(starting: Any) -> AsyncClient:
    client: AsyncClient = await starting
    return client


def _first_leaf(group: "ExceptionGroup[Exception]") -> Exception:
    error: Exception = group
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
