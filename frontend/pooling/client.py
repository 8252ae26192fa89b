"""`PoolingClient`: the methods of `AsyncClient` that compute vectors, classes and scores."""

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from octavo.frontend.generation.prompt import Prompt
from octavo.frontend.lora.registry import AdapterRegistry
from octavo.frontend.lora.request import LoRARequest
from octavo.frontend.pooling.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
    classification_output,
    embedding_output,
    pooling_output,
)
from octavo.frontend.pooling.pooler import Pooler
from octavo.frontend.pooling.result import PooledResult
from octavo.frontend.pooling.score_inputs import score_inputs
from octavo.frontend.pooling.scoring import score
from octavo.protocol.adapters import Adapter
from octavo.protocol.pooling import PoolingTask
from octavo.protocol.pooling_params import PoolingParams


class PoolingClient:
    """Mixin of `AsyncClient`. All methods raise what `Pooler.run` raises.

    Shared arguments: `params` apply to all prompts, or there is one per prompt; `None` means the model's defaults.
    `request_id`, `priority`, `cache_salt` and `lora_request` are as in `AsyncClient.generate`. `options` are those of
    `Pooler.run`.
    """

    adapters: AdapterRegistry
    pooler: Pooler
    """Computes the results, in the engine's form."""

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """Yield the result of one prompt, once, like vLLM's method. The task `tokenize` returns token ids."""
        (result,) = await self.pool(
            [prompt],
            pooling_params,
            request_id=request_id,
            lora_request=lora_request,
            priority=priority,
            cache_salt=cache_salt,
        )
        yield pooling_output(result)

    async def embed(
        self, prompts: Sequence[Prompt], params: PoolingParams | Sequence[PoolingParams] | None = None, **options: Any
    ) -> list[EmbeddingRequestOutput]:
        """Return an embedding vector for each prompt."""
        return [embedding_output(one) for one in await self.pool(prompts, params, task="embed", **options)]

    async def classify(
        self, prompts: Sequence[Prompt], params: PoolingParams | Sequence[PoolingParams] | None = None, **options: Any
    ) -> list[ClassificationRequestOutput]:
        """Return the class scores of each prompt."""
        return [classification_output(one) for one in await self.pool(prompts, params, task="classify", **options)]

    async def reward(
        self, prompts: Sequence[Prompt], params: PoolingParams | Sequence[PoolingParams] | None = None, **options: Any
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return the scores of each token, or of each step, of each prompt."""
        return [pooling_output(one) for one in await self.pool(prompts, params, task="token_classify", **options)]

    async def score(
        self,
        data_1: str | dict[str, Any] | Sequence[str | dict[str, Any]],
        data_2: str | dict[str, Any] | Sequence[str | dict[str, Any]],
        params: PoolingParams | None = None,
        *,
        lora_request: LoRARequest | Adapter | None = None,
        **options: Any,
    ) -> list[ScoringRequestOutput]:
        """Return a score for each pair of texts or contents; see `scoring.score` for further options.

        Args:
            data_1: one text, such as a query, for all of `data_2`, or one per entry of it. An object with parts,
                {"content": [{"type": "image_url", ...}]}, may replace a text if the model reads media.
            data_2: the other texts, such as documents.
            params: for all pairs.
            lora_request: as in `generate`.
            **options: as in `scoring.score`.
        """
        adapter = await self._pooling_adapter(lora_request)
        first, second = score_inputs(data_1, "data_1"), score_inputs(data_2, "data_2")
        return await score(self.pooler, first, second, params, adapter=adapter, **options)

    async def pool(
        self,
        prompts: Sequence[Prompt],
        params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        task: PoolingTask | None = None,
        lora_request: LoRARequest | Adapter | None = None,
        on_progress: Callable[[int], object] | None = None,
        **options: Any,
    ) -> list[PooledResult]:
        """Return the result of each prompt in the engine's form."""
        adapter = await self._pooling_adapter(lora_request)
        return await self.pooler.run(prompts, params, task=task, adapter=adapter, on_progress=on_progress, **options)

    async def _pooling_adapter(self, lora_request: LoRARequest | Adapter | None) -> Adapter | None:
        if lora_request is None or isinstance(lora_request, Adapter):
            return lora_request
        return await self.adapters.of_request(lora_request)
