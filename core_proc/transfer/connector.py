"""`KVConnector`: holds requests until blocks of their prompts have arrived from another engine, and offers their
blocks.

Its methods correspond to those of a vLLM connector: `submit` finds what another engine has and starts to load it,
`take_ready` passes requests on once it has arrived, and `finish_cause` saves the blocks of a finished request.

A request never depends on it: blocks that do not arrive are computed, with the same bits.
"""

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import zmq

from octavo.core_proc.cache.exchange import contents_to_offer, num_block_keys
from octavo.core_proc.request import Request
from octavo.core_proc.request_map import RequestKey
from octavo.core_proc.scheduler.delivery import ClientEvent
from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.core_proc.scheduler.stop import FinishCause
from octavo.core_proc.transfer.offers import Offer, Offers
from octavo.core_proc.transfer.puller import Pulled, Puller
from octavo.core_proc.transfer.server import TransferServer
from octavo.core_proc.workers.commands import CombinedReply, CommandExecutor
from octavo.protocol.config.kv_transfer import ResolvedKVTransfer
from octavo.protocol.events import Failed, FailureKind, Finished, FinishReason
from octavo.protocol.ids import RequestId
from octavo.protocol.kv_transfer import PARAMS, KVTransfer
from octavo.protocol.requests import Submit
from octavo.protocol.steps import BlockCopy
from octavo.protocol.worker_commands import LoadBlockFiles, SaveBlockFiles

logger = logging.getLogger(__name__)

TRANSFER_ID_BYTES = 16


class KVConnector:
    """Exchanges KV blocks of one engine with other engines.

    Args:
        config: the roles of this engine, and the timeouts.
        engine_id: id under which other engines find this one.
        folder: this engine's folder for files in shared memory.
        scheduler: holds the cache.
        workers: copy blocks to files and back.
        offers: blocks that other engines may take.
        server: sends offers to other engines. None if this engine only receives.
        puller: fetches blocks of other engines. None if this engine only sends.
        context: ZeroMQ context of the server's and puller's sockets.
        fingerprint: returns a digest of what determines this engine's blocks now. Engines with another one cannot use
            them.
        may_load: returns whether the workers have a cache and the weights of the fingerprint.
        block_bytes: bytes of one block, all workers together.
        state_bytes: bytes of one recurrent state, all workers together.
    """

    def __init__(
        self,
        config: ResolvedKVTransfer,
        engine_id: str,
        folder: Path,
        scheduler: Scheduler,
        workers: CommandExecutor,
        offers: Offers,
        server: TransferServer | None,
        puller: Puller | None,
        context: "zmq.Context[zmq.Socket[bytes]]",
        *,
        fingerprint: Callable[[], str],
        may_load: Callable[[], bool],
        block_bytes: int,
        state_bytes: int,
    ) -> None:
        self._config = config
        self._engine_id = engine_id
        self._folder = folder
        self._scheduler = scheduler
        self._workers = workers
        self._offers = offers
        self._server = server
        self._puller = puller
        self._context = context
        self._fingerprint = fingerprint
        self._may_load = may_load
        self._block_bytes, self._state_bytes = block_bytes, state_bytes
        self._waiting: dict[RequestKey, Submit] = {}
        """Requests whose blocks are being fetched, in order of arrival. The scheduler does not know them yet."""
        self._waiters: dict[str, list[RequestKey]] = {}
        """The same requests by transfer id."""
        scheduler.hooks.add(self)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for blocks."""
        return len(self._waiting)

    def is_waiting(self, key: RequestKey) -> bool:
        """Return whether this request waits for blocks."""
        return key in self._waiting

    @property
    def wake_fds(self) -> Sequence[int]:
        """File descriptors that are readable when `take_ready` has work to do."""
        return [] if self._puller is None else [self._puller.wake_fd]

    def on_step(self) -> list[ClientEvent]:
        """Do nothing: `finish_cause` saves the blocks of finished requests."""
        return []

    def submit(self, client: bytes, submit: Submit) -> Submit | list[ClientEvent]:
        """Fetch the blocks of a prompt that another engine has, unless they are cached.

        Returns:
            The request if the scheduler should receive it now. Otherwise events: of its end, or none if it waits here.
        """
        transfer = submit.kv_transfer
        if transfer is None:
            return submit
        own = msgspec.structs.replace(submit, kv_transfer=None)
        if transfer.leaves:
            if self._config.is_producer:
                return submit
            if submit.is_continued:  # a sending engine has died
                return own
            message = f"{PARAMS}: this engine takes blocks and gives none (kv_role of --kv-transfer-config)"
            return [(client, Failed(submit.request_id, FailureKind.INVALID, message, PARAMS))]
        if self._puller is None:
            # Compute its prompt here: perhaps no receiving engine is left.
            return own
        request = Request(client, own, 0, 0.0)
        num_blocks = (request.num_prompt_tokens - 1) // self._scheduler.cache.block_size
        if self._scheduler.cache.states is not None and transfer.num_tokens:  # states end at a checkpoint
            num_blocks = min(num_blocks, transfer.num_tokens // self._scheduler.cache.block_size)
        has_all = self._scheduler.cache.count_hits(request)[0].num_blocks >= num_blocks
        if has_all or not request.reads_prefix_cache:
            return own
        key = client, submit.request_id
        self._waiting[key] = own
        waiters = self._waiters.setdefault(transfer.transfer_id, [])
        waiters.append(key)
        if len(waiters) == 1:
            self._puller.start(transfer, self._fingerprint())
        return []

    def abort(self, client: bytes, request_ids: Sequence[RequestId]) -> list[ClientEvent]:
        """Abort requests that wait here. Other ids are ignored."""
        if not self._waiting:
            return []
        ended = [each for each in request_ids if self._waiting.pop((client, each), None) is not None]
        return [(client, Finished(request_id, FinishReason.ABORT)) for request_id in ended]

    def note_ended(self, request_ids: Sequence[RequestId]) -> None:
        """Do nothing: `finish_cause` has saved the blocks."""

    def take_ready(self) -> list[tuple[bytes, Submit]]:
        """Return the requests that have finished waiting, after their blocks were sent to the workers."""
        if self._puller is None:
            return []
        ready: list[tuple[bytes, Submit]] = []
        for pulled in self._puller.take_done():
            keys = [key for key in self._waiters.pop(pulled.transfer_id, []) if key in self._waiting]
            submits = [(client, self._waiting.pop((client, request_id))) for client, request_id in keys]
            self._load(pulled, submits)
            ready += submits
        return ready

    def _load(self, pulled: Pulled, submits: list[tuple[bytes, Submit]]) -> None:
        """Have the workers load the pulled blocks that the requests need, before any later plan."""
        assert self._puller is not None
        is_current = pulled.fingerprint == self._fingerprint() and self._may_load() and self._workers.is_ready
        rows, states = list[BlockCopy](), list[BlockCopy]()
        if not pulled.fault and is_current:
            for client, submit in submits:
                taken = self._scheduler.take_blocks(client, submit, pulled.keys)
                rows += taken.blocks
                states += taken.states
        if pulled.fault:
            logger.warning("could not fetch blocks of another engine; computing them here: %s", pulled.fault)
        if not rows and not states:
            self._puller.remove_files(pulled.path)
            return
        num_bytes = len(rows) * self._block_bytes + len(states) * self._state_bytes
        self._scheduler.counters.kv_transfer_loaded_bytes += num_bytes
        num_blocks = num_block_keys(self._scheduler.cache, pulled.keys)
        remove = self._puller.remove_files

        def on_done(reply: CombinedReply) -> None:
            remove(pulled.path)

        load = partial(LoadBlockFiles, path=pulled.path, rows=rows, state_rows=states, num_blocks=num_blocks)
        self._workers.command(load, on_done)

    def finish_cause(self, request: Request, cause: FinishCause) -> FinishCause:
        """Save the blocks of a finishing request if another engine should continue it. Return `cause`."""
        if request.kv_transfer is not None:
            request.kv_transfer = self._save(request) if request.kv_transfer.leaves else None
        return cause

    def _save(self, request: Request) -> KVTransfer | None:
        """Have the workers write the blocks of a request to files before any later plan. Return how to fetch them."""
        if request.is_mixed or self._server is None or not self._workers.is_ready:
            return None
        num_tokens, blocks, states = contents_to_offer(self._scheduler.cache, request)
        num_bytes = len(blocks) * self._block_bytes + len(states) * self._state_bytes
        if not blocks and not states:
            return None
        if not self._offers.has_room(num_bytes):
            logger.warning(
                "dropped %d blocks for another engine: %d offers were not fetched yet (kv_buffer_size)",
                len(blocks),
                len(self._offers),
            )
            return None
        transfer_id = secrets.token_hex(TRANSFER_ID_BYTES)
        path = str(self._folder / f"out-{transfer_id}")
        deadline_s = time.monotonic() + self._config.keep_s
        keys = [key for key, _ in (*blocks, *states)]
        offer = Offer(transfer_id, self._fingerprint(), keys, path, num_bytes, deadline_s)
        self._offers.add(offer)
        self._scheduler.counters.kv_transfer_saved_bytes += num_bytes
        ids, slots = ([place for _, place in contents] for contents in (blocks, states))
        save = partial(SaveBlockFiles, path=path, blocks=ids, states=slots)
        self._workers.command(save, partial(self._on_saved, offer))
        return KVTransfer(
            takes=True,
            engine_id=self._engine_id,
            transfer_id=transfer_id,
            host=self._config.host,
            port=self._server.port,
            num_tokens=num_tokens,
        )

    def _on_saved(self, offer: Offer, reply: CombinedReply) -> None:
        offer.is_written = True
        if reply.fault:
            logger.warning("blocks for another engine were not written: %s", reply.fault)
            self._offers.drop(offer.transfer_id)
        if self._offers.find(offer.transfer_id) is None:
            self._offers.remove_files(offer.path)
        if self._server is not None:
            self._server.wake()

    def close(self) -> None:
        """End the threads. Blocks until: the last messages are sent, for a bounded time."""
        if self._server is not None:
            self._server.close()
        self._context.term()
        if self._puller is not None:
            self._puller.close()
