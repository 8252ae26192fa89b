"""Tiny random models that read audio clips as rows of their prompts, each with a real processor of `transformers`."""

from pathlib import Path
from typing import Any

import transformers
from tiny_media import CHAT_TEMPLATE, _tokenizer, _write
from tiny_models import MAX_POSITIONS, VOCAB_SIZE
from tiny_whisper import RATE, SECONDS
from transformers.models.voxtral.processing_voxtral import VoxtralProcessor

AUDIO = "<|AUDIO|>"
ENCODER: dict[str, Any] = {
    "d_model": 48,
    "encoder_layers": 2,
    "encoder_attention_heads": 3,
    "encoder_ffn_dim": 96,
    "num_mel_bins": 20,
    "max_source_positions": 50 * SECONDS,
}
"""Encoder whose windows are one second long, instead of the 30 seconds of real models."""
TEXT: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "eos_token_id": 1,
}


def template(mark: str) -> str:
    """Return a chat template with a mark for each audio clip."""
    return CHAT_TEMPLATE.replace("part['type'] == 'image'", "part['type'] == 'audio'").replace("<image>", mark)


def make_qwen2_audio(directory: Path) -> Path:
    """Write a Qwen2-Audio: two results of its encoder, each of two frames, are a row."""
    tokenizer = _tokenizer("<|audio_bos|>", "<|audio_eos|>", image=AUDIO)
    config = transformers.Qwen2AudioConfig(
        audio_config=transformers.Qwen2AudioEncoderConfig(**ENCODER),
        text_config=transformers.Qwen2Config(**TEXT, vocab_size=len(tokenizer)),
        audio_token_index=VOCAB_SIZE,
    )
    processor = transformers.Qwen2AudioProcessor(
        feature_extractor=transformers.WhisperFeatureExtractor(feature_size=20, chunk_length=SECONDS),
        tokenizer=tokenizer,
        chat_template=template(f"<|audio_bos|>{AUDIO}<|audio_eos|>"),
    )
    return _write(directory, transformers.Qwen2AudioForConditionalGeneration(config), processor)


def make_voxtral(directory: Path) -> Path:
    """Write a Voxtral: two results of its encoder, side by side, are a row; a clip is whole windows."""
    tokenizer = _tokenizer("[BEGIN_AUDIO]", "[TRANSCRIBE]", "[INST]", "[/INST]", image="[AUDIO]")
    own = {"num_mel_bins": 20, "max_source_positions": ENCODER["max_source_positions"]}
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3}
    config = transformers.VoxtralConfig(
        audio_config=transformers.VoxtralEncoderConfig(**own, **sizes),
        text_config=transformers.LlamaConfig(**TEXT, vocab_size=len(tokenizer), head_dim=16),
        audio_token_id=VOCAB_SIZE,
    )
    transformers.WhisperFeatureExtractor(feature_size=20, chunk_length=SECONDS).save_pretrained(directory)
    tokenizer.chat_template = template("[BEGIN_AUDIO][AUDIO]")
    return _write(directory, transformers.VoxtralForConditionalGeneration(config), tokenizer)


class VoxtralInputs:
    """Makes inputs like `VoxtralProcessor`, with its code for audio; its code for text needs `mistral-common`."""

    def __init__(self, path: Path) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        self.feature_extractor = transformers.WhisperFeatureExtractor.from_pretrained(path)

    def __call__(self, text: str, audio: Any = (), **_: Any) -> transformers.BatchFeature:
        made: Any = VoxtralProcessor
        arguments = {**made.audio_kwargs, "max_source_positions": 100 * SECONDS, "pad_to_multiple_of": RATE * SECONDS}
        first, *others = text.split("[AUDIO]")
        windows = [-(-len(one) // (RATE * SECONDS)) for one in audio]
        expanded = first + "".join("[AUDIO]" * 25 * num + piece for num, piece in zip(windows, others, strict=True))
        inputs = self.tokenizer(expanded, return_tensors="pt")
        if windows:
            inputs["input_features"] = made._retrieve_input_features(self, audio, **arguments)
        return inputs
