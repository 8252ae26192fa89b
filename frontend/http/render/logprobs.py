"""Logprobs in the public API's three forms: chat, plain completions, and vLLM's prompt logprobs."""

import codecs
import itertools
from collections.abc import Sequence
from typing import Protocol

from octavo.frontend.http.schemas.chat import ChatLogprobs, TokenLogprob, TopLogprob
from octavo.frontend.http.schemas.completions import CompletionLogprobs, PromptLogprob, PromptLogprobs
from octavo.frontend.outputs import PositionLogprobs

LOWEST = -9999.0
"""Replaces minus infinity, which JSON does not have."""


class TokenTexts(Protocol):
    """The part of a tokenizer that this module needs."""

    special_token_ids: frozenset[int]
    """Special tokens, such as BOS, which do not appear in the text."""

    def token_string(self, token_id: int) -> str:
        """Return the text of a token. A part of a character is shown as U+FFFD."""

    def token_bytes(self, token_id: int, is_first: bool = False) -> bytes:
        """Return the bytes of a token. For the first token of a text, omit the space that some tokenizers put there."""


class TokenNames:
    """How tokens are written: as text, or as "token_id:ID", which no two tokens share."""

    def __init__(self, tokenizer: TokenTexts, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def name(self, token_id: int) -> str:
        """Return the name of a token for display."""
        return f"token_id:{token_id}" if self._as_ids else self._tokenizer.token_string(token_id)

    def unique_name(self, token_id: int) -> str:
        """Return the name of a token where names are keys: `bytes:\\x..` for a token that is part of a character.

        The text of all such tokens is U+FFFD. This is the notation of OpenAI's plain completions.
        """
        name = self.name(token_id)
        if "\ufffd" not in name:
            return name
        data = self._tokenizer.token_bytes(token_id)
        if "\ufffd".encode() in data:  # the character itself
            return name
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def data(self, token_id: int) -> list[int]:
        """Return the bytes of a token, including those that U+FFFD replaces in its text."""
        return list(self._tokenizer.token_bytes(token_id))

    def text_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text."""
        return self._tokenizer.token_bytes(token_id)

    def prompt_bytes(self, token_ids: Sequence[int], text: str) -> list[bytes]:
        """Return the bytes that each token of a prompt adds to its text. A leading special token may add none."""
        pieces: list[bytes] = []
        for token_id in itertools.takewhile(self._tokenizer.special_token_ids.__contains__, token_ids):
            name = self._tokenizer.token_string(token_id)
            is_shown = text.startswith(name)
            text = text.removeprefix(name)
            pieces.append(name.encode() if is_shown else b"")
        if shown := token_ids[len(pieces) :]:
            pieces.append(self._tokenizer.token_bytes(shown[0], is_first=True))
        return [*pieces, *map(self.text_bytes, shown[1:])]


class TextPlace:
    """A position in a text that advances token by token. A token that is only part of a character does not advance it.

    Args:
        offset: offset in characters at which the text begins.
    """

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def advance(self, data: bytes) -> None:
        """Advance past a token's bytes."""
        self.offset += len(self._decoder.decode(data))


def chat_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs], names: TokenNames, num_top: int | None
) -> ChatLogprobs:
    """Return logprobs in the chat format.

    Args:
        token_ids: the generated tokens.
        logprobs: one entry per token.
        names: how to write tokens.
        num_top: number of alternatives to show per token; -1: all. None: show the chosen token, then those the client
        named.
    """
    content = []
    for token_id, position in zip(token_ids, logprobs, strict=True):
        own = position[token_id]
        ranked = _alternatives(token_id, position, num_top)
        top = [TopLogprob(names.name(other), _finite(position[other].logprob), names.data(other)) for other in ranked]
        content.append(TokenLogprob(names.name(token_id), _finite(own.logprob), names.data(token_id), top))
    return ChatLogprobs(content)


def completion_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[PositionLogprobs | None],
    names: TokenNames,
    place: TextPlace,
    prompt: str | None = None,
) -> CompletionLogprobs:
    """Return logprobs in the format of plain completions. A token without logprobs (a prompt's first) has null.

    Args:
        token_ids: the token ids of the prompt or generated.
        logprobs: one entry per token.
        names: how to write tokens.
        place: position of the first token in the choice's text; advanced past the last token.
        prompt: the text of the prompt, if the tokens are those of the prompt.
    """
    result = CompletionLogprobs([], [], [], [])
    pieces = map(names.text_bytes, token_ids) if prompt is None else names.prompt_bytes(token_ids, prompt)
    for token_id, position, piece in zip(token_ids, logprobs, pieces, strict=True):
        result.text_offset.append(place.offset)
        result.tokens.append(names.unique_name(token_id))
        result.token_logprobs.append(None if position is None else _finite(position[token_id].logprob))
        result.top_logprobs.append(None if position is None else _by_name(position, names))
        place.advance(piece)
    return result


def join_logprobs(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """Return the logprobs of a prompt and of its continuation, joined."""
    return CompletionLogprobs(
        first.text_offset + second.text_offset,
        first.token_logprobs + second.token_logprobs,
        first.tokens + second.tokens,
        first.top_logprobs + second.top_logprobs,
    )


def prompt_logprobs(logprobs: Sequence[PositionLogprobs | None]) -> PromptLogprobs:
    """Return logprobs in vLLM's format: by token id, with ranks."""
    return [
        None
        if position is None
        else {
            str(token_id): PromptLogprob(_finite(entry.logprob), entry.rank, entry.decoded_token)
            for token_id, entry in position.items()
        }
        for position in logprobs
    ]


def _alternatives(token_id: int, position: PositionLogprobs, num_top: int | None) -> list[int]:
    """Return the most likely tokens. The chosen token is included only if it is among them."""
    if num_top is None:
        return list(position)
    if num_top == -1:
        num_top = len(position)
    # The chosen token comes first in the dict regardless of its rank. The others are sorted by descending logprob.
    rank = position[token_id].rank or 1
    others = [other for other in position if other != token_id]
    if rank <= num_top:
        others.insert(rank - 1, token_id)
    return others[:num_top]


def _by_name(position: PositionLogprobs, names: TokenNames) -> dict[str, float]:
    """Return logprobs by token name. If several tokens have the same text, keep the most likely one."""
    result: dict[str, float] = {}
    for token_id, entry in position.items():
        name, logprob = names.unique_name(token_id), _finite(entry.logprob)
        result[name] = max(logprob, result.get(name, logprob))
    return result


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
