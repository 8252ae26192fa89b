"""KV blocks that move between engines: the parameters of requests, and the messages between engines.

An engine that fetches blocks asks the engine that has them, over a separate socket (`core_proc/transfer`).
"""

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from octavo.protocol.config.kv_transfer import ENGINE_ID
from octavo.protocol.errors import InvalidRequestError

PARAMS = "kv_transfer_params"
"""The field over HTTP, and the key in `SamplingParams.extra_args`, as in vLLM."""

_TRANSFER_ID = re.compile(r"[0-9a-f]{32}")


class KVTransfer(Struct, array_like=True, gc=False, frozen=True):
    """What a request leaves for another engine, or fetches from one."""

    leaves: bool = False
    """Whether its blocks are kept for another engine when it ends: `do_remote_decode`."""
    takes: bool = False
    """Whether another engine has blocks of its prompt: `do_remote_prefill`."""
    engine_id: str = ""
    """Id of the engine that has the blocks."""
    transfer_id: str = ""
    """Id of the blocks in that engine, which cannot be guessed."""
    host: str = ""
    """Host on which that engine listens. Empty if it is on this machine."""
    port: int = 0
    num_tokens: int = 0
    """Number of tokens whose blocks are available."""


class _Params(Struct, kw_only=True, forbid_unknown_fields=True):
    """`kv_transfer_params`: the fields of vLLM's connectors. Fields without a meaning here must be null."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_host: str | None = None
    remote_port: Annotated[int, Meta(ge=0, le=2**16 - 1)] | None = None
    remote_num_tokens: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    remote_block_ids: None = None


def read_transfer_params(value: object) -> KVTransfer | None:
    """Parse a caller's `kv_transfer_params`. Return None if they request nothing.

    Raises:
        InvalidRequestError: the parameters are invalid; names the field.
    """
    if not value:
        return None
    try:
        given = msgspec.convert(value, _Params)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"{PARAMS}: {error}", PARAMS) from None
    if given.do_remote_decode and given.do_remote_prefill:
        raise InvalidRequestError(
            f"{PARAMS}: a request either leaves blocks (do_remote_decode) or takes some (do_remote_prefill)", PARAMS
        )
    if given.do_remote_decode:
        return KVTransfer(leaves=True)
    if not given.do_remote_prefill:
        return None
    engine_id, transfer_id = given.remote_engine_id or "", given.remote_request_id or ""
    if not (ENGINE_ID.fullmatch(engine_id) and _TRANSFER_ID.fullmatch(transfer_id)):
        raise InvalidRequestError(
            f"{PARAMS}: do_remote_prefill needs remote_engine_id and remote_request_id: send what the engine of the "
            "prefill has answered",
            PARAMS,
        )
    return KVTransfer(
        takes=True,
        engine_id=engine_id,
        transfer_id=transfer_id,
        host=given.remote_host or "",
        port=given.remote_port or 0,
        num_tokens=given.remote_num_tokens or 0,
    )


def transfer_params(transfer: KVTransfer) -> dict[str, Any]:
    """Return the `kv_transfer_params` with which another engine fetches what a request has left."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": transfer.engine_id,
        "remote_request_id": transfer.transfer_id,
        "remote_host": transfer.host or None,
        "remote_port": transfer.port or None,
        "remote_num_tokens": transfer.num_tokens,
    }


class Ask(Struct, array_like=True, gc=False, frozen=True, tag="ask"):
    """Engine to engine: what is available under this id? The reply is an `Answer`, as soon as everything is written."""

    transfer_id: str
    fingerprint: str
    """Fingerprint of the asking engine's blocks. Others would be useless to it."""


class Read(Struct, array_like=True, gc=False, frozen=True, tag="read"):
    """Send a part of a rank's file. The reply is a `Part`."""

    transfer_id: str
    rank: int
    offset: int
    num_bytes: int


class Release(Struct, array_like=True, gc=False, frozen=True, tag="release"):
    """The blocks are no longer needed. There is no reply."""

    transfer_id: str


class Answer(Struct, array_like=True, gc=False, frozen=True, tag="answer"):
    """Reply to `Ask`."""

    fault: str = ""
    """Why nothing is available. Empty on success."""
    keys: list[bytes] = []
    """Key of each row of the files: the hash of a block, and the suffix of its cache group."""
    path: str = ""
    """Path of the files, without their ranks. Engines of the same user on the same machine may link them."""
    sizes: list[int] = []
    """Size of each rank's file in bytes."""


class Part(Struct, array_like=True, gc=False, frozen=True, tag="part"):
    """Reply to `Read`. The bytes are in the next frame, unless there is a fault."""

    fault: str = ""
    checksum: int = 0
    """CRC-32 of the bytes."""


Question = Ask | Read | Release
Reply = Answer | Part


def rank_file(path: str, rank: int) -> str:
    """Return the path of the file with one worker's blocks."""
    return f"{path}.{rank}"
