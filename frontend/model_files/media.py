"""Models that read media: splits `config.json` into the language model's part and the facts for the other processes."""

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from octavo.frontend.model_files.alignment import alignment_heads
from octavo.frontend.model_files.dual_encoder import DUAL_ENCODERS, split_dual_encoder
from octavo.protocol.adapters import adapter_files
from octavo.protocol.config import ModelConfig
from octavo.protocol.config.facts import MediaFacts
from octavo.protocol.errors import ConfigError
from octavo.protocol.media import Kind
from octavo.protocol.peft_lora import read_peft_lora

ARCHITECTURES = (
    "Gemma3ForConditionalGeneration",
    "InternVLForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Phi4MultimodalForCausalLM",
    "Idefics3ForConditionalGeneration",
    "SmolVLMForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
)
"""Architectures whose vision towers octavo implements."""
VIDEO_ARCHITECTURES = tuple(name for name in ARCHITECTURES if name.startswith(("Qwen", "LlavaOnevision", "SmolVLM")))
"""Those of them that read videos, too."""
AUDIO_ARCHITECTURES = (
    "Qwen2AudioForConditionalGeneration",
    "VoxtralForConditionalGeneration",
    "Phi4MultimodalForCausalLM",
)
"""Architectures whose audio encoders octavo implements, and whose audio clips become rows of prompts."""
_PALIGEMMA = "PaliGemmaForConditionalGeneration"
RETRIEVERS = {"ColPaliForRetrieval": _PALIGEMMA, "ColQwen2ForRetrieval": "Qwen2VLForConditionalGeneration"}
"""Architectures with a vector for each token of texts and images, and the model that each of them contains."""
SPEECH_ARCHITECTURES = ("WhisperForConditionalGeneration",)
"""Decoders that attend to audio."""

_TEXT_ARCHITECTURES = {
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "mistral": "MistralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
}
"""Architecture by the `model_type` of the language model."""
_TEXT_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma": {
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "num_hidden_layers": 18,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "vocab_size": 257152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
    },
    "gemma3_text": {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
    },
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
    },
    "llama4_text": {
        "hidden_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 202048,
        "num_local_experts": 16,
        "max_position_embeddings": 131072,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
    },
    "qwen2": {
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
    },
    "phi3": {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 200064,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
    },
    "mistral": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "max_position_embeddings": 131072,
    },
}
"""Values that `transformers` omits from files: sizes that are the defaults of the language model's class."""
_ADAPTERS: dict[Kind, str] = {"image": "vision-lora", "audio": "speech-lora"}
"""Folders of Phi-4-multimodal's adapters, next to its weights; prompts with both media use that of images."""
_OF_ALL = ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings")
"""Keys of the complete model that also apply to its language model."""
_NOT_OF_TEXT = {
    *("_flash_attn_2_enabled", "neftune_noise_alpha", "perceiver_config", "pixel_shuffle_factor", "use_resampler"),
    *("qk_layer_norms", "vision_config", "num_image_tokens"),
}
"""Keys of `text_config` in SmolVLM files that have no effect there."""


_FLAT_KINDS = {"qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text", "phi4_multimodal": "phi3"}
"""Models whose files have the language model's keys next to `vision_config`, and the language model's `model_type`."""


def _flat_text_config(hf_config: dict[str, Any]) -> dict[str, Any]:
    of_whole = {"vision_config", "audio_config", "architectures", "transformers_version"}
    text = {key: value for key, value in hf_config.items() if key not in of_whole and not key.startswith("vision_")}
    return {**text, "model_type": _FLAT_KINDS[hf_config["model_type"]]}


def split_config(
    hf_config: dict[str, Any], architecture: str, home: Path, config: ModelConfig, *, is_inside: bool = False
) -> tuple[dict[str, Any], str, MediaFacts | None]:
    """Return the language model's configuration and architecture, and the facts of media (`None` for a text model).

    `is_inside`: the model is a part of a retriever.

    Raises:
        ConfigError: the model reads media, and the model or its language model is not supported.
    """
    if architecture in SPEECH_ARCHITECTURES:
        return _split_speech(hf_config, architecture, home, config)
    if architecture in DUAL_ENCODERS:
        own, media = split_dual_encoder(hf_config, architecture, home, config)
        return own, architecture, media
    if architecture in RETRIEVERS:
        return _split_retriever(hf_config, architecture, home, config)
    text = hf_config.get("text_config")
    if text is None and hf_config.get("model_type") in _FLAT_KINDS and "vision_config" in hf_config:
        text = _flat_text_config(hf_config)
    if not isinstance(text, dict) or not any(key in hf_config for key in ("vision_config", "audio_config")):
        return hf_config, architecture, None
    _reject_model(architecture, config, is_inside=is_inside)
    kind = str(text.get("model_type"))
    kinds = [one for one in _TEXT_ARCHITECTURES if (one == "gemma") == (architecture == _PALIGEMMA)]
    if kind not in kinds:
        raise ConfigError(
            f"{architecture} with a language model of type {kind!r} is not supported",
            hint=f"its text_config needs a model_type among {', '.join(kinds)}",
        )
    _reject_unsupported(text, architecture)
    eps = {} if architecture.startswith("Llava") else {"rms_norm_eps": 1e-5}
    defaults = {**eps, **_TEXT_DEFAULTS.get(kind, {})}
    given = {key: value for key, value in text.items() if value is not None and key not in _NOT_OF_TEXT}
    own = {**defaults, **given}
    own |= {key: hf_config[key] for key in _OF_ALL if hf_config.get(key) is not None}
    if kind == "mistral" and ("sliding_window" in text or architecture == "Mistral3ForConditionalGeneration"):
        own["sliding_window"] = text.get("sliding_window")  # null means none; a missing key, Mistral 7B's default
    if kind.startswith("qwen3_vl"):  # files may omit what is always true
        key = "rope_parameters" if "rope_parameters" in own else "rope_scaling"
        own[key] = {"mrope_section": [24, 20, 20], **own.get(key, {}), "mrope_interleaved": True}
    if kind == "gemma":  # PaliGemma: all tokens belong to the prompt, which attends in both directions
        own["use_bidirectional_attention"] = True
    if kind == "qwen3_vl_moe_text":
        own["norm_topk_prob"] = True
    media = MediaFacts(
        architecture=architecture,
        hf_config=hf_config,
        token_ids={one: _token_id(hf_config, one, own.get("vocab_size", 0)) for one in _kinds(architecture, hf_config)},
        processor_path=str(home),
        has_any_size=_has_any_size(hf_config, architecture),
        deeper_rows=_num_deeper(hf_config) if kind.startswith("qwen3_vl") else 0,
        both_ways_rows=int(hf_config.get("mm_tokens_per_image") or 256) if kind == "gemma3_text" else 0,
        marks_sounds=architecture == "Phi4MultimodalForCausalLM",
    )
    return own, _TEXT_ARCHITECTURES[kind], _with_adapters(media, home)


def _split_retriever(
    hf_config: dict[str, Any], architecture: str, home: Path, config: ModelConfig
) -> tuple[dict[str, Any], str, MediaFacts | None]:
    """Return the configuration of a model that reads images and computes a vector for each token.

    Raises:
        ConfigError: a section or a size is missing, or the contained model is not supported.
    """
    inner, width = hf_config.get("vlm_config"), hf_config.get("embedding_dim", 128)
    if not isinstance(inner, dict) or type(width) is not int or width < 1:
        raise ConfigError(f"config.json: {architecture} needs vlm_config, and a positive embedding_dim")
    inner = {**inner, **{key: hf_config[key] for key in ("dtype", "torch_dtype") if hf_config.get(key) is not None}}
    config = replace(config, runner="auto" if config.runner == "pooling" else config.runner)
    own, text_architecture, media = split_config(inner, RETRIEVERS[architecture], home, config, is_inside=True)
    assert media is not None, "a model that reads images"
    named = text_architecture.replace("ForCausalLM", "ForRetrieval")
    return {**own, "embedding_dim": width}, named, replace(media, architecture=architecture)


def _kinds(architecture: str, hf_config: dict[str, Any]) -> list[Kind]:
    """Return the kinds of media that a model reads."""
    kinds: list[Kind] = []
    if architecture in ARCHITECTURES or architecture == _PALIGEMMA:
        kinds.append("image")
    is_named = "video_token_id" in hf_config or "video_token_index" in hf_config
    if architecture in VIDEO_ARCHITECTURES and (is_named or architecture.startswith("SmolVLM")):
        kinds.append("video")
    if architecture in AUDIO_ARCHITECTURES:
        kinds.append("audio")
    return kinds


def _reject_model(architecture: str, config: ModelConfig, *, is_inside: bool) -> None:
    """Raise `ConfigError` for models without an encoder in octavo, and for settings that no such model supports."""
    if architecture not in (*ARCHITECTURES, *AUDIO_ARCHITECTURES) and not is_inside:
        raise ConfigError(
            f"{architecture} reads images or audio, and octavo has no encoder for it",
            hint=f"use a text model, or one of {', '.join(dict.fromkeys((*ARCHITECTURES, *AUDIO_ARCHITECTURES)))}",
        )
    if config.model_impl == "transformers" or config.runner == "pooling":
        setting = "--model-impl transformers" if config.model_impl == "transformers" else "--runner pooling"
        raise ConfigError(f"{setting}: {architecture} reads media", hint="leave it out")


def _reject_unsupported(text: dict[str, Any], architecture: str) -> None:
    """Raise `ConfigError` for variants of an architecture that octavo does not compute."""
    if text.get("qk_layer_norms") or text.get("use_resampler"):
        raise ConfigError(f"{architecture} with qk_layer_norms or use_resampler is not supported")


def _with_adapters(media: MediaFacts, home: Path) -> MediaFacts:
    """Return facts with the adapters for media in the model's files.

    Raises:
        ConfigError: an adapter cannot be served.
    """
    if media.architecture != "Phi4MultimodalForCausalLM":
        return media
    found = {kind: home / name for kind, name in _ADAPTERS.items() if (home / name).is_dir()}
    ranks = []
    for directory in found.values():
        settings_file, _ = adapter_files(directory)
        ranks.append(read_peft_lora(settings_file.read_bytes(), str(settings_file)).max_rank)
    adapters = {kind: str(directory) for kind, directory in found.items()}
    return replace(media, adapters=adapters, adapter_rank=max(ranks, default=0))


def _token_id(hf_config: dict[str, Any], kind: Kind, vocab_size: int) -> int:
    """Return the placeholder token of a row of media.

    Raises:
        ConfigError: the file names none.
    """
    if hf_config.get("model_type") == "phi4_multimodal":
        section, usual = ("vision_config", 200010) if kind == "image" else ("audio_config", 200011)
        hf_config = {f"{kind}_token_id": usual, **(hf_config.get(section) or {})}
    if kind == "video" and hf_config.get("model_type") == "smolvlm":
        kind = "image"  # frames are images
    key = f"{kind}_token_index"
    token_id = hf_config.get(f"{kind}_token_id", hf_config.get(key))
    if type(token_id) is not int or not 0 <= token_id < vocab_size:
        raise ConfigError(f"config.json: {key} is {token_id!r}; expected a token of the vocabulary")
    return token_id


def _has_any_size(hf_config: dict[str, Any], architecture: str) -> bool:
    """Return whether images of any size are encoded."""
    if (vision := hf_config.get("vision_config")) is None:
        return False
    return architecture.startswith(("Qwen", "Mistral3")) or vision.get("model_type") == "pixtral"


def _num_deeper(hf_config: dict[str, Any]) -> int:
    """Return the number of intermediate tower outputs (DeepStack) that accompany each row of an image in Qwen3-VL."""
    return len(hf_config["vision_config"].get("deepstack_visual_indexes", [8, 16, 24]))


def _split_speech(
    hf_config: dict[str, Any], architecture: str, home: Path, config: ModelConfig
) -> tuple[dict[str, Any], str, MediaFacts]:
    """Return the configuration of a decoder that attends to audio, with the keys of decoders.

    Raises:
        ConfigError: a size is missing, or a setting does not apply to such a model.
    """
    if config.model_impl == "transformers" or config.runner == "pooling":
        setting = "--model-impl transformers" if config.model_impl == "transformers" else "--runner pooling"
        raise ConfigError(f"{setting}: {architecture} transcribes audio", hint="leave it out")
    names = {
        "d_model": "hidden_size",
        "decoder_layers": "num_hidden_layers",
        "decoder_attention_heads": "num_attention_heads",
        "max_target_positions": "max_position_embeddings",
    }
    kept = ("vocab_size", "decoder_ffn_dim", "activation_function", "scale_embedding", "eos_token_id", *_OF_ALL)
    sizes = (*names, "vocab_size", "decoder_ffn_dim", "max_source_positions", "num_mel_bins")
    for key in (*sizes, "encoder_layers", "encoder_attention_heads", "encoder_ffn_dim"):
        if type(hf_config.get(key)) is not int or hf_config[key] < 1:
            raise ConfigError(f"config.json: {key} is {hf_config.get(key)!r}; expected a positive integer")
    own = {ours: hf_config[theirs] for theirs, ours in names.items()}
    own |= {key: hf_config[key] for key in kept if hf_config.get(key) is not None}
    media = MediaFacts(
        architecture=architecture,
        hf_config=hf_config,
        token_ids={"audio": None},
        processor_path=str(home),
        attended_rows=hf_config["max_source_positions"],
        aligned_layers=sorted({layer for layer, _ in alignment_heads(home)}),
    )
    return own, architecture, media
