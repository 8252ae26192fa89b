"""Structured output: the caller's parameters (`StructuredOutputsParams`) and the form sent to the core (`GrammarSpec`).

Compiles nothing: only the core determines whether a grammar is valid.
"""

import json
from enum import IntEnum
from typing import Any

import msgspec

from octavo.protocol.errors import InvalidRequestError

MAX_CHOICES = 4096


class StructuredOutputsParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Constraint on an output, with the field names and semantics of vLLM's class of this name.

    Exactly one of the first six fields is set, or none if `max_free_tokens` is set. `SamplingParams` verifies it.
    """

    json: str | dict[str, Any] | None = None
    """A JSON Schema, as text or as an object."""
    regex: str | None = None
    """A regular expression that the complete output must match."""
    choice: list[str] | None = None
    """The possible outputs."""
    grammar: str | None = None
    """A context-free grammar in Lark's or llama.cpp's (GBNF) notation."""
    json_object: bool | None = None
    """If True, any JSON object."""
    structural_tag: str | dict[str, Any] | None = None
    """Free text with tags whose contents are constrained, as JSON text or as an object."""
    disable_any_whitespace: bool = False
    """Whether JSON has no white space between its tokens."""
    disable_additional_properties: bool = False
    """Whether objects have only the properties named in the JSON Schema, unless it says otherwise."""
    whitespace_pattern: str | None = None
    """A regular expression for the white space between JSON tokens. None for any white space."""
    start_after: str | list[str] | None = None
    """Text that ends a free prefix, such as "</think>": the constraint applies only after it. Of several texts, the
    first one to appear counts. If None, the constraint applies from the beginning."""
    max_free_tokens: int | None = None
    """Length limit of the free prefix: after this many tokens without `start_after`, the tokens of its first text are
    forced. May be set without a constraint: the rest is then free too. None for no limit."""
    param: str | None = None
    """The caller's name of the constraint, for errors. None for the name of the field."""
    schemas: dict[str, dict[str, Any]] | None = None
    """JSON Schemas that make up the constraint, by the caller's names. If the constraint does not compile, the error
    names the first schema that does not compile by itself."""

    def verify(self) -> None:
        """Check everything that can be checked without compiling.

        Raises:
            InvalidRequestError: a field is invalid; names it.
        """
        kinds = self.kinds
        self._verify_beginning()
        if len(kinds) > 1 or (not kinds and self.max_free_tokens is None):
            what = f"got {' and '.join(kinds)}" if kinds else "got none"
            raise InvalidRequestError(f"set exactly one of {', '.join(_CHECKS)}: {what}", self.name())
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name} must be true or false", self.name(name))
        for name in ("whitespace_pattern", "param"):
            if getattr(self, name) is not None and not _is_text(getattr(self, name)):
                raise InvalidRequestError(f"{name} must be a non-empty string", self.name(name))
        if self.start_after is not None and not (self.markers and all(map(_is_text, self.markers))):
            raise InvalidRequestError("start_after must be a non-empty string or several", self.name("start_after"))
        if self.schemas is not None and not all(isinstance(schema, dict) for schema in self.schemas.values()):
            raise InvalidRequestError("schemas must be JSON objects", self.name("schemas"))
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise InvalidRequestError(
                "whitespace_pattern and disable_any_whitespace contradict each other: use one",
                self.name("whitespace_pattern"),
            )
        for kind in kinds:
            if fault := _CHECKS[kind](getattr(self, kind)):
                raise InvalidRequestError(f"{self.param or kind} {fault}", self.name(kind))

    def _verify_beginning(self) -> None:
        if (limit := self.max_free_tokens) is None:
            return
        if type(limit) is not int or not 0 <= limit < 2**31:
            raise InvalidRequestError(
                f"{self.param or 'max_free_tokens'} must be a number of tokens, got {limit!r}",
                self.name("max_free_tokens"),
            )
        if self.start_after is None:
            raise InvalidRequestError("max_free_tokens needs start_after", self.name("max_free_tokens"))

    @property
    def markers(self) -> list[str]:
        """The texts of which any ends the free prefix. Empty if there is no prefix."""
        if self.start_after is None:
            return []
        return self.start_after if isinstance(self.start_after, list) else [self.start_after]

    @property
    def kinds(self) -> list[str]:
        """The alternative fields that are set."""
        return [name for name in _CHECKS if getattr(self, name) not in (None, False)]

    def name(self, field: str = "") -> str:
        """Return the name of a field, or of the constraint, for error messages."""
        if self.param is not None:
            return self.param
        return f"structured_outputs.{field}" if field else "structured_outputs"


class GrammarKind(IntEnum):
    """The notation of a grammar."""

    JSON_SCHEMA = 0
    REGEX = 1
    LARK = 2
    FREE = 3
    """No grammar: any text, also after the free prefix."""


class GrammarPart(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """A part of a grammar that has a name in the caller's request."""

    param: str
    """The name, for error messages."""
    text: str
    """A JSON Schema."""


class GrammarSpec(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The constraint on an output in the form that the core compiles."""

    kind: GrammarKind
    text: str
    param: str = "structured_outputs"
    """The caller's name of the constraint, for error messages."""
    start_after: bytes = b""
    """The output is free up to and including these bytes."""
    parts: tuple[GrammarPart, ...] = ()
    """If the grammar does not compile, the error names the first part that does not compile by itself."""
    max_free_tokens: int | None = None
    """Length limit of the free prefix: after this many tokens, those of `start_after` are forced. None for no limit."""
    start_after_token_ids: tuple[int, ...] = ()
    """The tokens of `start_after`, if `max_free_tokens` is set."""
    other_markers: tuple[bytes, ...] = ()
    """Other byte strings that end the free prefix."""


def parse_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: the text is not valid JSON; the message says why.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"is not valid JSON: {error}") from None


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _fault_of_text(value: object) -> str:
    return "" if _is_text(value) else "must be a non-empty string"


def _fault_of_object(value: object) -> str:
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError as error:
            return str(error)
    return "" if isinstance(value, dict) else "must be a JSON object, or the text of one"


def _fault_of_choice(value: object) -> str:
    if not isinstance(value, list) or not value or not all(_is_text(text) for text in value):
        return "must be a list of non-empty strings, at least one"
    return f"must hold at most {MAX_CHOICES} strings, got {len(value)}" if len(value) > MAX_CHOICES else ""


def _fault_of_flag(value: object) -> str:
    return "" if value is True else "must be true, or left out"


_CHECKS = {
    "json": _fault_of_object,
    "regex": _fault_of_text,
    "choice": _fault_of_choice,
    "grammar": _fault_of_text,
    "json_object": _fault_of_flag,
    "structural_tag": _fault_of_object,
}
"""For each alternative field, a function that returns what is wrong with a value, or ""."""
