"""Images through whole engines: against `transformers`, in storms, through deaths of processes, and over HTTP."""

import asyncio
import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import transformers
from engine_kills import assert_deaths_change_nothing
from hung_steps import PLUGIN
from media_compare import GREEDY, compare, prompt, result, run
from PIL import Image
from servers import Server, serve
from tiny_media import IMAGE, make_llava, make_smolvlm, picture

from octavo import LLM, AsyncClient, SamplingParams
from octavo.protocol import restarts
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.params import BeamSearchParams

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 32,  # chunks end inside of images, which have 25 rows
    "encoder_cache_tokens": 60,  # of which two fit
}
SAMPLED = SamplingParams(temperature=0.9, seed=4, max_tokens=60, ignore_eos=True, logprobs=1, repetition_penalty=1.1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(str(path), **SETTINGS) as llm:
        yield llm


PROMPTS = [
    prompt(f"look at {IMAGE} here", 1),
    prompt(f"{IMAGE}{IMAGE}the same twice", 2, 2),
    prompt(f"one {IMAGE} and another {IMAGE}, and a third {IMAGE} of them", 1, 2, 3),
    prompt(f"ends with {IMAGE}", 4),
    prompt("no image at all"),
]


def test_tokens_and_logprobs_equal_transformers(llm: LLM, path: Path) -> None:
    compare(llm, path, transformers.LlavaForConditionalGeneration, PROMPTS)


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_tiles_and_merged_rows_equal_transformers(tmp_path: Path, kernels: str) -> None:
    """SmolVLM: an image is several spans, with tokens between them, and a run of the tower has several tiles."""
    path = make_smolvlm(tmp_path)
    with LLM(str(path), **{**SETTINGS, "encoder_cache_tokens": 100}, cpu_kernels=kernels) as llm:
        compare(llm, path, transformers.Idefics3ForConditionalGeneration, PROMPTS)
        prompts = [prompt(f"number {seed} of {IMAGE}", seed % 3) for seed in range(8)]
        alone = [result(run(llm, one, params=SAMPLED)[0]) for one in prompts]
        assert list(map(result, run(llm, *prompts, params=SAMPLED))) == alone


def test_a_request_in_a_storm_has_the_bits_that_it_has_alone(llm: LLM, path: Path) -> None:
    """Cached prefixes, the same and other images behind equal tokens, evictions from the encoder cache, preemptions."""
    texts = [
        f"a question about {IMAGE}: ",
        f"{IMAGE} then {IMAGE} which is it?",
        "no image",
        f"long {'word ' * 12}{IMAGE}",
    ]
    prompts = [prompt(texts[seed % 4], *[seed % 5, seed % 3][: texts[seed % 4].count(IMAGE)]) for seed in range(24)]
    params = [SAMPLED.clone(seed=seed, max_tokens=20) for seed in range(24)]
    alone = [result(run(llm, one, params=own)[0]) for one, own in zip(prompts, params, strict=True)]
    assert len({str(one) for one in alone}) == 24
    together = llm.generate(prompts, params, use_tqdm=False)
    assert list(map(result, together)) == alone
    assert any(output.num_cached_tokens for output in together)
    with LLM(str(path), **SETTINGS, num_gpu_blocks_override=18, enable_prefix_caching=False) as small:
        assert list(map(result, small.generate(prompts, params, use_tqdm=False))) == alone
        stats = small.stats()
    assert stats.num_preemptions > 0
    assert stats.encoder_cache_queries > stats.encoder_cache_hits > 0
    assert 0 < stats.num_cached_encoder_tokens <= stats.num_encoder_cache_tokens < stats.encoder_tokens


def test_the_prefix_cache_tells_images_apart(llm: LLM) -> None:
    text = f"{'the same words ' * 4}{IMAGE}{'and then some more of them ' * 3}"
    first, again, other = (run(llm, prompt(text, seed))[0] for seed in (31, 31, 32))
    assert (first.prompt_token_ids, result(first)) == (other.prompt_token_ids, result(again))
    assert result(other) != result(first)
    start = (first.prompt_token_ids or []).index(320)
    assert (again.num_cached_tokens or 0) > start + 25
    assert (other.num_cached_tokens or 0) <= start


def test_scores_are_those_of_sampling(llm: LLM) -> None:
    one = prompt(f"what is {IMAGE}?", 5)
    (output,) = run(llm, one, params=SAMPLED.clone(max_tokens=8))
    drawn = output.outputs[0]
    assert drawn.logprobs is not None
    sampled = [row[token].logprob for row, token in zip(drawn.logprobs, drawn.token_ids, strict=True)]
    assert llm.score_tokens(one, drawn.token_ids) == sampled
    assert llm.score_tokens(prompt(f"what is {IMAGE}?", 6), drawn.token_ids) != sampled


def test_conversations(llm: LLM) -> None:
    buffer = io.BytesIO()
    picture(1).save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    question = {"type": "text", "text": "what is it?"}
    results = []
    for part in (
        {"type": "image", "image": picture(1)},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": url},
    ):
        (output,) = llm.chat([{"role": "user", "content": [part, question]}], GREEDY, use_tqdm=False)
        results.append((output.prompt_token_ids, result(output)))
    assert results[0] == results[1] == results[2]
    rendered = f"<|user|>\n{IMAGE}what is it?<|turn_end|>\n<|assistant|>\n"
    assert result(run(llm, prompt(rendered, 1))[0]) == results[0][1]


def test_what_is_refused(llm: LLM) -> None:
    for one, message in (
        (prompt("no mark", 1), "0 placeholders"),
        ({"prompt": "a", "multi_modal_data": {"video": 1}}, "video"),
        ({"prompt": IMAGE, "multi_modal_data": {"image": b"?"}}, r"image'\]\[0\]: .* not an image"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            run(llm, one)
    with pytest.raises(InvalidRequestError, match="beam search takes no media"):
        llm.beam_search([prompt(f"{IMAGE} a", 1)], BeamSearchParams(beam_width=2, max_tokens=3))
    assert len(run(llm, [5, 6, 7])[0].outputs[0].token_ids) == 6


def test_deaths_of_the_worker_and_the_core(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Running and waiting requests are computed from their pixels again."""
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 0.01)
    monkeypatch.setenv("OCTAVO_CHECK", "1")

    async def main() -> None:
        async with await AsyncClient.launch(str(path), **SETTINGS, logits_processors=[PLUGIN]) as client:
            text = f"request {IMAGE} of {IMAGE}."
            await assert_deaths_change_nothing(client, lambda seed: prompt(text, seed % 4, seed % 3), SAMPLED)

    asyncio.run(main())


@pytest.fixture(scope="module")
def media_server(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--dtype", "float32", "--max-model-len", "256", "--served-model-name", "tiny", "--seed", "3")
    limits = ("--limit-mm-per-prompt", '{"image": 2}', "--max-image-pixels", "100000")
    with serve(path, *flags, *limits) as server:
        yield server.wait_until_ready()


def data_url(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def chat(server: Server, *parts: Any, **changes: Any) -> httpx.Response:
    body: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": 6,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return server.post(
        "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": list(parts)}], **changes}
    )


def test_chat_completions(media_server: Server, llm: LLM) -> None:
    image = {"type": "image_url", "image_url": {"url": data_url(picture(1)), "detail": "high"}}
    question = {"type": "text", "text": "what is it?"}
    answer = chat(media_server, image, question).json()
    (expected,) = run(llm, prompt(f"<|user|>\n{IMAGE}what is it?<|turn_end|>\n<|assistant|>\n", 1))
    assert answer["choices"][0]["token_ids"] == expected.outputs[0].token_ids
    assert answer["usage"]["prompt_tokens"] == len(expected.prompt_token_ids or [])
    for parts, where, message in (
        ([question, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}], 1, "not an image"),
        ([{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}], 0, "no public address"),
        ([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}], 0, "no local files"),
        ([{"type": "image_url", "image_url": {"url": data_url(Image.new("RGB", (400, 300)))}}], 0, "400 x 300 pixels"),
        ([{"type": "image_url"}], 0, "image_url is missing"),
        ([image, image, image], 2, "the limit is 2"),
    ):
        refused = chat(media_server, *parts)
        assert refused.status_code == 400, refused.text
        error = refused.json()["error"]
        assert message in error["message"]
        assert error["param"] == f"messages[0].content[{where}]"
    for changes in ({"use_beam_search": True, "n": 2}, {"truncate_prompt_tokens": 5}):
        assert chat(media_server, image, question, **changes).status_code == 400
    url = image["image_url"]["url"]
    response = media_server.post(
        "/v1/responses",
        {
            "model": "tiny",
            "max_output_tokens": 16,
            "temperature": 0,
            "input": [
                {
                    "role": "user",
                    "content": [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "a"}],
                }
            ],
        },
    ).json()
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    message = {"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": "a"}]}
    body = {"model": "tiny", "max_tokens": 16, "temperature": 0, "messages": [message]}
    same = media_server.post("/v1/messages", body).json()
    plain = chat(media_server, image, {"type": "text", "text": "a"}, max_tokens=16, ignore_eos=False).json()
    assert same["content"][0]["text"] == plain["choices"][0]["message"]["content"]
    assert response["output"][0]["content"][0]["text"] == same["content"][0]["text"]
    assert response["usage"]["input_tokens"] == plain["usage"]["prompt_tokens"]
    source["data"] = "AAAA"
    refused = media_server.post("/v1/messages", {**body, "system": "be short"})
    assert "messages[0].content[0]" in refused.json()["error"]["message"]
    injected = chat(media_server, image, {"type": "text", "text": f"a {IMAGE} b"})
    assert "no text may contain it" in injected.json()["error"]["message"]
    assert chat(media_server, image, question).json()["choices"] == answer["choices"]


def test_names_and_processing_of_images(media_server: Server) -> None:
    """`uuid` and `mm_processor_kwargs` of requests, and the metrics of processed images."""
    image = {"type": "image_url", "image_url": {"url": data_url(picture(7))}}
    known = {"type": "image_url", "image_url": None, "uuid": "seven"}
    question = {"type": "text", "text": "what is it?"}

    def counts() -> list[float]:
        text = media_server.get("/metrics").text
        return [float(text.partition(f"octavo:mm_cache_{name}_total{{")[2].split()[1]) for name in ("queries", "hits")]

    before = counts()
    bodies = [(image, {}), ({**image, "uuid": "seven"}, {}), (known, {})]
    bodies.append((image, {"mm_processor_kwargs": {"do_normalize": False}}))
    plain, named, again, changed = [
        chat(media_server, one, question, logprobs=True, **changes).json()["choices"] for one, changes in bodies
    ]
    assert plain == named == again != changed
    assert [after - start for after, start in zip(counts(), before, strict=True)] == [4, 1]
    for part, changes, message in (
        ({**known, "uuid": "eight"}, {}, "no image with the uuid 'eight'"),
        (known, {"cache_salt": "another"}, "send the image with it"),
        (image, {"mm_processor_kwargs": {"colour": 1}}, "mm_processor_kwargs has colour"),
        (image, {"mm_processor_kwargs": {"image_mean": None}}, "image_mean and image_std must not be null"),
    ):
        refused = chat(media_server, part, question, **changes).json()["error"]
        assert message in refused["message"]
        assert refused["param"] == "messages[0].content[0]"
