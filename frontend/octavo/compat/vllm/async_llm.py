"""`AsyncLLM`: requests from an event loop, with cumulative outputs by default."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterable
from typing import Any, TypeVar

from octavo.compat.vllm.engine_view import EngineView
from octavo.compat.vllm.llm import LLM
from octavo.compat.vllm.prompts import with_text
from octavo.compat.vllm.request_outputs import RequestOutput
from octavo.frontend.pooling.outputs import pooling_output

T = TypeVar("T")


class AsyncLLM(EngineView):
    """vLLM's class. The engine runs on a thread of its own, so one object serves any event loop.

    Args:
        llm: the engine.
    """

    _llm: LLM

    @classmethod
    def from_engine_args(
        cls,
        engine_args: Any,
        start_engine_loop: bool = True,
        usage_context: Any = None,
        stat_loggers: Any = None,
    ) -> "AsyncLLM":
        """Start an engine with the settings of `AsyncEngineArgs`.

        Blocks until: the engine is ready.

        Args:
            engine_args: the settings.
            start_engine_loop: ignored; the loop always runs.
            usage_context: ignored.
            stat_loggers: must be `None`; `LLM.get_metrics` returns the metrics.
        """
        del start_engine_loop, usage_context
        if stat_loggers:
            raise NotImplementedError("stat_loggers: use LLM.get_metrics, or the server's /metrics")
        settings = engine_args.settings()
        settings.pop("enable_log_requests", None)
        return cls(LLM(**{"step_time_target": None, **settings}))

    def get_tokenizer(self) -> Any:
        """See `LLM.get_tokenizer`."""
        return self._llm.get_tokenizer()

    async def get_default_sampling_params(self) -> Any:
        """Return the model's default parameters."""
        return self._llm.get_default_sampling_params()

    async def generate(
        self,
        prompt: Any,
        sampling_params: Any,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Any = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate for one prompt. Outputs are cumulative unless `output_kind` says otherwise.

        Leaving the loop early, or cancelling the task, aborts the request.

        Args:
            prompt: in vLLM's forms.
            sampling_params: parameters of the request.
            request_id: shown in the outputs and accepted by `abort`.
            prompt_text: text that outputs show, for a prompt of token ids.
            lora_request: the adapter.
            tokenization_kwargs: as in `LLM.generate`.
            trace_headers: ignored.
            priority: as in `LLM.generate`.
            data_parallel_rank: ignored; octavo chooses the engine.
            options: further options of vLLM, ignored.

        Raises:
            OctavoError: as in octavo's `AsyncClient.generate`.
        """
        del trace_headers, data_parallel_rank, options
        prompt = with_text(prompt, prompt_text)
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue[RequestOutput | None]()

        async def pump() -> None:
            try:
                async for output in self._llm.outputs_of(
                    request_id,
                    prompt,
                    sampling_params,
                    lora_request=lora_request,
                    priority=priority,
                    tokenization_kwargs=tokenization_kwargs,
                ):
                    loop.call_soon_threadsafe(arrived.put_nowait, output)
            finally:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(arrived.put_nowait, None)

        pumping = asyncio.run_coroutine_threadsafe(pump(), self._llm._loop)
        try:
            while (output := await arrived.get()) is not None:
                yield output
            await asyncio.wrap_future(pumping)  # raises the request's error
        finally:
            pumping.cancel()

    async def encode(
        self,
        prompt: Any,
        pooling_params: Any,
        request_id: str,
        lora_request: Any = None,
        trace_headers: Any = None,
        priority: int = 0,
        **options: Any,
    ) -> AsyncGenerator[Any, None]:
        """Yield the result of pooling a prompt, as a tensor, in one output."""
        del trace_headers, priority, options
        import torch

        task = pooling_params.task if pooling_params else None
        (result,) = await self._call(
            self._llm.client.pool([prompt], pooling_params, task=task, lora_request=lora_request)
        )
        output = pooling_output(result)
        output.request_id = request_id
        data: Any = torch.from_numpy(output.outputs.data.copy())
        output.outputs.data = data
        yield output

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """Abort requests; they end with finish reason "abort"."""
        del internal
        for one in [request_id] if isinstance(request_id, str) else request_id:
            await self._call(self._llm.client.abort(one))

    async def pause_generation(self, *, mode: Any = "abort", clear_cache: bool = True, **options: Any) -> None:
        """Stop drawing tokens until `resume_generation`; see octavo's `AsyncClient.pause_generation`."""
        await self._call(self._llm.client.pause_generation(mode=mode, clear_cache=clear_cache, **options))

    async def resume_generation(self) -> None:
        """End a pause."""
        await self._call(self._llm.client.resume_generation())

    async def is_paused(self) -> bool:
        """Return whether the engine is paused or asleep."""
        return await self._call(self._llm.client.is_paused())

    async def sleep(self, level: int = 1, mode: Any = "abort") -> None:
        """See `LLM.sleep`."""
        await self._call(self._llm.client.sleep(level, mode=mode))

    async def wake_up(self, tags: Any = None) -> bool:
        """See `LLM.wake_up`."""
        await self._call(self._llm.client.wake_up(tags))
        return not await self.is_sleeping()

    async def is_sleeping(self) -> bool:
        """Return whether the engine still lacks its weights or its KV cache after `sleep`."""
        return await self._call(self._llm.client.is_sleeping())

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """See `LLM.reset_prefix_cache`."""
        return await asyncio.to_thread(self._llm.reset_prefix_cache, reset_running_requests, reset_connector)

    async def reset_mm_cache(self) -> None:
        """See octavo's `AsyncClient.reset_mm_cache`."""
        await self._call(self._llm.client.reset_mm_cache())

    async def start_profile(self, profile_prefix: str | None = None, **options: Any) -> None:
        """See `LLM.start_profile`."""
        await asyncio.to_thread(self._llm.start_profile, profile_prefix, **options)

    async def stop_profile(self) -> None:
        """See `LLM.stop_profile`."""
        await asyncio.to_thread(self._llm.stop_profile)

    async def add_lora(self, lora_request: Any) -> bool:
        """Read an adapter before its first request."""
        await self._call(self._llm.client.adapters.of_request(lora_request))
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        """Forget the adapter of a `lora_int_id`, and return whether it was known. Requests in flight finish with it."""
        return self._llm.client.adapters.forget(lora_id)

    async def list_loras(self) -> set[int]:
        """Return the `lora_int_id` of each adapter that was read."""
        return self._llm.client.adapters.ids

    async def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,  # noqa: ASYNC109
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
    ) -> list[Any]:
        """See `LLM.collective_rpc`."""
        return await asyncio.to_thread(self._llm.collective_rpc, method, timeout, args, kwargs)

    async def check_health(self) -> None:
        """Raise an error if the engine has failed.

        Raises:
            EngineDeadError: it has.
        """
        if (failure := self._llm.client.failure) is not None:
            raise failure

    async def do_log_stats(self) -> None:
        """Do nothing: the engine logs its throughput itself."""

    async def is_tracing_enabled(self) -> bool:
        """Return False: requests of this class have no traces."""
        return False

    def get_num_unfinished_requests(self) -> int:
        """Return the number of running requests."""
        return self._llm.client.num_live_requests

    @property
    def is_running(self) -> bool:
        """Whether the engine is alive."""
        return not self.errored

    @property
    def is_stopped(self) -> bool:
        """Whether the engine is gone for good."""
        return self.errored

    @property
    def errored(self) -> bool:
        """Whether the engine is gone for good."""
        return self._llm.client.failure is not None

    @property
    def dead_error(self) -> BaseException:
        """Why the engine is gone."""
        return self._llm.client.failure or RuntimeError("the engine is not dead")

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop the engine. Idempotent."""
        del timeout
        self._llm.close()

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the engine's thread."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._llm._loop))
