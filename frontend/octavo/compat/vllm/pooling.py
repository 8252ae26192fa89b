"""The methods of vLLM's `LLM` that compute vectors, classes and scores."""

from typing import Any

import msgspec

from octavo.frontend.llm import LLM
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.pooling_params import PoolingParams


class PoolingLLM(LLM):
    """octavo's `LLM`, whose methods for pooling have vLLM's arguments and results."""

    def encode(
        self, prompts: Any, pooling_params: Any = None, *, tokenization_kwargs: Any = None, **options: Any
    ) -> list[Any]:
        """Return what the model computes of each prompt, as tensors; see octavo's `LLM.encode`."""
        import torch

        found = super().encode(prompts, _cut(pooling_params, tokenization_kwargs), **options)
        for one in found:
            data: Any = torch.from_numpy(one.outputs.data.copy())
            one.outputs.data = data
        return found

    def embed(
        self, prompts: Any, *, pooling_params: Any = None, tokenization_kwargs: Any = None, **options: Any
    ) -> Any:
        """Return a vector for each prompt; see octavo's `LLM.embed`."""
        return super().embed(prompts, pooling_params=_cut(pooling_params, tokenization_kwargs), **options)

    def classify(
        self, prompts: Any, *, pooling_params: Any = None, tokenization_kwargs: Any = None, **options: Any
    ) -> Any:
        """Return the class scores of each prompt; see octavo's `LLM.classify`."""
        return super().classify(prompts, pooling_params=_cut(pooling_params, tokenization_kwargs), **options)

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
        return super().score(data_1, data_2, pooling_params=_cut(pooling_params, tokenization_kwargs), **options)


def _cut(params: Any, options: dict[str, Any] | None) -> Any:
    """Return pooling parameters with the limits of `tokenization_kwargs`."""
    if not options:
        return params
    changes = dict(options)
    if changes.pop("truncation", False):
        changes.setdefault("truncate_prompt_tokens", changes.pop("max_length", -1))
    if unknown := changes.keys() - {"truncate_prompt_tokens", "truncation_side"}:
        raise InvalidRequestError(
            f"tokenization_kwargs: {', '.join(sorted(unknown))} is not supported for pooling: use truncation, "
            "max_length, truncate_prompt_tokens or truncation_side",
            "tokenization_kwargs",
        )
    if params is None or isinstance(params, PoolingParams):
        return msgspec.structs.replace(params or PoolingParams(), **changes)
    return [msgspec.structs.replace(one, **changes) for one in params]
