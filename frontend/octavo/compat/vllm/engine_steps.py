"""`EngineSteps`: requests are added one by one, and `step` returns the outputs since its last call."""

import asyncio
import threading
from concurrent.futures import Future
from typing import Any

from octavo.compat.vllm.engine_view import EngineView
from octavo.compat.vllm.prompts import with_text
from octavo.compat.vllm.request_outputs import RequestOutput
from octavo.compat.vllm.sampling import RequestOutputKind, SamplingParams
from octavo.frontend.pooling.outputs import pooling_output
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.pooling_params import PoolingParams


class EngineSteps(EngineView):
    """The methods of vLLM's `LLMEngine`, on top of an `LLM`.

    octavo's engine runs continuously: `step` only waits for outputs, and does not drive the engine.

    Args:
        llm: this package's `LLM`.
    """

    def __init__(self, llm: Any) -> None:
        super().__init__(llm)
        self._arrived = threading.Condition()
        """Guards all attributes below."""
        self._outputs: list[Any] = []
        self._running: dict[str, Future[None]] = {}
        self._failures: list[BaseException] = []

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Any = None,
        priority: int = 0,
        session_id: str | None = None,
        prompt_text: str | None = None,
    ) -> str:
        """Start a request and return its id.

        Args:
            request_id: shown in the outputs.
            prompt: in vLLM's forms.
            params: sampling or pooling parameters.
            arrival_time: ignored; the engine measures it.
            lora_request: the adapter.
            tokenization_kwargs: as in `LLM.generate`.
            trace_headers: ignored.
            priority: as in `LLM.generate`.
            session_id: ignored; prefixes are cached for all requests.
            prompt_text: text that outputs show, for a prompt of token ids.

        Raises:
            InvalidRequestError: the prompt is not supported, or a running request has this id.
        """
        del arrival_time, trace_headers, session_id
        prompt = with_text(prompt, prompt_text)
        if isinstance(params, PoolingParams):
            work = self._pool(request_id, prompt, params, lora_request)
        else:
            prompt, _ = self._llm._run(self._llm._prepare(prompt, params, tokenization_kwargs))
            work = self._generate(request_id, prompt, params, lora_request, priority)
        with self._arrived:
            if request_id in self._running:
                work.close()
                raise InvalidRequestError(f"a request with the id {request_id!r} is running", "request_id")
            running = self._running[request_id] = asyncio.run_coroutine_threadsafe(work, self._llm._loop)
        running.add_done_callback(lambda done: self._end(request_id, done))
        return request_id

    def step(self) -> list[Any]:
        """Return the outputs since the last call. Blocks until: there is one, if requests are running.

        Raises:
            OctavoError: a request has failed. The others continue.
        """
        with self._arrived:
            self._arrived.wait_for(lambda: self._outputs or self._failures or not self._running)
            if self._failures:
                raise self._failures.pop(0)
            outputs, self._outputs = self._outputs, []
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Return whether `step` has anything to return, now or later."""
        with self._arrived:
            return bool(self._running or self._outputs or self._failures)

    def get_num_unfinished_requests(self) -> int:
        """Return the number of running requests."""
        with self._arrived:
            return len(self._running)

    def abort_request(self, request_ids: list[str], internal: bool = False) -> None:
        """Abort requests; they have no further outputs."""
        del internal
        with self._arrived:
            ended = [future for request_id in request_ids if (future := self._running.pop(request_id, None))]
            self._outputs = [output for output in self._outputs if output.request_id not in set(request_ids)]
        for future in ended:
            future.cancel()

    def __getattr__(self, name: str) -> Any:
        # All other attributes, such as `sleep` and `get_metrics`, are those of `LLM`.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._llm, name)

    async def _generate(self, request_id: str, prompt: Any, params: Any, lora_request: Any, priority: int) -> None:
        async for output in self._llm.outputs_of(
            request_id, prompt, params, lora_request=lora_request, priority=priority
        ):
            self._put(output, replaces=params.output_kind is RequestOutputKind.CUMULATIVE)

    async def _pool(self, request_id: str, prompt: Any, params: PoolingParams, lora_request: Any) -> None:
        (result,) = await self._llm.client.pool([prompt], params, task=params.task, lora_request=lora_request)
        output = pooling_output(result)
        output.request_id = request_id
        self._put(output, replaces=False)

    def _put(self, output: Any, *, replaces: bool) -> None:
        with self._arrived:
            if output.request_id not in self._running:  # aborted
                return
            if replaces:  # replaced by a newer output that contains it
                self._outputs = [one for one in self._outputs if not _is_covered(one, output)]
            self._outputs.append(output)
            self._arrived.notify_all()

    def _end(self, request_id: str, done: "Future[None]") -> None:
        with self._arrived:
            if self._running.get(request_id) is done:  # otherwise it was aborted, and another request may have its id
                del self._running[request_id]
            if not done.cancelled() and (error := done.exception()) is not None:
                self._failures.append(error)
            self._arrived.notify_all()


def _is_covered(one: RequestOutput, output: RequestOutput) -> bool:
    indices = {sequence.index for sequence in output.outputs}
    return one.request_id == output.request_id and all(sequence.index in indices for sequence in one.outputs)
