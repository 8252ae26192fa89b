"""Rows of media that callers have computed, in place of pixels: bits, caches, refusals, deaths, and over HTTP."""

import asyncio
import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny_audio_models
import tiny_media
import tiny_whisper
import torch
from engine_kills import assert_deaths_change_nothing
from given_media import image_inputs, rows_of_tower
from hung_steps import PLUGIN
from media_compare import GREEDY, prompt, result, run
from safetensors.torch import save
from servers import serve
from tiny_media import picture

from octavo import LLM, AsyncClient, SamplingParams
from octavo.frontend.media.without_torch import leave_out_videos
from octavo.protocol import restarts
from octavo.protocol.errors import ConfigError, InvalidRequestError

SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "enable_mm_embeds": True}
WIDTH = 48
SAMPLED = SamplingParams(temperature=0.9, seed=4, max_tokens=40, ignore_eos=True, logprobs=1)


class Case(NamedTuple):
    """A family."""

    make: Callable[[Path], Path]
    mark: str
    num_rows: Callable[[dict[str, Any]], int]
    """Of an image, by what the processor makes of it."""


def _squares(inputs: dict[str, Any]) -> int:
    return int(inputs["image_grid_thw"].prod()) // 4


CASES = {
    "llava": Case(tiny_media.make_llava, tiny_media.IMAGE, lambda inputs: 25),
    "qwen2_vl": Case(tiny_media.make_qwen2_vl, "<|image_pad|>", _squares),
    "qwen3_vl": Case(tiny_media.make_qwen3_vl, "<|image_pad|>", _squares),
    "gemma3": Case(tiny_media.make_gemma3, "<start_of_image>", lambda inputs: 9),
}


@pytest.fixture(autouse=True)
def _no_videos(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out_videos(monkeypatch.setattr)


def given(text: str, rows: Any, grid: Any = None, **others: Any) -> dict[str, Any]:
    image = rows if grid is None else {"image_embeds": rows, "image_grid_thw": grid}
    return {"prompt": text, "multi_modal_data": {"image": image}, **others}


@pytest.mark.parametrize("name", CASES)
def test_rows_of_the_own_tower_have_the_bits_of_pixels(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    path = case.make(tmp_path)
    shown, inputs = [], []
    for seed in (1, 2):
        shown.append(picture(seed))
        inputs.append(image_inputs(path, shown[-1]))
    rows = [rows_of_tower(path, one, case.num_rows(one)) for one in inputs]
    grids = [torch.from_numpy(one["image_grid_thw"]) if "image_grid_thw" in one else None for one in inputs]
    text = f"look at {case.mark} here, with some more words behind it"
    with LLM(str(path), **SETTINGS) as llm:
        pixels = [run(llm, prompt(text, one))[0] for one in shown]
        for _ in range(2):
            for one, own, grid in zip(pixels, rows, grids, strict=True):
                (output,) = run(llm, given(text, own, grid))
                assert output.prompt_token_ids == one.prompt_token_ids
                assert result(output) == result(one)
        assert result(pixels[0]) != result(pixels[1])
        both = f"{case.mark} and {case.mark}"
        several = torch.stack(rows)
        known = [grid for grid in grids if grid is not None]
        (output,) = run(llm, given(both, several, torch.cat(known) if known else None))
        assert result(output) == result(run(llm, prompt(both, *shown))[0])


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_media.make_llava(tmp_path_factory.mktemp("llava"))


def rows(count: int = 12, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def encoded(tensor: torch.Tensor) -> str:
    file = io.BytesIO()
    torch.save(tensor, file)
    return base64.b64encode(file.getvalue()).decode()


def chat(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "see"}, *parts]}]


def part(value: Any, **others: Any) -> dict[str, Any]:
    return {"type": "image_embeds", "image_embeds": value, **others}


def test_conversations_caches_and_refusals(llava: Path) -> None:
    with LLM(str(llava), **SETTINGS) as llm:

        def ask(*parts: Any) -> Any:
            return llm.chat(chat(*parts), GREEDY, use_tqdm=False)[0]

        first = ask(part(rows()))
        assert (first.prompt_token_ids or []).count(tiny_media.VOCAB_SIZE) == 12
        safe = base64.b64encode(save({"any": rows()})).decode()
        for same in (encoded(rows()), safe, rows()[None], {"image_embeds": encoded(rows())}):
            assert result(ask(part(same))) == result(first)
        assert result(ask(part(rows(seed=1)))) != result(first)
        named = ask(part(rows(seed=2), uuid="a"))
        assert result(ask(part(None, uuid="a"))) == result(named)
        pixels = {"type": "image", "image": picture(3), "uuid": "a"}
        assert result(ask(pixels)) != result(named), "a uuid of rows is not one of pixels"
        assert result(ask(part(None, uuid="a"))) == result(named)
        for value, message in (
            (rows()[:, :40], r"image_embeds must have the shape \(rows, 48\)"),
            (rows().long(), "must be float32, bfloat16 or float16"),
            (rows() / 0, "NaN or infinite"),
            ("AAAA", "neither a safetensors file"),
            ("?", "is not base64"),
            ({"image_embeds": rows(), "image_sizes": [3]}, "image_embeds has image_sizes"),
            ({"image_embeds": rows(), "image_grid_thw": [1, 4, 12]}, "takes no image_grid_thw"),
            (rows(20_000), "the limit is 16384"),
        ):
            with pytest.raises(InvalidRequestError, match=rf"messages\[0\].content\[1\].*{message}"):
                ask(part(value))
        with pytest.raises(InvalidRequestError, match="no audio clips"):
            ask({"type": "audio_embeds", "audio_embeds": rows()})


def test_a_grid_that_is_not_that_of_the_rows_is_refused(tmp_path: Path) -> None:
    path = tiny_media.make_qwen2_vl(tmp_path)
    text, wide = "<|image_pad|>", torch.randn(12, 96)
    with LLM(str(path), **SETTINGS) as llm:
        run(llm, given(text, wide, [[1, 6, 8]]))
        same = torch.randn(32, 96)
        for grid in ([1, 8, 16], [1, 4, 32]):  # other positions: the prefix cache must not mix them
            (cached,) = run(llm, given(text, same, grid))
            (fresh,) = run(llm, given(text, same, grid, cache_salt=str(grid)))
            assert result(cached) == result(fresh)
        for grid, message in (
            (None, "needs image_grid_thw"),
            ([1, 6, 10], "for 12 rows"),
            ([1, 5, 8], "squares of 2 x 2"),
            ([1, 0, 8], "for 12 rows"),
            ([2, 6, 4], "for 12 rows"),
        ):
            with pytest.raises(InvalidRequestError, match=message):
                run(llm, given(text, wide, grid))


def test_models_and_engines_that_take_none(tmp_path: Path, llava: Path) -> None:
    with LLM(str(llava), dtype="float32") as llm, pytest.raises(InvalidRequestError, match="--enable-mm-embeds"):
        run(llm, given(tiny_media.IMAGE, rows()))
    path = tiny_media.make_mistral3(tmp_path)
    with LLM(str(path), **SETTINGS) as llm, pytest.raises(InvalidRequestError, match="marks between the rows"):
        run(llm, given("[IMG]", rows()))
    with pytest.raises(ConfigError, match="WhisperForConditionalGeneration has no rows of media"):
        LLM(str(tiny_whisper.make_whisper(tmp_path / "whisper")), dtype="float32", enable_mm_embeds=True)


def test_audio_in_prompts(tmp_path: Path) -> None:
    path = tiny_audio_models.make_qwen2_audio(tmp_path)
    text = f"hear {tiny_audio_models.AUDIO} now"
    with LLM(str(path), **SETTINGS, max_audio_seconds=0.5) as llm:  # of files and samples, not of rows
        outputs = [
            run(llm, {"prompt": text, "multi_modal_data": {"audio": audio}})[0]
            for audio in (rows(9), {"audio_embeds": rows(9)}, [rows(9)])
        ]
        assert (outputs[0].prompt_token_ids or []).count(tiny_media.VOCAB_SIZE) == 9
        assert result(outputs[0]) == result(outputs[1]) == result(outputs[2])
        run(llm, {"prompt": text, "multi_modal_data": {"audio": torch.zeros(8_000)}})  # samples


def test_deaths_of_the_worker_and_the_core(llava: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 0.01)
    monkeypatch.setenv("OCTAVO_CHECK", "1")

    async def main() -> None:
        async with await AsyncClient.launch(str(llava), **SETTINGS, logits_processors=[PLUGIN]) as client:
            await assert_deaths_change_nothing(
                client, lambda seed: given(f"request {tiny_media.IMAGE}.", rows(20, seed % 3)), SAMPLED, 4
            )

    asyncio.run(main())


def test_over_http(llava: Path) -> None:
    with serve(llava, "--dtype", "float32", "--enable-mm-embeds", "--served-model-name", "tiny") as server:
        server.wait_until_ready()

        def ask(value: Any) -> Any:
            body = {"model": "tiny", "messages": chat(part(value)), "temperature": 0, "max_tokens": 4}
            return server.post("/v1/chat/completions", body).json()

        first, other, again = (ask(encoded(rows(seed=seed))) for seed in (0, 1, 0))
        assert first["choices"] == again["choices"] != other["choices"]
        assert first["usage"] == other["usage"]
        error = ask(encoded(rows()[:, :40]))["error"]
        assert error["param"] == "messages[0].content[1]"
        assert "image_embeds must have the shape (rows, 48)" in error["message"]
