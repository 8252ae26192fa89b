"""Where the contents of evicted KV blocks are kept."""

import os

from octavo.protocol.config.engine import DeviceName, EngineConfig
from octavo.protocol.config.facts import ModelFacts
from octavo.protocol.config.kv_transfer import ResolvedKVConnector
from octavo.protocol.config.pooling import is_computed_whole
from octavo.protocol.errors import ConfigError

BLOCK_MULTIPLE = 16
"""On a CPU the cache interleaves this many tokens. Smaller blocks are not stored separately, so they cannot be
copied."""

STAGING_BYTES = 64 << 20
"""Host memory through which files are read and written, in bytes: what a disk transfers during a long step."""
MIN_STAGING_ROWS, MAX_STAGING_ROWS = 8, 4096
MIN_STATE_STAGING_ROWS = 4
"""The same for recurrent states, as a number of rows. States that become complete while all rows are in use are not
written to files."""


def num_staging_rows(row_bytes: int, at_least: int) -> int:
    """Return the number of rows, of this size, through which a worker reads and writes files of blocks or states."""
    return min(max(at_least, STAGING_BYTES // max(1, row_bytes)), MAX_STAGING_ROWS)


def offloading_bytes(config: EngineConfig, facts: ModelFacts, device: DeviceName, world_size: int) -> int:
    """Return the host memory of all workers for evicted KV blocks in bytes; 0 if there is none.

    Raises:
        ConfigError: blocks cannot be copied or could not be found again, or the size is given twice.
    """
    total, per_worker = config.cache.kv_offloading_size, config.cache.swap_space
    if total and per_worker:
        raise ConfigError(
            f"kv_offloading_size ({total:g}) and swap_space ({per_worker:g}) both set the same size",
            hint="use --kv-offloading-size only",
        )
    num_bytes = int((total + per_worker * world_size) * 2**30)
    if num_bytes:
        _check("--kv-offloading-size", config, facts, device)
    return num_bytes


def offloading_path(
    config: EngineConfig, facts: ModelFacts, device: DeviceName, connector: ResolvedKVConnector | None
) -> str:
    """Return the directory for files of KV blocks as an absolute path. Return "" if there is none.

    Raises:
        ConfigError: blocks cannot be copied or could not be found again, or a connector stores them too.
    """
    if not config.cache.kv_offloading_path:
        return ""
    if connector is not None:
        raise ConfigError(
            f"--kv-offloading-path and the connector {connector.name} of --kv-transfer-config both keep KV blocks",
            hint="use one of them; --kv-offloading-size may be added to either",
        )
    _check("--kv-offloading-path", config, facts, device)
    return os.path.abspath(os.path.expanduser(config.cache.kv_offloading_path))


def _check(flag: str, config: EngineConfig, facts: ModelFacts, device: DeviceName) -> None:
    if not config.cache.enable_prefix_caching:
        raise ConfigError(
            f"{flag} needs the prefix cache, which finds offloaded blocks",
            hint=f"leave out --no-enable-prefix-caching or {flag}",
        )
    if is_computed_whole(facts):
        raise ConfigError(
            f"{flag}: {facts.architecture} computes prompts whole and keeps no KV blocks", hint="leave it out"
        )
    if device == "cpu" and config.cache.block_size % BLOCK_MULTIPLE:
        raise ConfigError(
            f"{flag} on a CPU needs blocks of a multiple of {BLOCK_MULTIPLE} tokens, not {config.cache.block_size}",
            hint=f"use --block-size {-(-config.cache.block_size // BLOCK_MULTIPLE) * BLOCK_MULTIPLE}",
        )
