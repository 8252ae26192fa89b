"""Makes the prompt of a conversation, including its media, for `AsyncClient.chat` and `LLM.chat`."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

from octavo.frontend.generation.chat_embeds import PARTS, take_embeds
from octavo.frontend.generation.prompt import conversation_prompt
from octavo.frontend.media.prompts import PromptMaker
from octavo.frontend.media.sources import FIELD, by_kind
from octavo.frontend.text.chat_template import ChatTemplate
from octavo.frontend.text.messages import Message
from octavo.frontend.text.tokenizer import Tokenizer

T = TypeVar("T")


class PromptClient(Protocol):
    """The part of a client that `chat_prompt` needs."""

    tokenizer: Tokenizer
    media: PromptMaker | None

    def run_in_thread(self, work: Callable[[], T]) -> Awaitable[T]:
        """See `AsyncClient.run_in_thread`."""


async def chat_prompt(
    client: PromptClient, template: ChatTemplate, messages: Sequence[Message], **variables: Any
) -> dict[str, Any]:
    """Return the prompt of a conversation, in a form for `AsyncClient.generate`.

    Args:
        client: the client of the engine.
        template: renders the conversation, off the event loop.
        messages: the conversation.
        **variables: variables of the template; see `ChatTemplate.render`.

    Raises:
        InvalidRequestError: the template rejects the messages, or a media item has no URL.
    """
    if client.media is not None:
        messages, sources = await client.media.extract(messages)
        if sources:
            text = await client.run_in_thread(lambda: template.render(messages, **variables))
            return {"prompt": text, "add_special_tokens": False, FIELD: by_kind(sources)}
    messages, parts = take_embeds(messages)
    if parts:
        text = await client.run_in_thread(lambda: template.render(messages, **variables))
        return {"prompt": text, PARTS: parts}
    tokenizer = client.tokenizer
    return await client.run_in_thread(lambda: conversation_prompt(template, tokenizer, messages, **variables))
