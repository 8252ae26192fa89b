"""Turns the caller's `SamplingParams` into the engine's `SamplingSpec`."""

import hashlib
import logging
from typing import Any

import msgspec

from octavo.frontend.audio.rules import speech_rules
from octavo.frontend.generation.limits import check_token_ids, room_after_prompt
from octavo.frontend.generation.prompt_scores import named_rows
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.kv_transfer import PARAMS
from octavo.protocol.params import (
    GREEDY_TEMPERATURE,
    MIN_TEMPERATURE,
    BeamSearchParams,
    LogprobsMode,
    OutputKind,
    SamplingParams,
    SamplingSpec,
)
from octavo.protocol.sampling_parameter import Kind, Stage
from octavo.protocol.sampling_table import ROWS

logger = logging.getLogger(__name__)

_MASK_64 = 2**64 - 1


MAX_LOGIT_BIAS = 100.0
"""Biases are clamped to plus or minus this value, as in OpenAI's API."""


def default_params(config: ResolvedConfig, max_tokens: int | None) -> SamplingParams:
    """Return the model's default parameters (`generation_config.json`), for callers that pass none."""
    defaults = {name: value for name, value in config.model.generation_defaults.items() if name != "max_tokens"}
    return SamplingParams(**defaults, max_tokens=config.model.generation_defaults.get("max_tokens", max_tokens))


def request_seed(engine_seed: int, request_id: str) -> int:
    """Return the seed of a request without one, in the range 0 to 2^64 - 1.

    The seed is a function of the engine's seed and the request's id. So an offline run, whose ids count from 0, is
    reproducible.
    """
    digest = hashlib.blake2b(f"{engine_seed}:{request_id}".encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def child_seed(seed: int, index: int) -> int:
    """Return the seed of the `index`-th sequence of a request; the first sequence has the request's own seed."""
    if index == 0:
        return seed & _MASK_64
    digest = hashlib.blake2b(f"{seed & _MASK_64}#{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def make_spec(
    params: SamplingParams,
    *,
    num_prompt_tokens: int,
    max_model_len: int,
    seed: int,
    config: ResolvedConfig,
    tokenizer: Tokenizer,
) -> SamplingSpec:
    """Resolve everything that a request leaves open.

    Args:
        params: the caller's parameters, already verified.
        num_prompt_tokens: length of the prompt.
        max_model_len: the engine's maximum context length.
        seed: the seed of this sequence.
        config: the configuration of the engine, for the vocabulary, the stop tokens and the limits.
        tokenizer: the tokenizer of the model, for parameters that contain text.

    Raises:
        InvalidRequestError: a field does not fit this model; `param` names it.
        PromptTooLongError: there is no room for a single new token.
    """
    _check_engine(params, config, tokenizer)
    room = room_after_prompt(params.max_tokens, num_prompt_tokens, max_model_len)
    vocab_size = config.model.vocab_size
    logprobs, logprobs_mode = _logprobs(params, config)
    max_tokens = params.max_tokens or room
    named = _named(params, num_prompt_tokens, config)
    reported = 0 if named and params.prompt_logprobs is None else params.prompt_logprobs
    spec = SamplingSpec(
        **_copied_numbers(params, vocab_size),
        max_tokens=max_tokens,
        seed=seed,
        temperature=_temperature(params),
        min_tokens=min(params.min_tokens, max_tokens),
        eos_token_ids=() if params.ignore_eos else tuple(config.model.eos_token_ids),
        stop_token_ids=tuple(params.stop_token_ids or ()),
        logprobs=logprobs,
        prompt_logprobs=_num_logprobs("prompt_logprobs", reported, config),
        prompt_logprob_token_ids=named,
        prompt_logprob_start=params.prompt_logprob_start or 0,
        logit_bias=tuple(
            (token_id, float(max(-MAX_LOGIT_BIAS, min(MAX_LOGIT_BIAS, bias))))
            for token_id, bias in sorted((params.logit_bias or {}).items())
        ),
        skip_reading_prefix_cache=(
            reported is not None if params.skip_reading_prefix_cache is None else params.skip_reading_prefix_cache
        ),
        allowed_token_ids=tuple(sorted(set(params.allowed_token_ids or ()))),
        bad_words=_bad_words(params, tokenizer, vocab_size),
        logprobs_mode=logprobs_mode,
        repetition=None if params.repetition_detection is None else params.repetition_detection.spec(),
        logprob_token_ids=tuple(params.logprob_token_ids or ()),
        extra_args=_processor_args(params) or None,
        speculation=0 if params.speculation == "off" else params.speculation,
        speech_rules=None if params.speech_rules is None else speech_rules(params, config),
    )
    _check_allowed_tokens(spec)
    return spec


def _named(params: SamplingParams, num_prompt_tokens: int, config: ResolvedConfig) -> tuple[tuple[int, ...], ...]:
    rows = named_rows(params, num_prompt_tokens, config.max_logprobs)
    for row in rows:
        check_token_ids("prompt_logprob_token_ids", row, config.model.vocab_size)
    return rows


def _processor_args(params: SamplingParams) -> dict[str, Any]:
    """Return the extra arguments for logits processors."""
    return {name: value for name, value in (params.extra_args or {}).items() if name != PARAMS}


def _check_engine(params: SamplingParams, config: ResolvedConfig, tokenizer: Tokenizer) -> None:
    """Reject token ids outside the vocabulary, and parameters that need another engine configuration."""
    _check_texts(params, tokenizer)
    if _processor_args(params) and not config.logits_processors:
        raise InvalidRequestError(
            "extra_args are for logits processors, and this engine has none: start it with --logits-processors, "
            "or leave them out",
            "extra_args",
        )
    if params.speculation not in (None, "off", 0) and config.speculation is None:
        raise InvalidRequestError(
            "speculation: this engine drafts no tokens: start it with --speculative-config, or leave it out",
            "speculation",
        )
    vocab_size = config.model.vocab_size
    check_token_ids("logit_bias", params.logit_bias or {}, vocab_size)
    check_token_ids("stop_token_ids", params.stop_token_ids or [], vocab_size)
    check_token_ids("allowed_token_ids", params.allowed_token_ids or [], vocab_size)
    check_token_ids("logprob_token_ids", params.logprob_token_ids or [], vocab_size)


def _check_texts(params: SamplingParams, tokenizer: Tokenizer) -> None:
    """Reject parameters that contain text if there is no tokenizer."""
    for name in ("stop", "bad_words"):
        if getattr(params, name):
            tokenizer.require(name)
    if params.structured_outputs is not None:
        tokenizer.require(params.structured_outputs.param or "structured_outputs")


def make_beam_spec(
    params: BeamSearchParams,
    *,
    num_candidates: int,
    num_logprobs: int | None,
    num_prompt_tokens: int,
    max_model_len: int,
    config: ResolvedConfig,
    tokenizer: Tokenizer,
) -> SamplingSpec:
    """Return the spec for the children of a beam search: generate one token and report the likely ones.

    Args:
        params: the caller's parameters, already verified.
        num_candidates: number of likely tokens that the search needs.
        num_logprobs: number of alternatives to show per token, as in `SamplingParams.logprobs`.
        num_prompt_tokens: length of the prompt.
        max_model_len: the engine's maximum context length.
        config: the configuration of the engine.
        tokenizer: the tokenizer of the model.

    Raises:
        InvalidRequestError: a field does not fit this model; `param` names it.
        PromptTooLongError: there is no room for `max_tokens`.
    """
    child_params = SamplingParams(temperature=0.0, max_tokens=params.max_tokens, logprobs=num_logprobs)
    spec = make_spec(
        child_params,
        num_prompt_tokens=num_prompt_tokens,
        max_model_len=max_model_len,
        seed=0,
        config=config,
        tokenizer=tokenizer,
    )
    is_plain = params.temperature < GREEDY_TEMPERATURE or params.temperature == 1.0
    return msgspec.structs.replace(
        spec,
        max_tokens=1,
        temperature=0.0 if is_plain else max(float(params.temperature), MIN_TEMPERATURE),
        eos_token_ids=(),
        logprobs=min(max(num_candidates, spec.logprobs or 0), config.model.vocab_size),
        logprobs_mode="raw_logprobs" if is_plain else "processed_logprobs",
    )


def output_kind(params: SamplingParams, default: OutputKind) -> OutputKind:
    """Return the kind of the outputs of a request.

    Raises:
        InvalidRequestError: deltas were requested for the best of several sequences, which are known only at the end.
    """
    if params.num_sequences == params.n:
        return default if params.output_kind is None else params.output_kind
    if params.output_kind not in (None, OutputKind.FINAL_ONLY):
        raise InvalidRequestError(
            f"best_of {params.best_of} with n {params.n} cannot be streamed: the best are known at the end", "best_of"
        )
    return OutputKind.FINAL_ONLY


def _copied_numbers(params: SamplingParams, vocab_size: int) -> dict[str, Any]:
    """Return the parameters that the engine gets unchanged. Greedy requests have no filters.

    They are converted to plain floats and small integers: a message can hold neither numpy numbers nor 2**70.
    """
    copied: dict[str, Any] = {}
    for row in ROWS:
        if row.is_copied:
            is_unused = params.is_greedy and row.stage is Stage.FILTER
            value = row.default if is_unused else getattr(params, row.name)
            copied[row.name] = min(value, vocab_size) if row.kind is Kind.INTEGER else float(value)
    return copied


def _temperature(params: SamplingParams) -> float:
    if params.is_greedy:
        return 0.0
    if params.temperature < MIN_TEMPERATURE:
        logger.warning("temperature %g is raised to %g", params.temperature, MIN_TEMPERATURE)
    return max(float(params.temperature), MIN_TEMPERATURE)


def _logprobs(params: SamplingParams, config: ResolvedConfig) -> tuple[int | None, LogprobsMode]:
    """Return how many logprobs the engine reports, and of which kind. Those that only rank `best_of` are raw."""
    requested = 0 if params.logprob_token_ids else params.logprobs
    count, mode = _num_logprobs("logprobs", requested, config), config.logprobs_mode
    if params.num_sequences == params.n:
        return count, mode
    if count is None:
        return 0, "raw_logprobs"
    if mode.endswith("logits"):
        raise InvalidRequestError(
            f"best_of ranks by logprobs, but this engine reports logits (--logprobs-mode {mode}): "
            "leave out logprobs or best_of",
            "best_of",
        )
    return count, mode


def _bad_words(params: SamplingParams, tokenizer: Tokenizer, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of each bad word, both at the start of a text and after a space."""
    if not params.bad_words:
        return ()
    words = [word.strip() for word in params.bad_words]
    found = tokenizer.encode_batch([text for word in words for text in (word, f" {word}")], add_special_tokens=False)
    return tuple(dict.fromkeys(tuple(ids) for ids in found if ids and max(ids) < vocab_size))


def _check_allowed_tokens(spec: SamplingSpec) -> None:
    """Reject a request if every allowed token is masked from the start.

    Raises:
        InvalidRequestError: no token is left.
    """
    if not spec.allowed_token_ids:
        return
    allowed = set(spec.allowed_token_ids)
    if allowed <= {word[0] for word in spec.bad_words if len(word) == 1}:
        raise InvalidRequestError("every token of allowed_token_ids is one of bad_words", "allowed_token_ids")
    if spec.min_tokens and allowed <= {*spec.eos_token_ids, *spec.stop_token_ids}:
        raise InvalidRequestError(
            "every token of allowed_token_ids ends the output, which min_tokens forbids", "allowed_token_ids"
        )


def _num_logprobs(param: str, requested: int | None, config: ResolvedConfig) -> int | None:
    if requested is None:
        return None
    count = config.model.vocab_size if requested == -1 else requested
    if config.max_logprobs != -1 and count > config.max_logprobs:
        raise InvalidRequestError(
            f"{param}: {requested} requested, at most {config.max_logprobs} allowed (--max-logprobs)", param
        )
    return min(count, config.model.vocab_size)
