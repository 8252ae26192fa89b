"""Downloads for tests: chat, embedding and speech models, a speech synthesizer, and vLLM's source."""

import os
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

_SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


class ModelMissing(Exception):
    """A model or a source is not in the cache and could not be fetched."""


@cache
def default_model() -> Path:
    """Return the path of the GGUF file, fetching it if it is not in the cache.

    Raises:
        ModelMissing: the download failed; the message has the script's output and says how to run tests without a
            model.
    """
    return _fetched("fetch_default_model.py")


@cache
def embedding_model() -> Path:
    """Return the directory of all-MiniLM-L6-v2, fetching it if it is not in the cache.

    Raises:
        ModelMissing: as in `default_model`.
    """
    return _fetched("fetch_embedding_model.py")


@cache
def speech_model() -> Path:
    """Return the directory of Whisper tiny.en, fetching it if it is not in the cache.

    Raises:
        ModelMissing: as in `default_model`.
    """
    return _fetched("fetch_speech_model.py")


@cache
def speech(text: str) -> Path:
    """Return a WAV file in which espeak-ng speaks a text, fetching the synthesizer if it is not in the cache.

    Raises:
        ModelMissing: as in `default_model`.
    """
    return _fetched("make_speech.py", text)


@cache
def vllm_source() -> Path:
    """Return the directory of vLLM's source, fetching it if it is not in the cache.

    Raises:
        ModelMissing: as in `default_model`.
    """
    return _fetched("fetch_vllm_source.py")


def _fetched(script: str, *arguments: str) -> Path:
    environment = {**os.environ, "PYTHONPATH": str(_SCRIPTS)}
    command = [sys.executable, "-P", _SCRIPTS / script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:  # retry once: the network may have been unavailable for a moment
        time.sleep(5.0)
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise ModelMissing(f"{script} failed:\n{done.stderr}\nThe other tests: scripts/test -m 'not model'")
    return Path(done.stdout.strip())
