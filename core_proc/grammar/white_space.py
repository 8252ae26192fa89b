"""`white_space`: predicts the white space before the next byte of an output, as JSON is usually written."""

import re

_INDENTED = re.compile(rb"[{\[,][ \t]*\n")
_LINES = re.compile(rb"\n([ \t]*)\S")


def white_space(output: bytes, next_byte: bytes) -> bytes:
    """Return the white space that an output probably has before a byte, including white space with which it already
    ends."""
    text = output.rstrip()
    begun, last = output[len(text) :], text[-1:]
    space = _last_space(text, last, next_byte)
    if (last in (b"{", b"[", b",") or next_byte in (b"}", b"]")) and _INDENTED.search(output):
        if space is None or b"\n" in space:
            space = _indentation(text, last, next_byte)
    elif space is None:
        space = b" " if last in (b":", b",") else b""
    if space is None or not space.startswith(begun):
        # Tokenizers put the last of several spaces into the following token.
        return b" " if begun.endswith(b" ") and b"\n" in begun else b""
    return space[len(begun) :]


def _indentation(text: bytes, last: bytes, next_byte: bytes) -> bytes | None:
    """Return the beginning of a new line in an indented output. Return None if no line is indented yet."""
    lines: list[bytes] = _LINES.findall(text)
    unit = min(filter(None, lines), key=len, default=None)
    if unit is None:
        return None
    indent = lines[-1]
    if last in (b"{", b"["):
        return b"" if next_byte in (b"}", b"]") else b"\n" + indent + unit
    return b"\n" + (indent.removesuffix(unit) if next_byte in (b"}", b"]") else indent)


def _last_space(text: bytes, last: bytes, next_byte: bytes) -> bytes | None:
    """Return the white space between these two bytes at their last occurrence. Return None if they never occurred."""
    found: list[bytes] = re.findall(re.escape(last) + rb"(\s*)" + re.escape(next_byte), text)
    return found[-1] if found else None
