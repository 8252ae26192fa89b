"""Snapshot of an engine for the dashboard: progress, blocks and the latest steps. Contains no text and no tokens."""

import msgspec

from octavo.protocol.ids import RequestId
from octavo.protocol.stats import EngineStats

MAX_REQUESTS = 256
"""Most requests in one snapshot: the first ones in service order."""

BLOCK_FREE = 0
BLOCK_CACHED = 1
"""Free, but still in the prefix cache."""
BLOCK_USED = 2
BLOCK_SHARED = 3
"""Held by several requests."""


class RequestProgress(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Progress of one request."""

    request_id: RequestId
    is_running: bool
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    num_computed_tokens: int
    num_output_tokens: int
    max_tokens: int
    num_blocks: int
    num_preemptions: int
    age_s: float
    """Seconds since it was queued."""


class StepSample(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Size and duration of one step."""

    sequence: int
    """Number of the step, from 0, so that a reader can tell which steps are new."""
    num_requests: int
    num_decode_tokens: int
    num_prefill_tokens: int
    elapsed_s: float
    """Duration in the worker, in seconds."""


class EngineSnapshot(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="snapshot"):
    """Result of `GetSnapshot`."""

    stats: EngineStats
    requests: list[RequestProgress]
    """Running requests first, then waiting ones; at most `MAX_REQUESTS`."""
    blocks: bytes
    """One of the `BLOCK_` constants for each block of the KV cache."""
    steps: list[StepSample]
    """The latest steps, oldest first."""
