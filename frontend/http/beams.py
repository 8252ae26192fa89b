"""Beam search by the fields of a request (`use_beam_search`), beside what all requests go through."""

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from octavo.frontend.http.schemas.sampling import SamplingFields
from octavo.frontend.outputs import RequestOutput
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.params import MAX_BEAM_WIDTH, BeamSearchParams, SamplingParams
from octavo.protocol.repetition import RepetitionDetectionParams

if TYPE_CHECKING:
    from octavo.frontend.http.serving import Serving

_ONLY_FOR_SAMPLING: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "stop": ([],),
    "stop_token_ids": ([],),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "prompt_logprobs": (),
    "logprob_token_ids": ([],),
    "stream_interval": (1,),
    "repetition_detection": (RepetitionDetectionParams(),),
}
"""Fields that beam search does not know, and the values that mean nothing; None means nothing everywhere."""


def check_beam_search(asked: SamplingFields) -> None:
    """Refuse what does not go together with beam search, or only with it.

    Raises:
        InvalidRequestError: naming the field.
    """
    if not asked.use_beam_search:
        if asked.length_penalty not in (None, 1.0):
            raise InvalidRequestError("length_penalty needs use_beam_search", "length_penalty")
        if asked.early_stopping not in (None, False):
            raise InvalidRequestError("early_stopping needs use_beam_search", "early_stopping")
        return
    if asked.stream:
        raise InvalidRequestError("a beam search cannot be streamed: the best beam is known at the end", "stream")
    for name, neutral in _ONLY_FOR_SAMPLING.items():
        value = getattr(asked, name)
        if value is not None and value not in neutral:
            raise InvalidRequestError(f"{name} has no meaning for a beam search: leave it out", name)


def generate(
    serving: "Serving",
    asked: SamplingFields,
    prompt: dict[str, Any],
    params: SamplingParams,
    request_id: str,
) -> AsyncGenerator[RequestOutput]:
    """Return the outputs for one prompt of a request, whether it samples or searches.

    Args:
        serving: the engine.
        asked: the request, which `check_beam_search` has seen.
        prompt: text and token ids.
        params: of sampling; a search takes of them what it knows.
        request_id: of this prompt.

    Raises:
        InvalidRequestError: the search is too wide, or shall do what it cannot.
    """
    if asked.use_beam_search:
        room = max(1, serving.client.facts.max_model_len - len(prompt["prompt_token_ids"]))
        outputs = _search(serving, asked, prompt, params, _beam_params(asked, params, room), request_id)
    else:
        outputs = serving.client.generate(
            prompt, params, request_id=request_id, priority=asked.priority, cache_salt=asked.cache_salt
        )
    log = serving.request_log
    return outputs if log is None else log.followed(outputs, prompt, params, request_id)


async def _search(
    serving: "Serving",
    asked: SamplingFields,
    prompt: dict[str, Any],
    params: SamplingParams,
    beam_params: BeamSearchParams,
    request_id: str,
) -> AsyncGenerator[RequestOutput]:
    output = await serving.client.beam_search(
        prompt,
        beam_params,
        request_id=request_id,
        priority=asked.priority,
        cache_salt=asked.cache_salt,
        logprobs=params.logprobs,
    )
    yield replace(output, outputs=output.outputs[: params.n])


def _beam_params(asked: SamplingFields, params: SamplingParams, room: int) -> BeamSearchParams:
    if params.structured_outputs is not None:
        raise InvalidRequestError("a beam search has no form to keep to", params.structured_outputs.name())
    if params.prompt_logprobs is not None:
        raise InvalidRequestError("a beam search has no logprobs of an echoed prompt", "echo")
    width = params.num_sequences
    if width > MAX_BEAM_WIDTH:
        raise InvalidRequestError(
            f"a beam search is at most {MAX_BEAM_WIDTH} wide, got {width}", "n" if params.best_of is None else "best_of"
        )
    return BeamSearchParams(
        beam_width=width,
        max_tokens=params.max_tokens or room,
        ignore_eos=params.ignore_eos,
        temperature=asked.temperature or 0.0,
        length_penalty=1.0 if asked.length_penalty is None else asked.length_penalty,
        early_stopping=asked.early_stopping or False,
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
    )
