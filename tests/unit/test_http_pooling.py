"""The routes of pooling models, over an engine whose vectors are made of the tokens."""

import array
import asyncio
import base64
from typing import Any

import httpx
import msgspec
import pytest
from fake_client import MODEL, FakeClient
from http_client import http_client, openai_client, post
from pooling_fakes import EMBED
from pooling_link import vector_of

from octavo.protocol.params import PoolingSpec
from octavo.protocol.pooling import PoolingFacts

CLASSIFY = PoolingFacts(convert="classify", pooling="last", num_labels=1, activation="sigmoid")
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
ROUTES = [
    ("/v1/embeddings", {"input": "a"}),
    ("/v1/embed", {"texts": ["a"]}),
    ("/v2/embed", {"texts": ["a"]}),
    ("/pooling", {"input": "a"}),
    ("/classify", {"input": "a"}),
    ("/score", {"text_1": "a", "text_2": "b"}),
    ("/v1/score", {"text_1": "a", "text_2": "b"}),
    ("/rerank", {"query": "a", "documents": ["b"]}),
    ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ("/v2/rerank", {"query": "a", "documents": ["b"]}),
]


def client(facts: PoolingFacts = EMBED, **hf_config: Any) -> FakeClient:
    return FakeClient(pooling=facts, hf_config={"hidden_size": 4, **hf_config})


def vector(text: str) -> list[float]:
    return vector_of(list(text.encode()))


def ok(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([97, 98], ["ab"]),
        ([[97, 98], [99]], ["ab", "c"]),
    ],
)
def test_embeddings(given: Any, expected: list[str]) -> None:
    body = ok(post(client(), "/v1/embeddings", {"model": MODEL, "input": given, "request_id": "r"}))
    assert (body["object"], body["model"], body["id"]) == ("list", MODEL, "embd-r")
    assert body["data"] == [
        {"object": "embedding", "embedding": vector(text), "index": index} for index, text in enumerate(expected)
    ]
    count = sum(map(len, expected))
    assert body["usage"] == {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0}


def test_the_openai_client_gets_vectors() -> None:
    """It asks for base64 and decodes it."""

    async def talk() -> Any:
        async with openai_client(client()) as api:
            return await api.embeddings.create(model=MODEL, input=["ab", "c"])

    answer = asyncio.run(talk())
    assert [one.embedding for one in answer.data] == [vector("ab"), vector("c")]
    assert answer.usage.prompt_tokens == 3


@pytest.mark.parametrize(
    ("fields", "form"),
    [({}, "<f"), ({"endianness": "big"}, ">f"), ({"embed_dtype": "float16", "endianness": "little"}, "<e")],
)
def test_base64(fields: dict[str, str], form: str) -> None:
    import struct

    body = ok(post(client(), "/v1/embeddings", {"input": "ab", "encoding_format": "base64", **fields}))
    data = base64.b64decode(body["data"][0]["embedding"])
    assert list(struct.unpack(form[0] + "4" + form[1], data)) == vector("ab")


def test_a_conversation_and_a_named_prompt() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": True}
    assert ok(post(client(), "/v1/embeddings", body))["data"][0]["embedding"] == vector("<user>x<assistant>")
    facts = msgspec.structs.replace(EMBED, prompts={"query": "Q: "})
    answer = ok(post(client(facts), "/v1/embeddings", {"input": ["a"], "prompt_name": "query"}))
    assert answer["data"][0]["embedding"] == vector("Q: a")


def test_fields_of_parameters() -> None:
    fake = client(msgspec.structs.replace(EMBED, dimensions=()))
    ok(post(fake, "/v1/embeddings", {"input": "abc", "dimensions": 2, "truncate_prompt_tokens": 2, "normalize": True}))
    (submit,) = fake.pooling_link.submits
    assert submit.params == PoolingSpec("embed", dimensions=2)
    assert list(submit.prompt_token_ids) == [97, 98]


def test_pooling() -> None:
    body = ok(post(client(), "/pooling", {"input": ["ab"], "task": "token_embed"}))
    assert body["data"] == [{"index": 0, "object": "pooling", "data": [vector("a"), vector("b")]}]
    body = ok(post(client(), "/pooling", {"input": ["ab"], "task": "token_embed", "encoding_format": "base64"}))
    flat = array.array("f", base64.b64decode(body["data"][0]["data"]))
    assert flat.tolist() == vector("a") + vector("b")


def test_classes() -> None:
    body = ok(post(client(CLASSIFY, id2label={"0": "good"}), "/classify", {"input": ["ab", "c"]}))
    assert body["data"] == [
        {"index": 0, "label": "good", "probs": [2.0], "num_classes": 1},
        {"index": 1, "label": "good", "probs": [1.0], "num_classes": 1},
    ]
    assert ok(post(client(CLASSIFY), "/classify", {"input": "ab"}))["data"][0]["label"] is None


@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
def test_scores(names: tuple[str, str]) -> None:
    body = ok(post(client(CLASSIFY), "/score", {names[0]: "a", names[1]: ["bc", {"text": "d"}]}))
    assert body["data"] == [
        {"index": 0, "object": "score", "score": 3.0},
        {"index": 1, "object": "score", "score": 2.0},
    ]
    assert body["usage"]["prompt_tokens"] == 5


@pytest.mark.parametrize("facts", [CLASSIFY, EMBED])
def test_contents_of_texts_are_texts(facts: PoolingFacts) -> None:
    """Also for models that read nothing else: parts in a list are lines of one text, others are inputs of their own."""
    parts = [{"type": "text", "text": "bc"}, {"type": "text", "text": "d"}]
    together, apart, plain, texts = (
        [one["score"] for one in ok(post(client(facts), "/score", {"text_1": "a", "text_2": given}))["data"]]
        for given in ([{"content": parts}], {"content": parts}, ["bc\nd"], ["bc", "d"])
    )
    assert (together, apart) == (plain, texts)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_ranking(path: str) -> None:
    asked = {"model": MODEL, "query": "a", "documents": ["b", "cde", {"text": "fg"}]}
    body = ok(post(client(CLASSIFY), path, asked))
    assert body["results"] == [
        {"index": 1, "relevance_score": 4.0, "document": {"text": "cde"}},
        {"index": 2, "relevance_score": 3.0, "document": {"text": "fg"}},
        {"index": 0, "relevance_score": 2.0, "document": {"text": "b"}},
    ]
    body = ok(post(client(CLASSIFY), path, asked | {"top_n": 1, "return_documents": False, "max_tokens_per_doc": 2}))
    assert body["results"] == [{"index": 1, "relevance_score": 3.0}]


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_a_generating_engine_says_what_it_is(path: str, body: dict[str, Any]) -> None:
    response = post(FakeClient(), path, body)
    assert response.status_code == 400
    assert "org/fake generates text" in response.json()["error"]["message"]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})],
)
def test_a_pooling_engine_says_what_it_is(path: str, body: dict[str, Any], is_stream: bool) -> None:
    response = post(client(), path, body | {"stream": is_stream})
    assert response.status_code == 400
    assert "is a pooling model and generates no text" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "message", "param"),
    [
        ("/v1/embeddings", {}, "give either input or messages", "input"),
        ("/v1/embeddings", {"input": []}, "must not be an empty list", "input"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input[1] is empty", "input"),
        ("/v1/embeddings", {"input": ""}, "input is empty", "input"),
        ("/v1/embeddings", {"input": ["a", 1]}, "input[1] is a token id", "input[1]"),
        ("/v1/embeddings", {"input": ["a", 1.5]}, "input[1]", "input[1]"),
        ("/v1/embeddings", {"input": [[1], [1, 999]]}, "input[1]: ", "input"),
        ("/v1/embeddings", {"input": [1, -1]}, "input: ", "input"),
        ("/v1/embeddings", {"input": ["a"] * 8193}, "at most 8192 texts", "input"),
        ("/v1/embeddings", {"input": ["a", "b" * 257]}, "input[1] has 257 tokens", "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 2}, "cannot be cut", "dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format", "encoding_format"),
        ("/v1/embeddings", {"input": "a", "prompt_name": "query"}, "these prompts: none", "prompt_name"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "leaves no token", "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "a", "priority": 1}, "priority", "priority"),
        ("/v1/embeddings", {"messages": []}, "messages must not be empty", "messages"),
        ("/pooling", {"input": "a", "task": "classify"}, "does not compute classify", "task"),
        ("/classify", {"input": "a"}, "does not compute classify", "task"),
        ("/score", {"text_1": "a"}, "give the texts to compare", "text_1"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a"] * 3}, "text_1 has 2 texts and text_2 has 3", "text_1"),
        ("/score", {"text_1": "a", "text_2": ["b", {}]}, "text_2[1] must be a text", "text_2[1]"),
        ("/score", {"text_1": "a", "text_2": {"content": []}}, "text_2.content must be a list", "text_2.content"),
        ("/score", {"text_1": "a", "text_2": ["b", {"content": [IMAGE]}]}, "no images", "text_2[1].content[0]"),
        *(
            ("/score", {"text_1": "a", "text_2": {"content": [{**IMAGE, key: "k"}]}}, "no images", "text_2.content[0]")
            for key in ("path", "self")
        ),
        ("/score", {"text_1": "a", "text_2": {"text": "b", "content": "c"}}, "text_2 has text and content", "text_2"),
        (
            "/rerank",
            {"query": "a", "documents": [{"text": "b", "content": "c"}]},
            "documents[0] has text and content",
            "documents[0]",
        ),
        ("/rerank", {"query": "a", "documents": [{"text": "b", "id": 1}]}, "documents[0] has id", "documents[0]"),
        (
            "/rerank",
            {"query": "a", "documents": ["b"], "mm_processor_kwargs": {"max_pixels": 9}},
            "mm_processor_kwargs: the model reads text only",
            "mm_processor_kwargs",
        ),
        ("/rerank", {"query": {"content": ["a"]}, "documents": ["b"]}, "query.content must be", "query.content"),
        (
            "/rerank",
            {"query": {"content": [{"type": "text"}]}, "documents": ["b"]},
            "a string",
            "query.content[0].text",
        ),
        ("/score", {"text_1": "a", "text_2": "b", "instruction": "i"}, "need a cross-encoder", "chat_template_kwargs"),
        ("/rerank", {"query": "a", "documents": []}, "documents must not be an empty list", "documents"),
        ("/rerank", {"query": "a", "documents": ["b", ""]}, "documents[1] is empty", "documents"),
    ],
)
def test_bodies_that_are_refused(path: str, body: dict[str, Any], message: str, param: str) -> None:
    fake = client()
    response = post(fake, path, body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert message in error["message"]
    assert error["param"] == param
    assert not fake.pooling_link.submits or "[1]" in message


def test_a_caller_that_leaves_ends_its_requests() -> None:
    fake = client()
    fake.pooling_link.gate = asyncio.Event()

    async def talk() -> None:
        async with http_client(fake) as http:
            call = asyncio.create_task(http.post("/v1/embeddings", json={"input": ["a"] * 50}))
            while len(fake.pooling_link.submits) < 50:
                await asyncio.sleep(0)
            call.cancel()
            while len(fake.pooling_link.aborted) < 50:
                await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(talk(), 20))


def test_coheres_vectors_come_in_each_form() -> None:
    forms = ["float", "base64", "ubinary", "binary"]
    body = ok(post(client(), "/v2/embed", {"model": MODEL, "texts": ["ab", "c"], "embedding_types": forms}))
    assert body["embeddings"]["float"] == [vector("ab"), vector("c")]
    numbers = [array.array("f", base64.b64decode(text)).tolist() for text in body["embeddings"]["base64"]]
    assert numbers == body["embeddings"]["float"]
    signs = [sum((number > 0) << (7 - place) for place, number in enumerate(each)) for each in numbers]
    assert body["embeddings"]["ubinary"] == [[sign] for sign in signs]
    assert body["embeddings"]["binary"] == [[sign - 128] for sign in signs]
    assert body["texts"] == ["ab", "c"] and body["meta"]["billed_units"] == {"input_tokens": 3}


@pytest.mark.parametrize("field", ["max_tokens_per_query", "max_tokens_per_doc", "truncate_prompt_tokens"])
def test_a_limit_that_is_too_large_has_the_callers_name(field: str) -> None:
    refused = post(client(), "/rerank", {"query": "a", "documents": ["b"], field: 10**6})
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert error["param"] == field and error["message"].startswith(f"{field} 1000000 is more than")


def test_the_first_version_of_coheres_api_has_floats_of_its_own() -> None:
    body = ok(post(client(), "/v1/embed", {"texts": ["ab", "c"], "truncate": None, "input_type": "search_query"}))
    assert (body["response_type"], body["embeddings"]) == ("embeddings_floats", [vector("ab"), vector("c")])
    forms = ok(post(client(), "/v1/embed", {"texts": ["ab"], "embedding_types": ["float"]}))
    assert (forms["response_type"], forms["embeddings"]) == ("embeddings_by_type", {"float": [vector("ab")]})


def test_coheres_truncation_is_ours() -> None:
    long = "x" * 5000
    refused = post(client(), "/v2/embed", {"texts": ["a", long], "truncate": "NONE"})
    assert refused.status_code == 400 and "texts[1]" in refused.json()["error"]["message"]
    far = post(client(), "/v2/embed", {"texts": ["a"], "max_tokens": 10**6}).json()["error"]
    assert far["param"] == "max_tokens" and far["message"].startswith("max_tokens 1000000 is more than")
    cut = ok(post(client(), "/v2/embed", {"texts": [long], "max_tokens": 4}))
    assert cut["embeddings"]["float"] == [vector("xxxx")]
