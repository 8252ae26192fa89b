"""`--custom-histogram-buckets`: the buckets of histograms, from JSON."""

import json
import math
from itertools import pairwise

from octavo.frontend.metrics.names import METRICS, Kind
from octavo.frontend.metrics.shared_counters import NUM_COLUMNS
from octavo.protocol.errors import ConfigError

MAX_EDGES = 64
"""Maximum number of edges of one histogram; the shared memory of an engine's metrics has room for this many in each."""

_NAMES = tuple(metric.name for metric in METRICS if metric.kind is Kind.HISTOGRAM)

assert len(_NAMES) * (MAX_EDGES + 2) + 512 <= NUM_COLUMNS, "lower MAX_EDGES, or raise NUM_COLUMNS"


def read_buckets(text: str | None) -> dict[str, tuple[float, ...]]:
    """Return the upper edges of each histogram that the text names.

    Args:
        text: a JSON object of lists; names may have the prefix "octavo:" or "vllm:". `None`: no histograms.

    Raises:
        ConfigError: the text is invalid; the message names the histogram.
    """
    if text is None:
        return {}
    try:
        given = json.loads(text)
    except ValueError as error:
        raise _invalid(f"not valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise _invalid("not a JSON object")
    found = {}
    for key, edges in given.items():
        name = key.removeprefix("octavo:").removeprefix("vllm:")
        if name not in _NAMES:
            raise _invalid(f"there is no histogram {key!r}; there are {', '.join(_NAMES)}")
        if not isinstance(edges, list) or not 1 <= len(edges) <= MAX_EDGES or not all(map(_is_edge, edges)):
            raise _invalid(f"{key} must have 1 to {MAX_EDGES} finite numbers, got {edges!r}")
        if any(low >= high for low, high in pairwise(edges)):
            raise _invalid(f"the edges of {key} must rise, got {edges!r}")
        found[name] = tuple(map(float, edges))
    return found


def _is_edge(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _invalid(fault: str) -> ConfigError:
    hint = 'an example: {"time_to_first_token_seconds": [0.1, 0.5, 2]}'
    return ConfigError(f"custom_histogram_buckets: {fault}", hint=hint)
