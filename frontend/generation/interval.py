"""The number of tokens of a request that the engine sends in one message."""

from octavo.protocol.config import ResolvedConfig
from octavo.protocol.params import OutputKind, SamplingParams

FINAL_INTERVAL = 32
"""Tokens per message if the caller sees only the complete output. Up to this many tokens are lost after an abort, or
are generated again if the engine is replaced."""


def stream_interval(params: SamplingParams, kind: OutputKind, config: ResolvedConfig) -> int:
    """Return the number of tokens that the engine sends together (`Submit.stream_interval`).

    With stop strings the interval is 1: this process finds them, and the engine wastes every token generated after one.
    """
    if params.stop:
        return 1
    interval = config.stream_interval if params.stream_interval is None else params.stream_interval
    return max(FINAL_INTERVAL, interval) if kind is OutputKind.FINAL_ONLY else interval
