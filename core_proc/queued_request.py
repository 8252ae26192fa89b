"""`QueuedRequest`: a compact form of a request that has not started. 100,000 of them may wait.

Admission unpacks a queued request into a `Request` when it is among the first of the queue.
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
"""Time of queueing, seed and `max_tokens`. The token ids of the prompt follow."""

_MAX_SHARED = 1024
_MAX_SHARED_BYTES = 4096
"""Larger parameters are not shared with later requests: with long lists of tokens the cache would need too much
memory."""


class SharedFields(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Fields with the same values in many requests: all these requests share one object."""

    client: bytes
    params: RequestParams
    """For sampling, `seed` and `max_tokens` are placeholders, because they differ between requests."""
    cache_salt: str | None
    adapter: Adapter | None
    stream_interval: int


_decoder = msgspec.msgpack.Decoder(SharedFields)


@functools.lru_cache(maxsize=_MAX_SHARED)
def _shared_fields(encoded: bytes) -> SharedFields:
    # The key is the encoded form, because 0.0 == -0.0 and 1 == True.
    return _decoder.decode(encoded)


class QueuedRequest(msgspec.Struct, gc=False, eq=False, frozen=True):
    """A waiting request without outputs, grammar, prompt embeddings, media or KV transfer.

    It has the attributes of a `Request` that other modules read.
    """

    shared: SharedFields
    request_id: RequestId
    order: int
    """Unique position among all requests."""
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
        """Key of the request in this core."""
        return (self.shared.client, self.request_id)

    @property
    def adapter(self) -> Adapter | None:
        """LoRA adapter of the request."""
        return self.shared.adapter

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens."""
        return (len(self.packed) - _HEAD.size) // ID_BYTES

    @property
    def max_tokens(self) -> int:
        """Most outputs that the caller wants."""
        max_tokens: int = _HEAD.unpack_from(self.packed)[2]
        return max_tokens

    @property
    def time_queued(self) -> float:
        """When the request was submitted, on the scheduler's clock."""
        time_queued: float = _HEAD.unpack_from(self.packed)[0]
        return time_queued

    def unpack(self) -> Request:
        """Return the same request in the form that can run."""
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
    """Return a new request, packed if possible. The parameters must have been checked."""
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
    """Return parameters with this seed and this `max_tokens`. Pooling parameters are returned unchanged."""
    if not isinstance(params, SamplingSpec):
        return params
    return msgspec.structs.replace(params, seed=seed, max_tokens=max_tokens)
