"""Renders the client's outputs as responses of `/inference/v1/generate`, unary and in chunks. No IO."""

import base64
import io
from collections.abc import Sequence

import msgspec
import numpy as np
from msgspec import UNSET

from octavo.frontend.http.render.answer import AnswerStyle
from octavo.frontend.http.render.logprobs import chat_logprobs, prompt_logprobs
from octavo.frontend.http.render.usage import UsageCount
from octavo.frontend.http.schemas.generate import GenerateChoice, GenerateResponse
from octavo.frontend.outputs import CompletionOutput, RequestOutput

_encode = msgspec.json.Encoder().encode


class TokensAnswer:
    """One response that consists of tokens.

    Args:
        style: the style of the response; it names tokens by their ids.
    """

    def __init__(self, style: AnswerStyle) -> None:
        self._style = style
        self._usage = UsageCount(by_choice=style.has_running_usage)

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        """Return the complete response as JSON; `outputs` has one item."""
        (output,) = outputs
        self._usage.add(output)
        logprobs = None if output.prompt_logprobs is None else prompt_logprobs(output.prompt_logprobs)
        scores = output.prompt_token_id_logprobs
        response = GenerateResponse(
            request_id=self._style.id,
            choices=[self._choice(choice) for choice in output.outputs],
            prompt_logprobs=logprobs,
            prompt_token_id_logprobs=UNSET if scores is None else _array_text(scores),
            kv_transfer_params=output.kv_transfer_params,
            usage=self._usage.total(),
        )
        return _encode(response)

    def render(self, output: RequestOutput, prompt_index: int) -> list[bytes]:
        """Return the chunks for a delta, as JSON: one per choice that has something new."""
        self._usage.add(output)
        chunks = []
        for choice in output.outputs:
            if choice.token_ids or choice.finish_reason is not None:
                response = GenerateResponse(request_id=self._style.id, choices=[self._choice(choice)])
                if self._style.has_running_usage:
                    response.usage = self._usage.so_far(choice.index)
                chunks.append(_encode(response))
        return chunks

    def last(self) -> list[bytes]:
        """Return the chunk that follows the end of the last choice: the usage, if requested."""
        if not self._style.has_usage:
            return []
        return [_encode(GenerateResponse(request_id=self._style.id, choices=[], usage=self._usage.total()))]

    def _choice(self, choice: CompletionOutput) -> GenerateChoice:
        logprobs = None
        if choice.logprobs is not None:
            # As in vLLM, the chosen token is reported in place of alternatives that were not requested.
            num_top = None if self._style.names_logprobs else self._style.num_logprobs or None
            logprobs = chat_logprobs(choice.token_ids, choice.logprobs, self._style.names, num_top)
        return GenerateChoice(
            index=choice.index,
            logprobs=logprobs,
            finish_reason=choice.finish_reason,
            token_ids=choice.token_ids,
            weight_versions=self._style.weight_versions(choice),
        )


def _array_text(rows: Sequence[Sequence[float]]) -> str:
    """Return a float32 array in NumPy's file format as base64, which can represent minus infinity."""
    file = io.BytesIO()
    np.save(file, np.array(rows, dtype=np.float32), allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()
