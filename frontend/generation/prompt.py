"""The forms of a prompt, and its two parts: text and token ids. Tokenizes nothing but conversations."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from octavo.frontend.generation.spec import check_prompt
from octavo.frontend.text.chat_template import ChatTemplate
from octavo.frontend.text.messages import Message
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.ids import IdArray, pack_ids
from octavo.protocol.media import MediaItem
from octavo.protocol.prompt_embeds import PLACEHOLDER, PromptEmbeds


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt of the server, whose tokens are checked and packed. Its outputs do not repeat the text."""

    text: str | None
    token_ids: IdArray
    embeds: PromptEmbeds | None = None
    """Rows at some positions, whose token ids mean nothing."""
    media: tuple[MediaItem, ...] = ()
    """Images or sounds; the token ids at their rows are placeholders."""
    is_continued: bool = False
    """It goes on with work that the engine has accepted, such as the next window of a sound: see `Submit`."""

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens, without positions that have rows."""
        return self.token_ids if self.embeds is None else self.embeds.without(self.token_ids)

    @classmethod
    def of_embeds(cls, embeds: PromptEmbeds) -> "TokenizedPrompt":
        """Return a prompt that is made of rows alone."""
        return cls(None, pack_ids([PLACEHOLDER] * embeds.num_rows), embeds)


Prompt: TypeAlias = str | Sequence[int] | dict[str, Any] | TokenizedPrompt
"""Text, token ids, or vLLM's forms {"prompt": text}, {"prompt_token_ids": [...]} and {"prompt_embeds": tensor}.

Models that read images take {"multi_modal_data": {"image": pictures}} beside a text or token ids, and models that read
sounds {"multi_modal_data": {"audio": sounds}}."""


def parts_of(prompt: Prompt, vocab_size: int) -> tuple[str | None, IdArray | None]:
    """Return a prompt's text, as its outputs show it, and its token ids; one of them may be missing.

    Raises:
        InvalidRequestError: it is neither text nor token ids, or an id is outside the vocabulary.
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
    """Return the token ids of a prompt in 4 bytes each. A list takes up to 40, and a request may wait for a long time.

    Raises:
        InvalidRequestError: an id is outside the vocabulary.
    """
    check_prompt(token_ids, vocab_size)
    return pack_ids(token_ids)


def conversation_prompt(
    template: ChatTemplate, tokenizer: Tokenizer, messages: Sequence[Message], **variables: Any
) -> dict[str, Any]:
    """Render a conversation with a template and return the prompt.

    Args:
        template: the template of the model, which writes the special tokens itself.
        tokenizer: the tokenizer of the model.
        messages: the conversation.
        **variables: of the template; see `ChatTemplate.render`.

    Raises:
        InvalidRequestError: the template rejects the messages.
    """
    text = template.render(messages, **variables)
    return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}
