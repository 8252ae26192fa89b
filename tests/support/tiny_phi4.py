"""A tiny random Phi-4-multimodal, and what stands for its processor, which needs torchvision."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_media import CHAT_TEMPLATE, _tokenizer, _write
from tiny_models import MAX_POSITIONS, VOCAB_SIZE

from octavo.frontend.media.phi4 import TileProcessor, num_rows

IMAGE, SOUND = "<|image|>", "<|audio|>"
TILES: dict[str, Any] = {"size": {"height": 24, "width": 24}, "patch_size": 6, "dynamic_hd": 4}
"""A tile is four rows of a prompt."""
_TEMPLATE = CHAT_TEMPLATE.replace("<image>{% else", f"{IMAGE}{{% elif part['type'] == 'audio' %}}{SOUND}{{% else")


def make_phi4(directory: Path, **changes: Any) -> Path:
    """Write a Phi-4-multimodal. `changes` are of its configuration."""
    tokenizer = _tokenizer(SOUND, image=IMAGE)
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
    settings = {"image_processor_type": "Phi4MultimodalImageProcessor", **TILES}
    (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    return _write(directory, transformers.Phi4MultimodalForCausalLM(config), tokenizer)


class Phi4Inputs:
    """Makes inputs as `Phi4MultimodalProcessor` does, with octavo's tiles."""

    def __init__(self, path: Path) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        self._tiles = TileProcessor.read(TILES)

    def __call__(self, text: str, images: Any = (), **_: Any) -> transformers.BatchFeature:
        made = [self._tiles(image) for image in images or ()]
        first, *others = text.split(IMAGE)
        text = first + "".join(IMAGE * num_rows(one) + piece for one, piece in zip(made, others, strict=True))
        inputs = self.tokenizer(text, return_tensors="pt")
        most = max([one["image_pixel_values"].shape[1] for one in made], default=0)
        for name in made[0] if made else ():
            padded = [_padded(torch.from_numpy(one[name]), most) for one in made]
            inputs[name] = torch.cat(padded)
        return inputs


def _padded(tensor: torch.Tensor, num_tiles: int) -> torch.Tensor:
    """Return a tensor with as many tiles as the largest image of a prompt has."""
    if tensor.ndim < 4:
        return tensor
    missing = num_tiles - tensor.shape[1]
    return torch.cat([tensor, tensor.new_ones(1, missing, *tensor.shape[2:])], dim=1)
