"""Whether an output ends in a pattern that repeats itself. Ends nothing: that is `stop.py`."""

from octavo.protocol.ids import TokenId
from octavo.protocol.repetition import RepetitionSpec


def ends_in_repetition(token_ids: list[TokenId], num_outputs: int, spec: RepetitionSpec) -> bool:
    """Return whether the outputs end in a pattern that stands there `min_count` times in a row.

    Args:
        token_ids: of prompt and outputs.
        num_outputs: how many of them, at the end, are outputs; a prompt's tokens are part of no pattern.
        spec: what to look for.
    """
    longest = min(spec.max_pattern_size, num_outputs // spec.min_count)
    if longest < spec.min_pattern_size:
        return False
    last = token_ids[-1]
    # perf: a pattern of n tokens needs the last token n places before its end, and to find those places is one call.
    before = token_ids[-2 : -2 - longest : -1]
    size = spec.min_pattern_size - 1
    while True:
        try:
            size = before.index(last, size) + 1
        except ValueError:
            return False
        num_equal = size * (spec.min_count - 1)
        if token_ids[-num_equal:] == token_ids[-num_equal - size : -size]:
            return True
