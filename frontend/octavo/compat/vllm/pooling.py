"""The methods of vLLM's `LLM` that compute vectors, classes and scores."""

from typing import Any

import msgspec

from octavo.compat.vllm.prompts import Tokenization
from octavo.frontend.llm import LLM
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.pooling_params import PoolingParams


class PoolingLLM(LLM):
    """octavo's `LLM`, with vLLM's arguments and results for pooling."""

    def encode(
        self, prompts: Any, pooling_params: Any = None, *, tokenization_kwargs: Any = None, **options: Any
    ) -> list[Any]:
        """Return the result of each prompt as tensors; see octavo's `LLM.encode`."""
        import torch

        found = super().encode(prompts, self._truncating(pooling_params, tokenization_kwargs), **options)
        for one in found:
            data: Any = torch.from_numpy(one.outputs.data.copy())
            one.outputs.data = data
        return found

    def embed(
        self, prompts: Any, *, pooling_params: Any = None, tokenization_kwargs: Any = None, **options: Any
    ) -> Any:
        """Return an embedding vector for each prompt; see octavo's `LLM.embed`."""
        return super().embed(prompts, pooling_params=self._truncating(pooling_params, tokenization_kwargs), **options)

    def classify(
        self, prompts: Any, *, pooling_params: Any = None, tokenization_kwargs: Any = None, **options: Any
    ) -> Any:
        """Return the class scores of each prompt; see octavo's `LLM.classify`."""
        return super().classify(
            prompts, pooling_params=self._truncating(pooling_params, tokenization_kwargs), **options
        )

    def score(
        self,
        data_1: Any,
        data_2: Any,
        /,
        *,
        pooling_params: Any = None,
        tokenization_kwargs: Any = None,
        **options: Any,
    ) -> Any:
        """Return a score for each pair of texts; see octavo's `LLM.score`."""
        return super().score(
            data_1, data_2, pooling_params=self._truncating(pooling_params, tokenization_kwargs), **options
        )

    def _truncating(self, params: Any, options: dict[str, Any] | None) -> Any:
        """Return pooling parameters with the limits of `tokenization_kwargs` applied."""
        tokenization = Tokenization.of(options)
        if not tokenization.adds_special_tokens:
            raise InvalidRequestError(
                "tokenization_kwargs: add_special_tokens is not supported for pooling: leave it out, or send token ids",
                "tokenization_kwargs",
            )
        changes: dict[str, Any] = {}
        if tokenization.max_tokens is not None:
            changes["truncate_prompt_tokens"] = tokenization.max_tokens
        if changes or tokenization.side is not None:
            changes["truncation_side"] = tokenization.side_for(self.client)
        if not changes:
            return params
        if params is None or isinstance(params, PoolingParams):
            return msgspec.structs.replace(params or PoolingParams(), **changes)
        return [msgspec.structs.replace(one, **changes) for one in params]
