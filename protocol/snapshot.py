"""What the dashboard shows of an engine at one moment: progress, blocks and the latest steps. No text, no token."""

import msgspec

from octavo.protocol.ids import RequestId
from octavo.protocol.stats import EngineStats

MAX_REQUESTS = 256
"""Requests of one snapshot; of more, the first in the order in which they are served."""

BLOCK_FREE = 0
BLOCK_CACHED = 1
"""Free, but its contents can still be found by the prefix cache."""
BLOCK_USED = 2
BLOCK_SHARED = 3
"""Held by several requests."""


class RequestProgress(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """How far one request is."""

    request_id: RequestId
    is_running: bool
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens that the prefix cache had."""
    num_computed_tokens: int
    num_output_tokens: int
    max_tokens: int
    num_blocks: int
    num_preemptions: int
    age_s: float
    """Since it was queued."""


class StepSample(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """What one step computed, and how long it took."""

    sequence: int
    """Counts the engine's steps from 0, so that a reader knows which ones it has seen."""
    num_requests: int
    num_decode_tokens: int
    num_prefill_tokens: int
    elapsed_s: float
    """In the worker."""


class EngineSnapshot(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="snapshot"):
    """Result of `GetSnapshot`."""

    stats: EngineStats
    requests: list[RequestProgress]
    """Running ones first, then waiting ones; at most `MAX_REQUESTS`."""
    blocks: bytes
    """For each block of the KV cache one of the `BLOCK_` constants."""
    steps: list[StepSample]
    """The latest ones, oldest first."""
