"""Inputs of scores (texts, and contents with media in the form of messages), and their conversion to prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from octavo.frontend.generation.prompt import Prompt
from octavo.frontend.media.image_prompts import plain_text
from octavo.frontend.media.parts import MediaSource, media_parts
from octavo.frontend.media.sources import FIELD, KWARGS, by_kind
from octavo.frontend.pooling.spec import require_pooling
from octavo.frontend.text.chat_template import ChatTemplate
from octavo.frontend.text.messages import Message, SourcePart
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.media_kwargs import kwargs_fault

if TYPE_CHECKING:
    from octavo.frontend.pooling.pooler import Pooler


@dataclass(frozen=True, slots=True)
class Content:
    """A query or a document that consists of parts like those of a message: texts, images and videos."""

    parts: Sequence[SourcePart]
    path: str
    """Path of the input in the request, for errors."""

    @property
    def messages(self) -> list[Message]:
        """The content as a conversation."""
        return [{"role": "user", "content": self.parts}]

    def as_text(self) -> str:
        """Join its texts, for a model that reads only text.

        Raises:
            InvalidRequestError: the content has a media item.
        """
        for kind, path in media_parts(self.messages):
            raise InvalidRequestError(f"{path}.type: the model of this engine scores texts, and no {kind}s", path)
        return plain_text(self.messages)


ScoreInput: TypeAlias = str | Content


def score_inputs(value: Any, field: str, *, is_one: bool = False) -> list[ScoreInput]:
    """Return the inputs of one side of the scores.

    Args:
        value: a text, an object with "text" or "content" (parts), or a list of these. As in vLLM, each part of an
            object outside a list is an input of its own.
        field: name of the request field.
        is_one: whether the field has exactly one input, so that such parts belong together.

    Raises:
        InvalidRequestError: the value has another form, or is empty.
    """
    if isinstance(value, Mapping) and "content" in value and not is_one:
        _check_keys(value, field)
        parts = _parts(value["content"], field)
        return [Content([part], part.path) for part in parts]
    if isinstance(value, str | Mapping):
        return [_input(value, field)]
    if not isinstance(value, Sequence) or not value:
        raise InvalidRequestError(f"{field} must be a text, an object, or a list of them that is not empty", field)
    return [_input(one, f"{field}[{index}]") for index, one in enumerate(value)]


def _input(value: Any, place: str) -> ScoreInput:
    if isinstance(value, Mapping):
        _check_keys(value, place)
        if "content" in value:
            return Content(_parts(value["content"], place), place)
        value = value.get("text")
    if not isinstance(value, str):
        raise InvalidRequestError(
            f'{place} must be a text, or an object: {{"text": "..."}} or {{"content": [{{"type": "image_url", ...}}]}}',
            place,
        )
    return value


def _check_keys(value: Mapping[str, Any], place: str) -> None:
    if unknown := value.keys() - {"text", "content"}:
        raise InvalidRequestError(
            f"{place} has {', '.join(sorted(map(str, unknown)))}; an input has text or content: leave the rest out",
            place,
        )
    if len(value) > 1:
        raise InvalidRequestError(f"{place} has text and content: leave one out; a content may have texts", place)


def _parts(content: Any, place: str) -> list[SourcePart]:
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, Sequence) or not content or not all(isinstance(one, Mapping) for one in content):
        raise InvalidRequestError(
            f'{place}.content must be a list of parts, such as {{"type": "image_url", "image_url": {{"url": "..."}}}}',
            f"{place}.content",
        )
    return [SourcePart(f"{place}.content[{index}]", **part) for index, part in enumerate(content)]


def check_kwargs(pooler: "Pooler", kwargs: Mapping[str, Any]) -> None:
    """Check the processor arguments for all media of scores, even if there are no media.

    Raises:
        InvalidRequestError: the arguments do not apply to this model, or are malformed.
    """
    facts = require_pooling(pooler.config)
    if pooler.media is None or facts.tasks[0] == "classify":
        raise InvalidRequestError(f"{KWARGS}: the model reads text only: leave it out", KWARGS)
    if fault := kwargs_fault(kwargs, pooler.media.kinds):
        raise InvalidRequestError(f"{KWARGS}: {fault}", KWARGS)


async def score_prompts(
    pooler: "Pooler", inputs: Sequence[ScoreInput], processor_kwargs: Mapping[str, Any] | None
) -> tuple[list[Prompt], bool]:
    """Return the prompts of both sides for an embedding model, and whether special tokens are added to them.

    A model that reads media gets each input as a conversation if the engine has a `--chat-template` or any input has
    parts. This includes plain texts, because such models are trained with text around their queries. Other models get
    texts as they are.

    Args:
        pooler: pooler of the client.
        inputs: inputs of both sides.
        processor_kwargs: further arguments of the model's processor, for all media.

    Raises:
        InvalidRequestError: the model does not read one of the media, or there is no chat template.
    """
    media, config = pooler.media, pooler.config
    if media is None or config.media is None:
        return [one if isinstance(one, str) else one.as_text() for one in inputs], True
    if not config.chat_template and all(isinstance(one, str) for one in inputs):
        return [one for one in inputs if isinstance(one, str)], True
    taken = [await media.extract(_conversation(one)) for one in inputs]
    if config.media.vector_width:
        texts = [
            one if isinstance(one, str) else plain_text(shown) for one, (shown, _) in zip(inputs, taken, strict=True)
        ]
    else:
        template = ChatTemplate.for_model(config.chat_template, pooler.tokenizer, "auto")
        texts = await pooler.threads.run(
            lambda: [template.render(shown, add_generation_prompt=False) for shown, _ in taken]
        )
    adds_special_tokens = config.media.vector_width > 0
    return [
        _prompt(text, sources, processor_kwargs, adds_special_tokens=adds_special_tokens)
        for text, (_, sources) in zip(texts, taken, strict=True)
    ], adds_special_tokens


def _conversation(one: ScoreInput) -> list[Message]:
    return [{"role": "user", "content": one}] if isinstance(one, str) else one.messages


def _prompt(
    text: str, sources: Sequence[MediaSource], processor_kwargs: Mapping[str, Any] | None, *, adds_special_tokens: bool
) -> Prompt:
    if not sources:
        return text
    further = {KWARGS: dict(processor_kwargs)} if processor_kwargs else {}
    return {"prompt": text, FIELD: by_kind(sources), "add_special_tokens": adds_special_tokens, **further}
