"""Core to frontend: what happened to requests, and answers to utility calls."""

from collections.abc import Iterable, Iterator
from enum import IntEnum

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

    The alternatives are ordered by falling logprob, ties by rising token id; the token itself is
    repeated among them when it is one of them.
    """

    token_ids: list[TokenId]
    logprobs: list[float]
    """float32 values of the unmodified distribution (before penalties and temperature)."""
    rank: int
    """Rank of the token itself, from 1."""


class Tokens(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="tokens"):
    """New tokens of one request; sent at least once per step in which it gets some, or per `stream_interval`."""

    request_id: RequestId
    token_ids: list[TokenId]
    logprobs: list[TokenLogprobs] | None = None
    """One entry per token, when asked for."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """With the first tokens only: one entry per prompt token, the first None."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when the request first ran."""
    times: list[float] = []
    """When each token was known, in seconds of the core's clock; empty unless `stream_interval` delays tokens."""
    weight_version: int = 0
    """Of the weights under which all of these tokens were drawn."""


class StreamedTokens(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="streamed"):
    """The next token of each of several requests: one `Tokens` each, without logprobs, prompt logprobs and times.

    perf: most tokens are sent like this, and one message of lists is cheaper for both sides than an object per token.
    """

    request_ids: list[RequestId]
    """Each at most once."""
    token_ids: list[TokenId]
    """Beside the ids."""
    num_cached_tokens: list[int]
    """Beside the ids, as in `Tokens`."""
    weight_version: int = 0
    """Of all tokens, as in `Tokens`."""


class PooledOutput(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The result of a `PoolingSpec` or an `AlignmentSpec`: one array, row by row."""

    data: Buffer
    shape: tuple[int, ...]
    dtype: str
    """"float32" or "bfloat16", little-endian."""


class Finished(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="finished"):
    """The request is over. Its last tokens came in a `Tokens` before this; it may have had none."""

    request_id: RequestId
    reason: FinishReason
    stop_token_id: TokenId | None = None
    """The member of `stop_token_ids` that was generated, if that is why it stopped."""
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    timings: RequestTimings = RequestTimings()
    result: PooledOutput | None = None
    """What the request asked for, if that is not tokens."""
    kv_transfer: KVTransfer | None = None
    """How another engine takes the KV blocks that it has left; None: there are none."""


class FailureKind(IntEnum):
    """Who caused a failure; determines the HTTP status."""

    INVALID = 0
    OVERLOADED = 1
    INTERNAL = 2


class Failed(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="failed"):
    """The request was rejected or could not be completed."""

    request_id: RequestId
    kind: FailureKind
    message: str
    param: str | None = None
    """The invalid field; for OVERLOADED, the setting whose limit was reached."""


RequestEvent = Tokens | Finished | Failed
"""An event about one request."""

StepEvent = StreamedTokens | RequestEvent
"""What a message holds."""


def split_events(events: Iterable[StepEvent]) -> Iterator[RequestEvent]:
    """Yield the events of a message one request at a time."""
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
    """Epoch of the sender; events of an older epoch are ignored."""
    events: list[StepEvent]
    time: float = 0.0
    """Core's monotonic clock, in seconds."""


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
    """The msgpack form of the engine's `ResolvedConfig`."""
    pulse_path: str = ""
    """File of the core's pulse (`protocol/pulse.py`); "" when the core is on another machine."""
    replaced_epoch: int = 0
    """Epoch of the core that was stopped so that this one could take over: it did not crash. 0: none."""
    identity: str = ""
    """Engines of the same identity give every request the same bits (`protocol/identity.py`)."""
    weights_digest: str = ""
    """Of the weights alone; "" if they are random."""
    model_impl: str = "octavo"
    """What computes the model: "octavo" or "transformers"."""
    variant_module: str = ""
    """The first module whose rows have other bits in other batches; "": a request has the same bits in all."""
    weight_version: int = 0
    """Counts the updates of the weights (`protocol/weights.py`)."""
    weight_label: str = ""
    """What the caller of the last update named its weights."""
    weights_dir: str = ""
    """Directory in shared memory for weights that a client sends; "": there is none."""
    identity_parts: dict[str, str] = {}
    """What the identity covers besides the weights, by name, for receipts."""


class Welcome(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="welcome"):
    """Answer to `Connect`."""

    facts: EngineFacts
    version: int = PROTOCOL_VERSION


class Refused(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="refused"):
    """Answer to a `Connect` of another protocol version; the connection cannot be used."""

    message: str
    version: int = PROTOCOL_VERSION


def reject_version(version: int) -> Refused:
    """Return the answer to a frontend of another protocol version."""
    return Refused(
        f"this engine speaks protocol version {PROTOCOL_VERSION}, the frontend version {version}: "
        "both must come from the same release of octavo"
    )


class BoolResult(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="bool"):
    """Result of a utility call that succeeds or fails."""

    ok: bool


class CallFailed(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="call_failed"):
    """The utility call raised."""

    message: str


UtilityResult = BoolResult | EngineStats | EngineSnapshot | WeightsStatus | RequestRows | RequestCount | CallFailed


class Reply(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="reply"):
    """Answer to a `Call`."""

    call_id: int
    result: UtilityResult


class FactsChanged(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="facts_changed"):
    """The engine has other weights from now on: sent to every frontend, before tokens that were drawn under them."""

    identity: str
    weights_digest: str
    weight_version: int
    weight_label: str


class StatsReport(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="stats"):
    """Sent to every frontend about once a second while the engine works, and once when it falls idle."""

    stats: EngineStats


class CacheUpdate(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="cache_update"):
    """Changes of the prefix cache since the last update, and the load; sent to frontends that sent `WatchCache`.

    Only blocks that end a span are stored (`prefix_hash.SPAN_TOKENS`). Others may be in `removed`, and in the contents
    with which a watch begins; a reader that looks up the ends of spans never asks for them.
    """

    epoch: int
    """Epoch of the sender."""
    watch: int
    """The number of the latest `WatchCache`."""
    sequence: int
    """Rises by one with each update of a watch. A reader that misses one sends `WatchCache` again."""
    starts_over: bool
    """Forget all earlier ones, the contents follow. So does the first update of a watch, and sometimes a later one."""
    num_live: int
    """Requests that run or wait, of all frontends."""
    stored: Buffer
    """After `removed`: the first `prefix_hash.SHORT_HASH_BYTES` of the hash of each block, and for each recurrent state
    `prefix_hash.short_state_hash` of the block that ends the last whole span before it."""
    removed: Buffer
    """The same of what is gone."""
    state_interval: int = 0
    """Requests leave recurrent states after so many tokens each, and others continue only from those; 0: from any
    block."""


class EngineDying(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="dying"):
    """The core is about to exit; unfinished requests will not finish here."""

    message: str
    """The root cause, "" for an orderly shutdown."""


Event = Events | Welcome | Refused | Reply | StatsReport | CacheUpdate | FactsChanged | EngineDying
