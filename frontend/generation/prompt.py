"""What a caller gives as a prompt, and its two parts: text and token ids. Tokenizes nothing but conversations."""

from collections.abc import Sequence
from typing import Any, TypeAlias

from octavo.frontend.generation.spec import check_prompt
from octavo.frontend.text.chat_template import ChatTemplate
from octavo.frontend.text.messages import Message
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.protocol.errors import InvalidRequestError

Prompt: TypeAlias = str | Sequence[int] | dict[str, Any]
"""Text, token ids, or vLLM's forms {"prompt": text} and {"prompt_token_ids": [...]}."""


def parts_of(prompt: Prompt, vocab_size: int) -> tuple[str | None, list[int] | None]:
    """Return a prompt's text and its token ids, of which one may be missing.

    Raises:
        InvalidRequestError: it is neither text nor token ids, or has ids that the model does not.
    """
    text: str | None
    if isinstance(prompt, dict):
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    else:
        text, token_ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
    if token_ids is not None:
        checked = list(token_ids)
        if not all(type(token_id) is int for token_id in checked):
            raise InvalidRequestError("a prompt must be text or a list of token ids (integers)", "prompt")
        check_prompt(checked, vocab_size)
        return text, checked
    if not isinstance(text, str):
        raise InvalidRequestError('a prompt dict needs "prompt" (text) or "prompt_token_ids"', "prompt")
    return text, None


def conversation_prompt(
    template: ChatTemplate, tokenizer: Tokenizer, messages: Sequence[Message], **variables: Any
) -> dict[str, Any]:
    """Return the prompt that a template makes of a conversation.

    Args:
        template: of the model, which writes the special tokens itself.
        tokenizer: of the model.
        messages: the conversation.
        **variables: of the template; see `ChatTemplate.render`.

    Raises:
        InvalidRequestError: the template refuses the messages.
    """
    text = template.render(messages, **variables)
    return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}
