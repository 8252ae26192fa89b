"""`Buffer`: binary data of a message that may be too large to be copied, such as masks, embeddings or media."""

MAX_BUFFERS_BYTES = 2**28
"""Most bytes in all buffer frames of one message."""


class Buffer:
    """Bytes that are sent next to the body of their message if they are large (`codec.MIN_BUFFER_BYTES`).

    After decoding, `data` is the memory that the socket has filled. It lives as long as this object and must not be
    written to. Two buffers are equal if their bytes are.
    """

    __slots__ = ("data",)

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self.data = data

    def __len__(self) -> int:
        return memoryview(self.data).nbytes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Buffer) and bytes(self.data) == bytes(other.data)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Buffer({len(self)} bytes)"
