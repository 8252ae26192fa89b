"""Words of a transcription, with the times at which they are spoken."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from unicodedata import category

from octavo.frontend.audio.prompts import AudioWindow
from octavo.frontend.audio.segments import STEP_S
from octavo.frontend.audio.speech_tokens import SpeechTokens

_WITHOUT_SPACES = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
"""Languages written without spaces between words: each character counts as a word."""
_OPENING, _CLOSING = frozenset({"Pi", "Ps"}), frozenset({"Pd", "Pe", "Pf", "Po"})
"""Unicode categories of punctuation that belongs to the word after it, and to the word before it."""
_BEFORE_WORDS = frozenset("¿¡\"'-")
"""Marks before words whose Unicode category does not tell; the straight ones also occur after words."""
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Replaces an incomplete character, whose remaining bytes are in other tokens."""


@dataclass(frozen=True, slots=True)
class Word:
    """A word with its punctuation, and its times in seconds from the start of the clip."""

    text: str
    start_s: float
    end_s: float


@dataclass(slots=True)
class _Piece:
    """Consecutive tokens of a window that belong together."""

    text: str
    first: int
    """Index of the first token."""
    end: int
    is_after_mark: bool
    """Whether a timestamp precedes the piece."""


def words_of(
    window: AudioWindow,
    token_ids: Sequence[int],
    rows: Sequence[float],
    tokens: SpeechTokens,
    decode: Callable[[Sequence[int]], str],
    language: str,
) -> Iterator[Word]:
    """Yield the words of a window.

    Args:
        window: supplies start and duration.
        token_ids: drawn by the model.
        rows: for each token except the end token, the row of the audio at which the next token begins.
        tokens: tokens of the model.
        decode: returns the text of tokens.
        language: code of the spoken language.
    """

    def time_s(place: int) -> float:
        row = rows[min(place, len(rows)) - 1] if place > 0 and len(rows) else 0.0
        return round(window.start_s + min(STEP_S * row, window.duration_s), 3)

    characters = _characters(token_ids, tokens, decode)
    pieces = characters if language in _WITHOUT_SPACES else _joined_at_spaces(characters)
    for piece in _with_punctuation(list(pieces)):
        yield Word(piece.text.strip(), time_s(piece.first), time_s(piece.end))


def _characters(
    token_ids: Sequence[int], tokens: SpeechTokens, decode: Callable[[Sequence[int]], str]
) -> Iterator[_Piece]:
    """Yield the smallest pieces of text that consist of complete characters."""
    begun: list[int] = []
    first, is_after_mark = 0, False
    for place, token in enumerate([*token_ids, tokens.end]):
        if token >= tokens.end:
            if begun:
                yield _Piece(decode(begun), first, place, is_after_mark)
            begun, is_after_mark = [], True
            continue
        first = first if begun else place
        begun.append(token)
        text = decode(begun)
        # a replacement character further in front stands for bytes that are not UTF-8
        if not text.endswith(_INCOMPLETE):
            yield _Piece(text, first, place + 1, is_after_mark)
            begun, is_after_mark = [], False


def _joined_at_spaces(pieces: Iterator[_Piece]) -> Iterator[_Piece]:
    """Join pieces to words; a piece that begins with a space begins a word."""
    word: _Piece | None = None
    for piece in pieces:
        if word is None or piece.is_after_mark or piece.text[:1].isspace():
            if word is not None:
                yield word
            word = piece
        else:
            word.text += piece.text
            word.end = piece.end
    if word is not None:
        yield word


def _with_punctuation(pieces: Sequence[_Piece]) -> list[_Piece]:
    """Attach punctuation to the word before or after it, and return the words."""
    words: list[_Piece] = []
    opening: _Piece | None = None
    for piece in pieces:
        marks = piece.text.strip()
        follows = words and opening is None and not piece.is_after_mark
        if marks and follows and _closes(marks) and not piece.text[:1].isspace():
            words[-1].text += piece.text
            words[-1].end = piece.end
        elif marks and _opens(marks):
            opening = piece if opening is None else _Piece(opening.text + piece.text, opening.first, piece.end, False)
        elif marks:
            if opening is not None:
                piece.text, piece.first = opening.text + piece.text.lstrip(), opening.first
            words.append(piece)
            opening = None
    if opening is not None and words:
        words[-1].text += opening.text
        words[-1].end = opening.end
    return words


def _opens(marks: str) -> bool:
    return all(mark in _BEFORE_WORDS or category(mark) in _OPENING for mark in marks)


def _closes(marks: str) -> bool:
    return all(category(mark) in _CLOSING and mark not in "¿¡" for mark in marks)
