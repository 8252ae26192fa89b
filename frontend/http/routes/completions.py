"""`POST /v1/completions`."""

import asyncio
from functools import partial
from typing import Any

from starlette.responses import Response

from octavo.frontend.generation.infill import InfillFormat, infill_format, infill_prompt, infill_stops
from octavo.frontend.generation.limits import check_volume
from octavo.frontend.generation.prepared import PreparedGeneration
from octavo.frontend.generation.prompt import TokenizedPrompt
from octavo.frontend.generation.request import GenerationRequest
from octavo.frontend.http.app_state import AppState, answer_style, receipt_recorder
from octavo.frontend.http.body import decode
from octavo.frontend.http.dependencies import CurrentState
from octavo.frontend.http.generation_request import check_fields, generation_request
from octavo.frontend.http.load_report import load_format
from octavo.frontend.http.render.completions import CompletionAnswer, EchoStyle
from octavo.frontend.http.request import ApiRequest
from octavo.frontend.http.schemas.completions import CompletionRequest
from octavo.frontend.http.sse import EventStream
from octavo.frontend.http.stream import stream_pieces
from octavo.frontend.http.structured import structured_outputs_of
from octavo.frontend.http.whole import WholeAnswer
from octavo.frontend.pooling.spec import require_generation
from octavo.protocol.adapters import Adapter
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.kv_transfer import PARAMS

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 1024


async def create_completion(state: CurrentState, http_request: ApiRequest) -> Response:
    """Continue one prompt or several."""
    data = http_request.take_body()
    body = decode(data, CompletionRequest)
    model, adapter = await state.choose_model(body.model)
    require_generation(state.client.config)
    check_fields(body)
    answer_id = f"cmpl-{http_request.choose_id(body.request_id)}"
    generations = await prepare_completion(state, body, adapter)
    recorder = receipt_recorder(state, http_request, data, is_asked=body.return_receipt)
    num_logprobs = 0 if body.logprob_token_ids else body.logprobs
    answer = CompletionAnswer(
        answer_style(state, body, answer_id, model, num_logprobs, recorder=recorder),
        n=generations[0].params.n,
        echo=_echo_style(state, body, generations),
        shows_prompt_logprobs=body.prompt_logprobs is not None,
    )
    num_prompts = len(generations)
    ids = [answer_id] if num_prompts == 1 else [f"{answer_id}-{index}" for index in range(num_prompts)]
    named = dict(zip(ids, generations, strict=True))
    if body.stream:
        return EventStream(stream_pieces(state, named, answer, recorder=recorder), state.keep_alive_s)
    reports_load = load_format(http_request.scope)
    return WholeAnswer(state, named, answer.whole, recorder=recorder, reports_load=reports_load)


async def prepare_completion(
    state: AppState, body: CompletionRequest, adapter: Adapter | None, **others: Any
) -> list[PreparedGeneration]:
    """Return one prepared generation per prompt. The event loop gets a turn after each.

    Args:
        state: the state of the application.
        body: the request body.
        adapter: the LoRA adapter that the body's model name selects.
        **others: parameters for which the body has no fields.

    Raises:
        InvalidRequestError: the request cannot be served; `param` names the field.
    """
    request = _generation_request(body, adapter).with_overrides(**others)
    infill = _infill(state, body)
    if infill is not None and not body.ignore_eos:
        stops = infill_stops(infill, state.client.tokenizer)
        request = request.with_overrides(stop_token_ids=[*(body.stop_token_ids or ()), *stops])
    prompts: list[tuple[str | None, list[int]] | TokenizedPrompt] = [
        await state.client.preparer.embeds_prompt(embeds) for embeds in _embeds(body)
    ]
    for prompt in _split(body.prompt) if body.prompt or not prompts else []:
        if infill is not None:
            prompts.append((None, await _infill_prompt(state, body, infill, prompt)))
        elif isinstance(prompt, str):
            token_ids = await state.client.tokenize(prompt, add_special_tokens=body.add_special_tokens)
            prompts.append((prompt, state.resolver.truncate(token_ids, request)))
        else:
            prompts.append((None, state.resolver.truncate(prompt, request)))
        await asyncio.sleep(0)
    generations: list[PreparedGeneration] = []
    lengths = [len(one.token_ids if isinstance(one, TokenizedPrompt) else one[1]) for one in prompts]
    if body.kv_transfer_params and len(prompts) > 1:
        raise InvalidRequestError(f"{PARAMS} are those of one prompt, got {len(prompts)}: send one at a time", PARAMS)
    for one in prompts:
        if isinstance(one, TokenizedPrompt):
            generations.append(state.resolver.prepare_embeds(request, one))
        else:
            generations.append(state.resolver.prepare(request, *one))
        if len(generations) == 1:
            params = generations[0].params
            if body.stream and params.num_sequences > params.n:
                raise InvalidRequestError("best_of cannot be streamed: the best are known at the end", "best_of")
            state.resolver.check_num_sequences(params.num_sequences, len(prompts))
            check_volume(params, sum(lengths), len(prompts), state.client.config)
        await asyncio.sleep(0)
    return generations


def _infill(state: AppState, body: CompletionRequest) -> InfillFormat | None:
    """Return how the model fills in the middle; `None` if the request has no suffix.

    Raises:
        InvalidRequestError: the model cannot, or a field needs the unmodified prompt.
    """
    if not body.suffix:
        return None
    excluded = {
        "echo": body.echo,
        "truncate_prompt_tokens": body.truncate_prompt_tokens is not None,
        "prompt_embeds": bool(body.prompt_embeds),
    }
    for name, is_set in excluded.items():
        if is_set:
            raise InvalidRequestError(f"{name} cannot be combined with suffix: leave one of them out", name)
    state.client.tokenizer.require("suffix")
    return infill_format(state.client.tokenizer)


async def _infill_prompt(
    state: AppState, body: CompletionRequest, infill: InfillFormat, prompt: str | list[int]
) -> list[int]:
    client = state.client
    encode = partial(client.tokenize, add_special_tokens=False)
    start = await client.tokenize("") if body.add_special_tokens else []
    return [*start, *await infill_prompt(infill, client.tokenizer, prompt, body.suffix or "", encode)]


def _embeds(body: CompletionRequest) -> list[str]:
    """Return the prompt embeddings, each base64-encoded.

    Raises:
        InvalidRequestError: there are too many prompts, or a field needs the tokens of the prompt.
    """
    several = [body.prompt_embeds] if isinstance(body.prompt_embeds, str) else body.prompt_embeds or []
    if len(several) > MAX_PROMPTS:
        raise InvalidRequestError(f"at most {MAX_PROMPTS} prompts in one request, got {len(several)}", "prompt_embeds")
    for name, is_set in (("echo", body.echo), ("prompt_logprobs", body.prompt_logprobs is not None)):
        if several and is_set:
            raise InvalidRequestError(f"{name} needs the tokens of the prompt, and prompt_embeds has none", name)
    return several


def _split(prompt: str | list[str | int | list[int]] | None) -> list[str | list[int]]:
    """Return the prompts, each as text or as a list of token ids.

    Raises:
        InvalidRequestError: there is no prompt, or the list is empty, too long or mixed.
    """
    if prompt is None:
        raise InvalidRequestError("missing required field prompt: send it, or prompt_embeds", "prompt")
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


def _generation_request(body: CompletionRequest, adapter: Adapter | None) -> GenerationRequest:
    is_scoring = body.echo and body.max_tokens == 0
    request = generation_request(
        body,
        # The engine always generates at least one token; here it is not shown.
        max_tokens=1 if is_scoring else body.max_tokens,
        logprobs=body.logprobs,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        adapter=adapter,
    ).with_overrides(structured_outputs=structured_outputs_of(body), best_of=body.best_of)
    echoes_logprobs = body.echo and body.prompt_logprobs is None
    return request.with_overrides(prompt_logprobs=body.logprobs) if echoes_logprobs else request


def _echo_style(state: AppState, body: CompletionRequest, generations: list[PreparedGeneration]) -> EchoStyle | None:
    if not body.echo:
        return None
    tokenizer = state.client.tokenizer
    tokenizer.require("echo")
    texts = [
        one.text
        if one.text is not None and body.truncate_prompt_tokens is None
        else tokenizer.decode(one.token_ids, skip_special_tokens=False)
        for one in generations
    ]
    return EchoStyle(texts, shows_completion=body.max_tokens != 0)
