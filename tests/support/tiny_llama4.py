"""A tiny random Llama 4 that reads images, and what stands for its processor, which needs torchvision."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_media import _TEXT, CHAT_TEMPLATE, IMAGE, _tokenizer
from tiny_models import VOCAB_SIZE, _randomize

from octavo.frontend.media.llama4 import Llama4Tiles, rows_per_tile, text_of

MARK, ROW = "<|image|>", "<|patch|>"
TILES: dict[str, Any] = {"size": {"height": 24, "width": 24}, "max_patches": 4}
_PATCHES = {"patch_size": 6, "pixel_shuffle_ratio": 0.5}
_MARKS = ("<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>")


def make_llama4(directory: Path, **changes: Any) -> Path:
    """Write a Llama 4: tiles of 16 patches and a class token, of which four patches are a row; chunks of 20 positions.

    The first layer attends within chunks, and the second one, a mixture of experts, does not rotate. `changes`: of the
    language model.
    """
    tokenizer = _tokenizer(MARK, *_MARKS, image=ROW)
    text = transformers.Llama4TextConfig(
        **{
            **_TEXT,
            "vocab_size": len(tokenizer),
            "intermediate_size": 40,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0],
            "attention_chunk_size": 20,
            "floor_scale": 16,
            "attn_scale": 0.5,
            "pad_token_id": 0,
            **changes,
        }
    )
    vision = transformers.Llama4VisionConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=24,
        projector_input_dim=40,
        projector_output_dim=40,
        vision_output_dim=40,
        **_PATCHES,
    )
    config = transformers.Llama4Config(
        text_config=text,
        vision_config=vision,
        image_token_index=VOCAB_SIZE,
        boi_token_index=VOCAB_SIZE + 2,
        eoi_token_index=VOCAB_SIZE + 3,
    )
    model = transformers.Llama4ForConditionalGeneration(config)
    _randomize(model, seed=11)
    for part in (model, tokenizer):
        part.save_pretrained(directory)
    settings = {"image_processor_type": "Llama4ImageProcessorFast", "processor_class": "Llama4Processor", **TILES}
    (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    (directory / "processor_config.json").write_text(json.dumps({"processor_class": "Llama4Processor", **_PATCHES}))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE.replace(IMAGE, MARK))
    return directory


class Llama4Inputs:
    """Makes inputs as `Llama4Processor` does, with octavo's tiles."""

    def __init__(self, path: Path) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        self._tiles = Llama4Tiles.read(TILES)

    def __call__(self, text: str, images: Any = (), **_: Any) -> transformers.BatchFeature:
        made = [self._tiles(image) for image in images or ()]
        num_rows = rows_per_tile(TILES["size"]["height"], _PATCHES)
        first, *others = text.split(MARK)
        for (_, grid), piece in zip(made, others, strict=True):
            first += text_of(grid, num_rows) + piece
        inputs = self.tokenizer(first, return_tensors="pt")
        if made:
            inputs["pixel_values"] = torch.cat([torch.from_numpy(tiles) for tiles, _ in made])
        return inputs
