"""Core to frontend: events of requests, and replies to utility calls."""

from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Literal, TypeAlias

import msgspec

from octavo.protocol import PROTOCOL_VERSION
from octavo.protocol.admin import RequestCount, RequestRows
from octavo.protocol.buffers import Buffer
from octavo.protocol.ids import RequestId, TokenId
from octavo.protocol.kv_transfer import KVTransfer
from octavo.protocol.snapshot import EngineSnapshot
from octavo.protocol.stats import EngineStats, RequestTimings
from octavo.protocol.weights import WeightsStatus


class FinishReason(IntEnum):
    """Why a sequence ended."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4

    def __str__(self) -> str:
        return self.name.lower()


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Log-probabilities at one position: the token itself first, then the top alternatives.

    The alternatives are sorted by descending logprob, ties by ascending token id. The token itself is repeated among
    them if it is one of them.
    """

    token_ids: list[TokenId]
    logprobs: list[float]
    """float32 values of the unmodified distribution (before penalties and temperature)."""
    rank: int
    """Rank of the token itself, from 1."""


class Tokens(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="tokens"):
    """New tokens of one request. Sent at least once per step in which it gets tokens, or per `stream_interval`
    tokens."""

    request_id: RequestId
    token_ids: list[TokenId]
    logprobs: list[TokenLogprobs] | None = None
    """One entry per token, if requested."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Only with the first tokens: one entry per prompt token, the first of which is None."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when the request first ran."""
    times: list[float] = []
    """When each token became known, in seconds on the core's clock. Empty unless `stream_interval` delays tokens."""
    weight_version: int = 0
    """Version of the weights with which all of these tokens were sampled."""


class StreamedTokens(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="streamed"):
    """One next token for each of several requests: equivalent to one `Tokens` each, without logprobs and times.

    perf: most tokens are sent in this form. One message of lists is cheaper for both sides than an object per token.
    """

    request_ids: list[RequestId]
    """Each id occurs at most once."""
    token_ids: list[TokenId]
    """One token per request id."""
    num_cached_tokens: list[int]
    """One number per request id, as in `Tokens`."""
    weight_version: int = 0
    """Version of the weights of all tokens, as in `Tokens`."""


class PooledOutput(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The result of a `PoolingSpec` or an `AlignmentSpec`: one array, row by row."""

    data: Buffer
    shape: tuple[int, ...]
    dtype: str
    """"float32" or "bfloat16", little-endian."""


class Finished(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="finished"):
    """The request has ended. Its last tokens were sent in an earlier `Tokens`, if it had any."""

    request_id: RequestId
    reason: FinishReason
    stop_token_id: TokenId | None = None
    """The member of `stop_token_ids` that was generated, if that is the reason."""
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    timings: RequestTimings = RequestTimings()
    result: PooledOutput | None = None
    """The result of a request that generates no tokens."""
    kv_transfer: KVTransfer | None = None
    """How another engine fetches the KV blocks that the request has left. None if there are none."""


class FailureKind(IntEnum):
    """Who caused a failure. Determines the HTTP status."""

    INVALID = 0
    OVERLOADED = 1
    INTERNAL = 2


class Failed(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="failed"):
    """The request was rejected or could not be completed."""

    request_id: RequestId
    kind: FailureKind
    message: str
    param: str | None = None
    """The invalid parameter. For OVERLOADED, the setting whose limit was reached."""


RequestEvent = Tokens | Finished | Failed
"""An event about one request."""

StepEvent = StreamedTokens | RequestEvent
"""An event in a message, about one or several requests."""


def split_events(events: Iterable[StepEvent]) -> Iterator[RequestEvent]:
    """Yield the events of a message as events about one request each."""
    for event in events:
        if isinstance(event, StreamedTokens):
            for request_id, token_id, num_cached_tokens in zip(
                event.request_ids, event.token_ids, event.num_cached_tokens, strict=True
            ):
                yield Tokens(request_id, [token_id], None, None, num_cached_tokens, [], event.weight_version)
        else:
            yield event


class Events(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="events"):
    """The events of one step for the requests of one frontend."""

    epoch: int
    """Epoch of the sender. Events of an older epoch are ignored."""
    events: list[StepEvent]
    time: float = 0.0
    """The core's monotonic clock, in seconds."""


class EngineFacts(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """What a frontend must know about its engine."""

    epoch: int
    model: str
    """Path of the model files, for the tokenizer."""
    served_model_names: list[str]
    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_logprobs: int
    dtype: str
    device: str
    config: bytes
    """The engine's `ResolvedConfig` as msgpack."""
    pulse_path: str = ""
    """File of the core's pulse (`protocol/pulse.py`). Empty if the core is on another machine."""
    replaced_epoch: int = 0
    """Epoch of the core that was stopped to be replaced by this one, i.e. did not crash; 0 if there was none."""
    identity: str = ""
    """Engines with the same identity compute identical bits for every request (`protocol/identity.py`)."""
    weights_digest: str = ""
    """Digest of the weights alone. Empty if they are random."""
    model_impl: str = "octavo"
    """The model implementation: "octavo" or "transformers"."""
    variant_module: str = ""
    """The first module whose rows depend on the batch. Empty if a request has the same bits in every batch."""
    weight_version: int = 0
    """Number of weight updates (`protocol/weights.py`)."""
    weight_label: str = ""
    """Name that the caller of the last update gave to the weights."""
    weights_dir: str = ""
    """Directory in shared memory for weights uploaded by clients. Empty if there is none."""
    identity_parts: dict[str, str] = {}
    """Everything except the weights that the identity covers, by name, for receipts."""


class Welcome(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="welcome"):
    """Reply to `Connect`."""

    facts: EngineFacts
    version: int = PROTOCOL_VERSION


class Refused(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="refused"):
    """Reply to a `Connect` of another protocol version. The connection cannot be used."""

    message: str
    version: int = PROTOCOL_VERSION


def reject_version(version: int) -> Refused:
    """Return the reply to a frontend of another protocol version."""
    return Refused(
        f"this engine speaks protocol version {PROTOCOL_VERSION}, the frontend version {version}: "
        "both must come from the same release of octavo"
    )


class BoolResult(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="bool"):
    """Result of a utility call that succeeds or fails."""

    ok: bool


CallFault: TypeAlias = Literal["engine", "arguments", "state"]
"""Why a call failed: the engine could not complete it; or it changed nothing, because its arguments are invalid, or
because the engine's state does not allow it."""


class CallFailed(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="call_failed"):
    """The utility call failed."""

    message: str
    fault: CallFault = "engine"


UtilityResult = BoolResult | EngineStats | EngineSnapshot | WeightsStatus | RequestRows | RequestCount | CallFailed


class Reply(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="reply"):
    """Reply to a `Call`."""

    call_id: int
    result: UtilityResult


class FactsChanged(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="facts_changed"):
    """The engine has new weights from now on. Sent to every frontend before any token sampled with them."""

    identity: str
    weights_digest: str
    weight_version: int
    weight_label: str


class StatsReport(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="stats"):
    """Sent to every frontend about once a second while the engine works, and once when it becomes idle."""

    stats: EngineStats


class CacheUpdate(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="cache_update"):
    """Changes of the prefix cache since the last update, and the load. Sent to frontends that sent `WatchCache`.

    `stored` has only blocks that end a span (`prefix_hash.SPAN_TOKENS`). Other blocks may occur in `removed`, and in
    `stored` when a watch begins; readers that look up only the ends of spans ignore them.
    """

    epoch: int
    """Epoch of the sender."""
    watch: int
    """The number of the latest `WatchCache`."""
    sequence: int
    """Incremented by one with each update of a watch. A reader that misses an update sends `WatchCache` again."""
    starts_over: bool
    """True if all earlier updates must be forgotten and the complete contents follow. True for the first update of a
    watch, and sometimes for a later one."""
    num_live: int
    """Number of running or waiting requests of all frontends."""
    stored: Buffer
    """Short hashes of what was stored, to be applied after `removed`. For each block, the first
    `prefix_hash.SHORT_HASH_BYTES` bytes of its hash. For each recurrent state, `prefix_hash.short_state_hash` of the
    block that ends the last complete span before it."""
    removed: Buffer
    """Short hashes of what was removed, in the same form."""
    state_interval: int = 0
    """Number of tokens between two recurrent states that requests leave, from which other requests can continue; 0 if
    requests can continue from any block."""


class EngineDying(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="dying"):
    """The core is about to exit. Unfinished requests will not finish here."""

    message: str
    """The root cause. Empty for an orderly shutdown."""


Event = Events | Welcome | Refused | Reply | StatsReport | CacheUpdate | FactsChanged | EngineDying
