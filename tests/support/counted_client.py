"""A client without an engine that reports its requests to their calls, as a generation does."""

import time
from collections.abc import AsyncGenerator
from typing import Any

from fake_client import FakeClient

from octavo.frontend.metrics.call import CURRENT_CALL, effective_priority
from octavo.frontend.metrics.record import RequestRecord
from octavo.frontend.outputs import RequestOutput
from octavo.protocol.stats import RequestTimings


class CountedClient(FakeClient):
    """Each request has 3 prompt tokens, 2 of them cached, and 6 generated ones.

    It took 4 s: half a second in the queue, one for the prompt, two for its tokens, and half a second for the text.
    """

    def __init__(self, *reply: str, **config: Any) -> None:
        super().__init__(*reply, **config)
        self.priorities: list[int] = []
        self.clock_offset_s = 0.0
        """Offset of the engine's clock in seconds."""

    async def generate(self, *prompt: Any, **options: Any) -> AsyncGenerator[RequestOutput]:
        self.priorities.append(effective_priority(options["priority"]))
        async for output in super().generate(*prompt, **options):
            if output.finished and (call := CURRENT_CALL.get()) is not None:
                now_s = time.monotonic() + self.clock_offset_s
                timings = RequestTimings(now_s - 4.0, now_s - 3.5, now_s - 2.5, now_s - 0.5)
                call.on_finished(RequestRecord(3, 6, 6, 2, 0, "stop", 1, 9, 4.0, timings, 0.25, 0.5))
            yield output
