"""Creates the `KVConnector` of an engine, with its sockets and threads."""

import hashlib
import secrets
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import zmq

from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.core_proc.transfer.base import NoConnector, RequestConnector
from octavo.core_proc.transfer.connector import KVConnector
from octavo.core_proc.transfer.offers import Offers
from octavo.core_proc.transfer.puller import Puller
from octavo.core_proc.transfer.server import TransferServer
from octavo.core_proc.transfer.sockets import local_address, remove_dead_sockets, socket_directory
from octavo.core_proc.workers.commands import CommandExecutor
from octavo.protocol.config import CachePlan, DeviceFacts, ResolvedConfig
from octavo.protocol.control import CoreSpec
from octavo.protocol.curve import Authenticator, GroupKeys
from octavo.protocol.env import Env


# long: one part after another
def open_connector(
    spec: CoreSpec,
    plan: CachePlan,
    facts: Sequence[DeviceFacts],
    scheduler: Scheduler,
    workers: CommandExecutor,
    *,
    identity: Callable[[], str],
    may_load: Callable[[], bool],
) -> RequestConnector:
    """Return the connector of an engine: `NoConnector` if it exchanges no blocks.

    Args:
        spec: spec of the core.
        plan: cache plan.
        facts: device facts of the workers.
        scheduler: holds the cache.
        workers: copy blocks.
        identity: returns the current identity of the engine.
        may_load: see `KVConnector`.

    Raises:
        ConfigError: other machines can reach the address, but there are no keys.
        StartupError: a socket cannot be bound.
    """
    config = spec.config
    transfer = config.kv_transfer
    if transfer is None:
        return NoConnector()
    env = Env.read()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()  # its sockets have separate keys
    directory = socket_directory(env.runtime_dir)
    remove_dead_sockets(directory)
    shared = Path(spec.weights_dir or spec.run_dir)
    if not spec.replaced_epoch:  # otherwise a core that still runs has files there
        for left in shared.glob("kv-*"):
            shutil.rmtree(left, ignore_errors=True)
    folder = shared / f"kv-{spec.epoch}"
    folder.mkdir(mode=0o700)
    suffix = f"_dp{config.engine_index}" if config.engine_index else ""
    engine_id = transfer.engine_id + suffix if transfer.engine_id else secrets.token_hex(8)
    group = GroupKeys.of(config.group_secret_key_file, env.group_secret_key)
    num_ranks = config.world_size
    offers = Offers(num_ranks, transfer.max_bytes)
    server = puller = None
    if transfer.is_producer:
        addresses = [local_address(directory, engine_id)]
        if transfer.host:
            port = str(transfer.port + config.engine_index) if transfer.port else "*"
            addresses.append(f"tcp://{transfer.host}:{port}")
            if group is not None:
                Authenticator(context, group.server.clients)
        keys = None if group is None else group.server
        server = TransferServer(context, addresses, keys, offers, is_replacement=bool(spec.replaced_epoch))
    if transfer.is_consumer:
        client_keys = None if group is None else group.client
        puller = Puller(context, directory, folder, num_ranks, client_keys, transfer.pull_timeout_s)
    layout = _layout(config, plan, facts)
    return KVConnector(
        transfer,
        engine_id,
        folder,
        scheduler,
        workers,
        offers,
        server,
        puller,
        context,
        fingerprint=lambda: f"{identity()}-{layout}",
        may_load=may_load,
        block_bytes=sum(fact.kv_block_bytes for fact in facts),
        state_bytes=sum(fact.state_bytes for fact in facts),
    )


def _layout(config: ResolvedConfig, plan: CachePlan, facts: Sequence[DeviceFacts]) -> str:
    """Return a digest of how the workers divide the cache and lay out a block."""
    head = config.speculation.head if config.speculation else None  # a draft head may have its own part of each block
    parts = [
        None if head is None else [head.architecture, head.hf_config],
        config.block_size,
        config.world_size,
        config.pipeline_parallel_size,
        config.stage_layers,
        plan.cache_groups,
        [[fact.kv_block_bytes, fact.state_bytes, fact.cpu_kernels] for fact in facts],
    ]
    return hashlib.blake2b(msgspec.json.encode(parts), digest_size=16).hexdigest()
