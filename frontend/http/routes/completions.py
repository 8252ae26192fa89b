"""`POST /v1/completions`."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from octavo.frontend.generation.spec import check_volume
from octavo.frontend.http.beams import check_beam_search, generate
from octavo.frontend.http.body import decode
from octavo.frontend.http.merge import PromptOutputs, merge
from octavo.frontend.http.message import JSON, Request, Response
from octavo.frontend.http.render.completions import CompletionAnswer, EchoStyle
from octavo.frontend.http.schemas.completions import CompletionRequest
from octavo.frontend.http.serving import Serving, answer_style, check_streaming, new_request_id
from octavo.frontend.http.sse import EventStream, events
from octavo.frontend.outputs import RequestOutput
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.params import SamplingParams

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 1024


async def create_completion(serving: Serving, request: Request) -> Response:
    """Continue one prompt or several."""
    asked = decode(request.take_body(), CompletionRequest)
    model = serving.model_name(asked.model)
    check_streaming(asked)
    check_beam_search(asked)
    prompts = await _prompts(serving, asked)
    answer_id = f"cmpl-{new_request_id(request, asked)}"
    params = await _all_params(serving, asked, prompts)
    answer = CompletionAnswer(
        answer_style(serving, asked, answer_id, model, 0 if asked.logprob_token_ids else asked.logprobs),
        n=params[0].n,
        echo=_echo_style(serving, asked, prompts),
        shows_prompt_logprobs=asked.prompt_logprobs is not None,
    )
    outputs = merge(
        [
            generate(
                serving,
                asked,
                {"prompt": text, "prompt_token_ids": token_ids},
                one,
                request_id=answer_id if len(prompts) == 1 else f"{answer_id}-{index}",
            )
            for index, ((text, token_ids), one) in enumerate(zip(prompts, params, strict=True))
        ]
    )
    if asked.stream:
        return EventStream(_stream(outputs, answer))
    return await _whole(outputs, answer, len(prompts))


async def _whole(outputs: PromptOutputs, answer: CompletionAnswer, num_prompts: int) -> Response:
    async with aclosing(outputs):
        finished: dict[int, RequestOutput] = {prompt_index: output async for prompt_index, output in outputs}
    return Response(answer.whole([finished[index] for index in range(num_prompts)]), media_type=JSON)


async def _stream(outputs: PromptOutputs, answer: CompletionAnswer) -> AsyncGenerator[bytes]:
    async with aclosing(outputs):
        async for prompt_index, output in outputs:
            if bodies := answer.take(output, prompt_index):
                yield events(bodies)
    if bodies := answer.last():
        yield events(bodies)


async def _prompts(serving: Serving, asked: CompletionRequest) -> list[tuple[str | None, list[int]]]:
    """Return the text, where there is one, and the token ids of every prompt."""

    async def tokens(prompt: str | list[int]) -> tuple[str | None, list[int]]:
        if not isinstance(prompt, str):
            return None, serving.cut_prompt(prompt, asked, asked.max_tokens)
        token_ids = await serving.client.encode(prompt, add_special_tokens=asked.add_special_tokens)
        return prompt, serving.cut_prompt(token_ids, asked, asked.max_tokens)

    found = []
    for prompt in _split(asked.prompt):
        found.append(await tokens(prompt))
        await asyncio.sleep(0)  # others get a turn of the event loop between two prompts
    return found


def _split(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """Tell one prompt of token ids from several prompts.

    Raises:
        InvalidRequestError: the list is empty, too long or mixed.
    """
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    ids = [item for item in prompt if isinstance(item, int)] if int in kinds else []
    several = [item for item in prompt if not isinstance(item, int)] if kinds - {int} else []
    if ids and several:
        raise InvalidRequestError("prompt must be text, texts, token ids, or lists of token ids", "prompt")
    if not prompt:
        raise InvalidRequestError("prompt must not be an empty list", "prompt")
    if len(several) > MAX_PROMPTS:
        raise InvalidRequestError(f"at most {MAX_PROMPTS} prompts in one request, got {len(several)}", "prompt")
    return several or [ids]


async def _all_params(
    serving: Serving, asked: CompletionRequest, prompts: list[tuple[str | None, list[int]]]
) -> list[SamplingParams]:
    """Return the parameters for each prompt, which differ in what is left of the context."""
    params: list[SamplingParams] = []
    for _, token_ids in prompts:
        params.append(_params(serving, asked, token_ids))
        if len(params) == 1:
            serving.check_num_sequences(params[0].num_sequences, len(prompts))
            check_volume(params[0], sum([len(ids) for _, ids in prompts]), len(prompts), serving.client.config)
        await asyncio.sleep(0)
    return params


def _params(serving: Serving, asked: CompletionRequest, token_ids: list[int]) -> SamplingParams:
    is_scoring = asked.echo and asked.max_tokens == 0
    params = serving.sampling_params(
        asked,
        num_prompt_tokens=len(token_ids),
        # The engine always generates: one token, which is then not shown.
        max_tokens=1 if is_scoring else asked.max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        logprobs=asked.logprobs,
        prompt_logprobs=asked.logprobs if asked.echo and asked.prompt_logprobs is None else asked.prompt_logprobs,
    )
    if asked.best_of is None:
        return params
    params = params.clone(best_of=asked.best_of)
    if asked.stream and params.num_sequences > params.n:
        raise InvalidRequestError("best_of cannot be streamed: the best are known at the end", "best_of")
    return params


def _echo_style(
    serving: Serving, asked: CompletionRequest, prompts: list[tuple[str | None, list[int]]]
) -> EchoStyle | None:
    if not asked.echo:
        return None
    serving.client.tokenizer.require("echo")
    texts = [
        text
        if text is not None and asked.truncate_prompt_tokens is None
        else serving.client.tokenizer.decode(token_ids)
        for text, token_ids in prompts
    ]
    return EchoStyle(texts, shows_completion=asked.max_tokens != 0)
