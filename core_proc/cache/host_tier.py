"""`HostTier`: blocks in host memory that were evicted from the device, and the copies between both.

Knows no requests and no tokens. The workers own the memory: see `octavo.worker_proc.cache.host_blocks`.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence, Set
from typing import Protocol

from octavo.protocol.ids import BlockId
from octavo.protocol.steps import BlockCopy


class HostObserver(Protocol):
    """Observes which blocks are in host memory. `ContentObserver.on_cleared` reports clearing for both tiers."""

    def on_offloaded(self, block_hash: bytes) -> None:
        """A block evicted from the device is copied to host memory."""

    def on_host_removed(self, block_hash: bytes) -> None:
        """A block was evicted from host memory."""


class HostTier:
    """Host memory blocks by key. Every worker has the same ones.

    A device block is copied out before its contents are overwritten for another owner, unless the host already has
    them. Blocks stay in host memory when they are copied in again. The least recently used block is evicted to make
    room.

    Workers make the copies of a plan before its step: first all copies out, then all copies in. So until the plan is
    taken, each host block that a copy reads or writes is pinned: it cannot be evicted or reused. A host block that a
    load reads is pinned until the load has ended.

    Invariant: a host block is free, or has a key, or is pinned without a key.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_stored = 0
        """Number of blocks copied out since the start."""
        self.num_loaded = 0
        """Number of blocks copied in since the start."""
        self.has_watched_changed = False
        """True after a watched key was added or removed."""
        self.observers: list[HostObserver] = []
        self._watched: Set[bytes] = frozenset()
        self._free: list[BlockId] = list(range(num_blocks - 1, -1, -1))
        self._by_key: OrderedDict[bytes, BlockId] = OrderedDict()
        """Host block by key, the least recently used first."""
        self._pinned: set[BlockId] = set()
        self._loading: Counter[BlockId] = Counter()
        """Pin count of each block: loads in flight, and requests whose states have been loaded."""
        self._dropped: list[BlockId] = []
        """Pinned blocks without a key. They become free when they are unpinned."""
        self._copies_out: list[BlockCopy] = []
        self._copies_in: dict[BlockId, BlockId] = {}
        """Device block -> host block."""

    def __contains__(self, key: bytes) -> bool:
        return key in self._by_key

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def has_copies(self) -> bool:
        """Whether the next plan copies, so that some blocks do not yet have the contents of their keys."""
        return bool(self._copies_out or self._copies_in)

    def watch(self, keys: Set[bytes]) -> None:
        """Watch only these keys from now on; see `has_watched_changed`."""
        self._watched = keys
        self.has_watched_changed = False

    def pin(self, keys: Iterable[bytes]) -> None:
        """Pin these keys until the plan is taken. They must be in host memory."""
        for key in keys:
            self._by_key.move_to_end(key)
            self._pinned.add(self._by_key[key])

    def pin_for_load(self, keys: Sequence[bytes]) -> dict[bytes, BlockId]:
        """Pin those of these keys that are in host memory until `unpin`. Return their host blocks."""
        host = {key: host_id for key in keys if (host_id := self.hold(key)) is not None}
        self.num_loaded += len(host)
        return host

    def hold(self, key: bytes) -> BlockId | None:
        """Pin a key until `unpin`. Return its host block. Return None if it is not in host memory."""
        if (host_id := self._by_key.get(key)) is not None:
            self._by_key.move_to_end(key)
            self._loading[host_id] += 1
        return host_id

    def unpin(self, host_ids: Sequence[BlockId]) -> None:
        """Unpin these blocks after a load."""
        self._loading.subtract(host_ids)
        self._loading = +self._loading
        self._free_dropped()

    @property
    def has_room(self) -> bool:
        """Whether `reserve` would succeed."""
        return bool(self._free) or any(not self._is_pinned(host_id) for host_id in self._by_key.values())

    def reserve(self) -> BlockId | None:
        """Return a host block to be filled from elsewhere, pinned until `unpin`. Return None if all blocks are
        pinned."""
        if (host_id := self._take()) is not None:
            self._loading[host_id] += 1
            self._dropped.append(host_id)
        return host_id

    def insert_loaded(self, key: bytes, host_id: BlockId) -> None:
        """Make the contents of a reserved block available, unless the key is already in host memory."""
        if key in self._by_key:
            return
        self._dropped.remove(host_id)
        self._by_key[key] = host_id
        self.has_watched_changed |= key in self._watched
        for observer in self.observers:
            observer.on_offloaded(key)

    def on_evicted(self, block_id: BlockId, key: bytes) -> None:
        """Copy a device block out before the next step may overwrite it."""
        if key in self._by_key:
            self._by_key.move_to_end(key)
            return
        # The target of a copy in receives its contents only after all copies out.
        if block_id in self._copies_in or (host_id := self._take()) is None:
            return
        self._by_key[key] = host_id
        self._pinned.add(host_id)
        self._copies_out.append((block_id, host_id))
        self.num_stored += 1
        self.has_watched_changed |= key in self._watched
        for observer in self.observers:
            observer.on_offloaded(key)

    def copy_in(self, key: bytes, block_id: BlockId) -> None:
        """Copy a pinned block into a device block."""
        self._copies_in[block_id] = self._by_key[key]
        self.num_loaded += 1

    def take_copies(self) -> tuple[list[BlockCopy], list[BlockCopy]]:
        """Return the copies of the plan being made: out as (device, host), then in as (host, device)."""
        if not self._pinned:  # perf: most plans copy nothing
            return [], []
        copies_out, copies_in = self._copies_out, [(host_id, block_id) for block_id, host_id in self._copies_in.items()]
        self._copies_out, self._copies_in = [], {}
        self._pinned.clear()
        self._free_dropped()
        return copies_out, copies_in

    def drop(self, key: bytes) -> None:
        """Remove a key, if it is in host memory."""
        if (host_id := self._by_key.pop(key, None)) is not None:
            self._discard(host_id)
            self._on_removed(key)

    def clear(self) -> None:
        """Remove all keys. Pending copies in are still made."""
        for host_id in self._by_key.values():
            self._discard(host_id)
        self._by_key.clear()
        self.has_watched_changed = True

    def reset(self) -> None:
        """Remove all keys and copies: the workers have lost their memory."""
        self.clear()
        self._copies_out, self._copies_in = [], {}
        self._loading.clear()
        self.take_copies()
        self._free_dropped()

    def check(self, pins: Iterable[BlockId]) -> str:
        """Return what is inconsistent. Empty if nothing is.

        Args:
            pins: blocks pinned until `unpin`, once per pin.
        """
        held = [*self._free, *self._by_key.values(), *self._dropped]
        if sorted(held) != list(range(self.num_blocks)):
            return f"host blocks are lost or held twice: {len(held)} of {self.num_blocks}"
        used = {host_id for _, host_id in self._copies_out} | set(self._copies_in.values())
        if not used <= self._pinned or not set(self._dropped) <= self._pinned | set(self._loading):
            return "a host block that a copy uses is not pinned"
        if self._loading != Counter(pins):
            return f"loads keep other host blocks than are counted: {dict(self._loading)}"
        return ""

    def _discard(self, host_id: BlockId) -> None:
        (self._dropped if self._is_pinned(host_id) else self._free).append(host_id)

    def _is_pinned(self, host_id: BlockId) -> bool:
        return host_id in self._pinned or host_id in self._loading

    def _free_dropped(self) -> None:
        if self._dropped:
            self._free += [host_id for host_id in self._dropped if not self._is_pinned(host_id)]
            self._dropped = [host_id for host_id in self._dropped if self._is_pinned(host_id)]

    def _take(self) -> BlockId | None:
        """Return a block for new contents. Return None if all are pinned."""
        if self._free:
            return self._free.pop()
        key = next((key for key, host_id in self._by_key.items() if not self._is_pinned(host_id)), None)
        if key is None:
            return None
        host_id = self._by_key.pop(key)
        self._on_removed(key)
        return host_id

    def _on_removed(self, key: bytes) -> None:
        self.has_watched_changed |= key in self._watched
        for observer in self.observers:
            observer.on_host_removed(key)
