"""`--kv-transfer-config`: whether an engine sends KV blocks to others or receives theirs, with vLLM's names."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from octavo.protocol.config.facts import ModelFacts
from octavo.protocol.config.pooling import is_computed_whole
from octavo.protocol.errors import ConfigError

KVRole: TypeAlias = Literal["kv_producer", "kv_consumer", "kv_both"]

CONNECTOR = "OctavoConnector"
"""The connector between octavo engines."""

ENGINE_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""Valid engine ids. An id becomes part of a socket name."""

DEFAULT_BUFFER_BYTES = 4e9
"""vLLM's `kv_buffer_size`."""

_HINT = 'use {"kv_connector": "OctavoConnector", "kv_role": "kv_both"}; docs/disaggregation.md lists the fields'
_EXTRA = "kv_connector_extra_config"
_T = TypeVar("_T")
_INSTEAD = {
    "NixlConnector NixlPullConnector NixlPushConnector P2pNcclConnector MooncakeConnector MoRIIOConnector": (
        f"{CONNECTOR} moves blocks between engines, with the same kv_role and kv_transfer_params"
    ),
    "MooncakeStoreConnector HF3FSKVConnector FlexKVConnectorV1 LMCacheConnectorV1 LMCacheMPConnector": (
        "--kv-offloading-size and --kv-offloading-path keep blocks in host memory and in files; other stores need a "
        "connector of their own (kv_connector_module_path, docs/kv-connectors.md)"
    ),
    "MultiConnector": (
        f"--kv-offloading-size, --kv-offloading-path and {CONNECTOR} work together, each with its own setting"
    ),
    "HiSparseConnector": "--kv-offloading-size keeps evicted blocks in host memory",
    "DecodeBenchConnector": "octavo bench measures an engine with real prompts",
    "ExampleHiddenStatesConnector": "hidden states do not leave an engine",
}
"""What to use instead of vLLM's connectors, by their names."""
_Seconds = Annotated[float, Meta(gt=0)]


class _ExtraConfig(Struct, kw_only=True, forbid_unknown_fields=True):
    """`kv_connector_extra_config`."""

    keep_s: _Seconds = 120.0
    """Seconds after which blocks that were not fetched are dropped."""
    pull_timeout_s: _Seconds = 10.0
    """Seconds without a response after which an engine counts as dead."""


class KVTransferFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of vLLM's class that apply here."""

    kv_connector: str
    kv_role: KVRole
    engine_id: str | None = None
    kv_ip: str | None = None
    kv_port: Annotated[int, Meta(ge=0, le=65535)] | None = None
    kv_buffer_size: Annotated[float, Meta(gt=0)] | None = None
    kv_load_failure_policy: Literal["recompute"] = "recompute"
    kv_connector_extra_config: dict[str, Any] = {}
    kv_connector_module_path: str | None = None


class ResolvedKVConnector(Struct, frozen=True, kw_only=True):
    """User code that stores KV blocks: see `octavo.protocol.kv_connector`."""

    name: str
    """Name of the class."""
    module_path: str
    """Path of its module."""
    role: KVRole
    extra_config: dict[str, Any] = {}

    @property
    def saves(self) -> bool:
        """Whether blocks are saved to it."""
        return self.role != "kv_consumer"

    @property
    def loads(self) -> bool:
        """Whether blocks are loaded from it."""
        return self.role != "kv_producer"


class ResolvedKVTransfer(Struct, frozen=True, kw_only=True):
    """What a running engine sends and receives."""

    role: KVRole
    engine_id: str
    """Empty if the core creates one."""
    host: str
    """Where engines on other machines fetch blocks. Empty if only engines on this machine can."""
    port: int
    """0 for any port. Additional engines of a server add their index."""
    max_bytes: int
    """Limit for blocks that wait for other engines, in shared memory."""
    keep_s: float
    pull_timeout_s: float

    @property
    def is_producer(self) -> bool:
        """Whether requests may leave blocks for other engines."""
        return self.role != "kv_consumer"

    @property
    def is_consumer(self) -> bool:
        """Whether requests may continue from blocks of other engines."""
        return self.role != "kv_producer"


def read_kv_transfer(setting: Mapping[str, Any] | str | None) -> ResolvedKVTransfer | None:
    """Return the configuration of transfers between engines. Return None if there are none.

    Raises:
        ConfigError: the setting is not such an object.
    """
    given = read_fields(setting)
    if given is None or given.kv_connector_module_path:
        return None
    if given.kv_connector != CONNECTOR:
        raise _rejected(_reason_against(given.kv_connector))
    extra = _convert(given.kv_connector_extra_config, _ExtraConfig)
    if given.engine_id is not None and not ENGINE_ID.fullmatch(given.engine_id):
        raise _rejected(f"engine_id {given.engine_id!r} is not made of up to 64 letters, digits, '_', '-' and '.'")
    if given.kv_port is not None and not given.kv_ip:
        raise _rejected("kv_port needs kv_ip, the address of this machine that other engines connect to")
    return ResolvedKVTransfer(
        role=given.kv_role,
        engine_id=given.engine_id or "",
        host=given.kv_ip or "",
        port=given.kv_port or 0,
        max_bytes=int(given.kv_buffer_size or DEFAULT_BUFFER_BYTES),
        keep_s=extra.keep_s,
        pull_timeout_s=extra.pull_timeout_s,
    )


def read_kv_connector(setting: Mapping[str, Any] | str | None) -> ResolvedKVConnector | None:
    """Return the user's connector. Return None if there is none.

    Raises:
        ConfigError: the setting is not such an object, or has fields that do not apply to a connector.
    """
    given = read_fields(setting)
    if given is None or not given.kv_connector_module_path:
        return None
    require_unset(given, ("engine_id", "kv_ip", "kv_port", "kv_buffer_size"), f"put it into {_EXTRA}")
    return ResolvedKVConnector(
        name=given.kv_connector,
        module_path=given.kv_connector_module_path,
        role=given.kv_role,
        extra_config=given.kv_connector_extra_config,
    )


def read_fields(setting: Mapping[str, Any] | str | None) -> KVTransferFields | None:
    """Return the given fields. Return None if there is no setting.

    Raises:
        ConfigError: the setting is not such an object.
    """
    if not setting:
        return None
    try:
        given = msgspec.json.decode(setting) if isinstance(setting, str) else setting
    except msgspec.DecodeError as error:
        raise _rejected(str(error)) from None
    return _convert(given, KVTransferFields)


def require_unset(given: KVTransferFields, names: Sequence[str], hint: str) -> None:
    """Reject fields that do not apply to a connector.

    Raises:
        ConfigError: one of `names` was given.
    """
    for name in names:
        if getattr(given, name) is not None:
            raise _rejected(f"{name} has no meaning for {given.kv_connector}", hint)


def _convert(given: Any, kind: type[_T]) -> _T:
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise _rejected(str(error)) from None


def _reason_against(name: str) -> str:
    """Return why there is no connector of this name. For vLLM's connectors, name the equivalent here."""
    for names, instead in _INSTEAD.items():
        if name in names.split():
            return f"there is no {name}: {instead}"
    return f"there is no kv_connector {name!r}, and no kv_connector_module_path says where it is"


def check_kv_transfer(
    transfer: ResolvedKVTransfer | ResolvedKVConnector | None,
    facts: ModelFacts,
    *,
    block_multiple: int,
    block_size: int,
    has_prefix_cache: bool,
    num_nodes: int,
    is_lock_step: bool,
) -> None:
    """Reject settings under which blocks cannot be sent, or received blocks could not be found in the cache.

    Args:
        transfer: the configuration. If None, nothing is checked.
        facts: facts of the model.
        block_multiple: block sizes must be multiples of this, because other blocks are not stored separately.
        block_size: tokens per block.
        has_prefix_cache: whether blocks are found by their keys.
        num_nodes: number of machines of the engine.
        is_lock_step: whether engines share their steps.

    Raises:
        ConfigError: names both settings.
    """
    if transfer is None:
        return
    if is_computed_whole(facts) or facts.pooling is not None:
        raise _rejected(f"{facts.architecture} generates nothing from its KV blocks", "leave it out")
    if not has_prefix_cache:
        raise _rejected("it needs the prefix cache, which finds blocks", "leave out --no-enable-prefix-caching")
    if block_size % block_multiple:
        raise _rejected(
            f"blocks have {block_size} tokens, and need a multiple of {block_multiple}",
            f"use --block-size {-(-block_size // block_multiple) * block_multiple}",
        )
    if num_nodes > 1 or is_lock_step:
        raise _rejected(
            "workers on several machines, or of engines that divide the experts, do not exchange blocks",
            "leave it out, or use one machine without --enable-expert-parallel",
        )


def _rejected(message: str, hint: str = _HINT) -> ConfigError:
    return ConfigError(f"kv_transfer_config: {message}", hint=hint)
