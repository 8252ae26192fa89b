"""Drivers that transcribe files with each engine, in its own Python: `drivers.py SYSTEM OPTIONS` answers JSON lines.

Imports nothing of octavo at the top: the Python of another engine runs this file too.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

Measure = Callable[[list[str]], dict[str, Any]]


async def octavo(options: dict[str, Any]) -> None:
    """Transcribe through the routes of an application, all files concurrently."""
    import httpx

    from octavo import AsyncClient, ServerConfig, create_app

    async with await AsyncClient.launch(options["model"], **options["settings"]) as client:
        transport = httpx.ASGITransport(app=create_app(client, ServerConfig()))
        async with httpx.AsyncClient(transport=transport, base_url="http://octavo", timeout=600) as http:

            async def transcribe(data: bytes) -> str:
                form = {"response_format": "verbose_json" if options["timestamps"] else "json"}
                answer = await http.post("/v1/audio/transcriptions", files={"file": ("a.wav", data)}, data=form)
                return str(answer.raise_for_status().json()["text"])

            print(json.dumps({}), flush=True)
            while line := await asyncio.to_thread(sys.stdin.readline):
                start = time.perf_counter()
                files = [Path(path).read_bytes() for path in json.loads(line)]  # noqa: ASYNC240
                texts = await asyncio.gather(*map(transcribe, files))
                print(json.dumps({"elapsed_s": time.perf_counter() - start, "texts": texts}), flush=True)


def faster_whisper(options: dict[str, Any]) -> Measure:
    """Transcribe with the library. Several files are done in both of its ways, and the faster one counts.

    The ways: one file after another with all threads each, or all at the same time with one thread each.
    """
    from faster_whisper import WhisperModel

    threads, kind = options["threads"], options["compute_type"]
    whole = WhisperModel(options["model"], device="cpu", compute_type=kind, cpu_threads=threads)
    shared = WhisperModel(options["model"], device="cpu", compute_type=kind, cpu_threads=1, num_workers=threads)

    def transcribe(model: Any, path: str) -> str:
        segments, _ = model.transcribe(
            path,
            language="en",
            beam_size=1,
            temperature=0.0,
            without_timestamps=not options["timestamps"],
            condition_on_previous_text=False,
        )
        return " ".join(segment.text.strip() for segment in segments)

    def measure(files: list[str]) -> dict[str, Any]:
        start = time.perf_counter()
        texts = [transcribe(whole, path) for path in files]
        elapsed_s = time.perf_counter() - start
        if len(files) > 1:
            with ThreadPoolExecutor(threads) as pool:
                start = time.perf_counter()
                texts = list(pool.map(lambda path: transcribe(shared, path), files))
                elapsed_s = min(elapsed_s, time.perf_counter() - start)
        return {"elapsed_s": elapsed_s, "texts": texts}

    return measure


def main() -> None:
    """Load an engine, and transcribe each list of files."""
    system, options = sys.argv[1], json.loads(sys.argv[2])
    if system == "octavo":
        asyncio.run(octavo(options))
        return
    measure = faster_whisper(options)
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
