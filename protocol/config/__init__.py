"""The configuration: one tree of frozen structs, in three values that never change.

`EngineConfig` is what the user said (None = choose for me); `resolve()` turns it, with the model's
facts, into a `ResolvedConfig` with nothing left open; the core makes a `CachePlan` from what the
workers measured (`DeviceFacts`). Every field carries its description and bounds, so `--help`,
`docs/config.md` and the error messages come from this tree alone. Flags are vLLM's names: the field
name with dashes.
"""

from octavo.protocol.config.engine import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    ObserveConfig,
    ParallelConfig,
    RecoveryConfig,
    RemoteConfig,
    SchedulerConfig,
    StructuredConfig,
)
from octavo.protocol.config.facts import CachePlan, DeviceFacts, ModelFacts
from octavo.protocol.config.resolve import ResolvedConfig, resolve
from octavo.protocol.config.server import ServerConfig

__all__ = [
    "CacheConfig",
    "CachePlan",
    "DeviceConfig",
    "DeviceFacts",
    "EngineConfig",
    "ModelConfig",
    "ModelFacts",
    "ObserveConfig",
    "ParallelConfig",
    "RecoveryConfig",
    "RemoteConfig",
    "ResolvedConfig",
    "SchedulerConfig",
    "ServerConfig",
    "StructuredConfig",
    "resolve",
]
