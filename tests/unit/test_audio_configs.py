"""Configurations of models that read audio, as their files were published: values from memory, sizes as in papers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.frontend.audio.voxtral import rows_per_window
from octavo.frontend.model_files.media import split_config
from octavo.protocol.config import ModelConfig
from octavo.protocol.config.facts import MediaFacts
from octavo.protocol.config.media import _counts, _limits
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.vision.registry import build_towers
from octavo.worker_proc.models.vision.tower import TowerSpec
from octavo.worker_proc.parallel.placement import Placement

QWEN2_AUDIO: dict[str, Any] = {
    "architectures": ["Qwen2AudioForConditionalGeneration"],
    "audio_config": {
        "activation_dropout": 0.0,
        "activation_function": "gelu",
        "attention_dropout": 0.0,
        "d_model": 1280,
        "dropout": 0.0,
        "encoder_attention_heads": 20,
        "encoder_ffn_dim": 5120,
        "encoder_layerdrop": 0.0,
        "encoder_layers": 32,
        "init_std": 0.02,
        "max_source_positions": 1500,
        "model_type": "qwen2_audio_encoder",
        "num_mel_bins": 128,
        "scale_embedding": False,
    },
    "audio_token_index": 151646,
    "ignore_index": -100,
    "model_type": "qwen2_audio",
    "text_config": {
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "intermediate_size": 11008,
        "max_position_embeddings": 8192,
        "model_type": "qwen2",
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000,
        "sliding_window": 32768,
        "use_mrope": False,
        "vocab_size": 156032,
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0",
    "vocab_size": 156032,
}
VOXTRAL: dict[str, Any] = {
    "architectures": ["VoxtralForConditionalGeneration"],
    "audio_config": {
        "activation_dropout": 0.0,
        "activation_function": "gelu",
        "attention_dropout": 0.0,
        "dropout": 0.0,
        "head_dim": 64,
        "hidden_size": 1280,
        "initializer_range": 0.02,
        "intermediate_size": 5120,
        "layerdrop": 0.0,
        "max_source_positions": 1500,
        "model_type": "voxtral_encoder",
        "num_attention_heads": 20,
        "num_hidden_layers": 32,
        "num_key_value_heads": 20,
        "num_mel_bins": 128,
        "scale_embedding": False,
        "vocab_size": 51866,
    },
    "audio_token_id": 24,
    "hidden_size": 3072,
    "model_type": "voxtral",
    "projector_hidden_act": "gelu",
    "text_config": {
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 30,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000000.0,
        "vocab_size": 131072,
    },
    "torch_dtype": "bfloat16",
    "vocab_size": 131072,
}


@pytest.mark.parametrize(
    ("given", "limits"),
    [
        (None, {"audio": 64}),
        ('{"audio": 2}', {"audio": 2}),
        ({"audio": {"count": 3, "length": 9}}, {"audio": 3}),
        ("audio=2", {"audio": 2}),
        ("audio=5,image=0", {"audio": 5}),
    ],
)
def test_limits(given: Any, limits: dict[str, int]) -> None:
    media = MediaFacts(architecture="A", hf_config={}, token_ids={"audio": 1}, processor_path="")
    assert _limits(_counts(given), media) == limits
    for wrong in ("audio=", "audio=2;", "image=1", '{"audio": 65}', "[2]"):
        with pytest.raises(ConfigError, match="limit_mm_per_prompt"):
            _limits(_counts(wrong), media)


@pytest.mark.parametrize(
    ("published", "width", "rows", "millions"), [(QWEN2_AUDIO, 4096, 0, 642), (VOXTRAL, 3072, 375, 662)]
)
def test_published_configurations(published: dict[str, Any], width: int, rows: int, millions: int) -> None:
    """The encoder has the parameters of Whisper's large one, and those of its projector."""
    architecture = published["architectures"][0]
    text, _, media = split_config(published, architecture, Path("files"), ModelConfig(model="files"))
    assert media is not None
    assert (text["hidden_size"], list(media.token_ids), rows_per_window(media)) == (width, ["audio"], rows)
    assert not media.has_any_size, "windows are encoded one by one"
    placement = Placement(torch.bfloat16, torch.device("meta"))
    spec = TowerSpec(facts=media, width=width, placement=placement, library=None, max_item_tokens=10_000)
    tower = build_towers(spec)["audio"]
    assert sum(one.numel() for _, one in tower.named_parameters()) // 10**6 == millions
    for changes, message in (
        ({"audio_config": {**published["audio_config"], "window": 3}}, "'window' .* in 'audio_config' is unknown"),
        ({"audio_config": {**published["audio_config"], "scale_embedding": True}}, "'scale_embedding' .* is True"),
        ({"audio_adapter": 3}, "'audio_adapter' .* is unknown"),
    ):
        _, _, changed = split_config({**published, **changes}, architecture, Path("files"), ModelConfig(model="files"))
        assert changed is not None
        with pytest.raises(ConfigError, match=message):
            build_towers(TowerSpec(changed, width, placement, None, 10_000))
