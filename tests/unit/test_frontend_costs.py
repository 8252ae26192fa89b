"""What a request costs the frontend: bytes while it waits, wake-ups while it streams, messages when it is aborted."""

import asyncio
import gc
import json
import tracemalloc
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from fake_client import FakeClient
from http_client import application, listening
from idle_engine import VOCAB_SIZE, IdleLink, idle_client, shut
from waiting import until

from octavo.frontend import wake_event
from octavo.frontend.client import AsyncClient
from octavo.frontend.generation.fanout import Generation
from octavo.frontend.http.throttle import MAX_AT_ONCE
from octavo.frontend.loop_socket import LoopSocket
from octavo.frontend.outputs import RequestOutput
from octavo.frontend.wire import MAX_ABORTS, Wire
from octavo.protocol.codec import request_codec
from octavo.protocol.errors import EngineDeadError
from octavo.protocol.events import Finished, FinishReason, Tokens
from octavo.protocol.params import SamplingParams
from octavo.protocol.requests import Abort

NUM_REQUESTS = 12
LENGTHS = (200, 4_200)

Ask = Callable[[AsyncClient, int, int], Awaitable[None]]


async def bytes_of_waiting_requests(client: AsyncClient, link: IdleLink, ask: Ask, num_tokens: int) -> int:
    """Return what `NUM_REQUESTS` requests with prompts of this length keep while they wait."""
    gc.collect()
    before, num_sent = tracemalloc.get_traced_memory()[0], link.wire.num_sent
    tasks = [asyncio.ensure_future(ask(client, number, num_tokens)) for number in range(NUM_REQUESTS)]
    await until(lambda: link.wire.num_sent == num_sent + NUM_REQUESTS)
    gc.collect()
    size = tracemalloc.get_traced_memory()[0] - before
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await until(lambda: not link.num_live_requests)
    return size


async def bytes_per_waiting_token(client: AsyncClient, link: IdleLink, ask: Ask) -> float:
    await bytes_of_waiting_requests(client, link, ask, LENGTHS[0])  # whatever is made once
    tracemalloc.start()
    try:
        short, long = [await bytes_of_waiting_requests(client, link, ask, length) for length in LENGTHS]
    finally:
        tracemalloc.stop()
    return (long - short) / NUM_REQUESTS / (LENGTHS[1] - LENGTHS[0])


async def ask_with_token_ids(client: AsyncClient, number: int, num_tokens: int) -> None:
    prompt = [1_000 + (number * 7 + place) % (VOCAB_SIZE - 1_000) for place in range(num_tokens)]
    outputs = client.generate(prompt, SamplingParams(max_tokens=3))
    del prompt
    async for _ in outputs:
        pass


async def post_chat(path: str, client: AsyncClient, number: int, num_tokens: int) -> None:
    """Send a request whose prompt has a token for each character, and keep nothing of it here."""
    reader, writer = await asyncio.open_unix_connection(path)
    body = {"messages": [{"role": "user", "content": "x" * num_tokens}], "stream": number % 2 == 0}
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(data)}\r\n"
    writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + data)
    del body, data
    try:
        await reader.read()
    finally:
        writer.close()


def test_a_waiting_token_takes_four_bytes() -> None:
    async def main() -> float:
        client, link = idle_client()
        try:
            return await bytes_per_waiting_token(client, link, ask_with_token_ids)
        finally:
            shut(client)

    assert asyncio.run(main()) < 4.5


def test_a_waiting_chat_keeps_neither_its_body_nor_its_prompt() -> None:
    async def main() -> float:
        client, link = idle_client()
        try:
            async with listening(application(client)) as path:  # type: ignore[arg-type]
                return await bytes_per_waiting_token(client, link, partial(post_chat, path))
        finally:
            shut(client)

    assert asyncio.run(main()) < 4.5


def test_a_waiting_request_has_one_task() -> None:
    """A disconnect cancels it without a task that waits for that."""

    async def main() -> None:
        client, link = idle_client()
        async with listening(application(client)) as path:  # type: ignore[arg-type]
            others = asyncio.all_tasks()
            writers = []
            for is_streamed, num_chars in ((True, 3), (False, 3), (False, 100_000)):  # uvicorn pauses reading at 64 KiB
                _, writer = await asyncio.open_unix_connection(path)
                body = json.dumps({"prompt": "a" * num_chars, "stream": is_streamed}).encode()
                head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
                writer.write(head + b"content-length: %d\r\n\r\n" % len(body))
                writers.append(writer)
                await until(lambda: len(asyncio.all_tasks() - others) == len(writers))  # it reads the body
                writer.write(body)
            await until(lambda: link.num_live_requests == len(writers))
            assert len(asyncio.all_tasks() - others) == len(writers)
            for writer in writers:
                writer.transport.abort()
            await until(lambda: asyncio.all_tasks() == others)
            assert not link.num_live_requests
        shut(client)

    asyncio.run(main())


def test_a_message_of_events_wakes_each_stream_once() -> None:
    """However many streams, tokens and events the message has: one future for each stream and no other task."""
    num_streams, num_futures = 50, 0

    class Loop(asyncio.SelectorEventLoop):
        def create_future(self) -> "asyncio.Future[None]":
            nonlocal num_futures
            num_futures += 1
            return super().create_future()

    async def main() -> list[list[str]]:
        client, link = idle_client()
        link.wire.keeps = True
        texts: list[list[str]] = [[] for _ in range(num_streams)]

        async def consume(number: int) -> None:
            async for output in client.generate([65, 66], SamplingParams(max_tokens=9, ignore_eos=True)):
                texts[number].append(output.outputs[0].text)

        tasks = [asyncio.create_task(consume(number)) for number in range(num_streams)]
        await until(lambda: len(link.submitted) == num_streams)
        ids = [submit.request_id for submit in link.submitted]
        link.receive([Tokens(request_id, [67]) for request_id in ids])
        await until(lambda: all(texts))
        before, num_tasks = num_futures, len(asyncio.all_tasks())
        for token_id in (68, 69):
            link.receive([Tokens(request_id, [token_id, token_id]) for request_id in ids])
            for _ in range(2 + num_streams // wake_event.MAX_AT_ONCE):
                await asyncio.sleep(0)
        assert num_futures - before == 2 * num_streams and len(asyncio.all_tasks()) == num_tasks
        link.receive([Finished(request_id, FinishReason.LENGTH) for request_id in ids])
        await asyncio.gather(*tasks)
        shut(client)
        return texts

    with asyncio.Runner(loop_factory=Loop) as runner:
        assert runner.run(main()) == [["C", "DD", "EE", ""]] * num_streams


@pytest.mark.parametrize("end", ["abort", "failure", "tokens"])
def test_consumers_are_woken_a_few_per_turn(end: str) -> None:
    """However many requests end or get tokens at once, one turn of the event loop wakes a few consumers only."""

    async def main() -> list[int]:
        client, link = idle_client()
        link.wire.keeps = True
        woken = [0]

        async def consume() -> None:
            try:
                async for _ in client.generate([65, 66], SamplingParams(max_tokens=9)):
                    break
            except EngineDeadError:
                pass
            woken[-1] += 1

        tasks = [asyncio.create_task(consume()) for _ in range(100)]
        await until(lambda: len(link.submitted) == len(tasks))
        if end == "abort":
            client.abort_all()
        elif end == "failure":
            link.fail("it is gone")
        else:
            link.receive([Tokens(submit.request_id, [67]) for submit in link.submitted])
        async with asyncio.timeout(30):
            while sum(woken) < len(tasks):
                await asyncio.sleep(0)
                woken.append(0)
        await asyncio.gather(*tasks)
        shut(client)
        return woken

    assert 0 < max(asyncio.run(main())) <= wake_event.MAX_AT_ONCE


def test_aborts_of_one_turn_share_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty thousand clients that leave together are twenty messages, not twenty thousand."""
    sent: list[list[bytes]] = []

    class Socket(LoopSocket):
        def send(self, frames: list[bytes]) -> None:  # type: ignore[override]
            sent.append(frames)

    async def main() -> None:
        import zmq

        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        monkeypatch.setattr("octavo.frontend.wire.LoopSocket", Socket)
        wire = Wire(context, f"ipc://{tmp_path}/s", lambda event: None, lambda wire: None, lambda error: None)
        for number in range(20_000):
            wire.abort([str(number)])
        assert not sent
        await asyncio.sleep(0)
        wire.close(linger_ms=0)
        context.destroy(linger=0)

    asyncio.run(main())
    codec = request_codec()
    aborts = [codec.decode(*frames) for frames in sent]
    assert len(aborts) == -(-20_000 // MAX_ABORTS)
    names = [name for abort in aborts if isinstance(abort, Abort) for name in abort.request_ids]
    assert names == [str(number) for number in range(20_000)]


def test_two_messages_in_one_turn_are_taken_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The consumer does not look again when it has already taken what came while it was about to wake."""
    num_takes = 0
    take = Generation.take

    def counted(generation: Generation) -> RequestOutput | None:
        nonlocal num_takes
        num_takes += 1
        return take(generation)

    monkeypatch.setattr(Generation, "take", counted)

    async def main() -> list[str]:
        client, link = idle_client()
        link.wire.keeps = True

        async def consume() -> list[str]:
            return [output.outputs[0].text async for output in client.generate([65], SamplingParams(max_tokens=9))]

        task = asyncio.create_task(consume())
        await until(lambda: bool(link.submitted))
        (submit,) = link.submitted
        for event in (Tokens(submit.request_id, [67]), Tokens(submit.request_id, [68])):
            link.receive([event])
        await until(lambda: num_takes > 0)
        for _ in range(3):
            await asyncio.sleep(0)
        assert num_takes == 1
        link.receive([Finished(submit.request_id, FinishReason.LENGTH)])
        texts = await task
        shut(client)
        return texts

    assert asyncio.run(main()) == ["CD", ""]
    assert num_takes == 2


def test_clients_that_leave_together_do_not_stall_the_event_loop() -> None:
    """However many disconnects one turn finds, it ends the work on a few requests only."""

    async def main() -> list[int]:
        client = FakeClient()
        client.pause_after = 1
        async with listening(application(client)) as path:
            writers = []
            for _ in range(60):
                reader, writer = await asyncio.open_unix_connection(path)
                body = b'{"prompt": "a", "stream": true}'
                head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
                writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
                assert b"data:" in await reader.readuntil(b"data:")
                writers.append(writer)
            for writer in writers:
                writer.transport.abort()
            ended = [0]
            async with asyncio.timeout(30):
                while ended[-1] < len(writers):
                    await asyncio.sleep(0)
                    ended.append(len(client.ended_early))
            return [after - before for before, after in pairwise(ended)]

    assert max(asyncio.run(main())) <= MAX_AT_ONCE
