"""`--kv-transfer-config`: whether an engine hands KV blocks to others, or takes theirs, with vLLM's names."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from octavo.protocol.config.facts import ModelFacts
from octavo.protocol.config.pooling import is_computed_whole
from octavo.protocol.errors import ConfigError

KVRole: TypeAlias = Literal["kv_producer", "kv_consumer", "kv_both"]

CONNECTOR = "OctavoConnector"
"""The one connector that there is."""

ENGINE_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""It is part of the name of a socket."""

_PHASE = "configuration"
_HINT = 'use {"kv_connector": "OctavoConnector", "kv_role": "kv_both"}; docs/disaggregation.md lists the fields'
_Seconds = Annotated[float, Meta(gt=0)]


class _ExtraConfig(Struct, kw_only=True, forbid_unknown_fields=True):
    """`kv_connector_extra_config`."""

    keep_s: _Seconds = 120.0
    """Blocks that nobody has taken are dropped after so long."""
    pull_timeout_s: _Seconds = 10.0
    """An engine that is silent for so long counts as gone."""


class _KVTransferConfig(Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of vLLM's class that apply here."""

    kv_connector: str
    kv_role: KVRole
    engine_id: str | None = None
    kv_ip: str | None = None
    kv_port: Annotated[int, Meta(ge=0, le=65535)] | None = None
    kv_buffer_size: Annotated[float, Meta(gt=0)] = 4e9
    kv_load_failure_policy: Literal["recompute"] = "recompute"
    kv_connector_extra_config: _ExtraConfig = msgspec.field(default_factory=_ExtraConfig)


class ResolvedKVTransfer(Struct, frozen=True, kw_only=True):
    """What a running engine gives and takes."""

    role: KVRole
    engine_id: str
    """"": the core makes one."""
    host: str
    """Where engines of other machines fetch blocks; "": only those of this machine can."""
    port: int
    """0: any; further engines of a server add their index."""
    max_bytes: int
    """Of blocks that wait for other engines, in shared memory."""
    keep_s: float
    pull_timeout_s: float

    @property
    def gives(self) -> bool:
        """Whether requests may leave blocks for other engines."""
        return self.role != "kv_consumer"

    @property
    def takes(self) -> bool:
        """Whether requests may continue from blocks of other engines."""
        return self.role != "kv_producer"


def read_kv_transfer(setting: Mapping[str, Any] | str | None) -> ResolvedKVTransfer | None:
    """Return the configuration; None: blocks stay in their engine.

    Raises:
        ConfigError: it is not such an object.
    """
    if not setting:
        return None
    try:
        if isinstance(setting, str):
            given = msgspec.json.decode(setting, type=_KVTransferConfig)
        else:
            given = msgspec.convert(setting, _KVTransferConfig)
    except msgspec.DecodeError as error:  # also what `convert` raises
        raise _rejected(str(error)) from None
    if given.kv_connector != CONNECTOR:
        raise _rejected(f"there is no kv_connector {given.kv_connector!r}, only {CONNECTOR}")
    if given.engine_id is not None and not ENGINE_ID.fullmatch(given.engine_id):
        raise _rejected(f"engine_id {given.engine_id!r} is not made of up to 64 letters, digits, '_', '-' and '.'")
    if given.kv_port is not None and not given.kv_ip:
        raise _rejected("kv_port needs kv_ip, the address of this machine that other engines connect to")
    return ResolvedKVTransfer(
        role=given.kv_role,
        engine_id=given.engine_id or "",
        host=given.kv_ip or "",
        port=given.kv_port or 0,
        max_bytes=int(given.kv_buffer_size),
        keep_s=given.kv_connector_extra_config.keep_s,
        pull_timeout_s=given.kv_connector_extra_config.pull_timeout_s,
    )


def check_kv_transfer(
    transfer: ResolvedKVTransfer | None,
    facts: ModelFacts,
    *,
    block_multiple: int,
    block_size: int,
    has_prefix_cache: bool,
    num_nodes: int,
    is_lock_step: bool,
) -> None:
    """Reject settings under which blocks cannot leave an engine, or nothing could find those that come.

    Args:
        transfer: None: nothing is checked.
        facts: of the model.
        block_multiple: blocks of other sizes do not lie apart.
        block_size: tokens of a block.
        has_prefix_cache: whether blocks are found by content.
        num_nodes: machines of the engine.
        is_lock_step: whether engines compute their steps together.

    Raises:
        ConfigError: naming both settings.
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
    return ConfigError(f"kv_transfer_config: {message}", phase=_PHASE, hint=hint)
