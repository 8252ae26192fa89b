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
    """The first message of every frontend; answered by `Welcome` or `Refused`."""

    version: int = PROTOCOL_VERSION
    client: str = ""
    """Program and pid, for the log."""
    frontend_id: bytes = b""
    """Unique per frontend and the same in all its connections: it identifies resubmitted requests. b"": this frontend
    never reconnects."""


class Submit(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="submit"):
    """Compute one sequence. Answered by any number of `Tokens`, then one `Finished` or `Failed`."""

    request_id: RequestId
    prompt_token_ids: IdArray
    params: RequestParams
    """What is computed: sampled tokens, a pooled result, or an alignment."""
    priority: int = 0
    """Lower runs earlier, under the priority policy."""
    cache_salt: str | None = None
    """Requests share cached blocks only with requests of the same salt."""
    adapter: Adapter | None = None
    """The LoRA adapter; None: the model alone."""
    resume_output_token_ids: IdArray = msgspec.field(default_factory=pack_ids)
    """Tokens delivered before a restart: treated as a preempted request's outputs, never sent again."""
    stream_interval: int = 1
    """Tokens per `Tokens` event: the first is sent at once, later ones when this many are there or the request ends."""
    grammar: GrammarSpec | None = None
    """Constraint on the output; needs a `ModelVocabulary` sent before."""
    is_continued: bool = False
    """True: continues work that was accepted before, such as a step of a beam search or a resubmitted request. A full
    queue does not reject it."""
    prompt_embeds: PromptEmbeds | None = None
    """Prompt embeddings; `prompt_token_ids` has a `PLACEHOLDER` at their positions. None: all positions have tokens."""
    kv_transfer: KVTransfer | None = None
    """KV blocks that it leaves for another engine, or takes from one; None: neither."""
    media: list[MediaItem] = []
    """Images and other media, in order of position; `prompt_token_ids` has the model's placeholder at their rows."""


class ModelVocabulary(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="vocabulary"):
    """The bytes of every token: sent before a frontend's first request with a grammar, never answered.

    All frontends of an engine have the same tokenizer; the core keeps the first vocabulary that it receives.
    """

    tokens: list[bytes]
    """For each id up to the size of the model's vocabulary the bytes that the token adds to a text; b"": unused id."""
    special_token_ids: list[TokenId]
    """Tokens that are never text, whatever their bytes are."""


class Abort(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="abort"):
    """Stop working on these requests. Unknown or finished ids are ignored.

    Each live one still ends in a `Finished` with reason ABORT.
    """

    request_ids: list[RequestId]


class WatchCache(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="watch_cache"):
    """Report which prefixes are cached: everything now, and changes from now on. Answered by `CacheUpdate`s.

    Sent by frontends that choose between several engines, and again whenever one has missed an update.
    """

    number: int
    """In every `CacheUpdate`, so that those of an earlier watch can be told apart; 0: report nothing any more."""


class ResetPrefixCache(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="reset_prefix_cache"):
    """Forget every cached block. Result: `BoolResult`, False while blocks are in use."""


class GetStats(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="get_stats"):
    """Result: `EngineStats`."""


class GetSnapshot(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="get_snapshot"):
    """Result: `EngineSnapshot`. Made between two steps; requested at most a few times a second."""


class StartProfile(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="start_profile"):
    """Start the torch profiler on every worker. Result: `BoolResult`; `CallFailed` if the directory is not writable."""

    directory: str


class StopProfile(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="stop_profile"):
    """Stop the profiler; one trace per worker is written to its directory. Result: `BoolResult`, or `CallFailed`."""


ProfileCall = StartProfile | StopProfile

Utility = ResetPrefixCache | GetStats | GetSnapshot | ProfileCall | AdminCall | WeightsCall
"""All utility calls: nothing else can be called over the wire."""


class Call(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="call"):
    """A utility call; answered by one `Reply` with the same `call_id`."""

    call_id: int
    utility: Utility


FrontendMessage = Connect | Submit | ModelVocabulary | Abort | Call | WatchCache
