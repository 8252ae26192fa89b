"""Parameters of a request: the caller's (`SamplingParams`) and the form sent to the engine (`SamplingSpec`)."""

from enum import IntEnum
from typing import Any, Literal, TypeAlias

import msgspec

from octavo.protocol.alignment import AlignmentSpec
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.pooling import PoolingTask, PoolingType
from octavo.protocol.repetition import RepetitionDetectionParams, RepetitionSpec
from octavo.protocol.sampling_parameter import check_integer, check_number, check_token_ids
from octavo.protocol.sampling_table import MAX_LOGPROB_TOKEN_IDS, ROWS
from octavo.protocol.speech_rules import SpeechMode, SpeechRules
from octavo.protocol.structured import StructuredOutputsParams

GREEDY_TEMPERATURE = 1e-5
"""A temperature below this means greedy decoding."""

MIN_TEMPERATURE = 1e-2
"""Lower temperatures that are not greedy are raised to this: dividing by less overflows float32."""

MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 8192
"""Limit for all stop strings of a request together: matching needs memory per character."""
MAX_BAD_WORDS = 1024
MAX_BAD_WORDS_CHARS = 32768
"""Limit for all bad words of a request together: they are tokenized in one go."""
MAX_EXTRA_ARGS_BYTES = 2**16
"""Limit for the encoded arguments. They are sent to the engine with every sequence."""
MAX_BEAM_WIDTH = 256
PADDING = -1
"""Fills up a row of `prompt_logprob_token_ids`."""
MAX_SPECULATION = 64
"""Most tokens drafted for one request in one step."""

MAX_LENGTH_PENALTY = 50.0
"""Largest absolute value: a million tokens to this power is still a finite float."""

LogprobsMode: TypeAlias = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
"""What is reported as a token's logprob: its log-probability or its logit, raw (from the model) or processed (after
biases, penalties, temperature and filters). Prompt tokens are always raw."""


class OutputKind(IntEnum):
    """Content of each yielded output."""

    CUMULATIVE = 0
    """Everything generated so far."""
    DELTA = 1
    """Only what is new since the last output."""
    FINAL_ONLY = 2
    """One output, when the request has finished."""


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How to sample, with the field names and meanings of vLLM's `SamplingParams`.

    Raises:
        InvalidRequestError: a field is out of range; `param` names it.
    """

    n: int = 1
    """Number of sequences to return per prompt."""
    best_of: int | None = None
    """Number of sequences to generate per prompt. The `n` with the highest cumulative logprob are returned, best first.
    None means `n`."""
    temperature: float = 1.0
    """0 means greedy decoding."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1 means all tokens."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and output tokens. The other two penalties are over output tokens."""
    seed: int | None = None
    """If None, the frontend draws a seed."""
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """If None, as many as `max_model_len` leaves room for."""
    min_tokens: int = 0
    logprobs: int | None = None
    """Number of top alternatives per generated token. 0 returns only the sampled token's logprob, -1 the complete
    vocabulary."""
    prompt_logprobs: int | None = None
    prompt_logprob_token_ids: list[list[int]] | None = None
    """Tokens whose logprobs are reported for each position of the prompt. Row i names candidates for prompt token
    `prompt_logprob_start` + i + 1; -1 pads a row."""
    prompt_logprob_start: int | None = None
    """None means 0."""
    logprob_token_ids: list[int] | None = None
    """Tokens whose logprobs are reported with each generated token, in this order, instead of the most likely ones."""
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    """Only these tokens are generated, regardless of biases. None allows all tokens."""
    bad_words: list[str] | str | None = None
    """Words that are not generated: neither the tokenization of the word, nor that of a space and the word. Other
    tokenizations of the same text remain possible."""
    structured_outputs: StructuredOutputsParams | None = None
    """Constraint on the output."""
    repetition_detection: RepetitionDetectionParams | None = None
    """Ends an output that repeats itself."""
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    output_kind: OutputKind | None = None
    """If None, DELTA for `AsyncClient` and FINAL_ONLY for `LLM`."""
    stream_interval: int | None = None
    """Number of tokens that a stream sends together, after the first token. None means the engine's
    `--stream-interval`."""
    speculation: Literal["off"] | int | None = None
    """Most tokens drafted at a time (speculative decoding). "off" or 0 disables drafting; None lets the engine choose.
    The output does not depend on it."""
    skip_reading_prefix_cache: bool | None = None
    """If None, True exactly if `prompt_logprobs` or `prompt_logprob_token_ids` is requested, because cached positions
    have no logits."""
    extra_args: dict[str, Any] | None = None
    """JSON arguments for the engine's logits processors. Rejected if the engine has none."""
    speech_rules: SpeechMode | None = None
    """Apply the rules of a speech-to-text model from its `generation_config.json`: suppressed tokens and, with
    "timestamps", the order of timestamps for a prompt without `<|notimestamps|>`. None applies no rules."""

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
        """Number of sequences generated per prompt."""
        return self.best_of or self.n

    @property
    def shows_logprobs(self) -> bool:
        """Whether outputs have logprobs."""
        return self.logprobs is not None or bool(self.logprob_token_ids)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature < GREEDY_TEMPERATURE

    def verify(self) -> None:
        """Check every field that can be checked without a model.

        Raises:
            InvalidRequestError: a field is out of range; names the first one.
        """
        for row, name, default in _CHECKED_ROWS:
            if (value := getattr(self, name)) is not default:
                row.check(value)
        if self.best_of is not None:
            check_integer("best_of", self.best_of, self.n, None)
        check_integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        self._verify_stops()
        self._verify_extra_args()
        if self.output_kind is not None and not isinstance(self.output_kind, OutputKind):
            raise InvalidRequestError(f"output_kind must be an OutputKind, got {self.output_kind!r}", "output_kind")
        if self.structured_outputs is not None:
            if not isinstance(self.structured_outputs, StructuredOutputsParams):
                raise InvalidRequestError("structured_outputs must be StructuredOutputsParams", "structured_outputs")
            self.structured_outputs.verify()
        if self.repetition_detection is not None:
            if not isinstance(self.repetition_detection, RepetitionDetectionParams):
                message = "repetition_detection must be RepetitionDetectionParams"
                raise InvalidRequestError(message, "repetition_detection")
            self.repetition_detection.spec()
        if self.speech_rules not in (None, "text", "timestamps"):
            message = f'speech_rules must be "text" or "timestamps", got {self.speech_rules!r}'
            raise InvalidRequestError(message, "speech_rules")
        self._verify_speculation()
        self._verify_token_ids()
        self._verify_words()
        for name in ("n", "best_of"):
            if (getattr(self, name) or 1) > 1 and self.is_greedy:
                raise InvalidRequestError(f"{name} must be 1 when temperature is 0 (greedy): all would be equal", name)

    def _verify_speculation(self) -> None:
        if self.speculation is None or self.speculation == "off":
            return
        if isinstance(self.speculation, str):
            message = f'speculation must be "off" or a number of tokens, got {self.speculation!r}'
            raise InvalidRequestError(message, "speculation")
        check_integer("speculation", self.speculation, 0, MAX_SPECULATION)

    def _verify_token_ids(self) -> None:
        for bias in (self.logit_bias or {}).values():
            check_number("logit_bias", bias, None, None)
        self._verify_logprob_token_ids()
        self._verify_prompt_logprob_token_ids()
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
                f"{name} selects {count} tokens, so logprobs {self.logprobs} contradicts it: leave logprobs out",
                name,
            )

    def _verify_prompt_logprob_token_ids(self) -> None:
        rows, start, name = self.prompt_logprob_token_ids, self.prompt_logprob_start, "prompt_logprob_token_ids"
        if rows is None:
            if start is not None:
                raise InvalidRequestError(f"prompt_logprob_start needs {name}", "prompt_logprob_start")
            return
        if start is not None:
            check_integer("prompt_logprob_start", start, 0, None)
        if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows) or not any(rows):
            raise InvalidRequestError(f"{name} must be a list of lists of token ids that name at least one", name)
        for row in rows:
            check_token_ids(name, [token_id for token_id in row if token_id != PADDING or type(token_id) is not int])

    def _verify_words(self) -> None:
        words = self.bad_words or []
        if len(words) > MAX_BAD_WORDS:
            raise InvalidRequestError(f"at most {MAX_BAD_WORDS} bad_words, got {len(words)}", "bad_words")
        if not all(isinstance(word, str) and word.strip() for word in words):
            raise InvalidRequestError("bad_words must be strings that are not blank", "bad_words")
        if (num_chars := sum(map(len, words))) > MAX_BAD_WORDS_CHARS:
            raise InvalidRequestError(
                f"bad_words may have {MAX_BAD_WORDS_CHARS} characters in all, got {num_chars}", "bad_words"
            )

    def _verify_extra_args(self) -> None:
        if self.extra_args is None:
            return
        if not isinstance(self.extra_args, dict) or not all(isinstance(name, str) for name in self.extra_args):
            raise InvalidRequestError("extra_args must be an object with string keys", "extra_args")
        try:
            size = len(msgspec.msgpack.encode(self.extra_args))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidRequestError(f"extra_args must hold JSON values only: {error}", "extra_args") from None
        if size > MAX_EXTRA_ARGS_BYTES:
            raise InvalidRequestError(
                f"extra_args may have {MAX_EXTRA_ARGS_BYTES} bytes in all, got {size}", "extra_args"
            )

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
        """Number of token ids in all lists of these parameters. All are sent to the engine with every sequence."""
        rows = self.prompt_logprob_token_ids or ()
        lists = (self.logit_bias, self.allowed_token_ids, self.stop_token_ids, self.logprob_token_ids, *rows)
        return sum([len(token_ids) for token_ids in lists if token_ids])

    def clone(self, **changes: Any) -> "SamplingParams":
        """Return a copy with `changes` applied, and verify it."""
        return msgspec.structs.replace(self, **changes)


_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}
_CHECKED_ROWS = [(row, row.name, _DEFAULTS[row.name]) for row in ROWS]
"""perf: most fields of most requests are the default objects of the class, which need no check."""


class BeamSearchParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Parameters of a beam search, with vLLM's field names and the semantics of transformers' beam search.

    Raises:
        InvalidRequestError: a field is out of range; `param` names it.
    """

    beam_width: int
    """Number of beams, and of returned sequences."""
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    """Temperature of the probabilities that score sequences. 0 and 1 leave them unchanged."""
    length_penalty: float = 1.0
    """A sequence's score is its logprob divided by length ** length_penalty. Positive values favor long sequences."""
    early_stopping: bool | Literal["never"] = False
    """True: stop when `beam_width` sequences are finished. False: stop when the best open sequence, at its present
    length, scores no better than the worst finished one. "never": stop when it cannot become better."""
    include_stop_str_in_output: bool = False
    """Whether the text includes the token that ended it."""
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self.verify()

    def verify(self) -> None:
        """Check every field that can be checked without a model.

        Raises:
            InvalidRequestError: a field is out of range; names the first one.
        """
        check_integer("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        check_integer("max_tokens", self.max_tokens, 1, None)
        check_number("temperature", self.temperature, 0.0, None)
        check_number("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        if self.early_stopping not in (True, False, "never"):
            raise InvalidRequestError(
                f'early_stopping must be true, false or "never", got {self.early_stopping!r}', "early_stopping"
            )


class SamplingSpec(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="sampling"):
    """Everything that core and workers need to sample one sequence, completely resolved.

    The frontend creates it from `SamplingParams`, the model's defaults and its tokenizer.
    """

    max_tokens: int
    seed: int
    """Unsigned 64-bit. Noise is a function of (seed, position, token id)."""
    temperature: float = 0.0
    """Exactly 0.0 means greedy."""
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end the request without a `stop_reason`. Empty under `ignore_eos`."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the request and become its `stop_reason`."""
    logprobs: int | None = None
    """Number of top alternatives. Resolved, so never -1."""
    prompt_logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    skip_reading_prefix_cache: bool = False
    allowed_token_ids: tuple[int, ...] = ()
    """If empty, every token is allowed."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences. The last token of a sequence is not generated directly after the others."""
    logprobs_mode: LogprobsMode = "raw_logprobs"
    repetition: RepetitionSpec | None = None
    """Repeated patterns that end the request. None if repetition is not detected."""
    logprob_token_ids: tuple[int, ...] = ()
    """Tokens whose logprobs are reported with each generated token; `logprobs` is then 0. If empty, the most likely
    ones."""
    extra_args: dict[str, Any] | None = None
    """Arguments for logits processors."""
    speculation: int | None = None
    """Most tokens drafted at a time (speculative decoding); 0 for none. None if the engine chooses."""
    prompt_logprob_token_ids: tuple[tuple[int, ...], ...] = ()
    """Tokens whose logprobs follow those of `prompt_logprobs`, from prompt token `prompt_logprob_start` + 1 on."""
    prompt_logprob_start: int = 0
    speech_rules: SpeechRules | None = None
    """Rules of a speech-to-text model."""

    def named_at(self, position: int) -> tuple[int, ...]:
        """Return the tokens named for the prompt token at a position. Most requests name none."""
        row = position - 1 - self.prompt_logprob_start
        return self.prompt_logprob_token_ids[row] if 0 <= row < len(self.prompt_logprob_token_ids) else ()


class PoolingSpec(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="pooling"):
    """Everything that core and workers need to compute vectors or scores of a prompt instead of tokens.

    Completely resolved: nothing is left to the defaults of the model.
    """

    task: PoolingTask
    pooling: PoolingType = "last"
    use_activation: bool = True
    """Whether embeddings are normalized, and class scores go through the model's activation."""
    dimensions: int = 0
    """Number of leading values to keep of an embedding; 0 keeps all."""
    step_tag_id: int = -1
    """With `pooling` "step": results are returned at positions of this token; -1 for all positions."""
    returned_token_ids: tuple[int, ...] = ()
    """With `pooling` "step": the class scores to return. Empty for all."""
    segment_start: int = 0
    """Position at which the second text of a pair begins; 0 if there is only one text."""
    skip_reading_prefix_cache: bool = False
    """Always True if the result needs the hidden states of all tokens, because cached tokens have none."""


RequestParams: TypeAlias = SamplingSpec | PoolingSpec | AlignmentSpec
"""What a request computes. Each member of the union has its own tag. A new kind of request becomes a new member."""
