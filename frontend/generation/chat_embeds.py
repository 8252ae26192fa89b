"""Prompt embeddings in a conversation: parts {"type": "prompt_embeds", "data": base64} among a message's texts.

The chat template sees a mark in place of each part. A special tokenizer treats the mark as one token, so the texts
around it are tokenized as they would be around any special token.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.frontend.generation.prompt import TokenizedPrompt
from octavo.frontend.text.messages import Message
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.ids import pack_ids
from octavo.protocol.prompt_embeds import PLACEHOLDER, PromptEmbeds

PARTS = "prompt_embeds_parts"
"""Key of a prompt's dict that holds its `EmbedsPart`s; the text contains their marks."""

MARK = f"<prompt_embeds:{secrets.token_hex(8)}>"
"""Placeholder for a part in a text. It is random, so no caller's text contains it."""

_TYPE = "prompt_embeds"


@dataclass(frozen=True, slots=True, eq=False)
class EmbedsPart:
    """The embeddings of one part, as the caller sent them."""

    value: Any
    """Base64 of a file with one tensor, or the tensor itself."""
    path: str
    """Path of the part in the request, for errors."""


def take_embeds(messages: Sequence[Message]) -> tuple[Sequence[Message], list[EmbedsPart]]:
    """Return the messages with marks in place of embeddings, and the embeddings in order.

    Args:
        messages: the messages of the caller; not changed.

    Raises:
        InvalidRequestError: a part has no data.
    """
    parts: list[EmbedsPart] = []
    taken: list[Message] = []
    for place, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple) or not any(map(_is_embeds, content)):
            taken.append(message)
            continue
        texts: list[Any] = []
        for index, part in enumerate(content):
            if _is_embeds(part):
                parts.append(_part(part, f"messages[{place}].content[{index}].data"))
                texts.append({"type": "text", "text": MARK})
            else:
                texts.append(part)
        taken.append({**message, "content": texts})
    return (taken, parts) if parts else (messages, parts)


def with_rows(
    token_ids: Sequence[int], mark_id: int, rows: Sequence[PromptEmbeds], parts: Sequence[EmbedsPart]
) -> TokenizedPrompt:
    """Return a prompt in which each mark is replaced by the rows of its part.

    Args:
        token_ids: the token ids, with one `mark_id` per part.
        mark_id: token id of the mark.
        rows: the rows of each part, numbered from position 0.
        parts: the parts, for errors.

    Raises:
        InvalidRequestError: the template omitted a part, or wrote one twice.
    """
    num_marks = token_ids.count(mark_id)
    if num_marks != len(parts):
        raise InvalidRequestError(
            f"the chat template writes {num_marks} of {len(parts)} prompt_embeds parts: every part must come into the "
            "prompt once; move it to another message",
            parts[0].path,
        )
    waiting = iter(rows)
    placed: list[tuple[int, PromptEmbeds]] = []
    expanded: list[int] = []
    for token_id in token_ids:
        if token_id == mark_id:
            one = next(waiting)
            placed.append((len(expanded), one))
            expanded += [PLACEHOLDER] * one.num_rows
        else:
            expanded.append(token_id)
    return TokenizedPrompt(None, pack_ids(expanded), PromptEmbeds.join(placed))


def _is_embeds(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == _TYPE


def _part(part: Mapping[str, Any], path: str) -> EmbedsPart:
    value = part.get("data")
    if value is None or (isinstance(value, str) and not value):
        raise InvalidRequestError(
            f"{path} is missing: send base64 of a safetensors file with one tensor, or of what torch.save writes", path
        )
    return EmbedsPart(value, path)
