"""Server-sent events: a stream of JSON texts as a response."""

from collections.abc import AsyncGenerator, Iterable

from octavo.frontend.http.errors import error_body
from octavo.frontend.http.message import StreamedResponse
from octavo.protocol.errors import OctavoError

DONE = b"data: [DONE]\n\n"

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_MEDIA_TYPE = "text/event-stream; charset=utf-8"


def event(body: bytes) -> bytes:
    """Return one server-sent event; the body must hold no line break, as JSON does not."""
    return b"data: " + body + b"\n\n"


def events(bodies: Iterable[bytes]) -> bytes:
    """Return several, to be sent at once."""
    return b"".join([b"data: %b\n\n" % body for body in bodies])


class EventStream(StreamedResponse):
    """Sends events as they come.

    A failure before the response has begun keeps its own HTTP status; a later one becomes an `{"error": ...}`
    event. `data: [DONE]` always comes last.

    Args:
        pieces: one or several events each.
    """

    __slots__ = ("_pieces",)

    def __init__(self, pieces: AsyncGenerator[bytes]) -> None:
        super().__init__(headers=_HEADERS, media_type=_MEDIA_TYPE)
        self._pieces = pieces

    async def pieces(self) -> AsyncGenerator[bytes]:
        """Yield the events, and what ends them."""
        has_yielded = False
        try:
            async for piece in self._pieces:
                has_yielded = True
                yield piece
        except OctavoError as error:
            if not (has_yielded or self.has_begun):
                raise
            yield event(error_body(error))
        except Exception as error:
            if has_yielded or self.has_begun:
                yield event(error_body(error)) + DONE
            raise
        finally:
            await self._pieces.aclose()
        yield DONE
