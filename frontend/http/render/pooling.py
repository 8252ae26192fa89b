"""Renders results of pooling models as response bodies. No IO."""

import binascii
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from octavo.frontend.http.schemas.cohere import (
    CohereEmbedRequest,
    CohereEmbedResponse,
    CohereMeta,
    EmbeddingType,
)
from octavo.frontend.http.schemas.pooling import (
    ClassificationData,
    ClassificationResponse,
    EmbeddingData,
    EmbeddingResponse,
    EncodingFields,
    PoolingData,
    PoolingResponse,
    PoolingUsage,
    RerankDocument,
    RerankResponse,
    RerankResult,
    ScoreData,
    ScoreResponse,
)
from octavo.frontend.pooling.outputs import ScoringRequestOutput
from octavo.frontend.pooling.result import PooledResult
from octavo.frontend.pooling.score_inputs import ScoreInput

_encode = msgspec.json.Encoder().encode


def usage_of(results: Sequence[PooledResult]) -> PoolingUsage:
    """Return the number of tokens of all prompts."""
    count = sum([len(one.token_ids) for one in results])
    return PoolingUsage(count, count)


def render_embeddings(
    body: EncodingFields, results: Sequence[PooledResult], answer_id: str, created: int, model: str
) -> bytes:
    """Return the response of `/v1/embeddings`."""
    data = [EmbeddingData(index=index, embedding=_numbers(body, one)) for index, one in enumerate(results)]
    return _encode(EmbeddingResponse(id=answer_id, created=created, model=model, data=data, usage=usage_of(results)))


def render_cohere_embeddings(
    body: CohereEmbedRequest, results: Sequence[PooledResult], answer_id: str, version: str
) -> bytes:
    """Return the response of `/v1/embed` ("1"), which has its own format for floats, or of `/v2/embed` ("2")."""
    meta = CohereMeta(api_version={"version": version}, billed_units={"input_tokens": usage_of(results).prompt_tokens})
    answer = CohereEmbedResponse(id=answer_id, embeddings=[], texts=body.texts, meta=meta)
    if version == "1" and body.embedding_types is None:
        answer.embeddings = [one.array().tolist() for one in results]
        answer.response_type = "embeddings_floats"
    else:
        forms: list[EmbeddingType] = list(dict.fromkeys(body.embedding_types or ["float"]))
        answer.embeddings = {str(form): [_in_form(form, one) for one in results] for form in forms}
    return _encode(answer)


def _in_form(form: EmbeddingType, result: PooledResult) -> Any:
    import numpy  # imported for the first result, not at startup

    array = result.array()
    if form == "float":
        return array.tolist()
    if form == "base64":
        return binascii.b2a_base64(array.tobytes(), newline=False).decode("ascii")
    signs = numpy.packbits(array > 0)
    return signs.tolist() if form == "ubinary" else (signs.astype("i2") - 128).tolist()


def render_pooling(
    body: EncodingFields, results: Sequence[PooledResult], answer_id: str, created: int, model: str
) -> bytes:
    """Return the response of `/pooling`."""
    data = [PoolingData(index=index, data=_numbers(body, one)) for index, one in enumerate(results)]
    return _encode(PoolingResponse(id=answer_id, created=created, model=model, data=data, usage=usage_of(results)))


def render_classes(
    labels: Sequence[str], results: Sequence[PooledResult], answer_id: str, created: int, model: str
) -> bytes:
    """Return the response of `/classify`; `labels`: names of the classes, if the model has them."""
    data = []
    for index, one in enumerate(results):
        probs: list[float] = one.array().tolist()
        best = probs.index(max(probs)) if len(probs) == len(labels) else None
        label = None if best is None else labels[best]
        data.append(ClassificationData(index=index, label=label, probs=probs, num_classes=len(probs)))
    return _encode(
        ClassificationResponse(id=answer_id, created=created, model=model, data=data, usage=usage_of(results))
    )


def render_scores(outputs: Sequence[ScoringRequestOutput], answer_id: str, created: int, model: str) -> bytes:
    """Return the response of `/score`."""
    data = [ScoreData(index=index, score=one.outputs.score) for index, one in enumerate(outputs)]
    return _encode(ScoreResponse(id=answer_id, created=created, model=model, data=data, usage=_pairs_usage(outputs)))


def render_ranking(
    outputs: Sequence[ScoringRequestOutput],
    documents: Sequence[ScoreInput] | None,
    top_n: int,
    answer_id: str,
    model: str,
) -> bytes:
    """Return the response of `/rerank`.

    Args:
        outputs: one score per document.
        documents: documents to include in the response; None: omit them.
        top_n: how many documents to return; 0: all.
        answer_id: the id of the response.
        model: name of the model.
    """
    order = sorted(range(len(outputs)), key=lambda index: (-outputs[index].outputs.score, index))
    results = [RerankResult(index=index, relevance_score=outputs[index].outputs.score) for index in order]
    for result in results if documents is not None else ():
        shown = (documents or ())[result.index]
        result.document = RerankDocument(shown) if isinstance(shown, str) else RerankDocument(None, [*shown.parts])
    results = results[:top_n] if top_n else results
    return _encode(RerankResponse(id=answer_id, model=model, usage=_pairs_usage(outputs), results=results))


def _pairs_usage(outputs: Sequence[ScoringRequestOutput]) -> PoolingUsage:
    count = sum([len(one.prompt_token_ids) for one in outputs])
    return PoolingUsage(count, count)


def _numbers(body: EncodingFields, result: PooledResult) -> Any:
    """Return numbers in the requested encoding; nested lists for per-token tasks."""
    array = result.array()
    if body.encoding_format != "base64":
        return array.tolist()
    # perf: usually the engine's own bytes, without a copy.
    order = {"native": "=", "little": "<", "big": ">"}[body.endianness]
    order = {"little": "<", "big": ">"}[sys.byteorder] if order == "=" else order
    array = array.astype(order + ("f4" if body.embed_dtype == "float32" else "f2"), copy=False)
    return binascii.b2a_base64(array.tobytes(), newline=False).decode("ascii")
