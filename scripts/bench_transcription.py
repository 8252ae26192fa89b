"""Transcription of one file, and of several at once, compared with faster-whisper: Whisper tiny.en on spoken texts.

All engines stay loaded and idle while one of them is measured. They take turns for some rounds, so the ratios compare
the same minutes. Each has as many threads as there are cores. Files are about 28 seconds long, one window each, or
several times as long (`--texts`). Each round has its own files with a different loudness, so nothing that an engine
caches helps it. All decode greedily, without timestamps unless `--timestamps`. octavo is measured through its HTTP
routes, without a network; faster-whisper as a library.

    scripts/bench_transcription --faster-whisper-python VENV/bin/python
    scripts/bench_transcription --faster-whisper-python VENV/bin/python --timestamps --texts 4
"""

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import wave
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import fetch_speech_model
import make_speech
import numpy as np
from bench_child import BenchChild
from bench_report import report, write

_DRIVERS = Path(__file__).parent / "bench_transcription_parts" / "drivers.py"
_OCTAVO: dict[str, dict[str, Any]] = {
    "octavo-float32": {"dtype": "float32"},
    "octavo-bfloat16": {"dtype": "bfloat16"},
    "octavo-w8a8": {"dtype": "bfloat16", "quantization": "w8a8"},
}
"""Settings of each variant of octavo."""
_LIBRARY = {"faster-whisper-float32": "float32", "faster-whisper-int8": "int8"}
SYSTEMS = (*_OCTAVO, *_LIBRARY)
_SENTENCES = (
    "On the first cold day of April the ferry was late, and the harbour was full of people.",
    "The old man closed his window, put on his coat, and went down to the harbour to look at the ships.",
    "There were three of them, and the first one was painted green.",
    "It had come from the north with a load of timber.",
    "The second one was waiting for the tide, and its captain was asleep.",
    "In the evening the wind turned to the west, and all of them left before the moon came up.",
    "He stayed on the wall for another hour.",
)


class Clips:
    """Audio files of spoken texts; each has the sentences in another order and another loudness."""

    def __init__(self, folder: Path, num_files: int, num_texts: int) -> None:
        self._folder = folder
        step = math.factorial(len(_SENTENCES)) // (num_files * num_texts)
        orders = itertools.islice(itertools.permutations(_SENTENCES), 0, None, step)
        self._speech = [
            make_speech.speak(" ".join(itertools.chain.from_iterable(itertools.islice(orders, num_texts))))
            for _ in range(num_files)
        ]
        self._num_made = 0

    def make(self, count: int) -> tuple[list[str], float]:
        """Return new files, and their total length in seconds."""
        paths, seconds = [], 0.0
        for source in self._speech[:count]:
            with wave.open(str(source)) as file:
                parameters, samples = file.getparams(), np.frombuffer(file.readframes(file.getnframes()), np.int16)
            self._num_made += 1
            path = self._folder / f"{self._num_made}.wav"
            with wave.open(str(path), "wb") as file:
                file.setparams(parameters)
                file.writeframes((samples * (1 - 0.002 * self._num_made)).astype(np.int16).tobytes())
            paths.append(str(path))
            seconds += len(samples) / parameters.framerate
        return paths, seconds


def main() -> None:
    """Measure the chosen engines and print a table."""
    args = _arguments()
    with ExitStack() as stack:
        clips = Clips(Path(stack.enter_context(tempfile.TemporaryDirectory())), args.files, args.texts)
        engines = [_open(name, args, stack) for name in args.systems.split(",")]
        for engine in engines:
            engine.measure(clips.make(1)[0])  # warm-up: the first file loads code
        results = []
        for count in (1, args.files):
            rounds = [_round(engines, *clips.make(count)) for _ in range(args.rounds)]
            for engine in engines:
                speeds = [speed[engine.name] for speed in rounds]
                results.append({"system": engine.name, "files": count, "times_real_time": statistics.median(speeds)})
    for row in results:
        ratios = {
            name: row["times_real_time"] / other["times_real_time"]
            for name in _LIBRARY
            for other in results
            if (other["system"], other["files"]) == (name, row["files"])
        }
        shown = "  ".join(f"{ratio:.2f} x {name}" for name, ratio in ratios.items())
        print(
            f"{row['system']:24} {row['files']:2} files  {row['times_real_time']:7.1f} x real time  "
            f"(factor {1 / row['times_real_time']:.4f})  {shown}"
        )
    write(report("bench_transcription", {"model": fetch_speech_model.NAME, "rounds": args.rounds}, results), args.json)


def _round(engines: list[BenchChild], files: list[str], seconds: float) -> dict[str, float]:
    """Return the seconds of audio that each engine transcribes in one second."""
    answers = {engine.name: engine.measure(files) for engine in engines}
    texts = {name: answer["texts"] for name, answer in answers.items()}
    words = {name: [len(text.split()) for text in of_engine] for name, of_engine in texts.items()}
    if any(count < 10 for counts in words.values() for count in counts):
        raise SystemExit(f"an engine has not understood a file: {texts}")
    if "octavo-float32" in texts and "faster-whisper-float32" in texts:
        pairs = list(zip(texts["octavo-float32"], texts["faster-whisper-float32"], strict=True))
        print(f"{sum(own == other for own, other in pairs)} of {len(pairs)} texts are equal in float32")
    return {name: seconds / answer["elapsed_s"] for name, answer in answers.items()}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench_transcription", description=(__doc__ or "").split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--systems", default=",".join(SYSTEMS), help=f"separated by commas: {', '.join(SYSTEMS)}")
    parser.add_argument("--files", type=int, default=8, help="number of files that are transcribed concurrently")
    parser.add_argument(
        "--texts",
        type=int,
        default=1,
        help="number of texts that are spoken in each file; default: 1, about 28 seconds",
    )
    parser.add_argument("--timestamps", action="store_true", help="transcribe with the times of segments")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--faster-whisper-python", help="Python with faster-whisper")
    parser.add_argument("--json", help="write the results here")
    args = parser.parse_args()
    if unknown := set(args.systems.split(",")) - set(SYSTEMS):
        parser.error(f"unknown systems: {', '.join(sorted(unknown))}")
    if set(args.systems.split(",")) & set(_LIBRARY) and not args.faster_whisper_python:
        parser.error("--faster-whisper-python is missing: a Python with faster-whisper from PyPI")
    return args


def _child(name: str, python: str, driver: str, options: dict[str, Any]) -> BenchChild:
    return BenchChild(
        name, [python, "-P", str(_DRIVERS), driver, json.dumps(options)], {**os.environ, "HF_HUB_OFFLINE": "1"}
    )


def _open(name: str, args: argparse.Namespace, stack: ExitStack) -> BenchChild:
    model, threads = fetch_speech_model.fetch(), len(os.sched_getaffinity(0))
    shared = {"timestamps": args.timestamps}
    if name in _OCTAVO:
        engine = _child(name, sys.executable, "octavo", {"model": str(model), "settings": _OCTAVO[name]} | shared)
    else:
        packed = str(model / fetch_speech_model.PACKED)
        options = {"model": packed, "compute_type": _LIBRARY[name], "threads": threads, **shared}
        engine = _child(name, args.faster_whisper_python, "faster_whisper", options)
    stack.callback(engine.close)
    return engine


if __name__ == "__main__":
    main()
