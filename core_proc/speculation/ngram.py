"""Prompt lookup: drafts what followed the latest longest match of the last tokens, in the prompt or the output."""

from octavo.core_proc.request import Request
from octavo.core_proc.speculation.match_index import MatchIndex, match_length
from octavo.protocol.ids import IdArray


class NgramProposer:
    """Looks up the last tokens of each request in the request itself.

    Args:
        min_tokens: length of the shortest match.
        max_tokens: longest length that is compared. Among matches of this length, the latest is used.
    """

    def __init__(self, min_tokens: int, max_tokens: int) -> None:
        self._min_tokens = min_tokens
        self._max_tokens = max_tokens
        self._indexes: dict[Request, MatchIndex] = {}

    def propose(self, request: Request, num_tokens: int) -> IdArray | None:
        """Return what followed the best match. Return None if there is no match."""
        index = self._indexes.get(request)
        if index is None:
            index = self._indexes[request] = MatchIndex(self._min_tokens, request.max_num_tokens)
        token_ids = request.token_ids
        if not index.extend(token_ids, len(token_ids) - 1):
            return None
        best_end, best_length = 0, self._min_tokens - 1
        for end in index.find(token_ids):
            length = match_length(token_ids, token_ids, end, self._max_tokens)
            if length > best_length:
                best_end, best_length = end, length
            if length == self._max_tokens:
                break
        return continuation(token_ids, best_end, num_tokens) if best_end else None

    def forget(self, request: Request) -> None:
        """Drop the index of a request."""
        self._indexes.pop(request, None)


def continuation(token_ids: IdArray, start: int, num_tokens: int) -> IdArray:
    """Return the tokens from `start` on. If the text ends before `num_tokens`, it is assumed to repeat from `start`."""
    found = token_ids[start : start + num_tokens]
    while 0 < len(found) < num_tokens:
        found.extend(found[: num_tokens - len(found)])
    return found
