"""`RequestLog`: requests and answers as log lines (`--enable-log-requests`, `--enable-log-outputs`).

Texts are escaped, so that each record stays on one line.
"""

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import msgspec

from octavo.frontend.generation.prepared import PreparedGeneration
from octavo.frontend.outputs import RequestOutput
from octavo.protocol.config import ServerConfig
from octavo.protocol.params import OutputKind

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RequestLog:
    """What is logged, and the length limit."""

    has_requests: bool
    has_outputs: bool
    max_len: int | None
    """Most characters of a text, and most token ids; None: all."""
    has_deltas: bool = False
    """With outputs: also each delta of a stream."""

    @classmethod
    def of(cls, config: ServerConfig) -> "RequestLog | None":
        """Return the log that the flags enable, None if they enable none."""
        if not (config.enable_log_requests or config.enable_log_outputs):
            return None
        has_outputs = config.enable_log_outputs
        return cls(
            config.enable_log_requests, has_outputs, config.max_log_len, has_outputs and config.enable_log_deltas
        )

    async def followed(
        self, outputs: AsyncGenerator[RequestOutput], generation: PreparedGeneration, request_id: str
    ) -> AsyncGenerator[RequestOutput]:
        """Yield a request's outputs unchanged; log the request before them and the answer after them.

        If the client disconnects or an error occurs, no answer is logged.
        """
        if self.has_requests:
            logger.info(
                "received %s: prompt %s, token ids %s, params %s",
                request_id,
                None if generation.text is None else self._cut(generation.text),
                list(generation.token_ids[: self.max_len]),
                msgspec.json.encode(generation.params, enc_hook=str).decode(),
            )
        is_streamed = generation.params.output_kind is OutputKind.DELTA
        del generation  # a request may wait for long
        texts: dict[int, str] = {}
        reasons: dict[int, str | None] = {}
        async with aclosing(outputs):
            async for output in outputs:
                if self.has_outputs:
                    for choice in output.outputs:
                        texts[choice.index] = texts.get(choice.index, "") + choice.text
                        reasons[choice.index] = choice.finish_reason
                        if self.has_deltas and choice.text and is_streamed:
                            logger.info("delta of %s, choice %d: %s", request_id, choice.index, self._cut(choice.text))
                yield output
        for index, text in texts.items():
            logger.info("answered %s, choice %d: %s, %s", request_id, index, self._cut(text), reasons[index])

    def _cut(self, text: str) -> str:
        return repr(text[: self.max_len])
