"""Turns request bodies for pooling models into prompts, texts and parameters."""

from collections.abc import Sequence
from typing import Any

from octavo.frontend.conversation.rendering import render_prompt
from octavo.frontend.conversation.request import ChatInput
from octavo.frontend.generation.prompt import Prompt
from octavo.frontend.http.app_state import AppState
from octavo.frontend.http.schemas.pooling import InputFields, PoolingFields, ScoreRequest, Text
from octavo.frontend.media.image_prompts import plain_text
from octavo.frontend.media.sources import FIELD, by_kind
from octavo.frontend.pooling.inputs import Fields
from octavo.frontend.pooling.score_inputs import ScoreInput, score_inputs
from octavo.frontend.pooling.spec import require_pooling
from octavo.protocol.adapters import Adapter
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.pooling_params import PoolingParams

MAX_INPUTS = 8192
"""Maximum number of texts in one request: all of their results exist at the same time."""


async def choose_pooling_model(state: AppState, requested: str | None) -> tuple[str, Adapter | None]:
    """Return the model name for the response and its LoRA adapter; see `AppState.choose_model`.

    Raises:
        ModelNotFoundError: this server does not serve `requested`.
        InvalidRequestError: the model generates text.
    """
    chosen = await state.choose_model(requested)
    require_pooling(state.client.config)
    return chosen


def pooling_params(body: PoolingFields, **others: Any) -> PoolingParams:
    """Return the pooling parameters of a body, and those of `others` that are not None."""
    return PoolingParams(
        use_activation=body.use_activation,
        normalize=body.normalize,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side or "right",
        **{name: value for name, value in others.items() if value is not None},
    )


async def prompts_of(state: AppState, body: InputFields, prefix: str = "") -> tuple[list[Prompt], Fields]:
    """Return the prompts of a body, and how errors name the fields that hold them.

    Args:
        state: the state of the application.
        body: a body with texts, token ids or messages.
        prefix: text to put before each text.

    Raises:
        InvalidRequestError: there is no prompt, or the list is empty, too long or mixed.
    """
    if (body.input is None) == (body.messages is None):
        raise InvalidRequestError("give either input or messages", "input")
    if body.messages is not None:
        if not body.messages:
            raise InvalidRequestError("messages must not be empty", "messages")
        return [await _conversation_prompt(state, body, body.messages, prefix)], Fields("messages", is_single=True)
    found = body.input
    if isinstance(found, str):
        return [prefix + found], Fields("input", is_single=True)
    assert found is not None
    several = _as_list(found)
    if prefix and not all(isinstance(one, str) for one in several):
        raise InvalidRequestError("prompt_name needs texts, and input has token ids", "prompt_name")
    prompts: list[Prompt] = [prefix + one for one in several if isinstance(one, str)] if prefix else list(several)
    return prompts, Fields("input", is_single=several is not found)


async def _conversation_prompt(
    state: AppState, body: InputFields, messages: list[dict[str, Any]], prefix: str
) -> Prompt:
    """Return the prompt of a conversation, with its media."""
    maker, media = state.client.media, state.client.config.media
    shown, sources = (messages, []) if maker is None else await maker.extract(messages)
    if media is not None and media.vector_width:
        text = plain_text(shown)
    else:
        conversation = ChatInput(
            messages=shown,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            template=body.chat_template,
            variables=body.chat_template_kwargs or {},
        )
        text = await render_prompt(conversation, state.chat_context)
    if maker is None or not sources:
        return prefix + text
    adds = body.add_special_tokens or False
    return {"prompt": prefix + text, FIELD: by_kind(sources), "add_special_tokens": adds}


def _as_list(found: list[str | int | list[int]]) -> Sequence[Any]:
    """Return the items of a list: texts or lists of token ids. A flat list of token ids is one item."""
    if not found:
        raise InvalidRequestError("input must not be an empty list", "input")
    kind = type(found[0])
    for index, one in enumerate(found):
        if type(one) is not kind:
            names = {str: "text", int: "a token id", list: "a list of token ids"}
            raise InvalidRequestError(
                f"input[{index}] is {names[type(one)]}, and input[0] is {names[kind]}: send one kind", f"input[{index}]"
            )
    if kind is int:
        return [found]
    _check_number(len(found), "input")
    return found


def inputs_of(value: Text | Sequence[Text], field: str, *, is_one: bool = False) -> list[ScoreInput]:
    """Return the texts and media contents of one field of a score request; see `score_inputs`.

    Raises:
        InvalidRequestError: there is no input, there are too many, or one is malformed.
    """
    if value == []:
        raise InvalidRequestError(f"{field} must not be an empty list", field)
    several = score_inputs(value, field, is_one=is_one)
    _check_number(len(several), field)
    return several


def compared_inputs(body: ScoreRequest) -> tuple[tuple[str, str], list[ScoreInput], list[ScoreInput]]:
    """Return the field names of both sides, and the inputs of both.

    Raises:
        InvalidRequestError: the body does not use one of the supported pairs of field names.
    """
    ways = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
    given = [names for names in ways if all(getattr(body, name) is not None for name in names)]
    if len(given) != 1:
        raise InvalidRequestError(
            f"give the texts to compare as {', or '.join(' and '.join(names) for names in ways)}", "text_1"
        )
    first, second = given[0]
    return given[0], inputs_of(getattr(body, first), first), inputs_of(getattr(body, second), second)


def _check_number(count: int, field: str) -> None:
    if count > MAX_INPUTS:
        raise InvalidRequestError(
            f"at most {MAX_INPUTS} texts in one request, got {count}: {field}[{MAX_INPUTS}]", field
        )
