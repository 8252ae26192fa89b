"""Prompt embeddings through a whole engine: `LLM`, the server, and deaths of the worker and the core."""

import asyncio
import base64
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engine_kills import assert_deaths_change_nothing
from hung_steps import PLUGIN
from peft_adapters import tokens_of_peft, write_adapter, write_soft_prompt
from safetensors.torch import save
from servers import Server, serve

from octavo import LLM, AsyncClient, LoRARequest, SamplingParams
from octavo.frontend.generation.prompt import TokenizedPrompt
from octavo.frontend.generation.soft_prompt import has_soft_prompt, read_soft_prompt, with_soft_prompt
from octavo.frontend.outputs import RequestOutput
from octavo.protocol import restarts
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.ids import pack_ids
from octavo.protocol.params import BeamSearchParams

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 32,
    "enable_prompt_embeds": True,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)
SAMPLED = SamplingParams(temperature=0.9, seed=4, max_tokens=100, ignore_eos=True, logprobs=1, repetition_penalty=1.1)


@pytest.fixture(scope="module")
def reference(model: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


@pytest.fixture(scope="module")
def taking(model: Path) -> Iterator[LLM]:
    with LLM(str(model), **SETTINGS) as llm:
        yield llm


def embeds_of_model(model: Path, tokens: list[int]) -> torch.Tensor:
    return embeds_of(transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), tokens)


def embeds_of(reference: transformers.PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return reference.get_input_embeddings()(torch.tensor(tokens))


def result(output: RequestOutput) -> object:
    return [(one.token_ids, one.logprobs, one.finish_reason) for one in output.outputs]


def test_rows_among_tokens(taking: LLM, reference: transformers.PreTrainedModel) -> None:
    """The embeddings of tokens give the bits of the tokens; other rows give what `transformers` gives."""
    tokens = list(range(3, 90))
    rows = torch.randn(50, reference.config.hidden_size, generator=torch.Generator().manual_seed(2)) * 0.3
    prompts = [tokens, {"prompt_embeds": embeds_of(reference, tokens)}, {"prompt_embeds": rows[None]}, [5, 6, 7]]
    by_token, by_row, free, short = taking.generate(prompts, GREEDY, use_tqdm=False)
    assert result(by_token) == result(by_row)
    assert by_row.prompt_token_ids == [0] * len(tokens), "as in vLLM"
    expected = reference.generate(inputs_embeds=rows[None], max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert free.outputs[0].token_ids == expected[0].tolist()
    assert result(short) == result(taking.generate([5, 6, 7], GREEDY, use_tqdm=False)[0])
    (cached,) = taking.generate({"prompt_embeds": rows}, GREEDY, use_tqdm=False)
    assert (cached.num_cached_tokens, result(cached)) == (48, result(free))
    (salted,) = taking.generate({"prompt_embeds": rows, "cache_salt": "other"}, GREEDY, use_tqdm=False)
    assert (salted.num_cached_tokens, result(salted)) == (0, result(free))
    several = taking.generate({"prompt_embeds": rows}, SAMPLED.clone(n=3, max_tokens=5), use_tqdm=False)[0]
    assert len({tuple(one.token_ids) for one in several.outputs}) == 3


def test_what_is_refused(taking: LLM, llm: LLM) -> None:
    width = taking.client.config.model.embedding_width
    rows = torch.zeros(3, width)
    with pytest.raises(InvalidRequestError, match="--enable-prompt-embeds"):
        llm.generate({"prompt_embeds": rows}, use_tqdm=False)
    part = {"type": "prompt_embeds", "data": rows}
    with pytest.raises(InvalidRequestError, match=r"messages\[0\].content\[0\].data: .* --enable-prompt-embeds"):
        llm.chat([{"role": "user", "content": [part]}], use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="prompt_logprobs"):
        taking.generate({"prompt_embeds": rows}, GREEDY.clone(prompt_logprobs=1), use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="beam search"):
        taking.beam_search({"prompt_embeds": rows}, BeamSearchParams(beam_width=2, max_tokens=3))
    with pytest.raises(InvalidRequestError, match="NaN"):
        taking.generate({"prompt_embeds": rows / 0}, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="max_tokens 400"):
        taking.generate({"prompt_embeds": rows}, GREEDY.clone(max_tokens=400), use_tqdm=False)


def test_rows_with_a_lora_adapter(model: Path, reference: transformers.PreTrainedModel, tmp_path: Path) -> None:
    """An adapter of linear layers works on rows, and one of the embedding leaves them as they are."""
    tokens = list(range(3, 60))
    rows = embeds_of(reference, tokens)
    linear, table = LoRARequest("linear", 1, str(tmp_path / "l")), LoRARequest("table", 2, str(tmp_path / "t"))
    write_adapter(model, Path(linear.lora_path))
    write_adapter(model, Path(table.lora_path), target_modules=["embed_tokens"])
    with LLM(str(model), **SETTINGS, enable_lora=True, max_lora_rank=8) as llm:
        prompts = [tokens, {"prompt_embeds": rows}]
        (base, _), (changed, also), (other, same) = (
            llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=request) for request in (None, linear, table)
        )
    assert result(changed) == result(also) != result(base)
    before, by_token, by_row = ((one.outputs[0].logprobs or [])[0] for one in (base, other, same))
    assert by_row == before != by_token, "outputs are looked up in the table of the adapter"


@pytest.mark.long
def test_ranks_and_stages_have_the_bits_of_one_worker(taking: LLM, model: Path) -> None:
    rows = torch.randn(50, taking.client.config.model.embedding_width, generator=torch.Generator().manual_seed(7))
    prompts = [{"prompt_embeds": rows}, [5, 6, 7], {"prompt_embeds": rows[:9]}]
    expected = list(map(result, taking.generate(prompts, SAMPLED.clone(max_tokens=9), use_tqdm=False)))
    with LLM(str(model), **SETTINGS, tensor_parallel_size=2, pipeline_parallel_size=2) as several:
        assert list(map(result, several.generate(prompts, SAMPLED.clone(max_tokens=9), use_tqdm=False))) == expected


@pytest.fixture(scope="module")
def soft_prompt(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A soft prompt of 7 rows that peft has written."""
    directory = tmp_path_factory.mktemp("soft")
    write_soft_prompt(model, directory, num_rows=7)
    return directory


def test_soft_prompts_come_before_tokens_and_rows(taking: LLM, soft_prompt: Path, model: Path) -> None:
    config, tokens = taking.client.config, list(range(3, 30))
    rows = read_soft_prompt(soft_prompt, config)
    plain = TokenizedPrompt("shown", pack_ids(tokens))
    (output,) = taking.generate([with_soft_prompt(plain, rows)], GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == tokens_of_peft(model, soft_prompt, tokens, 6)
    twice = with_soft_prompt(with_soft_prompt(plain, rows), rows)
    assert twice.embeds is not None
    assert twice.embeds.spans == [(0, 7), (7, 7)]
    both = torch.frombuffer(bytearray(twice.embeds.data.data), dtype=torch.float32).view(14, -1)
    own = {"prompt_embeds": torch.cat((both, embeds_of_model(model, tokens)))}
    of_spans, of_rows = taking.generate([twice, own], GREEDY, use_tqdm=False)
    assert result(of_spans) == result(of_rows)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "PREFIX_TUNING"}, "prefix tuning"),
        ({"peft_type": "P_TUNING"}, "p-tuning"),
        ({"num_virtual_tokens": 8}, "7 rows"),
        ({"num_transformer_submodules": 2}, "num_transformer_submodules 2"),
        ({"task_type": "SEQ_2_SEQ_LM"}, "task_type"),
        ({"a_new_field": 1}, "a_new_field"),
    ],
)
def test_other_prompts_of_peft_are_refused(
    taking: LLM, soft_prompt: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    settings = json.loads((soft_prompt / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings | changes))
    (tmp_path / "adapter_model.safetensors").symlink_to(soft_prompt / "adapter_model.safetensors")
    with pytest.raises(InvalidRequestError, match=message) as found:
        assert has_soft_prompt(tmp_path)
        read_soft_prompt(tmp_path, taking.client.config)
    assert found.value.param == "lora_path"


def test_deaths_of_the_worker_and_the_core(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that run and requests that wait are computed from their rows again; cached rows are gone."""
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 0.01)
    monkeypatch.setenv("OCTAVO_CHECK", "1")

    def prompt_of(width: int, seed: int) -> dict[str, Any]:
        # The longest are sent as a frame of their own.
        rows = torch.randn(20 + 100 * (seed % 2), width, generator=torch.Generator().manual_seed(seed % 3)) * 0.3
        return {"prompt_embeds": rows}

    async def main() -> None:
        async with await AsyncClient.launch(str(model), **SETTINGS, logits_processors=[PLUGIN]) as client:
            width = client.config.model.embedding_width
            await assert_deaths_change_nothing(client, partial(prompt_of, width), SAMPLED)

    asyncio.run(main())


@pytest.fixture(scope="module")
def embeds_server(model: Path, soft_prompt: Path) -> Iterator[Server]:
    flags = ("--dtype", "float32", "--max-model-len", "128", "--enable-prompt-embeds", "--served-model-name", "tiny")
    with serve(model, *flags, "--lora-modules", f"soft={soft_prompt}") as server:
        yield server.wait_until_ready()


def test_completions(embeds_server: Server, reference: transformers.PreTrainedModel, tmp_path: Path) -> None:
    tokens = list(range(3, 40))
    rows = embeds_of(reference, tokens)
    torch.save(rows, tmp_path / "rows.pt")
    encoded = [base64.b64encode(data).decode() for data in (save({"rows": rows}), (tmp_path / "rows.pt").read_bytes())]
    body = {"model": "tiny", "max_tokens": 5, "temperature": 0, "logprobs": 1}
    answer = embeds_server.post("/v1/completions", {**body, "prompt_embeds": encoded, "prompt": tokens}).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len({choice["text"] for choice in answer["choices"]}) == 1
    assert answer["usage"]["prompt_tokens"] == 3 * len(tokens)
    alone = embeds_server.post("/v1/completions", {**body, "prompt_embeds": encoded[0]}).json()
    assert [choice["text"] for choice in alone["choices"]] == [answer["choices"][0]["text"]]
    for changes, param in (
        ({"echo": True}, "echo"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"use_beam_search": True, "n": 2}, "use_beam_search"),
        ({"prompt_embeds": "?"}, "prompt_embeds"),
        ({"prompt_embeds": []}, "prompt"),
    ):
        refused = embeds_server.post("/v1/completions", {**body, "prompt_embeds": encoded[0], **changes})
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == param, refused.text


def test_conversations(embeds_server: Server, taking: LLM, reference: transformers.PreTrainedModel) -> None:
    """Parts of a message that are the embeddings of its text give the answer to the text."""
    texts = ["Once upon", "there was", "a king."]
    tokens = [embeds_server.post("/tokenize", {"prompt": one, "add_special_tokens": False}).json() for one in texts]
    rows = [embeds_of(reference, one["tokens"]) for one in tokens]
    first, last = (
        {"type": "prompt_embeds", "data": base64.b64encode(save({"rows": rows[index]})).decode()} for index in (0, 2)
    )
    shown = [{"type": "text", "text": one} for one in texts]
    messages = [{"role": "system", "content": [last]}, {"role": "user", "content": [first, shown[1], last]}]
    plain = [{"role": "system", "content": texts[2]}, {"role": "user", "content": shown}]
    body = {"model": "tiny", "max_tokens": 5, "temperature": 0, "logprobs": True, "top_logprobs": 2}

    def ask(messages: list[dict[str, Any]], **changes: Any) -> Any:
        answer = embeds_server.post("/v1/chat/completions", {**body, "messages": messages, **changes})
        return answer.json() if answer.status_code == 200 else answer

    expected, answer = ask(plain), ask(messages, return_token_ids=True)
    for one, other in zip(expected["choices"], answer["choices"], strict=True):
        assert (one["message"], one["logprobs"]) == (other["message"], other["logprobs"])
    assert answer["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
    num_rows = 2 * len(tokens[2]["tokens"]) + len(tokens[0]["tokens"])
    assert answer["prompt_token_ids"].count(0) >= num_rows
    both = embeds_server.post("/v1/chat/completions/batch", {**body, "messages": [plain, messages]}).json()
    assert both["choices"][0]["logprobs"] == both["choices"][1]["logprobs"]
    streamed = embeds_server.post("/v1/chat/completions", {**body, "messages": messages, "stream": True}).text
    deltas = [
        json.loads(line[6:])["choices"][0]["delta"] for line in streamed.split("\n\n") if line.startswith("data: {")
    ]
    assert "".join(delta.get("content", "") for delta in deltas) == expected["choices"][0]["message"]["content"]
    tensors = [{"type": "prompt_embeds", "data": one} for one in (rows[0], rows[2])]
    offline = [{**messages[0], "content": [tensors[1]]}, {**messages[1], "content": [tensors[0], shown[1], tensors[1]]}]
    by_row, by_token = taking.chat([offline, plain], GREEDY, use_tqdm=False)
    assert result(by_row) == result(by_token)
    for part, changes, param in (
        ({"type": "prompt_embeds"}, {}, "messages[0].content[0].data"),
        ({"type": "prompt_embeds", "data": 5}, {}, "messages[0].content[0].data"),
        ({"type": "prompt_embeds", "data": "?"}, {}, "messages[0].content[0].data"),
        (last, {"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        (last, {"use_beam_search": True, "n": 2}, "use_beam_search"),
        (last, {"prompt_logprobs": 1}, "prompt_logprobs"),
        (last, {"kv_transfer_params": {"prompt_token_ids": [1]}}, "messages[0].content[0].data"),
        (last, {"chat_template": "no content"}, "chat_template"),
    ):
        refused = ask([{"role": "user", "content": [part]}], **changes)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text


def test_a_soft_prompt_is_a_model(embeds_server: Server, taking: LLM, soft_prompt: Path, model: Path) -> None:
    tokens = list(range(3, 30))
    expected = tokens_of_peft(model, soft_prompt, tokens, 6)
    body = {"prompt": tokens, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = embeds_server.post("/v1/completions", {**body, "model": "soft"}).json()
    assert answer["choices"][0]["token_ids"] == expected
    assert answer["usage"]["prompt_tokens"] == 7 + len(tokens)
    assert answer["model"] == "soft"
    plain = embeds_server.post("/v1/completions", {**body, "model": "tiny"}).json()
    assert plain["choices"][0]["token_ids"] != expected
    assert {one["id"] for one in embeds_server.get("/v1/models").json()["data"]} == {"tiny", "soft"}
    request = LoRARequest("soft", 1, str(soft_prompt))
    (output,) = taking.generate([tokens], GREEDY, use_tqdm=False, lora_request=request)
    assert output.outputs[0].token_ids == expected
    with pytest.raises(InvalidRequestError, match="soft prompts have not"):
        taking.generate([tokens], GREEDY.clone(prompt_logprobs=1), use_tqdm=False, lora_request=request)
