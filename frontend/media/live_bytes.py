"""`LiveMedia`: counts the bytes that the media of live requests take in a frontend."""

import weakref
from collections.abc import Sequence
from itertools import chain

from octavo.protocol.buffers import MAX_BUFFERS_BYTES, Buffer
from octavo.protocol.codec import MAX_BUFFERS, MIN_BUFFER_BYTES
from octavo.protocol.errors import InvalidRequestError, OverloadedError
from octavo.protocol.media import MediaItem

MAX_PROMPT_BUFFERS = MAX_BUFFERS - 16
"""Maximum number of buffers of a prompt; the rest of a message has room for some more."""


class LiveBuffer(Buffer):
    """A buffer of a live request whose garbage collection can be observed."""

    __slots__ = ("__weakref__",)


class LiveMedia:
    """Counts the bytes of buffers until the last reference to each, held by its live request, is gone.

    Args:
        max_bytes: limit of all live requests together.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0

    def hold_prompt(self, items: Sequence[MediaItem], field: str) -> None:
        """Count the items of one prompt; see `hold`.

        Raises:
            InvalidRequestError: the items exceed the limit of a message, or of all live requests.
            OverloadedError: live requests already hold too many bytes.
        """
        self.check_prompt(sum([item.num_bytes for item in items]), field)
        # Small tensors share the body of the message, which is never larger than the same number of minimum-size
        # buffers.
        tensors = chain.from_iterable([item.tensors.values() for item in items])
        shares = sum([min(len(tensor.data), MIN_BUFFER_BYTES) for tensor in tensors])
        if (count := -(-shares // MIN_BUFFER_BYTES)) > MAX_PROMPT_BUFFERS:
            raise InvalidRequestError(
                f"the media of the prompt take {count} buffers, and the limit is {MAX_PROMPT_BUFFERS}: send fewer or "
                "shorter ones (num_frames of mm_processor_kwargs for videos), or raise --max-num-encoder-tokens, so "
                "that more frames share a buffer",
                field,
            )
        self.hold(items, field)

    def check_prompt(self, num_bytes: int, field: str) -> None:
        """Check the number of bytes of one prompt's items; may be called before all of them are processed.

        Raises:
            InvalidRequestError: the bytes exceed the limit of a message, or of all live requests.
        """
        if num_bytes > MAX_BUFFERS_BYTES:
            raise InvalidRequestError(f"the media of the prompt have more than {MAX_BUFFERS_BYTES} bytes", field)
        if num_bytes > self._max_bytes:
            raise InvalidRequestError(
                f"the media take {num_bytes} bytes when they are processed, and the limit of all live requests is "
                f"{self._max_bytes} (--max-media-bytes)",
                field,
            )

    def hold(self, items: Sequence[MediaItem], field: str) -> None:
        """Count items whose data are `LiveBuffer`s.

        Args:
            items: items of one request.
            field: field of the request, for errors.

        Raises:
            InvalidRequestError: the items exceed the limit of all live requests.
            OverloadedError: live requests already hold too many bytes.
        """
        num_bytes = sum([item.num_bytes for item in items])
        if num_bytes > self._max_bytes:
            raise InvalidRequestError(
                f"the media take {num_bytes} bytes when they are processed, and the limit of all live requests is "
                f"{self._max_bytes} (--max-media-bytes)",
                field,
            )
        if self._num_bytes + num_bytes > self._max_bytes:
            raise OverloadedError(
                f"the media of live requests take {self._num_bytes} bytes, and with {num_bytes} more there would "
                f"be more than {self._max_bytes} (--max-media-bytes); try again later",
                "max_media_bytes",
            )
        for tensor in chain.from_iterable([item.tensors.values() for item in items]):
            self._num_bytes += len(tensor.data)
            weakref.finalize(tensor.data, self._release, len(tensor.data)).atexit = False

    def _release(self, num_bytes: int) -> None:
        self._num_bytes -= num_bytes
