"""A link to engines that pool without a model: the vectors derive from the tokens of a prompt."""

import asyncio
from array import array

from octavo.frontend.generation.live import LiveRequests
from octavo.frontend.pooling.pooler import Pooler
from octavo.frontend.request_stream import RequestStream
from octavo.frontend.text.threads import TextThreads
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.frontend.wake_event import WakeEvent, WakeQueue
from octavo.protocol.buffers import Buffer
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.events import EngineFacts, Failed, Finished, FinishReason, PooledOutput
from octavo.protocol.params import PoolingSpec
from octavo.protocol.pooling import TOKEN_TASKS
from octavo.protocol.requests import Submit

WIDTH = 4


def vector_of(token_ids: list[int]) -> list[float]:
    """Return the vector of a prompt."""
    return [float(len(token_ids)), float(sum(token_ids)), float(token_ids[0]), float(token_ids[-1])]


class PoolingLink:
    """Replies to every request in the next iteration of the event loop, or when `gate` is set."""

    identity = "same"
    failure = None

    def __init__(self, facts: EngineFacts) -> None:
        self.facts = facts
        self.wake_queue = WakeQueue()
        self.submits: list[Submit] = []
        self.aborted: list[str] = []
        self.most_in_flight = 0
        self.gate: asyncio.Event | None = None
        self.failures: dict[int, Failed] = {}
        """Failures by number of the request, from 0."""
        self._streams: dict[str, RequestStream] = {}

    def submit(self, submit: Submit, arrived: WakeEvent, sibling: str | None = None) -> RequestStream:
        assert submit.request_id not in self._streams
        stream = self._streams[submit.request_id] = RequestStream(submit.request_id, arrived)
        self.most_in_flight = max(self.most_in_flight, len(self._streams))
        number = len(self.submits)
        self.submits.append(submit)
        if self.gate is None:
            asyncio.get_running_loop().call_soon(self._answer, submit, number)
        return stream

    def answer_all(self) -> None:
        """Reply to all waiting requests, the last one first."""
        for number in reversed(range(len(self.submits))):
            if self.submits[number].request_id in self._streams:
                self._answer(self.submits[number], number)

    def abort(self, request_ids: list[str]) -> None:
        self.aborted += [one for one in request_ids if self._streams.pop(one, None) is not None]

    def _answer(self, submit: Submit, number: int) -> None:
        if (stream := self._streams.pop(submit.request_id, None)) is None:
            return
        if (failed := self.failures.get(number)) is not None:
            stream.put(Failed(submit.request_id, failed.kind, failed.message, failed.param))
            return
        spec, token_ids = submit.params, list(submit.prompt_token_ids)
        assert isinstance(spec, PoolingSpec)
        rows = [vector_of([one]) for one in token_ids] if spec.task in TOKEN_TASKS else [vector_of(token_ids)]
        width = 1 if spec.task == "classify" else spec.dimensions or WIDTH
        shape = (len(rows), width) if spec.task in TOKEN_TASKS else (width,)
        data = array("f", [value for row in rows for value in row[:width]])
        output = PooledOutput(Buffer(data.tobytes()), shape, "float32")
        stream.put(Finished(submit.request_id, FinishReason.STOP, num_cached_tokens=1, result=output))


def pooler_on(
    link: PoolingLink, config: ResolvedConfig, tokenizer: Tokenizer, live: LiveRequests | None = None
) -> Pooler:
    """Return a pooler whose engine has no priorities."""

    def check_priority(priority: int) -> None:
        if priority:
            raise InvalidRequestError("priority has no effect", "priority")

    return Pooler(link, tokenizer, config, TextThreads(), LiveRequests() if live is None else live, check_priority)
