"""One row per sampling parameter: its bounds, default and stage, and what the engine needs to apply it.

`SamplingParams` and the core check values against these rows. The HTTP schemas and docs/sampling-parameters.md are
generated from them. docs/sampling.md describes how to add a parameter. Contains no values of requests.
"""

import sys
from collections.abc import Collection

from octavo.protocol.sampling_parameter import Kind, Parameter, Stage
from octavo.protocol.speech_rules import SpeechRules

MAX_N = 16384
MAX_TOKEN_IDS = 2**18
"""Longest list of token ids other than a prompt. No vocabulary is larger."""
MAX_LOGPROB_TOKEN_IDS = 128
MAX_STREAM_INTERVAL = 2**31 - 1

_LARGEST = sys.float_info.max


def _as_listed(token_ids: Collection[int]) -> Collection[int]:
    return token_ids


def _biased(bias: Collection[tuple[int, float]]) -> Collection[int]:
    return [token_id for token_id, _ in bias]


def _flattened(words: Collection[Collection[int]]) -> Collection[int]:
    # An empty word is as invalid as a token that does not exist.
    return [token_id for word in words for token_id in word or (-1,)]


def _joined(rows: Collection[Collection[int]]) -> Collection[int]:
    return [token_id for row in rows for token_id in row] or (0,)


def _named_by(rules: SpeechRules) -> Collection[int]:
    return rules.token_ids


_COUNT_COLUMNS = ("has_penalties_S", "penalties_S3", "seen_ids_SL", "output_counts_SL", "num_seen_S")
"""Penalties need each token that a request has seen, and how often it was output."""

ROWS: tuple[Parameter, ...] = (
    Parameter(
        name="n",
        kind=Kind.INTEGER,
        stage=Stage.REQUEST,
        default=1,
        minimum=1,
        maximum=MAX_N,
        is_request_field=True,
        meaning="sequences to return; sequence i draws with a seed made of (`seed`, i), the first with `seed` itself",
    ),
    Parameter(
        name="best_of",
        kind=Kind.INTEGER,
        stage=Stage.REQUEST,
        minimum=1,
        maximum=MAX_N,
        meaning="generate this many sequences and return the `n` with the highest cumulative logprob, best first",
    ),
    Parameter(
        name="temperature",
        kind=Kind.NUMBER,
        stage=Stage.DRAW,
        default=1.0,
        minimum=0.0,
        engine_range=(0.0, _LARGEST),
        is_request_field=True,
        columns=("temperature_S",),
        meaning="0 takes the most likely token",
    ),
    Parameter(
        name="top_p",
        kind=Kind.NUMBER,
        stage=Stage.FILTER,
        default=1.0,
        minimum=0.0,
        maximum=1.0,
        is_minimum_excluded=True,
        engine_range=(0.0, 1.0),
        is_copied=True,
        is_request_field=True,
        columns=("top_p_S",),
        meaning="keep the shortest list of most likely tokens with this probability; 1 keeps all",
    ),
    Parameter(
        name="top_k",
        kind=Kind.INTEGER,
        stage=Stage.FILTER,
        default=0,
        minimum=-1,
        engine_range=(0, 2**63 - 1),
        is_copied=True,
        is_request_field=True,
        columns=("top_k_S",),
        meaning="keep this many most likely tokens; 0 and -1 keep all",
    ),
    Parameter(
        name="min_p",
        kind=Kind.NUMBER,
        stage=Stage.FILTER,
        default=0.0,
        minimum=0.0,
        maximum=1.0,
        engine_range=(0.0, 1.0),
        is_copied=True,
        is_request_field=True,
        columns=("log_min_p_S",),
        meaning="keep tokens with at least this share of the largest probability; 0 keeps all",
    ),
    Parameter(
        name="presence_penalty",
        kind=Kind.NUMBER,
        stage=Stage.LOGITS,
        default=0.0,
        minimum=-2.0,
        maximum=2.0,
        engine_range=(-_LARGEST, _LARGEST),
        is_copied=True,
        is_request_field=True,
        columns=_COUNT_COLUMNS,
        meaning="subtracted from the logits of tokens that were output",
    ),
    Parameter(
        name="frequency_penalty",
        kind=Kind.NUMBER,
        stage=Stage.LOGITS,
        default=0.0,
        minimum=-2.0,
        maximum=2.0,
        engine_range=(-_LARGEST, _LARGEST),
        is_copied=True,
        is_request_field=True,
        columns=_COUNT_COLUMNS,
        meaning="subtracted from a token's logit once for each time it was output",
    ),
    Parameter(
        name="repetition_penalty",
        kind=Kind.NUMBER,
        stage=Stage.LOGITS,
        default=1.0,
        minimum=0.0,
        is_minimum_excluded=True,
        engine_range=(sys.float_info.min, _LARGEST),
        is_copied=True,
        is_request_field=True,
        columns=_COUNT_COLUMNS,
        meaning="divides positive logits and multiplies negative ones of tokens in the prompt or the output",
    ),
    Parameter(
        name="seed",
        kind=Kind.INTEGER,
        stage=Stage.DRAW,
        minimum=-(2**63),
        maximum=2**64 - 1,
        engine_range=(0, 2**64 - 1),
        is_request_field=True,
        columns=("seed_S",),
        meaning="of the noise; by default a new one for each request",
    ),
    Parameter(
        name="stop",
        kind=Kind.TEXTS,
        stage=Stage.STOP,
        is_request_field=True,
        meaning="texts that end the sequence. One is found across tokens, and no part of one is ever shown",
    ),
    Parameter(
        name="stop_token_ids",
        kind=Kind.TOKEN_IDS,
        stage=Stage.STOP,
        max_entries=MAX_TOKEN_IDS,
        token_ids=_as_listed,
        is_request_field=True,
        columns=("withheld_ids_SE", "num_withheld_S"),
        meaning="tokens that end the sequence",
    ),
    Parameter(
        name="include_stop_str_in_output",
        kind=Kind.SWITCH,
        stage=Stage.REQUEST,
        default=False,
        is_request_field=True,
        meaning="show what ended the sequence",
    ),
    Parameter(
        name="ignore_eos",
        kind=Kind.SWITCH,
        stage=Stage.STOP,
        default=False,
        is_request_field=True,
        meaning="go on after an end-of-sequence token",
    ),
    Parameter(
        name="max_tokens",
        kind=Kind.INTEGER,
        stage=Stage.STOP,
        default=16,
        is_optional=True,
        minimum=1,
        meaning="longest output; null: as long as the context has room",
    ),
    Parameter(
        name="min_tokens",
        kind=Kind.INTEGER,
        stage=Stage.LOGITS,
        default=0,
        minimum=0,
        engine_range=(0, 2**63 - 1),
        is_request_field=True,
        columns=("min_tokens_S",),
        meaning="no end-of-sequence token, stop token or stop string before this many tokens",
    ),
    Parameter(
        name="logprobs",
        kind=Kind.INTEGER,
        stage=Stage.REPORT,
        minimum=-1,
        columns=("report_S", "num_top_S"),
        meaning="alternatives reported beside each token; 0: the token alone, -1: the whole vocabulary",
    ),
    Parameter(
        name="prompt_logprobs",
        kind=Kind.INTEGER,
        stage=Stage.REPORT,
        minimum=-1,
        meaning="the same for each token of the prompt",
    ),
    Parameter(
        name="prompt_logprob_token_ids",
        kind=Kind.OBJECT,
        stage=Stage.REPORT,
        token_ids=_joined,
        meaning="rows of tokens whose logprobs are reported for each position of the prompt; -1 pads a row",
    ),
    Parameter(
        name="prompt_logprob_start",
        kind=Kind.INTEGER,
        stage=Stage.REPORT,
        minimum=0,
        engine_range=(0, 2**31 - 1),
        meaning="the first row of `prompt_logprob_token_ids` is for the prompt token after this position",
    ),
    Parameter(
        name="logprob_token_ids",
        kind=Kind.TOKEN_IDS,
        stage=Stage.REPORT,
        max_entries=MAX_TOKEN_IDS,
        token_ids=_as_listed,
        is_request_field=True,
        meaning=f"at most {MAX_LOGPROB_TOKEN_IDS} tokens that are reported in place of the most likely ones",
    ),
    Parameter(
        name="logit_bias",
        kind=Kind.OBJECT,
        stage=Stage.LOGITS,
        max_entries=MAX_TOKEN_IDS,
        token_ids=_biased,
        is_request_field=True,
        columns=("bias_ids_SB", "bias_values_SB", "num_biases_S"),
        meaning="numbers by token id that are added to the logits, clamped to ±100",
    ),
    Parameter(
        name="allowed_token_ids",
        kind=Kind.TOKEN_IDS,
        stage=Stage.LOGITS,
        max_entries=MAX_TOKEN_IDS,
        token_ids=_as_listed,
        is_request_field=True,
        columns=("has_mask_S", "allowed_SW"),
        meaning="no other token is generated",
    ),
    Parameter(
        name="bad_words",
        kind=Kind.TEXTS,
        stage=Stage.LOGITS,
        token_ids=_flattened,
        is_request_field=True,
        columns=("bad_ids_SX", "num_bad_S"),
        meaning="the tokens that the tokenizer makes of a word, at the start of a text and after a space, are not "
        "generated in a row. Other tokens that spell the same text are still possible, as in other engines",
    ),
    Parameter(
        name="extra_args",
        kind=Kind.OBJECT,
        stage=Stage.LOGITS,
        meaning="arguments of the engine's [logits processors](logits-processors.md); `vllm_xargs` over HTTP",
    ),
    Parameter(
        name="speech_rules",
        kind=Kind.OBJECT,
        stage=Stage.LOGITS,
        token_ids=_named_by,
        meaning='`"text"` or `"timestamps"`: the rules of a [model that transcribes speech](multimodal.md#audio)',
    ),
    Parameter(
        name="structured_outputs",
        kind=Kind.OBJECT,
        stage=Stage.LOGITS,
        columns=("has_mask_S", "allowed_SW"),
        meaning="the form that the output must have, see [structured output](structured-output.md)",
    ),
    Parameter(
        name="repetition_detection",
        kind=Kind.OBJECT,
        stage=Stage.STOP,
        is_request_field=True,
        meaning="ends an output that repeats itself",
    ),
    Parameter(
        name="detokenize",
        kind=Kind.SWITCH,
        stage=Stage.REQUEST,
        default=True,
        meaning="turn tokens into text",
    ),
    Parameter(
        name="skip_special_tokens",
        kind=Kind.SWITCH,
        stage=Stage.REQUEST,
        default=True,
        is_request_field=True,
        meaning="leave special tokens out of the text",
    ),
    Parameter(
        name="spaces_between_special_tokens",
        kind=Kind.SWITCH,
        stage=Stage.REQUEST,
        default=True,
        is_request_field=True,
        meaning="put spaces between special tokens",
    ),
    Parameter(
        name="output_kind",
        kind=Kind.OBJECT,
        stage=Stage.REQUEST,
        meaning="what each yielded output holds: all so far, what is new, or the whole at the end",
    ),
    Parameter(
        name="stream_interval",
        kind=Kind.INTEGER,
        stage=Stage.REQUEST,
        minimum=1,
        maximum=MAX_STREAM_INTERVAL,
        is_request_field=True,
        meaning="tokens that a stream sends together, after the first; by default `--stream-interval`",
    ),
    Parameter(
        name="speculation",
        kind=Kind.OBJECT,
        stage=Stage.REQUEST,
        is_request_field=True,
        meaning='`"off"`, or the most tokens that are [drafted](speculative-decoding.md) at a time',
    ),
    Parameter(
        name="skip_reading_prefix_cache",
        kind=Kind.SWITCH,
        stage=Stage.REQUEST,
        meaning="compute the whole prompt; by default on with `prompt_logprobs`, since cached positions have no logits",
    ),
)

PARAMETERS: dict[str, Parameter] = {row.name: row for row in ROWS}

FILTERS = tuple(row for row in ROWS if row.stage is Stage.FILTER)
PENALTIES = tuple(row for row in ROWS if "output_counts_SL" in row.columns)
"""Parameters for which the tokens of a request are counted."""
