"""A tiny random Phi-4-multimodal, and what stands for its processor, which needs torchvision."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from peft_adapters import write_adapter
from tiny_media import CHAT_TEMPLATE, _tokenizer, _write
from tiny_models import MAX_POSITIONS, VOCAB_SIZE

from octavo.frontend.media.phi4 import Phi4Tiles, num_rows

IMAGE, AUDIO = "<|image|>", "<|audio|>"
TILES: dict[str, Any] = {"size": {"height": 24, "width": 24}, "patch_size": 6, "dynamic_hd": 4}
"""A tile is four rows of a prompt."""
_TEMPLATE = CHAT_TEMPLATE.replace("<image>{% else", f"{IMAGE}{{% elif part['type'] == 'audio' %}}{AUDIO}{{% else")


def make_phi4(directory: Path, **changes: Any) -> Path:
    """Write a Phi-4-multimodal. `changes` are of its configuration."""
    tokenizer = _tokenizer(AUDIO, image=IMAGE)
    config = transformers.Phi4MultimodalConfig(
        **{
            "hidden_size": 48,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_position_embeddings": MAX_POSITIONS,
            "original_max_position_embeddings": MAX_POSITIONS,
            "vocab_size": len(tokenizer),
            "eos_token_id": 1,
            "bos_token_id": 1,
            "pad_token_id": 1,
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 52,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "image_size": 24,
                "crop_size": 24,
                "patch_size": 6,
                "image_token_id": VOCAB_SIZE,
            },
            "audio_config": {
                "hidden_size": 32,
                "intermediate_size": 52,
                "num_blocks": 2,
                "num_attention_heads": 4,
                "ext_pw_out_channel": 32,
                "depthwise_separable_out_channel": 32,
                "nemo_conv_channels": 16,
                "bias_max_distance": 20,
                "audio_token_id": VOCAB_SIZE + 1,
            },
            **changes,
        }
    )
    tokenizer.chat_template = _TEMPLATE
    extractor = transformers.Phi4MultimodalFeatureExtractor().to_dict()
    settings = {**extractor, "image_processor_type": "Phi4MultimodalImageProcessor", **TILES}
    (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    return _write(directory, transformers.Phi4MultimodalForCausalLM(config), tokenizer)


def write_media_adapters(directory: Path) -> dict[str, transformers.PreTrainedModel]:
    """Write the adapters of images and clips beside a model; returns the model merged with each."""
    targets = r"model\.layers\.\d+\.(self_attn\.(qkv|o)_proj|mlp\.(gate_up|down)_proj)"
    merged = {}
    for seed, (kind, name) in enumerate((("image", "vision-lora"), ("audio", "speech-lora"))):
        rank = 20 + seed
        model = write_adapter(directory, directory / name, seed, r=rank, lora_alpha=rank, target_modules=targets)
        model.set_attn_implementation("eager")
        merged[kind] = model
    return merged


class Phi4Inputs:
    """Makes inputs as `Phi4MultimodalProcessor` does, with octavo's tiles and its own feature extractor."""

    def __init__(self, path: Path) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        self._tiles = Phi4Tiles.read(TILES)
        self._extractor = transformers.Phi4MultimodalFeatureExtractor()

    def __call__(
        self, text: str, images: Any = (), audio: Any = (), sampling_rate: int = 0, **_: Any
    ) -> transformers.BatchFeature:
        made = [self._tiles(image) for image in images or ()]
        found: dict[str, Any] = {}
        text = _expanded(text, IMAGE, [num_rows(one) for one in made])
        if audio:
            found = dict(self._extractor(audio, sampling_rate=sampling_rate, return_tensors="pt"))
            text = _expanded(text, AUDIO, found["audio_embed_sizes"].tolist())
        inputs = self.tokenizer(text, return_tensors="pt")
        most = max([one["image_pixel_values"].shape[1] for one in made], default=0)
        for name in made[0] if made else ():
            inputs[name] = torch.cat([_padded(torch.from_numpy(one[name]), most) for one in made])
        for name, value in found.items():
            inputs[name] = value
        return inputs


def _expanded(text: str, mark: str, counts: list[int]) -> str:
    first, *others = text.split(mark)
    return first + "".join(mark * count + piece for count, piece in zip(counts, others, strict=True))


def _padded(tensor: torch.Tensor, num_tiles: int) -> torch.Tensor:
    """Return a tensor with as many tiles as the largest image of a prompt has."""
    if tensor.ndim < 4:
        return tensor
    missing = num_tiles - tensor.shape[1]
    return torch.cat([tensor, tensor.new_ones(1, missing, *tensor.shape[2:])], dim=1)
