"""The tenants file: a YAML file of names, keys and limits, reloaded whenever it changes."""

import hashlib
import logging
import os
import time
from pathlib import Path
from typing import Annotated

import msgspec
import yaml
from msgspec import Meta

from octavo.protocol.errors import ConfigError

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
"""Interval in seconds at which the file is checked for changes while there are requests."""

MAX_TENANTS = 1024

_Sha256 = Annotated[str, Meta(pattern="^[0-9a-fA-F]{64}$")]
_Name = Annotated[str, Meta(min_length=1, max_length=128)]
_Key = Annotated[str, Meta(min_length=1)]
_Limit = Annotated[int, Meta(ge=1)]


class Tenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tenant. A limit of `None` does not limit."""

    name: _Name = "?"
    """Name of the tenant: the key of its entry in the file."""
    api_keys: list[_Key] = []
    api_key_sha256: list[_Sha256] = []
    """SHA-256 digests of further keys, for files that must not contain the keys themselves."""
    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    """Prompt and generated tokens per minute, counted when a request ends."""
    max_concurrent_requests: _Limit | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    """Priority of all its requests, overriding their own; lower runs earlier. `None`: the requests' own."""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tenants: dict[_Name, Tenant]


def digest_of(key: str) -> bytes:
    """Return the digest of a key. Digests have equal lengths, and files may contain them instead of keys."""
    return hashlib.sha256(key.encode()).digest()


def read_tenants(path: Path, *, has_priorities: bool) -> dict[bytes, Tenant]:
    """Return the tenants by the digests of their keys.

    Args:
        path: path of the file.
        has_priorities: whether the engine schedules by priority.

    Raises:
        ConfigError: the file cannot be read or is invalid; the message names the field.
    """
    try:
        tenants = msgspec.convert(yaml.safe_load(path.read_text()), _File).tenants
    except (OSError, UnicodeDecodeError, yaml.YAMLError, msgspec.ValidationError) as error:
        raise _invalid(path, " ".join(str(error).split())) from None
    if len(tenants) > MAX_TENANTS:
        raise _invalid(path, f"there are {len(tenants)} tenants, and at most {MAX_TENANTS} are allowed")
    found: dict[bytes, Tenant] = {}
    for name, one in tenants.items():
        tenant = msgspec.structs.replace(one, name=name)
        digests = [*map(digest_of, tenant.api_keys), *map(bytes.fromhex, tenant.api_key_sha256)]
        if not digests:
            raise _invalid(path, f"tenant {name!r} has neither api_keys nor api_key_sha256")
        if tenant.priority and not has_priorities:
            raise _invalid(path, f"the priority of tenant {name!r} needs --scheduling-policy priority")
        for digest in digests:
            if found.setdefault(digest, tenant).name != name:
                raise _invalid(path, f"tenants {found[digest].name!r} and {name!r} have the same key")
    return found


def _invalid(path: Path, fault: str) -> ConfigError:
    return ConfigError(f"--tenants {path}: {fault}", hint="docs/tenants.md describes the file")


class TenantsFile:
    """The current tenants of the file. A file that has become invalid is ignored until it is fixed.

    Args:
        path: path of the file.
        has_priorities: whether the engine schedules by priority.

    Raises:
        ConfigError: as `read_tenants`.
    """

    def __init__(self, path: Path, *, has_priorities: bool) -> None:
        self._path = path
        self._has_priorities = has_priorities
        self._version = self._stat()
        self._next_check_s = time.monotonic() + CHECK_INTERVAL_S
        self._by_digest = read_tenants(path, has_priorities=has_priorities)

    @property
    def tenants(self) -> list[Tenant]:
        """All tenants, in file order."""
        return list({tenant.name: tenant for tenant in self._by_digest.values()}.values())

    def find(self, key: str) -> Tenant | None:
        """Return the tenant with this key. `None` if there is none.

        The duration depends only on the digest of the given key, so that it reveals nothing about other keys.
        """
        self._reload()
        return self._by_digest.get(digest_of(key))

    def named(self, name: str) -> Tenant | None:
        """Return the tenant with this name. `None` if there is none."""
        self._reload()
        return next((tenant for tenant in self._by_digest.values() if tenant.name == name), None)

    def _reload(self) -> None:
        if (now_s := time.monotonic()) < self._next_check_s:
            return
        self._next_check_s = now_s + CHECK_INTERVAL_S
        if (version := self._stat()) == self._version:
            return
        self._version = version
        try:
            self._by_digest = read_tenants(self._path, has_priorities=self._has_priorities)
        except ConfigError as error:
            logger.error("%s; the limits stay as they were", error.message)
        else:
            logger.info("read %s again: %d tenants", self._path, len(self.tenants))

    def _stat(self) -> tuple[int, int, int] | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino
