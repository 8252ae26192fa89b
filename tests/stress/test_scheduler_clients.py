"""Several frontends of one core process: aborts, a frontend that dies, a frontend that does not read."""

import contextlib
import random
from pathlib import Path

import pytest
from core_client import SocketClient, running_core
from core_fakes import alone

from octavo.protocol.events import Finished, FinishReason, StatsReport, Tokens
from octavo.protocol.requests import Abort

NUM_CLIENTS = 3


@pytest.mark.parametrize("is_async", [False, True])
def test_every_request_of_every_frontend_ends_once_and_right(tmp_path: Path, is_async: bool) -> None:
    """The frontends share prompts, slots and a cache too small for all; one of them is gone half-way."""
    random_source = random.Random(0)
    requests = {
        str(index): (
            [1] * random_source.choice([0, 8])
            + [random_source.randrange(50) for _ in range(random_source.randint(1, 20))],
            random_source.randint(1, 30),
        )
        for index in range(40)
    }
    settings = {"num_blocks_override": 24, "max_num_batched_tokens": 16, "async_scheduling": is_async}
    with running_core(tmp_path, **settings) as core, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(SocketClient(core.address)) for _ in range(NUM_CLIENTS)]
        for client in clients:
            client.connect()
        with SocketClient(core.address) as doomed:
            doomed.connect()
            for name, (prompt, max_tokens) in requests.items():
                for client in [*clients, doomed]:
                    client.submit(name, prompt, max_tokens)
            doomed.finish("0")
        aborted = [name for name in requests if int(name) % 3 == 0]
        clients[0].send(Abort([*aborted, "unknown"]))
        for client in clients:
            client.finish(*requests)
        for client in clients:
            for name, (prompt, max_tokens) in requests.items():
                check(client, name, alone(prompt, max_tokens).token_ids)
        stats = clients[0].receive_until(lambda event: isinstance(event, StatsReport) and not event.stats.num_running)
        assert stats.stats.num_free_blocks == stats.stats.num_blocks
        assert stats.stats.num_preemptions > 0


def check(client: SocketClient, name: str, expected: list[int]) -> None:
    *tokens, end = client.request_events(name)
    assert all(isinstance(event, Tokens) for event in tokens)
    assert isinstance(end, Finished)
    token_ids = [token for event in tokens for token in event.token_ids]
    if end.reason is FinishReason.ABORT:
        assert token_ids == expected[: len(token_ids)]
    else:
        assert token_ids == expected


def test_a_frontend_that_does_not_read_gets_everything_later(tmp_path: Path) -> None:
    """Far more events than the sockets between the two hold; the core goes on and serves others meanwhile."""
    settings = {"max_model_len": 300, "num_blocks_override": 80, "max_num_seqs": 1, "max_num_batched_tokens": 8}
    # Long names fill the kernel's buffers sooner.
    requests = {f"{index}".zfill(4000): [index + 1] for index in range(10)}
    with running_core(tmp_path, **settings) as core, SocketClient(core.address) as slow:
        slow.connect()
        for name, prompt in requests.items():
            slow.submit(name, prompt, 250)
        with SocketClient(core.address) as other:
            other.connect()
            other.receive_until(lambda event: isinstance(event, StatsReport) and not event.stats.num_running)
        slow.finish(*requests)
        for name, prompt in requests.items():
            check(slow, name, alone(prompt, 250).token_ids)
        last = next(iter(reversed(requests)))
        assert any(len(event.token_ids) > 1 for event in slow.request_events(last)[:-1]), "nothing was merged"
