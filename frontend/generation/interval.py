"""How many tokens of a request come from the engine in one message. Does not decide how outputs are cut."""

from octavo.protocol.config import ResolvedConfig
from octavo.protocol.params import OutputKind, SamplingParams

FINAL_INTERVAL = 32
"""Tokens that come together where the caller sees the whole output only. An abort shows what has come until then, and
an engine that is replaced has as many to generate again."""


def stream_interval(params: SamplingParams, kind: OutputKind, config: ResolvedConfig) -> int:
    """Return how many tokens the engine shall send together (`Submit.stream_interval`).

    One with stop strings: whoever looks for them is this process, and what comes after one is generated in vain.
    """
    if params.stop:
        return 1
    interval = config.stream_interval if params.stream_interval is None else params.stream_interval
    return max(FINAL_INTERVAL, interval) if kind is OutputKind.FINAL_ONLY else interval
