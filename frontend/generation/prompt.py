"""The forms of a prompt, and its text and token ids. Tokenizes only conversations."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from octavo.frontend.generation.limits import check_token_ids
from octavo.frontend.text.chat_template import ChatTemplate
from octavo.frontend.text.messages import Message
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.ids import IdArray, pack_ids
from octavo.protocol.media import MediaItem
from octavo.protocol.prompt_embeds import PLACEHOLDER, PromptEmbeds


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt whose tokens are checked and packed. Its outputs do not repeat the text."""

    text: str | None
    token_ids: IdArray
    embeds: PromptEmbeds | None = None
    """Embedding rows at some positions; the token ids there are meaningless."""
    media: tuple[MediaItem, ...] = ()
    """Images or audio clips; the token ids at their rows are placeholders."""
    is_continued: bool = False
    """Whether the prompt continues work that the engine has accepted, such as an audio file's next window: see
    `Submit`."""

    @property
    def tokens(self) -> Sequence[int]:
        """The token ids, without positions that have embedding rows."""
        return self.token_ids if self.embeds is None else self.embeds.without(self.token_ids)

    @classmethod
    def of_embeds(cls, embeds: PromptEmbeds) -> "TokenizedPrompt":
        """Return a prompt that consists of embedding rows only."""
        return cls(None, pack_ids([PLACEHOLDER] * embeds.num_rows), embeds)


Prompt: TypeAlias = str | Sequence[int] | dict[str, Any] | TokenizedPrompt
"""Text, token ids, or vLLM's forms {"prompt": text}, {"prompt_token_ids": [...]} and {"prompt_embeds": tensor}.

Models that read images accept {"multi_modal_data": {"image": images}} with a text or token ids. Models that read audio
accept {"multi_modal_data": {"audio": audio_clips}}."""


def parts_of(prompt: Prompt, vocab_size: int) -> tuple[str | None, IdArray | None]:
    """Return a prompt's text for its outputs, and its token ids. One of them may be `None`.

    Raises:
        InvalidRequestError: the prompt is neither text nor token ids, or an id is outside the vocabulary.
    """
    if isinstance(prompt, TokenizedPrompt):
        return None, prompt.token_ids
    text: str | None
    if isinstance(prompt, dict):
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    else:
        text, token_ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
    if token_ids is not None:
        if not all(type(token_id) is int for token_id in token_ids):
            raise InvalidRequestError("a prompt must be text or a list of token ids (integers)", "prompt")
        return text, packed_prompt(token_ids, vocab_size)
    if not isinstance(text, str):
        raise InvalidRequestError(
            'a prompt dict needs "prompt" (text), "prompt_token_ids" or "prompt_embeds" (a tensor)', "prompt"
        )
    return text, None


def packed_prompt(token_ids: Sequence[int], vocab_size: int) -> IdArray:
    """Return the token ids of a prompt, packed in 4 bytes each. A list takes up to 40, and a request may wait for long.

    Raises:
        InvalidRequestError: an id is outside the vocabulary.
    """
    check_token_ids("prompt", token_ids, vocab_size)
    return pack_ids(token_ids)


def conversation_prompt(
    template: ChatTemplate, tokenizer: Tokenizer, messages: Sequence[Message], **variables: Any
) -> dict[str, Any]:
    """Render a conversation with a template and return the prompt.

    Args:
        template: the template of the model, which writes the special tokens itself.
        tokenizer: the tokenizer of the model.
        messages: the conversation.
        **variables: variables of the template; see `ChatTemplate.render`.

    Raises:
        InvalidRequestError: the template rejects the messages.
    """
    text = template.render(messages, **variables)
    return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}
