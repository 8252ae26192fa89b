"""Prompt embeddings on their way to the workers: rows, digests, bounds and errors."""

import base64
import io
import zipfile
from typing import Any

import msgspec
import pytest
import torch
from core_fakes import FakeEngine, core_config
from safetensors.torch import save
from simulation.worker import SimulatedWorker

from octavo.frontend.generation.chat_embeds import MARK, take_embeds, with_rows
from octavo.frontend.generation.embeds import decode_embeds, embeds_of
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.events import Failed
from octavo.protocol.prompt_embeds import PLACEHOLDER, PromptEmbeds, StepEmbedsBuilder, tokens_outside

WIDTH = 4
ROW_BYTES = 4 * WIDTH
MODEL = msgspec.structs.replace(core_config().model, hf_config={"hidden_size": WIDTH})
TAKES = {"model": MODEL, "enable_prompt_embeds": True, "dtype": "float32"}


def config(**changes: Any) -> ResolvedConfig:
    return core_config(**TAKES | changes)


def rows(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def packed(count: int, seed: int = 0) -> PromptEmbeds:
    return embeds_of(rows(count, seed), config(), 1000)


def test_a_step_gets_the_rows_of_its_positions() -> None:
    data = bytes(range(48))
    embeds = PromptEmbeds.pack([(2, 3), (6, 1)], data)
    assert (embeds.num_rows, len(embeds.digests)) == (4, 2)
    builder = StepEmbedsBuilder()
    builder.add(5, embeds, 3, 7)
    builder.add(6, embeds, 0, 2)
    builder.add(7, embeds, 0, 3)
    step = builder.build()
    assert step is not None
    assert step.places == [(5, 3, 2), (5, 6, 1), (7, 2, 1)]
    assert step.data.data == data[12:] + data[:12]
    assert StepEmbedsBuilder().build() is None
    assert tokens_outside(embeds.spans, list(range(9))) == [0, 1, 5, 7, 8]


@pytest.mark.parametrize(
    ("spans", "num_bytes", "fault"),
    [
        ([(0, 3), (2, 1)], 4 * ROW_BYTES, "overlap"),
        ([(8, 3)], 3 * ROW_BYTES, "outside of the 10 positions"),
        ([(0, 3)], 2 * ROW_BYTES, "take 16 bytes each"),
        ([(0, 0)], 0, "no rows"),
    ],
)
def test_rows_that_cannot_be_those_of_a_prompt(spans: list[tuple[int, int]], num_bytes: int, fault: str) -> None:
    embeds = PromptEmbeds(spans, packed(1).data.__class__(bytes(num_bytes)), [bytes(32)])
    assert fault in (embeds.fault(10, ROW_BYTES) or "")


def given(engine: FakeEngine) -> list[list[tuple[int, int]]]:
    """Positions and numbers of the rows in each plan so far that has any."""
    return [
        [(position, num) for _, position, num in plan.prompt_embeds.places]
        for plan in engine.plans
        if plan.prompt_embeds is not None
    ]


def test_chunks_carry_their_rows_and_equal_rows_are_cached() -> None:
    engine = FakeEngine(**TAKES, max_num_batched_tokens=16)
    embeds = packed(40)
    engine.submit("a", [PLACEHOLDER] * 42, prompt_embeds=embeds)
    engine.run()
    assert given(engine) == [[(0, 16)], [(16, 16)], [(32, 8)]]
    longer = PromptEmbeds.pack([(0, 36)], bytes(memoryview(embeds.data.data)[: 36 * ROW_BYTES]))
    output = engine.submit("b", [PLACEHOLDER] * 36, prompt_embeds=longer)
    engine.run()
    assert output.num_cached_tokens == 32, "rows share blocks up to a multiple of 16"
    assert given(engine)[3:] == [[(32, 4)]]
    other = engine.submit("c", [PLACEHOLDER] * 42, prompt_embeds=packed(40, seed=1))
    tokens = engine.submit("d", [PLACEHOLDER] * 42)
    again = engine.submit("e", [PLACEHOLDER] * 42, prompt_embeds=packed(40))
    engine.run()
    assert (other.num_cached_tokens, tokens.num_cached_tokens, again.num_cached_tokens) == (0, 0, 40)


def test_the_last_row_of_a_prompt_is_a_step_of_one_token() -> None:
    engine = FakeEngine(**TAKES)
    engine.submit("a", [PLACEHOLDER], prompt_embeds=packed(1))
    engine.run()
    assert given(engine) == [[(0, 1)]]


def test_preempted_and_lost_requests_are_computed_from_their_rows_again() -> None:
    engine = FakeEngine(**TAKES, enable_prefix_caching=False)
    engine.submit("a", [PLACEHOLDER] * 10, prompt_embeds=packed(10))
    engine.plan()
    engine.scheduler.lose_workers()
    engine.worker = SimulatedWorker(engine.config, 64)
    engine.worker.next_sequence = 1
    engine._results.clear()
    engine.run()
    assert given(engine) == [[(0, 10)], [(0, 10)]]


def test_an_engine_without_the_flag_and_prompt_logprobs() -> None:
    for changes, sampling, message in (
        ({"enable_prompt_embeds": False}, {}, "--enable-prompt-embeds"),
        ({}, {"prompt_logprobs": 1, "skip_reading_prefix_cache": True}, "prompt_logprobs"),
    ):
        engine = FakeEngine(**TAKES | changes)
        end = engine.submit("a", [PLACEHOLDER] * 3, prompt_embeds=packed(3), **sampling).end
        assert isinstance(end, Failed)
        assert message in end.message


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_tensors_become_rows_in_the_type_of_the_model(dtype: str) -> None:
    tensor = rows(20)
    expected = tensor.to(getattr(torch, dtype)).view(torch.uint8).numpy().tobytes()
    for value in (tensor, tensor[None], tensor.repeat(1, 2)[:, :WIDTH], tensor.clone().requires_grad_()):
        embeds = embeds_of(value, config(dtype=dtype), 1000)
        assert (embeds.spans, bytes(embeds.data.data)) == ([(0, 20)], expected)
        assert embeds.fault(20, config(dtype=dtype).embedding_bytes) is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([[1.0] * WIDTH], "torch.Tensor, got list"),
        (rows(3)[:, :2], r"shape \(rows, 4\)"),
        (rows(3)[:0], r"shape \(rows, 4\)"),
        (rows(6).view(2, 3, WIDTH), r"shape \(rows, 4\)"),
        (rows(3).double(), "got float64"),
        (rows(3).long(), "got int64"),
        (rows(3).to_sparse(), "dense"),
        (rows(3).to("meta"), "dense"),
        (rows(3) / 0, "NaN or infinite"),
        (rows(3) * 1e38, "too large for float16"),
        (rows(1).expand(10**9, WIDTH), "max_model_len"),
    ],
)
def test_tensors_that_are_refused(value: object, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as found:
        embeds_of(value, config(dtype="float16"), 64)
    assert found.value.param == "prompt_embeds"


def saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def compressed(data: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as target:
        for part in source.infolist():
            target.writestr(part.filename, source.read(part))
    return file.getvalue()


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_files_are_decoded() -> None:
    tensor = rows(5).bfloat16()
    for data in (saved(tensor), save({"any": tensor})):
        assert torch.equal(decode_embeds(text(data), config(), 64), tensor)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("never",))


@pytest.mark.parametrize(
    ("encoded", "message"),
    [
        ("not base64!", "is not base64"),
        ("äöü", "is not base64"),
        ("A" * 10**6, "characters of base64"),
        (text(b"12345"), "neither a safetensors file"),
        (text(saved(rows(2))[:200]), "torch.save wrote"),
        (text(saved({"a": rows(2)})), "holds a dict"),
        (text(saved(Evil())), "torch.save wrote"),
        (text(compressed(saved(torch.zeros(1000, WIDTH)))), "compressed"),
        (text(save({"a": rows(1), "b": rows(1)})), "holds 2 tensors"),
    ],
)
def test_files_that_are_refused(encoded: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidRequestError, match=message) as found:
        decode_embeds(encoded, config(), 64)
    assert found.value.param == "prompt_embeds"
    assert not capsys.readouterr().out


def test_parts_of_a_conversation_are_taken_out_and_put_back() -> None:
    part = {"type": "prompt_embeds", "data": "AA"}
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": [part, {"type": "text", "text": "y"}]}]
    taken, parts = take_embeds(messages)
    assert [(one.value, one.path) for one in parts] == [("AA", "messages[1].content[0].data")]
    assert taken[1]["content"] == [{"type": "text", "text": MARK}, {"type": "text", "text": "y"}]
    assert messages[1]["content"][0] is part, "the caller's messages were changed"
    assert take_embeds(messages[:1])[0] == messages[:1]
    prompt = with_rows([7, 9, 8, 9], 9, [packed(2), packed(3)], parts * 2)
    assert list(prompt.token_ids) == [7, 0, 0, 8, 0, 0, 0]
    assert prompt.embeds is not None
    assert prompt.embeds == PromptEmbeds.pack([(1, 2), (4, 3)], bytes(packed(2).data.data) + bytes(packed(3).data.data))
    assert list(prompt.tokens) == [7, 8]
    for token_ids in ([7, 8], [9, 9]):
        with pytest.raises(InvalidRequestError, match="of 1 prompt_embeds parts") as found:
            with_rows(token_ids, 9, [packed(2)], parts)
        assert found.value.param == "messages[1].content[0].data"
