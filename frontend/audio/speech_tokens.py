"""`SpeechTokens`: the special tokens with which a request tells Whisper the language and the task."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from octavo.frontend.model_files.alignment import alignment_heads
from octavo.frontend.model_files.json_file import read_json
from octavo.protocol.alignment import MAX_FILTER_WIDTH, AlignmentSpec, is_filter_width
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.speech_rules import SpeechRules

_FILE = "generation_config.json"


@dataclass(frozen=True, slots=True)
class SpeechTokens:
    """Special tokens and rules of the decoder, from a checkpoint's `generation_config.json`."""

    start: int
    end: int
    no_timestamps: int
    previous: int | None
    """Token that begins the text of the caller's prompt. `None` if the checkpoint supports no prompt."""
    languages: dict[str, int]
    """Tokens by language code, such as "en". Empty if the model knows only English, and no tasks."""
    tasks: dict[str, int]
    suppressed: tuple[int, ...]
    """Tokens that are never drawn."""
    suppressed_first: tuple[int, ...] = ()
    """Tokens that are not drawn as the first token."""
    max_initial_timestamp: int | None = None
    """Latest allowed first timestamp, in steps of 0.02 seconds. `None`: no limit."""
    alignment_heads: tuple[tuple[int, int], ...] = ()
    """(layer, head) of the cross-attention heads that follow the audio. Empty if the checkpoint names none that
    exist."""
    filter_width: Any = 7
    """Width in rows of the median filter of their weights, unchecked; `alignment` checks it."""
    no_speech: int = 0
    """Token whose probability after `start` is the probability that the window has no speech."""

    @classmethod
    @lru_cache(maxsize=8)
    def of(cls, path: str) -> "SpeechTokens":
        """Read the tokens of the checkpoint in a directory.

        Raises:
            InvalidRequestError: the checkpoint does not say how it transcribes.
        """
        made: dict[str, Any] = read_json(Path(path) / _FILE)
        sizes = read_json(Path(path) / "config.json")
        found: dict[str, Any] = {
            key: made.get(key, sizes.get(key)) for key in ("decoder_start_token_id", "eos_token_id")
        }
        found["no_timestamps_token_id"] = made.get("no_timestamps_token_id")
        for key, value in found.items():
            if type(value) is not int:
                raise InvalidRequestError(f"the model's {_FILE} has no {key}: it cannot transcribe here", "model")
        is_multilingual = made.get("is_multilingual", True)
        languages = made.get("lang_to_id") or {} if is_multilingual else {}
        previous = made.get("prev_sot_token_id")
        return cls(
            start=found["decoder_start_token_id"],
            end=found["eos_token_id"],
            no_timestamps=found["no_timestamps_token_id"],
            previous=previous if type(previous) is int else None,
            languages={mark.strip("<|>"): token for mark, token in languages.items()},
            tasks=made.get("task_to_id") or {} if is_multilingual else {},
            suppressed=tuple(made.get("suppress_tokens") or ()),
            suppressed_first=tuple(made.get("begin_suppress_tokens") or ()),
            max_initial_timestamp=made.get("max_initial_timestamp_index"),
            alignment_heads=alignment_heads(Path(path)),
            filter_width=sizes.get("median_filter_width", 7),
            # In the vocabulary it precedes the token for "no timestamps"; no file names it.
            no_speech=found["no_timestamps_token_id"] - 1,
        )

    @property
    def first_timestamp(self) -> int:
        """Token of 0 seconds; the tokens of later times follow it."""
        return self.no_timestamps + 1

    def rules(self, has_timestamps: bool) -> SpeechRules:
        """Return the rules of a request for text with or without timestamps."""
        if not has_timestamps:
            return SpeechRules(self.suppressed, self.suppressed_first, self.end)
        return SpeechRules(
            (*self.suppressed, self.no_timestamps),
            self.suppressed_first,
            self.end,
            self.first_timestamp,
            -1 if self.max_initial_timestamp is None else self.max_initial_timestamp,
        )

    def prompt(
        self,
        language: str | None,
        task: str,
        before: Sequence[int],
        max_model_len: int,
        *,
        has_timestamps: bool = False,
    ) -> list[int]:
        """Return the decoder's first tokens.

        Args:
            language: language code. `None` only for models without languages.
            task: "transcribe" or "translate".
            before: tokens of the caller's prompt; if there are too many, the last of them are used.
            max_model_len: maximum length of the decoder; up to half of it is available for the caller's prompt.
            has_timestamps: whether the text is to have timestamps.

        Raises:
            InvalidRequestError: the model does not know the language or the task, or supports no prompt.
        """
        asked = [self.start]
        if self.languages:
            asked += [self.languages[self.known(language or "en")]]
        elif language not in (None, "en"):
            raise InvalidRequestError(f"language is {language!r}; this model knows en only", "language")
        if self.tasks:
            asked += [self.tasks[task]]
        elif task != "transcribe":
            raise InvalidRequestError("this model transcribes English and does not translate: use another", "model")
        if not has_timestamps:
            asked += [self.no_timestamps]
        if not before:
            return asked
        if self.previous is None:
            raise InvalidRequestError(f"prompt: the model's {_FILE} has no prev_sot_token_id: leave it out", "prompt")
        return [self.previous, *before[-(max_model_len // 2 - 1) :], *asked]

    def alignment(self, num_prompt_tokens: int, num_rows: int) -> AlignmentSpec:
        """Return what an engine needs to align the text that follows a prompt of `num_prompt_tokens` tokens.

        Raises:
            InvalidRequestError: the checkpoint does not name the heads that follow the audio, or its filter width is
                invalid.
        """
        if not self.alignment_heads:
            raise InvalidRequestError(
                f"timestamp_granularities[]: the model's {_FILE} has no alignment_heads, or some that its decoder does "
                "not have; words need them: ask for segment",
                "timestamp_granularities[]",
            )
        if type(self.filter_width) is not int or not is_filter_width(self.filter_width):
            raise InvalidRequestError(
                f"timestamp_granularities[]: the model's config.json has median_filter_width {self.filter_width!r}; "
                f"words need an odd number up to {MAX_FILTER_WIDTH}: correct it, or ask for segment",
                "timestamp_granularities[]",
            )
        return AlignmentSpec(self.alignment_heads, num_prompt_tokens, num_rows, self.filter_width)

    def no_speech_params(self, prompt: Sequence[int]) -> dict[str, Any]:
        """Return the fields of `SamplingParams` that report the logprob of `no_speech` after `start`.

        Args:
            prompt: tokens of the request; tokens of language and task may follow `start`.
        """
        place = prompt.index(self.start)
        if place == len(prompt) - 1:
            return {"logprob_token_ids": [self.no_speech]}
        rows = [[self.no_speech], *([] for _ in prompt[place + 2 :])]
        return {"logprobs": 0, "prompt_logprob_token_ids": rows, "prompt_logprob_start": place}

    def known(self, language: str) -> str:
        """Return a language code, checked.

        Raises:
            InvalidRequestError: the model does not know the language.
        """
        if language not in self.languages:
            known = ", ".join(self.languages)
            raise InvalidRequestError(f"language is {language!r}; this model knows {known}", "language")
        return language
