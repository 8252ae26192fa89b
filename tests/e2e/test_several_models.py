"""`octavo serve --join` of a chat engine and an embedding engine: both models behind one port."""

from contextlib import ExitStack
from pathlib import Path

import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam
from servers import serve
from tiny_models import make_tiny

from octavo.frontend.cli.main import main

FLAGS = ("--headless", "--dtype", "float32", "--max-model-len", "256", "--kv-cache-memory-bytes", "16M")


def test_a_chat_and_an_embedding_model_behind_one_port(model: Path, tmp_path: Path) -> None:
    embedder = make_tiny("Qwen3ForCausalLM", tmp_path / "embedder")
    addresses = [f"ipc://{tmp_path}/{name}" for name in ("chat", "embed")]
    with ExitStack() as stack:
        for home, address, flags in ((model, addresses[0], ()), (embedder, addresses[1], ("--runner", "pooling"))):
            name = ("--served-model-name", Path(address).name)
            stack.enter_context(serve(home, *FLAGS, "--engine-address", address, *name, *flags))
        server = stack.enter_context(
            serve(*(f"--join={one}" for one in addresses), "--admin-api-key", "admin")
        ).wait_until_ready()
        api = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        assert [one.id for one in api.models.list()] == ["chat", "embed"]

        message: ChatCompletionUserMessageParam = {"role": "user", "content": "the fox"}
        answer = api.chat.completions.create(model="chat", messages=[message], max_tokens=4, temperature=0)
        assert answer.model == "chat" and answer.usage and answer.usage.completion_tokens
        vectors = api.embeddings.create(model="embed", input=["the fox", "the lazy dog"])
        assert vectors.model == "embed" and len(vectors.data) == 2 and len(vectors.data[0].embedding) > 1

        with pytest.raises(openai.BadRequestError):
            api.embeddings.create(model="chat", input="the fox")
        with pytest.raises(openai.NotFoundError, match="use 'chat' or 'embed'"):
            api.embeddings.create(model="other", input="the fox")
        metrics = server.get("/metrics").text
        assert 'octavo:request_success_total{engine="0",finished_reason="length",model_name="chat"} 1.0' in metrics
        assert 'octavo:num_requests_running{engine="0",model_name="embed"} 0.0' in metrics
        assert server.get("/dashboard/state?model=embed").json()["engine"]["models"] == ["embed"]
        operator = ["admin", "engines", "list", "--url", server.url, "--admin-api-key", "admin"]
        assert main([*operator, "--served-model", "embed"]) == 0
        assert main(operator) == 1, "which model's engines?"

        twice = stack.enter_context(serve(*[f"--join={addresses[0]}"] * 2))
        assert twice.wait(60) == 1
        assert "both serve 'chat'" in twice.output
