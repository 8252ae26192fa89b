"""Calls of a scheduler as messages: the entries of a recording."""

import msgspec

from octavo.protocol import PROTOCOL_VERSION
from octavo.protocol.config import CachePlan, ResolvedConfig
from octavo.protocol.ids import BlockId, IdArray, RequestId
from octavo.protocol.requests import Submit
from octavo.protocol.steps import StepPlan, StepResult


class Opened(msgspec.Struct, array_like=True, frozen=True, tag="opened"):
    """The first entry: how the scheduler was created."""

    config: ResolvedConfig
    cache_plan: CachePlan
    version: int = PROTOCOL_VERSION
    """Protocol version of the messages in the file."""


class Submitted(msgspec.Struct, array_like=True, frozen=True, tag="submitted"):
    """`submit` was called."""

    client: bytes
    submit: Submit


class Aborted(msgspec.Struct, array_like=True, frozen=True, tag="aborted"):
    """`abort` was called."""

    client: bytes
    request_ids: list[RequestId]


class Ended(msgspec.Struct, array_like=True, frozen=True, tag="ended"):
    """`conclude`, `reject` or `fail` was called. Later plans do not depend on which one."""

    client: bytes
    request_id: RequestId


class CacheReset(msgspec.Struct, array_like=True, frozen=True, tag="cache_reset"):
    """`reset_prefix_cache` was called."""


class BlocksTaken(msgspec.Struct, array_like=True, frozen=True, tag="blocks_taken"):
    """`take_blocks` was called."""

    client: bytes
    submit: Submit
    keys: list[bytes]


class WorkersLost(msgspec.Struct, array_like=True, frozen=True, tag="workers_lost"):
    """`lose_workers` was called."""


class Restricted(msgspec.Struct, array_like=True, frozen=True, tag="restricted"):
    """`restrict` was called."""

    keys: list[tuple[bytes, RequestId]] | None


class WeightsSet(msgspec.Struct, array_like=True, frozen=True, tag="weights_set"):
    """`set_weights` was called."""

    version: int
    recomputes: bool


class Planned(msgspec.Struct, array_like=True, frozen=True, tag="planned"):
    """`plan` was called and returned this plan."""

    plan: StepPlan | None


class Committed(msgspec.Struct, array_like=True, frozen=True, tag="committed"):
    """`commit` was called."""

    result: StepResult


class Drafted(msgspec.Struct, array_like=True, frozen=True, tag="drafted"):
    """`draft` was called."""

    draft_tokens: list[tuple[bytes, RequestId, IdArray]]
    """Client, request id and draft tokens of each request."""


class LoadFinished(msgspec.Struct, array_like=True, frozen=True, tag="load_finished"):
    """`finish_load` was called."""

    number: int
    missing: list[BlockId]
    elapsed_s: float = 0.0
    missing_states: list[BlockId] = []


class FilesChanged(msgspec.Struct, array_like=True, frozen=True, tag="files_changed"):
    """`change_files` was called."""

    added: list[bytes]
    removed: list[bytes]


LogEntry = (
    Opened
    | Submitted
    | Aborted
    | Ended
    | CacheReset
    | BlocksTaken
    | WorkersLost
    | Restricted
    | WeightsSet
    | Planned
    | Committed
    | LoadFinished
    | FilesChanged
    | Drafted
)
