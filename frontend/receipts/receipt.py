"""`Receipt`: the fingerprint of an engine, and the tokens and digests of one of its responses. Computes nothing."""

import hashlib
import struct
from collections.abc import Iterable
from typing import Any

import msgspec

from octavo.frontend.outputs import PositionLogprobs

FORMAT = 1
"""Receipts of other formats cannot be compared."""

DIGEST_BYTES = 16
TOKEN_DIGEST_BYTES = 4
"""Sufficient to find the first token whose logprobs differ; the digest of the sequence covers all of them."""

LOG_FILES = "receipts-*.jsonl"
"""Pattern of the files in a log's directory."""

_CANDIDATE = struct.Struct("<qdq")


class SequenceReceipt(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One generated sequence."""

    index: int
    token_ids: list[int]
    logprobs: str
    """For each token, the digest of its logprob and of its alternatives' logprobs, as 8 hexadecimal digits."""
    digest: str
    """Digest of all tokens and of the bits of their logprobs."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def logprobs_at(self, position: int) -> str:
        """Return the digest of the logprobs of one token."""
        width = 2 * TOKEN_DIGEST_BYTES
        return self.logprobs[position * width : (position + 1) * width]


class PromptReceipt(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One prompt and its sequences."""

    prompt: str
    """Digest of the token ids, and of the rows of prompt embeddings."""
    num_prompt_tokens: int
    params: dict[str, Any]
    """Sampling parameters, with the model's defaults applied. Parameters with their built-in default are left out."""
    sequences: list[SequenceReceipt]
    seed: int | None = None
    """Seed. `None` for a beam search, which draws nothing."""
    prompt_logprobs: str | None = None
    """Digest of the bits of the prompt's logprobs. `None` if the caller did not request any."""


class Receipt(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Inputs and results of one HTTP request."""

    format: int
    fingerprint: dict[str, str]
    """Everything that results depend on besides the request: `identity_parts`, "weights" and "adapter"."""
    prompts: list[PromptReceipt]
    digest: str
    """Digest of all of the above. Equal requests and seeds have equal digests on engines of equal fingerprints."""

    @classmethod
    def of(cls, fingerprint: dict[str, str], prompts: list[PromptReceipt]) -> "Receipt":
        """Return a receipt with its digest."""
        encoded = msgspec.json.encode([FORMAT, fingerprint, prompts], order="sorted")
        return cls(format=FORMAT, fingerprint=fingerprint, prompts=prompts, digest=digest(encoded))


class Record(msgspec.Struct, kw_only=True):
    """A line of the log: a receipt with its request."""

    time: float
    """When the response was complete, in seconds since the epoch."""
    id: str
    url: str
    """Path of the route."""
    request: msgspec.Raw
    """The request body."""
    receipt: Receipt


def digest(data: bytes) -> str:
    """Return the digest of a text or of numbers, as hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def logprob_bits(position: PositionLogprobs | None) -> bytes:
    """Encode the tokens at a position with the bits of their logprobs and their ranks, in the order of the outputs."""
    return b"".join(
        [_CANDIDATE.pack(token_id, one.logprob, one.rank or -1) for token_id, one in (position or {}).items()]
    )


def prompt_logprobs_digest(positions: Iterable[PositionLogprobs | None]) -> str:
    """Return the digest of the logprobs of a prompt."""
    return digest(b"|".join([logprob_bits(position) for position in positions]))
