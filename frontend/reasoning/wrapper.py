"""`Unwrapper`: removes the marks around an answer that arrives in pieces."""

from octavo.frontend.tools.parser import shown_length


class Unwrapper:
    """Passes on an answer without its surrounding marks and the white space next to them. Other text is unchanged.

    The closing mark counts only at the end of the answer, because an answer may mention it.

    Args:
        wrapper: the opening and the closing mark.
    """

    def __init__(self, wrapper: tuple[str, str]) -> None:
        self._begin, self._end = wrapper
        self._held = ""
        self._is_wrapped: bool | None = None
        """Whether the answer has the opening mark; `None` while this is unknown."""

    def push(self, text: str, is_final: bool) -> str:
        """Return the part of the answer that has become certain.

        Args:
            text: the next piece of text.
            is_final: whether no more text follows.
        """
        self._held += text
        if self._is_wrapped is None:
            body = self._held.lstrip()
            if body.startswith(self._begin):
                self._is_wrapped, self._held = True, body[len(self._begin) :]
            elif is_final or not self._begin.startswith(body):
                self._is_wrapped = False
            else:
                return ""
            self._has_begun = not self._is_wrapped
        if not self._has_begun:
            self._held = self._held.lstrip("\r\n")
            self._has_begun = bool(self._held)
        length = self._settled_length(is_final) if self._is_wrapped else len(self._held)
        settled, self._held = self._held[:length], self._held[length:]
        return settled

    def _settled_length(self, is_final: bool) -> int:
        body = self._held.rstrip()
        if body.endswith(self._end):
            return len(body.removesuffix(self._end).rstrip())
        return len(self._held) if is_final else shown_length(self._held, (self._end,))
