"""What a caller asks of generation (`SamplingParams`) and what the engine is told (`SamplingSpec`)."""

import sys
from collections.abc import Collection
from enum import IntEnum
from typing import Any, Literal, TypeAlias

import msgspec

from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.repetition import RepetitionDetectionParams, RepetitionSpec
from octavo.protocol.structured import StructuredOutputsParams

GREEDY_TEMPERATURE = 1e-5
"""A temperature below this means greedy decoding."""

MIN_TEMPERATURE = 1e-2
"""Temperatures between greedy and this are raised to it: dividing by less overflows float32."""

MAX_N = 16384
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 8192
"""Of all stop strings of a request together: what looks for them takes memory for each character."""
MAX_BAD_WORDS = 1024
MAX_BAD_WORDS_CHARS = 32768
"""Of all bad words of a request together: they are tokenized at once."""
MAX_TOKEN_IDS = 2**18
"""In a list of token ids other than a prompt; vocabularies are smaller."""
MAX_LOGPROB_TOKEN_IDS = 128
MAX_BEAM_WIDTH = 256
MAX_STREAM_INTERVAL = 2**31 - 1

MAX_LENGTH_PENALTY = 50.0
"""Of either sign: the length of a million tokens to this power is still a float."""

LogprobsMode: TypeAlias = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
"""What is reported as a token's logprob: its log-probability or its logit, raw as the model gives it or processed by
bias, penalties, temperature and filters. Prompt tokens are never processed."""


class OutputKind(IntEnum):
    """What each yielded output holds."""

    CUMULATIVE = 0
    """Everything generated so far."""
    DELTA = 1
    """Only what is new since the last output."""
    FINAL_ONLY = 2
    """One output, when the request has finished."""


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How to generate, with the field names and meanings of vLLM's `SamplingParams`.

    Raises:
        InvalidRequestError: a field is out of range; `param` names it.
    """

    n: int = 1
    """Sequences to return for each prompt."""
    best_of: int | None = None
    """Sequences to generate for each prompt, of which the `n` with the highest cumulative logprob are returned, best
    first. None: `n`."""
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: all tokens."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and output tokens; the other two penalties are over output tokens."""
    seed: int | None = None
    """None: the frontend draws one."""
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """None: as many as `max_model_len` leaves room for."""
    min_tokens: int = 0
    logprobs: int | None = None
    """Top alternatives per generated token; 0 gives the sampled token's alone, -1 the whole vocabulary."""
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    """Tokens whose logprobs are told beside each generated one's, in this order, in place of the most likely ones."""
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    """Nothing else is generated, whatever the biases are. None: everything is allowed."""
    bad_words: list[str] | str | None = None
    """Words that are not generated: neither the tokens that the tokenizer makes of one, nor those that it makes of a
    space and the word. Other tokens that make the same text are not ruled out."""
    structured_outputs: StructuredOutputsParams | None = None
    """The form that the output must have."""
    repetition_detection: RepetitionDetectionParams | None = None
    """Ends an output that repeats itself."""
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    output_kind: OutputKind | None = None
    """None: DELTA from `AsyncClient`, FINAL_ONLY from `LLM`."""
    stream_interval: int | None = None
    """Tokens that a stream sends together, after the first. None: the engine's `--stream-interval`."""
    skip_reading_prefix_cache: bool | None = None
    """None: True exactly when `prompt_logprobs` is asked for (cached positions have no logits)."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        if isinstance(self.bad_words, str):
            self.bad_words = [self.bad_words]
        if self.top_k == -1:
            self.top_k = 0
        self.verify()

    @property
    def num_sequences(self) -> int:
        """How many sequences are generated for each prompt."""
        return self.best_of or self.n

    @property
    def shows_logprobs(self) -> bool:
        """True when outputs have logprobs."""
        return self.logprobs is not None or bool(self.logprob_token_ids)

    @property
    def is_greedy(self) -> bool:
        """True when the most likely token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE

    def verify(self) -> None:
        """Check every field that can be checked without a model.

        Raises:
            InvalidRequestError: naming the first field that is out of range.
        """
        _check_int("n", self.n, 1, MAX_N)
        if self.best_of is not None:
            _check_int("best_of", self.best_of, self.n, MAX_N)
        _check_number("temperature", self.temperature, 0.0, None)
        _check_number("top_p", self.top_p, 0.0, 1.0, is_open_below=True)
        # -1 has become 0; that both mean all is worth telling.
        _check_int("top_k", self.top_k, -1, None)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_number("repetition_penalty", self.repetition_penalty, 0.0, None, is_open_below=True)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, None)
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                _check_int(name, value, -1, None)
        self._verify_stops()
        self._verify_stream()
        if self.structured_outputs is not None:
            if not isinstance(self.structured_outputs, StructuredOutputsParams):
                raise InvalidRequestError("structured_outputs must be StructuredOutputsParams", "structured_outputs")
            self.structured_outputs.verify()
        if self.repetition_detection is not None:
            if not isinstance(self.repetition_detection, RepetitionDetectionParams):
                message = "repetition_detection must be RepetitionDetectionParams"
                raise InvalidRequestError(message, "repetition_detection")
            self.repetition_detection.spec()
        self._verify_token_ids()
        self._verify_words()
        for name in ("n", "best_of"):
            if (getattr(self, name) or 1) > 1 and self.is_greedy:
                raise InvalidRequestError(f"{name} must be 1 when temperature is 0 (greedy): all would be equal", name)

    def _verify_token_ids(self) -> None:
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids", "logprob_token_ids"):
            if (count := len(getattr(self, name) or ())) > MAX_TOKEN_IDS:
                raise InvalidRequestError(f"{name} may hold at most {MAX_TOKEN_IDS} tokens, got {count}", name)
            _check_token_ids(name, getattr(self, name) or ())
        for bias in (self.logit_bias or {}).values():
            _check_number("logit_bias", bias, None, None)
        self._verify_logprob_token_ids()
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequestError(
                "allowed_token_ids must not be empty: name a token or leave it out", "allowed_token_ids"
            )

    def _verify_logprob_token_ids(self) -> None:
        name, count = "logprob_token_ids", len(self.logprob_token_ids or ())
        if count > MAX_LOGPROB_TOKEN_IDS:
            raise InvalidRequestError(f"{name} may hold at most {MAX_LOGPROB_TOKEN_IDS} tokens, got {count}", name)
        if count and self.logprobs not in (None, count):
            raise InvalidRequestError(
                f"{name} says which {count} tokens are told, and logprobs {self.logprobs} how many: leave logprobs out",
                name,
            )

    def _verify_words(self) -> None:
        words = self.bad_words or []
        if len(words) > MAX_BAD_WORDS:
            raise InvalidRequestError(f"at most {MAX_BAD_WORDS} bad_words, got {len(words)}", "bad_words")
        if not all(isinstance(word, str) and word.strip() for word in words):
            raise InvalidRequestError("bad_words must be strings with more than spaces in them", "bad_words")
        if (num_chars := sum(map(len, words))) > MAX_BAD_WORDS_CHARS:
            raise InvalidRequestError(
                f"bad_words may have {MAX_BAD_WORDS_CHARS} characters in all, got {num_chars}", "bad_words"
            )

    def _verify_stream(self) -> None:
        if self.output_kind is not None and not isinstance(self.output_kind, OutputKind):
            raise InvalidRequestError(f"output_kind must be an OutputKind, got {self.output_kind!r}", "output_kind")
        if self.stream_interval is not None:
            _check_int("stream_interval", self.stream_interval, 1, MAX_STREAM_INTERVAL)

    def _verify_stops(self) -> None:
        stops = self.stop or []
        if len(stops) > MAX_STOP_STRINGS:
            raise InvalidRequestError(f"at most {MAX_STOP_STRINGS} stop strings, got {len(stops)}", "stop")
        if not all(isinstance(text, str) and text for text in stops):
            raise InvalidRequestError("stop strings must be non-empty strings", "stop")
        if (num_chars := sum(map(len, stops))) > MAX_STOP_CHARS:
            raise InvalidRequestError(
                f"stop strings may have {MAX_STOP_CHARS} characters in all, got {num_chars}", "stop"
            )
        if stops and not self.detokenize:
            raise InvalidRequestError("stop strings need detokenize=True", "stop")

    @property
    def num_token_ids(self) -> int:
        """Token ids in all lists of these parameters, which go to the engine with every sequence."""
        lists = (self.logit_bias, self.allowed_token_ids, self.stop_token_ids, self.logprob_token_ids)
        return sum([len(token_ids) for token_ids in lists if token_ids])

    def clone(self, **changes: Any) -> "SamplingParams":
        """Return a copy with `changes` applied (and verified again)."""
        return msgspec.structs.replace(self, **changes)


class BeamSearchParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How to search for likely sequences, with vLLM's names of fields and the meanings of transformers' beam search.

    Raises:
        InvalidRequestError: a field is out of range; `param` names it.
    """

    beam_width: int
    """Sequences that are followed at a time, and returned at the end."""
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    """Of the probabilities that sequences are scored by; 0 and 1: the model's own."""
    length_penalty: float = 1.0
    """A sequence's score is its logprob over its length to this power: positive ones favour long sequences."""
    early_stopping: bool | Literal["never"] = False
    """True: end as soon as `beam_width` sequences have. False: end when the best open sequence scores no better, at the
    length it has, than the worst that has ended. "never": end when it cannot come to score better."""
    include_stop_str_in_output: bool = False
    """Whether the text shows the token that ended it."""
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self.verify()

    def verify(self) -> None:
        """Check every field that can be checked without a model.

        Raises:
            InvalidRequestError: naming the first field that is out of range.
        """
        _check_int("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        _check_int("max_tokens", self.max_tokens, 1, None)
        _check_number("temperature", self.temperature, 0.0, None)
        _check_number("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        if self.early_stopping not in (True, False, "never"):
            raise InvalidRequestError(
                f'early_stopping must be true, false or "never", got {self.early_stopping!r}', "early_stopping"
            )


class SamplingSpec(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """What core and workers need to know to sample one sequence; nothing is left open.

    Made by the frontend from `SamplingParams`, the model's defaults and its tokenizer.
    """

    max_tokens: int
    seed: int
    """Unsigned 64-bit: noise is a function of (seed, position, token id)."""
    temperature: float = 0.0
    """0.0 exactly means greedy."""
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end the request with no `stop_reason`; empty under `ignore_eos`."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the request and become its `stop_reason`."""
    logprobs: int | None = None
    """Number of top alternatives, already resolved: never -1."""
    prompt_logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    skip_reading_prefix_cache: bool = False
    allowed_token_ids: tuple[int, ...] = ()
    """Empty: every token is allowed."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens whose last is not generated where the others have just been."""
    logprobs_mode: LogprobsMode = "raw_logprobs"
    repetition: RepetitionSpec | None = None
    """Patterns at the end of the output that end the request; None: it may repeat itself."""
    logprob_token_ids: tuple[int, ...] = ()
    """The tokens that are told beside each generated one, whose `logprobs` are then 0; empty: the most likely."""


def _check_int(name: str, value: object, low: int | None, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be an integer, got {value!r}", name)
    _check_range(name, value, low, high, is_open_below=False)


def _check_token_ids(name: str, token_ids: Collection[int]) -> None:
    # perf: with a call for each of a hundred thousand, one request would hold up all others.
    if token_ids and not (set(map(type, token_ids)) == {int} and min(token_ids) >= 0):
        for token_id in token_ids:
            _check_int(name, token_id, 0, None)


def _check_number(
    name: str, value: object, low: float | None, high: float | None, *, is_open_below: bool = False
) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise InvalidRequestError(f"{name} must be a number, got {value!r}", name)
    if abs(value) > sys.float_info.max:
        raise InvalidRequestError(f"{name} must be finite, got {value!r}", name)
    _check_range(name, value, low, high, is_open_below=is_open_below)


def _check_range(name: str, value: float, low: float | None, high: float | None, *, is_open_below: bool) -> None:
    if low is not None and (value < low or (is_open_below and value == low)):
        raise InvalidRequestError(f"{name} must be {'above' if is_open_below else 'at least'} {low}, got {value}", name)
    if high is not None and value > high:
        raise InvalidRequestError(f"{name} must be at most {high}, got {value}", name)
