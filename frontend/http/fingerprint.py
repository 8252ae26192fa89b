"""`Fingerprint`: the `system_fingerprint` of responses: everything besides the request that affects tokens.

Schedules, batch sizes and process counts are not part of it: a response does not depend on them.
"""

import hashlib
from typing import Literal, TypeAlias

import msgspec

from octavo.protocol.config import ResolvedConfig
from octavo.protocol.version import __version__

FingerprintMode: TypeAlias = Literal["full", "hash", "custom", "none"]

HASH_LETTERS = 8

_DECISIVE = (
    *("model", "dtype", "quantization", "kv_cache_dtype", "cpu_kernels", "seed", "chat_template", "logprobs_mode"),
    *("device", "is_batch_invariant", "enable_tp_invariant_inference", "calculate_kv_scales"),
)
"""Settings that affect tokens or logprobs."""


class Fingerprint:
    """Computes fingerprints, one per configuration: the engine may be replaced while the server runs.

    Args:
        mode: full: `octavo-VERSION-tpN-HASH`, with `-tpN` only if there are several workers; hash: only the hash;
        custom: the text in `custom`; none: no fingerprint.
        custom: the fingerprint in the mode `custom`.
    """

    def __init__(self, mode: FingerprintMode = "none", custom: str | None = None) -> None:
        self._mode = mode
        self._custom = custom
        self._latest: tuple[ResolvedConfig, str, str] | None = None

    def of(self, config: ResolvedConfig, weights_digest: str) -> str | None:
        """Return the fingerprint of an engine; `None` if the mode is none."""
        if self._mode == "none":
            return None
        if self._mode == "custom":
            return self._custom
        if self._latest is None or self._latest[0] is not config or self._latest[1] != weights_digest:
            self._latest = config, weights_digest, self._made(config, weights_digest)
        return self._latest[2]

    def _made(self, config: ResolvedConfig, weights_digest: str) -> str:
        form = config.structured_output
        decisive = {name: getattr(config, name) for name in _DECISIVE} | {
            "disable_any_whitespace": form.disable_any_whitespace,
            "disable_additional_properties": form.disable_additional_properties,
            "weights": weights_digest,
        }
        digest = hashlib.sha256(msgspec.json.encode(decisive, order="sorted")).hexdigest()[:HASH_LETTERS]
        sizes = {"tp": config.tensor_parallel_size, "pp": config.pipeline_parallel_size}
        shown = [f"-{name}{size}" for name, size in sizes.items() if size > 1]
        workers = "".join(shown) if self._mode == "full" else ""
        return f"octavo-{__version__}{workers}-{digest}"
