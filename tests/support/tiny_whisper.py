"""A tiny random Whisper with a real feature extractor and tokenizer of `transformers`, and audio clips."""

import io
import wave
from pathlib import Path
from typing import Any

import numpy as np
import tiny_models
import transformers
from tokenizers import AddedToken

RATE = 16_000
SECONDS = 1
"""Length of a window, instead of the 30 seconds of real models."""
LANGUAGES = ("en", "de", "fr")
NUM_TIMESTAMPS = 51
_MARKS = (
    "<|endoftext|>",
    "<|startoftranscript|>",
    *(f"<|{language}|>" for language in LANGUAGES),
    "<|translate|>",
    "<|transcribe|>",
    "<|startoflm|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
    *(f"<|{0.02 * step:.2f}|>" for step in range(NUM_TIMESTAMPS)),
)


def waveform(seed: int, seconds: float = 0.8) -> "np.ndarray[Any, np.dtype[np.float32]]":
    """Return noise at 16 kHz whose loudness and pitch change."""
    random = np.random.default_rng(seed)
    times = np.arange(int(seconds * RATE)) / RATE
    tones = [np.sin(2 * np.pi * frequency * times) for frequency in random.uniform(80, 4000, 5)]
    noise = random.normal(size=len(times))
    return (0.1 * sum(tones) * np.abs(np.sin(7 * times)) + 0.02 * noise).astype(np.float32)


def wav(samples: "np.ndarray[Any, np.dtype[np.float32]]", rate: int = RATE) -> bytes:
    """Return a WAV file of 16 bits."""
    file = io.BytesIO()
    with wave.open(file, "wb") as target:
        target.setnchannels(1)
        target.setsampwidth(2)
        target.setframerate(rate)
        target.writeframes((samples * 32767).astype("<i2").tobytes())
    return file.getvalue()


def make_whisper(directory: Path, **changes: Any) -> Path:
    """Write a Whisper of two layers each, whose windows are of one second. `changes` are of its configuration."""
    tokenizer = tiny_models._tokenizer()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in _MARKS])
    ids = {mark: tokenizer.token_to_id(mark) for mark in _MARKS}
    config = transformers.WhisperConfig(
        **{
            "vocab_size": tokenizer.get_vocab_size(),
            "d_model": 48,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 3,
            "decoder_attention_heads": 3,
            "encoder_ffn_dim": 96,
            "decoder_ffn_dim": 80,
            "num_mel_bins": 20,
            "max_source_positions": 50 * SECONDS,
            "max_target_positions": 96,
            "decoder_start_token_id": ids["<|startoftranscript|>"],
            "eos_token_id": ids["<|endoftext|>"],
            "pad_token_id": ids["<|endoftext|>"],
            "bos_token_id": ids["<|endoftext|>"],
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
            **changes,
        }
    )
    model = transformers.WhisperForConditionalGeneration(config)
    tiny_models._randomize(model, seed=11)
    rules: dict[str, Any] = dict(  # noqa: C408
        is_multilingual=True,
        lang_to_id={f"<|{language}|>": ids[f"<|{language}|>"] for language in LANGUAGES},
        task_to_id={"transcribe": ids["<|transcribe|>"], "translate": ids["<|translate|>"]},
        prev_sot_token_id=ids["<|startofprev|>"],
        no_timestamps_token_id=ids["<|notimestamps|>"],
        max_initial_timestamp_index=10,
        begin_suppress_tokens=[5, ids["<|endoftext|>"]],
        suppress_tokens=[7, 8, 9],
        max_length=96,
        return_timestamps=False,
        alignment_heads=[[0, 1], [1, 0], [1, 2]],
    )
    for name, value in rules.items():  # `update` omits settings that only Whisper has
        setattr(model.generation_config, name, value)
    model.generation_config._from_model_config = False
    model.save_pretrained(directory)
    transformers.WhisperFeatureExtractor(feature_size=20, chunk_length=SECONDS).save_pretrained(directory)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    ).save_pretrained(directory)
    return directory
