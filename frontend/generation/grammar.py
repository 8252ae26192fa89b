"""From the form that a caller asks of an output to the grammar that the core compiles. Compiles nothing itself."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.frontend.generation.closed_schema import closed_schema
from octavo.frontend.generation.gbnf import lark_of_gbnf
from octavo.frontend.generation.structural_tag import lark_of_structural_tag
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.requests import Vocabulary
from octavo.protocol.structured import GrammarKind, GrammarPart, GrammarSpec, StructuredOutputsParams, parse_json

OPTIONS = "x-guidance"
"""Key of a schema under which the library that compiles it looks for its own settings."""


def grammar_spec(
    asked: StructuredOutputsParams,
    special_token_ids: Mapping[str, int],
    start_after_token_ids: Sequence[int] = (),
) -> GrammarSpec:
    """Return what the core is told.

    Args:
        asked: verified already.
        special_token_ids: the tokenizer's special tokens, by their names.
        start_after_token_ids: what the tokenizer makes of `start_after`, where `max_free_tokens` is set.

    Raises:
        InvalidRequestError: a structural tag, a grammar or a schema cannot be read; `param` names the field.
    """
    # First: what is wrong with a part is told by its own name.
    parts = tuple(
        GrammarPart(name, _schema_text(schema, asked, name)) for name, schema in (asked.schemas or {}).items()
    )
    kind, text = _grammar(asked, special_token_ids) if asked.kinds else (GrammarKind.FREE, "")
    return GrammarSpec(
        kind,
        text,
        asked.name(asked.kinds[0] if asked.kinds else "max_free_tokens"),
        (asked.start_after or "").encode(errors="surrogatepass"),
        parts,
        asked.max_free_tokens,
        tuple(start_after_token_ids),
    )


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the tokens that are no text, by the text that stands for them."""
    named = ((tokenizer.token_bytes(token_id), token_id) for token_id in sorted(tokenizer.special_token_ids))
    return {data.decode(errors="replace"): token_id for data, token_id in named if data}


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: list[int]) -> Vocabulary:
    """Return what the tokens of a model stand for.

    Takes a part of a second for a large vocabulary: once for each engine, off the event loop.

    Args:
        tokenizer: of the model.
        vocab_size: of the model, which may be larger than the tokenizer's.
        eos_token_ids: tokens that end an output; whatever their bytes are, they are no text.
    """
    special = sorted({*tokenizer.special_token_ids, *eos_token_ids})
    return Vocabulary(
        [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)],
        [token_id for token_id in special if token_id < vocab_size],
    )


def _grammar(asked: StructuredOutputsParams, special_token_ids: Mapping[str, int]) -> tuple[GrammarKind, str]:
    if asked.json_object:
        return GrammarKind.JSON_SCHEMA, _schema_text({"type": "object"}, asked, asked.name("json"))
    if asked.json is not None:
        schema = parse_json(asked.json) if isinstance(asked.json, str) else asked.json
        return GrammarKind.JSON_SCHEMA, _schema_text(schema, asked, asked.name("json"))
    if asked.regex is not None:
        return GrammarKind.REGEX, asked.regex
    if asked.choice is not None:
        return GrammarKind.LARK, "start: " + " | ".join(
            json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(asked.choice)
        )
    if asked.grammar is not None:
        return GrammarKind.LARK, _lark(asked.grammar, asked.name("grammar"))
    tag = parse_json(asked.structural_tag) if isinstance(asked.structural_tag, str) else asked.structural_tag
    text = lark_of_structural_tag(
        tag,
        lambda schema: _schema_text(schema, asked, asked.name("json")),
        special_token_ids,
        asked.name("structural_tag"),
    )
    return GrammarKind.LARK, text


def _schema_text(schema: Any, asked: StructuredOutputsParams, param: str) -> str:
    """Return a schema as JSON, with the settings that the caller has chosen."""
    if not isinstance(schema, dict):
        return _dumped(schema, param)
    if OPTIONS in schema:
        raise InvalidRequestError(f"{OPTIONS} is not a keyword of JSON Schema: leave it out", param)
    if asked.disable_additional_properties:
        schema = _closed(schema, param)
    options: dict[str, Any] = {}
    if asked.disable_any_whitespace:
        options["whitespace_flexible"] = False
    elif asked.whitespace_pattern is not None:
        options["whitespace_pattern"] = asked.whitespace_pattern
    return _dumped({**schema, OPTIONS: options} if options else schema, param)


def _dumped(schema: Any, param: str) -> str:
    try:
        return json.dumps(schema, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the schema has no JSON form: {error}", param) from None


def _closed(schema: dict[str, Any], param: str) -> dict[str, Any]:
    try:
        return closed_schema(schema)
    except RecursionError:
        raise InvalidRequestError("the schema is nested too deeply", param) from None


def _lark(grammar: str, param: str) -> str:
    """Return a grammar in Lark's notation; llama.cpp's is known by its `::=`."""
    if "::=" not in grammar:
        return grammar
    try:
        return lark_of_gbnf(grammar)
    except ValueError as error:
        raise InvalidRequestError(f"the grammar cannot be read: {error}", param) from None
