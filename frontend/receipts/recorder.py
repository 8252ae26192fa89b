"""`Recorder`: makes the receipt of one HTTP request while its response is generated."""

import hashlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.frontend.generation.prepared import PreparedGeneration
from octavo.frontend.generation.spec import request_seed
from octavo.frontend.outputs import CompletionOutput, RequestOutput
from octavo.frontend.receipts.log import ReceiptLog
from octavo.frontend.receipts.receipt import (
    DIGEST_BYTES,
    TOKEN_DIGEST_BYTES,
    PromptReceipt,
    Receipt,
    Record,
    SequenceReceipt,
    digest,
    logprob_bits,
    prompt_logprobs_digest,
)
from octavo.protocol.ids import pack_ids

if TYPE_CHECKING:
    from octavo.frontend.client import AsyncClient

_NOT_DECISIVE = (
    *("seed", "output_kind", "stream_interval", "skip_reading_prefix_cache", "speculation"),
    *("prompt_logprob_token_ids", "prompt_logprob_start"),
)
"""Sampling parameters that change neither tokens nor logprobs; the seed has a field of its own."""


class Recorder:
    """Receives the generations of a request before they start, and then their outputs.

    Args:
        client: client of the engine.
        url: path of the route.
        request: the body, for the log.
        log: receives the receipt. `None`: the receipt is only shown.
        is_shown: whether the response contains the receipt.
    """

    def __init__(
        self, client: "AsyncClient", url: str, request: bytes, log: ReceiptLog | None, *, is_shown: bool
    ) -> None:
        self.is_shown = is_shown
        self._client = client
        self._url = url
        self._request = b"" if log is None else request
        self._log = log
        self._id = ""
        self._weights = ""
        self._adapter = ""
        self._prompts: list[_Prompt] = []
        self._receipt: Receipt | None = None

    def prepare(self, one: PreparedGeneration, request_id: str) -> PreparedGeneration:
        """Return the generation of the next prompt, with a seed added if it has none, and with logprobs."""
        if not self._prompts:
            self._id = request_id
            self._weights = self._client.facts.weights_digest
            self._adapter = "" if one.adapter is None else one.adapter.digest
        params, seed = one.params, None
        if one.beam_params is None:
            seed = request_seed(self._client.config.seed, request_id) if params.seed is None else params.seed
        self._prompts.append(_Prompt(one, seed, self._client.facts.max_model_len))
        logprobs = params.logprobs if params.shows_logprobs else 0
        return replace(one, params=msgspec.structs.replace(params, seed=seed, logprobs=logprobs))

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Record the new tokens of an output, and remove logprobs from it that the caller did not request."""
        self._prompts[prompt_index].add(output)

    def finish(self) -> None:
        """Complete the receipt, and log it."""
        facts = self._client.facts
        weights = self._weights
        if weights != facts.weights_digest or any(prompt.has_mixed_weights for prompt in self._prompts):
            weights = f"{weights}, updated during the request to {facts.weights_digest}"
        fingerprint = {**facts.identity_parts, "weights": weights}
        if facts.variant_module:
            fingerprint["variant_module"] = facts.variant_module
        if self._adapter:
            fingerprint["adapter"] = self._adapter
        self._receipt = Receipt.of(fingerprint, [prompt.receipt() for prompt in self._prompts])
        if self._log is not None:
            request = msgspec.Raw(self._request)
            record = Record(time=time.time(), id=self._id, url=self._url, request=request, receipt=self._receipt)
            self._log.write(record)

    @property
    def shown(self) -> Receipt | msgspec.UnsetType:
        """The receipt of a complete response. UNSET if its caller did not request one."""
        assert self._receipt is not None or not self.is_shown, "`finish` comes first"
        return self._receipt if self._receipt is not None and self.is_shown else msgspec.UNSET


class _Prompt:
    """The receipt of one prompt, while its sequences grow."""

    def __init__(self, one: PreparedGeneration, seed: int | None, max_model_len: int) -> None:
        self.has_mixed_weights = False
        self._seed = seed
        self._num_tokens = len(one.token_ids)
        rows = [] if one.embeds is None else [b"%d %b" % pair for pair in one.embeds.positions()]
        rows += [b"%d %b" % (item.start, item.digest) for item in one.media]
        self._digest = digest(b"|".join([bytes(pack_ids(one.token_ids)), *rows]))
        self._params = _described(one, max_model_len)
        self._shows_logprobs = one.params.shows_logprobs
        self._prompt_logprobs: str | None = None
        self._sequences: dict[int, _Sequence] = {}

    def add(self, output: RequestOutput) -> None:
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = prompt_logprobs_digest(output.prompt_logprobs)
        for choice in output.outputs:
            if choice.index not in self._sequences:
                self._sequences[choice.index] = _Sequence()
            self._sequences[choice.index].add(choice)
            versions = {version for *_, version in choice.weight_versions}
            known = self._sequences[choice.index].weight_versions
            known |= versions
            self.has_mixed_weights |= len(known) > 1
            if not self._shows_logprobs:
                choice.logprobs = None

    def receipt(self) -> PromptReceipt:
        return PromptReceipt(
            prompt=self._digest,
            num_prompt_tokens=self._num_tokens,
            params=self._params,
            sequences=[sequence.receipt(index) for index, sequence in sorted(self._sequences.items())],
            seed=self._seed,
            prompt_logprobs=self._prompt_logprobs,
        )


class _Sequence:
    """Tokens and digests of a sequence so far."""

    def __init__(self) -> None:
        self.weight_versions: set[int] = set()
        self._token_ids: list[int] = []
        self._logprobs: list[str] = []
        self._digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._last: CompletionOutput | None = None

    def add(self, choice: CompletionOutput) -> None:
        self._last = choice
        self._token_ids += choice.token_ids
        assert choice.logprobs is not None, "`prepare` asked for them"
        for token_id, position in zip(choice.token_ids, choice.logprobs, strict=True):
            bits = logprob_bits(position)
            self._digest.update(b"%d:%d:" % (token_id, len(bits)) + bits)
            self._logprobs.append(hashlib.blake2b(bits, digest_size=TOKEN_DIGEST_BYTES).hexdigest())

    def receipt(self, index: int) -> SequenceReceipt:
        assert self._last is not None
        return SequenceReceipt(
            index=index,
            token_ids=self._token_ids,
            logprobs="".join(self._logprobs),
            digest=self._digest.hexdigest(),
            finish_reason=self._last.finish_reason,
            stop_reason=self._last.stop_reason,
        )


def _described(one: PreparedGeneration, max_model_len: int) -> dict[str, Any]:
    """Return the parameters of a generation as JSON values; long values as digests."""
    params = one.params
    plain = msgspec.structs.replace(params, structured_outputs=None)
    described: dict[str, Any] = msgspec.to_builtins(plain, str_keys=True)
    for name in _NOT_DECISIVE:
        described.pop(name, None)
    described["max_tokens"] = params.max_tokens or max_model_len - len(one.token_ids)
    if params.structured_outputs is not None:
        described["structured_outputs"] = digest(msgspec.json.encode(params.structured_outputs))
    if one.beam_params is not None:
        described["beam_search"] = msgspec.to_builtins(one.beam_params)
    return described
