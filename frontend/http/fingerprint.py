"""`fingerprint`: the `system_fingerprint` of answers: what, beside the request, its tokens depend on.

Says nothing of schedules, sizes of batches or numbers of processes: an answer does not depend on them.
"""

import hashlib
from typing import Literal, TypeAlias

import msgspec

from octavo import __version__
from octavo.protocol.config import ResolvedConfig

FingerprintMode: TypeAlias = Literal["full", "hash", "custom", "none"]

HASH_LETTERS = 8

_DECISIVE = (
    *("model", "dtype", "quantization", "kv_cache_dtype", "cpu_kernels", "seed", "chat_template", "logprobs_mode"),
    *("disable_any_whitespace", "disable_additional_properties"),
)
"""Settings that tokens or logprobs depend on."""


def fingerprint(config: ResolvedConfig, mode: FingerprintMode, custom: str | None) -> str | None:
    """Return the fingerprint of an engine, None for none.

    Args:
        config: of the engine.
        mode: full: `octavo-VERSION-tpN-HASH`, the `-tpN` where there are several workers; hash: without it; custom:
            the next argument; none: none.
        custom: what it is under `custom`.
    """
    if mode == "none":
        return None
    if mode == "custom":
        return custom
    decisive = {name: getattr(config, name) for name in _DECISIVE}
    digest = hashlib.sha256(msgspec.json.encode(decisive, order="sorted")).hexdigest()[:HASH_LETTERS]
    workers = f"-tp{config.world_size}" if mode == "full" and config.world_size > 1 else ""
    return f"octavo-{__version__}{workers}-{digest}"
