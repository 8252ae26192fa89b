"""Words of transcriptions: how tokens become words, and the alignment of texts with clips."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers.models.whisper.generation_whisper import _dynamic_time_warping, _median_filter

from octavo.frontend.audio.prompts import AudioWindow
from octavo.frontend.audio.segments import num_spoken_rows
from octavo.frontend.audio.speech_tokens import SpeechTokens
from octavo.frontend.audio.words import words_of
from octavo.frontend.metrics.call import CURRENT_CALL, Call
from octavo.frontend.metrics.record import RequestRecord
from octavo.frontend.pooling.pooler import Pooler
from octavo.kernels import time_warping
from octavo.kernels.native.arguments import GroupArguments, Matrix, StepArguments
from octavo.kernels.native.direct import run
from octavo.kernels.native.library import load
from octavo.kernels.paged_attention import AttentionShape
from octavo.kernels.paged_attention.layout import LayoutArguments
from octavo.kernels.store_kv.native import StoreKvArguments
from octavo.protocol.alignment import AlignmentSpec
from octavo.protocol.buffers import Buffer
from octavo.protocol.errors import InvalidRequestError, RequestFailedError
from octavo.protocol.events import Finished, FinishReason, PooledOutput
from octavo.protocol.media import MediaItem
from octavo.protocol.requests import Submit
from octavo.worker_proc.batch.step_arguments import address
from octavo.worker_proc.cache.cross import CrossCache
from octavo.worker_proc.media.time_warping import first_rows

TOKENS = SpeechTokens(101, 100, 104, None, {}, {}, ())
MARK = TOKENS.first_timestamp
WINDOW = AudioWindow(30.0, 4.0, MediaItem([], b"", {}))


def spoken(pieces: Sequence[str | bytes | None], language: str = "en") -> list[tuple[str, float, float]]:
    """Return the words of tokens with these texts, None being a timestamp; token k begins at row 10 k."""
    texts = [b"" if piece is None else piece.encode() if isinstance(piece, str) else piece for piece in pieces]
    token_ids = [MARK + 1 if piece is None else index for index, piece in enumerate(pieces)]

    def decode(ids: Sequence[int]) -> str:
        return b"".join(texts[token] for token in ids).decode(errors="replace")

    rows = [10.0 * (index + 1) for index in range(len(pieces))]
    found = words_of(WINDOW, [*token_ids, TOKENS.end], rows, TOKENS, decode, language)
    return [(one.text, one.start_s, one.end_s) for one in found]


def test_words_begin_with_spaces_and_take_their_punctuation() -> None:
    assert spoken([None, " The", " sh", "ips", "."]) == [("The", 30.2, 30.4), ("ships.", 30.4, 31.0)]
    assert spoken([" (", "well", ")", ",", " no"]) == [("(well),", 30.0, 30.8), ("no", 30.8, 31.0)]
    assert spoken([" don", "'t", ' "', "go", '"']) == [("don't", 30.0, 30.4), ('"go"', 30.4, 31.0)]


def test_words_end_with_their_segment_and_their_window() -> None:
    assert spoken([None, " a", None, None, "b"]) == [("a", 30.2, 30.4), ("b", 30.8, 31.0)]
    assert spoken([" a"] * 25)[-1] == ("a", 34.0, 34.0)
    assert spoken([]) == [] and spoken([None]) == []


def test_bytes_that_are_no_character_end_with_the_next_one() -> None:
    assert spoken([" a", b"\xff", "b", " c"]) == [("a\ufffdb", 30.0, 30.6), ("c", 30.6, 30.8)]


def test_languages_without_spaces_have_a_word_for_each_character() -> None:
    found = spoken(["\u4f60", *(bytes([byte]) for byte in "\u597d".encode()), "\u3002"], "zh")
    assert found == [("\u4f60", 30.0, 30.2), ("\u597d\u3002", 30.2, 31.0)]


@pytest.mark.parametrize("heads", [None, [], [[2, 0]], [[0, 0], [1, 3]], [[0]], [["a", 0]], [3]])
def test_checkpoints_without_heads_that_follow_the_sound_are_refused(tmp_path: Path, heads: Any) -> None:
    ids = {"decoder_start_token_id": 1, "eos_token_id": 0, "no_timestamps_token_id": 4}
    (tmp_path / "config.json").write_text('{"decoder_layers": 2, "decoder_attention_heads": 3}')
    generation = tmp_path / "generation_config.json"
    generation.write_text(json.dumps({**ids, "alignment_heads": heads}))
    with pytest.raises(InvalidRequestError, match="alignment_heads") as caught:
        SpeechTokens.of(str(tmp_path)).alignment(1, 1)
    assert caught.value.param == "timestamp_granularities[]"
    SpeechTokens.of.cache_clear()
    generation.write_text(json.dumps({**ids, "alignment_heads": [[0, 0], [1, 2]]}))
    assert SpeechTokens.of(str(tmp_path)).alignment(1, 1).heads == ((0, 0), (1, 2))


@pytest.mark.parametrize("width", [0, 8, -3, 65, 7.0, "7", True, None])
def test_checkpoints_whose_filter_has_no_middle_are_refused(width: Any) -> None:
    tokens = SpeechTokens(1, 0, 4, None, {}, {}, (), alignment_heads=((0, 0),), filter_width=width)
    with pytest.raises(InvalidRequestError, match=f"median_filter_width {width!r}") as caught:
        tokens.alignment(1, 1)
    assert caught.value.param == "timestamp_granularities[]"


def test_an_alignment_has_the_priority_of_its_tenant() -> None:
    submits: list[Submit] = []

    def submit(submit: Submit, _: object) -> None:
        submits.append(submit)
        raise RequestFailedError("seen")

    async def align() -> None:
        link = SimpleNamespace(failure=None, submit=submit, abort=lambda ids: None, wake_queue=None)
        live: Any = SimpleNamespace(add=lambda one: None, discard=lambda one: None, observer=None)
        nothing: Any = SimpleNamespace(tokenizer=None, config=None)
        pooler = Pooler(cast(Any, link), nothing, nothing, nothing, live, lambda priority: None)
        CURRENT_CALL.set(cast(Call, SimpleNamespace(priority=7)))
        with pytest.raises(RequestFailedError, match="seen"):
            await pooler.align([1, 2], (), AlignmentSpec(((0, 0),), 1, 1))

    asyncio.run(align())
    assert [one.priority for one in submits] == [7]


def test_an_alignment_is_no_usage_of_its_tenant() -> None:
    seen: list[RequestRecord] = []
    finished = Finished("a", FinishReason.STOP, result=PooledOutput(Buffer(bytes(4)), (1,), "float32"))
    stream = SimpleNamespace(is_over=True, take=lambda: [finished], engine=0, request_id="a")
    link = SimpleNamespace(failure=None, submit=lambda *_: stream, abort=lambda ids: None, wake_queue=None)
    observer = SimpleNamespace(on_finished=lambda record, _: seen.append(record))
    live: Any = SimpleNamespace(add=lambda one: None, discard=lambda one: None, observer=observer)

    async def align() -> None:
        nothing: Any = SimpleNamespace(tokenizer=None, config=None)
        pooler = Pooler(cast(Any, link), nothing, nothing, nothing, live, lambda priority: None)
        CURRENT_CALL.set(cast(Call, SimpleNamespace(priority=None)))  # fails if it is told of the end
        await pooler.align([1, 2], (), AlignmentSpec(((0, 0),), 1, 1))

    asyncio.run(align())
    assert [one.num_prompt_tokens for one in seen] == [2], "metrics count it"


def test_a_window_fills_the_rows_that_it_has_samples_for() -> None:
    assert all(num_spoken_rows(count / 16_000, 1500) == count // 320 for count in range(320, 40_000, 7))
    assert [num_spoken_rows(duration_s, 1500) for duration_s in (0.001, 0.58, 31.0)] == [1, 29, 1500]


@pytest.mark.parametrize(("num_tokens", "num_rows", "width"), [(1, 5, 3), (2, 3, 7), (7, 40, 7), (30, 90, 1)])
def test_alignments_equal_those_of_transformers(num_tokens: int, num_rows: int, width: int) -> None:
    random = np.random.default_rng(num_tokens)
    weights = np.exp(3 * random.normal(size=(4, num_tokens, num_rows))).astype(np.float32)
    found = first_rows(weights, width)
    values = torch.from_numpy(weights)
    normal = (values - values.mean(-2, keepdim=True)) / values.std(-2, keepdim=True, unbiased=False)
    smooth = _median_filter(torch.nan_to_num(normal)[None], width)[0].mean(0)
    texts, times = _dynamic_time_warping(-smooth.double().numpy())
    expected = times[np.pad(np.diff(texts), (1, 0), constant_values=1).astype(bool)]
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("num_heads", "num_tokens", "num_rows", "width", "num_threads"),
    [
        (1, 1, 1, 7, 1),
        (3, 2, 3, 7, 2),
        (2, 9, 4, 7, 1),
        (6, 21, 50, 7, 3),
        (4, 70, 133, 9, 2),
        (2, 5, 90, 63, 2),
        (3, 8, 40, 1, 1),
    ],
)
def test_native_alignments_have_the_bits_of_numpy(
    num_heads: int, num_tokens: int, num_rows: int, width: int, num_threads: int
) -> None:
    random = np.random.default_rng(num_tokens)
    weights = random.normal(size=(num_heads, num_tokens, num_rows)).astype(np.float32)
    weights[..., : num_rows // 2] = np.round(weights[..., : num_rows // 2])  # equal numbers, and equal sums
    native, plain = weights.copy(), weights.copy()
    found = time_warping.first_rows(native, width, load(), num_threads)
    assert found.tolist() == time_warping.first_rows(plain, width, None).tolist()
    assert native.tolist() == plain.tolist(), "the medians"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [8, 16])
def test_keys_of_sounds_are_read_back(dtype: torch.dtype, block_size: int) -> None:
    library = load()
    assert library is not None
    shape = AttentionShape(2, 2, 20, 1.0, is_causal=False)
    sizes: dict[str, Any] = {"num_items": 3, "num_keys": 21, "block_size": block_size, "dtype": dtype, "group": 0}
    cache = CrossCache(shape, 2, **sizes, library=library, device=torch.device("cpu"))
    expected = torch.randn(3, 21, 2, 20).to(dtype).float()
    for place, keys_SKH in enumerate(expected):
        slots, rows = cache.slots_of(place), Matrix.of(keys_SKH.flatten(1))
        step = StepArguments(num_rows=len(slots), groups=(GroupArguments * 1)(GroupArguments(slots=address(slots))))
        buffers = (buffer.data_ptr() for buffer in cache.layers[1])
        call = StoreKvArguments(rows, rows, *buffers, LayoutArguments.of(cache.layout), 1.0, 1.0)
        run(library, "store_kv", call, step=step)
    for place, keys_SKH in enumerate(expected):
        assert torch.equal(cache.keys(1, place), keys_SKH)
