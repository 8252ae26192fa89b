"""How many tokens of a request the engine sends in one message."""

from octavo.protocol.config import ResolvedConfig
from octavo.protocol.params import OutputKind, SamplingParams

FINAL_INTERVAL = 32
"""Tokens per message if the caller sees only the whole output. After an abort, up to so many tokens are missing; a
replaced engine generates up to so many again."""


def stream_interval(params: SamplingParams, kind: OutputKind, config: ResolvedConfig) -> int:
    """Return how many tokens the engine sends together (`Submit.stream_interval`).

    With stop strings it is 1: this process finds them, and every token generated after one is wasted.
    """
    if params.stop:
        return 1
    interval = config.stream_interval if params.stream_interval is None else params.stream_interval
    return max(FINAL_INTERVAL, interval) if kind is OutputKind.FINAL_ONLY else interval
