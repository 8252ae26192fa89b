"""`TenantUsage`: the usage of tenants, in memory shared by all HTTP processes of a server.

Budgets are token buckets: each refills evenly to its limit within a minute. The number of tokens of a request is known
only when it ends. So the token budget may become negative; new requests then wait until it is positive again.
"""

import contextlib
import fcntl
import hashlib
import math
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.frontend.tenants.file import MAX_TENANTS, Tenant

MAX_PROCESSES = 256
"""Upper limit of `--api-server-count`."""

WINDOW_S = 60.0

REASONS = ("requests_per_minute", "tokens_per_minute", "max_concurrent_requests")
"""Limits that reject requests; values of a label in the metrics."""

_HEAD = struct.Struct("<16sddd5q")
"""Digest of the name; budgets of requests and of tokens, and the time at which they were current; totals of requests,
prompt tokens, generated tokens, and rejections by each budget."""
_NAME_BYTES = 128 * 4
_ENTRY_BYTES = 64 * math.ceil((_HEAD.size + 8 + 2 + _NAME_BYTES + 4 * MAX_PROCESSES) / 64)
_REJECTED_BY_CONCURRENCY = _HEAD.size
_NAME = _HEAD.size + 8
_LIVE = _NAME + 2 + _NAME_BYTES


@dataclass(slots=True)
class Totals:
    """Usage of one tenant since the server started."""

    num_requests: int
    num_prompt_tokens: int
    num_generation_tokens: int
    num_rejected: dict[str, int]
    """Number of rejected requests, by limit."""
    num_live: int


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a request of a tenant cannot start now."""

    reason: str
    """One of `REASONS`."""
    retry_after_s: int


class TenantUsage:
    """Entries of tenants, found by the digest of the name. Each is changed under the lock of the file.

    Args:
        path: path of a file shared by all processes, created if missing. `None` if this is the only process.
        row: row of this process.
        clock: returns seconds; the same clock in all processes.
    """

    def __init__(self, path: Path | None = None, row: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        size = MAX_TENANTS * _ENTRY_BYTES
        self._fd = -1
        if path is None:
            self._memory: mmap.mmap = mmap.mmap(-1, size)
        else:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with self._locked():
                os.ftruncate(self._fd, size)
            self._memory = mmap.mmap(self._fd, size)
        self._row = row
        self._clock = clock
        self._starts: dict[str, int] = {}
        with self._locked():  # the requests of an earlier process of this row ended with it
            for start in range(0, size, _ENTRY_BYTES):
                if not self._is_used(start):
                    break
                self._set_live(start, 0)

    def begin(self, tenant: Tenant, *, is_retried: bool = False) -> Rejection | None:
        """Count the start of a request, to be followed by `end`. If it must not start, return the reason.

        Args:
            tenant: that sent the request.
            is_retried: the server itself will retry the request, so it does not count as rejected.
        """
        with self._locked():
            start = self._find(tenant.name)
            digest, requests, tokens, _, *totals = self._refilled(start, tenant)
            rejection = self._rejection(start, tenant, requests, tokens)
            if rejection is None:
                totals[0] += 1
                self._set_live(start, self._live_of(start, self._row) + 1)
                requests -= 1.0
            elif is_retried:
                pass
            elif rejection.reason == REASONS[2]:
                (count,) = struct.unpack_from("<q", self._memory, start + _REJECTED_BY_CONCURRENCY)
                struct.pack_into("<q", self._memory, start + _REJECTED_BY_CONCURRENCY, count + 1)
            else:
                totals[3 + REASONS.index(rejection.reason)] += 1
            _HEAD.pack_into(self._memory, start, digest, requests, tokens, self._clock(), *totals)
        return rejection

    def spend(self, tenant: Tenant, num_prompt_tokens: int, num_generation_tokens: int) -> None:
        """Count the tokens of a request."""
        with self._locked():
            start = self._find(tenant.name)
            digest, requests, tokens, now_s, *totals = self._refilled(start, tenant)
            totals[1] += num_prompt_tokens
            totals[2] += num_generation_tokens
            tokens -= num_prompt_tokens + num_generation_tokens
            _HEAD.pack_into(self._memory, start, digest, requests, tokens, now_s, *totals)

    def end(self, tenant: Tenant) -> None:
        """Count the end of a started request."""
        with self._locked():
            start = self._find(tenant.name)
            self._set_live(start, max(0, self._live_of(start, self._row) - 1))

    def totals(self) -> dict[str, Totals]:
        """Return the totals of all processes, by tenant, including tenants that have been removed from the file."""
        found = {}
        with self._locked():
            for start in range(0, len(self._memory), _ENTRY_BYTES):
                if not self._is_used(start):
                    break
                *_, requests, prompt, generated, by_requests, by_tokens = _HEAD.unpack_from(self._memory, start)
                (by_concurrency,) = struct.unpack_from("<q", self._memory, start + _REJECTED_BY_CONCURRENCY)
                rejected = dict(zip(REASONS, (by_requests, by_tokens, by_concurrency), strict=True))
                live = sum(self._live_of(start, row) for row in range(MAX_PROCESSES))
                found[self._name_of(start)] = Totals(requests, prompt, generated, rejected, live)
        return found

    def close(self) -> None:
        """Release the memory and the file."""
        self._memory.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _rejection(self, start: int, tenant: Tenant, requests: float, tokens: float) -> Rejection | None:
        if tenant.requests_per_minute is not None and requests < 1.0:
            return Rejection(REASONS[0], _wait_s(1.0 - requests, tenant.requests_per_minute))
        if tenant.tokens_per_minute is not None and tokens <= 0.0:
            return Rejection(REASONS[1], _wait_s(1.0 - tokens, tenant.tokens_per_minute))
        limit = tenant.max_concurrent_requests
        if limit is not None and sum(self._live_of(start, row) for row in range(MAX_PROCESSES)) >= limit:
            return Rejection(REASONS[2], 1)
        return None

    def _refilled(self, start: int, tenant: Tenant) -> list[Any]:
        """Return the fields of an entry (`_HEAD`), with its budgets refilled up to now."""
        digest, requests, tokens, then_s, *totals = _HEAD.unpack_from(self._memory, start)
        now_s = self._clock()
        share = 1.0 if then_s == 0.0 else min(1.0, max(0.0, now_s - then_s) / WINDOW_S)
        requests = _refill(requests, tenant.requests_per_minute, share)
        tokens = _refill(tokens, tenant.tokens_per_minute, share)
        return [digest, requests, tokens, now_s, *totals]

    def _find(self, name: str) -> int:
        """Return the offset of a tenant's entry, creating it if necessary. The lock must be held."""
        if (known := self._starts.get(name)) is not None:
            return known
        digest = hashlib.sha256(name.encode()).digest()[:16]
        for start in range(0, len(self._memory), _ENTRY_BYTES):
            if not self._is_used(start):
                encoded = name.encode()
                struct.pack_into("<H", self._memory, start + _NAME, len(encoded))
                self._memory[start + _NAME + 2 : start + _NAME + 2 + len(encoded)] = encoded
                self._memory[start : start + 16] = digest
            if self._memory[start : start + 16] == digest:
                self._starts[name] = start
                return start
        # All entries are in use by current and former names: share the last one. Its limits then apply to both names.
        return len(self._memory) - _ENTRY_BYTES

    def _is_used(self, start: int) -> bool:
        return any(self._memory[start : start + 16])

    def _name_of(self, start: int) -> str:
        (length,) = struct.unpack_from("<H", self._memory, start + _NAME)
        return self._memory[start + _NAME + 2 : start + _NAME + 2 + length].decode()

    def _live_of(self, start: int, row: int) -> int:
        return int(struct.unpack_from("<I", self._memory, start + _LIVE + 4 * row)[0])

    def _set_live(self, start: int, count: int) -> None:
        struct.pack_into("<I", self._memory, start + _LIVE + 4 * self._row, count)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the file. It is held for microseconds, without waiting for anything else."""
        if self._fd < 0:
            yield
            return
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)


def _refill(level: float, limit: int | None, share: float) -> float:
    """Return a budget refilled for a fraction of a minute. A new entry, or a newly added limit, starts full."""
    return math.inf if limit is None else min(float(limit), level + limit * share)


def _wait_s(missing: float, per_minute: int) -> int:
    """Return the number of whole seconds until a budget has refilled by `missing`."""
    return max(1, math.ceil(missing * WINDOW_S / per_minute))
