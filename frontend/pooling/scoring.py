"""Scores how well texts and media match, with a cross-encoder for pairs or by comparing embedding vectors."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from octavo.frontend.generation.prompt import Prompt
from octavo.frontend.pooling.inputs import TRUNCATION, Fields, PoolingPrompt, TextPair
from octavo.frontend.pooling.outputs import ScoringOutput, ScoringRequestOutput
from octavo.frontend.pooling.pooler import Pooler
from octavo.frontend.pooling.result import PooledResult
from octavo.frontend.pooling.score_inputs import ScoreInput, check_kwargs, score_prompts
from octavo.frontend.pooling.spec import require_pooling
from octavo.frontend.text.chat_template import RESERVED_VARIABLES, ChatTemplate
from octavo.frontend.text.messages import Message
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.pooling_params import PoolingParams

if TYPE_CHECKING:
    from numpy import ndarray


async def score(
    pooler: Pooler,
    first: Sequence[ScoreInput],
    second: Sequence[ScoreInput],
    params: PoolingParams | None = None,
    *,
    names: tuple[str, str] = ("data_1", "data_2"),
    max_tokens: tuple[int, int] = (0, 0),
    chat_template: str | None = None,
    template_variables: dict[str, Any] | None = None,
    processor_kwargs: Mapping[str, Any] | None = None,
    request_id: str | None = None,
    **options: Any,
) -> list[ScoringRequestOutput]:
    """Return a score for each pair of inputs: texts, or contents with media if the model embeds media.

    A model with one class is a cross-encoder: it reads a pair and returns its class score. Other models score by the
    cosine of two vectors. With vectors per token, the score is the sum over the tokens of the first input of the
    largest product with a token of the second input (late interaction, MaxSim).

    Args:
        pooler: pooler of the client.
        first: one input for all of `second`, or one per entry of it.
        second: the other inputs.
        params: as in `Pooler.run`.
        names: names of both request fields, for errors.
        max_tokens: numbers of tokens to which first and second texts are truncated (`max_tokens_per_query`,
            `max_tokens_per_doc`); 0: no truncation.
        chat_template: for pairs; a file or Jinja source. `None`: the engine's `--chat-template`, if there is one.
        template_variables: variables of the template.
        processor_kwargs: further arguments of the model's processor, for all media.
        request_id: as in `Pooler.run`.
        **options: as in `Pooler.run`.

    Raises:
        InvalidRequestError: the numbers of inputs do not match, or the model cannot score or read one of them.
        OctavoError: as in `Pooler.run`.
    """
    facts = require_pooling(pooler.config)
    _check_numbers(len(first), len(second), names)
    params = params or PoolingParams()
    if processor_kwargs:
        check_kwargs(pooler, processor_kwargs)
    if facts.tasks[0] == "classify":
        template = chat_template or pooler.config.chat_template
        pairs = _pairs(pooler, first, second, max_tokens, template, template_variables)
        results = await pooler.run(
            pairs, params, task="classify", request_id=request_id, fields=Fields(names[1]), **options
        )
        return [_output(float(one.array().reshape(-1)[0]), one) for one in results]
    if facts.tasks[0] not in ("embed", "token_embed"):
        raise InvalidRequestError(
            f"{pooler.config.served_model_names[0]} computes {facts.tasks[0]}, no scores", "model"
        )
    if chat_template or template_variables:
        message = "chat_template, chat_template_kwargs and instruction need a cross-encoder"
        raise InvalidRequestError(message, "chat_template" if chat_template else "chat_template_kwargs")
    prompts, adds_special_tokens = await score_prompts(pooler, [*first, *second], processor_kwargs)
    options = {"add_special_tokens": adds_special_tokens, "request_id": request_id, **options}
    return await _compared(pooler, prompts[: len(first)], prompts[len(first) :], params, max_tokens, names, options)


async def _compared(
    pooler: Pooler,
    first: Sequence[Prompt],
    second: Sequence[Prompt],
    params: PoolingParams,
    max_tokens: tuple[int, int],
    names: tuple[str, str],
    options: dict[str, Any],
) -> list[ScoringRequestOutput]:
    """Return scores by comparing vectors. A single first input is computed once."""
    task = require_pooling(pooler.config).tasks[0]
    measure = _cosine if task == "embed" else _max_similarity
    if task == "token_embed" and params.use_activation is None and params.normalize is None:
        params = params.clone(use_activation=True)  # MaxSim adds up products of normalized vectors
    each = [
        one
        for prompts, limit in zip((first, second), max_tokens, strict=True)
        for one in [params.clone(truncate_prompt_tokens=limit) if limit else params] * len(prompts)
    ]
    limits = (
        "max_tokens_per_query" if max_tokens[0] else TRUNCATION,
        "max_tokens_per_doc" if max_tokens[1] else TRUNCATION,
    )
    fields = Fields(*names, num_first=len(first), limits=limits)
    results = await pooler.run([*first, *second], each, task=task, fields=fields, **options)
    queries, others = results[: len(first)], results[len(first) :]
    queries = queries * len(others) if len(first) == 1 else queries
    return [
        _output(measure(one.array(), other.array()), one, other) for one, other in zip(queries, others, strict=True)
    ]


def _check_numbers(num_first: int, num_second: int, names: tuple[str, str]) -> None:
    for count, name in zip((num_first, num_second), names, strict=True):
        if not count:
            raise InvalidRequestError(f"{name} is empty: give at least one text", name)
    if num_first not in (1, num_second):
        raise InvalidRequestError(
            f"{names[0]} has {num_first} texts and {names[1]} has {num_second}: give one of the "
            "first, or as many of both",
            names[0],
        )


def _pairs(
    pooler: Pooler,
    first: Sequence[ScoreInput],
    second: Sequence[ScoreInput],
    max_tokens: tuple[int, int],
    chat_template: str | None,
    variables: dict[str, Any] | None,
) -> list[PoolingPrompt]:
    """Return the prompts of a cross-encoder: both texts in the tokenizer's format for pairs, or in a template.

    Only an explicitly configured template is used: the template in the model's files is usually a leftover of the chat
    model that it was trained from.

    Raises:
        InvalidRequestError: the model has several classes, or an input has media.
    """
    facts = require_pooling(pooler.config)
    if facts.num_labels != 1:
        raise InvalidRequestError(
            f"{pooler.config.served_model_names[0]} has {facts.num_labels} classes; a model that scores has one: use "
            "classify",
            "model",
        )
    texts, others = ([one if isinstance(one, str) else one.as_text() for one in side] for side in (first, second))
    texts = texts * len(others) if len(texts) == 1 else texts
    if chat_template is None:
        if variables:
            raise InvalidRequestError(
                "chat_template_kwargs and instruction need a score template: start the engine with --chat-template",
                "chat_template_kwargs",
            )
        return [TextPair(one, other, max_tokens) for one, other in zip(texts, others, strict=True)]
    variables = {"add_generation_prompt": False, **(variables or {})}
    if reserved := variables.keys() & RESERVED_VARIABLES:
        raise InvalidRequestError(f"chat_template_kwargs must not hold {min(reserved)!r}", "chat_template_kwargs")
    template = ChatTemplate.for_model(chat_template, pooler.tokenizer, "string")

    def render(one: str, other: str) -> str:
        messages: list[Message] = [{"role": "query", "content": one}, {"role": "document", "content": other}]
        return template.render(messages, **variables)

    return [TextPair(one, other, max_tokens, render) for one, other in zip(texts, others, strict=True)]


def _cosine(one: "ndarray", other: "ndarray") -> float:
    import numpy

    first, second = one.astype("f8"), other.astype("f8")
    length = float(numpy.sqrt(first @ first) * numpy.sqrt(second @ second))
    return float(first @ second) / length if length else 0.0


def _max_similarity(one: "ndarray", other: "ndarray") -> float:
    return float((one @ other.T).max(axis=1).sum())


def _output(value: float, *results: PooledResult) -> ScoringRequestOutput:
    return ScoringRequestOutput(
        results[0].request_id,
        ScoringOutput(value),
        [token_id for result in results for token_id in result.token_ids],
        sum(result.num_cached_tokens for result in results),
    )
