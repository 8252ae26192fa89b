"""`KVEventPublisher`: publishes changes of the prefix cache in vLLM's format, for external routers.

A message has three frames: topic, sequence number (8 bytes, big-endian) and batch. Replayed batches have the same
frames. A batch is a msgpack array of time, events and engine index. Events are maps whose type is under `type`. The
reference is vLLM 0.32 (vllm/distributed/kv_events.py).
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from octavo.core_proc.cache.groups import CacheGroups
from octavo.core_proc.cache.prefix import PrefixCache
from octavo.core_proc.request import Request
from octavo.core_proc.scheduler.delivery import ClientEvent
from octavo.core_proc.scheduler.stop import FinishCause
from octavo.protocol.config.kv_events import KVEventsConfig, endpoint_of_engine
from octavo.protocol.errors import StartupError
from octavo.protocol.ids import BlockId
from octavo.protocol.log import LimitedLog
from octavo.protocol.prefix_hash import HASH_BYTES

logger = logging.getLogger(__name__)

_QUEUE = "inproc://kv-events"
_END = (-1).to_bytes(8, "big", signed=True)
_RETRY_MS = 100
_OWN_HOSTS = ("*", "::", "ipc://", "127.0.0.1", "localhost")
"""Endpoints that contain one of these are bound; all others are connected."""
_MEDIUM = "GPU"
"""vLLM's name for the memory that the model reads; also used on CPUs."""
_HOST_MEDIUM = "CPU"
"""vLLM's name for the memory that keeps evicted blocks."""


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Consecutive blocks of a sequence, or a recurrent state after a block, can now be found in the cache.

    For host memory, only the fields are set that vLLM's offloading sets by default: hash, medium and group. The tokens
    were in the event for the first medium.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    """What the hash of each block depends on besides its tokens and its parent."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Blocks can no longer be found in the cache."""

    block_hashes: list[int]
    medium: str
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """No block can be found in the cache any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The changes since the last batch, in order."""

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int | None = None


class KVEventPublisher:
    """Observes a cache and publishes its changes after each step, as a `StepHook`.

    A checkpoint of a recurrent state counts as a block of its group, as in vLLM. It has the hash of the last block
    before it, and the tokens since the previous multiple of the checkpoint interval, whose hash is its parent.

    A thread sends the batches and handles replay requests. The step loop never waits for it: if too many batches are
    queued, later ones are dropped, which subscribers notice from the sequence number.

    Args:
        context: the ZeroMQ context. `term` ends the thread.
        config: where to publish.
        engine_index: index of this engine.
        groups: the cache groups.
        is_replacement: whether an earlier core may still use the addresses. They are bound once it has exited.

    Raises:
        StartupError: an address cannot be bound.
    """

    wake_fds: Sequence[int] = ()

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        config: KVEventsConfig,
        engine_index: int,
        groups: CacheGroups,
        *,
        is_replacement: bool,
    ) -> None:
        self._engine_index = engine_index
        self._block_size = groups.block_size
        self._specs: list[tuple[str, int | None]] = [("full_attention", None)] * groups.num_groups
        for group in groups.windowed:
            kind = "chunked_local_attention" if group.is_chunked else "sliding_window"
            self._specs[group.index] = kind, group.window
        if groups.state is not None:
            self._specs.append(("mamba", None))
        self._interval = groups.state.interval if groups.state is not None else 0
        self._events: list[KVEvent] = []
        self._last_stored: tuple[BlockStored, Request, int, int] | None = None
        """The latest event from `on_stored`, with its request, its group and the index after its last block."""
        self._sequence = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._drops = LimitedLog(logger)
        self._queue = context.socket(zmq.PUSH)
        self._queue.sndhwm = config.max_queue_size
        self._queue.bind(_QUEUE)
        sender = _Sender(context, config, engine_index)
        try:
            sender.open(is_replacement=is_replacement)
        except StartupError:
            sender.close()
            self.close()
            raise
        threading.Thread(target=sender.run, name="KV events", daemon=True).start()

    def observe(self, cache: PrefixCache) -> None:
        """Publish all changes of a cache from now on, including its states and host memory."""
        cache.add_observer(self)
        if cache.states is not None:
            cache.states.add_observer(self)
        for tier in cache.host_tiers:
            tier.observers.append(self)

    def on_stored(self, request: Request, index: int, group: int) -> None:
        """See `CacheObserver`."""
        event, last = self._stored(request, index, index + 1, group), self._last_stored
        if last is not None and last[0] is self._events[-1] and last[1:] == (request, group, index):
            stored, event = event, last[0]
            event.block_hashes += stored.block_hashes
            event.token_ids += stored.token_ids
            assert event.extra_keys is not None and stored.extra_keys is not None
            event.extra_keys += stored.extra_keys
        else:
            self._events.append(event)
        self._last_stored = event, request, group, index + 1

    def on_state_stored(self, request: Request, num_blocks: int, slot: BlockId, *, is_computed: bool) -> None:
        """See `StateObserver`."""
        num_tokens = num_blocks * self._block_size
        start = (num_tokens - 1) // self._interval * self._interval
        self._events.append(self._stored(request, start // self._block_size, num_blocks, len(self._specs) - 1))

    def _stored(self, request: Request, first: int, end: int, group: int) -> BlockStored:
        """Return the event for the key of block `end - 1` in `group`, with the tokens of blocks `first` to `end`."""
        kind, window = self._specs[group]
        start, stop = first * self._block_size, end * self._block_size
        extra_keys = tuple(key.value for key in request.extra_keys if start <= key.position < stop)
        return BlockStored(
            block_hashes=[_short(request.block_hashes[end - 1])],
            parent_block_hash=_short(request.block_hashes[first - 1]) if first else None,
            token_ids=request.token_ids[start:stop].tolist(),
            block_size=stop - start,
            lora_id=None,
            medium=_MEDIUM,
            lora_name=request.adapter.name if request.adapter else None,
            extra_keys=[extra_keys or None],
            group_idx=group,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
        )

    def on_removed(self, block_hash: bytes) -> None:
        """See `ContentObserver`."""
        self._remove(block_hash, _MEDIUM)

    def on_offloaded(self, block_hash: bytes) -> None:
        """See `HostObserver`."""
        self._events.append(
            BlockStored(
                block_hashes=[_short(block_hash)],
                parent_block_hash=None,
                token_ids=[],
                block_size=0,
                lora_id=None,
                medium=_HOST_MEDIUM,
                lora_name=None,
                group_idx=_group(block_hash),
            )
        )

    def on_host_removed(self, block_hash: bytes) -> None:
        """See `HostObserver`."""
        self._remove(block_hash, _HOST_MEDIUM)

    def _remove(self, block_hash: bytes, medium: str) -> None:
        group = _group(block_hash)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and (last.medium, last.group_idx) == (medium, group):
            last.block_hashes.append(_short(block_hash))
        else:
            self._events.append(BlockRemoved([_short(block_hash)], medium, group))

    def on_cleared(self) -> None:
        """See `ContentObserver`."""
        if not (self._events and isinstance(self._events[-1], AllBlocksCleared)):  # each pool reports it
            self._events.append(AllBlocksCleared())

    def on_step(self) -> list[ClientEvent]:
        """Publish the changes since the last call."""
        if not self._events:
            return []
        batch = self._encoder.encode(KVEventBatch(time.time(), self._events, self._engine_index))
        self._events, self._last_stored = [], None
        sequence, self._sequence = self._sequence.to_bytes(8, "big"), self._sequence + 1
        try:
            self._queue.send_multipart((sequence, batch), zmq.DONTWAIT)
        except zmq.Again:
            self._drops.warning("batch %d of KV events is dropped: too many wait to be published", self._sequence - 1)
        return []

    def finish_cause(self, request: Request, cause: FinishCause) -> FinishCause:
        """Return `cause`."""
        return cause

    def close(self) -> None:
        """Stop publishing. The thread ends with the context."""
        self._queue.close(linger=0)


class _Sender:
    """The thread of a `KVEventPublisher`."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", config: KVEventsConfig, engine_index: int) -> None:
        self._topic = config.topic.encode()
        self._buffer: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._queue, self._publisher = context.socket(zmq.PULL), context.socket(zmq.PUB)
        self._replayer = context.socket(zmq.ROUTER) if config.replay_endpoint is not None else None
        self._queue.rcvhwm = 1
        self._queue.connect(_QUEUE)
        self._publisher.sndhwm = config.hwm
        self._closed = [(self._publisher, endpoint_of_engine(config.endpoint, engine_index))]
        """Sockets that are not yet bound or connected."""
        if self._replayer is not None:
            assert config.replay_endpoint is not None
            self._replayer.sndhwm = 0  # no limit: replayed batches are in memory anyway
            self._closed.append((self._replayer, endpoint_of_engine(config.replay_endpoint, engine_index)))

    def open(self, *, is_replacement: bool) -> None:
        """Bind or connect the sockets. A replacement skips those whose address is still in use.

        Raises:
            StartupError: an address cannot be used.
        """
        closed, self._closed = self._closed, []
        for socket, endpoint in closed:
            try:
                if socket is self._replayer or any(part in endpoint for part in _OWN_HOSTS):
                    socket.bind(endpoint)
                else:
                    socket.connect(endpoint)
            except zmq.ZMQError as error:
                if is_replacement and error.errno == zmq.EADDRINUSE:
                    self._closed.append((socket, endpoint))
                    continue
                raise StartupError(
                    f"kv_events_config: {endpoint}: {error}",
                    phase="binding sockets",
                    hint="choose another endpoint, or stop the process that listens there",
                ) from None

    def run(self) -> None:
        """Publish until the context ends."""
        poller = zmq.Poller()
        poller.register(self._queue, zmq.POLLIN)
        if self._replayer is not None:
            poller.register(self._replayer, zmq.POLLIN)
        try:
            while True:
                ready = poller.poll(_RETRY_MS if self._closed else None)
                if self._closed:
                    self.open(is_replacement=True)
                for socket, _ in ready:
                    if socket is self._queue:
                        sequence, batch = self._queue.recv_multipart()
                        self._buffer.append((sequence, batch))
                        self._publisher.send_multipart((self._topic, sequence, batch))
                    else:
                        self._replay(socket)
        except zmq.ContextTerminated:
            pass
        finally:
            self.close()

    def close(self) -> None:
        """Close all sockets."""
        for socket in filter(None, (self._queue, self._publisher, self._replayer)):
            socket.close(linger=0)

    def _replay(self, replayer: "zmq.Socket[bytes]") -> None:
        """Send all batches from a sequence number on, then an empty one with number -1."""
        client, *frames = replayer.recv_multipart()
        if len(frames) != 2 or len(frames[1]) != len(_END):
            logger.warning("ignored a replay request for KV events: expected a sequence number of %d bytes", len(_END))
            return
        for sequence, batch in list(self._buffer):
            if sequence >= frames[1]:
                replayer.send_multipart((client, b"", self._topic, sequence, batch))
        replayer.send_multipart((client, b"", b"", _END, b""))


def _group(block_hash: bytes) -> int:
    """Return the cache group of a block key."""
    return int.from_bytes(block_hash[HASH_BYTES:], "big")


def _short(block_hash: bytes) -> int:
    """Return the last 8 bytes of a hash as an integer, as vLLM does by default."""
    return int.from_bytes(block_hash[HASH_BYTES - 8 : HASH_BYTES], "big")
