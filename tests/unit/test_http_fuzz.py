"""Random requests: the answer is 200, or a 4xx with an error body, and the server keeps working."""

import asyncio
import json

import pytest
from examples import examples
from fake_client import MODEL, FakeClient
from http_client import http_client
from hypothesis import given, settings
from hypothesis import strategies as st
from pooling_fakes import EMBED

from octavo.frontend.http.schemas.chat import ChatCompletionRequest
from octavo.frontend.http.schemas.completions import CompletionRequest
from octavo.frontend.http.schemas.pooling import (
    EmbeddingRequest,
    PoolingFields,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from octavo.frontend.http.schemas.tokenize import DetokenizeRequest, TokenizeRequest
from octavo.frontend.http.unsupported_fields import UNSUPPORTED_FIELDS

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([2**31, 2**63, -(2**64), 0.5, -1.5, 1e308, "", "a", "\ud800", "{% if", "none", "auto", "text"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "1", "messages", "add_generation_prompt"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)
GOOD = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hi"}],
    "prompt": "ab",
    "tokens": [97],
    "input": ["a", "b"],
    "query": "a",
    "documents": ["b"],
    "queries": "a",
}


def bodies(schema):
    names = [*schema.__struct_encode_fields__, *UNSUPPORTED_FIELDS, "unknown"]
    good = {name: value for name, value in GOOD.items() if name in schema.__struct_encode_fields__}
    return st.dictionaries(st.sampled_from(names), VALUES, max_size=3).map(lambda junk: good | junk)


@pytest.mark.parametrize(
    ("path", "schema"),
    [
        ("/v1/chat/completions", ChatCompletionRequest),
        ("/v1/completions", CompletionRequest),
        ("/v1/embeddings", EmbeddingRequest),
        ("/pooling", PoolingRequest),
        ("/score", ScoreRequest),
        ("/rerank", RerankRequest),
        ("/tokenize", TokenizeRequest),
        ("/detokenize", DetokenizeRequest),
    ],
)
def test_no_body_breaks_the_server(path, schema) -> None:
    @settings(max_examples=examples(80, 200), deadline=None, derandomize=True, database=None)
    @given(body=bodies(schema))
    def check(body) -> None:
        content = json.dumps(body).encode()  # httpx cannot encode half a surrogate pair
        response = runner.run(http.post(path, content=content, headers={"content-type": "application/json"}))
        assert response.status_code in (200, 400, 404), (body, response.text)
        if response.status_code != 200:
            error = response.json()["error"]
            assert error["code"] == response.status_code and error["message"]

    client = FakeClient("Hi", pooling=EMBED if issubclass(schema, PoolingFields) else None)
    connecting = http_client(client)
    with asyncio.Runner() as runner:
        http = runner.run(connecting.__aenter__())
        try:
            check()
        finally:
            runner.run(connecting.__aexit__(None, None, None))
