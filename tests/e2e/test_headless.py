"""`octavo serve --headless`: an engine without HTTP, its owner, and the applications that join it."""

import asyncio
import os
import re
import signal
from pathlib import Path

import pytest
from servers import Server, descendants, left_after, of_module, serve
from waiting import TIMEOUT_S

from octavo import AsyncClient, SamplingParams
from octavo.frontend.cli.main import main
from octavo.protocol.errors import EngineDeadError, OverloadedError

LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


async def generate(client: AsyncClient, params: SamplingParams, began: asyncio.Event | None = None) -> list[int]:
    tokens: list[int] = []
    async for output in client.generate([5, 6, 7], params):
        tokens += output.outputs[0].token_ids
        if began:
            began.set()
    return tokens


def served(http: Server) -> list[int]:
    body = {"prompt": [5, 6, 7], "temperature": 0, "max_tokens": 400, "ignore_eos": True, "return_token_ids": True}
    tokens: list[int] = http.post("/v1/completions", body).json()["choices"][0]["token_ids"]
    return tokens


def test_its_owner_restarts_it_and_everybody_finishes(model: Path, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/engine"
    flags = ("--headless", "--engine-address", address, "--max-model-len", "512", "--dtype", "float32")

    async def use(server: Server, http: Server) -> None:
        async with AsyncClient.connect(address) as client:
            expected = await generate(client, LONG)
            assert await asyncio.to_thread(served, http) == expected
            began = asyncio.Event()
            running = asyncio.create_task(generate(client, LONG, began))
            over_http = asyncio.create_task(asyncio.to_thread(served, http))
            await asyncio.wait_for(began.wait(), TIMEOUT_S)
            (core,) = of_module(server.process.pid, "octavo.core_proc")
            os.kill(core, signal.SIGKILL)
            assert [await running, await over_http] == [expected, expected], "another core went on"
            http.signal(signal.SIGTERM)
            assert await asyncio.to_thread(http.wait, 20) == 0, http.output
            began.clear()
            running = asyncio.create_task(generate(client, LONG, began))
            await asyncio.wait_for(began.wait(), TIMEOUT_S)
            server.signal(signal.SIGTERM)
            await asyncio.to_thread(server.wait_for, "no new requests")
            with pytest.raises((OverloadedError, EngineDeadError)):
                await generate(client, LONG)
            assert await running == expected, "what was accepted is finished"

    with serve(model, *flags) as server:
        server.wait_for(f"headless: serving .* at {re.escape(address)}")
        below = descendants(server.process.pid)
        with serve(f"--join={address}") as http:
            http.wait_until_ready()
            asyncio.run(use(server, http))
        assert server.wait(TIMEOUT_S) == 0, server.output
        assert "listening on" not in server.output
        assert not left_after(below)
        assert not Path(f"{tmp_path}/engine").exists()


def test_it_has_no_http_processes(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(model), "--headless", "--api-server-count", "2"]) == 1
    assert "leave out --headless or --api-server-count" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["MODEL", "--join", "ipc:///nowhere"], "leave out MODEL, or --join"),
        (["--join", "ipc:///nowhere", "--max-num-seqs", "4"], "leave out --max-num-seqs, or --join"),
        (["--join", "ipc:///nowhere", "--headless"], "leave out --headless, or --join"),
        (["--join", "ipc:///nowhere", "--client-secret-key-file", "x"], "give both, or neither"),
        (["MODEL", "--client-secret-key-file", "x"], "leave out --client-secret-key-file, or name"),
        (["MODEL", "--headless", "--engine-public-key-file", "x"], "leave out --engine-public-key-file, or name"),
    ],
)
def test_flags_of_the_engine_are_rejected_by_a_server_that_joins(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--port", "0", *words]) == 1
    assert hint in capsys.readouterr().err
