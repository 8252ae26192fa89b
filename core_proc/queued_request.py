"""`QueuedRequest`: a request that has not started, in little memory: 100,000 of them may wait.

Admission unpacks a request into a `Request` when it is among the first of the queue.
"""

import functools
import struct
from typing import ClassVar

import msgspec

from octavo.core_proc.request import Request, RequestState
from octavo.core_proc.request_map import RequestKey
from octavo.protocol.adapters import Adapter
from octavo.protocol.ids import ID_BYTES, RequestId, pack_ids, unpack_ids
from octavo.protocol.params import RequestParams, SamplingSpec
from octavo.protocol.requests import Submit

_HEAD = struct.Struct("<dQQ")
"""When the request was queued, its seed and its `max_tokens`. The token ids of the prompt follow."""

_MAX_SHARED = 1024
_MAX_SHARED_BYTES = 4096
"""Larger parameters are not kept for later requests: with long lists of tokens they would take too much memory."""


class SharedFields(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The fields of a request that are the same in many: one object for all of them."""

    client: bytes
    params: RequestParams
    """Sampling parameters with a made-up seed and `max_tokens`, which differ between requests; or others."""
    cache_salt: str | None
    adapter: Adapter | None
    stream_interval: int


_decoder = msgspec.msgpack.Decoder(SharedFields)


@functools.lru_cache(maxsize=_MAX_SHARED)
def _shared_fields(encoded: bytes) -> SharedFields:
    # Keyed by the encoded form, because 0.0 == -0.0 and 1 == True.
    return _decoder.decode(encoded)


class QueuedRequest(msgspec.Struct, gc=False, eq=False, frozen=True):
    """A request that waits and has no outputs, no grammar, no prompt embeddings, no media and no blocks for others.

    Has the attributes of a `Request` that others read.
    """

    shared: SharedFields
    request_id: RequestId
    order: int
    """Its unique position among all requests."""
    packed: bytes

    state: ClassVar[RequestState] = RequestState.WAITING
    needs_step_input: ClassVar[bool] = False
    kv_transfer: ClassVar[None] = None
    num_known_outputs: ClassVar[int] = 0
    num_computed_tokens: ClassVar[int] = 0
    num_in_flight: ClassVar[int] = 0
    num_pending_tokens: ClassVar[int] = 0
    num_cached_tokens: ClassVar[int] = 0
    num_preemptions: ClassVar[int] = 0
    block_ids: ClassVar[tuple[()]] = ()
    num_blocks: ClassVar[int] = 0
    time_scheduled: ClassVar[float] = 0.0
    time_first_token: ClassVar[float] = 0.0

    @property
    def client(self) -> bytes:
        """The frontend's identity."""
        return self.shared.client

    @property
    def key(self) -> RequestKey:
        """Name of the request in this core."""
        return (self.shared.client, self.request_id)

    @property
    def adapter(self) -> Adapter | None:
        """Its LoRA adapter."""
        return self.shared.adapter

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return (len(self.packed) - _HEAD.size) // ID_BYTES

    @property
    def max_tokens(self) -> int:
        """Most outputs that the caller wants."""
        max_tokens: int = _HEAD.unpack_from(self.packed)[2]
        return max_tokens

    @property
    def time_queued(self) -> float:
        """When it was submitted, on the scheduler's clock."""
        time_queued: float = _HEAD.unpack_from(self.packed)[0]
        return time_queued

    def unpack(self) -> Request:
        """Return the same request in the form in which it can run."""
        time_queued, seed, max_tokens = _HEAD.unpack_from(self.packed)
        shared = self.shared
        submit = Submit(
            self.request_id,
            unpack_ids(memoryview(self.packed)[_HEAD.size :]),
            _with_own(shared.params, seed, max_tokens),
            cache_salt=shared.cache_salt,
            adapter=shared.adapter,
            stream_interval=shared.stream_interval,
        )
        return Request(shared.client, submit, self.order, time_queued)


LiveRequest = Request | QueuedRequest


def make_request(client: bytes, submit: Submit, order: int, now: float) -> LiveRequest:
    """Return a new request, packed if possible. Its parameters have been checked."""
    is_plain = submit.grammar is None and submit.prompt_embeds is None and submit.kv_transfer is None
    if not is_plain or submit.media or submit.resume_output_token_ids:
        return Request(client, submit, order, now)
    params, seed, max_tokens = submit.params, 0, 1
    if isinstance(params, SamplingSpec):
        seed, max_tokens = params.seed, params.max_tokens
    shared = SharedFields(
        client,
        _with_own(params, 0, 1),
        submit.cache_salt,
        submit.adapter,
        submit.stream_interval,
    )
    encoded = msgspec.msgpack.encode(shared)
    if len(encoded) <= _MAX_SHARED_BYTES:
        shared = _shared_fields(encoded)
    packed = _HEAD.pack(now, seed, max_tokens) + pack_ids(submit.prompt_token_ids)
    return QueuedRequest(shared, submit.request_id, order, packed)


def _with_own(params: RequestParams, seed: int, max_tokens: int) -> RequestParams:
    """Return parameters with what differs between the requests of a client."""
    if not isinstance(params, SamplingSpec):
        return params
    return msgspec.structs.replace(params, seed=seed, max_tokens=max_tokens)
