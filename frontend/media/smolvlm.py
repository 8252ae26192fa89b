"""Loads SmolVLM's processor without `num2words`, which it only needs for small numbers."""

from collections.abc import Callable
from typing import Any

_SMALL = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def allow_smolvlm(assign: Callable[[Any, str, Any], None] = setattr) -> None:
    """Let this process load SmolVLM's processor.

    Args:
        assign: replaces an attribute; tests undo it later.
    """
    from transformers.models.smolvlm import processing_smolvlm

    assign(processing_smolvlm, "num2words", in_words)


def in_words(number: int) -> str:
    """Return a number below a million in words, as `num2words` writes it: "two thousand, one hundred and six"."""
    if number < len(_SMALL):
        return _SMALL[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return f"{_TENS[tens]}-{_SMALL[ones]}" if ones else _TENS[tens]
    unit, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    count, rest = divmod(number, unit)
    words = f"{in_words(count)} {name}"
    if not rest:
        return words
    return f"{words}{' and' if rest < 100 else ','} {in_words(rest)}"
