"""The configuration: one tree of frozen structs, in three immutable stages.

`EngineConfig` has the user's settings (None = choose for me). `resolve()` combines it with the model's facts into a
`ResolvedConfig` without open values. The core makes a `CachePlan` from the workers' measurements (`DeviceFacts`). Every
field carries its description and bounds, so `--help`, `docs/config.md` and the error messages come from this tree
alone. Flags have vLLM's names: the field name with dashes.
"""

from octavo.protocol.config.engine import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ObserveConfig,
    RecoveryConfig,
    RemoteConfig,
    SchedulerConfig,
    StructuredConfig,
)
from octavo.protocol.config.facts import CacheGroupSpec, CachePlan, DeviceFacts, ModelFacts
from octavo.protocol.config.model import ModelConfig
from octavo.protocol.config.parallel import ParallelConfig
from octavo.protocol.config.resolve import resolve
from octavo.protocol.config.resolved import ResolvedConfig
from octavo.protocol.config.server import ServerConfig

__all__ = [
    "CacheConfig",
    "CacheGroupSpec",
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
