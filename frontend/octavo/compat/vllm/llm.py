"""`LLM` with vLLM's signatures and outputs."""

import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from octavo.compat.vllm.engine_args import changed
from octavo.compat.vllm.engine_steps import EngineSteps
from octavo.compat.vllm.engine_view import ProfilerConfig, plain
from octavo.compat.vllm.metrics import Metric, snapshot
from octavo.compat.vllm.pooling import PoolingLLM
from octavo.compat.vllm.prompts import tokenized, with_kwargs
from octavo.compat.vllm.request_outputs import RequestOutput, request_output
from octavo.compat.vllm.sampling import RequestOutputKind, SamplingParams
from octavo.compat.vllm.tokenizer import as_transformers
from octavo.frontend.generation.limits import room_after_prompt
from octavo.frontend.media.sources import FIELD, UUIDS
from octavo.frontend.metrics.exporter import Metrics
from octavo.frontend.outputs import BeamSearchOutput
from octavo.frontend.pooling.llm import as_prompts, one_per_prompt
from octavo.protocol import params as own
from octavo.protocol.errors import InvalidRequestError

logger = logging.getLogger(__name__)


class LLM(PoolingLLM):
    """vLLM's class. Methods that vLLM does not have, such as `score_tokens`, are octavo's.

    Args:
        model: directory, .gguf file or hub id.
        settings: settings of vLLM or octavo, by name; values equal to the defaults have no effect.

    Raises:
        StartupError: the engine could not start, or a setting is not supported.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        profiler = settings.pop("profiler_config", None)
        if isinstance(profiler, dict):
            profiler = ProfilerConfig(**profiler)
        self._profiler: ProfilerConfig = profiler or ProfilerConfig()
        super().__init__(model, allow_code=True, **plain(changed(settings)))
        self._metrics = Metrics(
            self.client.config,
            max_model_len=self.client.facts.max_model_len,
            engine_blocks=lambda: {index: facts.num_blocks for index, facts in self.client.facts_by_engine().items()},
        )
        self.client.observer = self._metrics

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> "LLM":
        """Start an engine with the settings of `EngineArgs`."""
        return cls(**engine_args.settings())

    @cached_property
    def llm_engine(self) -> EngineSteps:
        """The engine, to which requests are added one by one."""
        return EngineSteps(self)

    def generate(  # type: ignore[override]
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: Any = True,
        lora_request: Any = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate for every prompt. As in vLLM, `max_tokens` may exceed the room in the context.

        Args:
            prompts: one or several, in vLLM's forms.
            sampling_params: for all prompts, or one per prompt. `None`: the model's defaults.
            use_tqdm: show a progress bar; a callable counts as `True`.
            lora_request: for all prompts, or one per prompt.
            priority: for all prompts, or one per prompt; ignored unless `scheduling_policy` is "priority".
            tokenization_kwargs: `add_special_tokens`, `truncate_prompt_tokens` and similar options.
            mm_processor_kwargs: further arguments of the media processor.

        Raises:
            OctavoError: as in octavo's `LLM.generate`.
        """
        several = with_kwargs(self.client, as_prompts(prompts), mm_processor_kwargs)
        params = one_per_prompt("sampling_params", sampling_params, len(several))
        adapters = one_per_prompt("lora_request", lora_request, len(several))
        params = [self._as_vllms(one) for one in params]
        prepared = self._run(self._prepare_all(several, params, tokenization_kwargs))
        outputs = super().generate(
            [prompt for prompt, _ in prepared],
            [one for _, one in prepared],
            use_tqdm=bool(use_tqdm),
            priority=self._priorities(priority, len(several)),
            lora_request=adapters,
        )
        return [
            request_output(output, is_flat=one.flat_logprobs, lora_request=adapter)
            for output, one, adapter in zip(outputs, params, adapters, strict=True)
        ]

    def chat(  # type: ignore[override]
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Any = True,
        lora_request: Any = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: Any = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate the next message of each conversation; arguments as in octavo's `LLM.chat` and `generate`."""
        variables = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            **(chat_template_kwargs or {}),
        }
        return self.generate(
            self._conversation_prompts(messages, chat_template, chat_template_content_format, variables),
            sampling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            priority=priority,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )

    def enqueue(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: Any = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: Any = True,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[str]:
        """Start a request for every prompt and return their ids; `wait_for_completion` returns the outputs."""
        del use_tqdm
        several = with_kwargs(self.client, as_prompts(prompts), mm_processor_kwargs)
        params = one_per_prompt("sampling_params", sampling_params, len(several))
        adapters = one_per_prompt("lora_request", lora_request, len(several))
        priorities = self._priorities(priority, len(several))
        ids = []
        for prompt, one, adapter, first in zip(several, params, adapters, priorities, strict=True):
            ids.append(str(next(self._request_counter)))
            final = replace(self._as_vllms(one), output_kind=RequestOutputKind.FINAL_ONLY)
            self.llm_engine.add_request(
                ids[-1], prompt, final, lora_request=adapter, priority=first, tokenization_kwargs=tokenization_kwargs
            )
        return ids

    def wait_for_completion(self, output_type: Any = None, *, use_tqdm: Any = True) -> list[Any]:
        """Return the outputs of all requests of `enqueue`, in the order in which they were started."""
        del output_type, use_tqdm
        outputs: list[Any] = []
        while self.llm_engine.has_unfinished_requests():
            outputs += [output for output in self.llm_engine.step() if output.finished]
        return sorted(outputs, key=lambda output: int(output.request_id))

    def beam_search(
        self,
        prompts: Any,
        params: Any,
        lora_request: Any = None,
        use_tqdm: Any = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Run a beam search for every prompt; see octavo's `LLM.beam_search`."""
        return super().beam_search(
            prompts, params, use_tqdm=bool(use_tqdm), concurrency_limit=concurrency_limit, lora_request=lora_request
        )

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer as a tokenizer of transformers: `tokenizer(text)`, `apply_chat_template`, ..."""
        return self._transformers_tokenizer

    def get_default_sampling_params(self) -> SamplingParams:  # type: ignore[override]
        """Return the model's default sampling parameters, which apply to requests without their own."""
        return SamplingParams.of(super().get_default_sampling_params())

    def get_world_size(self, include_dp: bool = True) -> int:
        """Return the number of workers, of all engines or of one."""
        return self.client.get_world_size() // (1 if include_dp else max(1, self.client.config.data_parallel_size))

    def get_metrics(self) -> list[Metric]:
        """Return the current metrics of the engine."""
        self.stats()
        return self._run(self._snapshot())

    def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Record a torch profiler trace in every worker, in the directory of `profiler_config`.

        Args:
            profile_prefix: subfolder of that directory.
            delay_iterations: ignored, which is logged: recording starts now.
            max_iterations: ignored, which is logged: `stop_profile` ends the recording.

        Raises:
            InvalidRequestError: no directory is configured.
        """
        given = self._profiler
        if not given.torch_profiler_dir:
            raise InvalidRequestError(
                'no directory for traces: pass profiler_config={"profiler": "torch", "torch_profiler_dir": DIRECTORY}'
            )
        if given.delay_iterations or given.max_iterations or delay_iterations or max_iterations:
            logger.warning(
                "delay_iterations and max_iterations have no effect: all steps until stop_profile are recorded"
            )
        super().start_profile(str(Path(given.torch_profiler_dir, profile_prefix or "")))

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Drop all cached prefixes. Return `False`, and drop nothing, if blocks are in use.

        Args:
            reset_running_requests: drop the prefixes of running requests, too; they are computed again.
            reset_connector: ignored; blocks in host memory and files keep their contents.
        """
        del reset_connector
        if reset_running_requests:
            self.pause_generation(mode="keep", clear_cache=True)
            self.resume_generation()
            return True
        return super().reset_prefix_cache()

    def sleep(self, level: int = 1, mode: Any = "abort") -> None:
        """Free the memory of the KV cache and the weights; see octavo's `AsyncClient.sleep`."""
        super().sleep(level, mode=mode)

    def wake_up(self, tags: list[str] | None = None) -> bool:  # type: ignore[override]
        """Allocate the memory again, and return whether all of it is back; see octavo's `AsyncClient.wake_up`."""
        super().wake_up(tags)
        return not self.is_sleeping()

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of all workers: `reload_weights`, or `update_config` with a `load_format`.

        Args:
            method: name of the method.
            timeout: ignored.
            args: positional arguments of the method.
            kwargs: keyword arguments of the method.

        Returns:
            `None` for each worker.

        Raises:
            NotImplementedError: the workers have no such method; they are separate programs, without vLLM's classes.
        """
        del timeout
        options = dict(kwargs or {})
        if method == "reload_weights" and not args and options.keys() <= {"weights_path"}:
            self.update_weights(options.get("weights_path") or self.client.config.model.model_path)
        elif method != "update_config" or not _is_load_format(args):
            name = method if isinstance(method, str) else getattr(method, "__qualname__", repr(method))
            raise NotImplementedError(
                f"workers have no method {name}: octavo has reload_weights, and LLM.update_weights, sleep, wake_up, "
                "pause_generation and score_tokens for what scripts do with workers"
            )
        return [None] * self.get_world_size()

    def apply_model(self, func: Any) -> list[Any]:
        """Raise an error: workers compute with recorded programs, not with a torch module.

        Raises:
            NotImplementedError: always; the message names what to use.
        """
        raise NotImplementedError(
            "apply_model: workers have no torch.nn.Module: use LLM.update_weights to change weights, and "
            "octavo.worker_proc.training for their values and gradients"
        )

    async def outputs_of(
        self,
        request_id: str,
        prompt: Any,
        params: Any,
        *,
        lora_request: Any = None,
        priority: int = 0,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the outputs of one request; for coroutines on the engine's thread.

        Args:
            request_id: shown in the outputs.
            prompt: in vLLM's forms.
            params: sampling parameters.
            lora_request: the adapter.
            priority: as in `generate`.
            tokenization_kwargs: as in `generate`.
        """
        given = self._as_vllms(params)
        prepared, own_params = await self._prepare(prompt, given, tokenization_kwargs)
        (first,) = self._priorities(priority, 1)
        num_tokens = 0
        async for output in self.client.generate(
            prepared, own_params, request_id=request_id, priority=first, lora_request=lora_request
        ):
            new = sum(len(one.token_ids) for one in output.outputs)
            num_tokens = new + (num_tokens if given.output_kind is RequestOutputKind.DELTA else 0)
            found = request_output(output, is_flat=given.flat_logprobs, lora_request=lora_request)
            if found.metrics is not None:
                found.metrics.num_generation_tokens = num_tokens
            yield found

    async def _prepare_all(
        self, prompts: Sequence[Any], params: Sequence[SamplingParams], options: dict[str, Any] | None
    ) -> list[tuple[dict[str, Any], own.SamplingParams]]:
        return [await self._prepare(prompt, one, options) for prompt, one in zip(prompts, params, strict=True)]

    async def _prepare(
        self, prompt: Any, params: SamplingParams, options: dict[str, Any] | None
    ) -> tuple[dict[str, Any], own.SamplingParams]:
        """Return the tokenized prompt, and parameters limited to the room in the context."""
        prepared = await tokenized(self.client, prompt, options)
        changes: dict[str, Any] = {}
        if prepared.keys() & {FIELD, UUIDS}:
            length = len((await self.client.preparer.media_prompt(prepared)).token_ids)
        else:
            length = len(prepared["prompt_embeds"] if "prompt_embeds" in prepared else prepared["prompt_token_ids"])
        room = room_after_prompt(None, length, self.client.facts.max_model_len)
        if params.max_tokens is not None and params.max_tokens > room:
            changes = {"max_tokens": room, "min_tokens": min(params.min_tokens, room)}
        extra = params.extra_args or {}
        if extra and not self.client.config.logits_processors and "kv_transfer_params" not in extra:
            changes["extra_args"] = None
        return prepared, params.octavo(**changes)

    def _as_vllms(self, params: Any) -> SamplingParams:
        if isinstance(params, SamplingParams):
            return params
        return self.get_default_sampling_params() if params is None else SamplingParams.of(params)

    def _priorities(self, priority: int | Sequence[int] | None, count: int) -> list[int]:
        given = one_per_prompt("priority", 0 if priority is None else priority, count)
        return given if self.client.config.scheduling_policy == "priority" else [0] * count

    async def _snapshot(self) -> list[Metric]:
        return snapshot(self._metrics)

    @cached_property
    def _transformers_tokenizer(self) -> Any:
        return as_transformers(super().get_tokenizer())


def _is_load_format(args: tuple[Any, ...]) -> bool:
    """Return whether `update_config` only sets the load format, which `reload_weights` detects itself."""
    return len(args) == 1 and isinstance(args[0], dict) and set(args[0]) == {"load_config"}
