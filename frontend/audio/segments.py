"""Segments of a transcription: pieces of text between two timestamps."""

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from octavo.frontend.audio.prompts import AudioWindow
from octavo.frontend.audio.speech_tokens import SpeechTokens
from octavo.frontend.outputs import RequestOutput

STEP_S = 0.02
"""Seconds from one timestamp to the next."""
FRAMES_PER_SECOND = 100
_MAX_WINDOWS = 30
"""Maximum number of windows for a clip of one window's length: the model may begin segments anywhere, and windows cost
time."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of text, with its times in seconds from the start of the clip."""

    start_s: float
    end_s: float
    text: str
    token_ids: list[int]
    """Token ids, including the timestamps."""
    seek: int
    """Start of its window in hundredths of a second."""
    avg_logprob: float
    """Mean over `token_ids`. 0 if there are no logprobs."""
    compression_ratio: float
    """Bytes of the text divided by bytes of the compressed text; large for repetitive text."""
    no_speech_prob: float
    """Probability that its window has no speech. 0 if there are no logprobs."""


def segments_of(
    window: AudioWindow, output: RequestOutput, tokens: SpeechTokens, decode: Callable[[Sequence[int]], str]
) -> Iterator[Segment]:
    """Yield the complete segments of a window. Text after the last timestamp ends with the window.

    Args:
        window: supplies start and duration.
        output: output of a request with timestamps.
        tokens: tokens of the model.
        decode: returns the text of tokens.
    """
    no_speech_prob, drawn = math.exp(_no_speech_logprob(output, tokens)), output.outputs[0].token_ids
    kept = drawn[: num_kept_tokens(drawn, tokens, window.item.attended_rows)]
    for start_s, end_s, places in _pieces(kept, tokens, window.duration_s):
        found = [kept[place] for place in places]
        text = decode([token for token in found if token < tokens.end])
        yield Segment(
            start_s=round(window.start_s + start_s, 3),
            end_s=round(window.start_s + end_s, 3),
            text=text,
            token_ids=found,
            seek=round(FRAMES_PER_SECOND * window.start_s),
            avg_logprob=_mean_logprob(output, places),
            compression_ratio=_compression_ratio(text),
            no_speech_prob=no_speech_prob,
        )


def num_kept_tokens(token_ids: Sequence[int], tokens: SpeechTokens, num_rows: int) -> int:
    """Return the number of tokens of a window that belong to complete segments. The next window transcribes the rest.

    A pair of timestamps is the end of a segment and the start of the next one. A window that ends with a single
    timestamp, or has no pair, keeps all of its tokens; see `num_heard_rows`.

    Args:
        token_ids: drawn by the model, with timestamps.
        tokens: tokens of the model.
        num_rows: number of the encoder's rows; see `num_heard_rows`.
    """
    marks = [token >= tokens.first_timestamp for token in token_ids if token != tokens.end]
    if marks[-2:] == [False, True]:
        return len(token_ids)
    pairs = [place for place in range(1, len(marks)) if marks[place - 1] and marks[place]]
    if not pairs or token_ids[pairs[-1] - 1] - tokens.first_timestamp < _least_rows(num_rows):
        return len(token_ids)
    return pairs[-1]


def num_heard_rows(token_ids: Sequence[int], tokens: SpeechTokens, num_rows: int) -> int:
    """Return the number of a window's rows that its segments cover. The next window begins after these rows.

    The rows end at the timestamp that ends the kept tokens: the first of a pair, or the last token if the token limit
    has cut the window. Without such a timestamp, the complete window is covered.

    Args:
        token_ids: drawn by the model, with timestamps.
        tokens: tokens of the model.
        num_rows: number of the encoder's rows. Timestamps in the first thirtieth of them are ignored, so that windows
            always advance.
    """
    num_kept = num_kept_tokens(token_ids, tokens, num_rows)
    rows = token_ids[num_kept - 1] - tokens.first_timestamp if num_kept else 0
    return rows if rows >= _least_rows(num_rows) else num_rows


def _least_rows(num_rows: int) -> int:
    return max(1, num_rows // _MAX_WINDOWS)


def num_spoken_rows(duration_s: float, most: int) -> int:
    """Return the number of the encoder's rows that a window fills, from one to `most`."""
    # Rounding: 0.58 / 0.02 is 28.999..., and a sample is a 320th of a row.
    return max(1, min(int(duration_s / STEP_S + 1e-6), most))


def _pieces(
    token_ids: Sequence[int], tokens: SpeechTokens, duration_s: float
) -> Iterator[tuple[float, float, list[int]]]:
    """Yield start and end (in seconds of the window) and the token indices of each segment with text."""
    start_s, places, has_text = 0.0, [], False
    for place, token in enumerate(token_ids):
        if token == tokens.end:
            break
        places.append(place)
        if token < tokens.first_timestamp:
            has_text = True
            continue
        time_s = min(STEP_S * (token - tokens.first_timestamp), duration_s)
        if has_text:
            yield start_s, max(start_s, time_s), places
            places, has_text = [], False
        else:
            places = [place]
        start_s = time_s
    if has_text:
        yield start_s, duration_s, places


def _no_speech_logprob(output: RequestOutput, tokens: SpeechTokens) -> float:
    """Return the logprob of `no_speech` after `start`, which is the last token of the prompt or one within it."""
    if rows := output.prompt_token_id_logprobs:
        return rows[0][0]
    first = (output.outputs[0].logprobs or [{}])[0]
    return first[tokens.no_speech].logprob if tokens.no_speech in first else -math.inf


def _mean_logprob(output: RequestOutput, places: Sequence[int]) -> float:
    logprobs = output.outputs[0].logprobs
    if not logprobs:
        return 0.0
    return sum(logprobs[place][output.outputs[0].token_ids[place]].logprob for place in places) / len(places)


def _compression_ratio(text: str) -> float:
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if data else 0.0
