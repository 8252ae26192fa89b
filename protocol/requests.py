"""Frontend to core: requests, aborts and utility calls."""

import msgspec

from octavo.protocol import PROTOCOL_VERSION
from octavo.protocol.ids import RequestId, TokenId
from octavo.protocol.params import SamplingSpec
from octavo.protocol.structured import GrammarSpec


class Connect(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="connect"):
    """The first message of every frontend; answered by `Welcome` or `Refused`."""

    version: int = PROTOCOL_VERSION
    client: str = ""
    """Who is calling, for the log: program and pid."""
    frontend_id: bytes = b""
    """The same in all connections of one frontend, and nobody else's: by it the requests that it submits again are
    known; b"": it has one connection only."""


class Submit(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="submit"):
    """Generate one sequence. Answered by any number of `Tokens`, then one `Finished` or `Failed`."""

    request_id: RequestId
    prompt_token_ids: list[TokenId]
    sampling: SamplingSpec
    priority: int = 0
    """Lower runs earlier, under the priority policy."""
    cache_salt: str | None = None
    """Requests share cached blocks only with requests of the same salt."""
    adapter: str | None = None
    resume_output_token_ids: list[TokenId] = []
    """Tokens delivered before a restart: treated as a preempted request's outputs, never sent again."""
    stream_interval: int = 1
    """How many tokens come in one `Tokens`: the first comes at once, the others when so many are there or it ends."""
    grammar: GrammarSpec | None = None
    """What the output must be; a `Vocabulary` has been sent before."""
    is_continued: bool = False
    """True: a further part of what was accepted before, as each step of a beam search is, or what an earlier core had
    accepted. However full the queue is, it is no reason to refuse it."""


class Vocabulary(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="vocabulary"):
    """What the model's tokens stand for: sent before a frontend's first request with a grammar, never answered.

    All frontends of an engine have the same tokenizer; the core keeps the first vocabulary that it gets.
    """

    tokens: list[bytes]
    """For each token id up to the size of the model's vocabulary the bytes it adds to a text; none for an unused id."""
    special_token_ids: list[TokenId]
    """Tokens that are no text, whatever their bytes are."""


class Abort(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="abort"):
    """Stop working on these requests. Unknown or finished ids are ignored.

    Each live one still ends in a `Finished` with reason ABORT.
    """

    request_ids: list[RequestId]


class ResetPrefixCache(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="reset_prefix_cache"):
    """Forget every cached block. Result: `BoolResult`, False while blocks are in use."""


class GetStats(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="get_stats"):
    """Result: `EngineStats`."""


class GetSnapshot(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="get_snapshot"):
    """Result: `EngineSnapshot`. Made between two steps; asked for at most a few times a second."""


class StartProfile(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="start_profile"):
    """Start the torch profiler on every worker. Result: `BoolResult`; `CallFailed` if nothing can be written there."""

    directory: str


class StopProfile(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="stop_profile"):
    """Stop the profiler; one trace per worker is written to its directory. Result: `BoolResult`, or `CallFailed`."""


Utility = ResetPrefixCache | GetStats | GetSnapshot | StartProfile | StopProfile
"""The typed table of utility calls: nothing else can be called over the wire."""


class Call(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="call"):
    """A utility call; answered by one `Reply` with the same `call_id`."""

    call_id: int
    utility: Utility


Request = Connect | Submit | Vocabulary | Abort | Call
