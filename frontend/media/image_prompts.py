"""`ImagePrompts`: prompts that consist of one image, for models that compute one vector per image (CLIP)."""

from collections.abc import Sequence

from octavo.frontend.media.parts import MediaOptions, MediaSource, take_media
from octavo.frontend.media.prompts import MediaPrompt, MediaPrompts
from octavo.frontend.text.messages import Message, MessageForm
from octavo.protocol.errors import InvalidRequestError

_NO_OPTIONS = MediaOptions()
_FORM = MessageForm(wants_parts=False, wraps_strings=False, knows_developer=True)


class ImagePrompts(MediaPrompts):
    """Makes prompts that consist of one image each; see `MediaPrompts`."""

    async def extract(self, messages: Sequence[Message]) -> tuple[list[Message], list[MediaSource]]:
        """Return a conversation without its images, and the images; raises as `MediaPrompts.extract`."""
        return take_media(messages, dict.fromkeys(self._kinds_in(messages), ""))

    async def of_text(
        self,
        text: str,
        sources: Sequence[MediaSource],
        *,
        adds_special_tokens: bool,
        options: MediaOptions = _NO_OPTIONS,
    ) -> MediaPrompt:
        """Return the prompt of one image.

        Raises:
            InvalidRequestError: the prompt also has text or a second image, or the image cannot be used.
            OverloadedError: live requests already hold the maximum number of bytes.
        """
        if text.strip() or len(sources) != 1:
            beside = "text" if text.strip() else f"{len(sources) - 1} more images"
            path = sources[0].path if sources else "prompt"
            raise InvalidRequestError(
                f"{path}: {beside} beside an image: this model has one vector for each text and each image, so send "
                "them in prompts of their own",
                path,
            )
        results = await self._process_all(sources, options)
        return self._prompt([self._token_ids["image"]], list(zip(sources, results, strict=True)))

    async def of_tokens(
        self, token_ids: Sequence[int], sources: Sequence[MediaSource], options: MediaOptions = _NO_OPTIONS
    ) -> MediaPrompt:
        """Return the prompt of one image, which must have no tokens of its own; raises as `of_text`."""
        return await self.of_text("tokens" if token_ids else "", sources, adds_special_tokens=False, options=options)


def plain_text(messages: Sequence[Message]) -> str:
    """Join the texts of a conversation into one text, for a model without a chat template.

    Raises:
        InvalidRequestError: a message is malformed, or has content other than text.
    """
    return "".join([message.get("content") or "" for message in _FORM.convert(messages)])
