"""Saved responses with receipts: a server's log, results of a batch, and responses saved with their requests.

Reads files and makes the requests that compute the responses again. Starts nothing.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from octavo.frontend.receipts.receipt import FORMAT, LOG_FILES, PromptReceipt, Receipt

CHAT = "/v1/chat/completions"
CHAT_BATCH = "/v1/chat/completions/batch"
COMPLETIONS = "/v1/completions"

_ROUTE_OF = {"chat.completion": CHAT, "chat.completion.chunk": CHAT, "text_completion": COMPLETIONS}
"""Route by the field `object` of a response."""

_OWN = (
    *("model", "seed", "stream", "stream_options", "stream_interval", "request_id", "priority", "return_receipt"),
    "speculation",
)
"""Fields that a repeated request sets itself; of these, only the seed affects tokens."""

_NO_REQUEST = 'has no request: save it beside the response, as {"request": ..., "response": ...}'
_NO_RECEIPT = "has no receipt: ask for one with return_receipt, or octavo run-batch --return-receipts"

Json = dict[str, Any]


class SavedAnswer(msgspec.Struct, kw_only=True):
    """A response that can be computed again."""

    name: str
    """File and line."""
    url: str
    request: Json
    receipt: Receipt
    choices: list[Json]
    """Choices of the response. Empty if it was streamed, or if only its receipt was saved."""

    @property
    def adapter(self) -> str:
        """Digest of the LoRA adapter or soft prompt. Empty if there is none."""
        return self.receipt.fingerprint.get("adapter", "")

    def bodies(self, model: str | None) -> list[bytes]:
        """Return a request body for each prompt, with the seed of its receipt.

        Args:
            model: name of the adapter in the repeating engine. `None`: the model without an adapter.
        """
        shared = {name: value for name, value in self.request.items() if name not in _OWN}
        shared |= {"return_receipt": True} | ({} if model is None else {"model": model})
        parts = self._parts()
        return [
            msgspec.json.encode({**shared, **part, **_seed(prompt)})
            for part, prompt in zip(parts, self.receipt.prompts, strict=True)
        ]

    @property
    def fault(self) -> str:
        """Why the receipt cannot belong to the request. Empty if it can."""
        num_prompts, num_receipts = len(self._parts()), len(self.receipt.prompts)
        return "" if num_prompts == num_receipts else f"has {num_prompts} prompts, its receipt has {num_receipts}"

    def _parts(self) -> list[Json]:
        """Return the fields of each prompt: one request with several prompts cannot have a seed per prompt."""
        if self.url == CHAT:
            messages = self.request.get("messages")
            is_batch = isinstance(messages, list) and any(isinstance(one, list) for one in messages)
            return [{"messages": one} for one in messages or ()] if is_batch else [{}]
        prompt, embeds = self.request.get("prompt"), self.request.get("prompt_embeds") or []
        first = [{"prompt_embeds": one, "prompt": None} for one in ([embeds] if isinstance(embeds, str) else embeds)]
        if first and not prompt:
            return first
        several = prompt if isinstance(prompt, list) and not all(isinstance(item, int) for item in prompt) else [prompt]
        return first + [{"prompt": one, "prompt_embeds": None} for one in several]


class Unusable(msgspec.Struct):
    """A line that cannot be compared."""

    name: str
    reason: str


def read_answers(path: Path) -> Iterator[SavedAnswer | Unusable]:
    """Yield the responses in a file, or in the files of a log's directory.

    A file contains one JSON object, or one per line.

    Raises:
        OSError: a file cannot be read.
    """
    for file in sorted(path.glob(LOG_FILES)) if path.is_dir() else [path]:
        with file.open("rb") as lines:
            yield from _read_lines(str(file), lines, file)


def _read_lines(name: str, lines: Iterable[bytes], file: Path) -> Iterator[SavedAnswer | Unusable]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            content = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if number == 1 and (whole := _whole(file)) is not None:
                yield _read(name, whole)
                return
            yield Unusable(f"{name}:{number}", f"is not JSON: {error}")
            continue
        yield _read(f"{name}:{number}", content)


def _whole(file: Path) -> Any:
    """Return the single JSON value of a file. `None` if there is none."""
    try:
        return msgspec.json.decode(file.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _read(name: str, content: Any) -> SavedAnswer | Unusable:
    if not isinstance(content, dict):
        return Unusable(name, "is not a JSON object")
    request, url, response = content.get("request"), content.get("url"), content.get("response")
    if isinstance(error := content.get("error"), dict):  # in results of a batch
        return Unusable(name, f"has no answer: {error.get('message')}")
    if isinstance(response, dict) and "status_code" in response:  # in results of a batch
        response = response.get("body")
        url, request = (request.get("url"), request.get("body")) if isinstance(request, dict) else (None, None)
    response = response if isinstance(response, dict) else {}
    receipt = content.get("receipt") or response.get("receipt")
    if not isinstance(receipt, dict):
        return Unusable(name, _NO_RECEIPT)
    if not isinstance(request, dict):
        return Unusable(name, _NO_REQUEST)
    url = CHAT if url == CHAT_BATCH else url or _ROUTE_OF.get(str(response.get("object")))
    if url not in (CHAT, COMPLETIONS):
        return Unusable(name, f"has no url: say {CHAT} or {COMPLETIONS}")
    if receipt.get("format") != FORMAT:
        return Unusable(name, f"has a receipt of format {receipt.get('format')}, this release compares {FORMAT}")
    try:
        converted = msgspec.convert(receipt, Receipt)
    except msgspec.ValidationError as error:
        return Unusable(name, f"has a receipt that cannot be read: {error}")
    is_stream = request.get("stream") or "chunk" in str(response.get("object"))
    choices = [] if is_stream else [one for one in response.get("choices") or [] if isinstance(one, dict)]
    answer = SavedAnswer(name=name, url=url, request=request, receipt=converted, choices=choices)
    return Unusable(name, answer.fault) if answer.fault else answer


def _seed(prompt: PromptReceipt) -> Json:
    """Return the field `seed` as a signed integer: noise depends on its lowest 64 bits."""
    if prompt.seed is None:
        return {}
    return {"seed": prompt.seed - 2**64 if prompt.seed >= 2**63 else prompt.seed}
