"""`RequestLog`: requests and responses as log lines (`--enable-log-requests`, `--enable-log-outputs`).

Texts are escaped, so that each record is one line.
"""

import logging
from dataclasses import dataclass

import msgspec

from octavo.frontend.generation.prepared import PreparedGeneration
from octavo.frontend.outputs import RequestOutput
from octavo.protocol.config import ServerConfig
from octavo.protocol.params import OutputKind

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RequestLog:
    """What to log, and the length limit."""

    has_requests: bool
    has_outputs: bool
    max_len: int | None
    """Maximum number of characters of a text, and of token ids; `None` if unlimited."""
    has_deltas: bool = False
    """Whether to log each delta of a stream, if outputs are logged."""

    @classmethod
    def of(cls, config: ServerConfig) -> "RequestLog | None":
        """Return the log that the flags enable; `None` if they enable none."""
        if not (config.enable_log_requests or config.enable_log_outputs):
            return None
        has_outputs = config.enable_log_outputs
        return cls(
            config.enable_log_requests, has_outputs, config.max_log_len, has_outputs and config.enable_log_deltas
        )

    def begin(self, generation: PreparedGeneration, request_id: str) -> "LoggedAnswer":
        """Log a request; return an object that logs its response, unless it fails or the client disconnects."""
        if self.has_requests:
            logger.info(
                "received %s: prompt %s, token ids %s, params %s",
                request_id,
                None if generation.text is None else self.cut(generation.text),
                list(generation.token_ids[: self.max_len]),
                msgspec.json.encode(generation.params, enc_hook=str).decode(),
            )
        return LoggedAnswer(self, request_id, is_streamed=generation.params.output_kind is OutputKind.DELTA)

    def cut(self, text: str) -> str:
        """Return a text, escaped and truncated for the log."""
        return repr(text[: self.max_len])


class LoggedAnswer:
    """The outputs of one request, logged when the request has finished."""

    def __init__(self, log: RequestLog, request_id: str, *, is_streamed: bool) -> None:
        self._log = log
        self._request_id = request_id
        self._has_deltas = log.has_deltas and is_streamed
        self._texts: dict[int, str] = {}
        self._reasons: dict[int, str | None] = {}

    def add(self, output: RequestOutput) -> None:
        """Log a delta, if deltas are logged; with the last delta, log the complete response."""
        if not self._log.has_outputs:
            return
        for choice in output.outputs:
            self._texts[choice.index] = self._texts.get(choice.index, "") + choice.text
            self._reasons[choice.index] = choice.finish_reason
            if self._has_deltas and choice.text:
                text = self._log.cut(choice.text)
                logger.info("delta of %s, choice %d: %s", self._request_id, choice.index, text)
        if output.finished:
            for index, text in self._texts.items():
                shown, reason = self._log.cut(text), self._reasons[index]
                logger.info("answered %s, choice %d: %s, %s", self._request_id, index, shown, reason)
