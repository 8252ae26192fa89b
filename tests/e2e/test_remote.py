"""An application joins an engine over tcp, with the right keys only."""

import asyncio
from pathlib import Path

import pytest
from servers import serve
from tiny_models import make_tiny

from octavo import AsyncClient, SamplingParams
from octavo.frontend import engine_connection
from octavo.frontend.cli.main import main
from octavo.protocol.errors import StartupError


def test_an_application_joins_by_tcp(tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny("LlamaForCausalLM", tmp_path / "model")
    for name in ("engine", "friend", "stranger"):
        assert main(["keygen", name, "--directory", str(tmp_path)]) == 0
    address = f"tcp://127.0.0.1:{free_port}"
    flags = ["--engine-address", address, "--engine-secret-key-file", str(tmp_path / "engine.key_secret")]
    flags += ["--engine-authorized-clients", str(tmp_path / "friend.key")]

    async def generate(client: str, engine: str = "engine") -> list[int]:
        keys = {
            "client_secret_key_file": str(tmp_path / f"{client}.key_secret"),
            "engine_public_key_file": str(tmp_path / f"{engine}.key"),
        }
        async with AsyncClient.connect(address, **keys) as joined:
            tokens: list[int] = []
            async for output in joined.generate("abc", SamplingParams(temperature=0.0, max_tokens=5)):
                tokens += output.outputs[0].token_ids
            return tokens

    with serve(tmp_path / "model", "--served-model-name", "m", *flags) as server:
        server.wait_until_ready()
        assert address in server.output
        body = {"model": "m", "prompt": "abc", "temperature": 0, "max_tokens": 5, "return_token_ids": True}
        expected = server.post("/v1/completions", body).json()["choices"][0]["token_ids"]
        assert asyncio.run(generate("friend")) == expected
        with monkeypatch.context() as impatient:
            impatient.setattr(engine_connection, "CONNECT_TIMEOUT_S", 1.0)
            for client, engine in (("stranger", "engine"), ("friend", "stranger")):
                with pytest.raises(StartupError, match="no engine answers on tcp"):
                    asyncio.run(generate(client, engine))
        assert asyncio.run(generate("friend")) == expected


def test_an_address_that_others_reach_needs_keys(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    make_tiny("LlamaForCausalLM", tmp_path / "model")
    assert main(["serve", str(tmp_path / "model"), "--port", "0", "--engine-address", "tcp://0.0.0.0:5999"]) == 1
    assert "needs keys" in capsys.readouterr().err.splitlines()[-1]
