"""Frontend to core: requests, aborts and utility calls."""

import msgspec

from octavo.protocol import PROTOCOL_VERSION
from octavo.protocol.adapters import Adapter
from octavo.protocol.admin import AdminCall
from octavo.protocol.ids import IdArray, RequestId, TokenId, pack_ids
from octavo.protocol.kv_transfer import KVTransfer
from octavo.protocol.media import MediaItem
from octavo.protocol.params import RequestParams
from octavo.protocol.prompt_embeds import PromptEmbeds
from octavo.protocol.structured import GrammarSpec
from octavo.protocol.weights import WeightsCall


class Connect(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="connect"):
    """The first message of every frontend. The core replies with `Welcome` or `Refused`."""

    version: int = PROTOCOL_VERSION
    client: str = ""
    """Program and pid, for the log."""
    frontend_id: bytes = b""
    """Unique per frontend and the same for all its connections: identifies resubmitted requests. Empty if this frontend
    never reconnects."""


class Submit(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="submit"):
    """Compute one sequence. The core replies with any number of `Tokens`, then one `Finished` or `Failed`."""

    request_id: RequestId
    prompt_token_ids: IdArray
    params: RequestParams
    """What to compute: sampled tokens, a pooled result, or an alignment."""
    priority: int = 0
    """Under the priority policy, lower values run earlier."""
    cache_salt: str | None = None
    """Requests share cached blocks only with requests of the same salt."""
    adapter: Adapter | None = None
    """The LoRA adapter. None for the base model."""
    resume_output_token_ids: IdArray = msgspec.field(default_factory=pack_ids)
    """Tokens delivered before a restart. They count as outputs of a preempted request and are not sent again."""
    stream_interval: int = 1
    """Tokens per `Tokens` event. The first token is sent at once, later ones when this many are available or the
    request ends."""
    grammar: GrammarSpec | None = None
    """Constraint on the output. A `ModelVocabulary` must have been sent before."""
    is_continued: bool = False
    """True if this continues previously accepted work, such as a step of a beam search or a resubmitted request. It is
    not rejected when the queue is full."""
    prompt_embeds: PromptEmbeds | None = None
    """Prompt embeddings; `prompt_token_ids` has a `PLACEHOLDER` at their positions. None if all positions have
    tokens."""
    kv_transfer: KVTransfer | None = None
    """KV blocks that the request leaves for another engine, or fetches from one. None if neither."""
    media: list[MediaItem] = []
    """Images and other media, in order of position; `prompt_token_ids` has the model's placeholder token at their
    rows."""


class ModelVocabulary(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="vocabulary"):
    """The bytes of every token. Sent before a frontend's first request with a grammar; there is no reply.

    All frontends of an engine have the same tokenizer; the core keeps the first vocabulary that it receives.
    """

    tokens: list[bytes]
    """For each id up to the model's vocabulary size, the bytes that the token adds to a text. Empty for unused ids."""
    special_token_ids: list[TokenId]
    """Tokens that are never text, regardless of their bytes."""


class Abort(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="abort"):
    """Stop working on these requests. Unknown or finished ids are ignored.

    Each live request still ends with a `Finished` with reason ABORT.
    """

    request_ids: list[RequestId]


class WatchCache(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="watch_cache"):
    """Report which prefixes are cached: everything now, and changes from now on. The core replies with `CacheUpdate`s.

    Sent by frontends that choose between several engines, and sent again after a missed update.
    """

    number: int
    """Repeated in every `CacheUpdate`, to distinguish it from updates of an earlier watch. 0 ends the watch."""


class ResetPrefixCache(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="reset_prefix_cache"):
    """Drop every cached block. Result: `BoolResult`, False if blocks are in use."""


class GetStats(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="get_stats"):
    """Result: `EngineStats`."""


class GetSnapshot(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="get_snapshot"):
    """Result: `EngineSnapshot`, taken between two steps. Requested at most a few times a second."""


class StartProfile(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="start_profile"):
    """Start the torch profiler on every worker. Result: `BoolResult`; `CallFailed` if the directory is not writable."""

    directory: str


class StopProfile(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="stop_profile"):
    """Stop the profiler. Each worker writes one trace to its directory. Result: `BoolResult`, or `CallFailed`."""


ProfileCall = StartProfile | StopProfile

Utility = ResetPrefixCache | GetStats | GetSnapshot | ProfileCall | AdminCall | WeightsCall
"""All utility calls. Nothing else can be called over the wire."""


class Call(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="call"):
    """A utility call. The core sends one `Reply` with the same `call_id`."""

    call_id: int
    utility: Utility


FrontendMessage = Connect | Submit | ModelVocabulary | Abort | Call | WatchCache
