"""Vectors of tokens of images and queries, of ColPali and ColQwen2: against `transformers`, alone and in batches."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import numpy.typing as npt
import pytest
import tiny_dual
import torch
import transformers
from servers import serve
from tiny_media import data_url, picture

from octavo import LLM, PoolingParams
from octavo.frontend.media.without_torch import leave_out_videos
from octavo.protocol.errors import InvalidRequestError

Floats = npt.NDArray[np.float32]
TEXTS = ["where do foxes live?", "a"]
SIZES = ((44, 33), (60, 20), (30, 90))
TEMPLATES = Path(__file__).parents[2] / "docs" / "templates"


class Case(NamedTuple):
    """A family."""

    kind: str
    """Its name in classes of `transformers`."""
    make: Callable[[Path], Path]
    image: str
    """The prompt of an image."""
    query: str
    """That of a text."""
    budget: int
    """Tokens of a step."""

    @property
    def queries(self) -> list[str]:
        """The prompts of `TEXTS`."""
        return [self.query.format(text) for text in TEXTS]


CASES = {
    "colpali": Case(
        "ColPali",
        tiny_dual.make_colpali,
        "<image><bos>Describe the image.\n",
        "<bos>Question: {}" + "<pad>" * 10 + "\n",
        256,  # a step has whole prompts
    ),
    "colqwen2": Case(
        "ColQwen2",
        tiny_dual.make_colqwen2,
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|><|endoftext|>",
        "Query: {}" + "<|endoftext|>" * 10 + "\n",
        32,
    ),
}


@pytest.fixture(autouse=True)
def _no_videos(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out_videos(monkeypatch.setattr)


@torch.inference_mode()
def expected(case: Case, path: Path) -> tuple[list[Floats], list[Floats]]:
    """Return the vectors of `TEXTS` as queries, and of pictures of `SIZES`."""
    model = getattr(transformers, f"{case.kind}ForRetrieval").from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    # Not what the processor of ColQwen2 makes of them: its real tokenizer pads with another token than the tiny one.
    queries = [tokenizer(one, return_tensors="pt", return_token_type_ids=True) for one in case.queries]
    processor = getattr(transformers, f"{case.kind}Processor")(
        transformers.AutoImageProcessor.from_pretrained(path), tokenizer
    )
    images = [processor.process_images([picture(seed, *size)], return_tensors="pt") for seed, size in enumerate(SIZES)]
    names = ["input_ids", "attention_mask", "pixel_values", "image_grid_thw"]
    if case.kind == "ColPali":
        names.append("token_type_ids")  # zeros: tokens attend to those after them
        (made,) = processor.process_queries(TEXTS[:1], return_tensors="pt")["input_ids"]
        assert made.tolist() == queries[0]["input_ids"][0].tolist()
    inputs = [{name: one[name] for name in names if name in one} for one in (*queries, *images)]
    found = [model(**one).embeddings[0].numpy() for one in inputs]
    return found[: len(TEXTS)], found[len(TEXTS) :]


@pytest.mark.parametrize("name", CASES)
def test_images_and_queries(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    path = case.make(tmp_path)
    texts, images = expected(case, path)
    prompts: list[Any] = [*case.queries]
    prompts += [
        {"prompt": case.image, "multi_modal_data": {"image": picture(seed, *size)}} for seed, size in enumerate(SIZES)
    ]
    with LLM(str(path), dtype="float32", max_model_len=256, max_num_batched_tokens=case.budget, max_num_seqs=6) as llm:
        found = [one.outputs.data for one in llm.encode(prompts, pooling_task="token_embed", use_tqdm=False)]
        for one, own in zip(found, [*texts, *images], strict=True):
            assert one.shape == own.shape
            assert np.abs(one - own).max() < 1e-4
        for one, prompt in zip(found, prompts, strict=True):
            (alone,) = llm.encode(prompt, use_tqdm=False)
            assert np.array_equal(alone.outputs.data, one), "the bits of vectors depend on their prompt alone"
        with pytest.raises(InvalidRequestError, match="truncate_prompt_tokens"):
            llm.encode(prompts[-1], PoolingParams(truncate_prompt_tokens=4), use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="does not compute embed"):
            llm.embed("a", use_tqdm=False)


@pytest.mark.parametrize("name", CASES)
def test_over_http(name: str, tmp_path: Path) -> None:
    path = CASES[name].make(tmp_path)
    texts, images = expected(CASES[name], path)
    flags = ("--dtype", "float32", "--max-model-len", "256", "--chat-template", str(TEMPLATES / f"{name}.jinja"))
    with serve(path, *flags) as server:
        server.wait_until_ready()
        image = {"type": "image_url", "image_url": {"url": data_url(picture(0, *SIZES[0]))}}
        for content, own in (([image], images[0]), (TEXTS[0], texts[0])):
            response: httpx.Response = server.post("/pooling", {"messages": [{"role": "user", "content": content}]})
            assert np.abs(np.array(response.json()["data"][0]["data"]) - own).max() < 1e-4
        # Late interaction; the template writes strings too as the model has seen them.
        body = {"query": TEXTS[0], "documents": [{"content": [image]}, TEXTS[1]]}
        results = server.post("/rerank", body).json()["results"]
        others = (images[0], texts[1])
        for result in results:
            score = float((texts[0] @ others[result["index"]].T).max(axis=1).sum())
            assert abs(result["relevance_score"] - score) < 1e-3
        assert len(results) == 2
