"""Turns the constraint of a request into the grammar that the core compiles."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.frontend.generation.closed_schema import closed_schema
from octavo.frontend.generation.gbnf import lark_of_gbnf
from octavo.frontend.generation.structural_tag import lark_of_structural_tag
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.requests import ModelVocabulary
from octavo.protocol.structured import GrammarKind, GrammarPart, GrammarSpec, StructuredOutputsParams, parse_json

OPTIONS = "x-guidance"
"""Key of a schema under which the compiler's library expects its own options."""


def grammar_spec(
    params: StructuredOutputsParams,
    special_token_ids: Mapping[str, int],
    start_after_token_ids: Sequence[int] = (),
) -> GrammarSpec:
    """Return the grammar in the core's form.

    Args:
        params: the constraint, already verified.
        special_token_ids: ids of the tokenizer's special tokens, by their text.
        start_after_token_ids: the token ids of the first marker, if `max_free_tokens` is set.

    Raises:
        InvalidRequestError: a structural tag, a grammar or a schema is invalid; `param` names the field.
    """
    # Done first, so that an error in a part names that part.
    parts = tuple(
        GrammarPart(name, _schema_text(schema, params, name)) for name, schema in (params.schemas or {}).items()
    )
    markers = [marker.encode(errors="surrogatepass") for marker in params.markers]
    kind, text = _grammar(params, special_token_ids) if params.kinds else (GrammarKind.FREE, "")
    return GrammarSpec(
        kind,
        text,
        params.name(params.kinds[0] if params.kinds else "max_free_tokens"),
        markers[0] if markers else b"",
        parts,
        params.max_free_tokens,
        tuple(start_after_token_ids),
        tuple(markers[1:]),
    )


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the ids of the special tokens, by their text."""
    named = ((tokenizer.token_bytes(token_id), token_id) for token_id in sorted(tokenizer.special_token_ids))
    return {data.decode(errors="replace"): token_id for data, token_id in named if data}


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: list[int]) -> ModelVocabulary:
    """Return the bytes of each token of a model.

    Takes a fraction of a second for a large vocabulary: call it once per engine, off the event loop.

    Args:
        tokenizer: the tokenizer of the model.
        vocab_size: the vocabulary size of the model, which may be larger than the tokenizer's.
        eos_token_ids: tokens that end an output; they never count as text, whatever their bytes are.
    """
    special = sorted({*tokenizer.special_token_ids, *eos_token_ids})
    return ModelVocabulary(
        [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)],
        [token_id for token_id in special if token_id < vocab_size],
    )


def _grammar(params: StructuredOutputsParams, special_token_ids: Mapping[str, int]) -> tuple[GrammarKind, str]:
    if params.json_object:
        return GrammarKind.JSON_SCHEMA, _schema_text({"type": "object"}, params, params.name("json"))
    if params.json is not None:
        schema = parse_json(params.json) if isinstance(params.json, str) else params.json
        return GrammarKind.JSON_SCHEMA, _schema_text(schema, params, params.name("json"))
    if params.regex is not None:
        return GrammarKind.REGEX, params.regex
    if params.choice is not None:
        return GrammarKind.LARK, "start: " + " | ".join(
            json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(params.choice)
        )
    if params.grammar is not None:
        return GrammarKind.LARK, _lark(params.grammar, params.name("grammar"))
    tag = parse_json(params.structural_tag) if isinstance(params.structural_tag, str) else params.structural_tag
    text = lark_of_structural_tag(
        tag,
        lambda schema: _schema_text(schema, params, params.name("json")),
        special_token_ids,
        params.name("structural_tag"),
    )
    return GrammarKind.LARK, text


def _schema_text(schema: Any, params: StructuredOutputsParams, param: str) -> str:
    """Return a schema as JSON, with the options that the caller has chosen."""
    if not isinstance(schema, dict):
        return _dumped(schema, param)
    if OPTIONS in schema:
        raise InvalidRequestError(f"{OPTIONS} is not a keyword of JSON Schema: leave it out", param)
    if params.disable_additional_properties:
        schema = _closed(schema, param)
    options: dict[str, Any] = {}
    if params.disable_any_whitespace:
        options["whitespace_flexible"] = False
    elif params.whitespace_pattern is not None:
        options["whitespace_pattern"] = params.whitespace_pattern
    return _dumped({**schema, OPTIONS: options} if options else schema, param)


def _dumped(schema: Any, param: str) -> str:
    try:
        return json.dumps(schema, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the schema cannot be written as JSON: {error}", param) from None


def _closed(schema: dict[str, Any], param: str) -> dict[str, Any]:
    try:
        return closed_schema(schema)
    except RecursionError:
        raise InvalidRequestError("the schema is nested too deeply", param) from None


def _lark(grammar: str, param: str) -> str:
    """Return a grammar in Lark's notation; llama.cpp's notation is recognized by `::=`."""
    if "::=" not in grammar:
        return grammar
    try:
        return lark_of_gbnf(grammar)
    except ValueError as error:
        raise InvalidRequestError(f"the grammar cannot be read: {error}", param) from None
