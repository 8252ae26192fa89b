"""Vectors of texts and images, of CLIP and SigLIP: against `transformers`, alone and in batches, and over HTTP."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import tiny_dual
import torch
import transformers
from servers import Server, serve
from tiny_media import data_url, picture

from octavo import LLM, PoolingParams
from octavo.protocol.errors import ConfigError, InvalidRequestError

Floats = npt.NDArray[np.float64]
TEXTS = ["the fox", "one request, one batch", "a", "the lazy dog tells"]
SIZES = ((44, 33), (20, 60), (30, 30))
CASES: dict[str, tuple[Callable[[Path], Path], bool]] = {
    "clip": (tiny_dual.make_clip, False),
    "siglip": (tiny_dual.make_siglip, True),
}
"""What writes a checkpoint, and whether its texts are padded."""


class Dual(NamedTuple):
    """A model and the same in `transformers`."""

    llm: LLM
    path: Path
    pads: bool


@pytest.fixture(scope="module", params=CASES)
def dual(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dual]:
    make, pads = CASES[request.param]
    path = make(tmp_path_factory.mktemp(request.param))
    with LLM(str(path), dtype="float32") as llm:
        yield Dual(llm, path, pads)


def unit(rows: torch.Tensor) -> Floats:
    vectors: Floats = torch.nn.functional.normalize(rows, dim=-1).double().numpy()
    return vectors


@torch.inference_mode()
def expected(path: Path, *, pads: bool) -> tuple[Floats, Floats]:
    """Return the vectors of `TEXTS` and of pictures of `SIZES`."""
    model = transformers.AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    images = transformers.AutoImageProcessor.from_pretrained(path)
    texts = []
    for text in TEXTS:
        padding = {"padding": "max_length", "max_length": 40} if pads else {}
        ids = tokenizer(text, return_tensors="pt", **padding).input_ids
        texts.append(model.get_text_features(input_ids=ids).pooler_output)
    pictures = [picture(seed, *size) for seed, size in enumerate(SIZES)]
    found = [model.get_image_features(**images(one, return_tensors="pt")).pooler_output for one in pictures]
    return unit(torch.cat(texts)), unit(torch.cat(found))


def image_prompt(seed: int, *size: int) -> dict[str, Any]:
    return {"prompt": "", "multi_modal_data": {"image": picture(seed, *size)}}


def vectors(llm: LLM, *prompts: Any) -> list[list[float]]:
    return [list(one.outputs.embedding) for one in llm.embed(list(prompts), use_tqdm=False)]


def test_texts_and_images(dual: Dual) -> None:
    texts, images = expected(dual.path, pads=dual.pads)
    prompts = [image_prompt(seed, *size) for seed, size in enumerate(SIZES)]
    mixed = [TEXTS[0], prompts[0], TEXTS[1], prompts[1], prompts[2], *TEXTS[2:]]
    found = vectors(dual.llm, *mixed)
    assert np.abs(np.array([found[0], found[2], *found[5:]]) - texts).max() < 1e-4
    assert np.abs(np.array([found[1], found[3], found[4]]) - images).max() < 1e-4
    for index in (0, 1, 4):
        assert vectors(dual.llm, mixed[index]) == [found[index]], "the bits of a vector depend on its prompt alone"
    (plain,) = dual.llm.embed(prompts[0], pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
    assert not np.isclose(np.linalg.norm(plain.outputs.embedding), 1.0)
    shown = {"content": [{"type": "image", "image": picture(1, *SIZES[1])}]}
    scores = [one.outputs.score for one in dual.llm.score(TEXTS[0], [TEXTS[1], shown], use_tqdm=False)]
    assert np.abs(np.array(scores) - np.stack([texts[1], images[1]]) @ texts[0]).max() < 1e-4


@pytest.mark.parametrize(
    ("prompt", "task", "message"),
    [
        ({"prompt": "a", "multi_modal_data": {"image": picture(0)}}, "embed", "text beside an image"),
        ({"prompt": "", "multi_modal_data": {"image": [picture(0), picture(1)]}}, "embed", "1 more images"),
        ({"prompt": "", "multi_modal_data": {"audio": 3}}, "embed", "this model takes"),
        (image_prompt(0), "token_embed", "one vector of its own"),
    ],
)
def test_prompts_that_are_refused(dual: Dual, prompt: Any, task: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        dual.llm.encode(prompt, pooling_task=task, use_tqdm=False)


def test_settings_that_are_refused(tmp_path: Path) -> None:
    path = tiny_dual.make_siglip(tmp_path)
    with pytest.raises(ConfigError, match="pads its texts to all of its 40 positions"):
        LLM(str(path), max_model_len=20)
    with pytest.raises(ConfigError, match="cannot pass between the pipeline stages"):
        LLM(str(path), pipeline_parallel_size=2)


def test_over_http(tmp_path: Path) -> None:
    """As vLLM takes them: texts in `input`, an image in `messages`."""
    path = tiny_dual.make_clip(tmp_path)
    texts, images = expected(path, pads=False)
    part = {"type": "image_url", "image_url": {"url": data_url(picture(0, *SIZES[0]))}}

    def messages(*parts: Any) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": list(parts)}]}

    with serve(path, "--dtype", "float32", "--served-model-name", "tiny") as server:
        server.wait_until_ready()

        def embed(body: dict[str, Any]) -> Any:
            return server.post("/v1/embeddings", {"model": "tiny", **body}).json()

        found = [one["embedding"] for one in embed({"input": TEXTS})["data"]]
        assert np.abs(np.array(found) - texts).max() < 1e-4
        for body, vector in (
            (messages(part), images[0]),
            (messages({"type": "text", "text": TEXTS[0]}), texts[0]),
        ):
            answer = embed(body)
            assert np.abs(np.array(answer["data"][0]["embedding"]) - vector).max() < 1e-4
        error = embed(messages(part, {"type": "text", "text": "a"}))["error"]
        assert error["param"] == "messages[0].content[0]"
        assert "text beside an image" in error["message"]
        _assert_images_are_scored(server, texts, images)


def _assert_images_are_scored(server: Server, texts: Floats, images: Floats) -> None:
    """The score of a text and an image is the cosine of their vectors; contents come as in vLLM."""
    parts = [
        {"type": "image_url", "image_url": {"url": data_url(picture(seed, *size))}} for seed, size in enumerate(SIZES)
    ]
    each = [{"content": [part]} for part in parts]
    for documents in ({"content": parts}, each):  # the parts of one object are documents of their own
        answer = server.post("/score", {"queries": TEXTS[0], "documents": documents}).json()
        assert np.abs(np.array([one["score"] for one in answer["data"]]) - images @ texts[0]).max() < 1e-4
    answer = server.post("/rerank", {"query": each[0], "documents": [TEXTS[0], *each[1:]]}).json()
    found = {one["index"]: one["relevance_score"] for one in answer["results"]}
    expected_scores = np.stack([texts[0], *images[1:]]) @ images[0]
    assert np.abs(np.array([found[index] for index in range(3)]) - expected_scores).max() < 1e-4
    shown = {one["index"]: one["document"] for one in answer["results"]}
    assert shown[0] == {"text": TEXTS[0]}
    assert shown[1] == {"text": None, "multi_modal": [parts[1]]}
    bad = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    video = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
    for content, kwargs, message in (
        ([bad], None, "the image cannot be used"),
        ([video], None, "reads images and no videos"),
        ([parts[0], {"type": "text", "text": "a"}], None, "text beside an image"),
        ([parts[0]], {"zoom": 2}, "mm_processor_kwargs has zoom"),
        ([{"type": "file"}], None, "not supported"),
    ):
        body = {"query": "a", "documents": ["b", {"content": content}], "mm_processor_kwargs": kwargs}
        refused = server.post("/rerank", body)
        assert refused.status_code == 400, refused.text
        assert message in refused.json()["error"]["message"]
        assert refused.json()["error"]["param"].startswith("documents[1].content[0]")
    kwargs = {"videos_kwargs": {"fps": 1}}
    refused = server.post("/score", {"text_1": "a", "text_2": "b", "mm_processor_kwargs": kwargs})
    assert refused.status_code == 400 and "it has videos_kwargs" in refused.json()["error"]["message"]
