"""Tiny random models that read sounds as rows of their prompts, each with a real processor of `transformers`."""

from pathlib import Path
from typing import Any

import transformers
from tiny_media import CHAT_TEMPLATE, _tokenizer, _write
from tiny_models import MAX_POSITIONS, VOCAB_SIZE
from tiny_whisper import SECONDS

SOUND = "<|AUDIO|>"
ENCODER: dict[str, Any] = {
    "d_model": 48,
    "encoder_layers": 2,
    "encoder_attention_heads": 3,
    "encoder_ffn_dim": 96,
    "num_mel_bins": 20,
    "max_source_positions": 50 * SECONDS,
}
"""Its windows are of one second, in place of the 30 seconds of real models."""
TEXT: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "eos_token_id": 1,
}


def make_qwen2_audio(directory: Path) -> Path:
    """Write a Qwen2-Audio: two results of its encoder, each of two frames, are a row."""
    tokenizer = _tokenizer("<|audio_bos|>", "<|audio_eos|>", image=SOUND)
    config = transformers.Qwen2AudioConfig(
        audio_config=transformers.Qwen2AudioEncoderConfig(**ENCODER),
        text_config=transformers.Qwen2Config(**TEXT, vocab_size=len(tokenizer)),
        audio_token_index=VOCAB_SIZE,
    )
    processor = transformers.Qwen2AudioProcessor(
        feature_extractor=transformers.WhisperFeatureExtractor(feature_size=20, chunk_length=SECONDS),
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE.replace("part['type'] == 'image'", "part['type'] == 'audio'").replace(
            "<image>", f"<|audio_bos|>{SOUND}<|audio_eos|>"
        ),
    )
    return _write(directory, transformers.Qwen2AudioForConditionalGeneration(config), processor)
