"""Detects whether an output ends in a repeated pattern. `stop.py` decides what to do then."""

from collections.abc import Sequence

from octavo.protocol.ids import TokenId
from octavo.protocol.repetition import RepetitionSpec


def ends_in_repetition(token_ids: Sequence[TokenId], num_outputs: int, spec: RepetitionSpec) -> bool:
    """Return whether the outputs end in a pattern that occurs `min_count` times in a row.

    A pattern of `size` tokens repeats if the last `size * (min_count - 1)` tokens equal the tokens `size` places
    earlier. The Z algorithm (D. Gusfield, Algorithms on Strings, Trees and Sequences, 1997, 1.3), run from the end,
    finds the length of that match for each size. It compares each token once, for any output.

    Args:
        token_ids: prompt and outputs.
        num_outputs: number of outputs at the end of `token_ids`. Patterns never reach into the prompt.
        spec: which repetitions count.
    """
    longest = min(spec.max_pattern_size, num_outputs // spec.min_count)
    if longest < spec.min_pattern_size:
        return False
    num_looked_at = longest * spec.min_count
    last = token_ids[-1]
    # perf: the last token of a pattern of n tokens also occurs n places earlier; `index` finds such places in one call.
    before = token_ids[-2 : -2 - longest : -1]
    num_equal: dict[int, int] = {}
    """Length of the match, by pattern size."""
    begin = end = size = 0
    """The size whose match reaches furthest back, and that match's range. Within it, lengths follow from smaller
    sizes."""
    while True:
        try:
            size = before.index(last, size) + 1
        except ValueError:
            return False
        count = min(num_equal[size - begin], end - size) if size < end else 0
        if size + count >= end:
            while size + count < num_looked_at and token_ids[~count] == token_ids[~(size + count)]:
                count += 1
            begin, end = size, size + count
        num_equal[size] = count
        if size >= spec.min_pattern_size and count >= size * (spec.min_count - 1):
            return True
