"""Images through the process that decodes them: damaged and huge files, limits, and a process that is killed."""

import asyncio
import hashlib
import io
import os
import signal
import struct
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
from media_settings import media
from msgspec.structs import replace
from PIL import Image
from tiny_media import IMAGE, make_llava, picture
from tiny_models import VOCAB_SIZE

from octavo.frontend.media.download import MediaError
from octavo.frontend.media.images import pixels_of
from octavo.frontend.media.parts import MediaOptions, MediaSource, take_media
from octavo.frontend.media.processor import MediaProcessor
from octavo.frontend.media.prompts import MediaPrompts
from octavo.frontend.media.sources import FIELD, by_kind, sources_of
from octavo.frontend.media.wire import Job, Ready, Result
from octavo.frontend.metrics.call import CURRENT_CALL, Call
from octavo.frontend.model_files.facts import read_model_facts
from octavo.frontend.text.messages import MessageForm
from octavo.protocol.config import EngineConfig, ModelConfig, ResolvedConfig, resolve
from octavo.protocol.env import Env
from octavo.protocol.errors import ConfigError, InvalidRequestError, OverloadedError
from octavo.protocol.media import Kind


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llava(tmp_path_factory.mktemp("llava"))


def config_of(path: Path, **changes: Any) -> ResolvedConfig:
    model = ModelConfig(model=str(path), dtype="float32")
    resolved = resolve(EngineConfig(model=model), read_model_facts(model, Env.read()), device="cpu", num_cores=1)
    limits = {"max_image_pixels": 10_000, "max_live_bytes": 2**20, "processor_cache_bytes": 2**20, **changes}
    return replace(resolved, media=media(**limits))


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def run(
    path: Path,
    work: Callable[[MediaProcessor], Awaitable[None]],
    on_query: Callable[[bool], None] = lambda is_hit: None,
    **changes: Any,
) -> None:
    async def main() -> None:
        processor = MediaProcessor(config_of(path, **changes), on_query)
        try:
            await work(processor)
        finally:
            await processor.close()

    asyncio.run(main())


def test_an_empty_item_is_processed_once_without_limits(path: Path) -> None:
    queries: list[bool] = []

    async def work(processor: MediaProcessor) -> None:
        child = processor._processes["image"]
        with mock.patch.object(child, "ask", wraps=child.ask) as ask:
            first, second = await asyncio.gather(processor.empty("image"), processor.empty("image"))
        assert ask.await_count == 1
        assert first is second
        assert first.num_rows > 0

    run(path, work, queries.append, max_image_pixels=100, processor_cache_bytes=0)
    assert not queries


def test_files_and_pixels(path: Path) -> None:
    """What a file holds decides, not how it is stored; errors of one image leave the process alive."""
    image, queries = picture(1), list[bool]()

    async def work(processor: MediaProcessor) -> None:
        assert await processor.placeholder("image") == IMAGE
        expected = await processor.process("image", Job(image.tobytes(), image.size, {}))
        assert (expected.num_rows, expected.token_ids) == (25, [VOCAB_SIZE] * 25)
        for kind in ("PNG", "BMP"):
            assert (await processor.process("image", Job(encoded(image, kind), None, {}))).digest == expected.digest
        assert (await processor.process("image", Job(encoded(picture(2)), None, {}))).digest != expected.digest
        (process,) = processor._processes["image"]._idle
        clear = image.convert("RGBA")
        clear.putalpha(0)
        white = await processor.process("image", Job(encoded(Image.new("RGB", image.size, "white")), None, {}))
        assert (await processor.process("image", Job(encoded(clear), None, {}))).digest == white.digest
        frames = [picture(3), picture(4)]
        animated = encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True)
        first = await processor.process("image", Job(frames[0].tobytes(), frames[0].size, {}))
        assert (await processor.process("image", Job(animated, None, {}))).digest == first.digest
        for data, message in BAD_FILES:
            with pytest.raises(MediaError, match=message):
                await processor.process("image", Job(data, None, {}))
        with pytest.raises(MediaError, match="cannot be decoded"):
            await processor.process("image", Job(encoded(image), None, {"do_resize": "?", "size": 3}))
        assert processor._processes["image"]._idle == [process], "no image has ended it"
        with pytest.raises(MediaError, match=r"mm_processor_kwargs has sizes, .* knows .*crop_size"):
            await processor.process("image", Job(encoded(image), None, {"sizes": 3}))
        queries.clear()
        assert (await processor.process("image", Job(encoded(image), None, {}))).digest == expected.digest
        darker = await processor.process("image", Job(encoded(image), None, {"rescale_factor": 0.001}))
        assert (darker.digest != expected.digest, queries) == (True, [True, False])

    run(path, work, queries.append)


def test_arguments_of_the_server_that_are_unknown(path: Path) -> None:
    async def work(processor: MediaProcessor) -> None:
        with pytest.raises(ConfigError, match="mm_processor_kwargs has colour"):
            await processor.placeholder("image")

    run(path, work, processor_kwargs={"images_kwargs": {"colour": 1}})


def test_a_picture_is_read_like_its_file() -> None:
    """What is transparent becomes white, also in pictures that no file holds."""
    assert pixels_of(Image.new("RGBA", (2, 1), (9, 9, 9, 0)), 10) == (b"\xff" * 6, (2, 1))
    assert pixels_of(Image.new("L", (1, 1), 7), 10) == (b"\x07" * 3, (1, 1))


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _png(width: int, height: int, data: bytes) -> bytes:
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


_PICTURE = encoded(picture(1))
BAD_FILES = [
    (b"", "not an image"),
    (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image"),
    (b"%PDF-1.4", "not an image"),
    (_PICTURE[:60], "cannot be decoded"),
    (_PICTURE[: len(_PICTURE) // 2], "cannot be decoded"),
    (_PICTURE[:100] + b"\xff" * 50 + _PICTURE[150:], "cannot be decoded"),
    (_png(60_000, 60_000, zlib.compress(b"\0" * 1000)), "60000 x 60000 pixels"),
    (_png(101, 100, zlib.compress(b"\0" * 1000)), "more than 10000 pixels"),
    (_png(0, 0, b""), "not an image|cannot be decoded"),
]


def test_a_process_that_is_too_slow_or_dies_is_replaced(path: Path) -> None:
    image = picture(1)

    async def work(processor: MediaProcessor) -> None:
        await processor.placeholder("image")
        (first,) = processor._processes["image"]._idle
        os.kill(first.pid, signal.SIGSTOP)
        with pytest.raises(MediaError, match="media-decode-timeout"):
            await processor.process("image", Job(image.tobytes(), image.size, {}))
        assert first.returncode is not None
        assert (await processor.process("image", Job(image.tobytes(), image.size, {}))).num_rows == 25
        (second,) = processor._processes["image"]._idle
        os.kill(second.pid, signal.SIGKILL)
        await second.wait()
        assert (await processor.process("image", Job(picture(2).tobytes(), image.size, {}))).num_rows == 25

    # A stopped process takes any time; the others need a fraction of this.
    run(path, work, decode_timeout_s=5.0)


def test_an_item_that_is_processed_twice_at_once_is_kept_once(path: Path) -> None:
    """Its bytes count once too: two of three items fit."""
    queries = list[bool]()
    result = Result(tensors={"pixels": ("uint8", [100], bytes(100))})

    async def process(data: bytes, kind: type[Result]) -> Result:
        await asyncio.sleep(0)
        return result

    async def work(processor: MediaProcessor) -> None:
        with mock.patch.object(processor._processes["image"], "ask", process):
            for name in (b"1", b"2", b"3"):
                await asyncio.gather(*(processor.process("image", Job(name, None, {})) for _ in range(2)))
            queries.clear()
            for name in (b"3", b"2", b"1"):
                await processor.process("image", Job(name, None, {}))
        assert queries == [True, True, False]

    run(path, work, queries.append, processor_cache_bytes=250)


def test_a_processor_that_cannot_be_loaded(path: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(path / name)

    async def work(processor: MediaProcessor) -> None:
        with pytest.raises(ConfigError, match="cannot be loaded") as found:
            await processor.placeholder("image")
        assert "octavo[image]" in str(found.value.hint)

    run(tmp_path, work)


# long: one process serves all checks
def test_prompts(path: Path) -> None:
    """Rows are where the text had its placeholders; errors name the image; memory is counted while a prompt lives."""

    async def main() -> None:
        config = config_of(path, max_live_bytes=15_000)

        async def encode(text: str, *, add_special_tokens: bool) -> list[int]:
            ids: list[int] = []
            for index, piece in enumerate(text.split(IMAGE)):
                ids += [VOCAB_SIZE] * (index > 0) + [ord(letter) for letter in piece]
            return ids

        prompts = MediaPrompts(config, encode)
        try:
            await check(prompts)
        finally:
            await prompts.close()

    async def check(prompts: MediaPrompts) -> None:
        one, other = (MediaSource("image", encoded(picture(seed)), f"image {seed}") for seed in (1, 2))
        made = await prompts.of_text(f"a{IMAGE}bc{IMAGE}d", [one, other], adds_special_tokens=False)
        assert [item.spans for item in made.items] == [[(1, 25)], [(28, 25)]]
        assert len(made.token_ids) == 54
        num_bytes = made.items[0].num_bytes
        assert 2 * num_bytes < 15_000 < 3 * num_bytes
        tokens = [5, VOCAB_SIZE, 6, 6, VOCAB_SIZE, 7]
        with pytest.raises(OverloadedError, match="max-media-bytes"):
            await prompts.of_tokens(tokens, [one, other])
        digests = [item.digest for item in made.items]
        del made
        await check_uuids(prompts, one, digests[0])
        made = await prompts.of_tokens(tokens, [one, other])
        assert [item.digest for item in made.items] == digests
        del made
        for text, sources, message in (
            ("no mark", [one], "0 placeholders of images for 1 images"),
            (f"{IMAGE}{IMAGE}", [one], "2 placeholders of images for 1 images"),
            (IMAGE * 5, [one] * 5, "the limit is 4"),
            # Of three, not four: the last one is not waited for.
            (IMAGE * 4, [one, other, one, other], f"the media take {3 * num_bytes} bytes"),
            (
                IMAGE,
                [MediaSource("image", b"?", "messages[2].content[1]")],
                r"messages\[2\].content\[1\]: .* not an image",
            ),
            (IMAGE, [MediaSource("image", np.zeros((3, 3)), "x")], "x: .* expected a URL"),
            (IMAGE, [MediaSource("image", np.zeros((200, 200, 3), dtype=np.uint8), "x")], "200 x 200 pixels"),
            (IMAGE, [MediaSource("image", "http://10.0.0.1/a.png", "x")], "no public address"),
        ):
            with pytest.raises(InvalidRequestError, match=message) as found:
                await prompts.of_text(text, sources, adds_special_tokens=False)
            assert found.value.param

    async def check_uuids(prompts: MediaPrompts, source: MediaSource, digest: bytes) -> None:
        """A uuid replaces the contents, one for each tenant, salt and processing; a known one needs no image."""

        async def digest_of(value: Any, uuid: str, *options: Any) -> bytes:
            named = MediaSource("image", value, "content[1]", uuid)
            (item,) = (await prompts.of_tokens([VOCAB_SIZE], [named], MediaOptions(*options))).items
            return item.digest

        first = await digest_of(source.value, "a")
        assert await digest_of(None, "a") == await digest_of("http://10.0.0.1/never-read.png", "a") == first
        others = [
            await digest_of(source.value, *one) for one in (("b",), ("a", {}, "salt"), ("a", {"do_normalize": False}))
        ]
        assert len({digest, first, *others}) == 5
        for unknown in (("c",), ("a", {}, "another")):
            with pytest.raises(InvalidRequestError, match=r"content\[1\]: .* send the image"):
                await digest_of(None, *unknown)
        token = CURRENT_CALL.set(cast(Call, SimpleNamespace(owner="a tenant")))
        with pytest.raises(InvalidRequestError, match="send the image"):
            await digest_of(None, "a")
        assert await digest_of(source.value, "a") not in (first, digest)
        CURRENT_CALL.reset(token)
        prompts.clear_cache()
        with pytest.raises(InvalidRequestError, match="send the image"):
            await digest_of(None, "a")
        assert await digest_of(source.value, "a") == first

    asyncio.run(main())


def test_images_are_taken_out_of_messages() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:,x"}}, "b"]
    conversation = [{"role": "user", "content": parts}, {"role": "user", "content": "c"}]
    messages, sources = take_media(conversation, {"image": IMAGE})
    assert [(source.value, source.path) for source in sources] == [("data:,x", "messages[0].content[1]")]
    as_parts = MessageForm(wants_parts=True, wraps_strings=False, knows_developer=True).convert(messages)
    assert [part["type"] for part in as_parts[0]["content"]] == ["text", "image", "text"]
    as_text = MessageForm(wants_parts=False, wraps_strings=False, knows_developer=True).convert(messages)
    assert as_text[0]["content"] == f"a\n{IMAGE}\nb"
    known = {"type": "image_url", "image_url": None, "uuid": "a"}
    _, (source,) = take_media([{"role": "user", "content": [known]}], {"image": IMAGE})
    assert (source.value, source.uuid) == (None, "a")
    with pytest.raises(InvalidRequestError, match="uuid must be a string"):
        take_media([{"role": "user", "content": [{**known, "uuid": 3}]}], {"image": IMAGE})
    for part in ({"type": "image_url"}, {"type": "image_url", "image_url": {"url": ""}}):
        with pytest.raises(InvalidRequestError, match=r"messages\[0\].content\[0\].image_url"):
            take_media([{"role": "user", "content": [part]}], {"image": IMAGE})


def test_several_kinds_of_media_in_one_prompt(path: Path) -> None:
    """Items of a kind come in the order of its placeholders, and rows of each kind where its own tokens are."""
    config = config_of(path, limits={"image": 4, "audio": 1})
    assert config.model.media is not None
    facts = replace(config.model.media, token_ids={"image": VOCAB_SIZE, "audio": 7})

    async def encoded_text(text: str, *, add_special_tokens: bool) -> list[int]:
        return [{"i": VOCAB_SIZE, "a": 7}.get(letter, 5) for letter in text]

    prompts = MediaPrompts(replace(config, model=replace(config.model, media=facts)), encoded_text)
    processes = prompts.processor._processes
    marks: dict[Kind, tuple[str, int, int]] = {"image": (IMAGE, VOCAB_SIZE, 3), "audio": ("<a>", 7, 2)}

    def asked(kind: Kind) -> Any:
        _, token_id, num_rows = marks[kind]

        async def ask(data: bytes, answer: type[Result]) -> Result:
            return Result("", kind[0] * num_rows, [token_id] * num_rows, num_rows, hashlib.sha256(data).digest())

        return mock.patch.multiple(processes[kind], ask=ask, _ready=Ready(*marks[kind][:1], placeholder_id=token_id))

    def source(kind: Kind, number: int) -> MediaSource:
        value = bytes([number]) if kind == "image" else (np.zeros(number, dtype=np.float32), 16000)
        return MediaSource(kind, value, f"{kind} {number}")

    async def check() -> None:
        sources = [source("image", 1), source("image", 2), source("audio", 1)]
        expected = [("image", [(1, 3)]), ("audio", [(5, 2)]), ("image", [(8, 3)])]
        text = await prompts.of_text(f"-{IMAGE}-<a>-{IMAGE}", sources, adds_special_tokens=False)
        tokens = await prompts.of_tokens([5, VOCAB_SIZE, 5, 7, 5, VOCAB_SIZE], sources[::-1])
        assert [(item.kind, item.spans) for item in text.items] == expected
        assert [(item.kind, item.spans) for item in tokens.items] == expected
        assert [item.digest for item in tokens.items] == [text.items[place].digest for place in (2, 1, 0)]
        for wrong, message in (
            ([*sources, source("audio", 2)], "2 audio clips, and the limit is 1"),
            (sources[:2], "more placeholders than rows"),
            (sources[1:], "2 placeholders of images for 1 images"),
        ):
            with pytest.raises(InvalidRequestError, match=message):
                await prompts.of_tokens([5, VOCAB_SIZE, 5, 7, 5, VOCAB_SIZE], wrong)
        parts = [{"type": kind, kind: 1} for kind in ("audio", "image", "video")]
        messages, taken = await prompts.extract([{"role": "user", "content": parts[:2]}])
        assert [(one.kind, one.path) for one in taken] == [
            (k, f"messages[0].content[{n}]") for n, k in enumerate(("audio", "image"))
        ]
        assert [part.placeholder for part in messages[0]["content"]] == ["<a>", IMAGE]
        with pytest.raises(InvalidRequestError, match="reads images and audio clips and no videos") as caught:
            await prompts.extract([{"role": "user", "content": parts}])
        assert caught.value.param == "messages[0].content[2]"

    with asked("image"), asked("audio"):
        asyncio.run(check())


def test_conversations_without_images_start_no_process(path: Path) -> None:
    async def check() -> None:
        async def encode(text: str, *, add_special_tokens: bool) -> list[int]:
            raise AssertionError("there is nothing to tokenize")

        prompts = MediaPrompts(config_of(path), encode)
        messages = [
            {"role": "user", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": []}, "c"]},
        ]
        assert await prompts.extract(messages) == (messages, [])
        assert not prompts.processor._processes["image"]._idle

    asyncio.run(check())


def test_multi_modal_data() -> None:
    assert [source.path for source in sources_of({"image": [1, 2]}, None, ["image"])] == [
        f"{FIELD}['image'][{n}]" for n in (0, 1)
    ]
    assert sources_of({}, None, ["image"]) == []
    assert [source.uuid for source in sources_of({"image": [1, None]}, {"image": [None, "a"]}, ["image"])] == [
        None,
        "a",
    ]
    assert [(source.value, source.uuid) for source in sources_of({}, {"image": "a"}, ["image"])] == [(None, "a")]
    for uuids in ({"image": ["a"]}, {"image": ["a", 1]}, {"image": ["", "a"]}, {"audio": ["a", "b"]}):
        with pytest.raises(InvalidRequestError, match="multi_modal_uuids"):
            sources_of({"image": [1, 2]}, uuids, ["image"])
    several: Any = sources_of({"image": [1, 2], "audio": "a"}, {"audio": "b"}, ["image", "video", "audio"])
    assert [(one.kind, one.value, one.uuid) for one in several] == [
        ("image", 1, None),
        ("image", 2, None),
        ("audio", "a", "b"),
    ]
    assert sources_of(by_kind(several), None, ["image", "audio"]) == several
    with pytest.raises(InvalidRequestError, match="expected uuids by kind"):
        sources_of({"image": 1, "audio": 2}, ["a"], ["image", "audio"])
    for data in ({"video": 1}, [1]):
        with pytest.raises(InvalidRequestError, match=FIELD):
            sources_of(data, None, ["image"])


def test_models_without_a_tower_say_so(path: Path, tmp_path: Path) -> None:
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).symlink_to(path / name)
    text = (path / "config.json").read_text()
    for old, new, message in (
        ("LlavaForConditionalGeneration", "OtherForConditionalGeneration", "has no encoder for it"),
        ('"model_type": "llama"', '"model_type": "bloom"', "language model of type 'bloom'"),
        ('"image_token_index": 320', '"image_token_index": 321', "image_token_index is 321"),
    ):
        (tmp_path / "config.json").write_text(text.replace(old, new))
        with pytest.raises(ConfigError, match=message):
            read_model_facts(ModelConfig(model=str(tmp_path)), Env.read())


def test_a_tokenizer_that_does_not_know_the_placeholder_is_named(path: Path) -> None:
    async def process(data: bytes, kind: type[Result]) -> Result:
        return Result(replacement=IMAGE * 2, num_rows=2)

    async def check() -> None:
        async def encode(text: str, *, add_special_tokens: bool) -> list[int]:
            return [5, VOCAB_SIZE]

        prompts = MediaPrompts(config_of(path), encode)
        processes = prompts.processor._processes["image"]
        with (
            mock.patch.multiple(processes, ask=process, _ready=Ready(IMAGE)),
            pytest.raises(InvalidRequestError, match=f"does not make token {VOCAB_SIZE}"),
        ):
            await prompts.of_text(IMAGE, [MediaSource("image", b"", "content[2]")], adds_special_tokens=False)

    asyncio.run(check())


def test_an_image_that_is_too_large_is_named(path: Path) -> None:
    async def check() -> None:
        async def encode(text: str, *, add_special_tokens: bool) -> list[int]:
            return [VOCAB_SIZE] * text.count(IMAGE)

        prompts = MediaPrompts(config_of(path, max_item_tokens=24), encode)
        try:
            with pytest.raises(InvalidRequestError, match="image has 25 tokens, and the limit is 24") as caught:
                await prompts.of_text(
                    IMAGE, [MediaSource("image", picture(1), "content[2]")], adds_special_tokens=False
                )
            assert caught.value.param == "content[2]"
        finally:
            await prompts.close()

    asyncio.run(check())
