"""Random damage to files of images, videos and clips: each is read or refused, and what reads them goes on."""

import asyncio
import io
import random
import struct
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import soundfile
from media_settings import media
from msgspec.structs import replace
from tiny_audio_models import make_qwen2_audio
from tiny_media import make_llava, make_qwen25_vl, picture
from tiny_videos import clip, clip_file, sound_file
from tiny_whisper import RATE, make_whisper, waveform

from octavo.frontend.audio.process import FEATURES
from octavo.frontend.audio.prompts import AudioPrompts
from octavo.frontend.audio.wire import FILE, AudioJob, AudioProcessorJob, AudioResult
from octavo.frontend.media.download import MediaError
from octavo.frontend.media.processor import MediaProcessor
from octavo.frontend.media.wire import Job, Result, VideoJob
from octavo.frontend.model_files.facts import read_model_facts
from octavo.protocol.config import EngineConfig, ModelConfig, ResolvedConfig, resolve
from octavo.protocol.env import Env

MOST_GROWTH = 64 * 2**20
"""Memory that a process may keep after damaged files: far more than caches, far less than leaks of thousands."""


def config_of(path: Path) -> ResolvedConfig:
    model = ModelConfig(model=str(path), dtype="float32")
    resolved = resolve(EngineConfig(model=model), read_model_facts(model, Env.read()), device="cpu", num_cores=1)
    return replace(resolved, media=media(max_image_pixels=10_000, max_live_bytes=2**20))


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Return a file with one to four damages: bits, lost, repeated and foreign bytes, numbers with extreme values."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        # Half of the damages are in the first 64 bytes, where most formats have their sizes.
        start = rng.randrange(min(len(changed), 64) if rng.random() < 0.5 else len(changed) or 1)
        length = rng.randint(1, 32)
        match rng.randrange(6):
            case 0:
                changed[start : start + 1] = bytes([changed[start] ^ 1 << rng.randrange(8)]) if changed else b""
            case 1:
                del changed[start:]
            case 2:
                del changed[start : start + length]
            case 3:
                changed[start:start] = changed[start : start + length] * rng.randint(1, 50)
            case 4:
                changed[start : start + length] = rng.randbytes(length)
            case _:
                number = rng.choice([0, 1, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1])
                changed[start : start + 4] = struct.pack(rng.choice([">I", "<I"]), number)
        if not changed:
            break
    return bytes(changed)


def memory_of(pid: int) -> int:
    pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(pages) * 4096


async def survive(
    read: Callable[[bytes], Awaitable[object]], files: Iterable[bytes], pid: Callable[[], int], rounds: int
) -> tuple[int, int]:
    """Return how many damaged files were read, and how many were refused."""
    rng, num_read, num_refused = random.Random(0), 0, 0
    whole = list(files)
    expected = [await read(data) for data in whole]
    before = memory_of(pid()), pid()
    for number in range(rounds):
        try:
            await read(damaged(rng, whole[number % len(whole)]))
            num_read += 1
        except MediaError:
            num_refused += 1
    assert [await read(data) for data in whole] == expected, "whole files are read as before"
    if pid() == before[1]:  # one that takes too long, or crashes a decoder, costs its process
        assert memory_of(pid()) - before[0] < MOST_GROWTH
    return num_read, num_refused


@pytest.fixture
def rounds(request: pytest.FixtureRequest) -> int:
    return 5_000 if request.config.getoption("--long") else 300


def test_damaged_images(tmp_path: Path, rounds: int) -> None:
    files = []
    for kind, options in (
        ("PNG", {}),
        ("JPEG", {}),
        ("JPEG", {"progressive": True}),
        ("WEBP", {}),
        ("GIF", {}),
        ("BMP", {}),
    ):
        file = io.BytesIO()
        picture(1).save(file, kind, **options)
        files.append(file.getvalue())

    async def main() -> None:
        processor = MediaProcessor(config_of(make_llava(tmp_path)))

        async def read(data: bytes) -> object:
            return (await processor.process("image", Job(data, None, {}))).digest

        try:
            num_read, num_refused = await survive(
                read, files, lambda: processor._processes["image"]._idle[0].pid, rounds
            )
        finally:
            await processor.close()
        assert min(num_read, num_refused) > rounds // 10, "damage of both kinds"

    asyncio.run(main())


def odd_videos() -> list[tuple[bytes, str | int]]:
    """Return files, each with the number of its frames that are read, or with why it is refused."""
    small, mpeg = clip(1, 3, 24, 24), "mpeg2video"
    stream, smaller, huge = [clip_file(clip(1, 3, side, side), 25, mpeg, "mpegts") for side in (48, 24, 256)]
    whole, gif = clip_file(small), clip_file(small, 4, "gif", "gif")
    mp4 = clip_file(small, 4, "mpeg4", "mp4")
    at = mp4.index(b"mvhd") + 20
    return [
        (clip_file(clip(1, 1, 1, 1), 4, "mpeg4", "mp4"), 1),
        (clip_file(clip(1, 3, 17, 31), 4, "libvpx", "webm"), 3),
        (clip_file(small, times_ms=[-500, -250, 0]), 3),
        (clip_file(small, 4, "mpeg4", "mp4", [-500, -250, 0]), 1),  # an edit list leaves out the others
        (clip_file(small, times_ms=[0, 10, 900]), 3),
        (mp4[:at] + b"\xff\xff\xff\xff" + mp4[at + 4 :], 3),  # says that it lasts for weeks
        (stream + smaller, 5),
        (smaller + stream, 5),
        (whole[: len(whole) // 2], 1),
        (smaller + huge, "256 x 256 pixels"),
        (huge, "256 x 256 pixels"),
        (gif[:6] + b"\xff\xff\xff\xff" + gif[10:], "pixels"),
        (gif[:13], "a frame is damaged"),
        (mp4[: len(mp4) // 2], "it is not a video"),
        (clip_file(small[:0]), "it is not a video"),
        (clip_file(small, 0.01), "longer than 20 seconds"),
        (sound_file(has_cover=False), "no pictures"),
        (sound_file(has_cover=True), "no pictures"),
        (clip_file(small, 4, "snow", "avi"), "are in snow"),
        (b"", "it is not a video"),
        (sound_files()[0], "it is not a video"),
        *[
            (text.replace("FILE", "http://127.0.0.1:1/a.mp4").encode(), "it is not a video")
            for text in (
                "ffconcat version 1.0\nfile FILE\n",
                "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nFILE\n#EXT-X-ENDLIST\n",
                '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011"><BaseURL>FILE</BaseURL></MPD>',
                "v=0\no=- 0 0 IN IP4 127.0.0.1\nc=IN IP4 127.0.0.1\nm=video 9 RTP/AVP 96\n",
            )
        ],
    ]


def test_damaged_and_odd_videos(tmp_path: Path, rounds: int) -> None:
    small = clip(2, 3, 24, 24)
    files = [
        clip_file(small, 25, codec, container)
        for codec, container in (
            ("ffv1", "matroska"),
            ("mpeg4", "mp4"),
            ("libx264", "mp4"),
            ("libvpx-vp9", "webm"),
            ("mpeg4", "avi"),
            ("mpeg2video", "mpegts"),
            ("gif", "gif"),
        )
    ]

    async def main() -> None:
        processor = MediaProcessor(config_of(make_qwen25_vl(tmp_path)))

        async def read(data: bytes) -> Result:
            return await processor.process("video", VideoJob(data, None, 0.0, [], 0, {}))

        async def digest(data: bytes) -> object:
            return (await read(data)).digest

        try:
            for data, expected in odd_videos():
                if isinstance(expected, int):
                    assert (await read(data)).grid[0] == (expected + 1) // 2
                else:
                    with pytest.raises(MediaError, match=expected):
                        await read(data)
            num_read, num_refused = await survive(
                digest, files, lambda: processor._processes["video"]._idle[0].pid, rounds // 2
            )
        finally:
            await processor.close()
        assert min(num_read, num_refused) > rounds // 20, "damage of both kinds"

    asyncio.run(main())


def sound_files() -> list[bytes]:
    files = []
    for kind, subtype in (
        ("WAV", "PCM_16"),
        ("WAV", "IMA_ADPCM"),
        ("FLAC", "PCM_16"),
        ("OGG", "VORBIS"),
        ("MP3", None),
    ):
        file = io.BytesIO()
        soundfile.write(file, waveform(1, 0.3), RATE, format=kind, subtype=subtype)
        files.append(file.getvalue())
    return files


def test_damaged_sounds_of_prompts(tmp_path: Path, rounds: int) -> None:
    async def main() -> None:
        processor = MediaProcessor(config_of(make_qwen2_audio(tmp_path)))

        async def read(data: bytes) -> object:
            return (await processor.process("audio", AudioProcessorJob(data, FILE))).digest

        try:
            num_read, num_refused = await survive(
                read, sound_files(), lambda: processor._processes["audio"]._idle[0].pid, rounds // 3
            )
        finally:
            await processor.close()
        assert min(num_read, num_refused) > rounds // 60, "damage of both kinds"

    asyncio.run(main())


def test_damaged_sounds(tmp_path: Path, rounds: int) -> None:
    async def main() -> None:
        processes = AudioPrompts(config_of(make_whisper(tmp_path)), _no_text)._processes

        async def read(data: bytes) -> object:
            answer = await processes.ask(msgspec.msgpack.encode(AudioJob(data, 0, 0)), AudioResult)
            if answer.fault:
                raise MediaError(answer.fault)
            for window in answer.windows:
                assert np.isfinite(np.frombuffer(window.data, np.float32)).all(), FEATURES
            return [window.digest for window in answer.windows]

        try:
            num_read, num_refused = await survive(read, sound_files(), lambda: processes._idle[0].pid, rounds)
        finally:
            await processes.close()
        assert min(num_read, num_refused) > rounds // 20, "damage of both kinds"

    asyncio.run(main())


async def _no_text(text: str, *, add_special_tokens: bool) -> list[int]:
    raise AssertionError("there is nothing to tokenize")
